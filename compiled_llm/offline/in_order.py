"""The lines of an output file in the order of their rows."""

import os
from array import array
from collections.abc import Iterable, Iterator

from compiled_llm.offline.answers import index_of


def lines_in_order(descriptor: int, lines: Iterable[bytes], num_rows: int) -> Iterator[bytes]:
    """Reads each line a second time, and remembers no more than where it is: 16 bytes a row.

    Args:
        descriptor: of the file.
        lines: all its lines, from its start on.
        num_rows: the rows of the file are those from 0 to ``num_rows`` - 1.

    Raises:
        ValueError: it has other rows.
        OSError: it cannot be read.
    """
    starts, sizes = array("q", bytes(8 * num_rows)), array("q", bytes(8 * num_rows))
    start = 0
    for line in lines:
        index = index_of(line)
        if index >= num_rows:
            raise ValueError(f"row {index} is in the file, and one of the first {num_rows} rows is not")
        starts[index], sizes[index] = start, len(line)
        start += len(line)
    for start, size in zip(starts, sizes, strict=True):
        yield os.pread(descriptor, size, start)
