"""Grammars of answers: they take what their format says, nothing else, and what they take is read as what it is."""

import json
from typing import Any

import llguidance
import pytest

from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.parsing.events import Tool
from compiled_llm.parsing.formats import CALL_FORMATS, HARMONY, HARMONY_MARKS, CallFormat
from compiled_llm.parsing.grammar import answer_grammar
from compiled_llm.parsing.readers import make_reader
from compiled_llm.text.tokenizer import Tokenizer
from tests import tokenizers
from tests.parsing.test_readers import TOOLS, joined

MARKS = sorted({
    mark for known in CALL_FORMATS.values() for mark in known.marks if len(mark) > len("functools")
} | set(HARMONY_MARKS))  # fmt: skip
TYPED = [
    Tool("weather", {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["place"],
        "additionalProperties": False,
    }),
    *TOOLS[1:],
]  # fmt: skip


class Matching:
    """Grammars over the tokens of a tokenizer, which has special tokens or none."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: list[str]) -> None:
        self._library = llguidance.LLTokenizer(tokenizer.vocabulary()[0])
        self._tokenizer = tokenizer
        self.special_tokens = {text: tokenizer.encode_piece(text)[0] for text in [tokenizers.END, *special_tokens]}

    def takes(self, grammar: str, text: str) -> bool:
        StructuredOutputsParams(grammar=grammar)
        matcher = llguidance.LLMatcher(self._library, grammar)
        assert not matcher.get_error(), grammar
        token_ids = self._tokenizer.encode_piece(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=["special", "plain"])
def matching(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matching:
    """The marks of all formats are special tokens, or text."""
    special = MARKS if request.param == "special" else []
    return Matching(tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer"), special_tokens=special), special)


def written(known: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model writes them."""
    opening, between, end = known.joined
    return opening + between.join(_call(known, *call) for call in calls) + end


def _call(known: CallFormat, name: str, arguments: dict[str, Any]) -> str:
    before, middle, after = known.written
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if known.layout == "python":
        text = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    elif known.layout == "tagged":
        start, end, before_value, after_value = known.tags
        text = "".join(f"{start}{key}{end}{before_value}{value}{after_value}\n" for key, value in texts.items())
    else:
        text = json.dumps(arguments)
    return before + name + middle + text + after


LEGAL = ("weather", {"place": "Oslo </tool", "days": 2})
ILLEGAL = ("weather", {"place": "Oslo", "days": "two"})


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_calls_that_must_be(name: str, matching: Matching) -> None:
    known = CALL_FORMATS[name]

    def takes(text: str, **options: Any) -> bool:
        grammar = answer_grammar("none", name, matching.special_tokens, tools=TYPED, must_call=True, **options)
        return matching.takes(grammar, text.removesuffix("<|call|>"))

    one, two = written(known, [LEGAL]), written(known, [LEGAL, ("now", {})])
    assert takes(one)
    assert takes(two) == (name != HARMONY)  # there each call ends the turn
    assert takes(one, several=False)
    assert not takes(two, several=False)
    assert not takes(written(known, [ILLEGAL]))
    assert not takes(written(known, [("other", {})]))
    assert not takes("Well: " + one)
    for text, calls in ((one, [LEGAL]), (two, [LEGAL, ("now", {})])):
        reader = make_reader("none", name, TYPED)
        found = joined([*reader.feed(text), *reader.finish()]).calls
        assert [(called, json.loads(arguments)) for called, arguments in found] == calls


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_calls_in_free_text_are_of_strict_tools_or_any(name: str, matching: Matching) -> None:
    known = CALL_FORMATS[name]
    tools = [Tool(TYPED[0].name, TYPED[0].parameters, strict=True), Tool("loose", TYPED[0].parameters)]
    grammar = answer_grammar("none", name, matching.special_tokens, tools=tools)

    def takes(text: str) -> bool:
        return matching.takes(grammar, text.removesuffix("<|call|>"))

    final = "<|channel|>final<|message|>" if name == HARMONY else ""
    assert takes(f"{final}A < b, {{and}} [so].")
    assert takes(written(known, [LEGAL]))
    assert not takes(written(known, [ILLEGAL]))
    if known.layout in ("json", "named"):  # others have no arguments but those of a schema
        assert takes(written(known, [("loose", ILLEGAL[1])]))
    if not known.bare and name != HARMONY:
        assert takes("A moment.\n" + written(known, [LEGAL]))
        assert not takes("A moment.\n" + written(known, [ILLEGAL]))


@pytest.mark.parametrize(
    ("reasoning", "before", "is_reasoning"),
    [
        ("none", "", False),
        ("qwen3", "", False),
        ("qwen3", "<think>\nA {b} <c>.\n</think>\n\n", False),
        ("qwen3", "A {b} <c>.\n</think>\n\n", True),
        (HARMONY, "<|channel|>analysis<|message|>A {b}.<|end|><|start|>assistant<|channel|>final<|message|>", False),
    ],
)
def test_json_after_reasoning_or_calls_instead(
    reasoning: str, before: str, is_reasoning: bool, matching: Matching
) -> None:
    calls = HARMONY if reasoning == HARMONY else "hermes"
    options: Any = {"schema": TYPED[0].parameters, "is_reasoning": is_reasoning}
    alone = answer_grammar(reasoning, "none", matching.special_tokens, **options)
    beside = answer_grammar(reasoning, calls, matching.special_tokens, tools=TYPED, **options)
    text = json.dumps(LEGAL[1])
    for grammar in (alone, beside):
        assert matching.takes(grammar, before + text)
        assert not matching.takes(grammar, before + json.dumps(ILLEGAL[1]))
        assert matching.takes(grammar, text) == (reasoning != HARMONY and not is_reasoning)
    call = written(CALL_FORMATS[calls], [LEGAL]).removesuffix("<|call|>")
    before = before.removesuffix("<|channel|>final<|message|>")
    assert matching.takes(beside, before + call)
    assert not matching.takes(alone, before + call)
    reader = make_reader(reasoning, calls, TYPED, is_reasoning=is_reasoning)
    found = joined([*reader.feed(before + call), *reader.finish()])
    assert (bool(found.reasoning), found.content, len(found.calls)) == ("A {b}" in before, "", 1)


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_values_that_are_written_one_by_one(name: str, matching: Matching) -> None:
    schema = {
        "type": "object",
        "$defs": {"size": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
        "properties": {"kind": {"enum": ["a", "b"]}, "one": {"const": "x"}, "size": {"$ref": "#/$defs/size"}},
    }
    known, tools = CALL_FORMATS[name], [Tool("f", schema)]
    grammar = answer_grammar("none", name, matching.special_tokens, tools=tools, must_call=True)
    good = {"kind": "b", "one": "x", "size": [1, 2]}
    assert matching.takes(grammar, written(known, [("f", good)]))
    assert matching.takes(grammar, written(known, [("f", {"size": [1]})]))
    for bad in ({"kind": "c"}, {"one": "y"}, {"size": []}, {"size": "a"}, {"other": 1}):
        assert not matching.takes(grammar, written(known, [("f", bad)])), bad
    reader = make_reader("none", name, tools)
    (call,) = joined([*reader.feed(written(known, [("f", good)])), *reader.finish()]).calls
    assert json.loads(call[1]) == good
