"""RowSet: a set of row numbers, a bit each."""

_CHUNK_BITS = 16  # 65,536 rows, in 8 KiB
_MASK = (1 << _CHUNK_BITS) - 1


class RowSet:
    """Of 10,000,000 rows it takes 1.3 MB; of a few, however large their numbers, 8 KiB each at most."""

    def __init__(self) -> None:
        self._chunks: dict[int, bytearray] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: int) -> bool:
        chunk = self._chunks.get(index >> _CHUNK_BITS)
        return chunk is not None and bool(chunk[(index & _MASK) >> 3] & 1 << (index & 7))

    def add(self, index: int) -> bool:
        """Whether it is new."""
        chunk = self._chunks.get(index >> _CHUNK_BITS)
        if chunk is None:
            chunk = self._chunks[index >> _CHUNK_BITS] = bytearray(1 << _CHUNK_BITS - 3)
        place, bit = (index & _MASK) >> 3, 1 << (index & 7)
        if chunk[place] & bit:
            return False
        chunk[place] |= bit
        self._count += 1
        return True

    @property
    def highest(self) -> int | None:
        """The largest number; None of an empty set."""
        if not self._chunks:
            return None
        last = max(self._chunks)
        return (last << _CHUNK_BITS) + int.from_bytes(self._chunks[last], "little").bit_length() - 1
