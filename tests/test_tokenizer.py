"""Encoding, incremental decoding, and stop strings at every split."""

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from compiled_llm.sampling_params import SamplingParams
from compiled_llm.tokenizer import OutputText, Tokenizer

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
    seen = []
    for token_id in ids:
        stop = text.append(token_id)
        seen.append(text.text(finished=stop is not None))
        if stop is not None:
            return seen, stop
    stop = text.finish()
    return [*seen, text.text(finished=True)], stop


def test_round_trip_and_special_tokens_are_only_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    ids = tokenizer.encode("a<|end|>b")
    assert 0 not in ids
    assert tokenizer.decode(ids) == "a<|end|>b"


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
