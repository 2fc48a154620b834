"""Scheduler: which tokens of which requests run in the next step, and what their results mean. Never imports torch.

It knows no prefill and no decode. Each request has tokens known and tokens computed; a step lets the second catch up
with the first within a budget of tokens. A prompt larger than the budget is thereby chunked, a preempted request starts
over with nothing computed, a prefix found in the cache is computed already, and a running request catches up by the one
token sampled last. (vLLM V1's idea.)

Requests are served by rank: in order of arrival, or of priority first. Those that lack one token get it before any
other does. Of the others, one that does not fit into what is left of the step gets a part of it, and leaves half for
later ones that fit beside it. When blocks run out, the last by rank gives its blocks up, so the first always
progresses.

A step's results may come after the next step is scheduled: a token that is being sampled counts as known, though only
the device knows which it is.
"""

import bisect
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

from compiled_llm.config import EngineLimits
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.forks import Forks
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.request_queue import RequestQueue
from compiled_llm.scheduling.scheduler_output import Admission, SchedulerOutput, SchedulerOutputBuilder
from compiled_llm.scheduling.step_result import StepResult

# Why a request ends for which a step found no token (ops/sampling/reference.py).
_NO_TOKEN = (
    "the model's logits are not finite (NaN, infinity, or every token banned), so that no token can be chosen: see "
    'whether dtype="float32" helps, and whether the checkpoint is damaged'
)


@dataclasses.dataclass
class SchedulerCounts:
    """What happened since the engine was made."""

    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0


class Scheduler:
    """Continuous batching over a pool of KV blocks.

    Args:
        prefix_cache: over ``pool``; None: no prefix caching.
        swap_pool: blocks in host memory; None: preempted requests are always computed again.
        preemption_mode: "recompute", "swap" (recompute where the swap pool is full), or the cheaper by ``costs``.
        policy: "fcfs" or "priority".
        target_itl_ms: while requests decode, a step is no larger than the largest token bucket that takes this long.
        costs: as measured at the start; each step's seconds are entered in them.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        *,
        prefix_cache: PrefixCache | None = None,
        swap_pool: BlockPool | None = None,
        preemption_mode: Literal["auto", "recompute", "swap"] = "auto",
        policy: Literal["fcfs", "priority"] = "fcfs",
        target_itl_ms: float | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.prefix_cache = prefix_cache or PrefixCache(pool, limits.block_size, enabled=False)
        self.swap_pool = swap_pool or BlockPool(0)
        self.forks = Forks(pool, limits.block_size)
        self.preemption_mode = preemption_mode
        self.policy = policy
        self.target_itl_ms = target_itl_ms
        self.costs = costs or StepCosts()
        self.counts = SchedulerCounts()
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # by rank
        self._num_added = 0
        self._in_flight: deque[list[Request]] = deque()  # the requests of each step whose results are not in
        self._preempted: set[Request] = set()  # by the schedule() that runs
        self._resets = True  # the worker forgets all requests before the next step
        self._released: list[str] = []
        self._swapped_out: list[tuple[int, int]] = []

    @property
    def request_capacity(self) -> int:
        """Most tokens one request can ever have: the one place that decides what can fit."""
        return min(self.limits.max_model_len, self.pool.num_blocks * self.limits.block_size)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.prefix_cache.num_held_back

    @property
    def num_preemptions(self) -> int:
        return self.counts.num_recompute_preemptions + self.counts.num_swap_preemptions

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Queue a request whose ``max_num_tokens`` is within ``request_capacity``."""
        assert request.status is Status.WAITING
        assert 0 < len(request.prompt_token_ids) < request.max_num_tokens <= self.request_capacity
        request.rank = (request.priority if self.policy == "priority" else 0, self._num_added)
        self._num_added += 1
        self.waiting.add(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Queue ``child``, which begins with the tokens of ``parent``, in its rank and with what it has computed.

        ``parent`` was added before, and has ended or not. If it ``keeps_blocks`` it is to be let go afterwards.
        """
        assert 0 < len(child.prompt_token_ids) < child.max_num_tokens <= self.request_capacity
        child.rank = parent.rank
        self.forks.fork(parent, child)
        self.waiting.add(child)

    def end_forking(self, parent: Request) -> None:
        """``parent`` will not be forked any more: once it has ended, it keeps no blocks."""
        self.forks.end_forking(parent)

    def allow_cache(self, request: Request) -> None:
        """From now on ``request`` may take blocks that others computed, when it is admitted again."""
        request.reads_cache = True

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them blocks. An empty step: all that can run is in flight."""
        self._preempted.clear()
        self.forks.end_copies()
        self._preempt_for_priority()
        output = SchedulerOutputBuilder()
        requests: list[Request] = []
        num_preempted = len(self._preempted)
        lacking = self._schedule_single_tokens(output, requests)
        # A pool that just ran out takes nobody in: the newcomer would be the next victim.
        self._schedule_the_rest(output, requests, lacking, takes_in=len(self._preempted) == num_preempted)
        if requests:
            self._in_flight.append(requests)
            output.released_request_ids, self._released = self._released, []
            output.swapped_out, self._swapped_out = self._swapped_out, []
            resets, self._resets = self._resets, False
            return output.build(resets=resets)
        if not self._in_flight and self.has_unfinished_requests():
            raise RuntimeError(f"no request can progress; this is a bug in the scheduler. State: {self._describe()}")
        return SchedulerOutput()

    def update(self, output: SchedulerOutput, result: StepResult) -> list[Request]:
        """Enter the results of ``output``, the oldest step in flight.

        Returns the requests that got a token, or ended since there was none. Those that this ended are finished, and
        their blocks free. What a step in flight sampled for a request that has ended meanwhile is dropped.
        """
        requests, sampled_token_ids = self._in_flight.popleft(), result.sampled_token_ids
        if result.bucket.kind == "tokens":
            self.costs.record_step(result.bucket.num_tokens, result.seconds)
        self.forks.end_copies()
        now = time.monotonic()
        block_size, caching = self.limits.block_size, self.prefix_cache.enabled
        advanced = []
        for index, request in enumerate(requests):
            samples = output.num_samples[index]
            request.num_in_flight -= samples
            if request.finish_reason is not None:
                continue
            if samples and sampled_token_ids[index] < 0:  # before its blocks are published
                self.finish(request, "error", _NO_TOKEN)
                advanced.append(request)
                continue
            if caching and request.status is Status.RUNNING:  # else it was preempted while the step ran
                computed = output.num_computed_tokens[index] + output.num_scheduled_tokens[index]
                if computed >= (request.num_published_blocks + 1) * block_size:
                    self._queue_again(self.prefix_cache.publish(request, computed))
            if not samples:
                continue
            token_id = sampled_token_ids[index]
            request.output_token_ids.append(token_id)
            if request.first_token_time is None:
                request.first_token_time = now
            advanced.append(request)
            if token_id in request.stop_token_ids:
                # An end-of-text id is no reason of its own; an id that the user named is.
                named = token_id in (request.sampling_params.stop_token_ids or ())
                self.finish(request, "stop", token_id if named else None)
            elif request.num_tokens - request.num_in_flight >= request.max_num_tokens:
                self.finish(request, "length")
        return advanced

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, wherever it stands, and free its blocks. A finished one is left as it is."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request, keeps_blocks=request.keeps_blocks)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.forks.drop(request)
        elif self.prefix_cache.holds_back(request):
            self.prefix_cache.forget(request)
        if request.host_block_ids:
            self._swapped_out = [pair for pair in self._swapped_out if pair[1] not in request.host_block_ids]
            self.swap_pool.free(request.host_block_ids)
            request.host_block_ids = []
        request.end(finish_reason, stop_reason)

    def end(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """As ``finish``, but a request that its last tokens ended gets these reasons instead."""
        self.finish(request, finish_reason, stop_reason)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason

    def drop_output(self, request: Request, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` output tokens of a request that is about to end."""
        del request.output_token_ids[num_tokens:]

    def fail_steps_in_flight(self, reason: str) -> list[Request]:
        """The steps in flight broke: what they computed cannot be relied on. Ends their requests with an error.

        The worker forgets all requests before the next step: the other running ones wait to be admitted anew, and what
        was swapped out is computed again, since its copies may not have arrived.
        """
        self.forks.end_copies()
        failed = {request: None for requests in self._in_flight for request in requests}
        self._in_flight.clear()
        for request in failed:
            request.num_tokens -= request.num_in_flight
            request.num_in_flight = 0
        ended = [request for request in failed if request.status is not Status.FINISHED]
        for request in ended:
            self.finish(request, "error", reason)
        while self._take_back():  # what they hold may be what these steps computed
            pass
        for request in list(self.waiting):
            if request.host_block_ids:
                self.swap_pool.free(request.host_block_ids)
                request.host_block_ids = []
                request.num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
                self.waiting.remove(request)
                self.waiting.add(request)  # by what it lacks now
        while self.running:
            self._preempt(self.running.pop(), may_swap=False)
        self._released, self._swapped_out, self._resets = [], [], True
        return ended

    def replace(self, other: "Scheduler", requests: Iterable[Request], reason: str) -> None:
        """Take the place of ``other``, which broke in the middle of a step, with its counts and costs.

        All its ``requests`` end with an error for this reason, unless they have ended before.
        """
        for request in requests:
            ended = request.finish_reason is not None
            request.end(request.finish_reason or "error", request.stop_reason if ended else reason)
        self.counts, self.costs = other.counts, other.costs
        self.pool.num_evictions, self.pool.peak_used = other.pool.num_evictions, other.pool.peak_used
        self.prefix_cache.num_queried_tokens = other.prefix_cache.num_queried_tokens
        self.prefix_cache.num_hit_tokens = other.prefix_cache.num_hit_tokens

    # -- Choosing

    def _schedule_single_tokens(self, output: SchedulerOutputBuilder, requests: list[Request]) -> deque[Request]:
        """Give each running request that lacks one token that token. Returns those that lack more, by rank."""
        running, block_size = self.running, self.limits.block_size
        request_ids, token_ids, feedback = output.request_ids, output.token_ids, output.feedback
        num_computed_tokens = output.num_computed_tokens
        lacking: list[Request] = []
        index = 0
        while index < len(running):
            request = running[index]
            computed = request.num_computed_tokens
            if request.num_tokens - computed > 1:
                lacking.append(request)
                index += 1
                continue
            # Its last token is in flight; or the host has to know the token that is.
            if request.num_tokens >= request.max_num_tokens or (request.waits_for_tokens and request.num_in_flight):
                index += 1
                continue
            if computed == len(request.block_ids) * block_size and not self._grow(request):
                continue  # it was the last, and is preempted itself
            if request.forked_index >= 0 and not self._own(request, computed, output):
                continue
            index += 1
            if request.num_sent_blocks < len(request.block_ids):
                self._send_blocks(request, output)
            if request.num_in_flight:
                feedback.append(request.last_step_index)
                token_ids.append(0)
            else:
                feedback.append(-1)
                # A prompt of one token whose prefix is computed: there is no output yet.
                known = request.output_token_ids or request.prompt_token_ids
                token_ids.append(known[-1])
            request.last_step_index = len(request_ids)
            request_ids.append(request.request_id)
            num_computed_tokens.append(computed)
            request.num_computed_tokens = computed + 1
            request.num_tokens += 1
            request.num_in_flight += 1
            requests.append(request)
            if (computed + 1) % block_size == 0:  # it may be the last token of a prompt that others wait for
                self._queue_again(self.prefix_cache.filled(request, computed))
        output.num_scheduled_tokens.extend([1] * len(requests))
        output.num_samples.extend([1] * len(requests))
        return deque(request for request in lacking if request.status is Status.RUNNING)

    def _schedule_the_rest(
        self, output: SchedulerOutputBuilder, requests: list[Request], lacking: deque[Request], takes_in: bool
    ) -> None:
        """Share what is left of the step among running requests that lack more than a token and waiting ones."""
        left = self._budget(len(requests)) - len(requests)
        limit = left  # what a request may take as a whole
        partial: Request | None = None  # the one request that gets what the others leave
        num_held_back = 0  # where one is, the next one may come in; not thousands in a step
        while limit > 0:
            waiting = self._next_waiting(None if partial is None else limit) if takes_in else None
            if lacking and (waiting is None or lacking[0].rank < waiting.rank):
                request = lacking.popleft()
            elif waiting is not None:
                if not self._fits(waiting, limit, partial is None) or not self._admit(waiting, output):
                    num_held_back += waiting not in self.waiting
                    takes_in = waiting not in self.waiting and num_held_back < self.limits.max_num_seqs
                    continue
                request = waiting
            else:
                break
            count = request.num_tokens - request.num_computed_tokens
            if count <= limit:
                self._schedule(request, count, output, requests)
                left -= count
                limit -= count
            elif partial is None and self.limits.chunked_prefill:
                partial, limit = request, left // 2
        if partial is not None:
            count = min(left, partial.num_tokens - partial.num_computed_tokens)
            self._schedule(partial, count, output, requests)

    def _schedule(self, request: Request, count: int, output: SchedulerOutputBuilder, requests: list[Request]) -> None:
        """Let the step compute ``count`` tokens of a running request, which has blocks for them."""
        assert count > 0
        if request.forked_index >= 0 and not self._own(request, request.num_computed_tokens, output):
            return
        assert request.num_in_flight == 0, "more than one token is lacking, and one of them is not known"
        if request.num_sent_blocks < len(request.block_ids):
            self._send_blocks(request, output)
        start = request.num_computed_tokens
        samples = int(start + count == request.num_tokens)
        output.token_ids.extend(request.tokens(start, start + count))
        output.feedback.append(-1)
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(start)
        output.num_scheduled_tokens.append(count)
        output.num_samples.append(samples)
        request.last_step_index = len(requests)
        request.num_computed_tokens = start + count
        request.num_tokens += samples
        request.num_in_flight += samples
        requests.append(request)
        self._queue_again(self.prefix_cache.filled(request, start))

    def _budget(self, num_decodes: int) -> int:
        """Most tokens of this step."""
        budget = self.limits.max_num_batched_tokens
        if self.target_itl_ms is None or num_decodes == 0:
            return budget
        sizes = self.limits.token_bucket_sizes
        # At least one token beside the decodes, so that prompts progress whatever the target is.
        allowed = self.costs.largest_within(self.target_itl_ms / 1e3) or sizes[0]
        return min(budget, next((size for size in sizes if size >= allowed and size > num_decodes), budget))

    # -- Taking in

    def _next_waiting(self, most_tokens: int | None) -> Request | None:
        if len(self.running) >= self.limits.max_num_seqs:
            return None
        request = self.waiting.first(most_tokens)
        return None if request in self._preempted else request

    def _fits(self, request: Request, limit: int, may_be_partial: bool) -> bool:
        """Whether the step has room for what the request lacks: part of it will do if it may be chunked."""
        if may_be_partial and self.limits.chunked_prefill:
            return True
        if request.num_tokens - request.num_computed_tokens <= limit:  # without a look into the cache
            return True
        found = len(self.prefix_cache.find(request)[0]) * self.limits.block_size
        return request.num_tokens - max(found, request.num_computed_tokens) <= limit

    def _admit(self, request: Request, output: SchedulerOutputBuilder) -> bool:
        """Move a waiting request to the running ones, with blocks for all its tokens.

        False where there is no room, and where it is held back for a block that another request will fill.
        """
        holds = request in self.forks.holders
        shared, awaited = self._find(request)
        if awaited is not None and not request.host_block_ids:
            self.waiting.remove(request)
            self.prefix_cache.hold_back(request, awaited)
            return False
        while not self._has_room(request, shared):
            # While others run, they will leave room.
            if self.running or not self._take_back(besides=request):
                return False
        self.waiting.remove(request)
        if holds:
            del self.forks.holders[request]
        else:
            for block in shared:
                self.pool.share(block)
        blocks = self.pool.allocate(self._blocks_for(request.num_tokens) - len(shared))
        assert blocks is not None
        request.block_ids = shared + blocks
        promised = (index for index, block in enumerate(shared) if self.pool.digest(block) is None)
        request.num_published_blocks = next(promised, len(shared))
        if request.host_block_ids:
            self._swap_in(request, len(shared), output)
        if not holds:
            request.num_computed_tokens = max(request.num_computed_tokens, len(shared) * self.limits.block_size)
        self.prefix_cache.promise(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_cache.num_queried_tokens += request.num_tokens
            self.prefix_cache.num_hit_tokens += request.num_computed_tokens
        recomputed = max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_recomputed_tokens += recomputed
        self.counts.num_recomputed_tokens += recomputed
        request.num_lost_tokens = 0
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
        request.status = Status.RUNNING
        request.num_sent_blocks = 0
        bisect.insort(self.running, request, key=lambda other: other.rank)
        output.admissions.append(
            Admission(
                request.request_id,
                request.sampling_params,
                request.seed,
                tuple(request.prompt_token_ids),
                tuple(request.output_token_ids),
            )
        )
        return True

    def _find(self, request: Request) -> tuple[list[int], bytes | None]:
        """Blocks that hold its first tokens, its own as a fork or cached, and the digest that it should wait for."""
        return (request.block_ids, None) if request in self.forks.holders else self.prefix_cache.find(request)

    def _has_room(self, request: Request, shared: list[int]) -> bool:
        """Whether all its tokens have blocks, with one more for each running request to grow into."""
        wanted = self._blocks_for(request.num_tokens) - len(shared)
        wanted += self.forks.must_copy(request, request.num_computed_tokens)
        free = self.pool.num_free - sum(self.pool.num_references(block) == 0 for block in shared)
        return wanted + len(self.running) <= free

    def _swap_in(self, request: Request, num_shared: int, output: SchedulerOutputBuilder) -> None:
        """Copy back the blocks that nobody on the device has."""
        host = request.host_block_ids
        output.swapped_in.extend(zip(request.block_ids[num_shared : len(host)], host[num_shared:], strict=True))
        restored = max(0, request.num_computed_tokens - num_shared * self.limits.block_size)
        self.counts.num_swapped_in_tokens += restored
        # No step before this one writes to them: swapping out comes before taking in.
        self.swap_pool.free(host)
        request.host_block_ids = []

    # -- Giving up blocks

    def _grow(self, request: Request) -> bool:
        """One more block for a running request. False: it is preempted itself."""
        while (blocks := self.pool.allocate(1)) is None:
            if not self._make_room(request):
                return False
        request.block_ids += blocks
        return True

    def _own(self, request: Request, position: int, output: SchedulerOutputBuilder) -> bool:
        """A running request is about to write at ``position``: to a block of its own. False: it is preempted itself."""
        while self.forks.must_copy(request, position):  # making room may leave the block to this request alone
            blocks = self.pool.allocate(1)
            if blocks is not None:
                output.copies.append(self.forks.replace(request, position, blocks[0]))
            elif not self._make_room(request):
                return False
        request.forked_index = -1
        return True

    def _make_room(self, request: Request) -> bool:
        """Free some blocks for a running request: of who does not run, or is last by rank. False: that was itself."""
        if self._take_back():
            return True
        victim = self.running.pop()
        self._preempt(victim)
        return victim is not request

    def _take_back(self, besides: Request | None = None) -> bool:
        """Free the blocks of one that does not run. False: nobody but ``besides`` holds any."""
        request = self.forks.take_back_one(besides)
        if request is not None and request in self.waiting:  # it lacks more now
            self.waiting.remove(request)
            self.waiting.add(request)
        return request is not None

    def _preempt_for_priority(self) -> None:
        """Let a waiting request that is more urgent than running ones have their seats and blocks, if that helps."""
        request = self.waiting.first() if self.policy == "priority" else None
        if request is None:
            return
        less_urgent = [other for other in self.running if other.rank[0] > request.rank[0]]
        others = len(self.running) - len(less_urgent)
        if not less_urgent or not self._could_start(request, self.running[:others]):
            return
        shared, awaited = self._find(request)
        if awaited is not None and not request.host_block_ids:
            return
        # What would be free then: not the blocks that others use too, and those it shares are no room for it.
        references = self.pool.num_references
        theirs = Counter(block for other in less_urgent for block in other.block_ids)
        free = self.pool.num_free + sum(references(block) == count for block, count in theirs.items())
        free -= sum(references(block) == theirs[block] for block in shared)
        if self._blocks_for(request.num_tokens) - len(shared) + others > free:
            return
        while less_urgent and (
            len(self.running) == self.limits.max_num_seqs or not self._has_room(request, self._find(request)[0])
        ):
            self._preempt(self.running.pop())
            less_urgent.pop()

    def _could_start(self, request: Request, beside: list[Request]) -> bool:
        """Whether a step would have tokens left for ``request`` beside those of the running requests ``beside``."""
        lacking = [other.num_tokens - other.num_computed_tokens for other in beside]
        num_single = lacking.count(1)
        left = self._budget(num_single) - num_single
        before = sum(lacking) - num_single
        if before < left:
            return self._fits(request, left - before, may_be_partial=True)
        return self._fits(request, left // 2, may_be_partial=False)

    def _preempt(self, request: Request, may_swap: bool = True) -> None:
        """Free the blocks of ``request``, which is out of ``running``; it waits by its rank to be resumed."""
        computed = request.num_computed_tokens
        host = self._swap_space(request) if may_swap and not self.forks.is_copied_to(request) else None
        if host:
            request.host_block_ids = host
            self._swapped_out += zip(request.block_ids, host, strict=False)
            request.num_swapped_tokens += computed
            self.counts.num_swap_preemptions += 1
            self.counts.num_swapped_out_tokens += computed
        else:
            request.num_lost_tokens = computed
            request.num_computed_tokens = 0
            self.counts.num_recompute_preemptions += 1
        request.status = Status.WAITING
        request.num_preemptions += 1
        self._preempted.add(request)
        self._release(request)
        self.waiting.add(request)

    def _swap_space(self, request: Request) -> list[int] | None:
        """Host blocks for what the request has computed; None where it is to be computed again."""
        count = self._blocks_for(request.num_computed_tokens)
        if self.preemption_mode == "recompute" or count == 0:
            return None
        if self.preemption_mode == "auto" and not self.costs.swap_is_cheaper(request.num_computed_tokens, count):
            return None
        return self.swap_pool.allocate(count)

    def _release(self, request: Request, keeps_blocks: bool = False) -> None:
        self._queue_again(self.prefix_cache.withdraw(request))
        if keeps_blocks:
            self.forks.keep(request)
        else:
            self.pool.free(request.block_ids)
            request.block_ids = []
            request.forked_index = -1
        request.num_published_blocks = 0
        self._released.append(request.request_id)
        request.num_sent_blocks = 0

    # -- Small parts

    def _queue_again(self, requests: list[Request]) -> None:
        for request in requests:
            self.waiting.add(request)

    def _send_blocks(self, request: Request, output: SchedulerOutputBuilder) -> None:
        """Tell the runner of the entries of a block table that it does not know."""
        first = request.num_sent_blocks
        output.table_updates.append((request.request_id, first, tuple(request.block_ids[first:])))
        request.num_sent_blocks = len(request.block_ids)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _describe(self) -> str:
        requests = ", ".join(
            f"{request.request_id} ({request.status.value}: {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens computed, {len(request.block_ids)} blocks)"
            for request in [*self.running, *self.waiting, *self.prefix_cache.held_back()][:20]
        )
        return f"{self.pool.num_free} of {self.pool.num_blocks} blocks free; {requests}; {self.limits}"
