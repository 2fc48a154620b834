"""Drafter: guesses the next tokens of a request, for a step to verify all of them at once. Plain Python."""

from collections.abc import Sequence
from typing import Protocol

from compiled_llm.api.readable import shown
from compiled_llm.scheduling.request import RequestId


class Drafter(Protocol):
    """What the engine argument ``drafter`` must have.

    Drafts change the number of steps and never the tokens: the step samples a token at each draft, and the scheduler
    accepts drafts as long as they are equal to these. What ``propose`` raises ends all requests.

    Attributes:
        num_tokens: most tokens of a proposal, 1 to 15. It must not change: the sizes of compiled steps depend on it.
    """

    num_tokens: int

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> Sequence[int]:
        """Up to ``num_tokens`` ids that may follow ``token_ids``, the prompt and the output so far; may be empty.

        ``request_id``: (name, number): its user's name, and which of its ``n`` continuations it is, from 0.
        """
        ...


MOST_DRAFT_TOKENS = 15  # the attention op takes up to 16 rows of a request as a decode


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

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> list[int]:
        """As ``Drafter.propose``.

        Raises:
            ValueError: the proposal is too long, or some of it is not in the vocabulary.
        """
        proposed = list(self._drafter.propose(request_id, token_ids))
        most = self._drafter.num_tokens
        if len(proposed) > most:
            raise ValueError(f"the drafter must propose at most num_tokens={most} tokens, given {len(proposed)}")
        for token_id in proposed:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                raise ValueError(
                    f"the drafter must propose token ids from 0 to {self._vocab_size - 1} as int, given {token_id!r}"
                )
        return proposed
