"""RequestQueue: waiting requests, ordered by rank. Plain Python."""

import heapq
import itertools
from collections.abc import Iterator

from compiled_llm.scheduling.request import Request


class RequestQueue:
    """Heaps by ``Request.rank``, one for each power of two of the number of tokens that requests lack.

    Adding and removing cost O(log n), so 10,000 waiting requests do not slow a step down. The first of the requests
    that are short enough for some room is found without a look at the others.

    A request that is removed from the middle stays in its heap as a dead entry until it comes to the top.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[tuple[int, int], int, Request]]] = {}  # by the bit length of what is lacking
        self._entry_of: dict[Request, int] = {}  # the entry that counts; others of the same request are dead
        self._entries = itertools.count()

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no order."""
        return iter(self._entry_of)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry_of

    def add(self, request: Request) -> None:
        assert request not in self._entry_of, f"request {request.request_id} is queued already"
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
        del self._entry_of[request]
        if sum(map(len, self._heaps.values())) > 2 * len(self._entry_of) + 64:
            # Mostly dead entries, and each holds on to its request.
            for length, heap in self._heaps.items():
                self._heaps[length] = [item for item in heap if self._entry_of.get(item[2]) == item[1]]
                heapq.heapify(self._heaps[length])


def _lacking(request: Request) -> int:
    """Tokens to compute, at most: more of them may turn up in the prefix cache."""
    return request.num_tokens - request.num_computed_tokens
