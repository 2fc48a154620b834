"""BlockPool: which KV blocks are free, which are used, and what the unused ones still hold. Plain Python.

The memory itself belongs to the worker. Block 0 is the sink: padding tokens write there and nothing reads it, so the
pool never gives it to a request.

Prefix caching: a full, computed block is published under a digest of all that its keys and values depend on. A
published block that no table has stays findable until its memory is needed; the least recently used goes first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from compiled_llm.scheduling.state_pool import StatePool
from compiled_llm.scheduling.window_pool import WindowPool

SINK_BLOCK = 0


def root_digest(*facts: str) -> bytes:
    """What the digest of a request's first block chains to: all but tokens that its keys and values depend on."""
    digest = hashlib.sha256()
    for fact in facts:
        data = fact.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the digest of the block before (or the root) and the block's own tokens.

    A key depends on all tokens before it, so equal digests mean equal keys and values. Nobody can guess or forge a
    digest, as would be possible with a faster hash.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """Blocks ``1..num_blocks``, each in one of three states.

    Used: in as many block tables as its reference count says. Cached: in none, but published, so it can be used again
    as it is, or evicted. Empty: neither. ``num_free`` counts the last two: what ``allocate`` can give.

    Attributes:
        windows: what layers that see a window of keys keep of these blocks.
        states: the slots of layers that keep a state, with snapshots under the digests of blocks.
        num_evictions: cached blocks whose memory was given to another request.
        peak_used: most blocks in use at once.
        on_evict: called with a cached block and its digest before it is given to another request.
    """

    on_evict: Callable[[int, bytes], None] | None = None

    def __init__(self, num_blocks: int, windows: Sequence[WindowPool] = (), states: StatePool | None = None) -> None:
        assert num_blocks >= 0
        self.windows, self.states = tuple(windows), states or StatePool(0)
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.peak_used = 0
        # A stack: the block freed last is used first, while it is still in the caches of the CPU.
        self._empty = list(range(num_blocks, SINK_BLOCK, -1))
        self._references = [0] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks to write to; None, which is no error, where fewer are free."""
        if count > len(self._empty) + len(self._cached):
            return None
        blocks = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            for window in self.windows:
                window.forget(block)
            self._references[block] = 1
            blocks.append(block)
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def lookup(self, digest: bytes) -> int | None:
        """The block published under ``digest``, used or cached. ``share`` it before anything else is allocated."""
        return self._block_of.get(digest)

    def share(self, block: int) -> None:
        """One more table has ``block``: a used one, or a cached one found by ``lookup``."""
        if self._references[block] == 0:
            del self._cached[block]  # a KeyError: the block holds nothing
            self.peak_used = max(self.peak_used, self.num_used)
        self._references[block] += 1

    def num_references(self, block: int) -> int:
        """How many tables have ``block``."""
        return self._references[block]

    def digest(self, block: int) -> bytes | None:
        """The digest under which ``block`` is published; None: it is not."""
        return self._digest_of.get(block)

    def publish(self, block: int, digest: bytes) -> int:
        """Make a used block findable. Returns the block to be found: this one, or an earlier one of the same digest."""
        assert self._references[block] > 0, f"block {block} is published but not in use"
        holder = self._block_of.setdefault(digest, block)
        if holder == block:
            assert self._digest_of.get(block, digest) == digest, f"block {block} was published as something else"
            self._digest_of[block] = digest
        return holder

    def free(self, blocks: Sequence[int]) -> None:
        """A table with ``blocks``, in the order of their positions, is gone.

        From the last to the first: so a block is evicted before the one that its digest chains to.
        """
        for block in reversed(blocks):
            assert block != SINK_BLOCK, "the sink was never handed out"
            count = self._references[block] - 1
            assert count >= 0, f"block {block} is not in use"
            self._references[block] = count
            if count == 0:
                if block in self._digest_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def clear_cache(self) -> None:
        """Forget every published block; the used ones stay with their tables."""
        self._empty += reversed(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._digest_of.clear()
        for window in self.windows:
            window.forget_cached()
        self.states.forget_all()

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that the pool agrees with ``tables``, all block tables that there are."""
        named = [0] * (self.num_blocks + 1)
        for table in tables:
            assert len(set(table)) == len(table), "a block is twice in a table"
            for block in table:
                named[block] += 1
        assert named[SINK_BLOCK] == 0, "the sink was handed out"
        assert named == self._references, "reference counts are not the numbers of tables that have the blocks"
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert not empty & cached, "a block is both empty and cached"
        assert SINK_BLOCK not in empty | cached, "the sink may be handed out"
        used = {block for block, count in enumerate(named) if count}
        assert not used & (empty | cached), "a block is both used and free"
        assert len(used) + len(empty) + len(cached) == self.num_blocks, (
            f"{self.num_blocks - len(used) - len(empty) - len(cached)} blocks are lost"
        )
        assert {block: digest for digest, block in self._block_of.items()} == self._digest_of, (
            "a digest finds another's"
        )
        assert cached <= self._digest_of.keys(), "a cached block cannot be found"
        assert not empty & self._digest_of.keys(), "an empty block can be found"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digest_of[block]
        if self.on_evict is not None:
            self.on_evict(block, digest)
        del self._digest_of[block], self._block_of[digest]
        self.states.evict(digest)
        self.num_evictions += 1
        return block
