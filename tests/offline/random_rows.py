"""Random rows for tests: any value of JSON, and of Python's JSON, in any field of both formats; and random tables."""

import dataclasses
import datetime
import decimal
import random
from typing import Any

import pyarrow

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.offline.formats import ROW_KEYS

_SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
_BODY = [
    *_SAMPLING,
    "messages",
    "prompt",
    "max_completion_tokens",
    "top_logprobs",
    "response_format",
    "tools",
    "stream",
]
_BODY += ["documents", "chat_template_kwargs", "reasoning_effort", "tool_choice", "priority", "cache_salt", "model"]
_BODY += ["add_generation_prompt", "continue_final_message", "echo", "best_of", "suffix", "modalities", "user", "self"]
_MESSAGE = ["role", "content", "tool_calls", "name", "reasoning_content", "tool_call_id", "x"]
_SCALARS = [
    *(None, True, False, 0, 1, 2, -1, 2**31, 2**63, -(10**400), 0.5, -0.0, 1e300, 1e-300),
    *(float("nan"), float("inf"), -float("inf"), "", "a", "user", "assistant", "tool", "\ud800", "\0", "🚀", "é\u2028"),
    *("a" * 600, "<|im_end|>", "{", '{"a": NaN}', '{"a": [1]}', "auto", "low", "/v1/completions", "POST"),
]
_KEYS = [
    "type", "text", "function", "name", "arguments", "json", "regex", "choice", "json_schema", "schema", "self", "",
]  # fmt: skip
_KEYS += ["content", "role", "1", "\ud800", "a" * 300, "__class__", "enable_thinking", "reasoning_effort", "items"]


def value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return rng.choice(_SCALARS)
    if kind < 0.62:
        nested: Any = 1
        for _ in range(rng.choice([31, 99, 101, 400])):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    items = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return items if kind < 0.8 else {rng.choice(_KEYS): item for item in items}


def _object(rng: random.Random, start: dict[str, Any], keys: list[str], most: int) -> dict[str, Any]:
    """A good object with some fields set to anything."""
    return {**start, **{rng.choice(keys): value(rng) for _ in range(rng.randrange(most + 1))}}


def row(rng: random.Random) -> Any:
    """A value that a line may hold: mostly a good row with something wrong in it."""
    message = _object(rng, {"role": "user", "content": "hello"}, _MESSAGE, 2)
    call = {"role": "assistant", "tool_calls": [{"function": _object(rng, {"name": "f"}, _KEYS, 2)}]}
    chat = rng.choice([[message], [message, call], [message, message]])
    sampling = _object(rng, {"max_tokens": 1}, [*_SAMPLING, "self"], 2)
    which = rng.random()
    if which < 0.05:
        return value(rng)
    if which < 0.5:
        prompt = rng.choice([{"prompt": "a"}, {"prompt_token_ids": [5]}, {"messages": chat}])
        return _object(rng, {**prompt, "sampling_params": sampling}, sorted(ROW_KEYS), 2)
    prompt = rng.choice([{"prompt": "a"}, {"messages": chat}])
    url = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    body = _object(rng, {**prompt, "max_tokens": 1}, _BODY, 2)
    return _object(rng, {"custom_id": "a", "url": url, "body": body}, ["custom_id", "url", "body", "method", "x"], 1)


# -- Tables


_FIELDS = ["prompt", "messages", "prompt_token_ids", "sampling_params", "custom_id", "tools", "chat_template_kwargs"]
_FIELDS += ["cache_salt", "priority", "body", "url", "role", "content", "max_tokens", "arguments", "stop"]
_LEAVES = {
    pyarrow.string(): ["a", "", "user", "🚀"], pyarrow.large_string(): ["b"], pyarrow.int8(): [1, -1],
    pyarrow.uint64(): [2**64 - 1, 0], pyarrow.float32(): [1.0, float("nan")],
    pyarrow.float64(): [float("inf"), 0.0], pyarrow.bool_(): [True, False], pyarrow.null(): [None],
    pyarrow.binary(): [b"\xff", b""], pyarrow.binary(2): [b"\xff\x00"],
    pyarrow.decimal128(20, 3): [decimal.Decimal("1.5")], pyarrow.decimal256(50, 3): [decimal.Decimal("2.5")],
    pyarrow.date32(): [datetime.date(2024, 1, 1)], pyarrow.time64("ns"): [1],
    pyarrow.duration("s"): [datetime.timedelta(seconds=1)],
    # A time that Python's own type has not, and one in ns, which it cannot be made of.
    pyarrow.timestamp("s"): [10**13, 0], pyarrow.timestamp("ns", "Europe/Berlin"): [1, 10**18],
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()): ["a"],
}  # fmt: skip


def _column(rng: random.Random, depth: int) -> tuple[Any, Any]:
    """A type, and a function that makes values of it."""
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        chosen = rng.choice(list(_LEAVES))
        return chosen, lambda: rng.choice([*_LEAVES[chosen], None])
    if kind < 0.7:
        inner, make = _column(rng, depth - 1)
        return pyarrow.list_(inner), lambda: [make() for _ in range(rng.randrange(3))]
    if kind < 0.75:
        inner, make = _column(rng, depth - 1)
        return pyarrow.map_(pyarrow.string(), inner), lambda: [("a", make())]
    fields = {name: _column(rng, depth - 1) for name in rng.sample(_FIELDS, rng.randrange(1, 4))}
    types = pyarrow.struct([(name, found[0]) for name, found in fields.items()])
    return types, lambda: {name: found[1]() for name, found in fields.items()}


def table(rng: random.Random, num_rows: int) -> pyarrow.Table:
    """A table of random columns, most of them with names that rows have."""
    columns = {name: _column(rng, 3) for name in rng.sample([*_FIELDS, "created"], rng.randrange(1, 4))}
    arrays = [pyarrow.array([make() for _ in range(num_rows)], of) for of, make in columns.values()]
    return pyarrow.table(dict(zip(columns, arrays, strict=True)))
