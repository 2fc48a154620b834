"""Outputs with reasoning and tool calls -> answers: streamed, they are the whole one, however the text was cut."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.openai.requests import read_request
from compiled_llm.server.answer_formats import AnswerFormats
from compiled_llm.server.answers import OpenAIAnswer
from compiled_llm.server.http import event
from compiled_llm.server.messages import Output, Piece, Times
from compiled_llm.server.service import Served, ServedPrompt
from compiled_llm.text.tokenizer import Tokenizer
from tests import tokenizers

NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Óslo"}}\n</tool_call>'
TEXT = f"<think>\nLet me see.\n</think>\n\nA moment.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return tokenizers.byte_level(directory, special_tokens=["<think>", "</think>", "<pad>"])


def served(
    tokenizer: Tokenizer, pieces: Sequence[str], end: str, prompt: str = "", **fields: Any
) -> tuple[Served, SamplingParams]:
    """A request whose one answer comes in ``pieces``."""
    asked = read_request("chat", {"messages": [{"role": "user", "content": "a"}], **fields})
    plan = AnswerFormats("hermes", "qwen3", tokenizer).plan(asked, prompt)
    assert plan is not None
    params = SamplingParams(**{**asked.sampling, **plan.sampling})

    outputs = outputs_of(tokenizer, pieces, end)
    return Served(asked, params, plan, [ServedPrompt("r", prompt, [1, 2])], outputs), params


async def outputs_of(tokenizer: Tokenizer, pieces: Sequence[str], end: str) -> AsyncIterator[Output]:
    for number, text in enumerate(pieces):
        is_last = number == len(pieces) - 1
        piece = Piece(0, text, tokenizer.encode_piece(text), None, end if is_last else None)
        yield Output("r", [piece], times=Times(0.0, 0.0, 0.0, 0) if is_last else None)


def whole(tokenizer: Tokenizer, text: str, end: str = "stop", **fields: Any) -> ChatCompletion:
    """As OpenAI's library reads it."""
    found, _ = served(tokenizer, [text], end, **fields)
    return ChatCompletion.model_validate(asyncio.run(OpenAIAnswer(found, "m", "r", TokenTexts(tokenizer)).whole()))


async def _chunks(found: Served, tokenizer: Tokenizer) -> list[ChatCompletionChunk]:
    answer = OpenAIAnswer(found, "m", "r", TokenTexts(tokenizer))
    return [ChatCompletionChunk.model_validate(chunk) async for chunk in answer.chunks()]


def streamed(tokenizer: Tokenizer, pieces: Sequence[str], end: str = "stop", **fields: Any) -> dict[str, Any]:
    """What the chunks of a stream make together."""
    found, _ = served(tokenizer, pieces, end, stream=True, **fields)
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ends": []}
    for chunk in asyncio.run(_chunks(found, tokenizer)):
        (choice,) = chunk.choices
        made["content"] += choice.delta.content or ""
        reasoning = getattr(choice.delta, "reasoning", "")
        assert reasoning == getattr(choice.delta, "reasoning_content", "")
        made["reasoning"] += reasoning
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type) == (len(made["calls"]), "function")
                made["calls"].append([call.function.name, ""])
            made["calls"][call.index][1] += call.function.arguments
        made["ends"] += [choice.finish_reason] * (choice.finish_reason is not None)
    return made


def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    answer = whole(tokenizer, TEXT, tools=[NOW])
    (choice,) = answer.choices
    assert choice.message.content == "A moment."
    assert choice.message.reasoning == choice.message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [call.function.arguments for call in calls if call.type == "function"] == ['{"zone": "Óslo"}'] * 2
    assert len({call.id for call in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    reasoning = tokenizer.encode_piece(TEXT.partition("\n\n")[0])
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(reasoning)
    dumped = whole(tokenizer, CALL, tools=[NOW]).model_dump()["choices"][0]["message"]
    assert dumped["content"] is None
    assert "reasoning" not in dumped
    assert whole(tokenizer, "<think>\nI", "length").choices[0].message.content == ""


def test_however_it_is_cut_the_stream_is_the_whole(tokenizer: Tokenizer) -> None:
    wanted = {"content": "A moment.", "reasoning": "Let me see.", "calls": [["now", '{"zone": "Óslo"}']] * 2,
              "ends": ["tool_calls"]}  # fmt: skip
    rng = random.Random(0)
    for _ in range(20):
        places = sorted(rng.sample(range(len(TEXT)), rng.randint(0, 12)))
        pieces = [TEXT[start:end] for start, end in zip([0, *places], [*places, len(TEXT)], strict=True)]
        assert streamed(tokenizer, pieces, tools=[NOW]) == wanted
    assert streamed(tokenizer, list(TEXT), tools=[NOW]) == wanted


@pytest.mark.parametrize(
    ("fields", "end", "reason"),
    [
        ({}, "stop", "tool_calls"),
        ({}, "length", "length"),
        ({"tool_choice": "required"}, "stop", "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "stop", "stop"),
    ],
)
def test_how_an_answer_with_calls_ends(fields: Any, end: str, reason: str, tokenizer: Tokenizer) -> None:
    assert whole(tokenizer, CALL, end, tools=[NOW], **fields).choices[0].finish_reason == reason
    assert streamed(tokenizer, [CALL], end, tools=[NOW], **fields)["ends"] == [reason]


def test_without_tools_marks_of_calls_are_content(tokenizer: Tokenizer) -> None:
    assert whole(tokenizer, CALL).choices[0].message.content == CALL
    assert whole(tokenizer, CALL, tools=[NOW], tool_choice="none").choices[0].message.content == CALL


def test_special_tokens_are_marks_or_hidden_as_asked(tokenizer: Tokenizer) -> None:
    _, params = served(tokenizer, ["a"], "stop")
    assert params.skip_special_tokens is False
    assert whole(tokenizer, "<think>a<pad></think>b<pad>").choices[0].message.content == "b"
    shown = whole(tokenizer, "<think>a</think>b<pad>", skip_special_tokens=False)
    assert shown.choices[0].message.content == "b<pad>"


def test_the_prompt_may_have_begun_the_reasoning(tokenizer: Tokenizer) -> None:
    answer = whole(tokenizer, "So.</think>Yes", prompt="<|assistant|><think>\n")
    assert answer.choices[0].message.content == "Yes"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    asked = read_request("chat", {"messages": [{"role": "user"}], "response_format": {"type": "json_object"}})
    formats = AnswerFormats("hermes", "qwen3", tokenizer)
    assert formats.plan(asked, "<|assistant|><think>\n\n</think>\n\n") is None, "it was ended there, too"


def test_a_form_comes_after_reasoning_or_is_that_of_all(tokenizer: Tokenizer) -> None:
    _, params = served(tokenizer, ["a"], "stop", response_format={"type": "json_object"})
    assert "reasoning?" in params.structured_outputs.grammar  # type: ignore[union-attr]
    asked = read_request("chat", {"messages": [{"role": "user"}], "structured_outputs": {"regex": "a"}})
    assert AnswerFormats("hermes", "qwen3", tokenizer).plan(asked, "") is None


def test_formats_are_those_of_the_template(tokenizer: Tokenizer) -> None:
    def formats(template: str) -> str:
        tokenizer.chat_templates["default"] = template
        return str(AnswerFormats("auto", "auto", tokenizer))

    assert formats("{{ messages }}") == "tool calls: none; reasoning: none"
    assert formats('<tool_call>{"name": f </think>') == "tool calls: hermes; reasoning: deepseek_r1"
    assert formats("<tool_call><function= <parameter=") == "tool calls: qwen3_coder; reasoning: none"
    assert formats("<|channel|><|message|>") == "tool calls: gpt_oss; reasoning: gpt_oss"
    assert formats("[TOOL_CALLS][ARGS]") == "tool calls: mistral; reasoning: none"
    assert str(AnswerFormats("none", "granite", None)) == "tool calls: none; reasoning: granite"


def test_what_cannot_be_planned_is_refused(tokenizer: Tokenizer) -> None:
    def plan(calls: str, **fields: Any) -> None:
        asked = read_request("chat", {"messages": [{"role": "user", "content": "a"}], "tools": [NOW], **fields})
        AnswerFormats(calls, "none", tokenizer).plan(asked, "")

    with pytest.raises(ValueError, match="tools are not served by this model"):
        plan("none")
    with pytest.raises(ValueError, match="tools cannot go with structured_outputs other than json"):
        plan("hermes", structured_outputs={"regex": "a"})
    long = {"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70_000}}}
    with pytest.raises(ValueError, match="tools, or the schema of the output, cannot be enforced: grammar may have"):
        plan("hermes", tools=[long], tool_choice="required")


TEXTS = ["one", 'a "quoted" line\n\0', "", "\u2028\u00e9\U0001f600", "end"]


@pytest.mark.parametrize(
    "fields",
    [{}, {"include_usage": True}, {"continuous_usage_stats": True}, {"return_token_ids": True}, {"logprobs": 1}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_events_that_are_written_at_once_are_those_of_chunks(kind: Any, fields: dict[str, Any]) -> None:
    prompt = {"prompt": "a"} if kind == "completion" else {"messages": [{"role": "user", "content": "a"}]}
    own = {name: value for name, value in fields.items() if "usage" not in name}
    own |= {"logprobs": True, "top_logprobs": 1} if kind == "chat" and "logprobs" in own else {}
    options = {name: value for name, value in fields.items() if "usage" in name}
    asked = read_request(kind, {**prompt, **own, "stream": True, **({"stream_options": options} if options else {})})

    def answer() -> OpenAIAnswer:
        prompts = [ServedPrompt("r", "a", [1, 2]), ServedPrompt("s", "b", [1, 2])]
        params = SamplingParams(**asked.sampling)
        made = OpenAIAnswer(Served(asked, params, None, prompts, None), "\0 m", "r", TokenTexts(None))  # type: ignore[arg-type]
        made._created = 7
        return made

    def outputs() -> list[Output]:
        row = [(5, -0.5, 1, "x")] if "logprobs" in fields else None
        return [
            Output(name, [Piece(0, text, [5], None if row is None else [row])], 1) for text in TEXTS for name in "rs"
        ]

    by_chunks, at_once = answer(), answer()
    wanted = [b"".join(map(event, by_chunks.of_output(output))) for output in outputs()]
    assert [at_once.events_of(output) for output in outputs()] == wanted
    assert at_once.num_output_tokens == by_chunks.num_output_tokens == len(outputs())
