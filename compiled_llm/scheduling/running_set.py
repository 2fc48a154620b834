"""RunningSet: which requests run, and the blocks that they have. Plain Python.

A waiting request is admitted when all its tokens have blocks and there is room for the running ones to grow. When
blocks run out, the last request by rank is preempted, so that the first always progresses.
"""

import bisect
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.adapter_slots import AdapterSlots
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.forks import Forks
from compiled_llm.scheduling.host_blocks import Found, HostBlock
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request, RequestId, Status
from compiled_llm.scheduling.request_queue import RequestQueue
from compiled_llm.scheduling.scheduler_output import StartedRequest
from compiled_llm.scheduling.state_pool import StateSlots
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.scheduling.window_places import WindowPlaces

PreemptionMode = Literal["auto", "recompute", "swap"]


@dataclasses.dataclass
class SchedulerCounts:
    """What a scheduler counted since the engine was made; ``EngineStats`` says what each of the counts is."""

    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    draft_gain_seconds: float = 0.0
    num_not_finite_failures: int = 0
    num_unexplained_faults: int = 0


class RunningSet:
    """Admits and preempts requests, and gives them blocks.

    Attributes:
        running: by rank.
        preempted: by the schedule that is being made; these are not admitted again in it.
        released: ids of requests that left ``running`` since the last step.
        swapped_out: (device block, host block) pairs that the next step copies.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        swap_pool: BlockPool,
        places: WindowPlaces,
        states: StateSlots,
        prefix_cache: PrefixCache,
        forks: Forks,
        preemption_mode: PreemptionMode,
        costs: StepCosts,
        tiers: KVTiers | None = None,
    ) -> None:
        self.limits, self.pool, self.swap_pool = limits, pool, swap_pool
        self.places, self.states, self.prefix_cache, self.forks = places, states, prefix_cache, forks
        self.preemption_mode, self.costs, self.tiers = preemption_mode, costs, tiers
        self.adapters = AdapterSlots(limits.max_loras, limits.whole_loras)
        self.counts = SchedulerCounts()
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.preempted: set[Request] = set()
        self.released: list[RequestId] = []
        self.swapped_out: list[tuple[int, int]] = []
        self.moved_keys: list[tuple[int, int]] = []

    # -- Admission

    def next_waiting(self, most_tokens: int | None) -> Request | None:
        """The waiting request to be served first, if there is a free place for it.

        ``most_tokens``: only among requests that lack no more tokens.
        """
        if len(self.running) >= self.limits.max_num_seqs:
            return None
        request = self.waiting.first(most_tokens)
        return None if request in self.preempted else request

    def fits(self, request: Request, limit: int, may_be_partial: bool) -> bool:
        """Whether ``limit`` tokens are enough for what the request lacks: for a part of it, if it may be chunked."""
        if may_be_partial and self.limits.chunked_prefill:
            return True
        if request.num_tokens - request.num_computed_tokens <= limit:  # without a look into the cache
            return True
        found = len(self.prefix_cache.find(request)[0]) * self.limits.block_size
        return request.num_tokens - max(found, request.num_computed_tokens) <= limit

    def admit(self, request: Request, output: SchedulerOutputBuilder) -> bool:
        """Move a waiting request to the running ones, with blocks for all its tokens.

        False where there is no room, and where it is held back for a block that another request will fill, for files
        of blocks, or for a slot of its adapter.
        """
        if not self.adapters.may_enter(request):
            self.waiting.remove(request)
            self.adapters.hold_back(request)
            return False
        holds = request in self.forks.holders
        shared, awaited = self._find(request)
        if awaited is not None and not request.host_block_ids:
            self.waiting.remove(request)
            self.prefix_cache.hold_back(request, awaited)
            return False
        prefix = self._find_below(request, shared)
        if prefix is None:
            self.waiting.remove(request)
            return False
        shared, below, state = prefix
        while not self._has_room(request, shared, len(below), state is not None):
            # While others run, they will leave room.
            if self.running:
                return False
            if not self.take_back(besides=request):
                # It may lack room for a copy of one of its own blocks: without them it computes all its tokens.
                return self.take_back() and self.admit(request, output)
        self.waiting.remove(request)
        if self.tiers is not None:
            self.tiers.fetch(request, below, state)  # pins them, before what is evicted takes rows
        if holds:
            del self.forks.holders[request]
        else:
            for block in shared:
                self.pool.share(block)
        if not holds:
            computed = (len(shared) + len(below)) * self.limits.block_size
            digest = self._last_digest(request, shared, len(below))
            if state is not None:
                self.states.enter(request, digest, -state.row, output, computed)
            else:
                host_slot = request.host_slot if request.num_computed_tokens > computed else 0
                self.states.enter(request, digest, host_slot, output)
        blocks = self.pool.allocate(self._blocks_for(request.num_tokens) - len(shared))
        assert blocks is not None
        request.block_ids = shared + blocks
        pending = (index for index, block in enumerate(shared) if self.pool.digest(block) is None)
        request.num_published_blocks = next(pending, len(shared))
        if not holds:
            found = (len(shared) + len(below)) * self.limits.block_size
            request.num_computed_tokens = max(request.num_computed_tokens, found)
        self.places.enter(request, len(shared))
        if below:
            self._load(request, len(shared), [held.row for held in below], output)
        if request.host_block_ids:
            self._swap_in(request, len(shared), output)
        self.prefix_cache.add_pending(request)
        self._count_admission(request)
        request.status = Status.RUNNING
        request.num_sent_blocks = 0
        for held in request.held:
            held.sent = 0
        bisect.insort(self.running, request, key=lambda other: other.rank)
        prompt, tokens = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
        known = request.request_id, request.sampling_params, request.seed, prompt, tokens
        output.admissions.append(StartedRequest(*known, self.adapters.enter(request)))
        return True

    def _count_admission(self, request: Request) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(request.num_computed_tokens, len(request.prompt_token_ids))
            self.prefix_cache.num_queried_tokens += request.num_tokens
            self.prefix_cache.num_hit_tokens += request.num_computed_tokens
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_recomputed_tokens += recomputed
        self.counts.num_recomputed_tokens += recomputed
        request.num_lost_tokens = 0
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()

    def _find(self, request: Request) -> tuple[list[int], bytes | None]:
        """Blocks that hold its first tokens, its own as a fork or cached, and the digest that it should wait for."""
        return (request.block_ids, None) if request in self.forks.holders else self.prefix_cache.find(request)

    def _find_below(self, request: Request, shared: list[int]) -> Found | None:
        """What to go on with in host memory, beside blocks on the device. None: ``request`` waits for files now.

        ``shared``: those that it can go on with if lower tiers have nothing.
        """
        tiers, cache = self.tiers, self.prefix_cache
        if tiers is None or request in self.forks.holders or request.host_block_ids:
            return Found(shared)
        if self.states.are_used:
            found = tiers.find_with_state(request, cache.digests_below(request, 0), cache.on_device(request), shared)
            return found if found is None or self._is_seen(*found[:2]) else Found(shared)
        below = tiers.find(request, cache.digests_below(request, len(shared)))
        if below is None:
            return None
        while below and not self._is_seen(shared, below):
            below.pop()
        return Found(shared, below)

    def _is_seen(self, shared: list[int], below: Sequence[HostBlock]) -> bool:
        """Whether all that the next query sees in layers with a window is there."""
        end = (len(shared) + len(below)) * self.limits.block_size
        return all(
            window.has(shared[index]) if index < len(shared) else number in below[index - len(shared)].windows
            for number, window in enumerate(self.pool.windows)
            for index in range(window.first_seen(end), len(shared) + len(below))
        )

    def _load(self, request: Request, first: int, rows: list[int], output: SchedulerOutputBuilder) -> None:
        """Copy rows of host memory to the device as the step begins: to the blocks from index ``first`` on."""
        output.swapped_in.extend(zip(request.block_ids[first : first + len(rows)], rows, strict=True))
        self.places.swap_in(request, first, [0] * first + rows, output)

    def _has_room(self, request: Request, shared: list[int], num_below: int = 0, is_state_below: bool = False) -> bool:
        """Whether all its tokens have blocks, with one more for each running request to grow into.

        ``num_below``: how many blocks it is to get from lower tiers; ``is_state_below``: and whether its state.
        """
        copies = self.forks.must_copy(request, request.num_computed_tokens)
        needed = self._blocks_for(request.num_tokens) - len(shared) + copies
        free = self.pool.num_free - sum(self.pool.num_references(block) == 0 for block in shared)
        if needed + len(self.running) > free:
            return False
        if not self.states.has_room(self._last_digest(request, shared, num_below), is_state_below):
            return False
        lacking, windows = self._lacking_places(request, shared, num_below), self.pool.windows
        others = len(self.running) + copies
        return all(count + others <= window.num_free for count, window in zip(lacking, windows, strict=True))

    def _last_digest(self, request: Request, shared: list[int], num_below: int = 0) -> bytes | None:
        """Of the blocks found for a request, that of the last; None: there are none, or they are its own as a fork."""
        count = 0 if request in self.forks.holders else len(shared) + num_below
        return request.block_digests[count - 1] if count else None

    def _lacking_places(self, request: Request, shared: list[int], num_below: int = 0) -> list[int]:
        """How many free places it takes in each window to admit ``request``."""
        holds, start = request in self.forks.holders, request.num_computed_tokens
        if not holds:
            start = max(start, (len(shared) + num_below) * self.limits.block_size)
        return self.places.num_lacking(start, self._blocks_for(request.num_tokens), shared, holds)

    def _swap_in(self, request: Request, num_shared: int, output: SchedulerOutputBuilder) -> None:
        """Copy back the blocks that are not on the device."""
        host = request.host_block_ids
        output.swapped_in.extend(zip(request.block_ids[num_shared : len(host)], host[num_shared:], strict=True))
        self.places.swap_in(request, num_shared, host, output)
        restored = max(0, request.num_computed_tokens - num_shared * self.limits.block_size)
        self.counts.num_swapped_in_tokens += restored
        # No step before this one writes to them: a step swaps out before it swaps in.
        self.swap_pool.free(host)
        request.host_block_ids = []

    # -- Blocks of running requests

    def grow(self, request: Request) -> bool:
        """One more block for a running request. False: it is preempted itself."""
        self.places.slide(request, request.num_computed_tokens)
        while not self.places.is_free() or (blocks := self.pool.allocate(1)) is None:
            if not self.make_room(request):
                return False
        request.block_ids += blocks
        self.places.grow(request)
        return True

    def give_places(self, request: Request, count: int) -> int:
        """Places for the next ``count`` tokens of a running request that lacks more than one.

        Returns for how many of them there are: 0 where others have to leave some first. Nobody is preempted here.
        """
        lacking = request.num_tokens - request.num_computed_tokens
        ready = self.places.extend(request, min(count + 1, lacking))
        # The last of the tokens that it lacks is computed without another look at its places.
        return min(count, ready - (ready == lacking - 1))

    def grow_for_drafts(self, request: Request, num_tokens: int) -> int:
        """Blocks for ``num_tokens`` drafts after what a running request computes, as far as some are free.

        Returns for how many drafts it has blocks. Nobody is preempted for them, and each running request still has a
        block to grow into.
        """
        missing = self._blocks_for(request.num_computed_tokens + num_tokens) - len(request.block_ids)
        needed = missing + len(self.running)
        if missing > 0 and needed <= self.pool.num_free and self.places.is_free(needed):
            self.places.slide(request, request.num_computed_tokens - 1)  # that token is in the step already
            request.block_ids += self.pool.allocate(missing) or []
            self.places.grow(request)
        return min(num_tokens, len(request.block_ids) * self.limits.block_size - request.num_computed_tokens)

    def grow_ahead(self, request: Request, num_tokens: int) -> None:
        """Blocks for ``num_tokens`` after what a running request computes, for a drafter's keys, if some are free.

        As ``grow_for_drafts``: nobody is preempted, and each running request still has a block to grow into.
        """
        most = min(request.num_computed_tokens + num_tokens, request.max_num_tokens)
        missing = self._blocks_for(most) - len(request.block_ids)
        needed = missing + len(self.running)
        if missing > 0 and needed <= self.pool.num_free and self.places.is_free(needed):
            request.block_ids += self.pool.allocate(missing) or []
            self.places.grow(request)

    def move_keys(self, request: Request, start: int, path: Sequence[int]) -> None:
        """The next step begins by moving keys of row ``path[n]`` to row n, of the rows of a step from ``start`` on."""
        size, blocks = self.limits.block_size, request.block_ids
        for place, row in enumerate(path):
            if row == place:
                continue
            (index, from_offset), (to_index, to_offset) = divmod(start + row, size), divmod(start + place, size)
            source, target = blocks[index], blocks[to_index]
            self.moved_keys.append((source * size + from_offset, target * size + to_offset))
            for window in self.pool.windows:
                move = window.place(source) * size + from_offset, window.place(target) * size + to_offset
                window.moved_keys.append(move)

    def make_writable(self, request: Request, position: int, output: SchedulerOutputBuilder) -> bool:
        """Give a running request a block of its own at ``position``, to write to. False: it is preempted itself."""
        while self.forks.must_copy(request, position):  # making room may leave the block to this request alone
            blocks = self.pool.allocate(1) if self.places.is_free() else None
            if blocks is not None:
                shared, block = self.forks.replace(request, position, blocks[0])
                output.copies.append((shared, block))
                for told, window in zip(output.windows, self.pool.windows, strict=True):
                    told.copies.append((window.place(shared), window.place(block)))
            elif not self.make_room(request):
                return False
        request.forked_index = -1
        return True

    def make_state_writable(self, request: Request) -> bool:
        """Give a running request a slot for the state that a step leaves. False: it has to wait for the next step."""
        while not self.states.make_writable(request):
            if not self.take_back():
                return False
        return True

    def send_blocks(self, request: Request, output: SchedulerOutputBuilder) -> None:
        """Tell the worker the entries of a block table that it does not know."""
        first = request.num_sent_blocks
        if first < len(request.block_ids):
            output.table_updates.append((request.request_id, first, tuple(request.block_ids[first:])))
            request.num_sent_blocks = len(request.block_ids)
        self.places.send(request, output)

    # -- Freeing blocks

    def make_room(self, request: Request) -> bool:
        """Free blocks for a running request: of one that does not run, or of the last by rank. False: that was it."""
        if self.take_back():
            return True
        victim = self.running.pop()
        self.preempt(victim)
        return victim is not request

    def take_back(self, besides: Request | None = None) -> bool:
        """Free the blocks of a request that does not run. False: none but ``besides`` has any."""
        request = self.forks.take_back_one(besides)
        if request is not None and request in self.waiting:  # it lacks more now
            self.waiting.remove(request)
            self.waiting.add(request)
        return request is not None

    def preempt(self, request: Request, may_swap: bool = True) -> None:
        """Free the blocks of ``request``, which is out of ``running``; it waits by its rank to be resumed."""
        request.cancel_drafts()
        computed = request.num_computed_tokens
        host = self._swap_space(request) if may_swap and not self.forks.is_copied_to(request) else None
        if host:
            request.host_block_ids = host
            self.swapped_out += zip(request.block_ids, host, strict=False)
            self.places.swap_out(request, host)
            self.states.swap_out(request)
            request.num_swapped_tokens += computed
            self.counts.num_swap_preemptions += 1
            self.counts.num_swapped_out_tokens += computed
        else:
            request.num_lost_tokens = computed
            request.num_computed_tokens = 0
            self.counts.num_recompute_preemptions += 1
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.preempted.add(request)
        self.release(request)
        self.waiting.add(request)

    def _swap_space(self, request: Request) -> list[int] | None:
        """Host blocks for what the request has computed; None where it is to be computed again."""
        count = self._blocks_for(request.num_computed_tokens)
        if self.preemption_mode == "recompute" or count == 0:
            return None
        if self.preemption_mode == "auto" and not self.costs.swap_is_cheaper(request.num_computed_tokens, count):
            return None
        return self.swap_pool.allocate(count) if self.states.can_swap_out() else None

    def make_place_for(self, request: Request, less_urgent: list[Request]) -> None:
        """Preempt some of ``less_urgent``, the last running requests, if ``request`` can be admitted then."""
        shared, awaited = self._find(request)
        if awaited is not None and not request.host_block_ids:
            return
        # What would be free then: not the blocks that others use too, and those it shares are no room for it.
        references = self.pool.num_references
        theirs = Counter(block for other in less_urgent for block in other.block_ids)
        free = self.pool.num_free + sum(references(block) == count for block, count in theirs.items())
        free -= sum(references(block) == theirs[block] for block in shared)
        others = len(self.running) - len(less_urgent)
        if self._blocks_for(request.num_tokens) - len(shared) + others > free:
            return
        room = self.places.room_without(less_urgent, shared)
        if any(count + others > most for count, most in zip(self._lacking_places(request, shared), room, strict=True)):
            return
        while less_urgent and (
            len(self.running) == self.limits.max_num_seqs or not self._has_room(request, self._find(request)[0])
        ):
            self.preempt(self.running.pop())
            less_urgent.pop()

    def remove(self, request: Request) -> None:
        """``request`` is about to end, wherever it is: free its blocks, unless it is to keep them."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.release(request, keeps_blocks=request.keeps_blocks)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.forks.drop(request)
            if self.tiers is not None:
                self.tiers.forget(request)
        elif self.prefix_cache.holds_back(request):
            self.prefix_cache.forget(request)
            if self.tiers is not None:
                self.tiers.forget(request)
        elif self.adapters.forget(request) or (self.tiers is not None and self.tiers.forget(request)):
            self.forks.drop(request)
        if request.host_block_ids:
            host = set(request.host_block_ids)
            self.swapped_out = [pair for pair in self.swapped_out if pair[1] not in host]
            for window in self.pool.windows:
                window.swapped_out = [pair for pair in window.swapped_out if pair[1] not in host]
            self.states.forget_swap(request)
            self.swap_pool.free(request.host_block_ids)
            request.host_block_ids = []

    def release(self, request: Request, keeps_blocks: bool = False) -> None:
        """``request`` runs no more: its blocks are free, or kept to be forked."""
        self.adapters.leave(request)
        self.wait_again(self.prefix_cache.remove_pending(request))
        if keeps_blocks:
            self.forks.keep(request)
        else:
            self.places.release(request)
            self.states.release(request)
            self.pool.free(request.block_ids)
            request.block_ids = []
            request.forked_index = -1
        request.num_published_blocks = request.next_look = request.next_event = 0
        self.released.append(request.request_id)
        request.num_sent_blocks = 0
        for held in request.held:
            held.sent = 0

    def start_over(self) -> None:
        """Steps broke: every request computes all its tokens again, since blocks may hold what these steps wrote."""
        while self.take_back():
            pass
        while self.running:
            self.preempt(self.running.pop(), may_swap=False)
        self.wait_again(self.adapters.start_over())
        if self.tiers is not None:
            self.wait_again(self.tiers.start_over())
        for request in list(self.waiting):
            if request.host_block_ids:
                self.swap_pool.free(request.host_block_ids)
                request.host_block_ids = []
                self.states.forget_swap(request)
                request.num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
                self.waiting.remove(request)
                self.waiting.add(request)  # by what it lacks now
        self.released, self.swapped_out, self.moved_keys = [], [], []
        for window in self.pool.windows:
            window.swapped_out = []
        self.pool.states.swapped_out = []

    def wait_again(self, requests: Iterable[Request]) -> None:
        """Requests that were held back wait in line again."""
        for request in requests:
            self.waiting.add(request)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
