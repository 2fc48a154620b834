"""KV blocks of the layers that see a window of keys, kept only while a query may see them. Plain Python.

Layers without a window have the blocks of the ``BlockPool``, whose numbers block tables name. Layers with one have
memory of their own, which is smaller: a *place* in it is given to a block while some request needs the block's keys in
these layers. So a long request has all its blocks, and places for the last few of them alone.

A block that others can find keeps its place after its last user, until the memory is needed. The prefix cache finds a
prefix only as far as the blocks that its next query sees have their places: dropped places make a shorter hit.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.streaming import Stream
from compiled_llm.scheduling.request import Held, Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutputBuilder

if TYPE_CHECKING:
    from compiled_llm.scheduling.block_pool import BlockPool

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
        num_evictions: cached places that were given to another block.
    """

    def __init__(self, window: int, num_places: int, limits: EngineLimits) -> None:
        self.window, self.num_places, self.block_size = window, num_places, limits.block_size
        self.most_places = most_places(window, limits)
        self.stream = stream_of(window, limits)
        self.num_sink_blocks = 0 if self.stream is None else self.stream.sink_tokens // limits.block_size
        self.swapped_out: Copies = []
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


class WindowPlaces:
    """Gives requests the places that they need next, in each ``WindowPool``, and drops those that no later query sees.

    It does nothing where there is no window.

    A request that lacks one token has a place for the block where it goes, if it has that block.
    """

    def __init__(self, pool: "BlockPool") -> None:
        self.pool, self.windows = pool, pool.windows
        self.stream = next((window.stream for window in pool.windows if window.stream is not None), None)

    def longest_hit(self, blocks: Sequence[int]) -> int:
        """How many of a request's first ``blocks``, which are full, all windows let it use."""
        count = len(blocks)
        while count:  # a hit that is shorter for one window may be none for another
            shorter = min(window.longest_hit(blocks[:count]) for window in self.windows)
            if shorter == count:
                break
            count = shorter
        return count

    def holding(self, request: Request, index: int) -> list[tuple[WindowPool, Held]]:
        """The windows in which ``request`` needs the place of a block of its table."""
        pairs = zip(self.windows, request.held, strict=False)  # those of a request without blocks are empty
        return [(window, held) for window, held in pairs if held.first <= index < held.end]

    # -- Room

    def num_lacking(self, start: int, num_blocks: int, shared: Sequence[int], holds: bool) -> list[int]:
        """How many free places a request takes in each window, which starts at token ``start``.

        ``num_blocks`` in its table begin with those ``shared``, whose places it ``holds`` already or not.
        """
        lacking = []
        for window in self.windows:
            held = self._at_first(window, start, num_blocks)
            found = 0 if holds else sum(not window.num_users(block) for block in shared[held.first : held.end])
            lacking.append(max(0, held.end - max(held.first, len(shared))) + found)
        return lacking

    def is_free(self, count: int = 1) -> bool:
        """Whether each window has ``count`` free places."""
        return all(window.num_free >= count for window in self.windows)

    def room_without(self, others: Sequence[Request], shared: Sequence[int]) -> list[int]:
        """How many places each window would have free without ``others``, for a request with the blocks ``shared``."""
        room = []
        for number, window in enumerate(self.windows):
            theirs = Counter(block for other in others for block in self.held_blocks(window, other, other.held[number]))
            freed = {block for block, count in theirs.items() if window.num_users(block) == count}
            room.append(window.num_free + len(freed) - len(freed.intersection(shared)))
        return room

    # -- Streams

    def has_old_sinks(self, request: Request) -> bool:
        """Whether the sink tokens of ``request`` have to be computed again before its next token is."""
        stream = self.stream
        return stream is not None and stream.num_dropped(request.num_computed_tokens) > request.num_dropped_tokens

    def num_due(self, request: Request) -> int:
        """How many tokens a running request is to compute next: its sink tokens if these are old, else all it lacks."""
        if self.stream is not None and self.has_old_sinks(request):
            return self.stream.sink_tokens
        return request.num_tokens - request.num_computed_tokens

    def most_in_a_step(self, request: Request, count: int) -> int:
        """Of the next ``count`` tokens of ``request``, those that see the same sink tokens."""
        return count if self.stream is None else min(count, self.stream.num_until_drop(request.num_computed_tokens))

    def move_sinks(self, request: Request) -> int:
        """A step computes the old sink tokens of ``request`` again. Returns by how many positions they move."""
        assert self.stream is not None
        request.num_dropped_tokens = self.stream.num_dropped(request.num_computed_tokens)
        return request.num_dropped_tokens

    # -- A request's places

    def enter(self, request: Request, num_shared: int) -> None:
        """A request has got all its blocks; the first ``num_shared`` hold something.

        It may have places of those already, as a fork.
        """
        start, blocks = request.num_computed_tokens, request.block_ids
        is_fork = bool(request.held)
        for number, window in enumerate(self.windows):
            held = self._at_first(window, start, len(blocks))
            if not is_fork:
                for block in blocks[held.first : min(held.end, num_shared)]:
                    window.hold(block)
                request.held.append(held)
            for block in blocks[max(held.first, num_shared) : held.end]:
                window.attach(block)
            request.held[number].end = max(held.end, request.held[number].end)

    def slide(self, request: Request, start: int) -> None:
        """Drop the places that neither a query at ``start`` nor a later one sees."""
        for window, held in zip(self.windows, request.held, strict=True):
            first = window.first_seen(start)
            for block in request.block_ids[max(held.first, window.num_sink_blocks) : first]:
                window.drop(block, self._can_be_found(block))
            held.first = max(held.first, first)

    def extend(self, request: Request, count: int) -> int:
        """Places for the next ``count`` tokens of a request, as far as some are free. Returns for how many they are."""
        start, size = request.num_computed_tokens, self.pool.windows[0].block_size
        end = min(-(-(start + count) // size), len(request.block_ids))
        self.slide(request, start)
        for window, held in zip(self.windows, request.held, strict=True):
            missing = min(end - held.end, window.num_free)
            for block in request.block_ids[held.end : held.end + max(0, missing)]:
                window.attach(block)
            held.end += max(0, missing)
            count = min(count, held.end * size - start)
        return count

    def grow(self, request: Request) -> None:
        """A request that decodes has got a block more, or some."""
        for window, held in zip(self.windows, request.held, strict=True):
            for block in request.block_ids[held.end :]:
                window.attach(block)
            held.end = len(request.block_ids)

    def release(self, request: Request) -> None:
        """A request is about to lose its blocks."""
        for window, held in zip(self.windows, request.held, strict=False):
            for block in reversed(self.held_blocks(window, request, held)):
                window.drop(block, self._can_be_found(block))
        request.held, request.num_dropped_tokens = [], 0

    def held_blocks(self, window: WindowPool, request: Request, held: Held) -> list[int]:
        """The blocks whose places a request needs."""
        sinks = min(window.num_sink_blocks, held.first)
        return request.block_ids[:sinks] + request.block_ids[held.first : held.end]

    # -- Forks

    def fork(self, parent: Request, child: Request, count: int) -> bool:
        """``child`` gets the places of the first ``count`` tokens of ``parent``. False: it has dropped some."""
        num_blocks = -(-count // self.windows[0].block_size) if self.windows else 0
        if self.stream is not None:  # the keys of its sink tokens move with it
            return False
        held = [Held(window.first_seen(count), num_blocks) for window in self.windows]
        if any(own.first < there.first for own, there in zip(held, parent.held, strict=True)):
            return False
        child.held = held
        for window, own in zip(self.windows, held, strict=True):
            for block in parent.block_ids[own.first : own.end]:
                window.hold(block)
        return True

    def replace(self, request: Request, index: int, shared: int, block: int) -> None:
        """``block`` takes the place of ``shared`` in the table of ``request``, once a copy is made."""
        for window, held in zip(self.windows, request.held, strict=True):
            window.attach(block)
            window.hold(block)  # until ``end_copies``, as well as ``shared``, which the request needed until now
            held.sent = min(held.sent, index)

    def end_copies(self, blocks: Sequence[int]) -> None:
        """The blocks of copies are given away from now on, where no table has them."""
        for window in self.windows:
            for block in blocks:
                window.drop(block, self._can_be_found(block))

    # -- What the worker is told

    def send(self, request: Request, output: SchedulerOutputBuilder) -> None:
        """Entries of its tables that the worker does not know."""
        for window, held, told in zip(self.windows, request.held, output.windows, strict=True):
            first = max(held.sent, held.first)
            if first < held.end:
                places = tuple(map(window.place, request.block_ids[first : held.end]))
                told.table_updates.append((request.request_id, first, places))
            held.sent = held.end

    def swap_out(self, request: Request, host: Sequence[int]) -> None:
        """The blocks of a request are copied to the host."""
        for window, held in zip(self.windows, request.held, strict=True):
            pairs = zip(request.block_ids[held.first : held.end], host[held.first :], strict=False)
            window.swapped_out += [(window.place(block), there) for block, there in pairs]

    def swap_in(self, request: Request, num_shared: int, host: Sequence[int], output: SchedulerOutputBuilder) -> None:
        """All blocks but the first ``num_shared`` are copied back, as far as it needs their places."""
        for window, held, told in zip(self.windows, request.held, output.windows, strict=True):
            first = max(held.first, num_shared)
            pairs = zip(request.block_ids[first : held.end], host[first:], strict=False)
            told.swapped_in += [(window.place(block), there) for block, there in pairs]

    # -- Inside

    def _at_first(self, window: WindowPool, start: int, num_blocks: int) -> Held:
        first = window.first_seen(start)
        return Held(first, min(num_blocks, first + window.most_places))

    def _can_be_found(self, block: int) -> bool:
        return self.pool.digest(block) is not None
