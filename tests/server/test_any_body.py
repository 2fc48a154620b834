"""Whatever stands in a body of a response, a message or a score, it is read or refused with a ``ValueError``."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compiled_llm.anthropic.requests import read_message
from compiled_llm.openai.responses import read_response
from compiled_llm.server.scores import read_score

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "x"}
RESPONSE = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "namespace": "n"},
        {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [TOOL, {"type": "custom", "name": "p", "format": GRAMMAR}, {"type": "web_search"},
              {"type": "namespace", "name": "n", "tools": [TOOL]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "metadata": {},
    "max_output_tokens": 3,
}  # fmt: skip
MESSAGE = {
    "model": "m",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"},
                                          {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                      "content": [{"type": "text", "text": "2"}]}]},
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}, {"type": "web_search_2025", "name": "w"}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 3},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["a"],
}  # fmt: skip
SCORE = {"prompt": ["a", [1, 2]], "continuations": ["b", [3]], "top_logprobs": 2, "cache_salt": "s", "priority": 0}
VALUES: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, "", "x", "auto", [], {}, [[]], [{}], [None], [1, [2]]),
    *({"type": []}, {"type": {}}, {"type": "text"}, {"name": {}}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something could stand instead."""
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize(
    ("read", "body"),
    [(read_response, RESPONSE), (read_message, MESSAGE), (lambda body: read_score(body, 20), SCORE)],
    ids=["response", "message", "score"],
)
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.battery)])
def test_it_is_read_or_refused(read: Callable[[Any], Any], body: dict[str, Any], number: int) -> None:
    rng, found, num_read = random.Random(0), list(places(body)), 0
    read(body)
    for _ in range(number):
        changed: Any = copy.deepcopy(body)
        *path, last = rng.choice(found)
        inner = changed
        for key in path:
            inner = inner[key]
        if isinstance(inner, dict) and rng.random() < 0.1:
            del inner[last]
        else:
            inner[last] = rng.choice(VALUES)
        try:
            read(changed)
            num_read += 1
        except ValueError:
            pass
    assert 0 < num_read < number
