"""Texts that are hard to stream: the events of a stream, joined, are the whole answer, and that is ``generate``'s."""

from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from tests.server.conftest import SIZES, Running
from tests.server.test_manners import events

MOST = SIZES["max_model_len"]
WORDS = "é日本語😀 👩‍👩‍👧 ﷽ a"  # of characters that take several tokens
FORCED = {"structured_outputs": {"choice": [WORDS]}, "max_tokens": 200}
# What is asked for besides temperature 0.
CASES: dict[str, dict[str, Any]] = {
    "characters of several tokens": FORCED,
    "and their log-probabilities": {**FORCED, "logprobs": 0},
    "a stop string of several tokens": {**FORCED, "stop": "本語"},
    "a stop string that ends within a character's bytes": {**FORCED, "stop": ["zz", "😀"]},
    "a stop string that is kept": {**FORCED, "stop": "語😀", "include_stop_str_in_output": True},
    "half a stop string": {**FORCED, "stop": "👩‍👩‍👧‍👦"},
    "a stop string at the very end": {**FORCED, "stop": "a"},
    "one token": {"max_tokens": 1, "logprobs": 2},
    "a prompt of one token": {"prompt": [652], "max_tokens": 5},
    "a prompt that fills the model": {"prompt": [652] * (MOST - 1), "max_tokens": 1},
    "a prompt that fills it, and no limit": {"prompt": [652] * (MOST - 2), "max_tokens": None},
    "a prompt that is cut": {"prompt": "import os\n" * MOST, "truncate_prompt_tokens": 7, "max_tokens": 3},
    "a prompt that is cut to what fits": {"prompt": "a b\n" * MOST, "truncate_prompt_tokens": -1, "max_tokens": 1},
    "nothing at all": {"stop": [" ", "\n", "."], "max_tokens": 40},
    **{f"a character that is cut after {number} tokens": {**FORCED, "max_tokens": number} for number in range(1, 9)},
}


@pytest.mark.parametrize("name", CASES)
def test_streamed_and_whole_are_those_of_generate(name: str, reference: CompiledEngine, running: Running) -> None:
    params = {"temperature": 0, **CASES[name]}
    prompt = params.pop("prompt", "import os")
    (output,) = reference.generate([prompt], SamplingParams(**params), use_tqdm=False)
    (wanted,) = output.outputs
    body = {
        "prompt": prompt,
        "return_token_ids": True,
        **{key: value for key, value in params.items() if value is not None},
    }
    if params.get("max_tokens", 0) is None:
        body["max_tokens"] = MOST
    whole = running.http.post("/v1/completions", json=body).json()["choices"][0]
    assert (whole["text"], whole["token_ids"], whole["finish_reason"]) == (
        wanted.text,
        wanted.token_ids,
        wanted.finish_reason,
    )
    parts = [
        chunk["choices"][0]
        for chunk in events(running.http.post("/v1/completions", json={**body, "stream": True}).text)
    ]
    assert "".join(part["text"] for part in parts) == wanted.text
    assert [token_id for part in parts for token_id in part["token_ids"]] == wanted.token_ids
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [wanted.finish_reason]
    assert all(part["text"] or part["token_ids"] or part["finish_reason"] for part in parts), "an event says something"
    assert not any("\ufffd" in part["text"] for part in parts[:-1]), "no half of a character"
    if "logprobs" in params:
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in part["logprobs"][field]] == whole["logprobs"][field]


@pytest.mark.parametrize("stop", [None, "本語", "👧 ﷽"])
def test_a_chat_too(stop: str | None, reference: CompiledEngine, running: Running) -> None:
    messages = [{"role": "user", "content": "a 😀"}]
    params = {"temperature": 0, "stop": stop, **FORCED}
    (output,) = reference.chat(messages, SamplingParams(**params), use_tqdm=False)
    body = {"messages": messages, **params}
    whole = running.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert whole["message"]["content"] == output.outputs[0].text == (WORDS.partition(stop)[0] if stop else WORDS)
    stream = running.http.post("/v1/chat/completions", json={**body, "stream": True}).text
    first, *parts = (chunk["choices"][0] for chunk in events(stream))
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(part["delta"]["content"] for part in parts) == output.outputs[0].text
    assert all(part["delta"]["content"] or part["finish_reason"] for part in parts), "no empty deltas"
