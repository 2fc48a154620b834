"""Structured output without a model: random walks over the tokens that are allowed, ends, copies, limits, bad input."""

import dataclasses
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.constraints import grammar_processes
from compiled_llm.constraints import grammars as structured_outputs
from compiled_llm.constraints.grammar_processes import GrammarProcesses
from compiled_llm.constraints.grammars import GrammarCompiler, GrammarState
from compiled_llm.text.tokenizer import Tokenizer
from tests.battery import sized
from tests.schemas import SCHEMAS

DEMO_MODEL = Path(__file__).parents[2] / "compiled_llm" / "demo_model"
VOCAB_SIZE = 4096
EOS = 0
MOST_TOKENS = 2_000
# What a walk that shall end takes where it may: what ends strings, arrays and objects, or the first part of an email
# address; then what ends numbers; whitespace at last.
ENDS = [re.compile(pattern) for pattern in (r'["}\]@]', ",", r"\S", "")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODEL)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)]


def allowed(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> list[int]:
    words = np.full(-(-vocab_size // 32), -1, np.int32)
    state.allow(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(state: GrammarState, texts: list[str], generator: random.Random, patience: int) -> list[int]:
    """Token ids of a random text of the grammar: uniform for ``patience`` tokens, then those that lead to its end."""
    token_ids: list[int] = []
    for step in range(MOST_TOKENS):
        choices = allowed(state)
        assert choices
        assert state.finished == (choices == [EOS])
        if EOS in choices and (step >= patience or len(choices) == 1):
            break
        choices = [token_id for token_id in choices if token_id != EOS]
        if step >= patience:
            ranked = ([token_id for token_id in choices if end.match(texts[token_id])] for end in ENDS)
            choices = next(filter(None, ranked))
        token_ids.append(generator.choice(choices))
        state.accept(token_ids[-1])
    else:
        pytest.fail(f"no end after {MOST_TOKENS} tokens")
    state.accept(EOS)
    assert state.finished
    return token_ids


def follow(state: GrammarState, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar takes the text, token by token, and is complete behind it."""
    for token_id in tokenizer.encode(text, split_special_tokens=True):
        if token_id not in allowed(state):
            with pytest.raises(ValueError, match="may not follow"):
                state.accept(token_id)
            return False
        state.accept(token_id)
    return EOS in allowed(state)


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, **params: Any) -> bool:
    return follow(compiler.start(StructuredOutputsParams(**params)), tokenizer, text)


@sized("walks", 3, 500)
def test_every_walk_through_a_schema_is_an_instance_of_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str], walks: int, battery_counts: Counter[str]
) -> None:
    for name, schema in SCHEMAS:
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for seed in range(walks):
            generator = random.Random(f"{name} {seed}")
            options = {"disable_any_whitespace": True} if seed % 3 == 0 else {}
            params = StructuredOutputsParams(json=schema, **options)
            token_ids = walk(compiler.start(params), texts, generator, generator.randrange(40))
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            try:
                validator.validate(json.loads(text))
            except ValueError as error:
                pytest.fail(f"{name}, walk {seed}: {text!r}: {error}")
            battery_counts["walks"] += 1
            battery_counts["tokens"] += len(token_ids)
    assert len(SCHEMAS) == 20
    assert battery_counts["walks"] == 20 * walks


def test_json_object_is_an_object(compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str]) -> None:
    for seed in range(20):
        state = compiler.start(StructuredOutputsParams(json_object=True))
        assert isinstance(json.loads(tokenizer.decode(walk(state, texts, random.Random(seed), 5 * seed))), dict)
    assert not takes(compiler, tokenizer, "[1]", json_object=True)
    assert takes(compiler, tokenizer, '{"a": [1, {"b": null}]}', json_object=True)


REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)( (yes|no|maybe)){0,3}",
    r"[A-Z][a-z]{2,10}, [A-Z]{2} [0-9]{5}",
    r"v(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){2}",
    r"[αβγ]{2,5}🚀?\n/\\\"#",
    r"^def [a-z_]{1,12}\(\):$",
    r"a*b?",
    r"[^\n]{0,40}",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_every_walk_through_a_regex_matches_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str], regex: str
) -> None:
    for seed in range(20):
        state = compiler.start(StructuredOutputsParams(regex=regex))
        text = tokenizer.decode(walk(state, texts, random.Random(seed), seed), skip_special_tokens=True)
        assert re.fullmatch(regex, text), text


def test_choice_gives_the_strings_and_no_others(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str]
) -> None:
    """Among them one that another begins with, and every character that a regex could take for its own."""
    choice = ["yes", "yes, but", "No.", " a\tb\n", "".join(map(chr, range(32, 127))), "naïve 🚀 北京", "<|endoftext|>"]
    params = StructuredOutputsParams(choice=choice)
    assert params == StructuredOutputsParams(choice=tuple(choice))
    seen = {tokenizer.decode(walk(compiler.start(params), texts, random.Random(n), n % 40)) for n in range(200)}
    assert seen == set(choice)
    assert all(takes(compiler, tokenizer, item, choice=choice) for item in choice)
    assert not any(takes(compiler, tokenizer, item, choice=choice) for item in ("ye", "yes,", "yesno", "NoX"))


ARITHMETIC = r"""
start: sum
sum: product (/[+-]/ product)*
product: value (/[*]/ value)*
value: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


def test_every_walk_through_a_grammar_is_of_its_language(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str]
) -> None:
    for seed in range(20):
        state = compiler.start(StructuredOutputsParams(grammar=ARITHMETIC))
        token_ids: list[int] = []
        for step in itertools.count():
            choices = allowed(state)
            if EOS in choices and step >= seed:
                break
            choices = [token_id for token_id in choices if token_id != EOS]
            if step >= seed:
                choices = [token_id for token_id in choices if re.match("[0-9)]", texts[token_id])] or choices
            token_ids.append(random.Random(f"{seed} {step}").choice(choices))
            state.accept(token_ids[-1])
        whole = text = tokenizer.decode(token_ids)
        while text != (shorter := re.sub(r"\((N([+*-]N)*)\)", "N", re.sub(r"[1-9][0-9]{0,3}", "N", text))):
            text = shorter
        assert re.fullmatch(r"N([+*-]N)*", text), whole
    assert takes(compiler, tokenizer, "(1+2)*3", grammar=ARITHMETIC)
    assert not takes(compiler, tokenizer, "(1+2*3", grammar=ARITHMETIC)


def test_whitespace_is_bounded_and_as_asked_for(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    assert takes(compiler, tokenizer, "[1,\n\t 2 ]", json=schema)
    assert takes(compiler, tokenizer, "[" + 64 * " " + "]", json=schema)
    assert not takes(compiler, tokenizer, "[" + 65 * " " + "]", json=schema)
    assert not takes(compiler, tokenizer, " []", json=schema)
    assert not takes(compiler, tokenizer, "[] ", json=schema)
    assert takes(compiler, tokenizer, "[1,2]", json=schema, disable_any_whitespace=True)
    assert not takes(compiler, tokenizer, "[1, 2]", json=schema, disable_any_whitespace=True)
    assert takes(compiler, tokenizer, "[1, 2]", json=schema, whitespace_pattern=" ?")
    assert not takes(compiler, tokenizer, "[1,  2]", json=schema, whitespace_pattern=" ?")
    assert not takes(compiler, tokenizer, '{"a":  1}', json_object=True, whitespace_pattern=" ?")


def test_properties_come_in_the_order_of_the_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert takes(compiler, tokenizer, '{"b":1,"a":2}', json=schema)
    assert not takes(compiler, tokenizer, '{"a":2,"b":1}', json=schema)


def test_multiples(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"prefixItems": [{"multipleOf": multiple} for multiple in (0.01, 2.5, 1000, 16)], "items": False}
    assert takes(compiler, tokenizer, "[0.37,7.5,3000,32]", json=schema)
    assert not any(takes(compiler, tokenizer, text, json=schema) for text in ("[0.375]", "[1,7]", "[1,5,3001]"))
    assert takes(compiler, tokenizer, "x75", grammar='start: "x" %json {"multipleOf": 25}')


def test_params_hold_canonical_hashable_values() -> None:
    spaced = StructuredOutputsParams(json='{ "type" : "object",\n "title": "naïve" }')
    assert spaced.json == '{"type":"object","title":"naïve"}'
    assert hash(spaced) == hash(StructuredOutputsParams(json={"type": "object", "title": "naïve"}))
    assert spaced != StructuredOutputsParams(json={"title": "naïve", "type": "object"})  # another order is another text


def test_generations_of_one_grammar_are_independent(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str]
) -> None:
    params = StructuredOutputsParams(choice=["left turn", "left side"])
    state, *others = (compiler.start(params) for _ in range(20))
    before = allowed(state)
    for other in others:
        for token_id in tokenizer.encode("left "):
            other.accept(token_id)
    ends = {tokenizer.decode(walk(other, texts, random.Random(n), 0)) for n, other in enumerate(others)}
    assert ends == {"turn", "side"}
    assert allowed(state) == before
    assert not state.finished
    walk(state, texts, random.Random(0), 0)


def test_drafts_are_followed_by_what_may_follow_them_and_change_nothing(
    compiler: GrammarCompiler, tokenizer: Tokenizer, texts: list[str]
) -> None:
    params = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["left turn", "left side", 17]}})
    rng, num_drafts = random.Random(0), 0
    for _ in range(6):
        token_ids = walk(compiler.start(params), texts, rng, 9)
        state = compiler.start(params)
        for place, token_id in enumerate(token_ids):
            before = allowed(state)
            drafts = [*token_ids[place : place + 4], EOS, 0][: rng.randint(1, 6)]
            if rng.random() < 0.3:
                drafts.insert(rng.randint(0, len(drafts)), rng.randrange(VOCAB_SIZE))
            found = state.after(drafts)
            follower = compiler.start(params)
            for known in token_ids[:place]:
                follower.accept(known)
            for draft, words in zip(drafts, found, strict=False):
                follower.accept(draft)
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")
                assert np.flatnonzero(bits[:VOCAB_SIZE]).tolist() == allowed(follower)
                assert not follower.finished
                num_drafts += 1
            if len(found) < len(drafts):
                draft = drafts[len(found)]
                if draft in allowed(follower) and draft != EOS:
                    follower.accept(draft)
                    assert follower.finished, "what ends the text is no draft"
            assert allowed(state) == before
            state.accept(token_id)
        state.accept(EOS)
        assert state.after([0]) == []
    assert num_drafts > 60


def test_a_token_that_may_not_follow_is_refused_and_changes_nothing(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.start(StructuredOutputsParams(regex="[ab]{2}"))
    a, c = tokenizer.encode("a")[0], tokenizer.encode("c")[0]
    for token_id in (c, EOS, -1, VOCAB_SIZE, 2**40):
        with pytest.raises(ValueError, match=f"token {token_id}, after 0 of the grammar's, m"):
            state.accept(token_id)
    state.accept(a)
    state.accept(a)
    assert state.finished
    assert allowed(state) == [EOS]
    with pytest.raises(ValueError, match="after 2 of the grammar's, may not follow"):
        state.accept(a)
    state.accept(EOS)
    assert state.finished


def test_all_eos_tokens_end_a_text_and_none_is_text(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS, 7])
    state = compiler.start(StructuredOutputsParams(regex="a"))
    assert not {EOS, 7} & set(allowed(state))
    state.accept(tokenizer.encode("a")[0])
    assert allowed(state) == [EOS, 7]
    assert state.finished
    special = compiler.start(StructuredOutputsParams(regex=r"(?s:x.*)"))
    assert EOS not in allowed(special)


def test_only_tokens_of_both_tokenizer_and_model_are_allowed(tokenizer: Tokenizer) -> None:
    for grammar in ("start: <[*]>+", 'start: /(?s:.+)/ "b"'):
        params = StructuredOutputsParams(grammar=grammar)
        large, small = (GrammarCompiler(tokenizer, size, [EOS]).start(params) for size in (5000, 4000))
        assert allowed(large, 5000)[-1] == VOCAB_SIZE - 1
        assert allowed(small, 4000) == [token_id for token_id in allowed(large, 5000) if token_id < 4000]
        with pytest.raises(ValueError, match="below the vocabulary's size, 4000"):
            small.accept(4000)


def test_byte_fallback_tokenizers(tmp_path: Path) -> None:
    """As those of Llama 2: a space is part of a token, and a leading one is dropped when decoding."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ab{}", "▁a", "ab", "▁{"]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    backend = Backend(models.BPE(vocab, [("▁", "a"), ("a", "b"), ("▁", "{")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    state = GrammarCompiler(tokenizer, len(vocab), [2]).start(StructuredOutputsParams(choice=["ab {é\n a}"]))
    token_ids = []
    while not state.finished:
        token_ids.append(allowed(state, len(vocab))[-1])
        state.accept(token_ids[-1])
    assert tokenizer.decode(token_ids) == "ab {é\n a}"


def test_a_grammar_serves_on_when_its_lexer_is_full(
    tokenizer: Tokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of one grammar share the library's lexer, which only grows: here it is full after a few of them."""
    monkeypatch.setitem(structured_outputs._LIMITS, "max_lexer_states", 1500)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(regex=r"(.*a.{9}|.*b.{8}|[a-z]{1,100}x)")
    states = [compiler.start(params) for _ in range(20)]
    for seed, state in enumerate(states):
        generator = random.Random(seed)
        for _ in range(30):
            state.accept(generator.choice([token_id for token_id in allowed(state) if token_id != EOS]))
    assert all(allowed(state) for state in states), "each needs some hundred lexer states, all together more"
    assert allowed(compiler.start(params))
    compiler.close()


def test_compiled_grammars_are_kept_and_bounded(tokenizer: Tokenizer) -> None:
    """A generation whose process was given up for those of others goes on in another one."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS], most=2)
    kept = compiler._processes._kept
    states = [compiler.start(StructuredOutputsParams(regex=f"[ab]{{{count}}}")) for count in (2, 3, 4)]
    assert len(kept) == 2
    first, *_ = kept.values()
    assert allowed(states[1])
    compiler.start(StructuredOutputsParams(regex="[ab]{3}"))
    assert first in kept.values()
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    for token_id in (a, b):  # each turn needs all three grammars
        for state in states:
            state.accept(token_id)
        assert [EOS in allowed(state) for state in states] == [token_id == b, False, False]
    assert [state.finished for state in states] == [True, False, False]
    assert len(kept) == 2
    compiler.close()
    assert not kept


def chain(number: int) -> dict[str, Any]:
    """Definitions that each refer to the next, as many as fit: the library follows them by recursion."""
    links = {f"a{i}": {"properties": {"a": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{number}": {}}}


DEEP = {
    "json": {"json": chain(1_200)},
    "json arrays": {"json": '{"items":' * 100 + "{}" + "}" * 100},
    "rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5_000)) + '\nr5000: "a"'},
    "terminals": {"grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(5_000)) + '\nR5000: "a"'},
}


@pytest.mark.parametrize("params", DEEP.values(), ids=DEEP)
def test_deep_grammars_do_not_overflow_the_stack(compiler: GrammarCompiler, params: dict[str, Any]) -> None:
    assert allowed(compiler.start(StructuredOutputsParams(**params)))


# Arguments that are refused before anything is compiled, and what the error says.
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one"),
    ({"regex": "a", "choice": ["a"]}, "exactly one"),
    ({"json_object": True, "json": "{}"}, "exactly one"),
    ({"json_object": False}, "json_object must be True"),
    ({"json_object": 1}, "json_object must be True"),
    ({"json": "{"}, "not JSON"),
    ({"json": "[1]"}, "an object"),
    ({"json": "true"}, "an object"),
    ({"json": 3}, "given int"),
    ({"json": {"const": float("nan")}}, "not JSON"),
    ({"json": {"const": object()}}, "not JSON"),
    ({"json": "[" * 60_000}, "not JSON"),
    ({"json": '{"const":' + "9" * 5_000 + "}"}, "not JSON"),
    ({"json": {"enum": ["x" * 70_000]}}, "65536 characters"),
    ({"json": {"const": "\ud800"}}, "Unicode"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ({"json": '{"type": "string", "type": "integer"}'}, "occurs twice"),
    ({"json": {"items": [{"multipleOf": 97}, {"multipleOf": 1.03}, {"multipleOf": 2}]}}, "10000"),
    ({"json": {"prefixItems": ({"multipleOf": 1_000_000},)}}, "10000"),
    ({"json": {"multipleOf": 1e300}}, "10000"),
    ({"grammar": 'start: %json {"anyOf": [{"\\u006dultipleOf": 20011}]}'}, "10000"),
    ({"grammar": "start: %json x"}, "must be followed by a JSON schema"),
    ({"regex": ""}, "non-empty"),
    ({"regex": b"a"}, "non-empty string"),
    ({"regex": "a" * 65_537}, "65536 characters"),
    ({"regex": "\udc00"}, "Unicode"),
    ({"choice": []}, "1 to 4096"),
    ({"choice": "yes"}, "list of strings"),
    ({"choice": 3}, "list of strings"),
    ({"choice": ["a", 3]}, "non-empty string"),
    ({"choice": [""]}, "non-empty"),
    ({"choice": ["a"] * 4097}, "1 to 4096"),
    ({"choice": ["a" * 40_000, "b" * 40_000]}, "65536 characters"),
    ({"grammar": ""}, "non-empty"),
    ({"grammar": "start: x\nx[temperature=0.5]: /a+/"}, "temperature"),
    ({"grammar": 'start: x\n  x[capture="a,]", suffix=/[,]/, stop="b"]: /a+/'}, "stop"),
    ({"regex": "a", "whitespace_pattern": " "}, "whitespace options"),
    ({"choice": ["a"], "disable_any_whitespace": True}, "whitespace options"),
    ({"json": "{}", "disable_any_whitespace": True, "whitespace_pattern": " "}, "not both"),
    ({"json": "{}", "disable_any_whitespace": 1}, "True or False"),
    ({"json": "{}", "whitespace_pattern": " " * 257}, "256 characters"),
]


@pytest.mark.parametrize(("params", "reason"), BAD_PARAMS)
def test_bad_params_are_refused(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        StructuredOutputsParams(**params)


# What does not compile, what nothing matches, and what asks for too much.
NOT_COMPILED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)a"}, "look-ahead"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "a^b"}, "lookarounds"),
    ({"regex": r"[^\s\S]"}, "not matched"),
    ({"regex": "(" * 2000 + "a" + ")" * 2000}, "maximum number of nested"),
    ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "does not compile: recursion limit"),
    ({"json": {"type": "banana"}}, "Invalid type"),
    ({"json": {"type": "object", "properties": []}}, "must be an object"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "Unsatisfiable"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"if": {}, "then": {}}}, "Unimplemented"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"type": "string", "format": "banana"}}, "Unknown format"),
    ({"json": {"type": "string", "pattern": "("}}, "regex"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "example.com"),
    ({"json": {"$ref": "#/$defs/missing"}}, "does not exist"),
    ({"json": {"$ref": "#"}}, "not matched"),
    ({"json": {"oneOf": [{"minimum": 0}, {"maximum": 5}]}}, "oneOf"),
    ({"json": {"prefixItems": [{"type": "integer", "multipleOf": 9973, "minimum": n} for n in range(9)]}}, "fuel"),
    ({"json": {"properties": {f"{k:x}": {} for k in range(6_500)}}}, "too big"),
    ({"json": {"type": "object"}, "whitespace_pattern": "("}, "regex"),
    ({"grammar": "start: ("}, "Expected token"),
    ({"grammar": "start: missing"}, "unknown name"),
    ({"grammar": 'other: "a"'}, "no start rule"),
    ({"grammar": "start: start"}, "not matched"),
    ({"grammar": "start: <no_such_token>"}, "unknown special token"),
    ({"grammar": "start: <[5000]>"}, "too large"),
    ({"grammar": "start: <|endoftext|>"}, "not matched"),
    ({"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"'}, "too big"),
]


@pytest.mark.parametrize(("params", "reason"), NOT_COMPILED)
def test_what_does_not_compile_is_refused_with_the_reason(
    compiler: GrammarCompiler, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        compiler.start(StructuredOutputsParams(**params))
    assert len(str(error.value)) < 2000
    assert all(process.is_open for process in compiler._processes._kept.values())


def test_dead_ends_and_limits_within_a_text_are_errors(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.start(StructuredOutputsParams(grammar='start: "a" B\nB: /[^\\s\\S]/'))
    with pytest.raises(ValueError, match="after 1 tokens no token may follow"):
        follow(state, tokenizer, "a")
    state = compiler.start(StructuredOutputsParams(regex="x{1000000000}"))
    state.accept(allowed(state)[-1])
    state.accept(allowed(state)[-1])
    with pytest.raises(ValueError, match="after 1 tokens: lexer error"):
        allowed(state)


def ambiguous(number: int) -> list[str]:
    """Patterns of which nobody can tell in bearable time whether a text matches them all."""
    return [f"(a|b)*a(a|b){{{count}}}" for count in range(number)]


HOSTILE: dict[str, dict[str, Any]] = {
    "patterns of a schema": {"json": {"allOf": [{"type": "string", "pattern": f"^{p}$"} for p in ambiguous(29)]}},
    "patterns of a terminal": {"grammar": "start: T\nT: " + " & ".join(f"/{p}/" for p in ambiguous(24))},
}


@pytest.mark.parametrize("params", HOSTILE.values(), ids=HOSTILE)
def test_a_grammar_that_needs_too_much_ends_alone(
    tokenizer: Tokenizer, texts: list[str], params: dict[str, Any]
) -> None:
    """In the process itself they took more than a minute, or more memory than there was."""
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS], max_seconds=0.3)
    state = compiler.start(StructuredOutputsParams(regex="[ab]{4}"))
    state.accept(tokenizer.encode("a")[0])
    with pytest.raises(ValueError, match=r"took more than 0.3 s of processor time to compile.*: simplify it"):
        compiler.start(StructuredOutputsParams(**params))
    walk(state, texts, random.Random(0), 0)
    assert allowed(compiler.start(StructuredOutputsParams(regex="a")))
    compiler.close()


def test_a_grammar_that_needs_too_much_memory_ends_alone(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS], max_bytes=2**20)
    properties = {f"{number:x}": {"type": "integer"} for number in range(1_000)}
    with pytest.raises(ValueError, match=r"structured outputs: .*memory"):
        compiler.start(StructuredOutputsParams(json={"properties": properties}))
    compiler.close()


def test_tokens_that_need_too_much_end_their_generation_alone(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token takes longer than the one before it."""
    monkeypatch.setattr(structured_outputs, "_SECONDS_AT_ONCE", 0.05)
    monkeypatch.setattr(structured_outputs, "_SECONDS_A_TOKEN", 0.0)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(grammar='start: s\ns: s s | "a" | "b" | s s s')
    doomed, *others = [compiler.start(params) for _ in range(3)]
    a = tokenizer.encode("a")[0]
    for other in others:
        other.accept(a)
    with pytest.raises(ValueError, match=r"too much processor time for its tokens \(at most 0.05 s at once"):
        list(map(doomed.accept, [a] * 300))
    with pytest.raises(ValueError, match=r"too much processor time for its tokens \(at most 0.05 s at once"):
        _ = doomed.finished
    for other in others:  # of the same grammar
        other.accept(a)
        assert EOS in allowed(other)
    compiler.close()


def test_processes_that_end_are_replaced(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    params = StructuredOutputsParams(regex="[ab]{2}")
    state = compiler.start(params)
    parent = compiler._processes._parent
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.status()
    state.accept(tokenizer.encode("a")[0])
    assert allowed(state), "the grammar's own process is still there"
    for process in compiler._processes._kept.values():
        process.close()
    assert allowed(compiler.start(params))
    state.accept(tokenizer.encode("b")[0])
    assert allowed(state) == [EOS]
    compiler.close()
    with pytest.raises(RuntimeError, match="closed"):
        compiler.start(params)


def test_more_generations_than_the_buffers_hold(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sent for all of them before the first answer is read."""
    states = [compiler.start(StructuredOutputsParams(regex="[ab]{40}")) for _ in range(600)]
    for _ in range(2):
        for state in states:
            state.accept(tokenizer.encode("a")[0])
    assert all(allowed(state) == allowed(states[0]) for state in states)
    assert grammar_processes._MOST_UNANSWERED < 600


def test_what_the_model_lacks(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="end-of-text"):
        GrammarCompiler(tokenizer, VOCAB_SIZE, [])
    broken = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    broken._processes = GrammarProcesses(dataclasses.replace(broken._vocabulary, text="{}"), 1)
    with pytest.raises(ValueError, match="cannot use this tokenizer"):
        broken.start(StructuredOutputsParams(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'compiled-llm[structured]'")):
        GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])


def test_importing_loads_neither_torch_nor_the_library() -> None:
    code = "import compiled_llm.constraints.grammars, sys; assert not {'torch', 'llguidance'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
