"""Bodies of requests: what they may have, and what of it is refused by name. tests/offline/test_openai_batch.py has
the fields that batches have too."""

from typing import Any

import pytest

from compiled_llm.openai.requests import FIELDS, SAMPLING_FIELDS, Kind, read_request

CHAT: Any = [{"role": "user", "content": "a"}]


def test_a_completion() -> None:
    body = {
        **{"model": "m", "prompt": ["a", [1, 2]], "echo": True, "logprobs": 2, "n": 2, "best_of": 2, "stop": ["x", ""]},
        **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "priority": 3},
        **{"cache_salt": "s", "user": "me", "top_k": 5, "suffix": None, "use_beam_search": False},
    }
    asked = read_request("completion", body)
    assert asked.prompts == [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}]
    assert asked.sampling == {"n": 2, "stop": ["x"], "top_k": 5, "logprobs": 2, "prompt_logprobs": 2}
    assert (asked.model, asked.priority, asked.cache_salt) == ("m", 3, "s")
    assert (asked.echo, asked.stream, asked.include_usage, asked.return_token_ids) == (True,) * 4
    assert not asked.continuous_usage
    assert read_request("completion", {"prompt": [1, 2]}).prompts == [{"prompt_token_ids": [1, 2]}]


def test_usage_in_every_event_is_also_at_the_end() -> None:
    options = {"continuous_usage_stats": True}
    asked = read_request("chat", {"messages": CHAT, "stream": True, "stream_options": options})
    assert asked.include_usage
    assert asked.continuous_usage


@pytest.mark.parametrize("kind", FIELDS)
def test_every_sampling_parameter_is_a_field(kind: Kind) -> None:
    """One that comes later is one by itself; its outputs are for the server to shape."""
    assert set(SAMPLING_FIELDS) <= set(FIELDS[kind])
    assert {"temperature", "structured_outputs", "truncate_prompt_tokens", "seed"} <= set(SAMPLING_FIELDS)
    assert not {"output_kind", "detokenize"} & set(FIELDS[kind])


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("completion", {"maxtokens": 1}, "maxtokens is not served: did you mean 'max_tokens'"),
        ("completion", {"qwertz": 1}, "qwertz is not served: leave it out"),
        ("completion", {"output_kind": "delta"}, "output_kind is not served"),
        ("completion", {"best_of": 3, "n": 2}, "best_of must be 2, as n is"),
        ("completion", {"guided_regex": "a"}, "give response_format or structured_outputs"),
        ("completion", {"stream": 1}, "stream must be true or false, given 1"),
        ("completion", {"stream_options": {"include_usage": True}}, "stream_options must be left out unless stream"),
        ("completion", {"stream": True, "stream_options": {"usage": True}}, "an object with include_usage and"),
        ("completion", {"stream": True, "stream_options": {"include_usage": 1}}, "include_usage must be true or false"),
        ("completion", {"priority": "high"}, "priority must be an integer"),
        ("completion", {"cache_salt": 1}, "cache_salt must be a str"),
        ("completion", {"length_penalty": 2.0}, "length_penalty must be 1, all that is served here"),
        ("chat", {"echo": True}, "only completions have it"),
        ("chat", {"functions": []}, "give tools and tool_choice"),
        ("chat", {"chat_template": "x"}, "the model's own is used"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities must be ['text']"),
        ("chat", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "not both"),
    ],
)
def test_what_is_refused(kind: Kind, fields: dict[str, Any], words: str) -> None:
    start = {"messages": CHAT} if kind == "chat" else {"prompt": "a"}
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        read_request(kind, {**start, **fields})
    assert words in str(refused.value)
