"""Results of a step that come after the next one is scheduled, on a fake model.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

import pytest

from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.request import Status
from tests.fake_engine import add, add_request, both_loops, check_result, expected_tokens, make_engine, make_request


def test_a_token_in_flight_is_fed_back_by_its_place_in_the_step_before() -> None:
    scheduler, engine = make_engine(20, overlap=True)
    add(scheduler, make_request("a", 3, 4), make_request("b", 3, 4))
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert (first.feedback, second.feedback) == ((-1, -1), (0, 1))
    assert second.token_ids == (0, 0), "the host does not know them"
    engine.run()


def test_the_surplus_token_of_a_request_that_stopped_is_dropped() -> None:
    scheduler, engine = make_engine(20, overlap=True)
    prompt = list(range(3))
    stop = expected_tokens(prompt, 3)
    request = add_request(scheduler, "x", prompt, 20, frozenset(stop[-1:]))
    engine.run()
    assert request.output_token_ids == stop
    assert len(engine.outputs) == 4, "a step more than tokens: it was launched before the stop was known"
    assert scheduler.pool.num_used == 0
    add(scheduler, make_request("next", 3, 2))
    engine.run()
    assert request.output_token_ids == stop


def test_no_step_runs_beyond_the_last_token_that_fits() -> None:
    scheduler, engine = make_engine(20, overlap=True)
    add(scheduler, make_request("x", 3, 4))
    engine.run()
    assert len(engine.outputs) == 4


def test_an_abort_while_its_token_is_in_flight() -> None:
    scheduler, engine = make_engine(20, overlap=True)
    aborted, other = add(scheduler, make_request("aborted", 3, 20), make_request("other", 3, 6))
    for _ in range(3):
        engine.step()
    num_known = len(aborted.output_token_ids)
    scheduler.finish(aborted, "abort")
    check_scheduler(scheduler)
    engine.run()
    assert (aborted.finish_reason, len(aborted.output_token_ids)) == ("abort", num_known)
    check_result(aborted)
    check_result(other)
    assert len(other.output_token_ids) == 6


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_while_its_token_is_in_flight(mode: str) -> None:
    scheduler, engine = make_engine(
        100, num_swap_blocks=20, arguments={"preemption_mode": mode, "policy": "priority"}, max_num_seqs=1, overlap=True
    )
    request = add_request(scheduler, "x", 3, 8, priority=1)
    engine.step()
    engine.step()
    add(scheduler, make_request("urgent", 3, 2))
    assert request.num_in_flight == 1
    num_known = len(request.output_token_ids)
    engine.step()
    assert request.status is Status.WAITING
    assert len(request.output_token_ids) == num_known + 1, "the token in flight came all the same"
    engine.run()
    assert len(request.output_token_ids) == 8
    check_result(request)


def test_a_preempted_request_may_end_by_its_token_in_flight() -> None:
    prompt = list(range(3))
    stop = frozenset(expected_tokens(prompt, 2)[-1:])
    scheduler, engine = make_engine(
        100,
        num_swap_blocks=20,
        arguments={"preemption_mode": "swap", "policy": "priority"},
        max_num_seqs=1,
        overlap=True,
    )
    request = add_request(scheduler, "x", prompt, 8, stop, priority=1)
    engine.step()
    engine.step()
    add(scheduler, make_request("urgent", 3, 2))
    engine.step()
    assert (request.num_preemptions, request.finish_reason) == (1, "stop")
    assert scheduler.swap_pool.num_used == 0
    engine.run()
    check_result(request)


@both_loops
def test_an_id_used_again_right_after_an_abort(overlap: bool) -> None:
    """The step in flight is the old request's; its token does not go to the new one."""
    scheduler, engine = make_engine(20, overlap=overlap)
    old = add_request(scheduler, "x", [1, 2, 3], 20)
    engine.step()
    engine.step()
    scheduler.finish(old, "abort")
    new = add_request(scheduler, "x", [4, 5], 3)
    engine.run()
    assert new.output_token_ids == expected_tokens([4, 5], 3)
    assert new.finish_reason == "length"


def test_a_published_block_behind_one_in_flight_does_not_make_that_one_published() -> None:
    scheduler, engine = make_engine(20, prefix_caching=True, overlap=True)
    prompt = list(range(9))
    add(scheduler, make_request("before", prompt, 1))
    engine.run()
    # The first block of the prompt is evicted, the second is not: rare, and a thing of steps in flight itself.
    parent = scheduler.prefix_cache.find(make_request("any", prompt, 1))[0][0]
    scheduler.pool._cached.move_to_end(parent, last=False)
    taken = scheduler.pool.allocate(scheduler.pool.num_free - scheduler.pool.num_cached + 1)
    assert taken is not None
    scheduler.pool.free(taken)
    first, second = add(scheduler, make_request("first", prompt, 3), make_request("second", prompt, 3))
    engine.step()
    assert first.block_ids[0] == second.block_ids[0]
    assert second.num_published_blocks == 0
    engine.run()
    check_result(first)
    check_result(second)
