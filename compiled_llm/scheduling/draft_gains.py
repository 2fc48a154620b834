"""Gains: what right drafts of requests that run beside each other are worth. Plain Python.

Where requests come and go, as in a server, or others wait for a place, each token that one gains frees its place
sooner: what all gain counts alike. Requests that came together, while no other waits, as those of one call of
``generate``, are done when the last one is, and what the others gain shortens no step but by their own part of it. So
what counts most is the request that has gained least so far: that much has the last one gained, whichever it will be.
How long outputs will be need not be known for that. If the slowest ends before others do, what these had gained more
counts from then on.
"""

from collections.abc import Sequence

from compiled_llm.scheduling.draft_account import Kind
from compiled_llm.scheduling.request import Request

# Of what requests gain on average, this much counts in any case: users of those that end sooner wait, too, and the
# slowest may end soon. With less, less is gained by drafts that are looked up; with more, networks lose where one of
# four requests gains nothing.
LEAST_OF_MEAN = 0.35
# What a token is worth is divided by this power of how many the request has, and some more, so that the first ones do
# not decide; and it is no less than a share of the average.
_POWER, _SOME_MORE, _LEAST_WEIGHT = 2, 4, 0.25
# Requests that come while the others have so many tokens at most came together: those of several calls at once are
# taken in one by one, and steps go on meanwhile.
MOST_BEHIND = 16


class Gains:
    """Of the requests that run.

    Attributes:
        came_together: whether none of them came while others had run for long.
        kind: of the steps in which this was gained, which have an account of their own.
    """

    def __init__(self) -> None:
        self.came_together = True
        self.kind: Kind | None = None
        self._gained: dict[Request, int] = {}  # tokens, of those that gained some
        self._least = 0  # of all, when this was taken last

    def come(self, num_output_tokens: Sequence[int]) -> None:
        """A request has come, which has gained nothing yet. ``num_output_tokens``: of those that run."""
        self.came_together = self.came_together and max(num_output_tokens, default=0) <= MOST_BEHIND
        self.start_over()

    def start_over(self) -> None:
        """From now on nothing has been gained."""
        self._gained.clear()
        self._least = 0

    def accept(self, request: Request, count: int, kind: Kind) -> None:
        """So many drafts of it were right, in a step of this kind. If others were of another one, all begins anew."""
        if kind != self.kind:
            self.kind = kind
            self.start_over()
        self._gained[request] = self._gained.get(request, 0) + count

    def end(self, request: Request, some_run: bool) -> None:
        """A request has ended. ``some_run``: whether another one runs, or waits."""
        self._gained.pop(request, None)
        if not some_run:
            self.start_over()
            self.came_together = True

    def take_least(self, running: Sequence[Request]) -> int:
        """How many tokens each of them has gained since this was last taken, at least.

        One that was held back meanwhile has gained less than the others had by then: all begins anew.
        """
        least = min(self._gained.get(request, 0) for request in running)
        more = least - self._least
        if more < 0:
            self.start_over()
            return 0
        self._least = least
        return more


def weights(num_output_tokens: Sequence[int]) -> list[float]:
    """What a token of each request is worth beside one of the others, 1 on average, where all came together.

    Those that are behind will need the most steps, if nothing else is known.
    """
    powers = [(count + _SOME_MORE) ** -_POWER for count in num_output_tokens]
    share = (1.0 - _LEAST_WEIGHT) * len(powers) / sum(powers)
    return [_LEAST_WEIGHT + share * power for power in powers]
