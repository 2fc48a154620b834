"""DraftPlanner: which drafts a step verifies. Plain Python."""

from collections.abc import Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.running_set import RunningSet
from compiled_llm.scheduling.scheduler_output import SchedulerOutputBuilder
from compiled_llm.scheduling.worker_drafts import WorkerDrafts


class DraftPlanner:
    """Asks ``source`` for drafts, once a step, and lets the step compute them."""

    def __init__(self, source: DraftSource, limits: EngineLimits, running_set: RunningSet) -> None:
        self.source, self.limits, self.running_set = source, limits, running_set
        self._proposed: dict[Request, list[int]] = {}  # for the step that is being planned
        self._of_worker = source if isinstance(source, WorkerDrafts) else None

    def takes_drafts(self, request: Request) -> bool:
        """Whether tokens of ``request`` may be drafted at all."""
        if request.sampling_params.changes_logits or request.sampling_params.num_speculative_tokens == 0:
            return False
        # The last token is sampled in any case: a draft for it would be of no use.
        return request.max_num_tokens - len(request.prompt_token_ids) > 1

    def propose(self, most: int) -> None:
        """Ask for the drafts of the step that is about to be planned, at most ``most`` of all requests."""
        self._proposed = {}
        asked, counts = list[Request](), list[int]()
        for request in self.running_set.running if most > 0 else ():
            if request.takes_drafts and self._may_draft(request) and (count := min(most, self._most(request))) > 0:
                asked.append(request)
                counts.append(count)
        if asked:
            for request, drafts in zip(asked, self.source.propose(asked, counts), strict=True):
                self._proposed[request] = list(drafts[:most])
                most -= len(self._proposed[request])

    def add(self, request: Request, output: SchedulerOutputBuilder) -> int:
        """Let the step compute drafts of the tokens after the one that it samples of ``request``. Returns how many."""
        drafts = self._proposed.pop(request, [])
        if not drafts:
            return 0
        drafts = drafts[: self.running_set.grow_for_drafts(request, len(drafts))]
        reserve = len(self.running_set.running) + 1
        drafts = drafts[: self.running_set.states.make_writable_for_drafts(request, len(drafts), reserve)]
        request.add_drafts(drafts)
        output.token_ids.extend(drafts)
        self.running_set.counts.num_draft_tokens += len(drafts)
        return len(drafts)

    def plan_next(self, requests: Sequence[Request], output: SchedulerOutputBuilder) -> None:
        """A step of ``requests`` is planned: where a network of the worker drafts, say whether it is to draft after it.

        A request gets blocks for what may be drafted then, as far as some are free.
        """
        if self._of_worker is None:
            return
        output.drafts_next = any(request.takes_drafts for request in requests)
        for request, samples in zip(requests, output.num_samples, strict=True):
            if request.takes_drafts and samples:
                self.running_set.grow_ahead(request, self._of_worker.num_tokens)
                if request.num_sent_blocks < len(request.block_ids):
                    self.running_set.send_blocks(request, output)

    def take(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The results of a step of ``requests`` are entered: what a network of the worker has drafted for the next."""
        assert self._of_worker is not None, "nobody asked the worker for drafts"
        self._of_worker.take(requests, drafts)

    def end(self, request: Request) -> None:
        """A request has ended."""
        self.source.end(request)

    @staticmethod
    def _may_draft(request: Request) -> bool:
        """Whether the host knows all its tokens but for the one that the next step samples."""
        return request.generates and not request.num_in_flight and request.num_tokens - request.num_computed_tokens == 1

    def _most(self, request: Request) -> int:
        """Most drafts of a request: one token is sampled after them."""
        own = request.sampling_params.num_speculative_tokens
        most = min(self.limits.num_draft_tokens, request.max_num_tokens - request.num_tokens - 1)
        return most if own is None else min(own, most)
