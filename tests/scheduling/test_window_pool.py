"""Places of blocks in layers that see a window of keys."""

import itertools

import pytest

from compiled_llm.api.streaming import Stream
from compiled_llm.scheduling.window_pool import WindowPool, most_places, useful_places
from tests.fake_engine import (
    FREE_SWAPS,
    LIMITS,
    FakeEngine,
    add_request,
    check_result,
    make_child,
    make_request,
    make_scheduler,
)

SIZE = LIMITS.block_size


def pool(window: int = 6, num_places: int = 4) -> WindowPool:
    return WindowPool(window, num_places, LIMITS)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_the_first_block_that_a_query_sees(position: int, first: int) -> None:
    assert pool(window=6).first_seen(position) == first  # positions position - 5 to position, 4 in a block


def test_a_place_is_used_then_cached_then_given_away() -> None:
    places = pool(num_places=2)
    places.attach(11)
    places.attach(12)
    assert (places.num_free, places.place(11), places.place(12)) == (0, 1, 2)
    places.drop(12, can_be_found=True)
    places.drop(11, can_be_found=True)
    assert (places.num_free, places.has(11), places.has(12)) == (2, True, True)
    places.hold(12)
    places.attach(13)  # the place of block 11, the only one that is cached
    assert (places.place(13), places.has(11), places.num_evictions) == (1, False, 1)


def test_a_place_that_nobody_can_find_is_empty_at_once() -> None:
    places = pool()
    places.attach(7)
    places.hold(7)
    places.drop(7, can_be_found=False)
    assert places.has(7)
    places.drop(7, can_be_found=False)
    assert not places.has(7)
    assert places.num_used == 0


def test_a_block_that_holds_something_else_has_no_place() -> None:
    places = pool()
    places.attach(7)
    with pytest.raises(AssertionError, match="is used"):
        places.forget(7)
    places.drop(7, can_be_found=True)
    places.forget(7)
    assert not places.has(7)


def test_a_hit_is_as_long_as_the_window_before_its_end_is_there() -> None:
    places = pool(window=6, num_places=8)  # the query after 4n tokens sees the blocks n - 2 and n - 1
    for block in (1, 2, 4, 5, 7):
        places.attach(block)
    assert places.longest_hit([1, 2, 3]) == 2
    assert places.longest_hit([1, 2, 3, 4]) == 2
    assert places.longest_hit([1, 2, 3, 4, 5]) == 5
    assert places.longest_hit([1, 2, 3, 4, 5, 6, 7]) == 5
    assert places.longest_hit([3, 4]) == 0
    assert places.longest_hit([]) == 0


def test_what_was_computed_twice_is_kept_once() -> None:
    places = pool()
    places.attach(1)
    places.attach(2)
    places.exchange(2, 1)  # block 1 has a place: that of block 2 is empty
    assert (places.has(2), places.num_users(1), places.num_used) == (False, 2, 1)
    places.attach(3)
    number = places.place(3)
    places.exchange(3, 4)  # block 4 has none: it gets that of block 3
    assert (places.has(3), places.place(4), places.num_users(4)) == (False, number, 1)
    places.hold(4)
    assert not places.can_exchange(4, 5)
    assert places.can_exchange(4, 1)


def test_most_places_of_a_request_and_of_all() -> None:
    # 6 keys before the first of 16 tokens touch 6 blocks of 4 and one more, where they begin in the middle of one.
    assert most_places(6, LIMITS) == 7
    assert most_places(1000, LIMITS) == LIMITS.blocks_per_request
    assert useful_places(6, LIMITS) == LIMITS.max_num_seqs * 4 + 7


def test_a_long_request_runs_in_the_places_of_its_window() -> None:
    scheduler = make_scheduler(16, windows=[(6, 0)])
    (places,) = scheduler.pool.windows
    assert places.num_places == 7
    engine, request = FakeEngine(scheduler), make_request("long", 40, 20)
    scheduler.add(request)
    used = []
    while scheduler.has_unfinished_requests():
        engine.step()
        if request.num_computed_tokens > 44:
            used.append(places.num_used)
    check_result(request)
    assert len(used) > 10
    assert max(used) <= 3 + bool(scheduler.has_unfinished_requests())


def test_blocks_of_a_window_come_back_from_the_host() -> None:
    arguments = {"preemption_mode": "swap", "costs": FREE_SWAPS}
    scheduler = make_scheduler(10, windows=[(6, None)], num_swap_blocks=20, arguments=arguments, max_model_len=40)
    engine = FakeEngine(scheduler)
    requests = [add_request(scheduler, name, 10, 20) for name in ("a", "b")]
    engine.run()
    assert any(output.windows[0].swapped_in for output in engine.outputs)
    for request in requests:
        check_result(request)


def test_a_child_computes_what_its_parent_has_dropped() -> None:
    scheduler = make_scheduler(40, windows=[(6, None)])
    engine, parent = FakeEngine(scheduler), add_request(scheduler, "parent", 40, 20)
    while len(parent.output_token_ids) < 4:
        engine.step()
    assert parent.held[0].first > 2
    child = make_child(parent, "child", 4, num_shared=6)
    scheduler.fork(parent, child)
    assert child.num_computed_tokens == 0
    engine.run()
    check_result(parent)
    check_result(child)


def test_a_child_without_its_parents_places_leaves_the_parents_state_too() -> None:
    """Of a model that has layers with a window and layers with a state."""
    scheduler = make_scheduler(40, windows=[(6, None)], num_state_slots=8, token_bucket_sizes=(64,))
    engine, parent = FakeEngine(scheduler), add_request(scheduler, "parent", 12, 20, keeps_blocks=True)
    while len(parent.output_token_ids) < 12:
        engine.step()
    assert parent.state.before_last
    child = make_request("child", parent.prompt_token_ids, 4)
    scheduler.fork(parent, child)
    assert (child.num_computed_tokens, child.state.slot) == (0, 0)
    scheduler.end_forking(parent)
    engine.run()
    check_result(parent)
    check_result(child)
    assert scheduler.pool.states.num_used == 0


def test_dropped_places_make_a_shorter_hit() -> None:
    scheduler = make_scheduler(40, prefix_caching=True, windows=[(6, None)])
    (places,) = scheduler.pool.windows
    engine = FakeEngine(scheduler)
    prompt = make_request("first", 41, 4).prompt_token_ids
    for name, hit in (("first", 0), ("all", 40), ("again", 8)):
        request = add_request(scheduler, name, list(prompt), 4)
        engine.run()
        check_result(request)
        assert request.num_cached_tokens == hit, name
        # Of the prompt's blocks only the first two keep their places, before "again".
        for block in [b for d in request.block_digests[2:10] if (b := scheduler.pool.lookup(d)) is not None]:
            if name == "all":
                places.forget(block)


def test_a_stream_goes_on_beside_requests_that_decode_for_ever() -> None:
    """Its sink tokens are more than a step should have beside decodes."""
    scheduler = make_scheduler(
        64, windows=[(8, None)], stream=Stream(8, 8, 4), max_tokens_beside_decodes=3, max_num_batched_tokens=11
    )
    engine, long, names = FakeEngine(scheduler), make_request("long", 3, 50), itertools.count()
    scheduler.add(long)
    for _ in range(120):
        while len(scheduler.running) + scheduler.num_waiting < 4:  # so short that nothing leaves their caches
            scheduler.add(make_request(f"{next(names)}", 3, 10))
        engine.step()
    check_result(long)
    assert len(long.output_token_ids) == 50
