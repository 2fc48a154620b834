"""WindowPlaces: the places that requests need in layers that see a window of keys. Plain Python.

What ``RunningSet`` and ``Forks`` do with blocks is done here with the places of these blocks.
"""

from collections import Counter
from collections.abc import Sequence

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Held, Request
from compiled_llm.scheduling.window_pool import WindowPool


class WindowPlaces:
    """Gives requests the places that they need next, in each ``WindowPool``, and drops those that no later query sees.

    It does nothing where there is no window.

    A request that lacks one token has a place for the block where it goes, if it has that block.
    """

    def __init__(self, pool: BlockPool) -> None:
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

    def schedule_sinks(self, request: Request, place: int, output: SchedulerOutputBuilder) -> None:
        """Let the step compute the old sink tokens of ``request`` again. ``place``: of the request in the step."""
        assert self.stream is not None
        count = self.stream.sink_tokens
        request.num_dropped_tokens = self.stream.num_dropped(request.num_computed_tokens)
        output.moved_sinks.append((place, request.num_dropped_tokens))
        output.token_ids.extend(request.tokens(0, count))
        output.feedback.append(-1)
        output.request_ids.append(request.request_id)
        output.num_computed_tokens.append(0)
        output.num_scheduled_tokens.append(count)
        output.num_samples.append(0)

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
