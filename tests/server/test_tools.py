"""Tools and reasoning, by OpenAI's own client: a model whose template knows tools, whose calls are made legal."""

import json
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from compiled_llm import CompiledEngine
from compiled_llm.parsing.formats import CALL_ALIASES, CALL_FORMATS, REASONING_ALIASES, REASONING_FORMATS
from compiled_llm.server.settings import DEMO_NAME
from tests.chat_templates import CHATML_TOOLS
from tests.docs.markdown import ROOT, blocks
from tests.server.conftest import SIZES, Running, running_with

DEMO_MODEL = ROOT / "compiled_llm" / "demo_model"
CHAT: Any = [{"role": "user", "content": "What is the weather?"}]
PLACES = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": PLACES, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {},
                                                                          "additionalProperties": False}}}  # fmt: skip
ASKED: Any = {"model": DEMO_NAME, "messages": CHAT, "max_tokens": 120, "seed": 3}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The bundled model with a template like Qwen's. It never ends what it may think, so that it may not."""
    directory = tmp_path_factory.mktemp("model") / "demo"
    shutil.copytree(DEMO_MODEL, directory)
    (directory / "chat_template.jinja").write_text(CHATML_TOOLS)
    with (
        CompiledEngine(model=str(directory), enforce_eager=True, progress="off", **SIZES) as engine,  # type: ignore[arg-type]
        running_with(engine, reasoning_parser="none") as running,
    ):
        yield running


def streamed(running: Running, **asked: Any) -> dict[str, Any]:
    """The message that the chunks of a stream make, and how it ended."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in running.openai.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["finish_reason"] = choice.finish_reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type) == (len(message["tool_calls"]), "function")
                message["tool_calls"].append([call.function.name, ""])
            message["tool_calls"][call.index][1] += call.function.arguments
    return message


def test_calls_that_must_be_are_of_their_schemas(with_tools: Running) -> None:
    asked = {**ASKED, "tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = with_tools.openai.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name in ("weather", "now")
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["place"] in PLACES["enum"]
    found = streamed(with_tools, **asked)
    assert found == {
        "content": "",
        "tool_calls": [[call.function.name, call.function.arguments]],
        "finish_reason": "tool_calls",
    }


def test_a_named_tool_is_called_once(with_tools: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {**ASKED, "tools": [NOW, WEATHER], "tool_choice": choice}
    answer = with_tools.openai.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"place", "days"}
    assert answer.finish_reason == "stop"  # as in vLLM
    cut = with_tools.openai.chat.completions.create(**{**asked, "max_tokens": 20}).choices[0]
    (part,) = cut.message.tool_calls or ()
    assert part.type == "function"
    assert cut.finish_reason == "length"
    assert call.function.arguments.startswith(part.function.arguments)
    assert len(part.function.arguments) < len(call.function.arguments)


class Weather(BaseModel):
    place: Literal["Oslo", "Rome"]
    days: Literal[1, 2]


def test_openais_helpers_read_calls_and_their_streams(with_tools: Running) -> None:
    tools: Any = [openai.pydantic_function_tool(Weather)]
    asked: Any = {**ASKED, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
                  "max_tokens": 240, "frequency_penalty": 1.5}  # fmt: skip
    (call,) = with_tools.openai.chat.completions.parse(**asked).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    with with_tools.openai.chat.completions.stream(**asked) as stream:
        (done,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert done.parsed_arguments == call.function.parsed_arguments


def test_free_answers_with_strict_tools_are_content(with_tools: Running) -> None:
    short = {**ASKED, "max_tokens": 20}
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    plain = with_tools.openai.chat.completions.create(**short, tools=[WEATHER]).choices[0]
    checked = with_tools.openai.chat.completions.create(**short, tools=[strict]).choices[0]
    assert plain.message.content
    assert not plain.message.tool_calls
    assert checked.message.content
    found = streamed(with_tools, **short, tools=[WEATHER])
    assert (found["content"], found["finish_reason"]) == (plain.message.content, plain.finish_reason)


def test_a_form_beside_tools_is_that_of_the_content(with_tools: Running) -> None:
    form: Any = {"type": "json_object"}
    answer = with_tools.openai.chat.completions.create(
        **{**ASKED, "max_tokens": 40}, tools=[NOW], response_format=form
    ).choices[0]
    assert bool(answer.message.tool_calls) != (answer.message.content or "").lstrip().startswith("{")


def test_calls_and_their_results_go_to_the_template(with_tools: Running) -> None:
    function = {"name": "weather", "arguments": '{"place": "Oslo", "days": 2}'}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "reasoning_content": "I need it.",
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]  # fmt: skip
    body = {"messages": messages, "tools": [WEATHER], "max_tokens": 1, "return_token_ids": True}
    answer = with_tools.http.post("/v1/chat/completions", json=body).json()
    text = with_tools.http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", "days": 2}}\n</tool_call>' in text
    assert "<think>\nI need it.\n</think>" in text
    assert "Rain." in text
    assert "The weather of a place" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"regex": "a"}}, "tools cannot go with structured_outputs other than json"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/none"}}}}}]},
         "structured outputs: does not compile"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(fields: dict[str, Any], words: str, with_tools: Running) -> None:
    answer = with_tools.http.post("/v1/chat/completions", json={"messages": CHAT, "tools": [WEATHER], **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_snippet_of_the_document(with_tools: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "serving.md"
    block = next(block for block in blocks(page, "python") if "tools=" in block.text)
    exec(compile(block.text, str(page), "exec"), {"client": with_tools.openai})
    assert capsys.readouterr().out.startswith("weather {")


def test_every_format_is_in_the_document() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    names = (*CALL_FORMATS, *REASONING_FORMATS, *CALL_ALIASES, *REASONING_ALIASES)
    assert [name for name in names if f"`{name}`" not in text] == []
