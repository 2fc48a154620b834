"""WorkerDrafts: drafts that a network of the worker makes behind each step. Plain Python."""

from collections.abc import Sequence

from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.scheduling.worker import StepResult


class WorkerDrafts:
    """A ``DraftSource`` that has what came with the results of the last step. It tells a network what it may read.

    Args:
        num_tokens: most that the network drafts for a request and step.
        adapts: as of ``DraftSource``.
        reads_tokens: whether the network reads tokens of requests, not the last step's results alone.
    """

    def __init__(self, num_tokens: int, adapts: bool, *, reads_tokens: bool) -> None:
        self.num_tokens, self.adapts, self._reads_tokens = num_tokens, adapts, reads_tokens
        self._drafts: dict[Request, tuple[int, tuple[int, ...]]] = {}  # after how many tokens, and which
        self._num_told: dict[RequestId, int] = {}  # tokens of running requests that the worker knows

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

    def admit(self, admissions: Sequence[StartedRequest]) -> None:
        """These requests start to run, or run again: the worker knows none of their tokens."""
        for admission in admissions:
            self._num_told.pop(admission.request_id, None)

    def tell(self, requests: Sequence[Request], output: SchedulerOutputBuilder) -> None:
        """The network drafts behind a step of ``requests``: say which tokens it may read."""
        if not self._reads_tokens:
            return
        for place, request in enumerate(requests):
            if request.takes_drafts:
                start, known = self._num_told.get(request.request_id, 0), _num_known(request)
                output.known_tokens.append((place, start, tuple(request.tokens(start, known))))
                self._num_told[request.request_id] = known

    def num_unread(self, requests: Sequence[Request]) -> int:
        """Tokens of these requests that the network would have to read before it drafts.

        What was found in the prefix cache is taken to be there for the network, too.
        """
        if not self._reads_tokens:
            return 0
        told = [max(self._num_told.get(request.request_id, 0), request.num_cached_tokens) for request in requests]
        return sum(map(_num_known, requests)) - sum(told)

    def end(self, request: Request) -> None:
        self._drafts.pop(request, None)
        self._num_told.pop(request.request_id, None)


def _num_known(request: Request) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def drafts_for(requests: list[Request], output: SchedulerOutput, result: StepResult) -> list[tuple[int, ...]]:
    """What a network drafted for ``requests`` behind the step ``output``, which has made it do so.

    It went on from all drafts that were right. Those of a request that was preempted meanwhile do not count any more.
    """
    assert result.draft_token_ids is not None
    columns = zip(requests, output.num_samples, result.draft_token_ids, strict=True)
    return [drafts if len(request.draft_token_ids) == max(0, count - 1) else () for request, count, drafts in columns]
