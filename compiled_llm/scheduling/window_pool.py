"""KV blocks of the layers that see a window of keys, kept only while a query may see them. Plain Python.

Layers without a window have the blocks of the ``BlockPool``, whose numbers block tables name. Layers with one have
memory of their own, which is smaller: a *place* in it is given to a block while some request needs the block's keys in
these layers. So a long request has all its blocks, and places for the last few of them alone.

A block that others can find keeps its place after its last user, until the memory is needed. The prefix cache finds a
prefix only as far as the blocks that its next query sees have their places: dropped places make a shorter hit.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.streaming import Stream

Copies = list[tuple[int, int]]


def stream_of(window: int, limits: EngineLimits) -> Stream | None:
    """The stream whose window this is; None: it is one of the model's own."""
    stream = limits.stream
    return stream if stream is not None and stream.sink_tokens and stream.window == window else None


def most_places(window: int, limits: EngineLimits) -> int:
    """Most places that one request ever needs for a window: in the largest step, those its first query sees, too."""
    size, stream = limits.block_size, stream_of(window, limits)
    if stream is not None:  # and one for a token before which others leave
        return stream.capacity // size + 1
    return min((window - 1 + limits.max_num_batched_tokens) // size + 2, limits.blocks_per_request)


def useful_places(window: int, limits: EngineLimits) -> int:
    """Places for as many requests as may run, so that more would only keep prefixes."""
    # All but one of them decode: a largest step is shared by all.
    stream = stream_of(window, limits)
    seen = window if stream is None else stream.capacity
    decoding = min((seen - 1) // limits.block_size + 3, limits.blocks_per_request)
    return limits.max_num_seqs * decoding + most_places(window, limits)


class WindowPool:
    """Places ``1..num_places`` for the blocks of a ``BlockPool``. Place 0 belongs to the sink.

    A place is used (a request needs it), cached (none does, but its block can be found) or empty.

    Attributes:
        window: keys that a query sees, itself included.
        stream: where these come after sink tokens; None elsewhere.
        num_sink_blocks: the first blocks of a request, which keep their places.
        swapped_out: (place, host block) pairs that the next step copies.
        moved_keys: as ``SchedulerOutput.moved_keys``, for the next step, with slots of places.
        num_evictions: cached places that were given to another block.
        on_evict: called with the block whose cached place is about to be given to another.
    """

    on_evict: Callable[[int], None] | None = None

    def __init__(self, window: int, num_places: int, limits: EngineLimits) -> None:
        self.window, self.num_places, self.block_size = window, num_places, limits.block_size
        self.most_places = most_places(window, limits)
        self.stream = stream_of(window, limits)
        self.num_sink_blocks = 0 if self.stream is None else self.stream.sink_tokens // limits.block_size
        self.swapped_out: Copies = []
        self.moved_keys: Copies = []
        self.num_evictions = 0
        self._empty = list(range(num_places, 0, -1))
        self._place_of: dict[int, int] = {}  # block -> place
        self._users: dict[int, int] = {}  # block -> requests that need its place
        self._cached: OrderedDict[int, None] = OrderedDict()  # blocks, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_places - self.num_free

    def first_seen(self, position: int) -> int:
        """Index in a table of the first block that a query at ``position`` sees, but for sink tokens."""
        if self.stream is not None:
            dropped = self.stream.num_dropped(position) // self.block_size
            return dropped and self.num_sink_blocks + dropped
        return max(0, position - self.window + 1) // self.block_size

    def place(self, block: int) -> int:
        """Of a block that has one."""
        return self._place_of[block]

    def has(self, block: int) -> bool:
        """Whether the block's keys are there, or a request is about to write them."""
        return block in self._place_of

    def num_users(self, block: int) -> int:
        return self._users.get(block, 0)

    def attach(self, block: int) -> None:
        """Give an unfilled block a place, for one request. One must be free."""
        assert block not in self._place_of, f"block {block} has a place"
        if not self._empty:
            evicted, _ = self._cached.popitem(last=False)
            if self.on_evict is not None:
                self.on_evict(evicted)
            self._empty.append(self._place_of.pop(evicted))
            self.num_evictions += 1
        self._place_of[block] = self._empty.pop()
        self._users[block] = 1

    def hold(self, block: int) -> None:
        """One more request needs the place that the block has."""
        assert block in self._place_of, f"block {block} has no place"
        self._cached.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1

    def drop(self, block: int, can_be_found: bool) -> None:
        """A request needs the place no more."""
        count = self._users[block] - 1
        if count:
            self._users[block] = count
            return
        del self._users[block]
        if can_be_found:
            self._cached[block] = None
        else:
            self._empty.append(self._place_of.pop(block))

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        if block in self._cached:
            del self._cached[block]
            self._empty.append(self._place_of.pop(block))
        assert block not in self._place_of, f"the place of block {block} is used"

    def forget_cached(self) -> None:
        """No block can be found any more."""
        self._empty += (self._place_of.pop(block) for block in reversed(self._cached))
        self._cached.clear()

    def can_exchange(self, block: int, holder: int) -> bool:
        """Whether ``exchange`` is possible: not where others need the place that ``holder`` would get."""
        return holder in self._place_of or self._users[block] == 1

    def exchange(self, block: int, holder: int) -> None:
        """A table that needs the place of ``block`` gets ``holder`` instead, which holds the same keys."""
        if holder in self._place_of:
            self.hold(holder)
            self.drop(block, can_be_found=False)
        else:
            assert self.can_exchange(block, holder)
            self._place_of[holder] = self._place_of.pop(block)
            self._users[holder] = self._users.pop(block)

    def longest_hit(self, blocks: Sequence[int]) -> int:
        """How many of a request's first ``blocks`` it can use: the next query sees no key of a dropped place."""
        there, best = 0, 0  # there: blocks with a place, without a gap, up to this one
        for count, block in enumerate(blocks, 1):
            there = there + 1 if block in self._place_of else 0
            if there >= count - self.first_seen(count * self.block_size):
                best = count
        return best

    def empty_places(self) -> set[int]:
        """The places that hold nothing."""
        return set(self._empty)

    def check_invariants(self, users: dict[int, int], can_be_found: Sequence[bool]) -> None:
        """Assert that the pool agrees with ``users``: block -> requests that need its place."""
        assert self._users == users, "the users of places are not the requests that need them"
        places = list(self._place_of.values())
        assert sorted([*places, *self._empty]) == list(range(1, self.num_places + 1)), "places are lost, or given twice"
        assert self._place_of.keys() == self._users.keys() | self._cached.keys(), "a place has no block"
        assert not self._users.keys() & self._cached.keys(), "a place is both used and cached"
        assert all(can_be_found[block] for block in self._cached), "a cached place cannot be found"
