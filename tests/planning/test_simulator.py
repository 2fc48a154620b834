"""The simulator beside the real scheduler with a clock of its own, and against what queues must do."""

import dataclasses

import numpy as np
import pytest

from compiled_llm.planning.costs import ReplicaCosts
from compiled_llm.planning.simulator import GroupPlan, simulate
from compiled_llm.planning.traces import Load, TraceRequest, at_rate
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.worker import StepResult
from tests.fake_engine import make_request, make_scheduler
from tests.planning.made_up import COSTS, ScaledCosts, costs_of


def served_by_scheduler(
    trace: list[TraceRequest], costs: ReplicaCosts, kv_tokens: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """TTFT and e2el, seconds ``[n]``, where the engine's scheduler plans the steps; and its preemptions."""
    scheduler = make_scheduler(
        kv_tokens // 16,
        block_size=16,
        max_model_len=4096,
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_tokens,
        token_bucket_sizes=(costs.max_tokens,),
        max_tokens_beside_decodes=costs.max_tokens_beside_decodes,
    )
    bucket = Bucket("decode", costs.max_tokens, costs.max_num_seqs)
    now, next_arrival, requests = 0.0, 0, list[Request]()
    times = np.full((2, len(trace)), np.inf)
    while next_arrival < len(trace) or scheduler.has_unfinished_requests():
        while next_arrival < len(trace) and trace[next_arrival].arrival <= now:
            row = trace[next_arrival]
            requests.append(make_request(f"{next_arrival}", [1] * row.prompt_tokens, row.output_tokens))
            scheduler.add(requests[-1])
            next_arrival += 1
        if not scheduler.has_unfinished_requests():
            now = trace[next_arrival].arrival
            continue
        output = scheduler.schedule()
        rows = keys = tokens = 0
        pairs = 0.0
        for name, done, count in zip(
            output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, strict=True
        ):
            request = requests[int(name.name)]
            if count == 1 and done >= len(request.prompt_token_ids):
                rows, keys = rows + 1, keys + done + 1
            else:
                tokens, pairs = tokens + count, pairs + count * done + count * (count + 1) / 2
        now += costs.step_seconds(rows, keys, tokens, pairs)
        sampled = (7,) * len(output.request_ids)
        for request in scheduler.update(output, StepResult(bucket, sampled)):
            index = int(request.request_id.name)
            times[0, index] = min(times[0, index], now - trace[index].arrival)
            if request.finish_reason is not None:
                times[1, index] = now - trace[index].arrival
    return times[0], times[1], scheduler.num_preemptions


@pytest.mark.parametrize(("cv", "rate"), [(1.0, 6.0), (4.0, 9.0), (1.0, 14.0)])
def test_latencies_are_those_of_the_real_scheduler(cv: float, rate: float) -> None:
    trace = Load({"m": rate}, 20, cv=cv, prompt_tokens=200, output_tokens=40, seed=3).draw()
    ttft, e2el, _ = served_by_scheduler(trace, COSTS, 10**6)
    found = simulate([GroupPlan({"m": (COSTS, 1e6)})], trace)
    assert found.ttft.mean() == pytest.approx(ttft.mean(), rel=0.02)
    assert found.e2el.mean() == pytest.approx(e2el.mean(), rel=0.02)
    assert np.percentile(found.e2el, 90) == pytest.approx(np.percentile(e2el, 90), rel=0.02)


def test_one_request_alone_takes_what_its_steps_take_and_so_it_does_in_the_real_scheduler() -> None:
    trace = [TraceRequest(0.0, 600, 30, "m")]
    ttft, e2el, _ = served_by_scheduler(trace, COSTS, 10**6)
    found = simulate([GroupPlan({"m": (COSTS, 1e6)})], trace)
    alone = COSTS.alone_seconds(600, 30)
    assert (found.ttft[0], found.e2el[0]) == pytest.approx((ttft[0], e2el[0]))
    assert (found.ttft[0], found.e2el[0]) == pytest.approx(alone)


def test_a_full_pool_preempts_about_as_often_as_the_real_one() -> None:
    trace = Load({"m": 12.0}, 10, prompt_tokens=100, output_tokens=100, seed=1).draw()
    _, e2el, preempted = served_by_scheduler(trace, COSTS, 800)
    found = simulate([GroupPlan({"m": (COSTS, 800)})], trace)
    assert preempted > 10
    assert 0.5 < found.num_preemptions / preempted < 2
    assert found.e2el.mean() == pytest.approx(e2el.mean(), rel=0.1)


def test_all_tokens_of_a_pipeline_take_no_less_than_alone_and_bursts_overlap_in_its_stages() -> None:
    costs = costs_of(pp=4, slowest_stage=0.25, hop_seconds=1e-4)
    trace = [TraceRequest(0.0, 200, 2, "m") for _ in range(4)]
    found = simulate([GroupPlan({"m": (costs, 1e6)})], trace)
    first, last = costs.alone_seconds(200, 2)
    assert found.ttft.min() == pytest.approx(first)
    assert found.ttft.max() < 2 * first, "one after the other they would take four times as long"
    assert found.e2el.min() >= last - 1e-9


def test_repeated_steps_of_a_pipeline_take_as_long_as_steps_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(pp=4, slowest_stage=0.25, hop_seconds=1e-4)
    trace = Load({"m": 12.0}, 20, prompt_tokens=100, output_tokens=60, seed=2).draw()
    found = simulate([GroupPlan({"m": (costs, 1e6)})], trace).e2el.mean()
    monkeypatch.setattr("compiled_llm.planning.simulator._MOST_REPEATS", 1)
    assert found == pytest.approx(simulate([GroupPlan({"m": (costs, 1e6)})], trace).e2el.mean(), rel=0.05)


def test_models_of_a_group_share_its_time() -> None:
    catalogue = ScaledCosts({"a": 1.0, "b": 1.0})
    plan = GroupPlan({name: (catalogue.costs(name, 1, 1), 1e6) for name in ("a", "b")})
    trace = [TraceRequest(0.0, 16, 101, "a"), TraceRequest(0.0, 16, 101, "b")]
    alone = COSTS.alone_seconds(16, 101)[1]
    assert simulate([plan], trace).e2el == pytest.approx(2 * alone, rel=0.05)
    assert simulate([plan, plan], trace).e2el == pytest.approx(alone, rel=0.03), "each on a group of its own"


def test_replicas_take_requests_in_turn_and_what_none_has_is_not_served() -> None:
    trace = [TraceRequest(0.0, 100, 5, "m") for _ in range(4)] + [TraceRequest(0.0, 5, 5, "other")]
    one, four = (simulate([GroupPlan({"m": (COSTS, 1e6)})] * count, trace) for count in (1, 4))
    assert four.ttft[:4] == pytest.approx(COSTS.alone_seconds(100, 1)[0])
    assert one.ttft[:4].max() > four.ttft[:4].max()
    assert np.isinf(four.e2el[4])


def test_hopeless_requests_are_not_begun_and_the_others_gain() -> None:
    trace = at_rate(Load({"m": 20.0}, 5, prompt_tokens=200, output_tokens=20).draw(), 6)
    all_served = simulate([GroupPlan({"m": (COSTS, 1e6)})], trace)
    dropping = simulate([GroupPlan({"m": (COSTS, 1e6)})], trace, {"m": 0.5})
    assert np.isfinite(all_served.ttft).all()
    assert np.isinf(dropping.ttft).any()
    assert (dropping.ttft <= 0.6).mean() > 1.1 * (all_served.ttft <= 0.6).mean()


def test_cached_tokens_of_a_prompt_are_not_computed() -> None:
    row = TraceRequest(0.0, 256, 2, "m")
    slow, fast = (
        simulate([GroupPlan({"m": (COSTS, 1e6)})], [one]).ttft[0] for one in (row, row._replace(cached_tokens=240))
    )
    assert fast == pytest.approx(COSTS.step_seconds(0, 0, 16, 16 * 240 + 16 * 17 / 2))
    assert slow > 2 * fast


def test_a_replica_with_fewer_seats_makes_requests_wait() -> None:
    costs = dataclasses.replace(COSTS, max_num_seqs=1)
    trace = [TraceRequest(0.0, 16, 11, "m")] * 2
    found = simulate([GroupPlan({"m": (costs, 1e6)})], trace)
    assert found.ttft[1] >= found.e2el[0]
