"""States of requests in slots: what steps read and write, and what is found again."""

import pytest

from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import (
    FREE_SWAPS,
    FakeDrafter,
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    make_request,
    make_scheduler,
    work_of,
)


def scheduler_with_states(num_slots: int = 13, **arguments) -> Scheduler:
    arguments = {"num_blocks": 64, "prefix_caching": True, "max_num_batched_tokens": 64} | arguments
    return make_scheduler(num_state_slots=num_slots, token_bucket_sizes=(64,), **arguments)


def serve(engine: FakeEngine, *requests: Request) -> None:
    add(engine.scheduler, *requests)
    engine.run()
    for request in requests:
        check_result(request)


@both_loops
@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_a_prefix_is_found_at_the_end_of_any_block(num_blocks: int, overlap: bool) -> None:
    """Blocks of 4 tokens: a prompt that ended there, or one token later, has left a snapshot."""
    prompt = list(range(32))
    for more in (0, 1):
        engine = FakeEngine(scheduler_with_states(), overlap=overlap)
        serve(engine, make_request("first", prompt[: 4 * num_blocks + more], 1))
        second = make_request("second", prompt, 3)
        serve(engine, second)
        assert second.num_cached_tokens == 4 * num_blocks


def test_the_same_prompt_again_computes_its_last_block_alone() -> None:
    engine = FakeEngine(scheduler_with_states())
    for length, found in ((12, 8), (13, 12), (14, 12)):
        prompt = [100 * length + token for token in range(length)]
        serve(engine, make_request(f"{length}", prompt, 2))
        again = make_request(f"{length} again", prompt, 2)
        serve(engine, again)
        assert again.num_cached_tokens == found


def test_a_snapshot_is_left_where_prefixes_part() -> None:
    """The second request finds the blocks of a shared prefix, but no snapshot there; it leaves one for the third."""
    engine, shared = FakeEngine(scheduler_with_states()), list(range(16))
    requests = [make_request(f"{n}", [*shared, *range(100 * n, 100 * n + 12)], 1) for n in range(1, 4)]
    for request in requests:
        serve(engine, request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 16]


def test_requests_that_come_together_compute_a_shared_prefix_once() -> None:
    """Those that are held back for it tell the first where to leave a snapshot."""
    engine, shared = FakeEngine(scheduler_with_states()), list(range(16))
    requests = [make_request(f"{n}", [*shared, *range(100 * n, 100 * n + 5)], 1) for n in range(1, 4)]
    serve(engine, *requests)
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]
    assert work_of(engine.outputs[0]) == {"1": 21}


def test_a_conversation_goes_on_from_the_last_full_block_of_an_answer() -> None:
    engine = FakeEngine(scheduler_with_states())
    first = make_request("first", list(range(10)), 10)
    serve(engine, first)
    second = make_request("second", first.prompt_token_ids + first.output_token_ids + [1, 2, 3], 2)
    serve(engine, second)
    assert second.num_cached_tokens == 16  # of 19 computed tokens; the last was never read


def test_a_request_keeps_one_snapshot_of_its_own_output() -> None:
    """A long answer does not push the snapshots of prompts out."""
    engine = FakeEngine(scheduler_with_states())
    prompts = [[100 * n + token for token in range(9)] for n in range(3)]
    serve(engine, *(make_request(f"{n}", prompt, 1) for n, prompt in enumerate(prompts)))
    serve(engine, make_request("long", 4, 60))
    states = engine.scheduler.pool.states
    assert states.num_evictions == 0
    again = [make_request(f"{n} again", prompt, 1) for n, prompt in enumerate(prompts)]
    serve(engine, *again)
    assert [request.num_cached_tokens for request in again] == [8, 8, 8]


@both_loops
def test_as_few_slots_as_may_be(overlap: bool) -> None:
    """One for each request and one: all are served, and those that share a prefix take turns."""
    engine = FakeEngine(scheduler_with_states(5, max_num_seqs=4), overlap=overlap)
    serve(engine, *(make_request(f"{n}", [*range(8), n], 20) for n in range(12)))
    assert engine.scheduler.num_preemptions == 0


@both_loops
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_requests_go_on(prefix_caching: bool, mode: str, overlap: bool) -> None:
    scheduler = scheduler_with_states(
        num_blocks=12,
        prefix_caching=prefix_caching,
        num_swap_blocks=40,
        num_swap_slots=4,
        arguments={"preemption_mode": mode, "costs": FREE_SWAPS},
    )
    engine = FakeEngine(scheduler, overlap=overlap)
    serve(engine, *(make_request(f"{n}", 8, 20) for n in range(6)))
    counts = scheduler.counts
    swapped, recomputed = counts.num_swap_preemptions, counts.num_recompute_preemptions
    assert (swapped > 0, recomputed > 0) == (mode == "swap", mode == "recompute")


def test_without_a_host_slot_a_request_is_computed_again() -> None:
    arguments = {"preemption_mode": "swap"}
    scheduler = scheduler_with_states(
        num_blocks=12, prefix_caching=False, num_swap_blocks=40, num_swap_slots=0, arguments=arguments
    )
    engine = FakeEngine(scheduler)
    serve(engine, *(make_request(f"{n}", 8, 20) for n in range(6)))
    assert scheduler.counts.num_swap_preemptions == 0 < scheduler.counts.num_recompute_preemptions
    assert scheduler.swap_pool.num_used == 0


@pytest.mark.parametrize("num_right", range(4))
def test_steps_of_which_some_tokens_are_accepted(num_right: int) -> None:
    engine = FakeEngine(scheduler_with_states(drafter=FakeDrafter(3, lambda: num_right)))
    request = make_request("drafted", 6, 30)
    serve(engine, request)
    counts = engine.scheduler.counts
    assert counts.num_draft_tokens > 0
    assert (counts.num_accepted_draft_tokens > 0) == (num_right > 0)
    states = engine.scheduler.pool.states
    assert states.num_used == 0


def test_forks_share_the_state_that_they_go_on_from() -> None:
    """Beams: the children have all that the parent computed, and read its slot."""
    scheduler = scheduler_with_states(prefix_caching=False)
    engine = FakeEngine(scheduler)
    parent = make_request("parent", 9, 1, keeps_blocks=True)
    serve(engine, parent)
    children = [make_request(f"{token}", [*parent.prompt_token_ids, token], 4) for token in (1, 2, 3)]
    for child in children:
        scheduler.fork(parent, child)
        assert child.num_computed_tokens == 9
    scheduler.end_forking(parent)
    engine.run()
    for child in children:
        check_result(child)
    reads = next(output.states.reads for output in engine.outputs if len(output.request_ids) == 3)
    assert len(set(reads)) == 1


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_continuations_share_the_state_before_the_last_token(prefix_caching: bool) -> None:
    """They compute the prompt's last token themselves, whatever their parent computes meanwhile."""
    scheduler = scheduler_with_states(prefix_caching=prefix_caching)
    engine = FakeEngine(scheduler)
    parent = add_request(scheduler, "parent", list(range(12)), 5, keeps_blocks=True)
    engine.step()
    engine.step()
    children = [make_request(f"child {n}", parent.prompt_token_ids, 4) for n in range(3)]
    for child in children:
        scheduler.fork(parent, child)
        assert child.num_computed_tokens == 11
    scheduler.end_forking(parent)
    engine.run()
    for request in (parent, *children):
        check_result(request)
    states = scheduler.pool.states
    assert states.num_used == 0


@pytest.mark.parametrize(("arguments", "found"), [({"max_num_batched_tokens": 11}, 8), ({"num_slots": 2}, 0)])
def test_a_fork_without_a_state_to_share_looks_for_a_snapshot(arguments: dict[str, int], found: int) -> None:
    """Where a step computed the last token alone; where slots are scarce, it may find none."""
    scheduler = scheduler_with_states(**{"max_num_seqs": 1, **arguments})
    engine = FakeEngine(scheduler)
    parent = make_request("parent", list(range(12)), 2, keeps_blocks=True)
    serve(engine, parent)
    child = make_request("child", parent.prompt_token_ids, 4)
    scheduler.fork(parent, child)
    assert child.num_computed_tokens == 0
    scheduler.end_forking(parent)
    engine.run()
    check_result(child)
    assert child.num_cached_tokens == found


def test_a_snapshot_goes_with_its_block() -> None:
    scheduler = scheduler_with_states(num_blocks=8)
    engine = FakeEngine(scheduler)
    serve(engine, make_request("first", 16, 1))
    states = scheduler.pool.states
    assert states.num_free > len(states.empty_slots())
    serve(engine, make_request("second", 30, 1))  # takes all blocks
    held = {digest for digest in states.digests() if scheduler.pool.lookup(digest) is None}
    assert not held
    scheduler.pool.clear_cache()
    assert states.num_free == len(states.empty_slots())
