"""Bytes of tokens: those of an output's tokens are those of its text, whatever parts of characters they are."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.text.token_bytes import TokenBytes
from compiled_llm.text.tokenizer import Tokenizer
from tests.tokenizers import END, byte_fallback, byte_level

TEXTS = [
    "a b",
    "🚀 rocket",
    "中文、日本語",
    "é\u0301 \u200d👩‍🚀",
    "\x00\x7f\xa0\xad\uffff",
    " \n\t ",
    "\ufffd",
    "<0x41>",
]


def test_each_byte_has_its_token_of_byte_level_bpe(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    found = [TokenBytes(tokenizer).of(token_id) for token_id in range(256)]
    assert sorted(found) == [bytes([byte]) for byte in range(256)]
    for token_id, data in enumerate(found):
        assert data.decode(errors="replace") == tokenizer.decode([token_id])


def test_each_byte_has_its_token_of_byte_fallback(tmp_path: Path) -> None:
    tokens = TokenBytes(byte_fallback(tmp_path))
    assert [tokens.of(token_id) for token_id in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_the_tokens_of_a_text_are_the_texts(make, tmp_path: Path) -> None:
    """Byte fallback puts a space before a text, which is the first token's."""
    tokenizer = make(tmp_path, ["a", "b", "▁", "中", "▁中"])
    tokens = TokenBytes(tokenizer)
    for text in TEXTS:
        joined = b"".join(map(tokens.of, tokenizer.encode_piece(text)))
        assert joined.decode().removeprefix(" " if make is byte_fallback else "") == text


def test_bytes_of_random_tokens_of_the_demo_model_are_those_that_it_decodes_to() -> None:
    tokenizer, rng = Tokenizer(DEMO_MODEL), random.Random(0)
    tokens = TokenBytes(tokenizer)
    ids = sorted(tokenizer.vocabulary()[1])
    for _ in range(100):
        chosen = rng.choices(ids, k=20)
        joined = b"".join(map(tokens.of, chosen))
        assert joined.decode(errors="replace") == tokenizer.decode(chosen, skip_special_tokens=False)


def test_tokens_of_whole_and_of_part_characters(tmp_path: Path) -> None:
    level = ["Ġa", "ĠðŁ", "ļ", "ä¸", "<0x41>", "ï¿½"]
    tokens = TokenBytes(byte_level(tmp_path / "level", level))
    expected = [b" a", b" \xf0\x9f", b"\x9a", b"\xe4\xb8", b"<0x41>", b"\xef\xbf\xbd"]
    assert [tokens.of(token_id) for token_id in range(len(level))] == expected
    fallback = ["▁a", "a", "▁", "中", "▁▁", "<0x4>"]
    tokens = TokenBytes(byte_fallback(tmp_path / "fallback", fallback))
    expected = [b" a", b"a", b" ", "中".encode(), b"  ", b"<0x4>"]
    assert [tokens.of(token_id) for token_id in range(len(fallback))] == expected


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_and_ids_that_are_none(make, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    tokens = TokenBytes(tokenizer)
    assert tokens.of(256) == END.encode()
    assert tokens.of(5000) == b""


def test_a_decoder_that_puts_spaces_between_words(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tokens = TokenBytes(Tokenizer(tmp_path))
    assert [tokens.of(1), tokens.of(2)] == [b" a", b"b"]
