"""Forks: requests that go on from what another one has computed, on the same KV blocks. Plain Python, copy on write.

A fork is for continuations of one prompt (``n > 1``) and for beams. The new request names the blocks of its parent in its
own table at once, while it still waits; so the parent may go on, or end, whenever it likes. The last of these blocks may
be half full, and both will write to it: whoever writes first to a block that others name too takes a copy of it. So does
who writes to one that the prefix cache has: the parent has filled it by then, and it is found as what the parent wrote.

What waiting requests hold is a favour: when blocks run out it is taken back, and they compute their tokens themselves.
"""

from compiled_llm.block_pool import BlockPool
from compiled_llm.request import Request, Status


class Forks:
    """Who holds blocks without running.

    Attributes:
        kept: ended requests whose blocks are kept, since they are about to be forked.
        holders: waiting requests that name blocks of their parents.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.kept: dict[Request, None] = {}
        self.holders: dict[Request, None] = {}

    def fork(self, parent: Request, child: Request) -> None:
        """``child``, which begins with the tokens of ``parent``, gets what that has computed of them, if it has blocks."""
        assert child.status is Status.WAITING
        known = len(parent.prompt_token_ids) + len(parent.output_token_ids)
        count = min(parent.num_computed_tokens, known, child.num_tokens - 1)
        num_blocks = -(-count // self.block_size)
        if not num_blocks or len(parent.block_ids) < num_blocks:  # it was preempted, or its blocks were taken back
            return
        child.block_ids = parent.block_ids[:num_blocks]
        for block in child.block_ids:
            self.pool.share(block)
        child.num_computed_tokens = count
        if count % self.block_size:
            child.forked_index = num_blocks - 1
            if parent.num_computed_tokens // self.block_size == child.forked_index:  # where it writes next
                parent.forked_index = child.forked_index
        self.holders[child] = None

    def keep(self, request: Request) -> None:
        """``request`` has ended, and its blocks stay until it is let go."""
        self.kept[request] = None

    def let_go(self, request: Request) -> None:
        """``request`` will not be forked any more."""
        request.keeps_blocks = False
        if request in self.kept:
            self._take_back(request, self.kept)

    def drop(self, request: Request) -> None:
        """A waiting request is ended: it holds nothing any more."""
        if request in self.holders:
            self._take_back(request, self.holders)

    def take_back_one(self, besides: Request | None = None) -> bool:
        """Blocks have run out: free those of one that does not run. False: nobody but ``besides`` holds any."""
        for group in (self.kept, self.holders):
            for request in reversed(group):
                if request is not besides:
                    self._take_back(request, group)
                    return True
        return False

    def must_copy(self, request: Request, position: int) -> bool:
        """Whether the block of ``position``, which ``request`` is about to write to, is one that others read or will."""
        index = position // self.block_size
        if index != request.forked_index:
            return False
        block = request.block_ids[index]
        return self.pool.num_references(block) > 1 or self.pool.digest(block) is not None

    def replace(self, request: Request, position: int, block: int) -> tuple[int, int]:
        """``request`` has ``block`` in place of the shared one of ``position``. Returns what is to be copied, and where."""
        index = position // self.block_size
        shared = request.block_ids[index]
        request.block_ids[index] = block
        request.num_sent_blocks = min(request.num_sent_blocks, index)
        request.num_published_blocks = min(request.num_published_blocks, index)
        self.pool.free([shared])
        return shared, block

    def tables(self) -> list[list[int]]:
        """The blocks of those that do not run."""
        return [request.block_ids for request in (*self.kept, *self.holders)]

    def _take_back(self, request: Request, group: dict[Request, None]) -> None:
        del group[request]
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.forked_index = -1
        if request.status is Status.WAITING:
            request.num_computed_tokens = 0
