"""What a reader of a model's text gives: reasoning, content and tool calls, piece by piece, without their marks.

Joined, the pieces are the same however the text was cut when it came in.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of its arguments.
        strict: its arguments must be of the schema, whatever the model would like to write.
    """

    name: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    strict: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The reasoning goes on."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContentDelta:
    """The answer goes on."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool is called. ``index``: of the call, from 0 on; ``id``: as the results are to name it."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """The arguments of the call that began last go on. Joined they are JSON, unless the model ended amid them."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnds:
    """The call that began last has ended, also where the text ended amid it."""

    index: int


Event = ReasoningDelta | ContentDelta | CallBegins | ArgumentsDelta | CallEnds


class Reader(Protocol):
    """Reads one text of a model."""

    def feed(self, text: str) -> list[Event]:
        """The text goes on: what is known now, and was not."""
        ...

    def finish(self) -> list[Event]:
        """The text has ended: the rest."""
        ...
