"""Scheduler: which tokens of which requests run in the next step, and what their results mean. Never imports torch.

A step's results may come after the next step is scheduled: a token that is being sampled counts as known, though only
the device knows which it is.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.decode_costs import DecodeCosts
from compiled_llm.scheduling.draft_planner import DraftPlanner
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.forks import Forks
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.running_set import PreemptionMode, RunningSet, SchedulerCounts
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.state_pool import StateSlots
from compiled_llm.scheduling.step_planner import StepPlanner
from compiled_llm.scheduling.suspects import Suspects
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.scheduling.window_places import WindowPlaces
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import drafts_for

# The reason that a request ends with when a step found no token for it (ops/sampling/token_sampling.py).
_NO_TOKEN = (
    "the model's logits are not finite (NaN, infinity, or every token banned), so that no token can be chosen: see "
    'whether dtype="float32" helps, and whether the checkpoint is damaged'
)
# The reason that a scored request ends with when its log-probabilities are NaN.
_NOT_FINITE = (
    'the model\'s logits are not finite (NaN or infinity): see whether dtype="float32" helps, and whether the '
    "checkpoint is damaged"
)


class Scheduler:
    """Continuous batching over a pool of KV blocks.

    Args:
        prefix_caching: whether requests that begin alike share blocks.
        block_contents: all that the content of a block depends on besides tokens.
        swap_pool: blocks in host memory; None: preempted requests are always computed again.
        preemption_mode: "recompute", "swap" (recompute where the swap pool is full), or the cheaper by ``costs``.
        policy: "fcfs" or "priority".
        target_itl_ms: while requests decode, a step is no larger than the largest token bucket that takes this long.
        costs: as measured at the start; the seconds of each step are recorded in them.
        tier_rows: blocks in host memory for what leaves the prefix cache, numbered as those of ``swap_pool``.
        on_disk: digests of the blocks that have a file; None: there is no disk.
        row_bytes: of one of ``tier_rows``.
        tier_slots, state_bytes: as ``tier_rows`` and ``row_bytes``, for snapshots of states.
        drafter: guesses tokens of requests, for steps to verify; None: no drafts.
        decode_seconds, sampling_seconds: as in ``DecodeCosts``, measured at the start.
        clock: by which drafts pay or do not, in seconds; None: that of the machine.

    Attributes:
        running, waiting: those of the ``RunningSet``.
        tiers: below the prefix cache; None: there are none.
        in_flight: the requests of each step whose results are not in, oldest step first.
        paths: of the requests with a tree of drafts in the last step that was entered: the rows, counted from the
            request's first, whose tokens count.
    """

    def __init__(
        self,
        limits: EngineLimits,
        pool: BlockPool,
        *,
        prefix_caching: bool = False,
        block_contents: tuple[str, ...] = (),
        swap_pool: BlockPool | None = None,
        tier_rows: Sequence[int] = (),
        on_disk: Iterable[bytes] | None = None,
        row_bytes: int = 1,
        tier_slots: Sequence[int] = (),
        state_bytes: int = 1,
        preemption_mode: PreemptionMode = "auto",
        policy: Literal["fcfs", "priority"] = "fcfs",
        target_itl_ms: float | None = None,
        costs: StepCosts | None = None,
        drafter: DraftSource | None = None,
        decode_seconds: Sequence[tuple[tuple[int, int], float]] = (),
        sampling_seconds: Sequence[tuple[tuple[int, int], float]] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.swap_pool = swap_pool or BlockPool(0)
        self.policy = policy
        self.costs = costs or StepCosts()
        size, places = limits.block_size, WindowPlaces(pool)
        states = StateSlots(pool.states, size, prefix_caching, self.swap_pool.states)
        self.prefix_cache = PrefixCache(pool, places, states, size, enabled=prefix_caching, facts=block_contents)
        self.forks = Forks(pool, places, states, size)
        lower = tier_rows, size, self.costs, on_disk, row_bytes, tier_slots, state_bytes
        self.tiers = KVTiers(pool, *lower) if tier_rows else None
        self.prefix_cache.tiers = self.tiers
        states.on_publish = None if self.tiers is None else self.tiers.publish_state
        self.running_set = RunningSet(
            limits,
            pool,
            self.swap_pool,
            places,
            states,
            self.prefix_cache,
            self.forks,
            preemption_mode,
            self.costs,
            self.tiers,
        )
        self.running, self.waiting = self.running_set.running, self.running_set.waiting
        decode_costs = DecodeCosts(decode_seconds, sampling_seconds, pads=self.costs.pads)
        self.drafts = None if drafter is None else DraftPlanner(drafter, limits, self.running_set, decode_costs, clock)
        self.planner = StepPlanner(limits, self.running_set, self.costs, policy, target_itl_ms, self.drafts)
        self.suspects = Suspects(self.running_set)
        self._num_added = 0
        self.in_flight: deque[list[Request]] = deque()
        self.paths: dict[Request, list[int]] = {}
        self._resets = True  # the worker forgets all requests before the next step

    @property
    def counts(self) -> SchedulerCounts:
        return self.running_set.counts

    @property
    def request_capacity(self) -> int:
        """Most tokens one request can ever have: the one place that decides what can fit."""
        return min(self.limits.max_model_len, self.pool.num_blocks * self.limits.block_size)

    @property
    def num_waiting(self) -> int:
        held_back = self.prefix_cache.num_held_back + self.running_set.adapters.num_held_back
        return len(self.waiting) + held_back + (0 if self.tiers is None else len(self.tiers.held_back()))

    @property
    def num_preemptions(self) -> int:
        return self.counts.num_recompute_preemptions + self.counts.num_swap_preemptions

    def held_back(self) -> list[Request]:
        """Requests that wait for a block of another one, for files of blocks, or for a slot of their adapter."""
        of_tiers = [] if self.tiers is None else self.tiers.held_back()
        return [*self.prefix_cache.held_back(), *self.running_set.adapters.held_back(), *of_tiers]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Queue a request whose ``max_num_tokens`` is within ``request_capacity``.

        One that generates nothing ends, with "length", in the step that computes the last token of its prompt.
        """
        assert request.status is Status.WAITING
        turn = (self.running_set.adapters.turn_of(request.adapter),) if self.limits.max_loras else ()
        request.rank = (request.priority if self.policy == "priority" else 0, *turn, self._num_added)
        self._num_added += 1
        if self.drafts is not None and request.generates:
            self.drafts.come()
        self._queue(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Queue ``child``, whose first tokens are those of ``parent``, in its rank and with what it has computed.

        ``parent`` was added before, and has ended or not. If it ``keeps_blocks``, ``end_forking`` is to follow.
        """
        child.rank = parent.rank
        self.forks.fork(parent, child)
        self._queue(child)

    def _queue(self, request: Request) -> None:
        prompt_len = len(request.prompt_token_ids)
        assert 0 < prompt_len <= request.max_num_tokens <= self.request_capacity
        request.waits_for_tokens |= self.limits.steps_at_once > 1
        if self.drafts is not None:
            request.takes_drafts = self.drafts.takes_drafts(request)
            request.waits_for_tokens |= request.takes_drafts
        self.waiting.add(request)

    def end_forking(self, parent: Request) -> None:
        """``parent`` will not be forked any more: once it has ended, it keeps no blocks."""
        self.forks.end_forking(parent)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them blocks. An empty step: all that can run is in flight."""
        running_set = self.running_set
        running_set.preempted.clear()
        self.forks.end_copies()
        if self.suspects.is_searching:
            if self.in_flight:
                return SchedulerOutput()
            self.suspects.try_next()
        output = SchedulerOutputBuilder(len(self.pool.windows))
        if self.tiers is not None:
            running_set.wait_again(self.tiers.take_ready())
        requests = self.planner.plan(output)
        if requests:
            self.in_flight.append(requests)
            # What was noted since the last step, also between steps.
            output.released_request_ids, running_set.released = running_set.released, []
            output.swapped_out, running_set.swapped_out = running_set.swapped_out, []
            output.adapter_loads, running_set.adapters.loads = running_set.adapters.loads, []
            output.uses_adapters = running_set.adapters.in_use
            output.moved_keys, running_set.moved_keys = running_set.moved_keys, []
            for window_output, window in zip(output.windows, self.pool.windows, strict=True):
                window_output.swapped_out, window.swapped_out = window.swapped_out, []
                window_output.moved_keys, window.moved_keys = window.moved_keys, []
            awaited = map(self.prefix_cache.awaited_ends, requests, output.num_computed_tokens)
            reserve = len(self.running) + 1  # slots that snapshots leave free
            running_set.states.send(requests, awaited, reserve, output)
            output.states.swapped_out, self.pool.states.swapped_out = self.pool.states.swapped_out, []
            if self.tiers is not None:
                self.tiers.send(output)
            resets, self._resets = self._resets, False
            return output.build(resets=resets)
        if not self.in_flight and self.tiers is not None and self.tiers.held_back():
            return self.move_files(self.tiers.idle_seconds())
        if not self.in_flight and self.has_unfinished_requests():
            raise RuntimeError(f"no request can progress; this is a bug in the scheduler. State: {self._describe()}")
        return SchedulerOutput()

    def move_files(self, wait_seconds: float) -> SchedulerOutput:
        """A step without requests, which moves blocks between tiers and waits so long for a file that is read."""
        assert self.tiers is not None
        output = SchedulerOutputBuilder(len(self.pool.windows))
        self.tiers.send(output)
        output.files = output.files._replace(wait_seconds=wait_seconds)
        self.in_flight.append([])
        return output.build()

    def update(self, output: SchedulerOutput, result: StepResult) -> list[Request]:
        """Enter the results of ``output``, the oldest step in flight.

        Returns the requests that got tokens, and those that ended without one: none was found, or none was to follow
        the prompt. Requests that a result ended are finished, and their blocks free. What the step sampled for a
        request that has ended meanwhile is dropped.
        """
        requests, sampled = self.in_flight.popleft(), result.sampled_token_ids
        self.paths.clear()
        if result.bucket.kind == "tokens":
            self.costs.record_step(result.bucket.num_tokens, result.seconds, output.num_tokens)
        if self.tiers is not None:
            is_full = result.bucket.kind == "tokens" and 2 * output.num_tokens >= result.bucket.num_tokens
            num_states = len(output.states.swapped_out) + len(output.states.swapped_in)
            copied = len(output.swapped_out) + len(output.swapped_in) + num_states * self.tiers.costs.of(is_state=True)
            idle = 0.0 if requests else result.seconds
            self.tiers.end_step(result.files, is_full * output.num_tokens, result.seconds, copied, idle)
        if not requests:  # a step of ``move_files``
            return []
        drafts = drafts_for(requests, output, result) if result.draft_token_ids is not None else ()
        self.forks.end_copies()
        if result.prompt_logprobs is not None:
            self._enter_scores(requests, output, result.prompt_logprobs.logprobs)
        now = time.monotonic()
        # Without drafts a request has one row.
        rows: Sequence[int] = range(len(requests)) if len(sampled) == len(requests) else output.first_rows()
        advanced = []
        columns = output.num_samples, output.num_computed_tokens, output.num_scheduled_tokens
        for request, row, num_samples, start, count in zip(requests, rows, *columns, strict=True):
            token_id = sampled[row]
            # The usual case first: a token, and nothing that follows from it.
            if (
                num_samples == 1
                and start + count < request.next_event
                and token_id >= 0
                and token_id not in request.stop_token_ids
            ):
                request.num_in_flight -= 1
                request.output_token_ids.append(token_id)
                advanced.append(request)
            elif num_samples > 1:
                if self._accept(request, start, sampled[row : row + num_samples], now):
                    advanced.append(request)
            elif self._enter(request, token_id, start + count, num_samples, now):
                advanced.append(request)
        if self.drafts is not None:
            if drafts:
                self.drafts.take(requests, drafts)
            self.drafts.record(result, output)
        return advanced

    def _enter_scores(self, requests: list[Request], output: SchedulerOutput, logprobs: Sequence[float]) -> None:
        """Enter that the ``prompt_targets`` of a step of ``requests`` have their log-probabilities."""
        start = 0
        for index, before, token_ids in output.prompt_targets:
            request, end = requests[index], start + len(token_ids)
            num_scored = output.num_computed_tokens[index] + before + 1 + len(token_ids)
            request.num_scored = max(request.num_scored, num_scored)
            if not request.generates and request.finish_reason is None and any(map(math.isnan, logprobs[start:end])):
                request.pending_error = _NOT_FINITE
                self.counts.num_not_finite_failures += 1
            start = end

    def _enter(self, request: Request, token_id: int, end: int, num_samples: int, now: float) -> bool:
        """Enter a step's result for a request without drafts, whose first ``end`` tokens are computed by now.

        False: it has no token more, and has not ended.
        """
        request.num_in_flight -= num_samples
        if request.finish_reason is not None:
            return False
        if num_samples and token_id < 0:  # before its blocks are published
            self._fail_without_token(request)
            return True
        caching, size = self.prefix_cache.enabled, self.limits.block_size
        is_running = request.status is Status.RUNNING  # else it was preempted while the step ran
        if caching and is_running and end >= (request.num_published_blocks + 1) * size:
            self.running_set.wait_again(self.prefix_cache.publish(request, end))
        if not num_samples:
            if end == request.max_num_tokens:
                self.finish(request, "length")
            return end == request.max_num_tokens
        request.output_token_ids.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = now
        if token_id in request.stop_token_ids:
            self._stop(request, token_id)
        elif request.num_tokens - request.num_in_flight >= request.max_num_tokens:
            self.finish(request, "length")
        elif is_running and (not caching or request.num_published_blocks == end // size):
            block_end = (end // size + 1) * size if caching else request.max_num_tokens
            request.next_event = min(block_end, request.max_num_tokens - 1)
        return True

    def _accept(self, request: Request, start: int, sampled: tuple[int, ...], now: float) -> bool:
        """Enter what a step sampled for a request with drafts: ``start`` tokens were computed before.

        The step sampled a token after the last known one (``sampled[0]``), and one after each draft. The one after
        draft j is what plain decoding would sample if this draft and those before it are right, which is
        ``drafts[j] == sampled[j]``. So sampled tokens count up to the one in the place of the first wrong draft. The
        others are dropped, and what the step computed of them is not counted. Of a tree those of one path count, whose
        keys then go where a chain has them. False: the request has ended before.
        """
        drafts, request.draft_token_ids = request.draft_token_ids, []
        tree, request.draft_tree = request.draft_tree, None
        request.num_in_flight -= 1 + len(drafts)
        if request.finish_reason is not None:
            return False
        path: Sequence[int] = ()
        if tree is None:
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] == sampled[num_accepted]:
                num_accepted += 1
            tokens = sampled[: 1 + num_accepted]
        else:
            path = self.paths[request] = tree.path(sampled)
            tokens = tuple(sampled[row] for row in path)
        stop = next((index for index, token_id in enumerate(tokens) if token_id in request.stop_token_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
        failed = tokens[-1] < 0
        num_computed = len(tokens)
        if failed:
            tokens = tokens[:-1]
        request.num_tokens -= 1 + len(drafts) - len(tokens)
        request.num_computed_tokens -= 1 + len(drafts) - num_computed
        request.output_token_ids += tokens
        if self.drafts is not None:
            self.drafts.accept(request, start + 1, drafts, sampled, len(tokens) - 1)
        self.running_set.states.accept(request, num_computed, start)
        self.running_set.move_keys(request, start, path[:num_computed])
        if request.first_token_time is None:
            request.first_token_time = now
        if self.prefix_cache.enabled and request.status is Status.RUNNING:
            # What is still to be moved is published with a later step: the one that moves it may break.
            in_place = next((place for place, row in enumerate(path) if row != place), len(tokens))
            num_published = min(start + len(tokens), start + in_place)
            self.running_set.wait_again(self.prefix_cache.publish(request, num_published))
        if failed:
            self._fail_without_token(request)
        elif stop is not None:
            self._stop(request, tokens[-1])
        elif request.num_tokens >= request.max_num_tokens:
            self.finish(request, "length")
        return True

    def _fail_without_token(self, request: Request) -> None:
        self.counts.num_not_finite_failures += 1
        self.finish(request, "error", _NO_TOKEN)

    def _stop(self, request: Request, token_id: int) -> None:
        # An end-of-text id is no reason of its own; an id that the user named is.
        named = token_id in (request.sampling_params.stop_token_ids or ())
        self.finish(request, "stop", token_id if named else None)

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, whether it runs or waits, and free its blocks. A finished one is left as it is."""
        if request.status is Status.FINISHED:
            return
        self.running_set.remove(request)
        request.end(finish_reason, stop_reason)
        if self.drafts is not None:
            self.drafts.end(request)

    def end(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """As ``finish``, but a request that has ended already, by its last tokens, gets these reasons instead."""
        self.finish(request, finish_reason, stop_reason)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason

    def drop_output(self, request: Request, num_tokens: int) -> None:
        """Keep only the first ``num_tokens`` output tokens of a request that is about to end."""
        del request.output_token_ids[num_tokens:]

    def fail_steps_in_flight(self, reason: str) -> list[Request]:
        """The steps in flight broke: what they computed cannot be relied on. Returns the requests that this ended.

        ``Suspects`` finds out which requests are the cause: they end with an error. All others wait to be admitted
        anew, since the worker forgets all requests before the next step, and compute all their tokens again, also those
        that were swapped out.
        """
        self.forks.end_copies()
        if self.drafts is not None:
            self.drafts.start_over()
        failed = {request: None for requests in self.in_flight for request in requests}
        self.in_flight.clear()
        for request in failed:
            request.cancel_drafts()
            request.num_tokens -= request.num_in_flight
            request.num_in_flight = 0
            if request in self.waiting:  # it was preempted meanwhile; the queue goes by how many tokens it lacks
                self.waiting.remove(request)
                self.waiting.add(request)
        ended = self.suspects.take([request for request in failed if request.status is not Status.FINISHED])
        for request in ended:
            self.finish(request, "error", reason)
        self.running_set.start_over()
        self._resets = True
        return ended

    def replace(self, other: "Scheduler", requests: Iterable[Request], reason: str) -> None:
        """Take the place of ``other``, which broke in the middle of a step, with its counts and costs.

        All its ``requests`` end with an error for this reason, unless they have ended before.
        """
        for request in requests:
            ended = request.finish_reason is not None
            request.end(request.finish_reason or "error", request.stop_reason if ended else reason)
            if self.drafts is not None:
                self.drafts.end(request)
        self.running_set.counts = other.counts
        self.costs = self.running_set.costs = self.planner.costs = other.costs
        self.pool.num_evictions, self.pool.peak_used = other.pool.num_evictions, other.pool.peak_used
        self.prefix_cache.num_queried_tokens = other.prefix_cache.num_queried_tokens
        self.prefix_cache.num_hit_tokens = other.prefix_cache.num_hit_tokens
        if self.tiers is not None and other.tiers is not None:
            self.tiers.take_over(other.tiers)

    def _describe(self) -> str:
        requests = ", ".join(
            f"{request.request_id} ({request.status.value}: {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens computed, {len(request.block_ids)} blocks)"
            for request in [*self.running, *self.waiting, *self.held_back()][:20]
        )
        return f"{self.pool.num_free} of {self.pool.num_blocks} blocks free; {requests}; {self.limits}"
