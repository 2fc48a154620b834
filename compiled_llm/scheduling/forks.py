"""Forks: requests that go on from what another one has computed, on the same KV blocks. Plain Python, copy on write.

A fork is for continuations of one prompt (``n > 1``) and for beams. The new request has the blocks of its parent in
its own table at once, while it still waits; so the parent may go on, or end, at any time. The last of these blocks may
be half full, and both requests will write to it: the first to write to a block that other tables have too gets a copy
of it. So does the first to write to a block that the prefix cache has: the parent has filled it, and it is found under
the tokens that the parent wrote.

A copy is made when the step runs, after all swaps. Until then the blocks that it reads and writes are not given away.

When blocks run out, those of waiting requests are taken back, and these requests compute their tokens themselves.
"""

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.state_pool import StateSlots
from compiled_llm.scheduling.window_places import WindowPlaces


class Forks:
    """The requests that have blocks and do not run.

    Attributes:
        kept: ended requests whose blocks are kept, since they are about to be forked.
        holders: waiting requests that have blocks of their parents.
    """

    def __init__(self, pool: BlockPool, places: WindowPlaces, states: StateSlots, block_size: int) -> None:
        self.pool, self.places, self.states, self.block_size = pool, places, states, block_size
        self.kept: dict[Request, None] = {}
        self.holders: dict[Request, None] = {}
        self._sources: list[int] = []  # of copies that were not made yet, and have one reference more meanwhile
        self._targets: list[int] = []

    def fork(self, parent: Request, child: Request) -> None:
        """``child`` starts with the tokens of ``parent``, and gets the blocks where these are computed, if any are."""
        assert child.status is Status.WAITING
        known = len(parent.prompt_token_ids) + len(parent.output_token_ids)
        count = min(parent.num_computed_tokens, known, child.num_tokens - 1)
        num_blocks = -(-count // self.block_size)
        if not num_blocks or len(parent.block_ids) < num_blocks:  # it was preempted, or its blocks were taken back
            return
        # Where a child starts with tokens after which the parent kept no state, it looks for a snapshot.
        if not self.states.fork(parent, child, count):
            return
        if not self.places.fork(parent, child, count):
            self.states.release(child)
            return
        blocks = parent.block_ids[:num_blocks]
        for block in blocks:
            self.pool.share(block)
        child.block_ids = blocks
        child.num_computed_tokens = count
        if count % self.block_size:
            child.forked_index = num_blocks - 1
            # The parent's next write is to its first token that is not computed, or to a draft that is not verified.
            if (parent.num_computed_tokens - len(parent.draft_token_ids)) // self.block_size == child.forked_index:
                parent.forked_index, parent.next_look = child.forked_index, 0
        self.holders[child] = None

    def keep(self, request: Request) -> None:
        """``request`` has ended, and its blocks stay until ``end_forking``."""
        self.kept[request] = None

    def end_forking(self, request: Request) -> None:
        """``request`` will not be forked any more."""
        request.keeps_blocks = False
        self.states.end_forking(request)
        if request in self.kept:
            self._take_back(request, self.kept)

    def drop(self, request: Request) -> None:
        """A waiting request has ended: it has no blocks any more."""
        if request in self.holders:
            self._take_back(request, self.holders)

    def take_back_one(self, besides: Request | None = None) -> Request | None:
        """Free the blocks of a request that does not run, and return it. None: no other than ``besides`` has any."""
        for group in (self.kept, self.holders):
            for request in reversed(group):
                if request is not besides:
                    self._take_back(request, group)
                    return request
        return None

    def must_copy(self, request: Request, position: int) -> bool:
        """Whether others read the block of ``position``, to which ``request`` will write, or may find it later."""
        index = position // self.block_size
        if index != request.forked_index:
            return False
        block = request.block_ids[index]
        return self.num_tables(block) > 1 or self.pool.digest(block) is not None

    def num_tables(self, block: int) -> int:
        """How many requests have ``block`` in their tables."""
        return self.pool.num_references(block) - self._sources.count(block) - self._targets.count(block)

    def replace(self, request: Request, position: int, block: int) -> tuple[int, int]:
        """Put ``block`` in place of the shared block of ``position``. Returns the two: one to copy, and to where."""
        index = position // self.block_size
        shared = request.block_ids[index]
        request.block_ids[index] = block
        request.num_sent_blocks = min(request.num_sent_blocks, index)
        request.num_published_blocks = min(request.num_published_blocks, index)
        request.next_event = 0
        for held in (shared, block):
            self.pool.share(held)
        self.places.replace(request, index, shared, block)
        self.pool.free([shared])
        self._sources.append(shared)
        self._targets.append(block)
        return shared, block

    def is_copied_to(self, request: Request) -> bool:
        """Whether a block of ``request`` waits to be written by a copy."""
        return not set(self._targets).isdisjoint(request.block_ids)

    def end_copies(self) -> None:
        """The copies of the last step are made, or will be before any later step."""
        if not self._sources and not self._targets:
            return
        self.places.end_copies([*self._sources, *self._targets])
        self.pool.free(self._sources)
        self.pool.free(self._targets)
        self._sources, self._targets = [], []

    def tables(self) -> list[list[int]]:
        """The block tables of requests that do not run, and a table for each block that a copy holds."""
        return [*(request.block_ids for request in (*self.kept, *self.holders)), *self.copied_tables()]

    def copied_tables(self) -> list[list[int]]:
        """A table for each block that copies hold."""
        return [[block] for block in (*self._sources, *self._targets)]

    def _take_back(self, request: Request, group: dict[Request, None]) -> None:
        del group[request]
        self.places.release(request)
        self.states.release(request)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.forked_index = -1
        if request.status is Status.WAITING:
            request.num_computed_tokens = 0
