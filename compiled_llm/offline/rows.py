"""What passes between the parts of a run: a row of the input, how it ended, how far the run is. And checks of rows.

Both formats of the input (formats.py, openai_batch.py) use the checks. Columns of a table may hold more than
values of JSON, and Python reads NaN from JSON: neither comes past them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams

RowFormat = Literal["row", "chat", "completion"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row of the input. Exactly one of ``prompt``, ``messages`` and ``error`` is not None.

    Attributes:
        index: its place among the rows of all inputs, from 0; blank lines are no rows.
        name: what messages call it, with its place in the file.
        prompt: ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, with its ``cache_salt`` if it has one.
        messages: a conversation, for the chat template.
        chat_options: options of ``CompiledEngine.encode_chat``.
        sampling: sampling parameters of this row, which go before the run's; each was checked.
        priority: as ``CompiledEngine.add_request`` takes it.
        custom_id: the user's name for it, which its answer repeats.
        format: of its answer: "row", our own; "chat" or "completion", that of OpenAI's batches.
        model: what the row calls the model, for its answer.
        error: why the row cannot be served.
    """

    index: int
    name: str
    prompt: Mapping[str, Any] | None = None
    messages: list[Any] | None = None
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    priority: int = 0
    custom_id: str | None = None
    format: RowFormat = "row"
    model: str | None = None
    error: str | None = None


_FIELDS = [(field.name, field.default) for field in dataclasses.fields(Row)]


def row_to_json(row: Row) -> dict[str, Any]:
    """Arguments of ``Row`` that make an equal row, as values of JSON; defaults are left out."""
    return {name: value for name, default in _FIELDS if (value := getattr(row, name)) != default and value != {}}


class RowSource(Protocol):
    """Where an engine takes its rows from.

    Attributes:
        ended: no row will come any more.
        stopped: rows that have not begun are to be dropped, rows that run to be finished.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def stopped(self) -> bool: ...

    def take(self, wait: bool) -> Row | None:
        """The next row. None: there is none now; with ``wait``, which waits for one, there will be none any more."""


class RowIterator:
    """The rows of an iterator, as a ``RowSource``. ``is_stopped`` is asked before each row."""

    def __init__(self, rows: Iterator[Row], is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._rows, self._is_stopped = rows, is_stopped
        self.ended = False

    @property
    def stopped(self) -> bool:
        return self._is_stopped()

    def take(self, wait: bool) -> Row | None:
        row = None if self.ended or self.stopped else next(self._rows, None)
        self.ended = row is None
        return row


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """How a row ended.

    Attributes:
        name: what messages call the row.
        line: the row's line of the output file, with the newline.
        error: why the row has no result; None for a result.
    """

    index: int
    name: str
    line: bytes
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclasses.dataclass
class RunProgress:
    """How far a run is.

    Attributes:
        rows: rows that ended in this run, ``failed`` of them as an error.
        resumed: rows that an earlier run had ended.
        total: rows of the input, ``resumed`` among them; None while nothing tells. ``total_is_estimate``: from the
            share of its bytes that was read.
        prompt_tokens, cached_tokens, output_tokens: of the rows that ended; cached ones were found in the prefix cache.
        running, waiting: requests in the engines.
        kv_share: the part of the KV blocks that is in use, 0 to 1.
        workers: engines at work.
        stopping: no more rows are taken.
        seconds: since the first row was taken.
    """

    rows: int = 0
    failed: int = 0
    resumed: int = 0
    total: int | None = None
    total_is_estimate: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_share: float = 0.0
    workers: int = 1
    stopping: bool = False
    seconds: float = 0.0

    def add(self, result: RowResult) -> None:
        """Count a row that ended."""
        self.rows += 1
        self.failed += result.error is not None
        self.prompt_tokens += result.num_prompt_tokens
        self.cached_tokens += result.num_cached_tokens
        self.output_tokens += result.num_output_tokens


# -- Checks of what a row brings


_MOST_DEPTH = 100  # of lists and objects; far below what Python's own functions for JSON can go down
_MOST_ID_CHARACTERS = 512
_EFFORT = "reasoning_effort"  # a variable of chat templates that OpenAI's API has as a field of its own
CHAT_OPTIONS = (
    *("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    _EFFORT,
)
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}


def check_json(name: str, value: Any, depth: int = 0) -> None:
    """``ValueError``, with the place in ``name``, unless ``value`` and all in it are values of JSON."""
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, given {value}")
        return
    if depth >= _MOST_DEPTH:
        raise ValueError(f"{name} must not be more than {_MOST_DEPTH} lists and objects deep")
    if isinstance(value, list):
        for number, item in enumerate(value):
            if not isinstance(item, str | int):  # most are: then no name is made
                check_json(f"{name}[{number}]", item, depth + 1)
    elif isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            check_json(f"{name}.{key:.100}" if name else f"{key:.100}", item, depth + 1)
    else:
        raise ValueError(
            f"{name} must be a value of JSON (a string, a number, true, false, null, a list or an object), given "
            f"{type(value).__name__}: {shown(value)}"
        )


def check_custom_id(value: Any) -> str | None:
    """``ValueError`` unless it is None or a short string."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MOST_ID_CHARACTERS):
        raise ValueError(
            f"custom_id must be a non-empty str of at most {_MOST_ID_CHARACTERS} characters, given {shown(value)}"
        )
    return value


def checked_sampling(values: Any) -> dict[str, Any]:
    """Sampling parameters of a row. ``ValueError`` as ``SamplingParams`` raises it.

    Whether they go together with the run's is known where the row is served. Empty stop strings, with which
    clients say that there is none, are left out.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"sampling_params must be a JSON object, given {shown(values)}")
    if "output_kind" in values:
        raise ValueError("output_kind must be left out of a row: an offline run writes whole results")
    sampling, stop = dict(values), values.get("stop")
    if stop == "":
        sampling["stop"] = None
    elif isinstance(stop, list):
        sampling["stop"] = [text for text in stop if text != ""]
    SamplingParams(**{"max_tokens": None, **sampling})  # min_tokens is for the run's max_tokens to allow
    return sampling


def chat_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``CompiledEngine.encode_chat`` among ``values``; a null is as no key.

    Raises:
        ValueError: two of them contradict each other.
    """
    options = {key: values[key] for key in CHAT_OPTIONS if key != _EFFORT and values.get(key) is not None}
    effort = values.get(_EFFORT)
    if effort is None:
        return options
    if not isinstance(effort, str):
        raise ValueError(f"{_EFFORT} must be a str, such as 'low', given {shown(effort)}")
    variables = options.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        return options  # the chat template's code says what is wrong with them
    if variables.get(_EFFORT, effort) != effort:
        raise ValueError(
            f"{_EFFORT} must be the same in chat_template_kwargs, or be given once, given {shown(effort)} and "
            f"{shown(variables[_EFFORT])}"
        )
    return {**options, "chat_template_kwargs": {**variables, _EFFORT: effort}}


def check_messages(messages: Any) -> list[Any]:
    """``ValueError`` for what is no list, and for images and the like. The chat template's code checks the rest."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages must be a list of one or more objects with role and content, given {shown(messages)}"
        )
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in _MEDIA:
                raise ValueError(f"{_MEDIA[kind]} are not served: messages[{number}] has a part of type {kind!r}")
    return messages
