"""Requests that generate nothing: they end when their prompt is computed. On a fake model.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

import pytest

from compiled_llm.scheduling.request import Request, Status
from tests.fake_engine import (
    FREE_SWAPS,
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    computed_tokens,
    drafters,
    make_engine,
    make_request,
    work_of,
)


def num_sampled(engine: FakeEngine) -> int:
    return sum(sum(output.num_samples) for output in engine.outputs)


@both_loops
def test_each_token_is_computed_once_and_none_is_sampled(overlap: bool) -> None:
    scheduler, engine = make_engine(40, overlap=overlap)
    requests = add(scheduler, *(make_request(f"{count}", count, 0) for count in (1, 2, 16, 17, 33, 64)))
    engine.run()
    for request in requests:
        assert (request.status, request.finish_reason, request.stop_reason) == (Status.FINISHED, "length", None)
        assert (request.output_token_ids, request.first_token_time) == ([], None)
    assert computed_tokens(engine) == 1 + 2 + 16 + 17 + 33 + 64
    assert num_sampled(engine) == 0
    assert scheduler.pool.num_used == 0


@both_loops
def test_they_run_beside_others(overlap: bool) -> None:
    scheduler, engine = make_engine(40, overlap=overlap)
    generating = add(scheduler, make_request("a", 3, 9), make_request("b", 20, 4))
    alone = add(scheduler, make_request("c", 30, 0), make_request("d", 1, 0))
    engine.run()
    for request in (*generating, *alone):
        check_result(request)
    assert num_sampled(engine) == 9 + 4


@both_loops
def test_a_chunk_of_one_token_at_the_end(overlap: bool) -> None:
    """What a running request lacks is one token then, as if it decoded."""
    scheduler, engine = make_engine(40, overlap=overlap)
    request = add_request(scheduler, "a", 17, 0)
    assert work_of(engine.step()) == {"a": 16}
    assert work_of(engine.step()) == {"a": 1}
    engine.run()
    check_result(request)
    assert len(engine.outputs) == 2


@both_loops
def test_the_limit_of_cached_tokens(overlap: bool) -> None:
    prompt = list(range(30))
    for most, found in [(0, 0), (3, 0), (4, 4), (11, 8), (27, 24), (28, 28), (64, 28), (None, 28)]:
        scheduler, engine = make_engine(40, prefix_caching=True, overlap=overlap)
        first = add_request(scheduler, "first", prompt, 0)
        engine.run()
        second = add_request(scheduler, "second", prompt, 0, most_cached_tokens=most)
        engine.run()
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, found)
        assert computed_tokens(engine) == 30 + 30 - found


@both_loops
def test_a_context_that_comes_many_times_at_once_is_computed_once(overlap: bool) -> None:
    scheduler, engine = make_engine(200, prefix_caching=True, max_num_seqs=8, overlap=overlap)
    context = list(range(40))
    requests = [
        make_request(f"{index}", [*context, 100 + index, 200 + index], 0, most_cached_tokens=40) for index in range(8)
    ]
    add(scheduler, *requests)
    engine.run()
    assert computed_tokens(engine) == 40 + 8 * 2
    assert all(request.finish_reason == "length" for request in requests)


def ending_requests() -> list[Request]:
    return [make_request(f"{index}", 14, 0) for index in range(4)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_one_that_is_preempted_while_its_last_step_runs_ends_by_it(mode: str) -> None:
    scheduler, engine = make_engine(20, num_swap_blocks=20, arguments={"preemption_mode": mode, "costs": FREE_SWAPS})
    first = add_request(scheduler, "first", 8, 30)
    engine.step()
    last = add_request(scheduler, "last", 13, 0)
    assert work_of(engine.launch()) == {"first": 1, "last": 13}
    assert scheduler.running.pop() is last
    scheduler.running_set.preempt(last)
    assert (last.status, last.finish_reason) == (Status.WAITING, None)
    engine.collect()
    assert (last.finish_reason, last.num_preemptions) == ("length", 1)
    engine.run()
    check_result(first)
    assert scheduler.pool.num_used == scheduler.swap_pool.num_used == 0


@both_loops
def test_after_a_step_that_breaks_they_are_computed_again(overlap: bool) -> None:
    scheduler, engine = make_engine(40, overlap=overlap)
    requests = add(scheduler, *ending_requests())
    engine.launch()
    assert engine.fail_steps("the reason") == []
    engine.run()
    assert [request.finish_reason for request in requests] == ["length"] * len(requests)
    assert scheduler.counts.num_unexplained_faults == 1


@pytest.mark.parametrize("name", ["right", "half right"])
def test_no_draft_follows_their_last_token(name: str) -> None:
    scheduler, engine = make_engine(60, drafter=drafters(3)[name])
    requests = add(scheduler, make_request("a", 5, 12), make_request("b", 9, 0), make_request("c", 1, 0))
    engine.run()
    for request in requests:
        check_result(request)
    assert all(not request.takes_drafts for request in requests[1:])
