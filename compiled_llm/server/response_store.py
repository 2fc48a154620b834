"""ResponseStore: answers of /v1/responses that clients may ask for again or go on with, within bounds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec


class Stored(NamedTuple):
    """An answer, and the items of the conversation up to it and with it."""

    response: dict[str, Any]
    items: list[Any]


class ResponseStore:
    """Keeps the newest ones.

    Args:
        most, most_bytes: of them together; one that alone has more bytes is not kept.
        seconds: for which one is kept.
        clock: seconds, ever more.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._most_bytes, self._seconds, self._clock = most, most_bytes, seconds, clock
        self._entries: dict[str, tuple[float, bytes]] = {}  # when it came, and the answer as JSON; the oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: Stored) -> None:
        """Bytes, so that what it takes is known, and nobody changes it."""
        content = msgspec.json.encode(stored)
        self.delete(response_id)
        self._entries[response_id] = self._clock(), content
        self.num_bytes += len(content)
        while len(self._entries) > self._most or self.num_bytes > self._most_bytes:
            self.delete(next(iter(self._entries)))

    def get(self, response_id: str) -> Stored | None:
        """None: there is none of that id, or not any more."""
        self._drop_old()
        entry = self._entries.get(response_id)
        return None if entry is None else Stored(*msgspec.json.decode(entry[1]))

    def delete(self, response_id: str) -> bool:
        """Whether there was one."""
        self._drop_old()
        entry = self._entries.pop(response_id, None)
        self.num_bytes -= 0 if entry is None else len(entry[1])
        return entry is not None

    def _drop_old(self) -> None:
        oldest = self._clock() - self._seconds
        for response_id, (came, content) in list(self._entries.items()):
            if came > oldest:
                return
            del self._entries[response_id]
            self.num_bytes -= len(content)
