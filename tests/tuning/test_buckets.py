"""No set of buckets does better than the proposal, and an engine has the padding that it predicts."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.commands.tune.buckets import main
from compiled_llm.tuning import buckets
from compiled_llm.worker import compiled_steps
from compiled_llm.worker.step_buffers import StepBuffers


def trace_of(steps: list[dict], decode: list[int], tokens: list[int], **changes: Any) -> dict[str, Any]:
    """A trace whose buckets all have a time: 10 ms and 1 ms a token. Compiling takes a second."""
    names = [f"decode_{size}" for size in decode] + [f"tokens_{size}" for size in tokens]
    trace = {
        "format": 1,
        "buckets": {"decode": decode, "tokens": tokens},
        "max_num_seqs": decode[-1],
        "max_num_batched_tokens": tokens[-1],
        "compile_seconds": dict.fromkeys(names, 1.0),
        "step_seconds": {name: 0.010 + 0.001 * int(name.split("_")[1]) for name in names},
        "steps": steps,
        "model": "demo",
        "machine": {"cpu": "one"},
    }
    return trace | changes


def step(kind: str, num_tokens: int, count: int, num_requests: int | None = None) -> dict[str, Any]:
    requests = num_tokens if kind == "decode" else num_requests or 1
    return {"kind": kind, "num_requests": requests, "num_tokens": num_tokens, "count": count, "seconds": 0.1 * count}


def cost(work: Any, chosen: tuple[int, ...], runs_per_start: float) -> float:
    """Computed in another way: each step in the smallest bucket that holds it, and each bucket compiled."""
    step_time = work.step_time()
    steps = sum(count * step_time(min(s for s in chosen if s >= size)) for size, count in work.counts.items())
    return runs_per_start * steps + len(chosen) * work.compile_seconds


SIZES = st.integers(1, 24)
SECONDS = st.floats(0.001, 2.0)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.dictionaries(SIZES, st.integers(1, 40), min_size=1, max_size=6),
    times=st.dictionaries(SIZES, SECONDS, min_size=1, max_size=3),
    compiled=SECONDS,
    spare=st.integers(0, 3),
    max_buckets=st.integers(1, 5),
    runs_per_start=st.sampled_from([0.1, 1.0, 7.0]),
)
def test_no_set_of_sizes_costs_less(
    counts: dict, times: dict, compiled: float, spare: int, max_buckets: int, runs_per_start: float
) -> None:
    """Against every set of the candidates, and against every set with other sizes among them."""
    capacity = max(counts) + spare
    work = buckets.Work(Counter(counts), times, dict.fromkeys(times, 1), compiled, capacity, [], 0.0)
    candidates = work.candidates()
    chosen = buckets.best_buckets(
        work.counts, candidates, work.step_time(), work.compile_seconds, max_buckets, runs_per_start
    )
    assert chosen == sorted(set(chosen))
    assert chosen[-1] == capacity
    assert len(chosen) <= max_buckets
    found = cost(work, tuple(chosen), runs_per_start)
    below = candidates[:-1]
    best = min(
        cost(work, (*subset, capacity), runs_per_start)
        for number in range(max_buckets)
        for subset in itertools.combinations(below, number)
    )
    assert found == pytest.approx(best)
    for size in range(1, capacity):  # a size without a step never helps
        others = sorted({*chosen, size} - {capacity})
        for subset in itertools.combinations(others, min(len(others), max_buckets - 1)):
            assert cost(work, (*subset, capacity), runs_per_start) >= found - 1e-9


@given(times=st.dictionaries(SIZES, SECONDS, min_size=1, max_size=5), data=st.data())
def test_times_never_fall_and_are_the_nearest_that_do_not(times: dict[int, float], data: st.DataObject) -> None:
    """Against the known formula: of all runs that end at or after a size, the least; of their starts, the greatest."""
    weights = {size: data.draw(st.integers(1, 50)) for size in times}
    fitted = buckets.never_falling(times, weights)
    sizes = sorted(times)

    def mean(run: list[int]) -> float:
        return sum(weights[size] * times[size] for size in run) / sum(weights[size] for size in run)

    for place, size in enumerate(sizes):
        ends = range(place + 1, len(sizes) + 1)
        assert fitted[size] == pytest.approx(max(min(mean(sizes[i:j]) for j in ends) for i in range(place + 1)))
    time_of = buckets.interpolated(fitted)
    seconds = [time_of(size) for size in range(1, 40)]
    assert all(one <= other + 1e-9 for one, other in itertools.pairwise(seconds))
    assert min(seconds) > 0
    assert [time_of(size) for size in sizes] == pytest.approx([fitted[size] for size in sizes])


def test_one_slow_step_does_not_raise_the_times_of_larger_buckets() -> None:
    """A decode_8 that ran once, 30 times too slow, below 1000 steps in decode_32."""
    seconds = {"decode_1": 0.008, "decode_8": 0.4, "decode_32": 0.0136, "tokens_64": 0.05}
    counts = {("decode", 1): 50, ("decode", 8): 1, ("decode", 32): 1000, ("tokens", 64): 10}
    steps = [
        step(kind, size, count) | {"seconds": count * seconds[f"{kind}_{size}"]}
        for (kind, size), count in counts.items()
    ]
    trace = trace_of(steps, [1, 8, 32], [64], step_seconds=seconds)
    result = buckets.tune([trace], max_buckets=8, runs_per_start=1.0, shrink=False)
    measured = sum(row["seconds"] for row in steps if row["kind"] == "decode")
    assert result["decode"]["before"].step_seconds == pytest.approx(measured)
    time_of = result["decode"]["work"].step_time()
    assert [time_of(size) for size in (1, 8, 32)] == pytest.approx([0.008, 0.01399, 0.01399], rel=0.001)
    out = buckets.text_of(result, 1.0, 0)
    assert "larger buckets took less" in out
    assert "decode_8 0.4 (weight 1) as 0.014, decode_32 0.0136 (weight 1000) as 0.014" in out
    assert "by their buckets' times these steps take 14.400 s, +0% of measured" in out
    assert "WARNING" not in out


@pytest.mark.parametrize(("seconds", "warns"), [(0.014, False), (0.016, False), (0.005, True), (0.3, True)])
def test_times_that_do_not_add_up_to_the_trace_are_a_warning(seconds: float, warns: bool) -> None:
    trace = trace_of([step("decode", 4, 100) | {"seconds": 100 * seconds}], [4], [8])
    result = buckets.tune([trace], 8, 1.0, False)
    off = 0.014 / seconds - 1
    out = buckets.text_of(result, 1.0, 0)
    assert f"by their buckets' times these steps take 1.400 s, {off:+.0%} of measured" in out
    assert ("WARNING: more than 20% off. Do not rely on this proposal" in out) == warns
    assert buckets.disagreement(result["decode"]) == pytest.approx(off)


@pytest.mark.parametrize(
    ("runs_per_start", "says"),
    [
        (1.0, "would cost 0.006 s of 0.078 s in steps a run and save 1.0 s of compiling a start"),
        (1e4, "would save 0.004 s of 0.078 s in steps a run and cost 1.0 s of compiling a start"),
    ],
)
def test_what_is_saved_and_what_is_cost_are_told_apart(runs_per_start: float, says: str) -> None:
    trace = trace_of([step("decode", size, 2) for size in (1, 2, 4)], [1, 4], [8])
    assert says in buckets.text_of(buckets.tune([trace], 8, runs_per_start, False), runs_per_start, 0)


def test_times_in_between_and_beyond() -> None:
    time_of = buckets.interpolated({10: 1.0, 20: 2.0, 40: 6.0})
    assert [time_of(size) for size in (15, 30, 50)] == pytest.approx([1.5, 4.0, 8.0])
    assert buckets.interpolated({10: 1.0, 20: 1.5})(4) == pytest.approx(0.7), "the line"
    assert buckets.interpolated({10: 1.0, 20: 5.0})(9) == pytest.approx(0.9), "a token takes no less"
    assert buckets.interpolated({10: 1.0})(99) == 1.0


def test_several_traces_add_up_and_each_pads_to_its_own_buckets() -> None:
    first = trace_of([step("decode", 3, 10), step("tokens", 20, 2)], [1, 4], [8, 32])
    second = trace_of([step("decode", 3, 5), step("decode", 6, 5)], [8], [16, 32])
    result = buckets.tune([first, second], max_buckets=8, runs_per_start=1e6, shrink=False)
    assert result["decode"]["proposed"] == [3, 6, 8]
    assert result["tokens"]["proposed"] == [20, 32]
    assert result["decode"]["before"].padding_tokens == 10 * 1 + 5 * 5 + 5 * 2
    assert result["decode"]["after"].padding_tokens == 0
    assert result["decode"]["before"].compile_seconds == pytest.approx((2 + 1) / 2)
    assert result["decode"]["before"].step_seconds == pytest.approx(10 * 0.014 + 10 * 0.018)
    assert result["decode"]["after"].step_seconds == pytest.approx(15 * 0.013 + 5 * 0.016)


def test_compiling_and_the_most_buckets_keep_the_number_low() -> None:
    trace = trace_of([step("decode", size, 10) for size in range(1, 17)], [16], [32])
    trace["step_seconds"]["decode_1"], trace["buckets"]["decode"] = 0.011, [1, 16]
    number = {runs: len(buckets.tune([trace], 8, runs, False)["decode"]["proposed"]) for runs in (0.01, 10.0, 1e6)}
    assert number[0.01] == 1 < number[10.0] < number[1e6] == 8


def test_capacity_stays_unless_it_may_shrink() -> None:
    steps = [step("decode", 3, 10), step("tokens", 20, 2, num_requests=5)]
    trace = trace_of(steps, [1, 32], [128, 512], max_num_seqs=24)
    kept = buckets.tune([trace], 8, 1.0, shrink=False)
    assert [kept[kind]["proposed"][-1] for kind in ("decode", "tokens")] == [24, 512]
    shrunk = buckets.tune([trace], 8, 1.0, shrink=True)
    assert [shrunk[kind]["proposed"][-1] for kind in ("decode", "tokens")] == [5, 20]


def test_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step("decode", 3, 100), step("decode", 8, 1), step("tokens", 20, 2)]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(trace_of(steps, [1, 8], [32])))
    words = ["--trace", str(trace), "--runs-per-start", "50", "--json", str(tmp_path / "out.json")]
    assert main("compiled-llm tune buckets", words) == 0
    out = capsys.readouterr().out
    assert "--bucket-sizes 3,8 --token-bucket-sizes 32" in out
    assert "only tokens_32 ran: its time is used for all sizes" in out
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert result["decode"]["before"]["padding_share"] == pytest.approx(500 / (500 + 308))
    assert result["decode"]["after"]["padding_share"] == 0
    assert result["machine"]["torch"] == torch.__version__
    assert result["flags"] == "--bucket-sizes 3,8 --token-bucket-sizes 32"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no", "is not JSON"),
        ({"format": 2}, "is no trace of format 1"),
        ({"format": 1, "steps": []}, "is no whole trace"),
        (trace_of([], [1], [8]), "holds no step"),
        (trace_of([step("decode", 2, 1)], [1], [8]), "larger than the largest decode bucket, 1"),
        (trace_of([step("decode", 1, 1)], [1], [8], step_seconds={}), "no time of any decode bucket"),
    ],
)
def test_bad_traces(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        buckets.read_trace(path)


def test_steps_that_a_trace_rounded_are_named() -> None:
    steps = [step("decode", 1, 1)]
    for number, said in ((0, False), (7, True)):
        traces = [trace_of(steps, [1], [8], rounded_steps=number), trace_of(steps, [1], [8])]
        out = buckets.text_of(buckets.tune(traces, 8, 1.0, False), 1.0, buckets.rounded_steps(traces))
        assert ("7 steps have their bucket's size in the traces" in out) == said


def test_traces_of_two_models_do_not_mix() -> None:
    steps = [step("decode", 1, 1)]
    traces = [trace_of(steps, [1], [8]), trace_of(steps, [1], [8], model="other")]
    with pytest.raises(ValueError, match="one model"):
        buckets.tune(traces, 8, 1.0, False)


def test_an_engine_with_the_proposal_has_the_padding_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps here compute all of their bucket, as on a GPU."""
    monkeypatch.setattr(compiled_steps, "StepBuffers", lambda *args: StepBuffers(*args[:-2], pads=True))
    requests = [[5] * length for length in (1, 9, 30, 4, 17, 2)]
    params = [SamplingParams(temperature=0, max_tokens=2 + 3 * n, ignore_eos=True) for n in range(len(requests))]

    def serve(decode: list[int], tokens: list[int]) -> tuple[dict[str, Any], int]:
        """What the engine recorded, and the padding as it counts it."""
        with CompiledEngine(
            enforce_eager=True,
            bucket_sizes=tuple(decode),
            token_bucket_sizes=tuple(tokens),
            max_model_len=64,
            num_kv_blocks=32,
        ) as engine:
            engine.generate(requests, params, use_tqdm=False)
            return engine.trace(), engine.stats().num_padding_tokens

    def met(trace: dict[str, Any]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in trace["steps"]]

    trace, padding = serve([1, 8], [16, 40])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace | {"step_seconds": trace_of([], [1, 8], [16, 40])["step_seconds"]}))
    result = buckets.tune([buckets.read_trace(path)], max_buckets=3, runs_per_start=1e3, shrink=False)
    assert sum(result[kind]["before"].padding_tokens for kind in result) == padding
    proposed = {kind: result[kind]["proposed"] for kind in result}
    assert proposed != trace["buckets"]
    again, less_padding = serve(proposed["decode"], proposed["tokens"])
    assert again["buckets"] == proposed
    assert met(again) == met(trace)
    assert sum(result[kind]["after"].padding_tokens for kind in result) == less_padding < padding
