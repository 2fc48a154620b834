"""ContextDecoding: what tokens add to a text, by decoding them with some tokens before them."""

import itertools
from collections.abc import Sequence
from typing import Protocol

from compiled_llm.text.byte_level import REPLACEMENT

# The text of a token may depend on those before it: on this many at most, which includes a character of four bytes.
_CONTEXT_TOKENS = 6
_TOKENS_AT_ONCE = 64


class Decoder(Protocol):
    """A tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """The text of these tokens."""

    def byte_value(self, token_id: int) -> int | None:
        """The byte that a token is, if it is one and the decoder reads it so."""


class ContextDecoding:
    """For any tokenizer. Of a text that ends in the middle of a character, that one is held back."""

    def __init__(self, tokenizer: Decoder, before: Sequence[int], skip_special_tokens: bool) -> None:
        """``before``: the last tokens of the prompt."""
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        # Decoding goes over the last tokens that show. Of what they decode to, ``num_read`` characters are in the text
        # already, or the prompt's.
        self._ids = self._nearest(before)
        self._decoded = self._decode()
        self._num_read = len(self._decoded)
        self._prompt_may_go_on = self._decoded.endswith(REPLACEMENT)

    def add(self, token_id: int) -> str:
        """What is text with this token, and was not."""
        if len(self._ids) >= 2 * _CONTEXT_TOKENS:
            num_unread = len(self._decoded) - self._num_read
            del self._ids[:-_CONTEXT_TOKENS]
            self._decoded = self._decode()
            self._num_read = len(self._decoded) - num_unread
        self._ids.append(token_id)
        decoded = self._decode()
        if decoded == self._decoded:
            if not self._shows(token_id):
                self._ids.pop()
            return ""
        if self._prompt_may_go_on and not decoded.startswith(self._decoded):
            self._num_read -= 1  # the prompt's last character: it is complete now
        self._prompt_may_go_on = False
        self._decoded = decoded
        # The last one may be the start of a character.
        return self._read(len(decoded) - decoded.endswith(REPLACEMENT))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """The same for several tokens, in less time."""
        text = ""
        for start in range(0, len(token_ids), _TOKENS_AT_ONCE):
            piece = token_ids[start : start + _TOKENS_AT_ONCE]
            found = self._add_at_once(piece)
            text += "".join(map(self.add, piece)) if found is None else found
        return text

    def finish(self) -> str:
        """No token follows: the rest of the text."""
        return self._read(len(self._decoded))

    def _add_at_once(self, token_ids: Sequence[int]) -> str | None:
        """None, and nothing is done: some of their bytes, or of those before, are no character.

        A character may be incomplete at the end.
        """
        ids = [*self._ids, *token_ids]
        decoded = self._plain(ids)
        end = len(decoded) - decoded.endswith(REPLACEMENT)
        known = self._decoded[: self._num_read]
        if self._prompt_may_go_on or REPLACEMENT in decoded[:end] or not decoded.startswith(known):
            return None
        nearest = self._nearest(ids)
        context = self._plain(nearest)
        if context.endswith(REPLACEMENT) != (end < len(decoded)) or REPLACEMENT in context[:-1]:
            return None
        if end < len(decoded) and any(self._tokenizer.byte_value(token_id) is not None for token_id in nearest):
            return None
        piece = decoded[self._num_read : end]
        self._ids, self._decoded = nearest, context
        self._num_read = len(context) - context.endswith(REPLACEMENT)
        return piece

    def _nearest(self, token_ids: Sequence[int]) -> list[int]:
        """The last ones that show."""
        return list(itertools.islice(filter(self._shows, reversed(token_ids)), _CONTEXT_TOKENS))[::-1]

    def _read(self, end: int) -> str:
        """The characters up to ``end`` of what is decoded are text."""
        piece = self._decoded[self._num_read : end]
        self._num_read = max(end, self._num_read)
        return piece

    def _shows(self, token_id: int) -> bool:
        """Whether a token has text. Twice, since a single space may be cut off at the start of a text."""
        return self._plain([token_id, token_id]) != ""

    def _decode(self) -> str:
        text = self._plain(self._ids)
        if REPLACEMENT not in text:
            return text
        values = [self._tokenizer.byte_value(token_id) for token_id in self._ids]
        if not any(value is not None for value in values):
            return text
        data = bytearray()
        for index, (token_id, value) in enumerate(zip(self._ids, values, strict=True)):
            # A first byte that is a whole character is treated like other text, since its decoder may change it.
            if value is not None and (data or value >= 0x80):
                data.append(value)
            else:
                before = self._ids[max(0, index - 1) : index]
                data += self._plain([*before, token_id])[len(self._plain(before)) :].encode()
        return data.decode(errors="replace")

    def _plain(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skips)
