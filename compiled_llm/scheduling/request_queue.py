"""RequestQueue: waiting requests, ordered by rank. Plain Python."""

import heapq
import itertools
from collections.abc import Collection, Iterator

from compiled_llm.scheduling.request import Request


class RequestQueue:
    """Heaps by ``Request.rank``, one for each power of two of the number of tokens that requests lack.

    Adding and removing cost O(log n), so 10,000 waiting requests do not slow a step down. The first of the requests
    that are short enough for some room is found without a look at the others.

    A request that is removed from the middle stays in its heap as a dead entry until it comes to the top.

    While ``serve_only`` names some requests, the others are set aside: they wait, but ``first`` does not find them.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[tuple[int, ...], int, Request]]] = {}  # by the bit length of what is lacking
        self._entry_of: dict[Request, int] = {}  # the entry that counts; others of the same request are dead
        self._entries = itertools.count()
        self._served: Collection[Request] | None = None  # None: all
        self._aside: dict[Request, None] = {}  # in no heap

    def __len__(self) -> int:
        return len(self._entry_of) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order."""
        return itertools.chain(self._entry_of, self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry_of or request in self._aside

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def serve_only(self, requests: Collection[Request] | None) -> None:
        """From now on ``first`` finds none but ``requests``, wherever they are now; None: all that wait."""
        self._served = requests
        moved = [request for request in (self._aside if requests is None else requests) if request in self._aside]
        moved += [request for request in self._entry_of if not self._is_served(request)]
        for request in moved:
            self.remove(request)
        for request in moved:
            self.add(request)

    def add(self, request: Request) -> None:
        assert request not in self, f"request {request.request_id} is queued already"
        if not self._is_served(request):
            self._aside[request] = None
            return
        self._entry_of[request] = entry = next(self._entries)
        heap = self._heaps.setdefault(_lacking(request).bit_length(), [])
        heapq.heappush(heap, (request.rank, entry, request))

    def first(self, most_tokens: int | None = None) -> Request | None:
        """The request to be served first, or None; if ``most_tokens`` is given, among those that lack no more.

        In the heap that ``most_tokens`` belongs to, only the first request is compared with it.
        """
        best = None
        for length, heap in self._heaps.items():
            if most_tokens is not None and length > most_tokens.bit_length():
                continue
            while heap and self._entry_of.get(heap[0][2]) != heap[0][1]:
                heapq.heappop(heap)
            if heap:
                request = heap[0][2]
                fits = most_tokens is None or _lacking(request) <= most_tokens
                if fits and (best is None or request.rank < best.rank):
                    best = request
        return best

    def remove(self, request: Request) -> None:
        if request in self._aside:
            del self._aside[request]
            return
        del self._entry_of[request]
        if sum(map(len, self._heaps.values())) > 2 * len(self._entry_of) + 64:
            # Mostly dead entries, and each holds on to its request.
            for length, heap in self._heaps.items():
                self._heaps[length] = [item for item in heap if self._entry_of.get(item[2]) == item[1]]
                heapq.heapify(self._heaps[length])

    def _is_served(self, request: Request) -> bool:
        return self._served is None or request in self._served


def _lacking(request: Request) -> int:
    """Tokens to compute, at most: more of them may turn up in the prefix cache."""
    return request.num_tokens - request.num_computed_tokens
