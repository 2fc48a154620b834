"""Texts as models write them, in every format: what is read of them, and that no cut changes it."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm.parsing.events import ArgumentsDelta, CallBegins, CallEnds, ContentDelta, Event, ReasoningDelta, Tool
from compiled_llm.parsing.formats import CALL_FORMATS, HARMONY, HARMONY_MARKS, REASONING_FORMATS
from compiled_llm.parsing.readers import make_reader

_PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
}
TOOLS = [Tool("weather", _PLACE), Tool("now", {})]
OSLO = '{"place": "Osló", "days": 2}'


class Read(NamedTuple):
    """What a reader gave of a text. ``calls``: name and arguments of each."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]


def joined(events: Iterable[Event]) -> Read:
    """The events of a text, which are well-formed."""
    reasoning, content, calls, is_open = "", "", [], False
    for event in events:
        match event:
            case ReasoningDelta(text):
                assert text
                reasoning += text
            case ContentDelta(text):
                assert text
                content += text
            case CallBegins(index, call_id, name):
                assert (is_open, index, bool(call_id)) == (False, len(calls), True)
                calls.append((name, ""))
                is_open = True
            case ArgumentsDelta(index, text):
                assert (is_open, index) == (True, len(calls) - 1)
                assert text
                calls[index] = (calls[index][0], calls[index][1] + text)
            case CallEnds(index):
                assert (is_open, index) == (True, len(calls) - 1)
                is_open = False
    assert not is_open
    return Read(reasoning, content, calls)


def read(pieces: Sequence[str], reasoning: str, calls: str, hidden: Sequence[str] = (), opened: bool = False) -> Read:
    reader = make_reader(reasoning, calls, TOOLS, hidden, opened)
    return joined([event for piece in pieces for event in reader.feed(piece)] + reader.finish())


def cuts(text: str) -> Iterable[list[str]]:
    """In two at every place, and into single characters."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)


WEATHER = ("weather", OSLO)
NOW = ("now", "{}")
_V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜>"
_V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜>"
_KIMI = f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OSLO}<|tool_call_end|>"
_CODER = "<tool_call>\n<function=weather>\n<parameter=place>\nOsló\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
_GLM = "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Osló</arg_value>\n<arg_key>days</arg_key>\n"
_HARMONY_CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}<|call|>"
# Format of reasoning, format of calls, text, and what is read of it.
TEXTS: list[tuple[str, str, str, Read]] = [
    (
        "none",
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
        Read("", "", [WEATHER]),
    ),
    (
        *("qwen3", "hermes"),
        '<think>\nWell.\n</think>\n\nA moment.\n<tool_call>\n{"arguments": {}, "name": "now"}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\nDone.',
        Read("Well.", "A moment.\nDone.", [NOW, WEATHER]),
    ),
    (
        "none",
        "hermes",
        '<tool_call>{"name": "now"}\n{"name": "now", "arguments": null}</tool_call>',
        Read("", "", [NOW, NOW]),
    ),
    ("none", "hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}', Read("", "", [("now", '{"a": 1}')])),
    ("none", "hermes", "Write <tool_call> so.", Read("", "Write <tool_call> so.", [])),
    ("none", "hermes", ' a < b  <tool> {"name": 1} ', Read("", ' a < b  <tool> {"name": 1} ', [])),
    (
        *("none", "hermes"),
        '<tool_call>{"name": "weather", "arguments": {"place": "</tool_call>\\"}"}}</tool_call>',
        Read("", "", [("weather", '{"place": "</tool_call>\\"}"}')]),
    ),
    ("none", "llama3_json", f'{{"name": "weather", "parameters": {OSLO}}}', Read("", "", [WEATHER])),
    (
        *("none", "llama3_json"),
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        f'{{"name": "weather", "parameters": {OSLO}}}',
        Read("", "", [NOW, WEATHER]),
    ),
    ("none", "llama3_json", '{"name": "Bob", "parameters": {}}', Read("", '{"name": "Bob", "parameters": {}}', [])),
    ("none", "llama3_json", ' {"a": [1]}', Read("", ' {"a": [1]}', [])),
    (
        "none",
        "llama3_json",
        'So: {"name": "now", "parameters": {}}',
        Read("", 'So: {"name": "now", "parameters": {}}', []),
    ),
    (
        *("mistral", "mistral"),
        f"[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}",
        Read("Hm.", "Yes.", [WEATHER, NOW]),
    ),
    (
        *("none", "mistral"),
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]',
        Read("", "", [WEATHER, NOW]),
    ),
    ("none", "mistral", f"[TOOL_CALLS]weather{OSLO}", Read("", "", [WEATHER])),
    ("none", "mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{OSLO}", Read("", "", [WEATHER])),
    ("none", "mistral_list", '[TOOL_CALLS][{"name": "now"}]', Read("", "", [NOW])),
    (
        *("none", "pythonic"),
        "[weather(place='Osló', days=2), now(), weather(exact=True, x=[1, (2, {'a': None})])]",
        Read("", "", [WEATHER, NOW, ("weather", '{"exact": true, "x": [1, [2, {"a": null}]]}')]),
    ),
    ("none", "pythonic", '<|python_start|>[weather(place="Osló", days=2)]<|python_end|>', Read("", "", [WEATHER])),
    (
        *("none", "pythonic"),
        "Sure.\n<function_calls>\nweather(place='Osló', days=2)\nnow()\n</function_calls>",
        Read("", "Sure.", [WEATHER, NOW]),
    ),
    ("none", "pythonic", "[1, 2] and [a](b)", Read("", "[1, 2] and [a](b)", [])),
    ("none", "pythonic", "[other(a=1)]", Read("", "[other(a=1)]", [])),
    ("none", "qwen3_coder", f"I do.\n{_CODER}</function>\n</tool_call>", Read("", "I do.", [WEATHER])),
    (
        *("none", "qwen3_coder"),
        "<function=weather>\n<parameter=place>\n12\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n"
        "<function=now>\n</function>",
        Read("", "", [("weather", '{"place": "12", "exact": true}'), NOW]),
    ),
    (
        *("qwen3", "glm45"),
        f"<think>So</think>{_GLM}<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        Read("So", "", [WEATHER, NOW]),
    ),
    (
        *("none", "deepseek_v3"),
        f"Now.<｜tool▁calls▁begin｜>{_V3}\n{_V3}<｜tool▁calls▁end｜>",
        Read("", "Now.", [WEATHER, WEATHER]),
    ),
    (
        "none",
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{_V31}{_V31}<｜tool▁calls▁end｜>",
        Read("", "", [WEATHER, WEATHER]),
    ),
    ("none", "kimi_k2", f"<|tool_calls_section_begin|>{_KIMI}<|tool_calls_section_end|>", Read("", "", [WEATHER])),
    ("none", "phi4_mini", f'functools[{{"name": "weather", "arguments": {OSLO}}}]', Read("", "", [WEATHER])),
    ("none", "granite", f'<|tool_call|>[{{"name": "weather", "arguments": {OSLO}}}]', Read("", "", [WEATHER])),
    ("none", "granite", '<tool_call>[{"name": "now", "arguments": {}}]', Read("", "", [NOW])),
    (*("granite", "none"), "Here is my thought process: One.\nHere is my response: Two.", Read(" One.", " Two.", [])),
    (
        *("gpt_oss", "gpt_oss"),
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>A moment.<|end|>"
        f"<|start|>assistant{_HARMONY_CALL}",
        Read("Hm.", "A moment.", [WEATHER]),
    ),
    (
        *("gpt_oss", "gpt_oss"),
        f" to=functions.weather<|channel|>commentary json<|message|>{OSLO}<|call|>",
        Read("", "", [WEATHER]),
    ),
    ("gpt_oss", "gpt_oss", "<|channel|>final<|message|>It rains.<|return|>", Read("", "It rains.", [])),
    ("gpt_oss", "none", "Plain text.", Read("", "Plain text.", [])),
    ("deepseek_r1", "none", "<think>a</think>\n\nb </think> c\n", Read("a", "b </think> c\n", [])),
    ("deepseek_r1", "none", "About <think> tags", Read("", "About <think> tags", [])),
    ("deepseek_r1", "none", "<think>never ends \n", Read("never ends \n", "", [])),
    ("none", "none", "<think> \n<tool_call>", Read("", "<think> \n<tool_call>", [])),
]


@pytest.mark.parametrize(("reasoning", "calls", "text", "wanted"), TEXTS)
def test_what_is_read_however_it_is_cut(reasoning: str, calls: str, text: str, wanted: Read) -> None:
    for pieces in cuts(text):
        assert read(pieces, reasoning, calls) == wanted, pieces


def test_every_beginning_of_a_text_is_read_as_it_is_streamed() -> None:
    """What a text that ends anywhere gives does not depend on how it came, and arguments are never made up."""
    for reasoning, calls, text, wanted in TEXTS:
        for end in range(len(text)):
            whole = read([text[:end]], reasoning, calls)
            assert read(list(text[:end]), reasoning, calls) == whole
            for (name, arguments), (other, full) in zip(whole.calls, wanted.calls, strict=False):
                assert (name, full[: len(arguments)]) == (other, arguments), text[:end]


@pytest.mark.parametrize(
    ("calls", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"place": "Os', ['{"', 'place": "Os']),
        ("deepseek_v31", '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "Os', ['{"', 'place": "Os']),
        ("gpt_oss", '<|channel|>commentary to=functions.weather<|message|>{"place": "Os', ['{"', 'place": "Os']),
        ("qwen3_coder", _CODER + "<parameter=exact>\ntr", ['{"place": "Osló"', ', "days": 2']),
        ("pythonic", "[weather(place='Osló', days=2, exact=Tr", ['{"place": "Osló"', ', "days": 2']),
    ],
)
def test_arguments_come_as_they_are_written(calls: str, text: str, arguments: list[str]) -> None:
    """Those that are JSON at once, others when a value is complete; of a cut-off call no more than came."""
    reader = make_reader("none", calls, TOOLS)
    at = text.find('{"place"') + 2 if '{"place"' in text else len(text)
    events = [*reader.feed(text[:at]), *reader.feed(text[at:])]
    assert [event.text for event in events if isinstance(event, ArgumentsDelta)] == arguments
    assert reader.finish() == [CallEnds(0)]


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    assert read(list("So.\n</think>\n\nYes"), "qwen3", "none", opened=True) == Read("So.", "Yes", [])
    assert read(["<think>\nSo.</think>Yes"], "qwen3", "none", opened=True) == Read("So.", "Yes", [])
    assert read(["Only this"], "qwen3", "none", opened=True) == Read("Only this", "", [])


def test_special_tokens_that_are_no_marks_are_hidden() -> None:
    text = "<s>Yes<pad>.<｜tool▁calls▁begin｜>" + _V31 + "<｜tool▁calls▁end｜></s>"
    for pieces in cuts(text):
        assert read(pieces, "none", "deepseek_v31", ["<s>", "</s>", "<pad>"]) == Read("", "Yes.", [WEATHER])


def test_special_tokens_may_begin_alike() -> None:
    for pieces in cuts("a<x>b<x><y>c<x"):
        assert read(pieces, "none", "hermes", ["<x>", "<x><y>"]) == Read("", "abc<x", [])


def test_a_mark_that_the_end_of_the_text_cuts_is_not_shown() -> None:
    text = '<tool_call>{"name": "now"}\n</tool_c'
    assert read([text], "none", "hermes") == read(list(text), "none", "hermes") == Read("", "", [NOW])


def test_messages_for_other_tools_than_functions_are_reasoning() -> None:
    text = "<|channel|>commentary to=python<|message|>1 + 1<|end|><|start|>assistant<|channel|>final<|message|>2"
    assert read([text], HARMONY, HARMONY) == Read("1 + 1", "2", [])


def test_ids_are_those_that_the_model_gives_or_has_room_for() -> None:
    def ids(calls: str, text: str) -> list[str]:
        reader = make_reader("none", calls, TOOLS)
        return [event.id for event in reader.feed(text) + reader.finish() if isinstance(event, CallBegins)]

    assert ids("kimi_k2", _KIMI) == ["functions.weather:0"]
    assert len(set(ids("kimi_k2", _KIMI + _KIMI))) == 2
    assert ids("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{OSLO}") == ["a1b2c3d4e"]
    two = ids("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}")
    assert len(set(two)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in two)
    assert ids("hermes", '<tool_call>{"name": "now"}</tool_call>')[0].startswith("call_")


def test_only_what_may_become_a_mark_is_held_back() -> None:
    reader = make_reader("none", "hermes", TOOLS)
    texts = [joined(reader.feed(piece)).content for piece in ("So", " <b>", " a", "<tool", "x", "<", "\n", "b")]
    assert texts == ["So", " <b>", " a", "", "<toolx", "", "<", "\nb"]


def test_values_are_of_their_schema() -> None:
    schema: dict[str, Any] = {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "c": {"enum": ["1"]},
        "d": {},
        "e": {"type": "object"},
    }
    values = {"a": "null", "b": "7", "c": "1", "d": "[1, tru", "e": '{"x": NaN}', "f": "1.5"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    reader = make_reader("none", "qwen3_coder", [Tool("f", {"properties": schema})])
    (call,) = joined(reader.feed(f"<function=f>\n{text}</function>") + reader.finish()).calls
    assert json.loads(call[1]) == {"a": None, "b": 7, "c": "1", "d": "[1, tru", "e": '{"x": NaN}', "f": 1.5}


_FORMATS = [("none", "none"), (HARMONY, HARMONY), (HARMONY, "none"), ("qwen3", "none"), ("granite", "none")]
_FORMATS += [("qwen3", name) for name in CALL_FORMATS if name != HARMONY]
_HIDDEN = ["<pad>", "<|pad|>", "</s>"]
_PARTS = [
    *_HIDDEN,
    *HARMONY_MARKS,
    " ",
    "\n",
    "<",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "a",
    "é",
    "weather",
    "now",
]
_PARTS += ["functions.weather:0", "[ARGS]", '{"name": "weather"', '"arguments": ', "(", ")", "place=", "1", "<think>"]
_PARTS += [mark for known in (*CALL_FORMATS.values(), *REASONING_FORMATS.values()) for mark in known.marks]
_PARTS += [part for known in CALL_FORMATS.values() for part in (*known.tags, *known.written) if part]


@pytest.mark.battery
@settings(max_examples=2_000, deadline=None)
@given(
    st.sampled_from(_FORMATS),
    st.lists(st.one_of(st.sampled_from(_PARTS), st.sampled_from([text for *_, text, _ in TEXTS])), max_size=12),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_any_text_is_read_alike_however_it_is_cut(
    formats: tuple[str, str], parts: list[str], places: list[int], opened: bool
) -> None:
    text = "".join(parts)
    whole = read([text], *formats, _HIDDEN, opened)
    assert read(list(text), *formats, _HIDDEN, opened) == whole
    cut = [0, *sorted(place for place in places if place < len(text)), len(text)]
    assert read([text[start:end] for start, end in itertools.pairwise(cut)], *formats, _HIDDEN, opened) == whole
