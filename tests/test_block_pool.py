"""BlockPool against a naive model, by a hypothesis state machine."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from compiled_llm.block_pool import SINK_BLOCK, BlockPool

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Owners take and give back blocks; the model is a list of what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.peak = 0

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        room = NUM_BLOCKS - sum(map(len, self.held))
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > room)
        if blocks is not None:
            assert len(blocks) == count
            self.held.append(blocks)
        self.peak = max(self.peak, sum(map(len, self.held)))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.held:
            self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        owned = [block for blocks in self.held for block in blocks]
        self.pool.check_invariants(owned)
        assert SINK_BLOCK not in owned
        assert self.pool.num_used == len(owned)
        assert self.pool.num_free == NUM_BLOCKS - len(owned)
        assert self.pool.peak_used == self.peak


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="not in use"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="sink"):
        pool.free([SINK_BLOCK])


def test_invariants_see_a_lost_block_and_one_in_two_tables() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.check_invariants(blocks)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_invariants(blocks[:1])
    with pytest.raises(AssertionError, match="two tables"):
        pool.check_invariants([*blocks, blocks[0]])
