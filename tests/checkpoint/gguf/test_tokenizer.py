"""Vocabularies of GGUF files become the tokenizers that they were taken from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from compiled_llm.checkpoint.gguf.architectures import config_of
from compiled_llm.checkpoint.gguf.header import read_header
from compiled_llm.checkpoint.gguf.tokenizer import end_of_text_ids, read_vocabulary, tokenizer_config, tokenizer_json
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.text.tokenizer_parts import read_parts
from tests.checkpoint.gguf.writing import metadata_of, tensors_of, write
from tests.tokenizer_pairs import BOS, END, EOS, FILES, SPECIAL, TEXTS, UNK, USER

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def kind(token: str) -> int:
    if token in SPECIAL:
        return {UNK: UNKNOWN, USER: USER_DEFINED}.get(token, CONTROL)
    return BYTE if token.startswith("<0x") else NORMAL


def said_of(backend: Tokenizer, model: str, pre: str = "default", **more: Any) -> dict[str, Any]:
    """The metadata of a file with the vocabulary of ``backend``."""
    read = json.loads(backend.to_str())["model"]
    numbers = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(numbers, key=numbers.__getitem__)
    merges = [" ".join(merge) for merge in read["merges"]]
    own: dict[str, Any] = {"model": model, "pre": pre, "tokens": tokens, "token_type": np.array([*map(kind, tokens)])}
    if model == "gpt2":
        own["merges"] = merges
    else:  # what is made by an earlier merge has a higher score
        ranks = {merge.replace(" ", ""): -i for i, merge in reversed([*enumerate(merges)])}
        own["scores"] = np.array([float(ranks.get(token, -1000)) for token in tokens])
    own |= {"bos_token_id": tokens.index(BOS), "eos_token_id": tokens.index(EOS), "unknown_token_id": tokens.index(UNK)}
    return {f"tokenizer.ggml.{key}": value for key, value in {**own, **more}.items()}


def made_of(metadata: dict[str, Any]) -> Tokenizer:
    vocabulary = read_vocabulary(metadata, "model.gguf")
    assert vocabulary is not None
    return Tokenizer.from_str(tokenizer_json(vocabulary))


@pytest.mark.parametrize(
    ("name", "model", "pre", "prefix"),
    [
        ("gpt2", "gpt2", "gpt-2", False),
        ("smollm2", "gpt2", "smollm", False),
        ("llama3", "gpt2", "llama-bpe", False),
        ("llama2", "llama", "default", True),
        ("gemma", "llama", "default", False),
    ],
)
def test_ids_and_texts_are_those_of_the_tokenizer(name: str, model: str, pre: str, prefix: bool) -> None:
    backend = FILES[name]()
    made = made_of(said_of(backend, model, pre, add_space_prefix=prefix, add_bos_token=False))
    for text in TEXTS:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert made.encode(text).ids == expected, text
        assert made.decode(expected, False) == backend.decode(expected, False), text


@pytest.mark.parametrize(
    ("model", "pre", "more", "bos", "eos"),
    [
        ("gpt2", "gpt-2", {}, False, False),
        ("gpt2", "llama-bpe", {}, True, False),
        ("llama", "default", {}, True, False),
        ("llama", "default", {"add_bos_token": False, "add_eos_token": True}, False, True),
    ],
)
def test_tokens_before_and_behind(model: str, pre: str, more: dict[str, Any], bos: bool, eos: bool) -> None:
    metadata = said_of(FILES["gpt2" if model == "gpt2" else "llama2"](), model, pre, **more)
    made = made_of(metadata)
    bare = made.encode("x y", add_special_tokens=False).ids
    assert made.encode("x y").ids == [made.token_to_id(BOS)] * bos + bare + [made.token_to_id(EOS)] * eos


def test_named_tokens_templates_and_ends() -> None:
    metadata = said_of(FILES["gpt2"](), "gpt2", "gpt-2")
    metadata |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tools": "{{ tools }}"}
    vocabulary = read_vocabulary(metadata, "model.gguf")
    assert vocabulary is not None
    config = tokenizer_config(vocabulary)
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == (BOS, EOS, UNK)
    assert {one["name"]: one["template"] for one in config["chat_template"]} == {
        "default": "{{ messages }}",
        "tools": "{{ tools }}",
    }
    assert end_of_text_ids(vocabulary) == sorted(vocabulary.tokens.index(one) for one in (EOS, END))


def test_a_token_that_is_there_twice_keeps_its_number() -> None:
    metadata = said_of(FILES["gpt2"](), "gpt2", "gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["x"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    made, last = made_of(metadata), len(metadata["tokenizer.ggml.tokens"]) - 1
    assert made.id_to_token(last) == f"x#{last}"
    assert made.encode("x").ids != [last]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model must be 'gpt2' or 'llama', found 't5'"),
        ({"pre": "whatever"}, r"tokenizer.ggml.pre must be one of .*, found 'whatever'"),
        ({"tokens": 3}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"token_type": np.array([1])}, r"has \d+ tokens, and the kinds of 1"),
        ({"merges": ["none such"]}, r"tokenizer\.ggml\.merges: "),
    ],
)
def test_what_cannot_be_read_is_said(change: dict[str, Any], message: str) -> None:
    metadata = said_of(FILES["gpt2"](), "gpt2", "gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        made_of(metadata)


def test_a_file_without_a_vocabulary() -> None:
    assert read_vocabulary({"tokenizer.ggml.model": "no_vocab"}, "model.gguf") is None
    assert read_vocabulary({}, "model.gguf") is None


def test_transformers_has_no_part_in_it(tmp_path: Path) -> None:
    """Neither in the config nor in the tokenizer: its import takes longer than all else of a first start."""
    told = said_of(FILES["llama3"](), "gpt2", "llama-bpe", token_type=None)
    told = {key: value for key, value in told.items() if value is not None}
    path = write(tmp_path / "model.gguf", "llama", metadata_of("llama") | told, tensors_of("llama"))
    code = (
        "import sys; from compiled_llm import EngineConfig; from compiled_llm.checkpoint import model_files; "
        f"config = EngineConfig(model={str(path)!r}); directory = model_files.checkpoint_directory(config); "
        "model_files.model_config(directory); assert model_files.load_tokenizer(config, directory); "
        "assert 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "COMPILED_LLM_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize(("name", "model", "pre"), [("smollm2", "gpt2", "smollm"), ("gemma", "llama", "default")])
def test_its_general_class_would_change_nothing(name: str, model: str, pre: str, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(said_of(FILES[name](), model, pre), "model.gguf")
    assert vocabulary is not None
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(vocabulary)))
    _, config = config_of(read_header(write(tmp_path / "model.gguf", "llama", metadata_of("llama"), {})))
    assert "model_type" not in config  # a type's own class would be asked, which may change more
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_parts(tmp_path, compare=False) == read_parts(tmp_path)
