"""Engines beside each other and beside other programs: ratios and shares are those within a round."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from compiled_llm.bench import settings, shared


def test_ratios_are_those_within_a_round() -> None:
    speeds = {"W4": {"none": [10.0, 100.0, 50.0], "int8": [20.0, 150.0, 200.0]}}
    _, row = settings.rows_of(speeds, {"none": 4, "int8": 2}, 1e9)
    assert (row["median"], row["min"], row["max"], row["ratio"]) == (150, 20, 200, 2)
    assert row["of_limit"] is None


def speed(*speeds: float) -> list[dict[str, float]]:
    return [{"tokens_per_second": one, "cores": one / 100} for one in speeds]


def test_shares_are_of_the_same_round_and_of_the_slower_engine() -> None:
    alone = [speed(100), speed(200), speed(100)]
    beside = [speed(50), speed(140), speed(60)]
    two = [speed(60, 40), speed(90, 95), speed(50, 50)]
    rows = shared.compared({"alone": alone, "one busy loop": beside, "two engines": two})
    assert rows["alone"]["share"] == 1
    assert (rows["one busy loop"]["share"], rows["one busy loop"]["least_share"]) == (0.6, 0.5)
    both = rows["two engines"]
    assert (both["share"], both["tokens_per_second"], both["cores"]) == (0.45, 50, 0.5)


def test_busy_loops_run_and_end() -> None:
    before = set(psutil.Process().children())
    with shared.busy_loops(2):
        assert len(set(psutil.Process().children()) - before) == 2
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize(("max_num_seqs", "expected"), [(8, 800.0), (64, 3200.0)])
def test_a_rate_is_of_the_requests_that_decode_together(
    max_num_seqs: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W5 has 32 requests, here with 10 ms from one token of a request to its next."""
    monkeypatch.setattr(settings.serving, "generate", lambda *args: SimpleNamespace(tpots=[0.01] * 32))
    limits, model = SimpleNamespace(max_num_seqs=max_num_seqs), SimpleNamespace(vocab_size=100)
    engine: Any = SimpleNamespace(model_config=model, runner=SimpleNamespace(limits=limits))
    assert settings.speed(engine, "W5", 0) == pytest.approx(expected)
