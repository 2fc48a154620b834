"""HeadCoverage: ``DraftCoverage`` of a network whose row of a token depends on the token after it, too.

The last row of a block depends on a token that the block's hash does not know. So it is known of each block which
token that was; where a request finds a block by its prefix and goes on with another token, the row is computed anew.
Of two running requests that share such a block the one that computed it last has the right row: the other's drafts may
be worse for it, and its tokens are the same.
"""

from collections.abc import Sequence

import numpy as np

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.draft_coverage import DraftCoverage, Tokens
from compiled_llm.worker.request_rows import RequestRows

_UNKNOWN = -1  # no token


class HeadCoverage(DraftCoverage):
    """As ``DraftCoverage``, of rows: that of a token is computed once the token after it is known."""

    def __init__(self, limits: EngineLimits, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(limits, num_blocks, num_host_blocks)
        # Of each block, the token that its last row was computed with.
        self._followers = np.full(num_blocks + 1, _UNKNOWN, dtype=np.int32)
        self._followers_on_host = np.full(num_host_blocks + 1, _UNKNOWN, dtype=np.int32)
        self._num_found: dict[RequestId, int] = {}  # tokens that requests found computed, until theirs are known
        # Of the step that is drafted behind, by row: where blocks end whose last row has another follower, in tokens.
        self._outdated: dict[int, np.ndarray] = {}

    def _empty_all(self) -> None:
        super()._empty_all()
        self._followers[:] = _UNKNOWN
        self._followers_on_host[:] = _UNKNOWN
        self._num_found.clear()

    def _begin(self, name: RequestId, num_found: int) -> None:
        self._num_found[name] = num_found

    def _forget(self, name: RequestId) -> None:
        super()._forget(name)
        self._num_found.pop(name, None)

    def _move_blocks(self, output: SchedulerOutput) -> None:
        super()._move_blocks(output)
        self._move(output, self._followers, self._followers_on_host)

    def _empty(self, blocks: int | list[int]) -> None:
        super()._empty(blocks)
        self._followers[blocks] = _UNKNOWN

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        super().lack_on_host(blocks)
        self._followers_on_host[list(blocks)] = _UNKNOWN

    def begin_step(self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows) -> None:
        super().begin_step(output, rows, store)
        self._outdated = {}
        for place, start, token_ids in output.known_tokens:
            name, row = output.request_ids[place], int(rows[place])
            if name in self._complete:  # rows before the last known token are there, also those of right drafts
                self._follow(row, start - 1, start + len(token_ids) - 1, store)
            if (num_found := self._num_found.pop(name, None)) is not None:
                ends, blocks = self._ends(row, 0, num_found, store)
                self._outdated[row] = ends[self._followers[blocks] != self._token_ids[row, ends]]

    def tokens(self, name: RequestId, row: int, start: int, end: int) -> np.ndarray | None:
        """Of the request in ``row``, the tokens that follow ``start..end - 1``; None: one of them is not known."""
        return super().tokens(name, row, start + 1, end + 1)

    def cover(self, row: int, start: int, end: int, store: RequestRows) -> None:
        super().cover(row, start, end, store)
        self._follow(row, start, end, store)

    def outdated(self, rows: Sequence[int], most: int, store: RequestRows) -> list[Tokens]:
        """Rows that were computed with other followers than those of the requests in ``rows``, as far as ``most``.

        They are told once; those that the drafter lacks anyway are not among them.
        """
        found: list[Tokens] = []
        for row in rows:
            for end in self._outdated.pop(row, ()):
                block = store.block_table[row, end // self._size - 1]
                if self._first_lacking[block] == self._size and len(found) < most:
                    found.append(Tokens(row, int(end) - 1, self._token_ids[row, end : end + 1]))
                    self._followers[block] = self._token_ids[row, end]
        return found

    def _follow(self, row: int, start: int, end: int, store: RequestRows) -> None:
        """Rows ``start..end - 1`` are those with the tokens that follow in the request in ``row``."""
        if start // self._size != end // self._size:
            ends, blocks = self._ends(row, start, end, store)
            self._followers[blocks] = self._token_ids[row, ends]

    def _ends(self, row: int, start: int, end: int, store: RequestRows) -> tuple[np.ndarray, np.ndarray]:
        """After ``start`` and up to ``end``: ends of blocks, as numbers of tokens, and these blocks."""
        numbers = np.arange(max(start, 0) // self._size, end // self._size)
        return (numbers + 1) * self._size, store.block_table[row, numbers]
