"""What must hold of the scheduler and its pools between any two steps; ``check_invariants=True`` asserts it."""

from collections import Counter

from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert what must hold of the scheduler and its pools. Takes time in the order of the pool's size."""
    running, waiting = scheduler.running, list(scheduler.waiting)
    held_back = scheduler.held_back()
    requests = [*running, *waiting, *held_back]
    assert len(running) <= scheduler.limits.max_num_seqs
    assert len(set(requests)) == len(requests), "a request is in two queues"
    assert [r.rank for r in running] == sorted(r.rank for r in running), "the running requests are out of order"
    for request in running:
        _check_running(scheduler, request)
    for request in [*waiting, *held_back]:
        assert request.status is Status.WAITING
        assert bool(request.block_ids) == (request in scheduler.forks.holders), "a waiting request has blocks"
        assert request.num_sent_blocks == request.num_published_blocks == 0
        blocks = -(-request.num_computed_tokens // scheduler.limits.block_size)
        there = request.block_ids or request.host_block_ids
        assert len(there) == blocks, "what is swapped out, or held, is not what was computed"
    assert all(request.status is Status.FINISHED for request in scheduler.forks.kept)
    scheduler.pool.check_invariants([*(request.block_ids for request in running), *scheduler.forks.tables()])
    scheduler.swap_pool.check_invariants([request.host_block_ids for request in requests])
    scheduler.prefix_cache.check_invariants(running)
    if scheduler.tiers is not None:
        scheduler.tiers.check_invariants()
    scheduler.suspects.check_invariants()
    scheduler.running_set.adapters.check_invariants(running)
    holders = [*running, *scheduler.forks.kept, *scheduler.forks.holders]
    _check_places(scheduler, holders)
    scheduler.running_set.states.check_invariants(holders, requests)
    if not requests and not scheduler.forks.kept and not scheduler.forks.copied_tables():
        assert scheduler.pool.num_used == 0, "blocks are used while nothing runs"
        assert scheduler.swap_pool.num_used == 0, "host blocks are used while nothing waits"


def check_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Assert what must hold of a step that was just scheduled: its budgets, and that no two tokens share a slot."""
    limits, running = scheduler.limits, {request.request_id: request for request in scheduler.running}
    counts, num_tokens = output.num_scheduled_tokens, 0
    assert len(output.request_ids) == len(set(output.request_ids)) <= limits.max_num_seqs
    assert sum(counts) == output.num_tokens <= limits.max_num_batched_tokens
    assert output.max_query_len <= 1 + limits.num_draft_tokens or output.num_rows <= limits.decode_bucket_sizes[-1]
    written, moved_sinks = set(), dict(output.moved_sinks)
    for index, (request_id, count) in enumerate(zip(output.request_ids, counts, strict=True)):
        request, start = running[request_id], output.num_computed_tokens[index]
        if index in moved_sinks:
            assert moved_sinks[index] == request.num_dropped_tokens
            assert (start, output.num_samples[index], request.num_in_flight) == (0, 0, 0)
            num_tokens += count
            continue
        stream = scheduler.limits.stream
        if stream is not None:
            assert stream.num_dropped(start) == stream.num_dropped(start + count - 1) == request.num_dropped_tokens
        assert 0 < count == request.num_computed_tokens - start
        num_tokens += count
        drafts = request.draft_token_ids
        assert output.num_samples[index] in ((0, 1) if not drafts else (count,))
        assert not drafts or output.token_ids[num_tokens - len(drafts) : num_tokens] == tuple(drafts)
        assert not scheduler.forks.must_copy(request, start), "a block that others go on from is written to"
        for block in request.block_ids[start // limits.block_size : -(-(start + count) // limits.block_size)]:
            assert block not in written, "two requests write to one block"
            assert scheduler.pool.digest(block) is None, "a block that others may read is written to"
            written.add(block)
        for window, held in zip(scheduler.pool.windows, request.held, strict=True):
            assert held.first <= window.first_seen(start), "a key that a query sees has no place"
            assert start + count <= held.end * limits.block_size, "a token is written to no place"


def _check_places(scheduler: Scheduler, holders: list[Request]) -> None:
    pool, forks = scheduler.pool, scheduler.forks
    can_be_found = [pool.digest(block) is not None for block in range(pool.num_blocks + 1)]
    for number, window in enumerate(pool.windows):
        users: Counter[int] = Counter(block for table in forks.copied_tables() for block in table)
        for request in holders:
            held = request.held[number]
            assert 0 <= held.first <= held.end <= len(request.block_ids)
            assert held.sent <= held.end
            users.update(forks.places.held_blocks(window, request, held))
        window.check_invariants(users, can_be_found)


def _check_running(scheduler: Scheduler, request: Request) -> None:
    pool, size = scheduler.pool, scheduler.limits.block_size
    assert request.status is Status.RUNNING
    assert not request.host_block_ids
    num_drafts = len(request.draft_token_ids)
    assert 0 <= request.num_in_flight - num_drafts <= 2
    assert num_drafts <= scheduler.limits.num_draft_tokens
    assert not num_drafts or request.num_in_flight == 1 + num_drafts, "two steps verify drafts of a request"
    known = len(request.prompt_token_ids) + len(request.output_token_ids)
    assert request.num_tokens == known + request.num_in_flight <= request.max_num_tokens
    # One that generates nothing ends with the results of the step that computes its last token.
    assert request.num_computed_tokens < request.num_tokens + (not request.generates), "no token is left to compute"
    assert request.num_computed_tokens <= len(request.block_ids) * size, "computed tokens have no block"
    # Drafts that were not accepted, and those that a network would have drafted behind them.
    assert len(request.block_ids) <= -(-(request.num_tokens + 2 * scheduler.limits.num_draft_tokens) // size)
    assert request.num_sent_blocks <= len(request.block_ids)
    if request.num_tokens < request.next_look:
        assert request.num_computed_tokens == request.num_tokens - 1 < len(request.block_ids) * size - 1
        assert request.generates
        assert not request.waits_for_tokens
        assert request.mask is None
        assert request.forked_index < 0
        assert request.num_sent_blocks == len(request.block_ids), "a step that needs no look needs one"
    if known < request.next_event:  # the next result has no more tokens than these computed
        assert request.first_token_time is not None
        assert known + 1 < request.max_num_tokens
        assert not scheduler.prefix_cache.enabled or request.num_published_blocks == known // size
    num_full = (request.num_computed_tokens - num_drafts) // size
    for index, block in enumerate(request.block_ids[num_full:], num_full):
        shared = scheduler.forks.num_tables(block) > 1
        assert not shared or index == request.forked_index, "a block to be written to is shared"
        assert pool.digest(block) is None, "a block that is not full can be found"
    if scheduler.prefix_cache.enabled:
        assert request.num_published_blocks <= num_full
        for index, block in enumerate(request.block_ids[: request.num_published_blocks]):
            assert pool.digest(block) == request.block_digests[index], "a block is published as something else"
