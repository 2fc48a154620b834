"""Drafting by n-grams: what followed the last tokens of a request where it had them before (prompt lookup).

As in vLLM: the longest run of last tokens within bounds that the request had before, of its places the first, and the
tokens that followed there. (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.)

Nothing is indexed: numpy compares all tokens with the last ones, eight or sixteen an instruction. An index of all
n-grams took 0.3 us for each token of a prompt and each length, before the first draft.
"""

from collections.abc import Sequence

import numpy as np

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.scheduling.request import Request

_FEW = 64  # places whose tokens are compared as a table
_NO_TOKEN, _NOTHING = 0xFFFFFFFF, 0xFFFFFFFE  # in front of the first token; what nothing is equal to


class NgramDrafter:
    """A ``DraftSource``. For each request it keeps its tokens, of four bytes each, in an array with as much room again.

    Args:
        num_tokens: most tokens of a proposal.
        least, most: tokens of the n-grams that are looked for.
    """

    def __init__(self, num_tokens: int, least: int, most: int, adapts: bool = True) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._least, self._most = least, most
        self._texts: dict[Request, _Text] = {}

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "NgramDrafter":
        least, most = config.prompt_lookup_min, config.prompt_lookup_max
        assert least is not None
        assert most is not None
        return cls(config.num_tokens, least, most, config.adaptive)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource.propose``."""
        return [self._proposal(request, count) for request, count in zip(requests, most, strict=True)]

    def end(self, request: Request) -> None:
        self._texts.pop(request, None)

    def _proposal(self, request: Request, most: int) -> list[int]:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(request.prompt_token_ids, self._most)
        text.add(request.output_token_ids[text.num_output_tokens :])
        return text.after_the_longest(self._least, most)


class _Text:
    """Prompt and output of one request so far.

    Args:
        most: tokens of the longest n-gram.
    """

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self.num_output_tokens = 0
        self._most = most
        # In front of the first token stand as many that are equal to none.
        self._ids = np.full(2 * (most + len(prompt)), _NO_TOKEN, np.uint32)
        self._end = most + len(prompt)
        self._ids[most : self._end] = prompt
        self._before = np.array([*range(1, most), 0])

    def add(self, tokens: Sequence[int]) -> None:
        """More of the output."""
        end = self._end + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._end], np.full(end, _NO_TOKEN, np.uint32)])
        self._ids[self._end : end] = tokens
        self._end = end
        self.num_output_tokens += len(tokens)

    def after_the_longest(self, least: int, count: int) -> list[int]:
        """Up to ``count`` tokens after the first place of the longest run of last tokens, of ``least`` or more."""
        place = self._find(least)
        return [] if place is None else self._ids[place + 1 : min(place + 1 + count, self._end)].tolist()

    def _find(self, least: int) -> int | None:
        """Where the n-gram ends that is the longest run of last tokens that the text had before, at its first place."""
        ids, first, last = self._ids, self._most, self._end - 1
        # Which places before the last one end a run of ``length`` tokens that is that at the end.
        ends, length = ids[first:last] == ids[last], 1
        num_ends = np.count_nonzero(ends)
        while num_ends > _FEW and length < self._most:
            longer = ids[first - length : last - length] == ids[last - length]
            longer &= ends
            num_longer = np.count_nonzero(longer)
            if not num_longer:
                break
            ends, num_ends, length = longer, num_longer, length + 1
        if not num_ends:
            return None
        if num_ends > _FEW:  # none has a longer one, or it may not be longer
            return first + int(ends.argmax()) if length >= least else None
        places = ends.nonzero()[0]
        places += first
        if num_ends > 1 or length < least:
            before = self._before[length - 1 :]
            run = ids[last - before]
            run[-1] = _NOTHING
            more = (ids[places[:, None] - before] == run).argmin(axis=1)  # the first that is not equal
            longest = more.argmax()  # the first of them
            return int(places[longest]) if length + more[longest] >= least else None
        return int(places[0])
