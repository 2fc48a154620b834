"""The order in which rows are served: those that begin alike near each other, and long ones before short ones at the
end.

Rows that share a prefix share its keys and values, as long as the KV pool holds them. In a file of many prefixes in
random order the pool may be full of others before one comes again.
"""

import itertools
import json
from collections.abc import Iterator

from compiled_llm.offline.rows import Row

_MOST_BYTES = 2**28  # of the text of a window


def ordered_for_speed(rows: Iterator[Row], window: int) -> Iterator[Row]:
    """The rows, each window of ``window`` rows sorted by priority and then by what they begin with."""
    while batch := list(itertools.islice(rows, window)):
        batch.sort(key=_key)
        yield from batch


def _key(row: Row) -> tuple[int, str]:
    if row.messages is not None:
        return row.priority, json.dumps([row.chat_options, row.messages])
    return row.priority, str(row.prompt)
