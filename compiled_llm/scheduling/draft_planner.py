"""DraftPlanner: which drafts a step verifies. Plain Python."""

import time
from collections.abc import Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.costs import moved
from compiled_llm.scheduling.draft_lengths import (
    Acceptance,
    DecodeCosts,
    History,
    lengths,
    lengths_beside_prompts,
    num_skipped,
)
from compiled_llm.scheduling.drafter import DraftSource, ReadsSamples
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.running_set import RunningSet
from compiled_llm.scheduling.scheduler_output import SchedulerOutputBuilder
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import WorkerDrafts

_SKIPPED_ON_A_GPU = 16  # steps after looks of no use: a look keeps the next step from starting while this one runs


class DraftPlanner:
    """Asks ``source`` for drafts, once a step, and lets the step compute those that pay.

    Args:
        costs: of decode buckets; a source that does not adapt has no use for them.
    """

    def __init__(
        self, source: DraftSource, limits: EngineLimits, running_set: RunningSet, costs: DecodeCosts | None = None
    ) -> None:
        self.source, self.limits, self.running_set = source, limits, running_set
        self.costs = costs or DecodeCosts()
        self._adapts = source.adapts and bool(self.costs.seconds)
        self._sizes = {
            size: [(size, size * length) for length in limits.draft_lens] for size in limits.decode_bucket_sizes
        }
        self.running_set.counts.num_accepted_by_position = (0,) * limits.num_draft_tokens
        self._histories: dict[Request, History] = {}
        self._of_all = Acceptance()
        self._look_seconds = 0.0  # that looking for the drafts of a request takes; a moving average
        self._proposed: dict[Request, Sequence[int]] = {}  # for the step that is being planned
        self._of_worker = source if isinstance(source, WorkerDrafts) else None
        self._reader = source if isinstance(source, ReadsSamples) else None
        self._network_seconds: dict[int, float] = {}  # by requests of the decode bucket: what a network took behind it

    def takes_drafts(self, request: Request) -> bool:
        """Whether tokens of ``request`` may be drafted at all."""
        if request.sampling_params.num_speculative_tokens == 0:
            return False
        # The last token is sampled in any case: a draft for it would be of no use.
        takes = request.max_num_tokens - len(request.prompt_token_ids) > 1
        if takes and self._adapts:
            self._histories[request] = History(request.waits_for_tokens)
        return takes

    def propose(self, most: int, beside_prompts: bool) -> None:
        """Ask for the drafts of the step that is about to be planned, at most ``most`` of all requests.

        ``beside_prompts``: whether the step may compute more than the next token of each request and drafts.
        """
        self._proposed = {}
        if most <= 0:
            return
        asked, counts = list[Request](), list[int]()
        for request in self.running_set.running:
            if request.takes_drafts and self._may_draft(request) and (count := min(most, self._most(request))) > 0:
                asked.append(request)
                counts.append(count)
        if not asked:
            return
        started = time.perf_counter()
        proposals = self.source.propose(asked, counts)
        if self._adapts:
            spent = (time.perf_counter() - started) / len(asked)
            self._look_seconds += 0.1 * (spent - self._look_seconds)
            counts = self._lengths(asked, proposals, most, beside_prompts)
        for request, drafts, count in zip(asked, proposals, counts, strict=True):
            taken = drafts[: min(count, most)]
            if taken and request.mask is not None:
                taken = self._allowed(request, taken)
            if taken:
                self._proposed[request] = taken
                most -= len(taken)
        self.running_set.counts.draft_seconds += time.perf_counter() - started

    def add(self, request: Request, output: SchedulerOutputBuilder) -> int:
        """Let the step compute drafts of the tokens after the one that it samples of ``request``. Returns how many."""
        drafts = list(self._proposed.pop(request, ()))
        if not drafts:
            return 0
        drafts = drafts[: self.running_set.grow_for_drafts(request, len(drafts))]
        reserve = len(self.running_set.running) + 1
        drafts = drafts[: self.running_set.states.make_writable_for_drafts(request, len(drafts), reserve)]
        request.add_drafts(drafts)
        output.token_ids.extend(drafts)
        self.running_set.counts.num_draft_tokens += len(drafts)
        self.running_set.counts.num_drafts += bool(drafts)
        return len(drafts)

    def plan_next(self, requests: Sequence[Request], output: SchedulerOutputBuilder) -> None:
        """A step of ``requests`` is planned: where a network of the worker drafts, say whether it is to draft after it.

        A request gets blocks for what may be drafted then, as far as some are free.
        """
        if self._of_worker is None:
            return
        output.drafts_next = any(request.takes_drafts and self._wants_more(request) for request in requests)
        if not output.drafts_next:
            return
        for request, samples in zip(requests, output.num_samples, strict=True):
            if request.takes_drafts and samples:
                self.running_set.grow_ahead(request, self._of_worker.num_tokens)
                if request.num_sent_blocks < len(request.block_ids):
                    self.running_set.send_blocks(request, output)

    def _wants_more(self, request: Request) -> bool:
        """Whether drafts for the step after this one are looked for."""
        return not self._adapts or self._histories[request].num_skipped == 0

    def take(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The results of a step of ``requests`` are entered: what a network of the worker has drafted for the next."""
        assert self._of_worker is not None, "nobody asked the worker for drafts"
        self._of_worker.take(requests, drafts)

    def accept(self, request: Request, start: int, drafts: list[int], sampled: Sequence[int], count: int) -> None:
        """The first ``count`` of these drafts were right; ``sampled``, from position ``start`` on, came with them."""
        if self._reader is not None and drafts:  # else it was preempted meanwhile
            self._reader.read_samples(request, start, drafts, sampled)
        counts = self.running_set.counts
        counts.num_accepted_draft_tokens += max(0, count)
        counts.num_accepted_by_position = tuple(
            number + (place < count) for place, number in enumerate(counts.num_accepted_by_position)
        )

    def record(self, result: StepResult, num_requests: int, num_accepted: int) -> None:
        """A step of so many requests is done, of whose drafts so many were accepted."""
        bucket, drafting, counts = result.bucket, result.draft_seconds, self.running_set.counts
        counts.draft_seconds += drafting
        if bucket.kind != "decode" or not self.costs.seconds:
            return
        size, seconds = bucket.num_requests, result.seconds - drafting
        self.costs.record(size, bucket.num_tokens, seconds)
        if drafting:
            self._network_seconds[size] = moved(self._network_seconds.get(size, drafting), drafting)
        plain = self.costs.seconds.get((size, size))
        if plain is not None and bucket.num_tokens > size:
            counts.draft_gain_seconds += num_accepted * plain / num_requests + plain - seconds
        counts.draft_gain_seconds -= drafting

    def end(self, request: Request) -> None:
        """A request has ended."""
        self._histories.pop(request, None)
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
        history = self._histories[request]
        if history.num_skipped > 0:
            history.num_skipped -= 1
            request.waits_for_tokens = history.waits or history.num_skipped == 0
            return False
        request.waits_for_tokens = True
        return not request.num_in_flight

    @staticmethod
    def _allowed(request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """The first of them, as far as its mask allows them; and its masks after these."""
        assert request.mask is not None
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
        chances = [history.acceptance.chance(of_all) for history in histories]
        available = [len(drafts) for drafts in proposals]
        num_requests = sum(not (request.num_in_flight and request.waits_for_tokens) for request in running)
        sizes = next(sizes for size, sizes in self._sizes.items() if size >= num_requests)
        if beside_prompts:
            counts = lengths_beside_prompts(chances, available, most)
        else:
            fills = self.limits.mixes_lens
            counts = lengths(chances, available, num_requests, sizes, self.costs.seconds, most, fills_first=fills)
        looks, seconds = self._look_seconds * len(asked), self.costs.seconds.get(sizes[0], 0.0)
        pays = True
        if self._of_worker is not None:
            looks += (network := self._network_seconds.get(sizes[0][0], 0.0))
            pays = network < self._gain(chances, counts, num_requests, sizes)
        least = 0 if self.limits.mixes_lens else _SKIPPED_ON_A_GPU
        for request, history, drafts, count in zip(asked, histories, proposals, counts, strict=True):
            if self._of_worker is not None and not drafts:
                continue  # nothing was drafted behind the last step, which says nothing
            history.proposal, history.num_output_tokens = drafts, len(request.output_token_ids)
            history.num_useless = 0 if count and pays else history.num_useless + 1
            history.num_skipped = num_skipped(history.num_useless, looks, seconds, least)
        return counts

    def _gain(
        self,
        chances: Sequence[float],
        counts: Sequence[int],
        num_requests: int,
        sizes: Sequence[tuple[int, int]],
    ) -> float:
        """Seconds that a step with so many drafts is expected to save, without the time that it takes to draft them."""
        size = next((size for size in sizes if num_requests + sum(counts) <= size[1]), sizes[-1])
        plain = self.costs.seconds[sizes[0]]
        tokens = sum(
            chance**place for chance, count in zip(chances, counts, strict=True) for place in range(1, count + 1)
        )
        return tokens * plain / num_requests - (self.costs.seconds[size] - plain)
