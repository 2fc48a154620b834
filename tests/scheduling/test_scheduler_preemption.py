"""The scheduler's rules of preemption and of priority, on a fake model.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

import pytest

from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import (
    FREE_SWAPS,
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    finishing_order,
    make_engine,
    make_request,
    make_scheduler,
    work_of,
)

# -- Preemption


def preempting(mode: str, *, num_swap_blocks: int = 100, costs: StepCosts | None = None, overlap: bool = False):
    """Three requests that outgrow a pool of 8 blocks. Returns (scheduler, requests) when all are finished."""
    scheduler = make_scheduler(
        8, num_swap_blocks=num_swap_blocks, arguments={"preemption_mode": mode, "costs": costs}, max_model_len=24
    )
    requests = add(scheduler, *[make_request(f"p{i}", 5, 15) for i in range(3)])
    FakeEngine(scheduler, overlap=overlap).run()
    for request in requests:
        assert len(request.output_token_ids) == 15
        check_result(request)
    return scheduler, requests


def check_counts(scheduler: Scheduler, requests: tuple[Request, ...]) -> None:
    """What is counted for each request and for all of them agrees."""
    counts = scheduler.counts
    assert sum(request.num_preemptions for request in requests) == scheduler.num_preemptions
    assert sum(request.num_recomputed_tokens for request in requests) == counts.num_recomputed_tokens
    assert sum(request.num_swapped_tokens for request in requests) == counts.num_swapped_out_tokens


@both_loops
def test_preemption_by_recompute(overlap: bool) -> None:
    scheduler, requests = preempting("recompute", overlap=overlap)
    assert scheduler.counts.num_recompute_preemptions > 0
    assert scheduler.counts.num_recomputed_tokens > 0
    assert (scheduler.counts.num_swap_preemptions, scheduler.counts.num_swapped_out_tokens) == (0, 0)
    check_counts(scheduler, requests)


@both_loops
def test_preemption_by_swap(overlap: bool) -> None:
    scheduler, requests = preempting("swap", overlap=overlap)
    assert scheduler.counts.num_swap_preemptions > 0
    assert scheduler.counts.num_swapped_in_tokens == scheduler.counts.num_swapped_out_tokens > 0
    assert (scheduler.counts.num_recompute_preemptions, scheduler.counts.num_recomputed_tokens) == (0, 0)
    check_counts(scheduler, requests)


def test_preemption_by_what_costs_less() -> None:
    cheap, dear = FREE_SWAPS, StepCosts(bucket_seconds={16: 1e-9}, swap_seconds=1.0)
    swapped, _ = preempting("auto", costs=cheap)
    assert (swapped.counts.num_swap_preemptions > 0, swapped.counts.num_recompute_preemptions) == (True, 0)
    for costs in (dear, StepCosts()):
        recomputed, _ = preempting("auto", costs=costs)
        assert (recomputed.counts.num_swap_preemptions, recomputed.counts.num_recompute_preemptions > 0) == (0, True)


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_without_room_in_the_swap_pool_tokens_are_computed_again(mode: str) -> None:
    scheduler, requests = preempting(mode, num_swap_blocks=1, costs=FREE_SWAPS)
    assert scheduler.counts.num_recompute_preemptions > 0
    check_counts(scheduler, requests)


@both_loops
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_oldest_is_never_preempted(mode: str, overlap: bool) -> None:
    _, requests = preempting(mode, overlap=overlap)
    assert requests[0].num_preemptions == 0
    assert requests[-1].num_preemptions > 0


def test_the_counts_of_one_preemption() -> None:
    """Two requests of 2 blocks leave one of 5. The first takes it, and the second gives way when it needs one too."""
    for mode in ("recompute", "swap"):
        scheduler = make_scheduler(5, num_swap_blocks=4, arguments={"preemption_mode": mode}, max_model_len=12)
        a, b = add(scheduler, make_request("a", 6, 6), make_request("b", 6, 4))
        engine = FakeEngine(scheduler)
        while b.num_preemptions == 0:
            engine.step()
        assert b.status is Status.WAITING
        computed = 8  # 6 tokens of the prompt, and 2 of the 3 sampled: the third step was the last with room
        assert len(b.output_token_ids) == 3
        assert scheduler.num_waiting == 1
        engine.run()
        if mode == "swap":
            assert (b.num_swapped_tokens, b.num_recomputed_tokens) == (computed, 0)
            assert scheduler.counts.num_swapped_out_tokens == scheduler.counts.num_swapped_in_tokens == computed
        else:
            assert (b.num_swapped_tokens, b.num_recomputed_tokens) == (0, computed)
            assert scheduler.counts.num_recomputed_tokens == computed
        assert (a.num_preemptions, b.num_preemptions, scheduler.num_preemptions) == (0, 1, 1)


def test_what_a_preempted_request_finds_in_the_cache_is_not_computed_again() -> None:
    scheduler = make_scheduler(5, prefix_caching=True, arguments={"preemption_mode": "recompute"}, max_model_len=16)
    _, b = add(scheduler, make_request("a", 6, 8), make_request("b", 6, 4))
    FakeEngine(scheduler).run()
    assert b.num_preemptions == 1
    assert b.num_recomputed_tokens == 4, "8 were computed; a came to take one of the two blocks"
    assert b.num_cached_tokens == 0, "counted when it was first admitted"


def test_a_pool_that_ran_out_takes_nobody_in_in_that_step() -> None:
    scheduler = make_scheduler(5, max_model_len=12)
    a, b = add(scheduler, make_request("a", 6, 6), make_request("b", 6, 4))
    engine = FakeEngine(scheduler)
    engine.step()
    c = add_request(scheduler, "c", 1, 1)
    while b.num_preemptions == 0:
        output = engine.step()
    assert work_of(output) == {"a": 1}
    assert c.status is Status.WAITING
    engine.run()
    check_result(a)


# -- Priority


def make_priority_scheduler(num_blocks: int, **sizes) -> Scheduler:
    return make_scheduler(num_blocks, arguments={"policy": "priority"}, **sizes)


def test_waiting_requests_are_taken_in_by_priority_and_then_arrival() -> None:
    scheduler = make_priority_scheduler(100, max_num_seqs=1)
    requests = [make_request(name, 4, 2, priority=p) for name, p in [("a", 1), ("b", 0), ("c", 2), ("d", 0), ("e", 1)]]
    add(scheduler, *requests)
    assert finishing_order(FakeEngine(scheduler), requests) == ["b", "d", "a", "e", "c"]


def test_under_fcfs_a_priority_is_nothing() -> None:
    scheduler = make_scheduler(100, max_num_seqs=1)
    requests = [make_request("a", 4, 2, priority=1), make_request("b", 4, 2, priority=0)]
    add(scheduler, *requests)
    assert finishing_order(FakeEngine(scheduler), requests) == ["a", "b"]


@both_loops
def test_an_urgent_request_takes_the_seat_of_the_least_urgent(overlap: bool) -> None:
    scheduler = make_priority_scheduler(100, max_num_seqs=2)
    engine = FakeEngine(scheduler, overlap=overlap)
    a, b = add(scheduler, make_request("a", 4, 8, priority=1), make_request("b", 4, 8, priority=2))
    engine.step()
    urgent = add_request(scheduler, "urgent", 4, 2, priority=0)
    assert work_of(engine.step()) == {"a": 1, "urgent": 4}
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    engine.run()
    for request in (a, b, urgent):
        check_result(request)


def test_it_takes_blocks_from_as_many_as_it_needs_and_no_more() -> None:
    scheduler = make_priority_scheduler(12)
    engine = FakeEngine(scheduler)
    requests = add(scheduler, *[make_request(f"{p}", 3, 9, priority=p) for p in (1, 2, 3)])
    engine.step()
    add(scheduler, make_request("fits", 13, 3))
    assert "fits" in work_of(engine.step()), "9 are free, it needs 4 and leaves one for each of the three to grow into"
    assert [request.num_preemptions for request in requests] == [0, 0, 0]
    add(scheduler, make_request("urgent", 13, 3))
    assert "urgent" in work_of(engine.step()), "5 are free: two blocks more, and two fewer to leave a block for"
    assert [request.num_preemptions for request in requests] == [0, 1, 1]
    engine.run()


def test_an_equally_urgent_one_is_not_preempted() -> None:
    scheduler = make_priority_scheduler(100, max_num_seqs=1)
    engine = FakeEngine(scheduler)
    first = add_request(scheduler, "first", 4, 8, priority=1)
    engine.step()
    add(scheduler, make_request("second", 4, 2, priority=1))
    engine.run()
    assert first.num_preemptions == 0


def test_nobody_is_preempted_where_it_would_not_help() -> None:
    """The blocks that the urgent request lacks are held by another urgent one."""
    scheduler = make_priority_scheduler(8)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("holder", 16, 4, priority=0), make_request("small", 2, 8, priority=5))
    engine.step()
    engine.step()
    urgent = add_request(scheduler, "urgent", 16, 4, priority=0)
    assert "small" in work_of(engine.step())
    engine.run()
    assert scheduler.num_preemptions == 0
    check_result(urgent)


def test_shared_blocks_of_who_would_be_preempted_are_no_help() -> None:
    """The small one's blocks are the holder's too: without it, no more would be free."""
    scheduler, engine = make_engine(8, prefix_caching=True, arguments={"policy": "priority"})
    common = list(range(16))
    add(scheduler, make_request("holder", [*common, 1], 7, priority=0))
    engine.step()
    engine.step()
    add(scheduler, make_request("small", [*common, 2], 7, priority=5))
    assert "small" in work_of(engine.step())
    add(scheduler, make_request("urgent", 16, 4, priority=0))
    assert "small" in work_of(engine.step())
    assert scheduler.num_preemptions == 0
    engine.run()
