"""TokenBytes: the bytes that each token of a tokenizer stands for, also where they are a part of a character only."""

from compiled_llm.text.byte_level import ALPHABET, REPLACEMENT
from compiled_llm.text.tokenizer import Tokenizer


class TokenBytes:
    """The tokens of a tokenizer as bytes, each by itself. The bytes of an output's tokens are those of its text, but
    for special tokens that the text leaves out and a space that decoding cuts off at its start."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer has no token of, as models with a padded vocabulary may generate."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        value = tokenizer.byte_value(token_id)
        if value is not None:
            return bytes([value])
        alone = tokenizer.decode([token_id], False)
        if REPLACEMENT in alone:
            spelled = [ALPHABET.get(character) for character in tokenizer.token(token_id) or ""]
            data = bytes(byte for byte in spelled if byte is not None)
            if len(data) == len(spelled) and data.decode(errors="replace") == alone:  # its decoder reads it so
                return data
        # A space may be cut off at the start of a text, but not at the second token.
        twice = tokenizer.decode([token_id, token_id], False)
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()
