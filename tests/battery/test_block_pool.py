"""B1: BlockPool and PrefixCache against a naive model of lists and dicts that shares no code with them.

Tokens are 0 and 1, so prefixes collide all the time. The model names a block by the very tokens that it stands for,
all those from the beginning on, where the cache has digests.
"""

import hashlib
import random
from collections import Counter

import pytest

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.request import Request
from tests.battery import sized
from tests.fake_engine import cache_over, make_request

NUM_BLOCKS = 20
MOST_BLOCKS = 6  # of a request
SALTS = ["", "salt"]
FACTS = ("model", "dtype")


class Named:
    """What the model knows of a request. Its texts name blocks: salt, and one character for each token."""

    def __init__(self, request: Request, block_size: int) -> None:
        self.request = request
        self.size = block_size
        self.text = "".join(map(str, request.prompt_token_ids))
        self.num_computed = 0
        self.num_published = 0
        self.table: list[int] = []
        self.to_publish: list[int] = []  # what the steps in flight will have computed

    def name(self, index: int) -> str:
        """Of the full block at ``index``."""
        assert len(self.text) >= (index + 1) * self.size
        return self.request.cache_salt + "|" + self.text[: (index + 1) * self.size]


def digest_of(name: str, block_size: int) -> bytes:
    """As documented: SHA-256 of the parent's digest and the tokens, 8 bytes each; the root from facts with lengths."""
    salt, text = name.split("|")
    digest = hashlib.sha256()
    for fact in (*FACTS, salt):
        digest.update(len(fact).to_bytes(8, "little") + fact.encode())
    for start in range(0, len(text), block_size):
        parent = digest.digest()
        digest = hashlib.sha256(parent)
        for character in text[start : start + block_size]:
            digest.update(int(character).to_bytes(8, "little"))
    return digest.digest()


class World:
    """The pool and the cache, and beside them the model; each operation is done to both, and the answers compared.

    A block is evicted before the one that it continues. With ``late_results`` it is not always: a request that shares
    a block from a step in flight names a parent that somebody else may publish elsewhere, and may end before it
    learns of that. What such a block holds cannot be found any more, and is evicted in its turn.

    Attributes:
        published: name -> block. lru: cached blocks that nobody uses, least recently used first.
        promised: name -> (who fills it, index in its table). held_back: (who waits, for which name), in order.
    """

    def __init__(self, block_size: int, counts: Counter[str], late_results: bool, num_blocks: int = NUM_BLOCKS) -> None:
        self.size = block_size
        self.late_results = late_results
        self.counts = counts
        self.pool = BlockPool(num_blocks)
        self.cache = cache_over(self.pool, block_size, facts=FACTS)
        self.num_blocks = num_blocks
        self.running: list[Named] = []
        self.loose: list[Named] = []  # waiting
        self.held_back: list[tuple[Named, str]] = []
        self.published: dict[str, int] = {}
        self.lru: list[int] = []
        self.promised: dict[str, tuple[Named, int]] = {}
        self.num_made = self.num_evictions = 0
        self._digests: dict[str, bytes] = {}

    # -- Operations

    def add(self, text: str, salt: str) -> None:
        tokens = [int(character) for character in text]
        self.loose.append(Named(make_request(f"{self.num_made}", tokens, 1000, cache_salt=salt), self.size))
        self.num_made += 1

    def admit(self, named: Named, *, shares: bool = True) -> None:
        """Take a waiting request in, if there is room; or hold it back. ``shares`` off: it brings its own blocks."""
        request = named.request
        expected, awaited = self._find(named)
        assert self.cache.find(request) == (expected, None if awaited is None else self._digest(awaited))
        self.counts["lookups"] += 1
        if awaited is not None and shares:
            self.loose.remove(named)
            self.held_back.append((named, awaited))
            self.cache.hold_back(request, self._digest(awaited))
            self.counts["held back"] += 1
            return
        shared = expected if shares else []
        wanted = -(-len(named.text) // self.size) - len(shared)
        if wanted > self._num_free() - sum(block in self.lru for block in shared):
            self.counts["no room"] += 1
            return
        self.loose.remove(named)
        for block in shared:
            if block in self.lru:
                self.lru.remove(block)
            self.pool.share(block)
        self.counts["hits"] += len(shared)
        findable = set(self.published.values())
        named.table = shared + self._allocate(wanted, also_used=shared)
        named.num_published = next((i for i, block in enumerate(shared) if block not in findable), len(shared))
        named.num_computed = len(shared) * self.size
        self.running.append(named)
        request.block_ids = list(named.table)
        request.num_published_blocks = named.num_published
        request.num_computed_tokens = named.num_computed
        for index in range(named.num_published, len(named.text) // self.size):
            name = named.name(index)
            if name not in self.published and name not in self.promised:
                self.promised[name] = (named, index)
                self.counts["promises"] += 1
        self.cache.add_pending(request)

    def compute(self, named: Named, count: int) -> None:
        """A step fills the next ``count`` tokens, or as many as are known."""
        start = named.num_computed
        named.num_computed = min(len(named.text), start + count)
        named.to_publish.append(named.num_computed)
        names = [named.name(index) for index in range(start // self.size, named.num_computed // self.size)]
        named.request.num_computed_tokens = named.num_computed
        promised = [name for name in names if name in self.promised and self.promised[name][0] is named]
        self._check_woken(self.cache.take_waiting(named.request, start), promised, names)

    def publish(self, named: Named) -> None:
        """The results of the oldest step in flight are in."""
        num_tokens = named.to_publish.pop(0)
        names = []
        for index in range(named.num_published, num_tokens // self.size):
            name, block = named.name(index), named.table[index]
            names.append(name)
            self.promised.pop(name, None)
            holder = self.published.setdefault(name, block)
            if holder != block:
                self.counts["duplicates"] += 1
                if holder in self.lru:
                    self.lru.remove(holder)
                named.table[index] = holder
            named.num_published = index + 1
        self._check_woken(self.cache.publish(named.request, num_tokens), names)

    def extend(self, named: Named, token: str) -> None:
        """A token is sampled; a request that is full needs one more block for it."""
        if len(named.text) == len(named.table) * self.size:
            if self._num_free() == 0:
                return
            block = self._allocate(1)
            named.table += block
            named.request.block_ids += block
        named.text += token
        named.request.output_token_ids.append(int(token))
        named.request.num_tokens += 1

    def release(self, named: Named, *, comes_back: bool) -> None:
        """Finished, or preempted; what is in flight is not published."""
        names = [name for name, (owner, _) in self.promised.items() if owner is named]
        for name in names:
            del self.promised[name]
        self._check_woken(self.cache.remove_pending(named.request), names)
        self.running.remove(named)
        table, named.table = named.table, []
        findable = set(self.published.values())
        still_used = {block for other in self.running for block in other.table}
        self.lru += [block for block in reversed(table) if block in findable and block not in still_used]
        self.pool.free(named.request.block_ids)
        named.request.block_ids = []
        named.num_computed = named.num_published = 0
        named.request.num_computed_tokens = named.request.num_published_blocks = 0
        named.to_publish = []
        if comes_back:
            self.loose.append(named)

    def forget(self, index: int) -> None:
        named, _ = self.held_back.pop(index)
        self.cache.forget(named.request)

    # -- The model

    def _find(self, named: Named) -> tuple[list[int], str | None]:
        most = (len(named.text) - 1) // self.size
        blocks: list[int] = []
        for index in range(most):
            name = named.name(index)
            if name in self.published:
                blocks.append(self.published[name])
            elif name in self.promised and self._is_filled(name):
                owner, place = self.promised[name]
                blocks.append(owner.table[place])
            elif name in self.promised:
                last = name
                for later in map(named.name, range(index, most)):
                    if later not in self.promised or self._is_filled(later):
                        break
                    last = later
                return blocks, last
            else:
                break
        return blocks, None

    def _is_filled(self, name: str) -> bool:
        owner, place = self.promised[name]
        return owner.num_computed >= (place + 1) * self.size

    def _check_woken(self, woken: list[Request], names: list[str], maybe: list[str] = ()) -> None:
        """Those that waited for ``names``. Maybe who waited for what another promised too: it will wait again."""
        must = [named.request for named, name in self.held_back if name in names]
        may = [named.request for named, name in self.held_back if name in [*names, *maybe]]
        assert set(must) <= set(woken) <= set(may)
        assert len(woken) == len(set(woken))
        self.loose += [named for named, _ in self.held_back if named.request in woken]
        self.held_back = [pair for pair in self.held_back if pair[0].request not in woken]
        self.counts["woken"] += len(woken)

    def _used(self) -> Counter[int]:
        return Counter(block for named in self.running for block in named.table)

    def _num_free(self) -> int:
        return self.num_blocks - len(self._used())

    def _allocate(self, count: int, also_used: list[int] = ()) -> list[int]:
        """Empty blocks as long as there are any; then those of the cache, by the order of their last use."""
        used = {*self._used(), *also_used}
        empty = set(range(1, self.num_blocks + 1)) - used - set(self.lru)
        blocks = self.pool.allocate(count)
        assert blocks is not None
        num_empty = min(count, len(empty))
        evicted, self.lru = self.lru[: count - num_empty], self.lru[count - num_empty :]
        assert len(set(blocks[:num_empty])) == num_empty
        assert set(blocks[:num_empty]) <= empty
        assert blocks[num_empty:] == evicted, "not the least recently used"
        for block in evicted:
            name = next(name for name, holder in self.published.items() if holder == block)
            del self.published[name]
            orphans = sum(other.startswith(name) for other in self.published)
            assert self.late_results or not orphans, "a block is evicted before one that continues it"
            self.counts["orphans"] += orphans
        self.num_evictions += len(evicted)
        self.counts["evictions"] += len(evicted)
        return blocks

    # -- Comparing

    def check(self) -> None:
        used = self._used()
        for block in range(1, self.num_blocks + 1):
            assert self.pool.num_references(block) == used[block]
        for name, block in self.published.items():
            assert self.pool.lookup(self._digest(name)) == block
            assert self.pool.digest(block) == self._digest(name)
        assert set(self.lru) == set(self.published.values()) - set(used), "the model is wrong"
        assert self.pool.num_cached == len(self.lru)
        assert self.pool.num_free == self.num_blocks - len(used)
        for named in self.running:
            assert named.request.block_ids == named.table
            assert named.request.num_published_blocks == named.num_published
            for index, block in enumerate(named.table[: named.num_published]):
                assert self.pool.digest(block) == self._digest(named.name(index))
        assert self.cache.num_held_back == len(self.held_back)
        assert self.pool.num_evictions == self.num_evictions

    def check_invariants(self) -> None:
        self.pool.check_invariants([named.table for named in self.running])
        self.cache.check_invariants([named.request for named in self.running])
        evicted = [name for name in self._digests if name not in self.published]
        assert all(self.pool.lookup(self._digests[name]) is None for name in evicted), "an evicted block is found"

    def finish(self) -> None:
        """End all; nothing may be left in use."""
        while self.held_back:
            self.forget(0)
        while self.running:
            self.release(self.running[0], comes_back=False)
        self.check()
        self.check_invariants()
        assert self.pool.num_used == 0

    def _digest(self, name: str) -> bytes:
        if name not in self._digests:
            self._digests[name] = digest_of(name, self.size)
        return self._digests[name]


def random_text(rng: random.Random, block_size: int, words: list[str]) -> str:
    """Up to ``MOST_BLOCKS`` blocks. Words of a block each, since tokens at random would never make the same block."""
    text = "".join(rng.choice(words) for _ in range(MOST_BLOCKS))
    if rng.random() < 0.3:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice("01") + text[place + 1 :]
    return text[: rng.randint(1, len(text))]


def random_operation(world: World, rng: random.Random, words: list[str]) -> None:
    draw = rng.random()
    if draw < 0.15 and len(world.loose) < 8:
        world.add(random_text(rng, world.size, words), rng.choice(SALTS))
    elif draw < 0.40 and world.loose:
        # Blocks of its own beside those that are promised has who is swapped in.
        world.admit(rng.choice(world.loose), shares=not world.late_results or rng.random() < 0.9)
    elif draw < 0.42 and world.held_back:
        world.forget(rng.randrange(len(world.held_back)))
    elif world.running:
        named = rng.choice(world.running)
        if draw < 0.60:
            world.compute(named, rng.randint(1, 3 * world.size))
            if world.loose and rng.random() < 0.5:  # another one joins the same step
                world.admit(world.loose[-1])
        elif draw < 0.80:
            if named.to_publish:
                world.publish(named)
        elif draw < 0.90 and len(named.text) < MOST_BLOCKS * world.size:
            # As a decode does: what is known is computed, and the next token follows.
            world.compute(named, len(named.text))
            world.extend(named, rng.choice("01"))
        else:
            world.release(named, comes_back=rng.random() < 0.3)
    if not world.late_results:
        for named in world.running:
            while named.to_publish:
                world.publish(named)


@sized("num_operations", 4_000, 100_000)
@pytest.mark.parametrize("late_results", [False, True], ids=["in turns", "overlapping"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_random_operations(
    block_size: int, late_results: bool, num_operations: int, battery_counts: Counter[str]
) -> None:
    rng = random.Random(block_size)
    words = ["0", "1"] if block_size == 1 else ["01" * (block_size // 2), "0" * block_size]
    world = World(block_size, battery_counts, late_results)
    for n in range(num_operations):
        random_operation(world, rng, words)
        world.check()
        if n % 100 == 0:
            world.check_invariants()
    world.finish()
    battery_counts["operations"] += num_operations
    for what in ("hits", "evictions", "promises", "held back", "woken", "duplicates", "no room"):
        assert battery_counts[what] > 0, what
    assert battery_counts["orphans"] <= battery_counts["evictions"] / 20
