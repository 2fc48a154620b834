"""What guesses the next tokens of requests, for a step to verify all of them at once. Plain Python.

The scheduler asks a ``DraftSource``, once for all requests of a step. A method of ``speculative_config`` is one
(``drafting/methods.py``); ``CheckedDrafter`` makes one of a user's ``Drafter``.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from compiled_llm.api.readable import shown
from compiled_llm.api.speculative_config import MOST_DRAFT_TOKENS
from compiled_llm.scheduling.request import Request, RequestId


class DraftSource(Protocol):
    """What the scheduler asks for drafts.

    What it gives changes the number of steps and never the tokens. What it raises ends all requests.

    Attributes:
        num_tokens: most tokens of a proposal, 1 to 63. It must not change: the sizes of compiled steps depend on it.
        adapts: whether the scheduler asks for less, or not at all, where measured acceptance says that it does not pay.
    """

    num_tokens: int
    adapts: bool

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each request up to so many ids of the vocabulary that may follow its prompt and output; may be empty.

        They follow one another; or, where the limits have trees, are a ``DraftTree`` with the likeliest ones first.

        All tokens of these requests are known. The same request may be asked about again before it has more of them,
        and has more than one more after drafts were accepted. Nothing of it may be changed.
        """
        ...

    def end(self, request: Request) -> None:
        """A request has ended, and is forgotten; called once, also for one that was never asked about."""
        ...


@runtime_checkable
class ReadsSamples(Protocol):
    """A ``DraftSource`` that reads what steps sample behind wrong drafts, too, which is no part of any output."""

    def read_samples(self, request: Request, start: int, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """A step verified ``drafts`` of a request, whose output has what it accepted.

        ``sampled[i]`` is the token at position ``start + i`` of prompt and output if all drafts before it are right,
        of which ``drafts[i]`` is the one at that position. There is one more of them; negative: no token was found.
        """
        ...


class Drafter(Protocol):
    """What the engine argument ``drafter`` must have.

    Drafts change the number of steps and never the tokens: the step samples a token at each draft, and the scheduler
    accepts drafts as long as they are equal to these. What ``propose`` raises ends all requests.

    Attributes:
        num_tokens: most tokens of a proposal, 1 to 63. It must not change: the sizes of compiled steps depend on it.
    """

    num_tokens: int

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> Sequence[int]:
        """Up to ``num_tokens`` ids that may follow ``token_ids``, the prompt and the output so far; may be empty.

        ``request_id``: (name, number): its user's name, and which of its ``n`` continuations it is, from 0.
        """
        ...


def draft_length(drafter: Drafter | None) -> int:
    """``drafter.num_tokens``, or 0 without a drafter.

    Raises:
        ValueError: it is no drafter, or its ``num_tokens`` is not allowed.
    """
    if drafter is None:
        return 0
    count = getattr(drafter, "num_tokens", None)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DRAFT_TOKENS:
        raise ValueError(
            f"drafter must have num_tokens, an integer from 1 to {MOST_DRAFT_TOKENS}, given {shown(count)} "
            f"of {type(drafter).__name__}"
        )
    if not callable(getattr(drafter, "propose", None)):
        raise ValueError(
            f"drafter must have a method propose(request_id, token_ids), given {type(drafter).__name__} without it"
        )
    return count


class CheckedDrafter:
    """A user's drafter, whose proposals are checked: ids of a vocabulary of ``vocab_size`` tokens, not too many."""

    adapts = False

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size
        self.num_tokens = drafter.num_tokens

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource.propose``.

        Raises:
            ValueError: a proposal is too long, or some of it is not in the vocabulary.
        """
        return [self._proposal(request)[:count] for request, count in zip(requests, most, strict=True)]

    def end(self, request: Request) -> None:
        """A user's drafter is not told."""

    def _proposal(self, request: Request) -> list[int]:
        proposed = list(self._drafter.propose(request.request_id, request.prompt_token_ids + request.output_token_ids))
        most = self._drafter.num_tokens
        if len(proposed) > most:
            raise ValueError(f"the drafter must propose at most num_tokens={most} tokens, given {len(proposed)}")
        for token_id in proposed:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"the drafter must propose token ids from 0 to {self._vocab_size - 1} as int, given {token_id!r}"
                )
        return proposed
