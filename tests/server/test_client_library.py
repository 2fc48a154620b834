"""What OpenAI's library does besides asking: retries, timeouts, cancelling, parsed answers, many at once."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import openai
import pydantic
import pytest

from compiled_llm import CompiledEngine
from compiled_llm.server.settings import DEMO_NAME
from tests.server.conftest import Running, running_with
from tests.server.test_manners import until
from tests.server.test_openai import CHAT, GREEDY, expected

FOREVER: Any = {"model": DEMO_NAME, "messages": CHAT, "max_tokens": 400, "extra_body": {"ignore_eos": True}}


class Named(pydantic.BaseModel):
    name: str
    flag: bool


def test_it_asks_again_when_the_queue_was_full(engine: CompiledEngine) -> None:
    with running_with(engine, max_waiting_requests=0) as running, contextlib.ExitStack() as busy:
        for _ in range(4):
            stream = busy.enter_context(running.openai.chat.completions.create(stream=True, **FOREVER))
            next(stream)
        with pytest.raises(openai.RateLimitError) as refused:
            running.openai.completions.create(prompt="a", **GREEDY)
        assert refused.value.response.headers["retry-after"] == "1"
        started, leaving = time.monotonic(), threading.Timer(0.3, busy.close)
        leaving.start()
        answer = running.openai.with_options(max_retries=3).completions.create(prompt="a", **GREEDY)
        leaving.join()
        assert answer.choices[0].finish_reason == "length"
        assert time.monotonic() - started > 0.9, "it waited as long as Retry-After says"


@pytest.mark.parametrize("how", ["timeout", "close"])
def test_what_it_gives_up_is_aborted(how: str, engine: CompiledEngine, running: Running) -> None:
    before = engine.stats().num_output_tokens
    if how == "timeout":
        with pytest.raises(openai.APITimeoutError):
            running.openai.with_options(timeout=0.1).chat.completions.create(**FOREVER)
    else:
        stream = running.openai.chat.completions.create(stream=True, **FOREVER)
        next(stream)
        stream.close()
    until(lambda: not engine.scheduler.has_unfinished_requests())
    assert engine.stats().num_output_tokens - before < 400


def test_parsed_answers(running: Running) -> None:
    asked: Any = {"model": DEMO_NAME, "messages": CHAT, "response_format": Named, "max_tokens": 300, "seed": 1}
    whole = running.openai.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(whole, Named)
    with running.openai.chat.completions.stream(**asked) as events:
        kinds = {event.type for event in events}
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert events.get_final_completion().choices[0].message.parsed == whole


def test_raw_answers_have_the_name_of_the_request(running: Running) -> None:
    raw = running.openai.chat.completions.with_raw_response.create(messages=CHAT, **GREEDY)
    assert raw.request_id == raw.headers["x-request-id"]
    assert raw.parse().id == f"chatcmpl-{raw.request_id}"


def test_many_at_once(reference: CompiledEngine, running: Running) -> None:
    prompts = [f"def f{number}(x):" for number in range(32)]
    wanted = [one.text for one in expected(reference, prompts, temperature=0, max_tokens=12)]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.openai.base_url, api_key="none") as client:

            async def ask(prompt: str) -> str:
                stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(ask, prompts))

    assert asyncio.run(ask_all()) == wanted


def test_an_echo_alone(reference: CompiledEngine, running: Running) -> None:
    """Without a token of output, as older programs score a text."""
    asked: Any = {**GREEDY, "prompt": ["import os", "def f(x):"], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = running.openai.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == asked["prompt"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    for choice, prompt in zip(answer.choices, asked["prompt"], strict=True):
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == len(reference.tokenizer.encode(prompt))  # type: ignore[union-attr]
    chunks = list(running.openai.completions.create(stream=True, **asked))
    assert sorted(chunk.choices[0].text for chunk in chunks) == sorted(asked["prompt"])
