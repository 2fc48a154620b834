"""Forks on a fake model: who shares which blocks, who copies, and what becomes of it when requests end or make room."""

import pytest

from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import (
    FREE_SWAPS,
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    computed_tokens,
    make_child,
    make_engine,
    make_request,
    work_of,
)

caching = pytest.mark.parametrize("caches", [False, True], ids=["no cache", "cache"])


def run_until_known(engine: FakeEngine, request: Request, num_tokens: int = 1) -> None:
    """Until the host knows so many tokens of its output."""
    while len(request.output_token_ids) < num_tokens:
        engine.step()


def fork(scheduler: Scheduler, parent: Request, *children: Request) -> None:
    for child in children:
        scheduler.fork(parent, child)


def copies_of(engine: FakeEngine, since: int = 0) -> list[tuple[int, int]]:
    return [pair for output in engine.outputs[since:] for pair in output.copies]


def finish_all(engine: FakeEngine, *requests: Request) -> None:
    """To the end, and nothing is wrong or left behind."""
    engine.run()
    for request in requests:
        check_result(request)
    scheduler = engine.scheduler
    assert not scheduler.forks.holders
    assert not scheduler.forks.kept
    assert (scheduler.pool.num_used, scheduler.swap_pool.num_used) == (0, 0)


# -- Sharing, and copying on write


@both_loops
@caching
@pytest.mark.parametrize("prompt_len", range(1, 14))
def test_continuations_of_a_prompt_compute_its_last_token_alone(prompt_len: int, caches: bool, overlap: bool) -> None:
    scheduler, engine = make_engine(50, prefix_caching=caches, overlap=overlap)
    parent = add_request(scheduler, "parent", prompt_len, 6)
    run_until_known(engine, parent)
    children = [make_child(parent, f"{n}", 6, num_shared=prompt_len) for n in range(3)]
    fork(scheduler, parent, *children)
    num_blocks = -(-(prompt_len - 1) // 4)
    assert all(child.block_ids == parent.block_ids[:num_blocks] for child in children)
    assert all(child.num_computed_tokens == prompt_len - 1 for child in children)
    num_steps = len(engine.outputs)
    finish_all(engine, parent, *children)
    # Each of the four computes five tokens more, and the children the last one of the prompt.
    assert computed_tokens(engine) == prompt_len + 4 * 5 + 3
    # Where all have the block that this token goes to, all but the last to write to it copy it.
    copies = copies_of(engine, num_steps)
    assert len({target for _, target in copies}) == len(copies) == (0 if prompt_len % 4 == 1 else 3)
    assert all(child.num_cached_tokens == prompt_len - 1 for child in children)


def test_who_writes_first_copies_and_the_last_writes_in_place() -> None:
    scheduler, engine = make_engine(50)
    parent = add_request(scheduler, "parent", 6, 8)
    engine.step()
    shared = parent.block_ids[1]
    first, second = children = [make_child(parent, name, 8, num_shared=6) for name in ("first", "second")]
    fork(scheduler, parent, *children)
    assert scheduler.pool.num_references(shared) == 3
    output = engine.step()
    assert output is not None
    assert output.copies == ((shared, parent.block_ids[1]), (shared, first.block_ids[1]))
    assert second.block_ids[1] == shared
    assert len({request.block_ids[0] for request in (parent, *children)}) == 1, "full blocks stay shared"
    assert scheduler.pool.num_references(parent.block_ids[0]) == 3
    # The runner knows the new block, and nothing of the table was sent twice.
    assert (parent.request_id, 1, (parent.block_ids[1],)) in output.table_updates
    finish_all(engine, parent, *children)
    assert len(copies_of(engine)) == 2


def test_a_child_may_have_some_of_its_parents_tokens() -> None:
    """Beside one that has more: the parent copies the block that it writes to, not the one it was forked at last."""
    scheduler, engine = make_engine(50, prefix_caching=True)
    parent = add_request(scheduler, "parent", 10, 8)
    engine.step()
    longer, shorter = make_child(parent, "longer", 4), make_child(parent, "shorter", 4, num_shared=6)
    fork(scheduler, parent, longer, shorter)
    assert (longer.num_computed_tokens, shorter.num_computed_tokens) == (10, 5)
    assert parent.forked_index == longer.forked_index == 2
    assert shorter.forked_index == 1
    full = parent.block_ids[1]
    output = engine.step()
    assert output is not None
    assert [source for source, _ in output.copies].count(full) == 1, "though it is full for all others"
    finish_all(engine, parent, longer, shorter)


@both_loops
@caching
def test_a_child_goes_on_from_all_its_parent_has(caches: bool, overlap: bool) -> None:
    """As beams do: they have its output, and a token of their own."""
    scheduler, engine = make_engine(50, prefix_caching=caches, overlap=overlap)
    parent = add_request(scheduler, "parent", 9, 12)
    run_until_known(engine, parent, 4)
    known = 9 + len(parent.output_token_ids)
    child = make_child(parent, "child", 5, own=[1, 2, 3])
    fork(scheduler, parent, child)
    assert child.num_computed_tokens == min(parent.num_computed_tokens, known)
    finish_all(engine, parent, child)
    assert child.output_token_ids != parent.output_token_ids


@both_loops
def test_a_child_of_a_prompt_that_is_computed_in_chunks(overlap: bool) -> None:
    """It has what is computed, also what the step in flight computes, and computes the rest itself."""
    scheduler, engine = make_engine(50, overlap=overlap)
    other, parent = make_request("other", 3, 10), make_request("parent", 40, 4)
    add(scheduler, other, parent)
    engine.step()
    assert parent.num_computed_tokens == 13
    child = make_child(parent, "child", 4)
    fork(scheduler, parent, child)
    assert child.num_computed_tokens == 13
    finish_all(engine, other, parent, child)


def test_a_token_in_flight_is_no_childs() -> None:
    """Two steps are in flight: the second one computes the token that the first one samples, which nobody knows."""
    scheduler, engine = make_engine(50, overlap=True)
    parent = add_request(scheduler, "parent", 9, 12)
    run_until_known(engine, parent, 2)
    engine.launch()
    assert parent.num_computed_tokens == 9 + len(parent.output_token_ids) + 1
    child = make_child(parent, "child", 5, own=[1, 2])
    fork(scheduler, parent, child)
    assert child.num_computed_tokens == 9 + len(parent.output_token_ids)
    engine.collect()
    finish_all(engine, parent, child)


def test_others_may_find_the_block_that_a_child_fills_in_the_same_step() -> None:
    """It is the child's own by then, and what they need of it is written before anybody reads."""
    scheduler, engine = make_engine(50, prefix_caching=True, max_num_seqs=2)
    parent, other = make_request("parent", 6, 2), make_request("other", 3, 9)
    add(scheduler, parent, other)
    engine.step()
    child = make_child(parent, "child", 4, own=[7])
    fork(scheduler, parent, child)
    scheduler.finish(parent, "abort")
    same = make_request("same", [*child.prompt_token_ids, 5], 4)
    scheduler.finish(other, "abort")
    add(scheduler, same)
    output = engine.step()
    assert work_of(output) == {"child": 2, "same": 1}
    assert child.block_ids[1] == same.block_ids[1]
    assert copies_of(engine) == []
    finish_all(engine, child, same)


def test_a_child_that_waits_can_be_forked_itself() -> None:
    scheduler, engine = make_engine(50, max_num_seqs=1)
    parent = add_request(scheduler, "parent", 7, 6)
    engine.step()
    child = make_child(parent, "child", 6)
    fork(scheduler, parent, child)
    grandchild = make_child(child, "grandchild", 6, own=[5])
    fork(scheduler, child, grandchild)
    assert child.block_ids == grandchild.block_ids == parent.block_ids
    assert grandchild.num_computed_tokens == 7
    finish_all(engine, parent, child, grandchild)


def test_a_prompt_of_one_token_shares_nothing() -> None:
    scheduler, engine = make_engine(10)
    parent = add_request(scheduler, "parent", 1, 4)
    engine.step()
    child = make_child(parent, "child", 4, num_shared=1)
    fork(scheduler, parent, child)
    assert not scheduler.forks.holders
    finish_all(engine, parent, child)


def test_children_have_the_rank_of_their_parent() -> None:
    scheduler, engine = make_engine(50, max_num_seqs=2)
    parent, later, last = (make_request(name, 5, 6) for name in ("parent", "later", "last"))
    add(scheduler, parent, later, last)
    engine.step()
    child = make_child(parent, "child", 6, num_shared=5)
    fork(scheduler, parent, child)
    assert child.rank == parent.rank
    while later.status is Status.RUNNING:
        engine.step()
    engine.step()
    assert child.status is Status.RUNNING, "before the last, which came earlier"
    finish_all(engine, parent, later, last, child)


# -- Parents that have ended


@both_loops
@caching
@pytest.mark.parametrize("prompt_len", [5, 6, 7, 8])
def test_a_kept_request_is_forked_after_its_end(prompt_len: int, caches: bool, overlap: bool) -> None:
    scheduler, engine = make_engine(50, prefix_caching=caches, overlap=overlap)
    parent = add_request(scheduler, "parent", prompt_len, 1, keeps_blocks=True)
    engine.run()
    assert parent.finish_reason == "length"
    assert scheduler.pool.num_used == 2
    # As beams do, each has a token of its own in place of the one that the parent chose.
    children = [make_child(parent, f"{n}", 5, num_shared=prompt_len, own=[n]) for n in range(3)]
    fork(scheduler, parent, *children)
    scheduler.end_forking(parent)
    assert not parent.block_ids
    num_steps = len(engine.outputs)
    finish_all(engine, *children)
    assert computed_tokens(engine) == prompt_len + 3 * 5
    # Of the three that have the last block, half full, one may write to it.
    assert len(copies_of(engine, num_steps)) == (0 if prompt_len == 8 else 2)


def test_while_a_request_is_kept_all_its_children_copy() -> None:
    scheduler, engine = make_engine(50)
    parent = add_request(scheduler, "parent", 6, 1, keeps_blocks=True)
    engine.run()
    children = [make_child(parent, f"{n}", 5) for n in range(2)]
    fork(scheduler, parent, *children)
    engine.run()
    assert {source for source, _ in copies_of(engine)} == {parent.block_ids[1]}
    assert len(copies_of(engine)) == 2
    late = make_child(parent, "late", 5)
    fork(scheduler, parent, late)
    engine.run()
    scheduler.end_forking(parent)
    finish_all(engine, *children, late)


@caching
def test_a_child_outlives_a_parent_that_keeps_nothing(caches: bool) -> None:
    scheduler, engine = make_engine(50, prefix_caching=caches, max_num_seqs=1)
    parent = add_request(scheduler, "parent", 10, 2)
    engine.step()
    child = make_child(parent, "child", 5, num_shared=10)
    fork(scheduler, parent, child)
    half_full = child.block_ids[2]
    while parent.status is not Status.FINISHED:
        engine.step()
    assert scheduler.pool.num_used == 3, "the child's, who waits"
    (copy,) = copies_of(engine)
    assert copy[0] == half_full, "the parent's last step wrote to a copy"
    engine.step()
    assert child.block_ids[2] == half_full
    finish_all(engine, child)
    assert copies_of(engine) == [copy], "nobody else had the block in the end"


@both_loops
@pytest.mark.parametrize("prompt_len", [6, 7, 8])
def test_a_block_that_the_parent_filled_is_not_written_to(prompt_len: int, overlap: bool) -> None:
    """Its child waited until the parent had ended, and has it alone; but it is found as what the parent wrote."""
    scheduler, engine = make_engine(50, prefix_caching=True, max_num_seqs=1, overlap=overlap)
    parent = add_request(scheduler, "parent", prompt_len, 6)
    run_until_known(engine, parent)
    child = make_child(parent, "child", 6, num_shared=prompt_len)
    fork(scheduler, parent, child)
    shared = child.block_ids[1]
    while parent.status is not Status.FINISHED:
        engine.step()
    assert scheduler.pool.digest(shared) is not None or copies_of(engine), "it is full, or the parent has left it"
    finish_all(engine, parent, child)
    # Who begins as the parent did finds its block as the parent wrote it: the fake model compares every slot.
    again = add_request(scheduler, "again", parent.prompt_token_ids + parent.output_token_ids[:3], 2)
    finish_all(engine, again)
    assert again.num_cached_tokens == 8


def test_an_ended_request_that_kept_nothing_has_nothing_to_give() -> None:
    scheduler, engine = make_engine(50)
    parent = add_request(scheduler, "parent", 6, 2)
    engine.run()
    child = make_child(parent, "child", 4)
    fork(scheduler, parent, child)
    assert not child.block_ids
    assert child.num_computed_tokens == 0
    finish_all(engine, parent, child)


def test_letting_go_before_the_end_keeps_nothing() -> None:
    scheduler, engine = make_engine(50)
    parent = add_request(scheduler, "parent", 6, 5, keeps_blocks=True)
    engine.step()
    scheduler.end_forking(parent)
    assert parent.block_ids, "it runs"
    finish_all(engine, parent)


# -- Preemption


@both_loops
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_parent_has_nothing_to_give(mode: str, overlap: bool) -> None:
    scheduler, engine = make_engine(
        6, num_swap_blocks=10, arguments={"preemption_mode": mode}, max_model_len=24, max_num_seqs=2, overlap=overlap
    )
    first, parent = make_request("first", 8, 15), make_request("parent", 6, 15)
    add(scheduler, first, parent)
    while parent.num_preemptions == 0:
        engine.step()
    assert bool(parent.host_block_ids) == (mode == "swap")
    child = make_child(parent, "child", 2)
    fork(scheduler, parent, child)
    assert not child.block_ids
    assert child.num_computed_tokens == 0
    finish_all(engine, first, parent, child)


@both_loops
@caching
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forked_requests_are_preempted_and_come_back(mode: str, caches: bool, overlap: bool) -> None:
    """What they share goes to the host once for each, and comes back as blocks of their own."""
    scheduler, engine = make_engine(
        10,
        prefix_caching=caches,
        num_swap_blocks=40,
        arguments={"preemption_mode": mode, "costs": FREE_SWAPS},
        max_model_len=32,
        overlap=overlap,
    )
    parent = add_request(scheduler, "parent", 10, 20)
    run_until_known(engine, parent)
    children = [make_child(parent, f"{n}", 20, own=[n]) for n in range(3)]
    fork(scheduler, parent, *children)
    finish_all(engine, parent, *children)
    assert sum(child.num_preemptions for child in children) > 0
    assert parent.num_preemptions == 0
    assert copies_of(engine)
    counts = scheduler.counts
    assert (counts.num_swap_preemptions > 0, counts.num_recompute_preemptions > 0) == (mode == "swap", mode != "swap")


def test_an_urgent_request_takes_the_place_of_forked_ones() -> None:
    scheduler, engine = make_engine(
        9, num_swap_blocks=20, arguments={"policy": "priority", "preemption_mode": "swap"}, max_model_len=32
    )
    parent = add_request(scheduler, "parent", 10, 6, priority=1)
    engine.step()
    children = [make_child(parent, f"{n}", 6, own=[n]) for n in range(3)]
    fork(scheduler, parent, *children)
    engine.step()
    assert [request.status for request in children].count(Status.RUNNING) >= 2
    urgent = add_request(scheduler, "urgent", 16, 8)
    assert "urgent" in work_of(engine.step())
    assert scheduler.num_preemptions > 0
    finish_all(engine, parent, *children, urgent)
    assert urgent.num_preemptions == 0


# -- Blocks run out


def test_what_is_kept_goes_first_and_then_what_the_last_holder_has() -> None:
    scheduler, engine = make_engine(8, max_num_seqs=1, max_model_len=32)
    kept, ended = make_request("kept", 4, 1, keeps_blocks=True), make_request("ended", 7, 3)
    add(scheduler, kept)
    engine.run()
    add(scheduler, ended)
    engine.step()
    holders = [make_child(ended, name, 2, num_shared=count) for name, count in (("one", 6), ("two", 7))]
    running = make_request("running", 12, 16)
    running.rank = (-1, 0)
    fork(scheduler, ended, *holders)
    scheduler.finish(ended, "abort")
    # Ranks are the scheduler's own to give; this one is served before the children, which wait for its seat.
    scheduler.waiting.add(running)
    seen = []
    while running.status is not Status.FINISHED:
        engine.step()
        seen.append((bool(kept.block_ids), bool(holders[1].block_ids), bool(holders[0].block_ids)))
    assert list(dict.fromkeys(seen)) == [(True, True, True), (False, True, True), (False, False, False)]
    assert running.num_preemptions == 0
    assert all(child.status is Status.WAITING and child.num_computed_tokens == 0 for child in holders)
    finish_all(engine, running, *holders)


def test_who_is_alone_with_holders_takes_their_blocks_back_and_goes_on() -> None:
    """It has the pool full, and only a waiting child names the block it writes to: no block becomes free by that."""
    scheduler, engine = make_engine(2, max_model_len=8, max_num_seqs=1)
    parent = add_request(scheduler, "parent", 6, 2)
    engine.step()
    child = make_child(parent, "child", 2, num_shared=6)
    fork(scheduler, parent, child)
    assert child.block_ids
    engine.step()
    assert (child.block_ids, child.num_computed_tokens) == ([], 0)
    assert parent.num_preemptions == 0
    assert copies_of(engine) == []
    finish_all(engine, parent, child)


def test_of_what_a_step_copies_nothing_is_overwritten_in_it() -> None:
    """One copies a block; then the last who names it has to give it up, for another who needs one to copy to."""
    scheduler, engine = make_engine(5, max_model_len=16, max_num_seqs=2)
    one, two = requests = [make_request(name, 6, 2) for name in ("one", "two")]
    add(scheduler, *requests)
    engine.step()
    of_two, of_one = make_child(two, "of two", 2, num_shared=6), make_child(one, "of one", 2, num_shared=6)
    fork(scheduler, two, of_two)
    fork(scheduler, one, of_one)
    shared = one.block_ids[1]
    output = engine.step()
    assert output is not None
    assert [source for source, _ in output.copies] == [shared]
    assert not of_one.block_ids, "it was the last to be forked"
    finish_all(engine, *requests, of_two, of_one)


def test_the_first_that_waits_gets_what_is_kept_where_nobody_runs() -> None:
    scheduler, engine = make_engine(8, max_model_len=32)
    kept = [make_request(f"kept {n}", 7, 1, keeps_blocks=True) for n in range(3)]
    add(scheduler, *kept)
    engine.run()
    assert scheduler.pool.num_free == 2
    long = add_request(scheduler, "long", 20, 4)
    engine.step()
    assert [bool(request.block_ids) for request in kept] == [True, False, False], "no more than it takes"
    child = make_child(kept[2], "child", 3)
    fork(scheduler, kept[2], child)
    assert not child.block_ids
    engine.run()
    for request in kept:
        scheduler.end_forking(request)
    finish_all(engine, long, child)


def test_while_others_run_who_waits_leaves_what_is_held_alone() -> None:
    scheduler, engine = make_engine(8, max_model_len=32)
    kept, running = make_request("kept", 7, 1, keeps_blocks=True), make_request("running", 9, 4)
    add(scheduler, kept, running)
    engine.step()
    late = add_request(scheduler, "late", 15, 2)
    while running.status is Status.RUNNING:
        assert late.status is Status.WAITING
        engine.step()
    assert kept.block_ids
    scheduler.end_forking(kept)
    finish_all(engine, kept, running, late)


def test_a_holder_itself_is_taken_in_by_what_others_hold() -> None:
    scheduler, engine = make_engine(6, max_model_len=24, max_num_seqs=1)
    parent = add_request(scheduler, "parent", 6, 1, keeps_blocks=True)
    engine.run()
    other = add_request(scheduler, "other", 11, 1, keeps_blocks=True)
    engine.run()
    child = make_child(parent, "child", 4, own=list(range(8)))
    fork(scheduler, parent, child)
    engine.step()
    assert child.status is Status.RUNNING
    assert child.num_cached_tokens == 6
    assert not parent.block_ids or not other.block_ids
    for request in (parent, other):
        scheduler.end_forking(request)
    finish_all(engine, child)


def test_a_waiting_child_leaves_room_for_its_copy() -> None:
    """All its tokens have blocks; but one of these is to be copied, and there is no other."""
    scheduler, engine = make_engine(4, max_model_len=16)
    parent = add_request(scheduler, "parent", 14, 2)
    engine.step()
    child = make_child(parent, "child", 2, num_shared=14)
    fork(scheduler, parent, child)
    engine.step()
    assert parent.status is Status.FINISHED
    finish_all(engine, parent, child)
    assert scheduler.num_preemptions == 0


# -- Ends in every state


@caching
@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "kept", "let go"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_aborted_parent_leaves_its_children_as_they_are(state: str, mode: str, caches: bool) -> None:
    scheduler, engine = make_engine(
        20,
        prefix_caching=caches,
        num_swap_blocks=20,
        arguments={"preemption_mode": mode, "policy": "priority"},
        max_num_seqs=2,
    )
    parent = add_request(
        scheduler, "parent", 10, 1 if state in ("kept", "let go") else 10, priority=2, keeps_blocks=True
    )
    if state != "waiting":
        engine.step()
    children = [make_child(parent, f"{n}", 4, num_shared=10) for n in range(2)]
    fork(scheduler, parent, *children)
    if state == "preempted":
        add(scheduler, *(make_request(f"urgent {n}", 5, 6) for n in range(2)))
        while parent.num_preemptions == 0:
            engine.step()
        assert bool(parent.host_block_ids) == (mode == "swap")
    if state == "let go":
        scheduler.end_forking(parent)
    scheduler.finish(parent, "abort")
    assert parent.status is Status.FINISHED
    scheduler.end_forking(parent)
    assert not parent.block_ids
    finish_all(engine, *children)


@both_loops
@pytest.mark.parametrize("steps", range(5))
def test_aborted_children_give_back_what_they_hold(steps: int, overlap: bool) -> None:
    """Before they run, while they do and when they have ended, with steps of theirs in flight."""
    scheduler, engine = make_engine(50, prefix_caching=True, max_num_seqs=3, overlap=overlap)
    parent = add_request(scheduler, "parent", 10, 8)
    run_until_known(engine, parent)
    children = [make_child(parent, f"{n}", 3, own=[n]) for n in range(4)]
    fork(scheduler, parent, *children)
    for _ in range(steps):
        engine.step()
    for child in children[1:]:
        scheduler.finish(child, "abort")
        assert child not in scheduler.forks.holders
    assert not scheduler.forks.holders.keys() - {children[0]}
    finish_all(engine, parent, *children)


@both_loops
def test_a_stop_token_ends_a_parent_whose_next_step_is_in_flight(overlap: bool) -> None:
    scheduler, engine = make_engine(50, overlap=overlap)
    free = add_request(scheduler, "parent", 6, 4)
    engine.run()
    parent = add_request(scheduler, "parent", 6, 20, stop=frozenset(free.output_token_ids[2:3]), keeps_blocks=True)
    while parent.status is not Status.FINISHED:
        engine.step()
    children = [make_child(parent, f"{n}", 4, own=[n]) for n in range(2)]
    fork(scheduler, parent, *children)
    scheduler.end_forking(parent)
    finish_all(engine, parent, *children)
    assert parent.finish_reason == "stop"


# -- Steps that break


def test_what_a_broken_step_was_to_compute_is_no_childs() -> None:
    """A child was given what the step in flight computes."""
    scheduler, engine = make_engine(50, overlap=True)
    parent = add_request(scheduler, "parent", 10, 4)
    engine.launch()
    child = make_child(parent, "child", 4)
    fork(scheduler, parent, child)
    assert child.num_computed_tokens == 9
    engine.fail_steps("the reason")
    assert (child.num_computed_tokens, child.block_ids) == (0, [])
    finish_all(engine, parent, child)
    assert parent.finish_reason == child.finish_reason == "length"


def test_what_a_broken_step_was_to_compute_is_not_kept() -> None:
    """A request ended with the step in flight that computes its last token, and is forked when that has broken."""
    scheduler, engine = make_engine(50, overlap=True)
    free = add_request(scheduler, "parent", 6, 4)
    engine.run()
    parent = add_request(scheduler, "parent", 6, 20, stop=frozenset(free.output_token_ids[2:3]), keeps_blocks=True)
    while parent.status is not Status.FINISHED:
        engine.step()
    assert engine.runner.written, "the token behind the one that ended it is being sampled"
    engine.fail_steps("the reason")
    child = make_child(parent, "child", 4, own=[1])
    fork(scheduler, parent, child)
    scheduler.end_forking(parent)
    finish_all(engine, child)
    assert child.finish_reason == "length"


@both_loops
def test_who_was_to_keep_its_blocks_keeps_none_that_a_broken_step_wrote_to(overlap: bool) -> None:
    scheduler, engine = make_engine(50, overlap=overlap)
    parent = add_request(scheduler, "parent", 10, 4, keeps_blocks=True)
    for ended in ([], [parent]):
        engine.launch()
        assert engine.fail_steps("the reason") == ended
    child = make_child(parent, "child", 4)
    fork(scheduler, parent, child)
    assert not child.block_ids
    finish_all(engine, child)
    assert child.finish_reason == "length"


@both_loops
def test_after_a_broken_step_children_that_waited_are_served(overlap: bool) -> None:
    scheduler, engine = make_engine(50, prefix_caching=True, max_num_seqs=2, overlap=overlap)
    parent, other = make_request("parent", 10, 9), make_request("other", 3, 9)
    add(scheduler, parent, other)
    run_until_known(engine, parent, 3)
    children = [make_child(parent, f"{n}", 4, own=[n]) for n in range(3)]
    fork(scheduler, parent, *children)
    engine.launch()
    engine.fail_steps("the reason")
    assert not any(child.block_ids for child in children)
    finish_all(engine, parent, other, *children)
    assert {request.finish_reason for request in (parent, other, *children)} == {"length"}


def test_a_child_that_lacks_room_for_a_copy_alone_gives_its_blocks_up() -> None:
    """It has two of three blocks, and the second is published: to write to it, it would need two more."""
    scheduler, engine = make_engine(3, prefix_caching=True, max_num_seqs=1)
    parent = add_request(scheduler, "parent", 6, 6)
    while parent.num_computed_tokens < 9:
        engine.step()
    middle = make_child(parent, "middle", 3, num_shared=7)
    scheduler.fork(parent, middle)
    child = make_child(middle, "child", 3, own=(1, 2))
    scheduler.fork(middle, child)
    for request in (parent, middle):
        scheduler.finish(request, "abort")
    assert (len(child.block_ids), scheduler.pool.num_free) == (2, 1)
    engine.run()
    check_result(child)
    assert len(child.output_token_ids) == 3
