"""WorkerDrafts: drafts that a network of the worker makes behind each step. Plain Python."""

from collections.abc import Sequence

from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult


class WorkerDrafts:
    """A ``DraftSource`` that has what came with the results of the last step.

    Args:
        num_tokens: most that the network drafts for a request and step.
        adapts: as of ``DraftSource``.
    """

    def __init__(self, num_tokens: int, adapts: bool) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._drafts: dict[Request, tuple[int, tuple[int, ...]]] = {}  # after how many tokens, and which
        # How many tokens the last step told of, of each request; empty where it is not drafted behind.
        self._num_told: dict[Request, int] = {}

    def take(self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The results of a step of ``requests`` are in, of which a network has guessed what follows."""
        for request, tokens in zip(requests, drafts, strict=True):
            if tokens and request.takes_drafts and request.finish_reason is None:
                self._drafts[request] = _num_known(request), tuple(tokens)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """As ``DraftSource.propose``. What was guessed before a request got other tokens, or was preempted, is lost."""
        return [tokens[:count] for tokens, count in zip(self.newest(requests), most, strict=True)]

    def newest(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """What came for each and still counts."""
        found: list[tuple[int, ...]] = []
        for request in requests:
            after, tokens = self._drafts.pop(request, (0, ()))
            found.append(tokens if after == _num_known(request) else ())
        return found

    def tell(self, requests: Sequence[Request], output: SchedulerOutputBuilder) -> None:
        """Behind the step of ``requests`` the network drafts: it is to know their tokens."""
        num_told: dict[Request, int] = {}
        admitted = {admission.request_id for admission in output.admissions}
        for place, request in enumerate(requests):
            if request.takes_drafts:
                known = _num_known(request)
                start = 0 if request.request_id in admitted else self._num_told.get(request, 0)
                output.known_tokens.append((place, start, tuple(request.tokens(start, known))))
                num_told[request] = known
        self._num_told = num_told

    def tell_nothing(self) -> None:
        """Behind the next step nothing is drafted."""
        if self._num_told:
            self._num_told = {}

    def end(self, request: Request) -> None:
        self._drafts.pop(request, None)


def _num_known(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def drafts_for(requests: list[Request], output: SchedulerOutput, result: StepResult) -> list[tuple[int, ...]]:
    """What a network drafted for ``requests`` behind the step ``output``, which has made it do so.

    It went on from all drafts that were right. Those of a request that was preempted meanwhile do not count any more.
    """
    assert result.draft_token_ids is not None
    columns = zip(requests, output.num_samples, result.draft_token_ids, strict=True)
    return [drafts if len(request.draft_token_ids) == max(0, count - 1) else () for request, count, drafts in columns]
