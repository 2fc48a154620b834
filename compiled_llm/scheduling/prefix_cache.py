"""PrefixCache: which blocks already hold the first tokens of a request, or soon will. Plain Python.

A request can use a block that another one computed in two ways. The block is published, after the step that filled it.
Or it is pending: a running request is going to fill it. A pending block may be read in the very step that fills it,
since every layer writes the step's keys before it attends to any. A request that needs a pending block which no
step fills yet is held back, instead of computing that block a second time.
"""

import itertools

from compiled_llm.scheduling.block_pool import BlockPool, block_digest, root_digest
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.state_pool import StateSlots
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.scheduling.window_places import WindowPlaces


class PrefixCache:
    """Finds and publishes blocks by their digests. Disabled, it finds nothing and keeps nothing.

    Attributes:
        tiers: where blocks go from here; None: nowhere.
        num_queried_tokens, num_hit_tokens: tokens of requests when they were first admitted, and those found.
    """

    def __init__(
        self,
        pool: BlockPool,
        places: WindowPlaces,
        states: StateSlots,
        block_size: int,
        *,
        enabled: bool = True,
        facts: tuple[str, ...] = (),
    ) -> None:
        """``facts``: all that keys and values depend on besides tokens, such as the model and the cache's dtype."""
        self.pool, self.places, self.states = pool, places, states
        self.block_size, self.enabled = block_size, enabled
        self.num_queried_tokens = self.num_hit_tokens = 0
        self.tiers: KVTiers | None = None
        self._facts = facts
        self._pending: dict[bytes, tuple[Request, int]] = {}  # digest -> the request that fills it, the index there
        self._held_back: dict[bytes, list[Request]] = {}  # by the digest that they wait for
        self._awaited: dict[Request, bytes] = {}

    def find(self, request: Request) -> tuple[list[int], bytes | None]:
        """Blocks that hold the first tokens of ``request``, and the digest that it should wait for to find more.

        Never all of its tokens: the last one has to be computed for its logits. Nor more than its
        ``most_cached_tokens``: the others are computed for log-probabilities.
        """
        if not self.enabled:
            return [], None
        most = self._most_found(request)
        digests = self._digests(request, most)
        blocks: list[int] = []
        for index in range(most):
            block = self.pool.lookup(digests[index])
            if block is None:
                pending = self._pending.get(digests[index])
                if pending is None:
                    break
                other, place = pending
                if not self._is_readable(other, place):
                    if other.rank[0] > request.rank[0]:
                        break  # no request waits for a less urgent one
                    return self._usable(request, blocks), self._last_pending(digests[index:most])
                block = other.block_ids[place]
            blocks.append(block)
        return self._usable(request, blocks), None

    def digests_below(self, request: Request, num_found: int) -> list[bytes]:
        """Of the blocks after the first ``num_found``, as far as ``find`` may find any: they may be in lower tiers."""
        most = self._most_found(request)
        return self._digests(request, most)[num_found:most]

    def on_device(self, request: Request) -> list[int]:
        """Blocks on the device that hold its first tokens, whether or not all that its next token needs is there."""
        found = map(self.pool.lookup, self.digests_below(request, 0))
        return [block for block in itertools.takewhile(lambda block: block is not None, found) if block]

    def _most_found(self, request: Request) -> int:
        most = (request.num_tokens - 1) // self.block_size
        scored = request.most_cached_tokens
        return most if scored is None else min(most, scored // self.block_size)

    def add_pending(self, request: Request) -> None:
        """``request`` has blocks for all its tokens: blocks that are neither published nor pending become pending.

        A block that is pending for a less urgent request, and that no step fills yet, is pending for ``request`` then.
        """
        if not self.enabled:
            return
        count = request.num_tokens // self.block_size
        digests = self._digests(request, count)
        for index in range(request.num_published_blocks, count):
            other, place = self._pending.get(digests[index], (None, 0))
            if other is not None and (other.rank[0] <= request.rank[0] or self._is_filling(other, place)):
                continue
            if self.pool.lookup(digests[index]) is None:
                self._pending[digests[index]] = (request, index)

    def publish(self, request: Request, num_tokens: int) -> list[Request]:
        """The first ``num_tokens`` tokens of a running request are computed: others may find the full blocks.

        Returns the requests that were held back for one of them, which was pending for another request.
        """
        count = num_tokens // self.block_size
        if not self.enabled or count <= request.num_published_blocks:
            return []
        resumed: list[Request] = []
        digests = self._digests(request, count)
        for index in range(request.num_published_blocks, count):
            block = request.block_ids[index]
            held = self.places.holding(request, index) if self.places.windows else []
            earlier = self.pool.lookup(digests[index]) if held else None
            if earlier is not None and not all(window.can_exchange(block, earlier) for window, _ in held):
                count = index  # requests go on with both: this block and those after it are published later
                break
            holder = self.pool.publish(block, digests[index])
            if holder != block:
                # Computed twice. With the earlier copy in the table, a block's parent is in use as long as it is.
                for window, own in held:
                    window.exchange(block, holder)
                    own.sent = min(own.sent, index)
                self.pool.share(holder)
                self.pool.free([block])
                request.block_ids[index] = holder
                request.num_sent_blocks, request.next_look = min(request.num_sent_blocks, index), 0
            elif self.tiers is not None:
                self.tiers.publish(block, digests[index])
            self._pending.pop(digests[index], None)
            resumed += self._take_held_back(digests[index])
        request.num_published_blocks = count
        if request.state.snapshots:
            self.states.publish(request, digests[:count])
        return resumed

    def remove_pending(self, request: Request) -> list[Request]:
        """``request`` is about to lose its blocks: none stays pending. Returns the requests held back for them."""
        resumed: list[Request] = []
        for digest in request.block_digests[request.num_published_blocks :]:
            if self._pending.get(digest, (None,))[0] is request:
                del self._pending[digest]
                resumed += self._take_held_back(digest)
        return resumed

    # -- Requests held back

    @property
    def num_held_back(self) -> int:
        return len(self._awaited)

    def held_back(self) -> list[Request]:
        return list(self._awaited)

    def holds_back(self, request: Request) -> bool:
        return request in self._awaited

    def hold_back(self, request: Request, digest: bytes) -> None:
        """``request`` waits until a step fills the block of ``digest``, or until that is pending no more."""
        self._awaited[request] = digest
        self._held_back.setdefault(digest, []).append(request)

    def forget(self, request: Request) -> None:
        """A request that is held back has ended."""
        digest = self._awaited.pop(request)
        self._held_back[digest].remove(request)
        if not self._held_back[digest]:
            del self._held_back[digest]

    def awaited_ends(self, request: Request, start: int) -> list[int]:
        """Where snapshots are waited for: ends of blocks, in tokens, that a step fills from token ``start`` on."""
        if not self._held_back:
            return []
        first, end = start // self.block_size, request.num_computed_tokens // self.block_size
        return [
            (index + 1) * self.block_size
            for index, digest in enumerate(request.block_digests[first:end], first)
            if digest in self._held_back
        ]

    def take_waiting(self, request: Request, start: int) -> list[Request]:
        """A step fills the blocks of ``request`` from token ``start`` on. Returns the requests held back for them."""
        if not self._held_back or self.states.are_used:
            return []
        first, end = start // self.block_size, request.num_computed_tokens // self.block_size
        return [other for digest in request.block_digests[first:end] for other in self._take_held_back(digest)]

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that blocks are pending for running requests, and that requests are held back for pending blocks."""
        owners = set(running)
        for digest, (request, index) in self._pending.items():
            assert request in owners, "a block is pending for a request that does not run"
            assert request.num_published_blocks <= index < len(request.block_ids)
            assert request.block_digests[index] == digest
        for request, digest in self._awaited.items():
            assert request in self._held_back[digest]
            assert digest in self._pending, f"{request.request_id} waits for a block that is not pending"
            assert not self._is_readable(*self._pending[digest]), (
                f"{request.request_id} waits for a block that is there"
            )
        assert sum(map(len, self._held_back.values())) == len(self._awaited)

    # -- Inside

    def _usable(self, request: Request, blocks: list[int]) -> list[int]:
        """Of the first blocks of a request, as many as hold what its next token needs.

        That is what its query sees in layers with a window, and a snapshot of layers with a state.
        """
        count = len(blocks)
        while count:  # a hit that is shorter for one kind of layer may be none for another
            shorter = self.places.longest_hit(blocks[:count]) if self.places.windows else count
            shorter = self.states.longest_hit(request.block_digests, shorter)
            if shorter == count:
                break
            count = shorter
        if count < len(blocks):
            request.state.wanted = len(blocks) * self.block_size
        return blocks[:count]

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The digests of its blocks, at least the first ``count``, which are full of known tokens."""
        digests, size = request.block_digests, self.block_size
        if len(digests) < count:
            own = [request.adapter] if request.adapter else []
            parent = digests[-1] if digests else root_digest(*self._facts, request.cache_salt, *own)
            for index in range(len(digests), count):
                parent = block_digest(parent, request.tokens(index * size, (index + 1) * size))
                digests.append(parent)
        return digests

    def _is_filling(self, request: Request, index: int) -> bool:
        return request.num_computed_tokens >= (index + 1) * self.block_size

    def _is_readable(self, request: Request, index: int) -> bool:
        """Whether a step that is scheduled now may read a pending block, since it or one before it fills that.

        A snapshot at its end can be read by a later step alone, when it is published.
        """
        return not self.states.are_used and self._is_filling(request, index)

    def _last_pending(self, digests: list[bytes]) -> bytes:
        """The last of ``digests`` before one that is not pending; the first is."""
        last = digests[0]
        for digest in digests:
            if digest not in self._pending or self._is_readable(*self._pending[digest]):
                break
            last = digest
        return last

    def _take_held_back(self, digest: bytes) -> list[Request]:
        requests = self._held_back.pop(digest, [])
        for request in requests:
            del self._awaited[request]
        return requests
