"""Encoding, incremental decoding, and stop strings at every split."""

import itertools
import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import TokenBytes, Tokenizer
from compiled_llm.text.tokenizer_parts import read_parts
from tests.tokenizers import END, byte_fallback, byte_level

TEXT = "naïve café 🚀🌍 สวัสดีชาวโลก 你好，世界 Ελληνικά\n\tdef f(x):  return x\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([TEXT], trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def feed(text: OutputText, ids: list[int]) -> tuple[list[str], str | None]:
    """What a user sees after each token, and the stop string that ended it."""
    seen = [""]
    for token_id in ids:
        stop = text.append(token_id)
        seen.append(seen[-1] + text.take(finished=stop is not None))
        if stop is not None:
            return seen, stop
    stop = text.finish()
    return [*seen, seen[-1] + text.take(finished=True)], stop


def test_round_trip_and_special_tokens_are_text_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode(TEXT, split_special_tokens=True) == tokenizer.encode(TEXT)
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.encode("a<|end|>b") == tokenizer.encode_piece("a<|end|>b") == [a, 0, b]
    ids = tokenizer.encode("a<|end|>b", split_special_tokens=True)
    assert 0 not in ids
    assert len(ids) > 3
    assert ids == tokenizer.encode_piece("a<|end|>b", split_special_tokens=True)
    assert tokenizer.decode(ids) == "a<|end|>b"


def test_what_the_library_wrote_and_does_not_read_is_named(directory: Path) -> None:
    """Of two words with one id it keeps either, and a merge may need the other."""
    parts = read_parts(directory)
    content = json.loads(parts.backend)
    del content["model"]["vocab"]["a"]
    with pytest.raises(ValueError, match=r"the tokenizer cannot be made of .*tokenizer\.json: ValueError: "):
        Tokenizer(directory, parts._replace(backend=json.dumps(content).encode()))


def test_streamed_text_grows_and_ends_as_the_whole(tokenizer: Tokenizer) -> None:
    """Random ids, most of them pieces of characters: what is shown is never taken back."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.randint(1, 300, (24,), generator=generator).tolist()
        prompt, output = ids[:8], ids[8:]
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        seen, _ = feed(OutputText(tokenizer, prompt, SamplingParams()), output)
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
        assert seen[-1] == tokenizer.decode(ids)[len(tokenizer.decode(prompt)) :]


def test_characters_split_over_tokens_appear_whole(tokenizer: Tokenizer) -> None:
    seen, _ = feed(OutputText(tokenizer, [], SamplingParams()), tokenizer.encode(TEXT))
    assert seen[-1] == TEXT
    assert not any("\ufffd" in text for text in seen)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_at_every_position(tokenizer: Tokenizer, include: bool) -> None:
    ids = tokenizer.encode(TEXT)
    for start in range(0, len(TEXT) - 6, 2):
        stop = TEXT[start : start + 5]
        params = SamplingParams(stop=stop, include_stop_str_in_output=include)
        seen, found = feed(OutputText(tokenizer, [], params), ids)
        end = TEXT.index(stop) + (len(stop) if include else 0)
        assert found == stop
        assert seen[-1] == TEXT[:end]
        assert all(TEXT[:end].startswith(text) for text in seen), "a part of the stop string was shown"


def test_the_earliest_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["return", "f(x)", "never"])
    seen, found = feed(OutputText(tokenizer, [], params), tokenizer.encode(TEXT))
    assert (found, seen[-1]) == ("f(x)", TEXT[: TEXT.index("f(x)")])


def test_what_might_become_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    seen, found = feed(OutputText(tokenizer, [], SamplingParams(stop="xyz")), tokenizer.encode("axy"))
    assert (found, seen[-1]) == (None, "axy")
    assert seen[-2] == "a"


def test_special_tokens_are_skipped_unless_wanted(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ab"), 0]
    assert feed(OutputText(tokenizer, [], SamplingParams()), ids)[0][-1] == "ab"
    kept = SamplingParams(skip_special_tokens=False)
    assert feed(OutputText(tokenizer, [], kept), ids)[0][-1] == "ab<|end|>"


def test_a_file_that_asks_for_truncation_or_padding_changes_no_prompt(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode(TEXT) == Tokenizer(directory).encode(TEXT)


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=str(tmp_path)):
        Tokenizer(tmp_path)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(Path(__file__).parents[2] / "compiled_llm" / "demo_model")


def test_a_text_full_of_special_tokens_is_as_long_as_it_is(demo: Tokenizer) -> None:
    """Whether it is too long is asked of its pieces, in the same way as it is encoded."""
    text = "<|endoftext|>" * 5000
    assert demo.excess(text, 5000) is None
    assert demo.excess(text, 400) is not None
    assert demo.excess(text, 5000, split_special_tokens=True) is not None
    assert demo.encode_end(text, 100)[-100:] == [0] * 100
    assert 0 not in demo.encode_end(text, 100, split_special_tokens=True)


def test_long_texts_become_the_same_tokens_by_the_call_that_others_need_not_wait_for(demo: Tokenizer) -> None:
    for text in ("def f(x):\n    return x\n" * 1000, " " * 10_000, TEXT * 100):
        assert len(text) > 4096
        assert demo.encode(text) == demo._backend.encode(text).ids
        assert demo.encode_pieces([text, "x"]) == [demo.encode(text), demo.encode("x")]


@pytest.mark.parametrize("text", ["x y " * 5_000, " " * 160_000, "x" * 20_000, TEXT * 300, "é" * 30_000])
def test_only_texts_that_do_not_fit_are_said_not_to(demo: Tokenizer, text: str) -> None:
    """Whatever is said to be too long is; and what is not said to be is not much longer."""
    length = len(demo.encode(text))
    for most in (100, 300, 1_000, 3_000, length - 1, length, length + 1, 2 * length):
        excess = demo.excess(text, most)
        if excess is None:
            assert length <= 8 * 4 * max(most, 512)
        else:
            found, characters = excess
            assert most < found <= length
            assert characters <= len(text)
    assert demo.excess(text, length) is None
    assert demo.excess(text, 100) is not None


@pytest.mark.battery
def test_a_panic_of_the_library_is_a_value_error(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern by which published tokenizers split a text tries every end of a run of spaces."""
    backend = Backend.from_str(demo._backend.to_str())
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    monkeypatch.setattr(demo, "_backend", backend)
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text: PanicException"):
        demo.encode(" " * 12_000_000)
    assert demo.decode(demo.encode("x  y")) == "x  y"


def edited(directory: Path, target: Path, **changes) -> Path:
    """A copy of the directory with these fields of ``tokenizer.json`` changed."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    content = json.loads((target / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return target


@pytest.mark.parametrize("reader", ["transformers.AutoTokenizer.from_pretrained", "tokenizers.Tokenizer.from_file"])
def test_what_a_library_fails_with(
    reader: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers is not needed where there is a tokenizer.json; a panic of the other library names the file."""

    class PanicException(BaseException):
        """The library's own cannot be imported."""

    def end_in(error: BaseException) -> None:
        def read(*args: object, **kwargs: object) -> None:
            raise error

        target = "compiled_llm.text.tokenizer_files.Backend" if "from_file" in reader else reader
        monkeypatch.setattr(target, SimpleNamespace(from_file=read) if "from_file" in reader else read)

    expected = Tokenizer(directory).encode(TEXT)
    end_in(PanicException("index out of bounds"))
    if "from_file" in reader:
        with pytest.raises(ValueError, match=r"tokenizer\.json.*PanicException: index out of bounds"):
            Tokenizer(directory)
    else:
        tokenizer = Tokenizer(directory)
        assert tokenizer.encode(TEXT) == expected
        assert "transformers' class cannot read this tokenizer (PanicException: index out" in tokenizer.notes[0]
    end_in(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Tokenizer(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"])
def test_a_fifo_among_its_files_does_not_hang(directory: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: must be a regular file, found a FIFO"):
        Tokenizer(tmp_path)


def test_the_sizes_in_a_config_are_not_built_for_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    """transformers would make a list of the layers, and a dict of the labels."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    config = {"model_type": "qwen3", "num_hidden_layers": 10**8, "num_labels": 10**8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    begun = time.monotonic()
    assert Tokenizer(tmp_path).encode(TEXT) == Tokenizer(directory).encode(TEXT)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("count", [1, 64, 700])
def test_the_end_of_a_long_text_has_the_tokens_that_the_whole_text_ends_in(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(DEMO_MODEL)
    text = "".join(f"def function_{n}(a, b):\n    return a + {n} * b\n\n\n" for n in range(3000))
    whole, encode, lengths = tokenizer.encode(text), tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda piece, split: lengths.append(len(piece)) or encode(piece, split))
    assert tokenizer.encode_end(text, count)[-count:] == whole[-count:]
    assert sum(lengths) < len(text) / 4
    assert tokenizer.encode_end(text, len(whole)) == whole


# -- Bytes of tokens


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
