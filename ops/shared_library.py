"""Whether the file of a shared library is all there.

One that a killed build or a full disk has cut off either does not load, or ends the process with a bus error when what
is missing is touched. So it is told apart before it is loaded.
"""

import struct
from pathlib import Path

_HEADER = struct.Struct("<4sBB26xQQ6xHHHH2x")  # of ELF: magic, class, order; where its two tables are; their entries
_SEGMENT = struct.Struct("<8xQ16xQ16x")  # where its bytes are in the file, and how many


def is_whole(path: Path) -> bool:
    """Whether a library or object file of this kind of machine holds all that its tables name, as far as they say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size:
            return False
        magic, bits, order, segments, sections, *sizes = _HEADER.unpack(start)
        if (magic, bits, order) != (b"\x7fELF", 2, 1):
            return False
        segment_size, num_segments, section_size, num_sections = sizes
        ends = [segments + segment_size * num_segments, sections + section_size * num_sections]
        if max(ends) > size:
            return False
        file.seek(segments)
        for _ in range(num_segments):
            offset, length = _SEGMENT.unpack(file.read(segment_size)[: _SEGMENT.size])
            ends.append(offset + length)
    return max(ends) <= size
