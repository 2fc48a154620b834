"""Drafting by n-grams: what followed the last tokens of a request where it had them before (prompt lookup).

As in vLLM: the longest run of last tokens within bounds that the request had before, of its places the first, and the
tokens that followed there. (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.)

Up to four lengths are looked up in an index of each: some 7 us a call, after 0.2 us for each token of a prompt and
length. More are looked for without one, by numpy, which compares all tokens with the last ones: some 30 us with 8,000
tokens, where sixteen indices took about as long, and 30 ms before the first draft.
"""

from collections.abc import Sequence

import numpy as np

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.token_text import as_text, as_tokens
from compiled_llm.scheduling.request import Request

_MOST_INDICES = 4
_BYTES_OF_A_LENGTH, _BYTES_OF_AN_ARRAY = 160, 12  # of a token: in an index (140 to 156 were measured), and without any
_FEW = 64  # places whose tokens are compared as a table
_NO_TOKEN, _NOTHING = 0xFFFFFFFF, 0xFFFFFFFE  # in front of the first token; what nothing is equal to


class NgramDrafter:
    """A ``DraftSource``.

    Args:
        num_tokens: most tokens of a proposal.
        least, most: tokens of the n-grams that are looked for.
    """

    def __init__(self, num_tokens: int, least: int, most: int, adapts: bool = True) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._least, self._most = least, most
        self._texts: dict[Request, _IndexedText | _SearchedText] = {}

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

    def most_bytes(self, num_tokens: int) -> int:
        """Bytes of what it keeps for running requests of so many tokens, at most."""
        lengths = self._most - self._least + 1
        return num_tokens * (lengths * _BYTES_OF_A_LENGTH if lengths <= _MOST_INDICES else _BYTES_OF_AN_ARRAY)

    def _proposal(self, request: Request, most: int) -> list[int]:
        text = self._texts.get(request)
        if text is None:
            made = _IndexedText if self._most - self._least + 1 <= _MOST_INDICES else _SearchedText
            text = self._texts[request] = made(request.prompt_token_ids, self._least, self._most)
        text.add(request.output_token_ids[text.num_output_tokens :])
        return text.after_the_longest(most)


class _IndexedText:
    """Prompt and output of one request so far, with a dict for each length: which place each n-gram ended at first.

    Those at the very end of the text are not in it yet.

    Args:
        least, most: tokens of the n-grams.
    """

    def __init__(self, prompt: Sequence[int], least: int, most: int) -> None:
        text = as_text(prompt)
        self._text, self.num_output_tokens = text, 0
        end, lengths = len(text), range(most, least - 1, -1)
        # Backwards, so that the first place is written last.
        self._ends = {n: {text[i - n : i]: i for i in range(end - 1, n - 1, -1)} for n in lengths}

    def add(self, tokens: Sequence[int]) -> None:
        """More of the output."""
        if not tokens:
            return
        start = len(self._text)
        self._text += as_text(tokens)
        self.num_output_tokens += len(tokens)
        text = self._text
        for length, ends in self._ends.items():
            for end in range(max(start, length), len(text)):
                ends.setdefault(text[end - length : end], end)

    def after_the_longest(self, count: int) -> list[int]:
        """Up to ``count`` tokens after the first place of the longest run of last tokens that the text had before."""
        text = self._text
        for length, ends in self._ends.items():
            if len(text) > length:
                place = ends.get(text[-length:])
                if place is not None:
                    return as_tokens(text[place : place + count])
        return []


class _SearchedText:
    """Prompt and output of one request so far, in an array.

    Args:
        least, most: tokens of the n-grams.
    """

    def __init__(self, prompt: Sequence[int], least: int, most: int) -> None:
        self.num_output_tokens = 0
        self._least, self._most = least, most
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

    def after_the_longest(self, count: int) -> list[int]:
        """Up to ``count`` tokens after the first place of the longest run of last tokens that the text had before."""
        place = self._find()
        return [] if place is None else self._ids[place + 1 : min(place + 1 + count, self._end)].tolist()

    def _find(self) -> int | None:
        """Where the n-gram ends that is the longest run of last tokens that the text had before, at its first place."""
        ids, first, last, least = self._ids, self._most, self._end - 1, self._least
        # Which places before the last one end a run of ``length`` tokens that is that at the end.
        ends, length = ids[first:last] == ids[last], 1
        num_ends = np.count_nonzero(ends)
        while num_ends > max(_FEW, len(ends) // 64) and length < self._most:
            longer = ids[first - length : last - length] == ids[last - length]
            longer &= ends
            num_longer = np.count_nonzero(longer)
            if not num_longer:
                break
            ends, num_ends, length = longer, num_longer, length + 1
        if not num_ends:
            return None
        places = ends.nonzero()[0]
        places += first
        while len(places) > _FEW and length < self._most:
            longer_places = places[ids[places - length] == ids[last - length]]
            if not len(longer_places):
                break
            places, length = longer_places, length + 1
        if len(places) > _FEW or (len(places) == 1 and length >= least):  # none has a longer one, or it has no use
            return int(places[0]) if length >= least else None
        before = self._before[length - 1 :]
        run = ids[last - before]
        run[-1] = _NOTHING
        more = (ids[places[:, None] - before] == run).argmin(axis=1)  # the first that is not equal
        longest = more.argmax()  # the first of them
        return int(places[longest]) if length + more[longest] >= least else None
