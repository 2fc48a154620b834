"""Tokens are those of tokenizer.json as the tokenizers library reads it, whatever class of transformers is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from compiled_llm.text.chat import ChatEncoder
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.text.tokenizer_parts import probe_texts
from tests.chat_templates import INST
from tests.drawn import cases
from tests.tokenizer_pairs import BOS, CLASSES, END, EOS, FILES, TEXTS, USER, write_pair

PAIRS = {f"{kind}-{name}": (kind, name) for kind in FILES for name in CLASSES}


def library(directory: Path) -> Backend:
    return Backend.from_file(str(directory / "tokenizer.json"))


def tokens(directory: Path, text: str) -> list[str]:
    tokenizer, backend = Tokenizer(directory), library(directory)
    return [backend.id_to_token(token_id) for token_id in tokenizer.encode_piece(text)]


@pytest.mark.parametrize(("kind", "name"), cases(PAIRS, 25, PAIRS))
def test_tokens_and_texts_are_those_of_the_library(kind: str, name: str, tmp_path: Path) -> None:
    """The ordinary run has 25 pairs, the battery the others of 144."""
    directory = write_pair(tmp_path, kind, name)
    tokenizer, expected = Tokenizer(directory), library(directory)
    users = tokenizer.for_users()
    assert len(TEXTS) >= 40
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode_piece(text) == expected.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == expected.decode(ids, skip_special_tokens=skip), text
        assert users(text).input_ids == ids, text
        assert users.decode(ids) == expected.decode(ids, skip_special_tokens=False), text


# -- The faults that transformers' classes have, each of which was one of ours


@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_the_spaces_of_an_indented_line_are_one_token(name: str, tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "smollm2", name)
    assert tokens(directory, "x =\n    1")[-2:] == ["ĊĠĠĠĠ", "1"]
    assert AutoTokenizer.from_pretrained(directory).tokenize("x =\n    1")[-2:] == ["Ġ", "1"]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_leading_space_is_kept_beside_the_one_that_is_added(name: str, tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "llama2", name)
    assert tokens(directory, " x") == ["▁▁", "x"]
    assert tokens(directory, f"x{EOS}x") == ["▁x", EOS, "▁x"]
    assert (AutoTokenizer.from_pretrained(directory).tokenize(" x") != ["▁▁", "x"]) == (name == "llama")


def test_text_after_a_special_token_of_a_chat_keeps_its_space(tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "llama2", "llama", chat_template=INST)
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
    text, token_ids = ChatEncoder(Tokenizer(directory)).encode(chat, 1000)
    assert EOS in text
    assert token_ids == library(directory).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["qwen2", "of_model_qwen2", "qwen3_5"])
def test_no_normalizer_is_added_and_no_space_is_lost(name: str, tmp_path: Path) -> None:
    directory = write_pair(tmp_path / "bytes", "gpt2", name)
    tokenizer = Tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "cafe\u0301"
    tokenizer = Tokenizer(write_pair(tmp_path / "spaces", "llama2", name))
    assert tokenizer.decode(tokenizer.encode("the  x\n the")) == "the  x\n the"


# -- What is said of it


def test_a_difference_is_said_in_a_line_with_an_example(tmp_path: Path) -> None:
    (note,) = Tokenizer(write_pair(tmp_path, "smollm2", "gpt2")).notes
    assert "\n" not in note
    assert "by tokenizer.json, which is used, and [" in note
    assert "by transformers' GPT2Tokenizer; they differ in " in note


def test_nothing_is_said_where_there_is_none(tmp_path: Path) -> None:
    assert Tokenizer(write_pair(tmp_path, "smollm2")).notes == ()
    assert len(probe_texts([EOS])) > 300


def test_a_class_that_fails_stops_nothing(tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "gpt2", extra_special_tokens=3)  # a TypeError of transformers
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode(TEXTS[0]) == library(directory).encode(TEXTS[0]).ids
    assert tokenizer.named_tokens["eos_token"] == EOS
    (note,) = tokenizer.notes
    assert "transformers' class cannot read this tokenizer (TypeError: " in note
    assert tokenizer.for_users().eos_token == EOS


# -- What tokenizer_config.json adds


@pytest.mark.parametrize("kind", ["gpt2", "smollm2"])  # the second puts <s> before a text
@pytest.mark.parametrize("eos", [None, False, True])
@pytest.mark.parametrize("bos", [None, False, True])
def test_begin_and_end_of_text_are_put_where_the_config_says(
    bos: bool | None, eos: bool | None, kind: str, tmp_path: Path
) -> None:
    given = {name: value for name, value in (("add_bos_token", bos), ("add_eos_token", eos)) if value is not None}
    tokenizer, backend = Tokenizer(write_pair(tmp_path, kind, **given)), library(tmp_path)
    expected = backend.encode("x 1", add_special_tokens=False).ids
    if bos or (bos is None and kind == "smollm2"):
        expected = [backend.token_to_id(BOS), *expected]
    if eos:
        expected = [*expected, backend.token_to_id(EOS)]
    assert tokenizer.encode("x 1") == expected
    assert tokenizer.for_users()("x 1").input_ids == expected
    assert tokenizer.encode_piece("x 1") == backend.encode("x 1", add_special_tokens=False).ids


def test_a_token_to_add_that_there_is_not_is_said(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_pair(tmp_path, "gpt2", bos_token=None, add_bos_token=True))
    assert tokenizer.encode("x") == tokenizer.encode_piece("x")
    assert "add_bos_token is true, and there is no bos_token in the vocabulary: none is added" in tokenizer.notes[0]


def test_tokens_that_tokenizer_json_lacks_are_added_with_their_ids(tmp_path: Path) -> None:
    size = library(write_pair(tmp_path, "gpt2")).get_vocab_size()
    added = {
        str(size + 1): {"content": "<think>", "special": False},
        str(size): {"content": "<pad>", "special": True},
        "3": {"content": END, "special": True},
    }
    tokenizer = Tokenizer(write_pair(tmp_path, "gpt2", added_tokens_decoder=added, pad_token="<pad>"))
    assert tokenizer.encode(f"<pad>{END}<think>") == [size, 3, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<think>"
    assert tokenizer.named_tokens["pad_token"] == "<pad>"
    directory = write_pair(tmp_path, "gpt2")
    (directory / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    assert Tokenizer(directory).encode("<pad>") == [size]


@pytest.mark.parametrize("token_id", [4, 5000])
def test_a_token_with_an_id_that_it_cannot_have_is_refused_by_name(token_id: int, tmp_path: Path) -> None:
    added = {str(token_id): {"content": "<pad>", "special": True}}
    with pytest.raises(
        ValueError, match=rf"the token '<pad>' has the id {token_id}, and tokenizer.json, which lacks it"
    ):
        Tokenizer(write_pair(tmp_path, "gpt2", added_tokens_decoder=added))


def test_a_token_with_two_ids_has_that_of_tokenizer_json_which_is_said(tmp_path: Path) -> None:
    added = {"7": {"content": END, "special": True}}
    tokenizer = Tokenizer(write_pair(tmp_path, "gpt2", added_tokens_decoder=added))
    assert tokenizer.encode(END) == [3]
    assert f"the token {END!r} is 3 by tokenizer.json, and 7 by another file" in tokenizer.notes[0]


def test_a_word_of_the_vocabulary_that_the_config_names_is_special(tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "gpt2", eos_token="Ġ", additional_special_tokens=["Ċ"])
    tokenizer = Tokenizer(directory)
    assert {"Ġ", "Ċ"} <= tokenizer.special_tokens.keys()
    assert tokenizer.eos_token_id == library(directory).token_to_id("Ġ")


def test_names_that_no_file_gives_are_those_of_the_class(tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "llama2", "llama")
    config = {"tokenizer_class": "LlamaTokenizer", "unk_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(directory).named_tokens == {"bos_token": BOS, "eos_token": EOS}
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END, "lstrip": False}}))
    assert Tokenizer(directory).named_tokens == {"bos_token": BOS, "eos_token": END}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bos_token": 3}, "bos_token must be a text or an object with 'content', given 3"),
        ({"eos_token": {"content": EOS, "lstrip": 1}}, "eos_token: lstrip must be true or false, given 1"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true, false or null, given 'yes'"),
        ({"chat_template": 3}, "chat_template must be a text, given 3"),
        ({"chat_template": [{"template": "x"}]}, "chat_template must be a text or a list of objects with 'name'"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "a token id must be an integer from 0 to .*, given 'x'"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object, given"),
        ({"added_tokens_decoder": {"1": 5}}, "must be a text or an object with 'content', given 5"),
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: .*{message}"):
        Tokenizer(write_pair(tmp_path, "gpt2", **fields))


def test_chat_templates_are_those_of_all_files(tmp_path: Path) -> None:
    directory = write_pair(tmp_path, "gpt2")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert Tokenizer(directory).chat_templates == {"default": "processor"}
    listed = [{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag"}]
    write_pair(tmp_path, "gpt2", chat_template=listed)
    assert Tokenizer(directory).chat_templates == {"default": "listed", "rag": "rag"}
    (directory / "chat_template.jinja").write_text("of its own\n")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    expected = {"default": "of its own\n", "rag": "rag", "tool_use": "tools"}
    assert Tokenizer(directory).chat_templates == expected
    assert Tokenizer(directory).for_users().chat_template == expected


def test_a_directory_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    """As GPT-2's first files are."""
    content = json.loads((write_pair(tmp_path, "gpt2", "gpt2") / "tokenizer.json").read_text())["model"]
    expected = library(tmp_path).encode("x =\n    1 the").ids
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in content["merges"]))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x =\n    1 the") == expected
    assert tokenizer.named_tokens["eos_token"] == EOS


def test_special_tokens_that_a_text_has_in_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_pair(tmp_path, "gpt2"))
    assert tokenizer.special_tokens_within(f"a{END}\n{USER}{END}<|im_end|") == {3: END, 4: USER}
    assert tokenizer.special_tokens_within("a<b") == {}
