"""OpenAI's own client against a server: chats and completions, whole and streamed, are what ``generate`` gives."""

import json
import random
from typing import Any

import openai
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.server.direct_body import DirectBody
from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running

CHAT: Any = [{"role": "user", "content": "Return the larger of two numbers"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now"}}]
PROMPTS = ["import os", "def f(x):", "class Stack:\n    def pop(self):", "import sys\n"]
GREEDY: Any = {"model": DEMO_NAME, "temperature": 0, "max_tokens": 12}


def expected(engine: CompiledEngine, prompts: Any, **params: Any) -> list[Any]:
    """The completions of each prompt, without a server."""
    outputs = engine.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def joined(chunks: Any, field: str = "text") -> dict[int, str]:
    """The text of each choice of a stream, and that each has ended once."""
    texts: dict[int, str] = {}
    ended = []
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.text if field == "text" else choice.delta.content
            assert choice.index not in ended
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            ended += [choice.index] * (choice.finish_reason is not None)
    assert sorted(ended) == sorted(texts)
    return texts


def test_completions_are_those_of_generate(reference: CompiledEngine, running: Running) -> None:
    wanted = expected(reference, PROMPTS, temperature=0, max_tokens=12)
    answer = running.openai.completions.create(prompt=PROMPTS, extra_body={"return_token_ids": True}, **GREEDY)
    assert [choice.text for choice in answer.choices] == [one.text for one in wanted]
    assert [choice.token_ids for choice in answer.choices] == [one.token_ids for one in wanted]  # type: ignore[attr-defined]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in wanted)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    stream = running.openai.completions.create(prompt=PROMPTS, stream=True, **GREEDY)
    assert joined(stream) == {index: one.text for index, one in enumerate(wanted)}


def test_a_chat_is_that_of_the_engine(reference: CompiledEngine, running: Running) -> None:
    (wanted,) = reference.chat(CHAT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    answer = running.openai.chat.completions.create(messages=CHAT, **GREEDY)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted.outputs[0].text)
    assert answer.choices[0].finish_reason == "length"
    options = {"include_usage": True}
    chunks = list(running.openai.chat.completions.create(messages=CHAT, stream=True, stream_options=options, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert joined(chunks, "content") == {0: message.content}
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert answer.usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens == len(wanted.prompt_token_ids) + 12
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1


def test_every_stream_begins_and_ends_as_openai_has_it(running: Running) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = running.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)  # of two steps that are not read yet, the tokens come together
    assert (counts[0], *counts[-2:]) == (0, 3, 3)
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_several_continuations_and_sampling_parameters(reference: CompiledEngine, running: Running) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 5, "max_tokens": 8, "top_p": 0.9, "stop": ["\n\n"]}
    wanted = expected(reference, ["import os", [652, 587]], top_k=20, min_p=0.01, **params)
    asked: Any = {"model": DEMO_NAME, "extra_body": {"top_k": 20, "min_p": 0.01}, **params}
    texts = {index: one.text for index, one in enumerate(wanted)}
    for prompt, first in (("import os", 0), ([652, 587], 3)):
        own = {index: texts[first + index] for index in range(3)}
        answer = running.openai.completions.create(prompt=prompt, **asked)
        assert {choice.index: choice.text for choice in answer.choices} == own
        assert joined(running.openai.completions.create(prompt=prompt, stream=True, **asked)) == own
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2, "the prompt counts once, whatever n is"


def test_log_probabilities_whole_and_streamed(reference: CompiledEngine, running: Running) -> None:
    (wanted,) = expected(reference, "import os", temperature=0, max_tokens=6, logprobs=2)
    own = [found[token_id].logprob for token_id, found in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    ask = running.openai.completions.create
    whole = ask(prompt="import os", logprobs=2, **{**GREEDY, "max_tokens": 6}).choices[0].logprobs
    assert whole is not None
    assert whole.token_logprobs == own
    assert [len(top) for top in whole.top_logprobs or ()] == [2] * 6
    assert "".join(whole.tokens or ()) == wanted.text
    assert whole.text_offset == [len("".join((whole.tokens or [])[:count])) for count in range(6)]
    parts = [chunk.choices[0].logprobs for chunk in ask(
        prompt="import os", logprobs=2, stream=True, **{**GREEDY, "max_tokens": 6})]  # fmt: skip
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)
    (chat,) = reference.chat(CHAT, SamplingParams(temperature=0, max_tokens=4, logprobs=3), use_tqdm=False)
    answer = running.openai.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=3, **{**GREEDY, "max_tokens": 4}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [len(one.top_logprobs) for one in logprobs.content or ()] == [3] * 4
    rows = zip(chat.outputs[0].token_ids, chat.outputs[0].logprobs or (), strict=True)
    assert [one.logprob for one in logprobs.content or ()] == [found[token_id].logprob for token_id, found in rows]


def test_an_echo_has_the_prompt_and_its_log_probabilities(reference: CompiledEngine, running: Running) -> None:
    prompt = "import os\nimport sys"
    token_ids = reference.tokenizer.encode(prompt)  # type: ignore[union-attr]
    (score,) = reference.score(token_ids, use_tqdm=False)
    asked = {**GREEDY, "max_tokens": 1, "logprobs": 1, "echo": True}
    for given in (prompt, token_ids):
        answer = running.openai.completions.create(prompt=given, **asked).choices[0]
        assert answer.text.startswith(prompt)
        assert answer.logprobs is not None
        assert answer.logprobs.token_logprobs is not None
        assert answer.logprobs.token_logprobs[0] is None
        assert answer.logprobs.token_logprobs[1:-1] == pytest.approx(score.logprobs, abs=1e-5)
        assert "".join(answer.logprobs.tokens or ()) == answer.text
        (chunk,) = running.openai.completions.create(prompt=given, stream=True, **asked)
        assert chunk.choices[0].text == answer.text
        assert chunk.choices[0].logprobs == answer.logprobs
    plain = running.http.post("/v1/completions", json={"prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1}).json()
    rows = plain["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert [row[str(token_id)]["logprob"] for row, token_id in zip(rows[1:], token_ids[1:], strict=True)] == (
        pytest.approx(score.logprobs, abs=1e-5)
    )


def test_outputs_of_a_form(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    whole = running.openai.chat.completions.create(
        messages=CHAT, response_format=wanted, model=DEMO_NAME, max_tokens=100, seed=1
    )
    assert set(json.loads(whole.choices[0].message.content or "")) == {"a"}
    assert whole.choices[0].finish_reason == "stop"
    forced = {"structured_outputs": {"choice": ["yes", "no"]}}
    stream = running.openai.completions.create(model=DEMO_NAME, prompt="a", stream=True, extra_body=forced)
    assert joined(stream)[0] in ("yes", "no")


def test_the_end_of_a_message_is_continued(reference: CompiledEngine, running: Running) -> None:
    messages: Any = [*CHAT, {"role": "assistant", "content": "def larger(a, b):"}]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    (wanted,) = reference.chat(messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False, **options)
    answer = running.openai.chat.completions.create(messages=messages, extra_body=options, **GREEDY)
    assert answer.choices[0].message.content == wanted.outputs[0].text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a", "temprature": 1}, 400, "temprature is not served: did you mean 'temperature'?"),
        ({"prompt": "a", "temperature": "1"}, 400, "temperature must be a number from 0.0 to 100.0, given '1'"),
        ({"prompt": "a", "model": "other"}, 404, "model other is not served here: compiled-llm-demo is"),
        ({"prompt": "a", "model": 3}, 400, "model must be a str, given 3"),
        ({}, 400, "prompt must be a str or a list of token ids"),
        ({"prompt": []}, 400, "prompt must have at least one token"),
        ({"prompt": [[], "a"]}, 400, "prompt must have at least one token"),
        ({"prompt": [5000000]}, 400, "must be integers from 0 to"),
        ({"prompt": [1, 2.5]}, 400, "prompt must be integers from 0 to 4095, given 2.5"),
        ({"prompt": [1, True]}, 400, "prompt must be integers from 0 to 4095, given True"),
        (
            {"prompt": "a", "logits_transforms": {"a": 10**20}},
            400,
            "integers in logits_transforms and in schemas must have",
        ),
        ({"prompt": "a", "metadata": json.loads("[" * 101 + "]" * 101)}, 400, "more than 100 lists and objects deep"),
        ({"prompt": "a", "cache_salt": "a" * 1025}, 400, "cache_salt may have 1024 characters at most, given 1025"),
        ({"prompt": "a " * 600}, 400, "prompt must be shorter than 512 tokens"),
        ({"prompt": "\x00" * 9, "stop": [7]}, 400, "stop must be a non-empty string or a list of them"),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "n must be 1 with temperature=0"),
        ({"prompt": ["a"] * 1000, "n": 2}, 400, "n times the number of prompts must be at most 1024, given 2000"),
        ({"prompt": "a", "logprobs": 30}, 400, "logprobs must be at most the engine's max_logprobs, 20"),
        ({"prompt": "a", "priority": 1}, 400, "priority must be 0 unless the engine's scheduling_policy"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "invalid regex"),
        ({"prompt": "a", "stream_options": {}, "stream": True, "suffix": "b"}, 400, "suffix must be ''"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools[0] must be {'type': 'function'"),
        ({"messages": CHAT, "tools": TOOLS}, 400, "the chat template has no use for 'tools'"),
        ({"messages": CHAT, "tools": TOOLS, "tool_choice": {}}, 400, "tool_choice must be of type 'function'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "images are not served"),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, 400, "a part must have the type 'text'"),
        ({"messages": CHAT, "top_logprobs": ""}, 400, "top_logprobs must be an integer from 0"),
        ({"messages": []}, 400, "messages must be a list of one or more"),
        ({"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}, 400, "no use for 'tokenize'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_by_status_and_name(
    body: dict[str, Any], status: int, words: str, stream: bool, running: Running
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = running.http.post(path, json={"stream": stream, **body})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]


def test_the_errors_of_openais_client(running: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        running.openai.models.retrieve("other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        running.openai.completions.create(prompt="a", **{**GREEDY, "temperature": 300})
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    assert [model.id for model in running.openai.models.list()] == [DEMO_NAME]
    assert running.openai.models.retrieve(DEMO_NAME).id == DEMO_NAME


def test_tokens_of_a_text_and_back(reference: CompiledEngine, running: Running) -> None:
    text = "def f(é):\n    return 1"
    found = running.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == reference.tokenizer.encode(text)  # type: ignore[union-attr]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert running.http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = running.http.post("/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == reference.encode_chat(CHAT).token_ids
    refused = running.http.post("/detokenize", json={"token": [1]})
    assert refused.json()["error"]["message"] == "token is not served: did you mean 'tokens'?"
    assert running.http.post("/detokenize", json={"tokens": [-1]}).status_code == 400


@pytest.mark.battery
def test_any_stop_and_cut_streams_as_it_answers(reference: CompiledEngine, running: Running) -> None:
    """Random stop strings, out of the text itself, and lengths: streamed, whole and generated are the same."""
    rng = random.Random(0)
    (whole,) = expected(reference, "import os", temperature=0, max_tokens=60)
    for _ in range(200):
        start = rng.randrange(len(whole.text))
        stop = whole.text[start : start + rng.randint(1, 6)]
        params = {"temperature": 0, "max_tokens": rng.randint(1, 60), "stop": stop}
        (wanted,) = expected(reference, "import os", **params)
        asked: Any = {"model": DEMO_NAME, "prompt": "import os", **params}
        answer = running.openai.completions.create(**asked).choices[0]
        assert (answer.text, answer.finish_reason) == (wanted.text, wanted.finish_reason)
        assert joined(running.openai.completions.create(stream=True, **asked)) == {0: wanted.text}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_events_under_way_are_written_without_waking_a_task(
    route: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a stream of one client. Which events those are changes nothing of what the client gets."""
    written: list[bytes] = []
    write = DirectBody.write
    prompt = {"prompt": "a"} if route == "/v1/completions" else {"messages": CHAT}
    prompt = {"input": CHAT} if route == "/v1/responses" else prompt
    most = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    body = {**prompt, "model": DEMO_NAME, most: 240, "stream": True, "temperature": 0, "ignore_eos": True}

    def counted(self: DirectBody, data: bytes) -> None:
        written.append(data)
        write(self, data)

    def events() -> list[str]:
        lines = running.http.post(route, json=body).text.splitlines()
        return [line for line in lines if line.startswith("data: {")]

    monkeypatch.setattr(DirectBody, "write", counted)
    direct = events()
    assert len(written) >= 10, len(written)
    monkeypatch.setattr(DirectBody, "is_writable", False)
    count = len(written)
    assert joined_text(events()) == joined_text(direct) != ""
    assert len(written) == count


def joined_text(events: list[str]) -> str:
    """The text of a stream of any dialect."""
    text = ""
    for line in events:
        found = json.loads(line[6:])
        delta = found.get("delta", "")
        for choice in found.get("choices", ()):
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
    return text
