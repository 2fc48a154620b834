"""Text to token ids and back, by a tokenizer.json."""

import functools
import itertools
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from compiled_llm.system.resources import release_freed_memory
from compiled_llm.text.byte_level import ALPHABET, REPLACEMENT, ByteLevelTokens
from compiled_llm.text.tokenizer_files import library_error
from compiled_llm.text.tokenizer_parts import TokenizerParts, affixes, read_parts, users_tokenizer

# Longer texts are encoded by a call that lets other threads run meanwhile.
_LONG = 4096
# What a cut through a text adds to its tokens, at most.
_TOKENS_OF_A_CUT = 64
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class SpecialToken(NamedTuple):
    token_id: int
    single_word: bool  # beside a letter or digit it is text
    stand_in: str  # takes its place in a text that is encoded


class Tokenizer:
    """The tokenizer of a model directory, from its ``tokenizer.json``. Never runs code of the directory.

    Special tokens that a text spells become such, unless it is encoded with ``split_special_tokens``.

    Attributes:
        parts: all that was read of the directory.
        chat_templates: the directory's own by name; one without a name is ``"default"``.
        named_tokens: tokens that chat templates use by name, such as ``bos_token``, as text.
        special_tokens: all of them by their text.
        notes: what its user should know of how it was read, a line each.
    """

    def __init__(self, directory: Path, parts: TokenizerParts | None = None) -> None:
        """``parts``: what ``read_parts(directory)`` returned, where that is known."""
        self._directory = directory
        self.parts = read_parts(directory) if parts is None else parts
        self._backend = _parsed(self.parts.backend, directory)
        # A file may ask for either; a prompt is never cut or filled up here.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_templates, self.named_tokens = self.parts.chat_templates, self.parts.named_tokens
        self.notes = self.parts.notes
        self._plain_backend: Backend | None = None  # for text in which no special token is looked for
        self._stand_ins: set[int | None] = set()  # their ids there
        # What a text that the vocabulary lacks becomes, so that this is no sign of a special token in it.
        names = (getattr(self._backend.model, "unk_token", None), self.named_tokens.get("unk_token"))
        self._prepare_chat({self._backend.token_to_id(name) for name in names if name})

    @functools.cached_property
    def byte_level(self) -> ByteLevelTokens | None:
        """The bytes of its tokens; None where a text is not the bytes of its tokens, one after the other."""
        return ByteLevelTokens(self._backend, self.special_tokens) if ByteLevelTokens.suit(self._backend) else None

    @functools.cached_property
    def prefix_ids(self) -> list[int]:
        """The token ids that are put before a text."""
        try:
            return affixes(self._backend)[0]
        except BaseException as error:
            raise library_error("encode a short text", error) from error

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-text token that the tokenizer's files name."""
        name = self.named_tokens.get("eos_token")
        return None if name is None else self._backend.token_to_id(name)

    def for_users(self) -> Any:
        """A tokenizer of transformers that gives the same tokens; a new one for each call."""
        return users_tokenizer(self._directory, self.parts)

    def encode(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``, with the tokens that belong around a prompt, such as a begin-of-text token.

        Args:
            split_special_tokens: special tokens that it spells are text like any other.
        """
        return _encode(self._backend_for(split_special_tokens), [text], True)[0]

    def encode_piece(self, text: str, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a piece of text by itself."""
        return self.encode_pieces([text], split_special_tokens)[0]

    def encode_pieces(self, texts: list[str], split_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of pieces of text, each by itself."""
        return _encode(self._backend_for(split_special_tokens), texts, False)

    def excess(self, text: str, most: int, split_special_tokens: bool = False) -> tuple[int, int] | None:
        """For a ``text`` of far more than ``most`` tokens: the number of tokens of its first characters, and how many
        characters those are. Encodes some multiple of ``most`` at most.

        None: it may fit. If it does not, then not by so much that to encode it as a whole would take long.
        """
        size = max(_LONG, 8 * most)
        if len(text) <= size:
            return None
        found = 0
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            found += max(0, len(self.encode_piece(piece, split_special_tokens)) - _TOKENS_OF_A_CUT)
            if found > most:
                return found, min(start + size, len(text))
        return None

    def encode_end(self, text: str, count: int, split_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``, or of an end of it that has more than ``count``: no more is encoded than it takes."""
        needed = count + _TOKENS_OF_A_CUT  # at the cut they may differ from the whole text's
        size = max(_LONG, 8 * needed)
        while size < len(text):
            token_ids = self.encode(text[-size:], split_special_tokens)
            if len(token_ids) > needed:
                return token_ids
            size *= 4
        return self.encode(text, split_special_tokens)

    def encode_chat(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered chat, with nothing put around it. A special token that it spells becomes that token.

        A spelling with the character ``mark`` in it stays text. The marks themselves are left out. A special token that
        the tokenizer would look for in normalized text is looked for in the text as it is.

        Raises:
            ValueError: the tokenizer makes a special token of what should stay text.
        """
        pieces, special_ids, end = [], [], 0
        for start, stop, token in self._special_tokens_in(text):
            pieces += [text[end:start].replace(mark, ""), token.stand_in]
            special_ids.append(token.token_id)
            end = stop
        pieces.append(text[end:].replace(mark, ""))
        token_ids = _encode(self._backend_for(True), ["".join(pieces)], False)[0]
        for token_id in self._never_text.intersection(token_ids):
            name = self._backend.id_to_token(token_id)
            raise ValueError(
                f"messages spell {name!r}, which the tokenizer reads as a special token even in plain text"
            )
        found = iter(special_ids)
        token_ids = [next(found) if token_id in self._stand_ins else token_id for token_id in token_ids]
        assert next(found, None) is None, "a special token of the chat was lost"
        return token_ids

    def vocabulary(self) -> tuple[str, set[int]]:
        """Its ``tokenizer.json`` as text, and all its token ids."""
        try:
            return self._backend.to_str(), set(self._backend.get_vocab(with_added_tokens=True).values())
        except BaseException as error:
            raise library_error("write its vocabulary", error) from error

    def tokens(self) -> dict[int, str]:
        """All its tokens by their ids, as the vocabulary spells them."""
        try:
            return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}
        except BaseException as error:
            raise library_error("list its tokens", error) from error

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise library_error("decode these tokens", error) from error

    def token(self, token_id: int) -> str | None:
        """As the vocabulary spells it; None if it has no such id."""
        return self._backend.id_to_token(token_id)

    def byte_value(self, token_id: int) -> int | None:
        """The byte that a token is, if it is one of ``<0x00>`` to ``<0xFF>`` and its decoder reads it as a byte."""
        token = self._backend.id_to_token(token_id)
        if token is None or not _BYTE_TOKEN.fullmatch(token) or self.decode([token_id], False) == token:
            return None
        return int(token[3:5], 16)

    def special_tokens_within(self, text: str) -> dict[int, str]:
        """Texts of the special tokens that are anywhere in ``text``, by id."""
        starts = [match.start() for match in self._firsts.finditer(text)]
        parts = (text[start : start + length] for start in starts for length in self._lengths)
        return {self.special_tokens[part].token_id: part for part in parts if part in self.special_tokens}

    def _backend_for(self, split_special_tokens: bool) -> Backend:
        if not split_special_tokens:
            return self._backend
        if self._plain_backend is None:
            self._plain_backend = self._with_stand_ins()
        return self._plain_backend

    def _prepare_chat(self, unknown_ids: set[int | None]) -> None:
        """Give the special tokens of a chat stand-ins, which no text can spell.

        They are added tokens of a second tokenizer, made for the first chat, in which no other special token is looked
        for. So the tokenizer itself cuts the text at them, and strips the spaces beside those that ask for it; and no
        model can generate one.
        """
        # One for each way to strip spaces at its sides. Noncharacters around it keep it from joining other text.
        stand_in = f"\ufdd0{secrets.token_hex(16)}{{:d}}{{:d}}\ufdd0".format
        self.special_tokens = {
            token.content: SpecialToken(token_id, token.single_word, stand_in(token.lstrip, token.rstrip))
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        self._never_text = {token.token_id for token in self.special_tokens.values()} - unknown_ids
        self._lengths = sorted({len(text) for text in self.special_tokens}, reverse=True)
        firsts = {re.escape(text[0]) for text in self.special_tokens}
        self._firsts = re.compile("|".join(firsts) or "(?!)")
        self._stand_in_tokens = [
            AddedToken(stand_in(lstrip, rstrip), lstrip=lstrip, rstrip=rstrip, normalized=False)
            for lstrip, rstrip in itertools.product((False, True), repeat=2)
        ]

    def _with_stand_ins(self) -> Backend:
        backend = _parsed(self._backend.to_str().encode(), self._directory)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # what a text spells stays text
        backend.add_tokens(self._stand_in_tokens)
        self._stand_ins = {backend.token_to_id(token.content) for token in self._stand_in_tokens}
        return backend

    def _special_tokens_in(self, text: str) -> Iterator[tuple[int, int, SpecialToken]]:
        """(start, stop, token) of each, in order; of several that start at one place, the longest."""
        stop = 0
        while match := self._firsts.search(text, stop):
            start = match.start()
            stop = start + 1
            for length in self._lengths:
                token = self.special_tokens.get(text[start : start + length])
                if token is None:
                    continue
                stop = min(start + length, len(text))
                around = text[max(0, start - 1) : start] + text[stop : stop + 1]
                if not (token.single_word and re.search(r"\w", around)):
                    yield start, stop, token
                break


def _parsed(content: bytes, directory: Path) -> Backend:
    """The backend of ``directory`` that the library wrote as ``content``.

    It may refuse what it wrote itself: of two words with one id it keeps either, and a merge may need the other.
    """
    try:
        backend = Backend.from_buffer(content)
    except BaseException as error:
        raise library_error(f"be made of {directory / 'tokenizer.json'}", error) from error
    release_freed_memory()  # three times what the backend keeps: 320 MiB of 262,144 tokens
    return backend


def _encode(backend: Backend, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """``ValueError``: the library cannot."""
    try:
        if len(texts) == 1 and len(texts[0]) <= _LONG:
            return [backend.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        return [found.ids for found in backend.encode_batch(texts, add_special_tokens=add_special_tokens)]
    except BaseException as error:
        raise library_error("encode this text", error) from error


class TokenBytes:
    """The bytes that each token stands for, also where they are a part of a character only.

    The bytes of an output's tokens, one after the other, are its text's, but for special tokens that the text leaves
    out and a space that decoding cuts off at its start.
    """

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
