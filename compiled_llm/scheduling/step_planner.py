"""StepPlanner: which tokens of the running requests the next step computes, and which requests it admits. Plain Python.

There is no prefill and no decode here. Each request has tokens known and tokens computed, and a step lets the second
catch up with the first within a budget of tokens. So a prompt larger than the budget is chunked, a preempted request
starts again with nothing computed, a prefix found in the cache counts as computed, and a running request catches up by
the one token sampled last. (vLLM V1's idea.)

Requests are served by rank: in order of arrival, or of priority first. Requests that lack one token get it before all
others. Of the others, one that does not fit into what is left of the step gets a part of it, and leaves half for later
ones that fit beside it.

Drafts are tokens that a drafter guesses to follow the last known one. The step computes them as well and samples at
each; the scheduler then accepts as many as are right (``Scheduler.update``).
"""

from collections import deque
from typing import Literal

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.draft_planner import DraftPlanner
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.running_set import RunningSet
from compiled_llm.scheduling.step_masks import add_masks

# Of a step with a target, whatever that is: with fewer, prompts would come in more slowly than answers end.
_TOKENS_A_DECODE = 4


class StepPlanner:
    """Fills a step with tokens. For the arguments see ``Scheduler``."""

    def __init__(
        self,
        limits: EngineLimits,
        running_set: RunningSet,
        costs: StepCosts,
        policy: Literal["fcfs", "priority"],
        target_itl_ms: float | None,
        drafts: DraftPlanner | None,
    ) -> None:
        self.limits, self.running_set, self.costs = limits, running_set, costs
        self.policy, self.target_itl_ms, self.drafts = policy, target_itl_ms, drafts
        self.running, self.waiting = running_set.running, running_set.waiting
        self.prefix_cache = running_set.prefix_cache
        self.places = running_set.places
        self._has_states = running_set.states.are_used
        self._looks_always = self._has_states or self.places.stream is not None
        # Of the step that is being planned: its drafts, and the (index, request) that sample tokens under a mask.
        self._num_drafts = self._most_decodes = 0
        self._masked: list[tuple[int, Request]] = []

    def plan(self, output: SchedulerOutputBuilder) -> list[Request]:
        """Fill ``output``. Returns its requests, in the order of its columns; none: nothing can run now."""
        self.running_set.wait_again(self.running_set.adapters.next_turn())
        self._preempt_for_priority()
        self._make_room_for_the_first()
        self._num_drafts, self._masked = 0, []
        # Where stages compute at once, each step in flight has its share of the requests that decode.
        self._most_decodes = -(-len(self.running) // self.limits.steps_at_once)
        num_preempted = len(self.running_set.preempted)
        requests: list[Request] = []
        lacking = self._schedule_single_tokens(output, requests)
        # When the pool has just run out, no request is admitted: it would be the next to be preempted.
        admits = len(self.running_set.preempted) == num_preempted
        self._schedule_the_rest(output, requests, lacking, admits)
        add_masks(self._masked, output)  # at the very end: grammars compute them beside the scheduler until now
        if self.drafts is not None:
            self.drafts.plan_next(requests, output)
        return requests

    def _schedule_single_tokens(self, output: SchedulerOutputBuilder, requests: list[Request]) -> deque[Request]:
        """Give each running request that lacks one token that token, and drafts after it.

        Returns the running requests that lack more or generate nothing, by rank.
        """
        token_ids, feedback, all_computed = output.token_ids, output.feedback, output.num_computed_tokens
        if self.drafts is not None and not self.drafts.rests():
            self.drafts.propose(*self.drafts.room(self.budget(len(self.running)) - len(self.running)))
        lacking, num_drafts = list[Request](), dict[int, int]()  # the latter: index in the step -> drafts
        # Requests are preempted from the end of ``running``: this loop does not come to them then.
        for request in self.running:
            computed, known, in_flight = request.num_computed_tokens, request.num_tokens, request.num_in_flight
            needs_look = known >= request.next_look
            if needs_look and not self._is_ready(request, output, lacking):
                continue
            if in_flight:
                feedback.append(request.last_row)
                token_ids.append(0)
            else:
                feedback.append(-1)
                # A prompt of one token whose prefix is computed: there is no output yet.
                token_ids.append((request.output_token_ids or request.prompt_token_ids)[-1])
            request.last_row = len(requests)
            all_computed.append(computed)
            request.num_computed_tokens = computed + 1
            request.num_tokens = known + 1
            request.num_in_flight = in_flight + 1
            requests.append(request)
            if not needs_look:
                continue
            if (computed + 1) % self.limits.block_size == 0:  # a full block, which others may wait for
                self.running_set.wait_again(self.prefix_cache.take_waiting(request, computed))
            if request.mask is not None:
                self._masked.append((len(requests) - 1, request))
            if self.drafts is not None and request in self.drafts.proposed:
                count = self.drafts.add(request, len(requests) - 1, output)
                if count:
                    num_drafts[len(requests) - 1] = count
                    self._num_drafts += count
            if request.num_sent_blocks < len(request.block_ids):
                self.running_set.send_blocks(request, output)
            self._look_later(request)
        output.request_ids.extend([request.request_id for request in requests])
        counts = _with_drafts(requests, num_drafts)
        output.num_scheduled_tokens.extend(counts)
        output.num_samples.extend(counts)
        return deque(request for request in lacking if request.status is Status.RUNNING)

    def _is_ready(self, request: Request, output: SchedulerOutputBuilder, lacking: list[Request]) -> bool:
        """Whether this step computes the one token that a running request lacks. It has a block for that token then.

        A request that lacks more tokens goes to ``lacking``. False also where no block was left and the request itself
        was preempted, being the last by rank.
        """
        computed, known = request.num_computed_tokens, request.num_tokens
        if known - computed > 1 or (not request.generates and known > computed) or self.places.has_old_sinks(request):
            lacking.append(request)
            return False
        # Its last token is in flight; or the host has to know the token that is.
        if known >= request.max_num_tokens or (request.num_in_flight and request.waits_for_tokens):
            return False
        if len(output.num_computed_tokens) >= self._most_decodes:
            return False
        if self._has_states and not self.running_set.make_state_writable(request):
            return False
        if computed == len(request.block_ids) * self.limits.block_size and not self.running_set.grow(request):
            return False
        return request.forked_index < 0 or self.running_set.make_writable(request, computed, output)

    def _look_later(self, request: Request) -> None:
        """Note that the request need not be looked at before its block is full: until then its steps are alike."""
        place = request.num_computed_tokens % self.limits.block_size
        if place and not (self._looks_always or request.waits_for_tokens or request.mask is not None):
            last = request.num_computed_tokens - place + self.limits.block_size - 1
            request.next_look = min(last + 1, request.max_num_tokens)

    def _make_room_for_the_first(self) -> None:
        """Where others have all places of a window: the first request gets some for two tokens, if it lacks several."""
        request = self.running[0] if self.running and self.running[0].held else None
        if request is not None and request.num_tokens - request.num_computed_tokens > 1:
            while not self.running_set.give_places(request, 2) and self.running_set.make_room(request):
                pass

    def _schedule_the_rest(
        self, output: SchedulerOutputBuilder, requests: list[Request], lacking: deque[Request], admits: bool
    ) -> None:
        """Share what is left of the step among running requests that lack more than a token and waiting ones."""
        left = self.budget(len(requests)) - len(output.token_ids)
        limit = left  # most tokens of a request that is scheduled as a whole
        partial: Request | None = None  # the one request that is chunked: it gets what the others leave
        num_held_back = 0  # requests that wait for blocks of others: the next one may come in, but not all are tried
        while limit > 0:
            waiting = self.running_set.next_waiting(None if partial is None else limit) if admits else None
            if lacking and (waiting is None or lacking[0].rank < waiting.rank):
                request = lacking.popleft()
            elif waiting is not None:
                if not self.running_set.fits(waiting, limit, partial is None) or not self.running_set.admit(
                    waiting, output
                ):
                    is_held_back = waiting not in self.waiting
                    num_held_back += is_held_back
                    admits = is_held_back and num_held_back < self.limits.max_num_seqs
                    continue
                request = waiting
            else:
                break
            count = self.places.num_due(request)  # all tokens that it lacks, but for streams
            if count <= limit:
                self._schedule(request, count, output, requests)
                left -= count
                limit -= count
            elif partial is None and self.limits.chunked_prefill:
                partial, limit = request, left // 2
        if partial is not None:
            count = min(left, self.places.num_due(partial))
            self._schedule(partial, count, output, requests)

    def _schedule(self, request: Request, count: int, output: SchedulerOutputBuilder, requests: list[Request]) -> None:
        """Let the step compute ``count`` tokens of a running request, which has blocks for them."""
        assert count > 0
        start = request.num_computed_tokens
        if self.places.has_old_sinks(request):
            # All at once, even if the step gets larger than it should beside decodes, which could hold it up for ever.
            room = self.limits.max_num_batched_tokens - len(output.token_ids)
            if self.places.num_due(request) <= room and not request.num_in_flight:
                self.running_set.send_blocks(request, output)
                self.places.schedule_sinks(request, len(requests), output)
                requests.append(request)
            return
        count = self.places.most_in_a_step(request, count)
        if request.forked_index >= 0 and not self.running_set.make_writable(request, start, output):
            return
        assert request.num_in_flight == 0, "more than one token is lacking, and one of them is not known"
        if request.held:
            count = self.running_set.give_places(request, count)
            if not count:
                return
        if not self.running_set.make_state_writable(request):
            return
        self.running_set.send_blocks(request, output)
        samples = int(start + count == request.num_tokens < request.max_num_tokens)
        output.token_ids.extend(request.tokens(start, start + count))
        output.feedback.append(-1)
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(start)
        output.num_scheduled_tokens.append(count)
        output.num_samples.append(samples)
        if request.scored_token_ids:
            before, targets = request.prompt_targets(start, count)
            if targets:
                output.prompt_targets.append((len(requests), before, tuple(targets)))
        if request.mask is not None and samples:
            self._masked.append((len(requests), request))
        request.last_row = len(requests) + self._num_drafts
        request.num_computed_tokens = start + count
        request.num_tokens += samples
        request.num_in_flight += samples
        requests.append(request)
        self.running_set.wait_again(self.prefix_cache.take_waiting(request, start))

    def budget(self, num_decodes: int) -> int:
        """Most tokens of this step."""
        budget = self.limits.max_num_batched_tokens
        if num_decodes == 0:
            return budget
        if self.target_itl_ms is None:
            return self.limits.max_tokens_beside_decodes or budget
        sizes = self.limits.token_bucket_sizes
        allowed = max(self.costs.largest_within(self.target_itl_ms / 1e3, sizes), _TOKENS_A_DECODE * num_decodes)
        return min(budget, next((size for size in sizes if size >= allowed), budget))

    # -- Priorities

    def _preempt_for_priority(self) -> None:
        """Preempt running requests for a waiting one that is more urgent, if it can start then."""
        request = self.waiting.first() if self.policy == "priority" else None
        if request is None or not self.running_set.adapters.may_enter(request):
            return
        less_urgent = [other for other in self.running if other.rank[0] > request.rank[0]]
        if less_urgent and self._could_start(request, self.running[: len(self.running) - len(less_urgent)]):
            self.running_set.make_place_for(request, less_urgent)

    def _could_start(self, request: Request, beside: list[Request]) -> bool:
        """Whether a step would have tokens left for ``request`` beside those of the running requests ``beside``."""
        lacking = [other.num_tokens - other.num_computed_tokens for other in beside]
        num_single = lacking.count(1)
        left = self.budget(num_single) - num_single
        before = sum(lacking) - num_single
        if before < left:
            return self.running_set.fits(request, left - before, may_be_partial=True)
        return self.running_set.fits(request, left // 2, may_be_partial=False)


def _with_drafts(requests: list[Request], num_drafts: dict[int, int]) -> list[int]:
    """How many tokens a step computes of each request that lacks one, with its drafts: ``num_drafts``, by place."""
    counts = [1] * len(requests)
    if num_drafts:
        row = 0
        for place, request in enumerate(requests):
            request.last_row = row
            counts[place] += num_drafts.get(place, 0)
            row += counts[place]
    return counts
