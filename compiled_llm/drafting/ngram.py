"""Drafting by n-grams: what followed the last tokens of a request where it had them before (prompt lookup).

As in vLLM: the longest run of last tokens within bounds that the request had before, of its places the first, and the
tokens that followed there. (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.)
"""

from collections.abc import Sequence

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.token_text import as_text, as_tokens
from compiled_llm.scheduling.request import Request


class NgramDrafter:
    """A ``DraftSource``. For each request it keeps where each n-gram ended first: 100 bytes a token and length.

    Args:
        num_tokens: most tokens of a proposal.
        least, most: tokens of the n-grams that are looked for.
    """

    def __init__(self, num_tokens: int, least: int, most: int, adapts: bool = True) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._lengths = tuple(range(most, least - 1, -1))
        self._indices: dict[Request, _Index] = {}

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
        self._indices.pop(request, None)

    def _proposal(self, request: Request, most: int) -> list[int]:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = _Index(as_text(request.prompt_token_ids), self._lengths)
        index.add(as_text(request.output_token_ids[index.num_output_tokens :]))
        place = index.find()
        return [] if place is None else as_tokens(index.text[place : place + most])


class _Index:
    """The n-grams of one request, in a dict for each length: which place they ended at first, if not at the very end.

    Args:
        lengths: of n-grams, falling.

    Attributes:
        text: prompt and output so far.
    """

    def __init__(self, prompt: str, lengths: Sequence[int]) -> None:
        self.text, self.num_output_tokens = prompt, 0
        end = len(prompt)
        # Backwards, so that the first place is written last.
        self._ends = {n: {prompt[i - n : i]: i for i in range(end - 1, n - 1, -1)} for n in lengths}

    def add(self, tokens: str) -> None:
        """More of the output."""
        if not tokens:
            return
        start = len(self.text)
        self.text += tokens
        self.num_output_tokens += len(tokens)
        text = self.text
        for length, ends in self._ends.items():
            for end in range(max(start, length), len(text)):
                ends.setdefault(text[end - length : end], end)

    def find(self) -> int | None:
        """Where the tokens begin that followed the longest n-gram at the end of the text, at its first place."""
        text = self.text
        for length, ends in self._ends.items():
            if len(text) > length:
                place = ends.get(text[-length:])
                if place is not None:
                    return place
        return None
