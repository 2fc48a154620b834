import json
from pathlib import Path

import numpy as np
import pytest

from compiled_llm.planning.traces import Load, TraceRequest, at_rate, popularity, read_trace, thinned, with_cv

GOOD = {"arrival": 3.0, "prompt_tokens": 5, "output_tokens": 2, "model": "m"}


def test_a_file_is_read_sorted_from_its_first_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(GOOD | {"arrival": at, "cached_tokens": 4}) for at in (9, 3.5)) + "\n\n")
    assert read_trace(path, ["m"]) == [TraceRequest(0.0, 5, 2, "m", 4), TraceRequest(5.5, 5, 2, "m", 4)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("[1]", "must be an object"),
        ("{", "Expecting property name"),
        (json.dumps(GOOD | {"size": 1}), "given ['size']"),
        ('{"model": "m"}', "lacks arrival, prompt_tokens, output_tokens"),
        (json.dumps(GOOD | {"arrival": -1}), "arrival must be a number of seconds from 0 on, given -1"),
        ('{"arrival": NaN, "prompt_tokens": 5, "output_tokens": 2, "model": "m"}', "given nan"),
        (json.dumps(GOOD | {"prompt_tokens": True}), "prompt_tokens must be a whole number of at least 1, given True"),
        (json.dumps(GOOD | {"output_tokens": 0}), "output_tokens must be a whole number of at least 1, given 0"),
        (json.dumps(GOOD | {"cached_tokens": 5}), "cached_tokens must be below prompt_tokens"),
        (json.dumps(GOOD | {"model": "x"}), "model must be one of m, given 'x'"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{row}\n")
    with pytest.raises(ValueError, match="line 2") as error:
        read_trace(path, ["m"])
    assert said in str(error.value)


def test_a_file_without_rows_or_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, said in (("empty", "has no row"), ("nothing", "No such file")):
        with pytest.raises(ValueError, match=said):
            read_trace(tmp_path / name, ["m"])


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_intervals_have_the_burstiness_that_was_asked_for(cv: float) -> None:
    trace = Load({"m": 50.0}, 400, cv=cv).draw()
    intervals = np.diff([row.arrival for row in trace])
    assert len(trace) == pytest.approx(20_000, rel=0.1)
    assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.1)
    assert np.mean([row.prompt_tokens for row in trace]) == pytest.approx(512, rel=0.02)


def test_bursts_change_the_rate_and_keep_the_number() -> None:
    steady, bursts = (Load({"m": 50.0}, 400, bursts=bursts).draw() for bursts in (False, True))
    assert len(bursts) == len(steady)
    counts = [np.histogram([row.arrival for row in one], 80, (0, 400))[0] for one in (steady, bursts)]
    assert counts[1].std() > 3 * counts[0].std()


def test_the_same_seed_draws_the_same() -> None:
    assert Load({"m": 5.0}, 20, seed=1).draw() == Load({"m": 5.0}, 20, seed=1).draw() != Load({"m": 5.0}, 20).draw()


def test_other_rates_and_burstiness_keep_the_requests() -> None:
    trace = Load(popularity(["a", "b"], 20.0, 1.0), 100).draw()
    assert sum(row.model == "a" for row in trace) == pytest.approx(2 * sum(row.model == "b" for row in trace), rel=0.1)
    assert at_rate(trace, 2)[-1].arrival == trace[-1].arrival / 2
    bursty = with_cv(trace, 5.0)
    lengths = [sorted((row.model, row.prompt_tokens, row.output_tokens) for row in one) for one in (trace, bursty)]
    assert lengths[0] == lengths[1]
    assert bursty[-1].arrival == pytest.approx(trace[-1].arrival, rel=0.1)
    assert len(thinned(trace, 4)) == pytest.approx(len(trace) / 4, rel=0.2)
