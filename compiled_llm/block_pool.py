"""BlockPool: which KV blocks are free. Plain Python; the memory itself belongs to the runner.

Block 0 is the sink: padding tokens write there and nothing reads it, so the pool never hands it out.
"""

SINK_BLOCK = 0


class BlockPool:
    """Blocks ``1..num_blocks``. Each is free, or used by exactly one owner."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.peak_used = 0
        # A stack: the block freed last is handed out first, while it is still in the caches of the CPU.
        self._free = list(range(num_blocks, SINK_BLOCK, -1))
        self._is_free = bytearray([1]) * (num_blocks + 1)
        self._is_free[SINK_BLOCK] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks, or None when there are not as many: no room is an answer, not an error."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_free[block] = 0
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take back blocks that ``allocate`` handed out."""
        for block in reversed(blocks):
            assert block != SINK_BLOCK, "the sink was never handed out"
            assert not self._is_free[block], f"block {block} is not in use"
            self._is_free[block] = 1
            self._free.append(block)

    def check_invariants(self, owned: list[int]) -> None:
        """Assert that every block is free or in ``owned``, exactly once: the block ids of all tables together."""
        assert len(set(owned)) == len(owned), "a block stands in two tables, or twice in one"
        assert set(owned).isdisjoint(self._free), "a block is both in a table and free"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert len(self._free) + len(owned) == self.num_blocks, (
            f"{self.num_blocks - len(self._free) - len(owned)} blocks are lost"
        )
        assert SINK_BLOCK not in {*owned, *self._free}, "the sink was handed out"
