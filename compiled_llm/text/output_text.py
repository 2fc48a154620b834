"""The text of an output as its tokens come in: complete characters, up to a stop string."""

import itertools
from collections.abc import Sequence

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.text.byte_level import REPLACEMENT, ByteLevelDecoding
from compiled_llm.text.tokenizer import Tokenizer

_CONTEXT_SEARCH = 64  # tokens at the end of a prompt: among them are all on which the text of the next tokens depends
# The text of a token may depend on tokens before it: on this many at most, which includes a character of four bytes.
_CONTEXT_TOKENS = 6
_TOKENS_AT_ONCE = 64


class OutputText:
    """The text of one request's output as its tokens come in, up to a stop string.

    What was shown is never taken back, and in the end it is the whole: the bytes of prompt and output decoded as UTF-8
    at once, less the text of the prompt. A character that is spread over tokens appears when it is complete, also one
    that the prompt left incomplete. Bytes that are no character become U+FFFD, as ``bytes.decode(errors="replace")``
    has it. So does a tokenizer's own decoder, but for one with tokens ``<0x00>`` to ``<0xFF>``: it gives up every
    character beside such a byte, also characters that were shown long ago.

    A stop string ends the text (``StoppableText``). A special token that the text does not show counts there as its
    text, if a stop string has the whole of it. How the text is cut into tokens changes none of that.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams) -> None:
        skips, stops = params.skip_special_tokens, tuple(params.stop or ())
        self._hidden: dict[int, str] = {}  # special tokens that stop strings have in them and the text does not show
        if skips:
            for stop in stops:
                self._hidden |= tokenizer.special_tokens_within(stop)
        self._has_stops = bool(stops)
        self._text = StoppableText(stops, params.include_stop_str_in_output)
        before, tokens = prompt_token_ids[-_CONTEXT_SEARCH:], tokenizer.byte_level
        self._decoding = (
            ContextDecoding(tokenizer, before, skips) if tokens is None else ByteLevelDecoding(tokens, before, skips)
        )

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Take in a token. Returns the stop string that the text now holds, if any; the text then ends there.

        Args:
            may_stop: False: a stop string that this token completes is text like any other.
        """
        if token_id in self._hidden:
            return self._text.add_hidden(self._hidden[token_id], may_stop)
        piece = self._decoding.add(token_id)
        return self._text.add(piece, may_stop) if piece else None

    def extend(self, token_ids: list[int]) -> None:
        """Take in tokens of a text without stop strings: as ``append`` for one after the other, in less time."""
        assert not self._has_stops, "a stop string may end the text at any of the tokens"
        self._text.add(self._decoding.add_all(token_ids))

    def finish(self) -> str | None:
        """No token follows: bytes that never became a character become replacements. May complete a stop string."""
        return self._text.add(self._decoding.finish())

    def take(self, finished: bool) -> str:
        """The text since the last call. While the request runs, an end that may become a stop string is held back."""
        return self._text.take(finished)


class ContextDecoding:
    """What tokens of any tokenizer add to a text, found by decoding them with some tokens before them.

    A character that is not complete is held back.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool) -> None:
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
        """What is text with all these tokens, and was not; quicker than ``add`` for each."""
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
        """As ``add_all``. None, and nothing is done: some bytes of the tokens, or of earlier ones, are no character.

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


# -- Stop strings


class StoppableText:
    """The stop string that is complete first ends the text, before or after it; the longest, where several are complete
    at once.

    A token that is not shown can be part of a stop string too, by a text of its own, as a whole: the text is searched
    once as it is, and once with such tokens in their places.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """``include_stop``: the text ends after the stop string, not before it."""
        self._stops, self._include_stop = stops, include_stop
        self._longest = max(map(len, stops), default=0)
        self._text = ""  # that is not taken yet: no stop string starts in what is
        self._hidden: list[tuple[int, str]] = []  # where in the text, and its own text; of a place in their order

    def add(self, piece: str, may_stop: bool = True) -> str | None:
        """The text goes on. Returns the stop string that it now holds, if any; the text then ends there.

        Args:
            may_stop: False: a stop string that ``piece`` completes is text like any other.
        """
        length = len(self._text)
        self._hidden = [(place, token) for place, token in self._hidden if place > length - self._longest]
        self._text += piece
        return self._search(length, 0) if may_stop else None

    def add_hidden(self, token: str, may_stop: bool = True) -> str | None:
        """A token comes that is not shown. Returns as ``add``; ``token`` is its text."""
        self._hidden = [*self._hidden[-self._longest :], (len(self._text), token)]
        return self._search(len(self._text), len(token)) if may_stop else None

    def take(self, finished: bool) -> str:
        """The text since the last call. Unless ``finished``, an end that may become a stop string is held back."""
        end = len(self._text)
        if not finished and self._stops:
            whole = _Whole(self._text, self._hidden)
            starts = [_start_of(self._text, stop) for stop in self._stops]
            if self._hidden:
                starts += [whole.shown(whole.start_of(stop)) for stop in self._stops]
            end = min(starts, default=end)
        taken, self._text = self._text[:end], self._text[end:]
        self._hidden = [(place - end, token) for place, token in self._hidden if place >= end]
        return taken

    def _search(self, num_searched: int, num_hidden: int) -> str | None:
        """Looks for what ends after the first ``num_searched`` characters, or in the last ``num_hidden`` of a token."""
        if not self._stops:
            return None
        whole = _Whole(self._text, self._hidden)
        found = []  # (end, start) in the whole text, stop string, start in the text that is shown
        for stop in self._stops:
            start = self._text.find(stop, max(0, num_searched - len(stop) + 1))
            if start >= 0:
                found.append((whole.before(start + len(stop)), whole.after(start), stop, start))
            if self._hidden:
                searched = len(whole.text) - num_hidden if num_hidden else whole.after(num_searched)
                start = whole.find(stop, max(0, searched - len(stop) + 1))
                if start >= 0:
                    found.append((start + len(stop), start, stop, whole.shown(start)))
        if not found:
            return None
        _, _, stop, start = min(found)
        self._text = self._text[:start] + (stop if self._include_stop else "")
        self._hidden = []
        return stop


class _Whole:
    """A text with the tokens that it does not show.

    Attributes:
        text: the shown text, with those tokens in their places.
    """

    def __init__(self, shown: str, hidden: list[tuple[int, str]]) -> None:
        self._hidden = hidden
        pieces: list[str] = []
        self._spans: list[tuple[int, int]] = []
        last = length = 0
        for place, token in hidden:
            pieces += [shown[last:place], token]
            self._spans.append((place + length, place + length + len(token)))
            last, length = place, length + len(token)
        self.text = "".join([*pieces, shown[last:]])

    def before(self, place: int) -> int:
        """The place in ``text`` of a place in the shown text, before the hidden tokens that are there."""
        return place + sum(len(token) for at, token in self._hidden if at < place)

    def after(self, place: int) -> int:
        """The place in ``text`` of a place in the shown text, after the hidden tokens that are there."""
        return place + sum(len(token) for at, token in self._hidden if at <= place)

    def shown(self, place: int) -> int:
        """The place in the shown text of a place in ``text``."""
        return place - sum(min(end, place) - start for start, end in self._spans if start < place)

    def is_cut(self, place: int) -> bool:
        """Whether a place of ``text`` is inside a hidden token."""
        return any(start < place < end for start, end in self._spans)

    def find(self, stop: str, start: int) -> int:
        """Where ``stop`` is in ``text`` from ``start`` on, with no part of a hidden token; -1: nowhere."""
        found = self.text.find(stop, start)
        while found >= 0 and (self.is_cut(found) or self.is_cut(found + len(stop))):
            found = self.text.find(stop, found + 1)
        return found

    def start_of(self, stop: str) -> int:
        """Where the longest end of it starts that ``stop`` starts with, and that begins with no part of a token."""
        start = _start_of(self.text, stop)
        while self.is_cut(start):
            start = _start_of(self.text, stop, start + 1)
        return start


def _start_of(text: str, stop: str, least: int = 0) -> int:
    """Where the longest end of ``text`` starts, from ``least`` on, that ``stop`` starts with; its end if none does."""
    start = text.find(stop[0], max(least, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
