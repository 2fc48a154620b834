"""Row: one row of the input, and the JSON of it that worker processes get."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

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
        sampling: sampling parameters of this row, over those of the run; allowed ones.
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
    """The values of JSON from which ``row_from_json`` makes the same row; defaults are left out."""
    return {name: value for name, default in _FIELDS if (value := getattr(row, name)) != default and value != {}}


def row_from_json(values: Mapping[str, Any]) -> Row:
    return Row(**values)
