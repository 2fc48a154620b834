"""PrefixCache: which blocks already hold the beginning of a request's tokens, or soon will. Plain Python.

A block can be used by a request that did not compute it in two ways. It was published, after the step that filled it.
Or it is promised: a running request is about to fill it. A promised block may be read in the very step that fills it,
since every layer writes the step's keys before anything attends to them. A request that needs a promised block which no
step fills yet is held back, instead of computing the same a second time.
"""

from compiled_llm.scheduling.block_pool import BlockPool, block_digest, root_digest
from compiled_llm.scheduling.request import Request


class PrefixCache:
    """Finds, promises and publishes blocks by their digests. Switched off, it finds nothing and keeps nothing.

    Attributes:
        num_queried_tokens, num_hit_tokens: tokens of requests when they were first admitted, and those found.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True, facts: tuple[str, ...] = ()) -> None:
        """``facts``: all that keys and values depend on besides tokens, such as the model and the cache's dtype."""
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._facts = facts
        self._promises: dict[bytes, tuple[Request, int]] = {}  # digest -> who fills it, and the block's index there
        self._held_back: dict[bytes, list[Request]] = {}  # by the digest that they wait for
        self._awaited: dict[Request, bytes] = {}

    def find(self, request: Request) -> tuple[list[int], bytes | None]:
        """Blocks that hold the first tokens of ``request``, and the digest that it should wait for to find more.

        Never all of its tokens: the last one has to be computed for its logits.
        """
        if not self.enabled or not request.reads_cache:
            return [], None
        most = (request.num_tokens - 1) // self.block_size
        digests = self._digests(request, most)
        blocks: list[int] = []
        for index in range(most):
            block = self.pool.lookup(digests[index])
            if block is None:
                promise = self._promises.get(digests[index])
                if promise is None:
                    break
                other, place = promise
                if not self._is_filling(other, place):
                    if other.rank[0] > request.rank[0]:
                        break  # nobody waits for the less urgent
                    return blocks, self._last_promised(digests[index:most])
                block = other.block_ids[place]
            blocks.append(block)
        return blocks, None

    def promise(self, request: Request) -> None:
        """``request`` has blocks for all its tokens, and will fill those that nobody has or promised.

        Where somebody less urgent promised one, and no step fills it yet, the promise passes to ``request``.
        """
        if not self.enabled:
            return
        count = request.num_tokens // self.block_size
        digests = self._digests(request, count)
        for index in range(request.num_published_blocks, count):
            other, place = self._promises.get(digests[index], (None, 0))
            if other is not None and (other.rank[0] <= request.rank[0] or self._is_filling(other, place)):
                continue
            if self.pool.lookup(digests[index]) is None:
                self._promises[digests[index]] = (request, index)

    def publish(self, request: Request, num_tokens: int) -> list[Request]:
        """The first ``num_tokens`` tokens of a running request are computed: others may find the full blocks.

        Returns who waited for one of them, because somebody else had promised it.
        """
        count = num_tokens // self.block_size
        if not self.enabled or count <= request.num_published_blocks:
            return []
        let_go: list[Request] = []
        digests = self._digests(request, count)
        for index in range(request.num_published_blocks, count):
            block = request.block_ids[index]
            holder = self.pool.publish(block, digests[index])
            if holder != block:
                # Computed twice. With the earlier copy in the table, a block's parent is in use as long as it is.
                self.pool.share(holder)
                self.pool.free([block])
                request.block_ids[index] = holder
                request.num_sent_blocks = min(request.num_sent_blocks, index)
            self._promises.pop(digests[index], None)
            let_go += self._let_go(digests[index])
        request.num_published_blocks = count
        return let_go

    def withdraw(self, request: Request) -> list[Request]:
        """``request`` is about to lose its blocks: its promises are void. Returns who waited for them."""
        let_go: list[Request] = []
        for digest in request.block_digests[request.num_published_blocks :]:
            if self._promises.get(digest, (None,))[0] is request:
                del self._promises[digest]
                let_go += self._let_go(digest)
        return let_go

    # -- Requests held back

    @property
    def num_held_back(self) -> int:
        return len(self._awaited)

    def held_back(self) -> list[Request]:
        return list(self._awaited)

    def holds_back(self, request: Request) -> bool:
        return request in self._awaited

    def hold_back(self, request: Request, digest: bytes) -> None:
        """``request`` waits until a step fills the block of ``digest``, or until that is promised no more."""
        self._awaited[request] = digest
        self._held_back.setdefault(digest, []).append(request)

    def forget(self, request: Request) -> None:
        """A request held back is finished."""
        digest = self._awaited.pop(request)
        self._held_back[digest].remove(request)
        if not self._held_back[digest]:
            del self._held_back[digest]

    def filled(self, request: Request, start: int) -> list[Request]:
        """A step fills the blocks of ``request`` from token ``start`` on. Returns who waited for one of them."""
        if not self._held_back:
            return []
        first, end = start // self.block_size, request.num_computed_tokens // self.block_size
        return [other for digest in request.block_digests[first:end] for other in self._let_go(digest)]

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that promises are those of running requests, and that who waits does so for a promise."""
        owners = set(running)
        for digest, (request, index) in self._promises.items():
            assert request in owners, "a promise of a request that does not run"
            assert request.num_published_blocks <= index < len(request.block_ids)
            assert request.block_digests[index] == digest
        for request, digest in self._awaited.items():
            assert request in self._held_back[digest]
            assert digest in self._promises, f"{request.request_id} waits for a block that nobody promised"
            assert not self._is_filling(*self._promises[digest]), f"{request.request_id} waits for what is there"
        assert sum(map(len, self._held_back.values())) == len(self._awaited)

    # -- Inside

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The digests of its blocks, at least the first ``count``, which are full of known tokens."""
        digests, size = request.block_digests, self.block_size
        if len(digests) < count:
            parent = digests[-1] if digests else root_digest(*self._facts, request.cache_salt)
            for index in range(len(digests), count):
                parent = block_digest(parent, request.tokens(index * size, (index + 1) * size))
                digests.append(parent)
        return digests

    def _is_filling(self, request: Request, index: int) -> bool:
        return request.num_computed_tokens >= (index + 1) * self.block_size

    def _last_promised(self, digests: list[bytes]) -> bytes:
        """The last of ``digests`` before one that is not promised; the first is."""
        last = digests[0]
        for digest in digests:
            if digest not in self._promises or self._is_filling(*self._promises[digest]):
                break
            last = digest
        return last

    def _let_go(self, digest: bytes) -> list[Request]:
        requests = self._held_back.pop(digest, [])
        for request in requests:
            del self._awaited[request]
        return requests
