"""HeadCoverage: ``DraftCoverage`` of a network whose row of a token depends on the token after it, too.

The last row of a block depends on a token that the block's hash does not know. So it is known of each block which
token that was; where a request finds a block by its prefix and goes on with another token, the row is computed anew.
Of two running requests that share such a block the one that computed it last has the right row: the other's drafts may
be worse for it, and its tokens are the same.
"""

from collections.abc import Sequence

import numpy as np

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.draft_coverage import UNKNOWN, DraftCoverage, Tokens
from compiled_llm.worker.request_rows import RequestRows


class HeadCoverage(DraftCoverage):
    """As ``DraftCoverage``, of rows: that of a token is computed once the token after it is known."""

    def __init__(self, limits: EngineLimits, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(limits, num_blocks, num_host_blocks)
        # Of each block, the token that its last row was computed with.
        self._followers = np.full(num_blocks + 1, UNKNOWN, dtype=np.int32)
        self._followers_on_host = np.full(num_host_blocks + 1, UNKNOWN, dtype=np.int32)
        self._num_known = np.zeros(limits.max_num_seqs, dtype=np.int64)  # tokens of each row, drafts included
        self._outdated: dict[int, np.ndarray] = {}  # by row: tokens that end blocks which others go on from

    def begin_step(self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows) -> None:
        trees = self._trees
        super().begin_step(output, rows, store)
        for row, start, end in trees:  # the tokens of their paths are in their places now
            self._follow(row, start - 1, end - 1, store)
        device = self._followers
        admitted = {store.row_of(admission.request_id): admission for admission in output.admissions}
        for row, start, count in zip(
            rows.tolist(), output.num_computed_tokens, output.num_scheduled_tokens, strict=True
        ):
            admission = admitted.get(row)
            if admission is None:
                self._num_known[row] = max(self._num_known[row], start + count)
                self._follow(row, start - 1, start + count - 1, store)
                continue
            self._num_known[row] = len(admission.prompt_token_ids) + len(admission.output_token_ids)
            ends, blocks = self._ends(row, 0, start, store)
            self._outdated[row] = ends[device[blocks] != self._token_ids[row, ends]]

    def move_blocks(self, output: SchedulerOutput) -> None:
        super().move_blocks(output)
        if output.moves_blocks:
            self._move(output, self._followers, self._followers_on_host)

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        super().lack_on_host(blocks)
        self._followers_on_host[list(blocks)] = UNKNOWN

    def tokens(self, row: int, start: int, end: int) -> np.ndarray | None:
        """Of the request in ``row``, the tokens that follow ``start..end - 1``; None: one of them is not known."""
        return super().tokens(row, start + 1, end + 1) if end < self._num_known[row] else None

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
