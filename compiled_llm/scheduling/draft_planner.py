"""DraftPlanner: which drafts a step verifies. Plain Python."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.decode_costs import DecodeCosts
from compiled_llm.scheduling.draft_account import DoneStep, DraftAccount, Kind
from compiled_llm.scheduling.draft_gains import LEAST_OF_MEAN, Gains, weights
from compiled_llm.scheduling.draft_lengths import Chances, History, lengths, lengths_beside_prompts
from compiled_llm.scheduling.draft_trees import DraftTree, allowed
from compiled_llm.scheduling.drafter import DraftSource, ReadsSamples
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.running_set import RunningSet
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import WorkerDrafts

# For the last tokens of requests, so many or fewer of each, a network does not begin to read if it lacks more than
# ``_READ_FOR_A_TOKEN`` times as many. The head of the bundled model read 180 to 240 in the time of a step.
_LAST_TOKENS, _READ_FOR_A_TOKEN = 16, 64


class _PlannedStep(NamedTuple):
    """What is known of a step once it is planned.

    Attributes:
        began: when its planning began.
        looked: seconds of looking for drafts in it.
        drafted_before: whether a network drafted behind the step before it, and lacks no prompt of this one.
        lacks_much: whether that network drafted behind neither of the two steps before it, so that it has to read.
    """

    began: float
    looked: float
    drafted_before: bool
    lacks_much: bool


class DraftPlanner:
    """Asks ``source`` for drafts, once a step, and lets the step compute those that pay.

    Args:
        costs: of steps that decode; a source that does not adapt has no use for them.
        clock: in seconds; None: that of the machine.

    Attributes:
        proposed: for the step that is being planned.
    """

    def __init__(
        self,
        source: DraftSource,
        limits: EngineLimits,
        running_set: RunningSet,
        costs: DecodeCosts | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.source, self.limits, self.running_set = source, limits, running_set
        self.proposed: dict[Request, Sequence[int]] = {}
        self.costs, self._clock = costs or DecodeCosts(), clock or time.perf_counter
        self._adapts = source.adapts and bool(self.costs)
        self.running_set.counts.num_accepted_by_position = (0,) * limits.num_draft_tokens
        self._histories: dict[Request, History] = {}
        self._of_all, self._gains = Chances(), Gains()
        # Whether the step that is being planned may look for drafts, or have a network make some.
        # On a CPU alone one graph computes steps with drafts and without.
        self.account, self._pays = DraftAccount(one_graph=limits.mixes_lens), True
        # Whether the step that is being planned rests, in which nothing is looked for or measured, and how many follow.
        self._rests, self._num_rests = False, 0
        self._rested = False  # whether the last plan that was not empty was of such a step
        # When the last steps that rest began, and how many they are; None where something else came between.
        self._rest: tuple[float, int] | None = None
        self._num_resting = 1  # requests of them
        # Whether requests may wait for their tokens for drafts alone. Where nothing is looked for, they are let go.
        self._keeps_waiting = False
        self._kind: Kind = 1, False  # of the step that was planned last
        self._computes_prompts = False  # whether the step that is done did
        self._is_first = False  # whether the step before that did
        self._num_accepted = 0  # drafts of that step
        # Of the step that was planned last, see ``_PlannedStep``; and the step before that.
        self._began, self._looked, self._drafted_before, self._lacks_much = 0.0, 0.0, False, True
        self._of_last = _PlannedStep(0.0, 0.0, False, True)
        # Of it, too: whether a network is to draft behind it; and what it was, once it is done.
        self._drafts_next = False
        self._done: DoneStep | None = None
        self._of_worker = source if isinstance(source, WorkerDrafts) else None
        self._reader = source if isinstance(source, ReadsSamples) else None

    def come(self) -> None:
        """A request has come that is no fork of another."""
        self._gains.come([len(request.output_token_ids) for request in self.running_set.running])

    def takes_drafts(self, request: Request) -> bool:
        """Whether tokens of ``request``, which has just come, may be drafted at all."""
        self._end_rest()
        if request.sampling_params.num_speculative_tokens == 0:
            return False
        # The last token is sampled in any case: a draft for it would be of no use.
        takes = request.max_num_tokens - len(request.prompt_token_ids) > 1
        if takes and self._adapts:
            self._histories[request] = History(request.waits_for_tokens, Chances(self._of_all))
            self._keeps_waiting = True
        return takes

    def _end_rest(self) -> None:
        """Other requests run from now on, and what does not pay for those before may pay for them."""
        if self._num_rests:
            self.account.end_rest(self._kind, self._num_rests)
            if self._rest is not None:
                began, count = self._rest
                self._rest = (began, count - self._num_rests) if count > self._num_rests else None
            self._num_rests = 0

    def _drop_rest(self) -> None:
        """What the steps that rested took is not known: something else came between."""
        self._end_rest()
        if self._rest is not None:
            self.account.pass_by(self._kind, self._rest[1])
            self._grow_old(self._rest[1])
            self._rest = None

    def _grow_old(self, count: int) -> None:
        """So many steps have rested."""
        if self.costs:
            self.costs.rest(self._num_resting, count, self._kind[1])

    def start_over(self) -> None:
        """The steps in flight broke."""
        self._drop_rest()
        self._done, self._drafts_next = None, False

    def room(self, left: int) -> tuple[int, bool]:
        """Most drafts of a step that has ``left`` tokens beside the next one of each running request.

        And whether it may compute prompts besides. Where prompts wait or are computed, drafts get half of what is left,
        or without chunks as much as the first prompt leaves; and no more than there are logits rows besides those of
        all requests that may be in the step.
        """
        running, waiting, limits = self.running_set.running, self.running_set.waiting, self.limits
        num_waiting = len(waiting) + self.running_set.prefix_cache.num_held_back
        none_comes_in = not num_waiting or len(running) >= limits.max_num_seqs
        if none_comes_in and all(request.num_tokens - request.num_computed_tokens == 1 for request in running):
            return min(left, limits.most_decode_tokens - len(running)), False
        rows = limits.decode_bucket_sizes[-1] - min(limits.max_num_seqs, len(running) + num_waiting)
        first = waiting.first()
        if limits.chunked_prefill or first is None:
            return min(rows, left // 2), True
        return min(rows, left - (first.num_tokens - first.num_computed_tokens)), True

    def rests(self) -> bool:
        """Whether the step that is about to be planned rests: it needs no ``propose``, and is not measured.

        So it is while no request takes drafts, and for most steps while looking does not pay.
        """
        if self._num_rests > 0:
            self._num_rests -= 1
            self._rests = True
        elif self._adapts:
            self._rests = not self._histories
            self._rest = None if self._rests else self._rest  # else it is over, and the next plan enters it
        if self._rests:  # what is known of the last step is out of date when steps are measured again
            self._done, self._drafts_next = None, False
        return self._rests

    def propose(self, most: int, beside_prompts: bool) -> None:
        """Ask for the drafts of the step that is about to be planned, at most ``most`` of all requests.

        ``beside_prompts``: whether the step may compute more than the next token of each request and drafts.
        """
        self.proposed = {}
        started = self._clock()
        self._end_step(started)
        if self._rest is not None:
            began, count = self._rest
            self._rest = None
            seconds = (started - began) / count * self.limits.steps_at_once  # stages compute others meanwhile
            self.account.enter_rest(self._kind, count, seconds)
            self._grow_old(count)
        if self._adapts and not self._choose():
            if self._keeps_waiting:
                self._let_go()
            if not (self._keeps_waiting or self._drafts_next) and (count := self.account.rest(self._kind)):
                self._rests, self._num_rests, self._rest = True, count - 1, (started, count)
                self._num_resting = len(self.running_set.running) or 1
            return
        self._keeps_waiting = True
        if most <= 0:
            return
        asked, counts = list[Request](), list[int]()
        for request in self.running_set.running:
            if request.takes_drafts and self._may_draft(request) and (count := min(most, self._most(request))) > 0:
                asked.append(request)
                counts.append(count)
        if not asked:
            return
        proposals = self.source.propose(asked, counts)
        if self._adapts:
            counts = self._lengths(asked, proposals, most, beside_prompts)
        for request, drafts, count in zip(asked, proposals, counts, strict=True):
            taken = drafts[: min(count, most)]
            if isinstance(taken, DraftTree):
                taken = taken.depth_first()
            if taken and request.mask is not None:
                taken = self._allowed(request, taken)
            if taken:
                self.proposed[request] = taken
                most -= len(taken)
        self._looked = self._clock() - started
        self.running_set.counts.draft_seconds += self._looked
        self.running_set.counts.draft_gain_seconds -= self._looked

    def _choose(self) -> bool:
        """Whether the step that is about to be planned looks for drafts."""
        self._kind = self._next_kind()
        # A network that has drafted for requests that ended since has to read others from their beginning.
        goes_on = any(request.takes_drafts for request in self.running_set.running)
        # What it drafted behind the step before the last one is verified by now, and it lacks little.
        self._lacks_much = not (goes_on and (self._drafts_next or self._drafted_before))
        self._drafted_before = self._drafts_next and goes_on
        reads = self._of_worker is not None and self._lacks_much
        self._pays = self.account.looks(self._kind, goes_on=not reads) and not (reads and self._ends_soon())
        # What a network has drafted already costs little to verify.
        return self._pays or (self._of_worker is not None and self._drafted_before)

    def _ends_soon(self) -> bool:
        """Whether too few tokens may still come to make up for those that the network would have to read."""
        assert self._of_worker is not None
        requests = [request for request in self._next_requests() if request.takes_drafts]
        left = sum(request.max_num_tokens - request.num_tokens for request in requests)
        if left > _LAST_TOKENS * len(requests):  # what drafts are worth is measured
            return False
        return left * _READ_FOR_A_TOKEN < self._of_worker.num_unread(requests)

    def _next_kind(self) -> Kind:
        """Of decode steps that come."""
        requests = self._next_requests()
        return (1 << (len(requests) - 1).bit_length(), _samples(requests)) if requests else self._kind

    def _next_requests(self) -> Sequence[Request]:
        """Of decode steps that come. While prompts are computed, those that wait are taken to come in, too."""
        requests = self.running_set.running
        if not self._computes_prompts and requests:
            return requests
        left = max(0, self.limits.max_num_seqs - len(requests))
        return [*requests, *itertools.islice(self.running_set.waiting, left)]

    def _let_go(self) -> None:
        """Nothing is looked for: no request has to wait for its tokens, except those whose drafts are in flight."""
        self._keeps_waiting = False
        for request, history in self._histories.items():
            if request.draft_token_ids:
                self._keeps_waiting = True
            else:
                request.waits_for_tokens = history.waits

    def add(self, request: Request, place: int, output: SchedulerOutputBuilder) -> int:
        """Let the step compute drafts of the tokens after the one that it samples of ``request``. Returns how many.

        ``place``: of the request in the step.
        """
        drafts = self.proposed.pop(request, ())
        if not drafts:
            return 0
        drafts = drafts[: self.running_set.grow_for_drafts(request, len(drafts))]
        reserve = len(self.running_set.running) + 1
        drafts = drafts[: self.running_set.states.make_writable_for_drafts(request, len(drafts), reserve)]
        if isinstance(drafts, DraftTree) and not drafts.is_chain:
            request.draft_tree = drafts
            output.trees.append((place, drafts.parents))
        request.add_drafts(list(drafts))
        output.token_ids.extend(drafts)
        self.running_set.counts.num_draft_tokens += len(drafts)
        self.running_set.counts.num_drafts += bool(drafts)
        return len(drafts)

    def plan_next(self, requests: Sequence[Request], output: SchedulerOutputBuilder) -> None:
        """A step of ``requests`` is planned: where a network of the worker drafts, say whether it is to draft after it.

        A request gets blocks for what may be drafted then, as far as some are free.
        """
        if self._of_worker is not None and output.admissions:
            self._of_worker.admit(output.admissions)
        if not requests:  # all that can run is in flight: the step before goes on, and is what ``record`` is told of
            if not self._rests:
                self._began, self._looked, self._drafted_before, self._lacks_much = self._of_last
            elif self._histories:
                self._num_rests += 1
            self._rests |= self._rested
            return
        self._rested = self._rests
        if self._rests or self._of_worker is None:
            return
        self._drafts_next = self._pays and any(request.takes_drafts for request in requests)
        output.drafts_next = self._drafts_next
        if not output.drafts_next:
            if output.num_scheduled_tokens != output.num_samples:  # prompts, which the network lacks from now on
                self._drafted_before = False
            return
        self._of_worker.tell(requests, output)
        for request, samples in zip(requests, output.num_samples, strict=True):
            if request.takes_drafts and samples:
                self.running_set.grow_ahead(request, self._of_worker.num_tokens)
                if request.num_sent_blocks < len(request.block_ids):
                    self.running_set.send_blocks(request, output)

    def take(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The results of a step of ``requests`` are entered: what a network of the worker has drafted for the next."""
        assert self._of_worker is not None, "nobody asked the worker for drafts"
        self._of_worker.take(requests, drafts)

    def accept(self, request: Request, start: int, drafts: list[int], sampled: Sequence[int], count: int) -> None:
        """The first ``count`` of these drafts were right; ``sampled``, from position ``start`` on, came with them."""
        if self._reader is not None and drafts:  # else it was preempted meanwhile
            self._reader.read_samples(request, start, drafts, sampled)
        if count > 0:
            self._num_accepted += count
            self._gains.accept(request, count, self._kind)
            counts = self.running_set.counts
            counts.num_accepted_draft_tokens += count
            known = counts.num_accepted_by_position
            counts.num_accepted_by_position = (*[number + 1 for number in known[:count]], *known[count:])

    def record(self, result: StepResult, output: SchedulerOutput) -> None:
        """A step is done, and its drafts were accepted or not."""
        self._is_first, self._computes_prompts = self._computes_prompts, result.bucket.kind != "decode"
        num_accepted, self._num_accepted = self._num_accepted, 0
        drafting, counts = result.draft_seconds, self.running_set.counts
        if self._rests and not (drafting or self._computes_prompts):  # the usual case where drafts do not pay
            return
        if self._computes_prompts:
            self._drop_rest()
            self.account.unsettle()
        counts.draft_seconds += drafting
        if self._rests or not self.costs:
            return
        if self._computes_prompts:
            if drafting:
                self.account.enter_reading(self._next_kind(), drafting)
            return
        num_requests, num_tokens = len(output.request_ids), output.num_tokens
        num_drafts, seconds, costs = len(result.sampled_token_ids) - num_requests, result.seconds - drafting, self.costs
        samples = self._kind[1] if self._adapts else _samples(self.running_set.running)
        num_more = num_tokens - num_requests  # drafts, and tokens of prompts that are so short
        costs.record(num_requests, num_more, seconds, samples)
        if num_drafts:
            plain = costs.device(num_requests, 0, samples) + costs.host(num_requests, False)
            took = seconds + costs.host(num_requests, True)
            counts.draft_gain_seconds += num_accepted * plain / num_requests + plain - took
        counts.draft_gain_seconds -= drafting
        if self.running_set.running:  # else nobody knows when the next step begins
            network = drafting if result.draft_token_ids is not None else 0.0
            reads, gained = self._lacks_much, self._gained(num_accepted, num_requests)
            alike, has_drafts = costs.key(num_requests, num_more), num_drafts > 0
            self._done = DoneStep(
                self._kind, num_requests, alike, has_drafts, seconds, network=network, reads=reads, gained=gained,
                is_first=self._is_first,
            )  # fmt: skip

    def _end_step(self, now: float) -> None:
        """The next step begins: what the host took for the one that is done is known."""
        if self._done is not None:
            done = self._done
            host = max(0.0, now - self._began - self._looked - done.seconds - done.network)
            self.costs.record_host(done.num_requests, done.has_drafts, host)
            if self._adapts:
                self.account.enter(done._replace(looked=self._looked, seconds=done.seconds + host))
        self._of_last = _PlannedStep(self._began, self._looked, self._drafted_before, self._lacks_much)
        self._began, self._looked, self._done = now, 0.0, None

    def _gained(self, num_accepted: int, num_requests: int) -> float:
        """How many plain steps the right drafts of a step have saved."""
        gained = num_accepted / num_requests
        if self._kind[0] == 1 or not num_accepted or not self._end_together():
            return gained
        shared = self._shared(max(2, num_requests))
        return shared * self._least_gained() + (1.0 - shared) * gained

    def _least_gained(self) -> float:
        """What the request that gained least has gained anew, in plain steps."""
        # Of stages each has other requests in its steps, and what they gain saves each stage one.
        return self._gains.take_least(self.running_set.running) * self.limits.steps_at_once

    def _end_together(self) -> bool:
        """Whether all is done when the last of the requests is that run. While others wait, none is behind."""
        if self._num_waiting():
            self._gains.start_over()
            return False
        return self._adapts and self._gains.came_together

    def _num_waiting(self) -> int:
        """Requests that wait for a place, a prefix or an adapter."""
        held_back = self.running_set.prefix_cache.num_held_back + self.running_set.adapters.num_held_back
        return len(self.running_set.waiting) + held_back

    def _shared(self, num_requests: int) -> float:
        """The share of a plain step that only the request saves that gains least: the others save their own parts."""
        return min(self.costs.shared(num_requests, self._kind[1]), 1.0 - LEAST_OF_MEAN)

    def end(self, request: Request) -> None:
        """A request has ended."""
        self._end_rest()
        history = self._histories.pop(request, None)
        if history is not None:
            history.compare(request.output_token_ids, self._of_all)
        self.proposed.pop(request, None)
        running = self.running_set.running
        self._gains.end(request, bool(running or self._num_waiting()))
        if running and self._gains.kind == self._kind and self._kind[0] > 1 and self._end_together():
            self.account.gain(self._kind, self._shared(max(2, len(running))) * self._least_gained())
        if not running:  # nobody knows when the next step begins
            self._drop_rest()
            self._done = None
        self.source.end(request)

    def _may_draft(self, request: Request) -> bool:
        """Whether to look for drafts now: the host knows all tokens but for the one that the next step samples.

        While there is no use in looking, the host need not know them.
        """
        if not request.generates or request.num_tokens - request.num_computed_tokens != 1:
            return False
        if request.draft_token_ids:  # in flight: which tokens come next is not known before these are verified
            return False
        if not self._adapts:
            return not request.num_in_flight
        if not request.waits_for_tokens:
            request.waits_for_tokens, request.next_look = True, 0  # from now on each step is to be looked at
        return not request.num_in_flight

    @staticmethod
    def _allowed(request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """The first of them, as far as its mask allows them; and its masks after these."""
        assert request.mask is not None
        if isinstance(drafts, DraftTree):
            masks_after = functools.partial(request.mask.after_drafts, request.output_token_ids)
            try:
                tree, request.draft_masks = allowed(drafts, masks_after)
            except ValueError:  # as below
                tree, request.draft_masks = drafts[:0], ()
            return tree
        try:
            request.draft_masks = request.mask.after_drafts(request.output_token_ids, drafts)
        except ValueError:  # of a grammar, which ``words`` raises, too, to end the request
            request.draft_masks = ()
        return drafts[: len(request.draft_masks)]

    def _most(self, request: Request) -> int:
        """Most drafts of a request: one token is sampled after them."""
        own = request.sampling_params.num_speculative_tokens
        most = min(self.limits.num_draft_tokens, request.max_num_tokens - request.num_tokens - 1)
        return most if own is None else min(own, most)

    def _lengths(
        self, asked: Sequence[Request], proposals: Sequence[Sequence[int]], most: int, beside_prompts: bool
    ) -> list[int]:
        """How many drafts of each request the step takes."""
        running, of_all = self.running_set.running, self._of_all
        histories = [self._histories[request] for request in asked]
        for request, history in zip(asked, histories, strict=True):
            history.compare(request.output_token_ids, of_all)
        num_requests = sum(not (request.num_in_flight and request.waits_for_tokens) for request in running)
        costs, samples = self.costs, self._kind[1]
        host = costs.host(num_requests, False), costs.host(num_requests, True)
        for history, request, drafts in zip(histories, asked, proposals, strict=True):
            history.proposal, history.num_output_tokens = drafts, len(request.output_token_ids)
        available = [len(drafts) for drafts in proposals]
        if not any(available):  # as of most looks at new text
            return available
        chances = [
            history.chances.chance(count) if not isinstance(drafts, DraftTree) else drafts.chance
            for history, count, drafts in zip(histories, available, proposals, strict=True)
        ]
        if beside_prompts:
            return lengths_beside_prompts(chances, available, most)
        nodes = [drafts.worths if isinstance(drafts, DraftTree) else () for drafts in proposals]

        # A network drafts behind each step as long as its drafts pay, however many of them a step verifies.
        network = self.account.network(self._kind)

        def seconds(num_drafts: int) -> float:
            return costs.device(num_requests, num_drafts, samples) + host[num_drafts > 0] + network

        worth = list[float]()
        if len(running) > 1 and self._end_together():
            of_each = dict(zip(running, weights([len(each.output_token_ids) for each in running]), strict=True))
            worth = [of_each[request] for request in asked]
        return lengths(chances, available, num_requests, seconds, most, nodes=nodes, weights=worth)


def _samples(requests: Sequence[Request]) -> bool:
    """Whether some of them is not greedy."""
    return any(request.sampling_params.temperature for request in requests)
