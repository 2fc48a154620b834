"""What passes between the parts of a run: a row of the input, how it ended, how far the run is."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Protocol

from compiled_llm.api.readable import shown

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
        lora: the name of its adapter.
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
    lora: str | None = None
    error: str | None = None


_FIELDS = [(field.name, field.default) for field in dataclasses.fields(Row)]


def row_to_json(row: Row) -> dict[str, Any]:
    """Arguments of ``Row`` that make an equal row, as values of JSON; defaults are left out."""
    return {name: value for name, default in _FIELDS if (value := getattr(row, name)) != default and value != {}}


def with_adapter(row: Row, names: Collection[str]) -> Row:
    """The row with the adapter that it asks for: ``lora``, or in OpenAI's formats ``model``, where that is one's name.

    ``names``: of adapters. A row of another one has an error.
    """
    if row.format != "row" and row.model in names:
        return dataclasses.replace(row, lora=row.model)
    if row.lora is None or row.lora in names:
        return row
    error = f"lora must be a name that --lora-modules gives, given {shown(row.lora)}"
    return Row(row.index, row.name, custom_id=row.custom_id, error=error)


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


_MOST_ID_CHARACTERS = 512


def check_custom_id(value: Any) -> str | None:
    """``ValueError`` unless it is None or a short string."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MOST_ID_CHARACTERS):
        raise ValueError(
            f"custom_id must be a non-empty str of at most {_MOST_ID_CHARACTERS} characters, given {shown(value)}"
        )
    return value
