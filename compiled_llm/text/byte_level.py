"""Byte-level tokenizers, as GPT-2 introduced them: a text is the bytes of its tokens, one after the other, as UTF-8.

So what a token adds follows from its bytes and the bytes of a character before it that is not complete; other
tokenizers have to decode some tokens before it again.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

REPLACEMENT = "\ufffd"


def _alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE spells bytes: printable ones stand for themselves, all other bytes have
    characters from U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


ALPHABET = _alphabet()


class ByteLevelTokens:
    """The bytes of each token of a byte-level tokenizer, as its own decoder joins them."""

    def __init__(self, backend: Backend, special_tokens: Iterable[str]) -> None:
        self._backend = backend
        self._special_tokens = frozenset(special_tokens)
        self._known: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}  # with special tokens; without

    @staticmethod
    def suit(backend: Backend) -> bool:
        """Whether the tokenizer is byte-level, and nothing else happens to its texts."""
        return type(backend.decoder) is decoders.ByteLevel

    def of(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """The bytes of a token. Empty for an id without one, and for a special token if special tokens are skipped."""
        known = self._known[skip_special_tokens]
        found = known.get(token_id)
        if found is None:
            found = known[token_id] = self._read(token_id, skip_special_tokens)
        return found

    def _read(self, token_id: int, skip_special_tokens: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special_tokens and token in self._special_tokens):
            return b""
        values = [ALPHABET.get(character) for character in token]
        data = bytes(value for value in values if value is not None)
        return data if len(data) == len(values) else token.encode()  # an added token that is plain text


class ByteLevelDecoding:
    """What tokens add to a text that the tokens ``before`` them, the end of the prompt, began.

    A character that was begun before belongs to the text once it is complete. The end of the text is held back where it
    is U+FFFD, of bytes that are no character or not complete.
    """

    def __init__(self, tokens: ByteLevelTokens, before: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokens, self._skips = tokens, skip_special_tokens
        self._held = b""  # the bytes of a U+FFFD at the end
        self._decode(b"".join([tokens.of(token_id, skip_special_tokens) for token_id in before]))
        self._is_begun = bool(self._held)  # they are of ``before``, which has that U+FFFD

    def add(self, token_id: int) -> str:
        """What is text with this token, and was not."""
        return self._take(self._decode(self._tokens.of(token_id, self._skips)))

    def add_all(self, token_ids: Sequence[int]) -> str:
        """What is text with all these tokens, and was not; quicker than ``add`` for each."""
        return self._take(self._decode(b"".join([self._tokens.of(one, self._skips) for one in token_ids])))

    def finish(self) -> str:
        """No token follows: the rest of the text."""
        rest, self._held = self._held, b""
        return self._take(rest.decode(errors="replace"))

    def _decode(self, data: bytes) -> str:
        """``data`` behind what is held, as text; a U+FFFD at its end is held."""
        data, self._held = self._held + data, b""
        text = data.decode(errors="replace")
        if text.endswith(REPLACEMENT):
            text = text[:-1]
            # Decoding starts anew with the bytes of a U+FFFD, which are up to three.
            self._held = next(data[-n:] for n in (1, 2, 3) if data[:-n].decode(errors="replace") == text)
        return text

    def _take(self, decoded: str) -> str:
        """Without the U+FFFD that is in the text before."""
        if self._is_begun and decoded:
            self._is_begun = False
            return decoded.removeprefix(REPLACEMENT)
        return decoded
