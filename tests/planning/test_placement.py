"""What the search finds where the best is known, and that nothing is placed where it has no room."""

import numpy as np
import pytest

from compiled_llm.planning.placement import Cluster, Group, Planner, Rated, Targets
from compiled_llm.planning.results import curves, group_rows, model_rows, text_of
from compiled_llm.planning.simulator import Outcome
from compiled_llm.planning.traces import Load, TraceRequest
from tests.planning.made_up import ScaledCosts

GB = 10**9


def planner(seconds: dict[str, float], devices: int, memory: float = 16 * GB, **arguments) -> Planner:
    targets = arguments.pop("targets", Targets(ttft=0.2))
    return Planner(ScaledCosts(seconds), Cluster(devices, 4, memory), targets, **arguments)


def test_a_busy_model_gets_more_replicas_than_a_quiet_one() -> None:
    trace = Load({"busy": 30.0, "quiet": 1.0}, 10, prompt_tokens=100, output_tokens=20).draw()
    found = planner({"busy": 1.0, "quiet": 1.0}, 4, models_per_group=1, pp_sizes=(1,), tp_sizes=(1,)).search(trace)
    counts = [sum(model in group.models for group in found.groups) for model in ("busy", "quiet")]
    assert counts == [3, 1]


def test_a_model_that_fits_into_no_device_is_spread_over_several() -> None:
    trace = Load({"m": 2.0}, 5).draw()
    found = planner({"m": 1.0}, 4, memory=6 * GB).search(trace)
    assert all(group.devices >= 2 for group in found.groups)
    with pytest.raises(ValueError, match="m fits into no group of 1 devices"):
        planner({"m": 1.0}, 1, memory=6 * GB).search(trace)


def test_more_models_than_there_is_room_for_are_refused() -> None:
    trace = Load({"a": 1.0, "b": 1.0, "c": 1.0}, 5).draw()
    with pytest.raises(ValueError, match="2 devices have no room for all of a, b, c together"):
        planner({"a": 1.0, "b": 1.0, "c": 1.0}, 2, memory=11 * GB).search(trace)


def test_slow_and_quick_models_do_not_share_devices_if_that_keeps_targets() -> None:
    """AlpaServe's buckets: behind a model that takes 50 times as long, a short request is late."""
    rates = {"quick": 20.0, "slow": 0.4}
    trace = Load(rates, 20, prompt_tokens=100, output_tokens=8).draw()
    found = planner({"quick": 0.5, "slow": 25.0}, 2, memory=64 * GB, targets=Targets(scale=3.0)).search(trace)
    assert all(len(group.models) < 2 for group in found.groups)


def test_bursts_of_several_models_gain_from_pipelines_that_all_share() -> None:
    """AlpaServe's first example: each model would fit a device of its own."""
    trace = sorted(
        [TraceRequest(10.0 * n, 250, 1, "a") for n in range(4) for _ in range(6)]
        + [TraceRequest(10.0 * n + 5, 250, 1, "b") for n in range(4) for _ in range(6)]
    )
    best: dict[int, float] = {}
    for pp in (1, 2):
        one = planner(
            {"a": 1.0, "b": 1.0}, 2, memory=11 * GB, pp_sizes=(pp,), tp_sizes=(1,), targets=Targets(ttft=0.09)
        )
        best[pp] = one.search(trace).attained
    assert best[2] > best[1]


def test_a_large_cluster_is_planned_in_parts_and_rated_whole() -> None:
    trace = Load({"m": 250.0}, 60, prompt_tokens=50, output_tokens=4).draw()
    one = planner({"m": 0.2}, 64, pp_sizes=(1,), tp_sizes=(1,))
    found = one.search(trace)
    assert one.share == 4, "parts of four machines"
    assert len(found.groups) == 64
    assert len(found.kept) == len(trace)


@pytest.mark.parametrize(
    ("targets", "kept"),
    [
        (Targets(), [True, True, False]),
        (Targets(ttft=0.15), [True, False, False]),
        (Targets(tpot=0.1), [False, True, False]),
        (Targets(e2el=1.0), [True, True, False]),
        (Targets(scale=2.0), [True, False, False]),
    ],
)
def test_targets_are_kept_or_missed(targets: Targets, kept: list[bool]) -> None:
    one = planner({"m": 1.0}, 1)
    trace = [TraceRequest(0.0, 10, 5, "m")] * 3
    outcome = one.rate([Group(1, 1, ("m",))], trace).outcome
    made = outcome._replace(ttft=np.array([0.1, 0.6, np.inf]), e2el=np.array([0.9, 0.9, np.inf]))
    assert one.kept(made, trace, np.array([0.6, 0.4, 1.0]), targets).tolist() == kept


def test_results_add_up_and_curves_fall_with_the_rate() -> None:
    trace = Load({"a": 20.0, "b": 4.0}, 6, prompt_tokens=200, output_tokens=20).draw()
    one = planner({"a": 1.0, "b": 1.0}, 2, tp_sizes=(1,), pp_sizes=(1,))
    found = one.search(trace)
    rows = model_rows(found, trace)
    assert [row["model"] for row in rows] == ["a", "b", "all"]
    assert rows[2]["requests"] == rows[0]["requests"] + rows[1]["requests"] == len(trace)
    assert sum(row["groups"] * row["tp"] * row["pp"] for row in group_rows(one, found)) == 2
    drawn = curves(one, found, trace)
    assert dict(drawn["rate"])[1.0] == dict(drawn["slo_scale"])[1.0] == found.attained
    assert dict(drawn["rate"])[4.0] < found.attained
    assert "attained at times the rate  0.5: " in text_of(one, found, trace, drawn)


def test_devices_move_to_the_models_that_miss_most() -> None:
    """The demand is that of large batches; a model whose requests come one by one needs more."""
    trace = Load({"quick": 1.0, "slow": 2.0}, 20, prompt_tokens=250, output_tokens=30).draw()
    one = planner({"quick": 0.2, "slow": 4.0}, 8, tp_sizes=(1, 2), pp_sizes=(1,), targets=Targets(ttft=0.5))
    found = one.search(trace)
    devices = [sum(group.devices for group in found.groups if model in group.models) for model in ("quick", "slow")]
    assert devices[1] > devices[0]
    assert sum(group.devices for group in found.groups) <= 8


def test_what_no_model_uses_and_what_others_can_spare_moves() -> None:
    """The one with least to do has nothing to give; the one after it gives as long as it keeps its own targets."""
    needed = {0: 1, 1: 8, 2: 9}

    def best_of(number: int, devices: int) -> Rated:
        missed = max(0, needed[number] - devices)
        outcome = Outcome(np.zeros(0), np.zeros(0), np.array([(0.1, 0.5, 0.9)[number]]), 0)
        return Rated((Group(1, 1),) * devices, outcome, np.arange(20) >= missed, 1.0)

    one, rated = planner({"a": 1.0}, 20), [best_of(0, 1), best_of(1, 16), best_of(2, 1)]
    counts = []
    while (moved := one._moved(rated, best_of)) is not None:
        rated = moved
        counts.append([len(each.groups) for each in rated])
    assert counts == [[1, 16, 3], *([1, 16 - n, 3 + n] for n in range(1, 7))]
