"""What the scheduler makes of common prefixes, on a fake model.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

import pytest

from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.request import Request
from tests.fake_engine import (
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    computed_tokens,
    make_engine,
    make_request,
    make_scheduler,
    work_of,
)

COMMON = list(range(512))


def make_sharing(**arguments) -> tuple[FakeEngine, list[Request]]:
    """An engine, and 16 requests that have 512 tokens in common and 6 of their own."""
    sizes = {"max_model_len": 600, "max_num_seqs": 16, "max_num_batched_tokens": 1024} | arguments
    overlap = sizes.pop("overlap", False)
    scheduler = make_scheduler(16 * 136, prefix_caching=True, **sizes)
    requests = [make_request(f"{i}", [*COMMON, *range(1000 + i, 1006 + i)], 4) for i in range(16)]
    return FakeEngine(scheduler, overlap=overlap), requests


def check_shared(requests: list[Request]) -> None:
    for request in requests:
        assert len(request.output_token_ids) == 4
        check_result(request)


@both_loops
def test_a_common_prefix_of_requests_that_come_at_once_is_computed_once(overlap: bool) -> None:
    engine, requests = make_sharing(overlap=overlap)
    add(engine.scheduler, *requests)
    output = engine.step()
    assert output is not None
    assert output.num_tokens == 512 + 16 * 6, "all in the first step"
    engine.run()
    check_shared(requests)
    assert computed_tokens(engine) == 512 + 16 * 6 + 16 * 3
    assert [request.num_cached_tokens for request in requests] == [0] + [512] * 15
    assert engine.scheduler.prefix_cache.num_queried_tokens == 16 * 518
    assert engine.scheduler.prefix_cache.num_hit_tokens == 15 * 512


@both_loops
def test_also_where_it_takes_several_steps(overlap: bool) -> None:
    engine, requests = make_sharing(max_num_batched_tokens=100, overlap=overlap)
    add(engine.scheduler, *requests)
    engine.run()
    check_shared(requests)
    assert computed_tokens(engine) == 512 + 16 * 6 + 16 * 3


@both_loops
def test_also_where_the_first_is_aborted_half_way(overlap: bool) -> None:
    engine, requests = make_sharing(max_num_batched_tokens=100, overlap=overlap)
    add(engine.scheduler, *requests)
    for _ in range(3):
        engine.step()
    engine.scheduler.finish(requests[0], "abort")
    check_scheduler(engine.scheduler)
    engine.run()
    check_shared(requests[1:])
    # What was in flight when it ended is not published: with overlap the last step is done again.
    lost = 100 if overlap else 0
    assert 512 + 15 * (6 + 3) <= computed_tokens(engine) <= 512 + 15 * (6 + 3) + lost + 4


@both_loops
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_also_where_the_first_is_preempted_half_way(mode: str, overlap: bool) -> None:
    engine, requests = make_sharing(
        max_num_batched_tokens=100,
        overlap=overlap,
        max_num_seqs=1,
        num_swap_blocks=200,
        arguments={"preemption_mode": mode, "policy": "priority"},
    )
    for request in requests:
        request.priority = 1
    add(engine.scheduler, *requests)
    for _ in range(3):
        engine.step()
    (urgent,) = add(engine.scheduler, make_request("urgent", 30, 3))
    engine.run()
    check_shared(requests)
    check_result(urgent)
    assert requests[0].num_preemptions == 1
    repeated = computed_tokens(engine) - (512 + 16 * (6 + 3)) - (30 + 2)
    # To compute again: a block that was not full, and what was in flight and so not published.
    assert 0 <= repeated <= 3 + (100 if overlap and mode == "recompute" else 0)


def test_those_that_wait_for_a_prefix_let_others_by() -> None:
    """A long prompt takes several steps; three that begin alike would fit beside its first part."""
    engine, _ = make_sharing(max_num_batched_tokens=100)
    requests = [make_request("long", COMMON, 4)]
    requests += [make_request(f"{i}", [*COMMON[:40], 1000 + i], 4) for i in range(3)]
    add(engine.scheduler, *requests, make_request("other", 20, 2))
    assert work_of(engine.step()) == {"other": 20, "long": 80}
    # That step filled what they wait for.
    assert work_of(engine.step()) == {"other": 1, "long": 96, "0": 1, "1": 1, "2": 1}
    engine.run()
    check_shared(requests)


def make_held_back() -> tuple[FakeEngine, Request, list[Request]]:
    """A prompt of which 8 tokens are computed, since a more urgent one came; and three that wait for its first 40."""
    engine, _ = make_sharing(max_num_batched_tokens=100, arguments={"policy": "priority"})
    first = make_request("first", COMMON, 4, priority=1)
    add(engine.scheduler, make_request("short", 92, 1), first)
    assert work_of(engine.step()) == {"short": 92, "first": 8}
    waiting = [make_request(f"{i}", [*COMMON[:40], 1000 + i], 4, priority=1) for i in range(3)]
    add(engine.scheduler, make_request("urgent", 300, 1), *waiting)
    for _ in range(2):
        assert work_of(engine.step()) == {"urgent": 100}
        assert engine.scheduler.prefix_cache.held_back() == waiting
    return engine, first, waiting


def test_requests_wait_for_a_prefix_as_long_as_it_takes() -> None:
    engine, first, waiting = make_held_back()
    engine.run()
    check_shared([first, *waiting])
    assert computed_tokens(engine) == 92 + 300 + (512 + 3) + 3 * (1 + 3)


def test_a_request_held_back_can_be_aborted() -> None:
    engine, first, waiting = make_held_back()
    for request in waiting[:2]:
        engine.scheduler.finish(request, "abort")
        check_scheduler(engine.scheduler)
    assert engine.scheduler.num_waiting == 1
    engine.run()
    check_shared([first, waiting[2]])


@pytest.mark.parametrize("how", ["abort", "error"])
def test_requests_held_back_go_on_when_that_which_they_wait_for_ends(how: str) -> None:
    engine, first, waiting = make_held_back()
    if how == "error":
        engine.step()  # the urgent one is through
        for ended in ([], [first]):
            engine.launch()
            assert engine.fail_steps("the reason") == ended
    else:
        engine.scheduler.finish(first, "abort")
    assert engine.scheduler.prefix_cache.num_held_back == 0
    check_scheduler(engine.scheduler)
    engine.run()
    check_shared([request for request in waiting if request.finish_reason != "error"])
    assert waiting[0].num_cached_tokens == 8, "the two blocks that were done"


def test_a_single_token_that_fills_the_block_wakes_them_too() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True, max_num_batched_tokens=5, max_num_seqs=2)
    prompt = list(range(16))
    first = add_request(scheduler, "first", prompt, 4)
    assert [work_of(engine.step()) for _ in range(3)] == [{"first": 5}] * 3
    second = add_request(scheduler, "second", [*prompt, 1], 4)
    _, awaited = scheduler.prefix_cache.find(second)
    assert awaited is not None
    scheduler.waiting.remove(second)
    scheduler.prefix_cache.hold_back(second, awaited)
    assert work_of(engine.step()) == {"first": 1, "second": 1}
    engine.run()
    check_shared([first, second])


def test_nobody_waits_for_the_less_urgent() -> None:
    engine, requests = make_sharing(max_num_batched_tokens=100, arguments={"policy": "priority"})
    requests[0].priority = 1
    add(engine.scheduler, requests[0])
    engine.step()
    add(engine.scheduler, *requests[1:])
    assert work_of(engine.step()) == {"1": 100}, "it goes on behind the 100 tokens that are done"
    engine.run()
    check_shared(requests)
    assert computed_tokens(engine) == 512 + 16 * (6 + 3) + 412, "the less urgent one has its own blocks already"


def test_a_salt_keeps_requests_apart() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True)
    prompt = list(range(16))
    for name, salt in [("a", "x"), ("b", "x"), ("c", "y"), ("d", "")]:
        add(scheduler, make_request(name, prompt, 2, cache_salt=salt))
        engine.run()
    assert [output.num_tokens for output in engine.outputs] == [16, 1, 4, 1, 16, 1, 16, 1]


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_never_all_of_a_prompt_is_a_hit(num_tokens: int) -> None:
    scheduler, engine = make_engine(100, prefix_caching=True, max_num_batched_tokens=32)
    prompt = list(range(num_tokens))
    add(scheduler, make_request("a", prompt, 2))
    engine.run()
    again = add_request(scheduler, "b", prompt, 2)
    engine.run()
    assert again.num_cached_tokens == (num_tokens - 1) // 4 * 4
    assert again.num_cached_tokens < num_tokens
    check_result(again)


def test_a_prompt_of_one_token_more_than_what_is_cached_is_a_decode() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True)
    add(scheduler, make_request("a", list(range(8)), 1))
    engine.run()
    b = add_request(scheduler, "b", list(range(9)), 3)
    assert work_of(engine.step()) == {"b": 1}
    engine.run()
    check_result(b)


def test_a_block_that_two_computed_is_shared_from_then_on() -> None:
    """Two requests sample the same tokens side by side: nobody could have known."""
    scheduler, engine = make_engine(100, prefix_caching=True)
    prompt = list(range(5))
    a, b = add(scheduler, make_request("a", prompt, 12), make_request("b", prompt, 12))
    while len(a.output_token_ids) < 10:
        engine.step()
    assert a.block_ids[:3] == b.block_ids[:3]
    assert a.block_ids[3] != b.block_ids[3], "not full yet"
    engine.run()
    check_result(a)
    check_result(b)


def test_a_second_turn_finds_what_the_first_generated() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True)
    first = add_request(scheduler, "first", 6, 11)
    engine.run()
    second = add_request(scheduler, "second", [*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3], 4)
    engine.run()
    assert second.num_cached_tokens == 16, "of the first's 17 tokens the last one was never computed"
    check_result(second)


def test_what_is_used_last_is_evicted_last_and_the_end_of_a_prompt_before_its_beginning() -> None:
    scheduler, engine = make_engine(8, prefix_caching=True, max_model_len=32)
    old, new = list(range(12)), list(range(100, 112))
    for prompt in (old, new):
        add(scheduler, make_request(f"{prompt[0]}", prompt, 1))
        engine.run()
    assert scheduler.pool.num_cached == 6
    add(scheduler, make_request("needs 4", 15, 1))
    engine.run()
    assert scheduler.pool.num_evictions == 2
    find = scheduler.prefix_cache.find
    assert len(find(make_request("old again", [*old, 1], 1))[0]) == 1
    assert len(find(make_request("new again", [*new, 1], 1))[0]) == 3
