"""DraftCoverage: of which tokens a drafter has keys and values, and which tokens those are that it lacks.

A drafter's cache has the blocks of the model's, and shares their fate: prefixes found, forks, copies and swaps are
valid for both at once. But it may lack tokens that the model has computed: while nobody drafts, it computes none, and a
prefix may have been computed meanwhile. What it lacks is known here, block by block, and caught up with before the next
draft.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.request_rows import RequestRows

_MOST_SKIPPED = 64  # steps that are entered at once
UNKNOWN = -1  # a token that was on the device alone when its step was launched


class Tokens(NamedTuple):
    """Tokens of the request in a row of ``RequestRows``, from the one at ``start`` on; ``token_ids``: [n] int32."""

    row: int
    start: int
    token_ids: np.ndarray


class DraftCoverage:
    """What a drafter lacks of the running requests' tokens.

    Args:
        num_blocks: of the KV pool; num_host_blocks: of the swap space.
    """

    def __init__(self, limits: EngineLimits, num_blocks: int, num_host_blocks: int) -> None:
        self._size = limits.block_size
        # Of each block, the first slot that the drafter lacks; the block's size where it lacks none that is of use.
        self._first_lacking = np.full(num_blocks + 1, self._size, dtype=np.int32)
        self._first_lacking_on_host = np.full(num_host_blocks + 1, self._size, dtype=np.int32)
        self._lacks_some = False  # whether some entry of either is less
        # Known tokens of each row of ``RequestRows``. Memory that is never written to is never taken.
        self._token_ids = np.zeros((limits.max_num_seqs, limits.max_model_len), dtype=np.int32)
        # Tokens that the last step took from the one before, on the device: row, position, and row of that step.
        self._taken: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._trees: list[tuple[int, int, int]] = []  # of the last step: row, and where its tokens begin and end
        # Steps that are not entered yet, one after another: their tokens, and the first and last two of them. Only
        # these are kept: 64 whole outputs would stay allocated, and new ones would go to memory that is in no
        # processor cache.
        self._skipped: list[Sequence[int]] = []
        self._first = self._before_last = self._last = SchedulerOutput()

    def skip(self, output: SchedulerOutput, store: RequestRows) -> bool:
        """A step is about to come, which ``store`` does not know yet. Returns whether it need not be entered.

        Steps of one token of each request behind which nothing is drafted are kept, and entered all at once before
        something else happens: most steps of a drafter that is of no use are such, and each would cost 30 us and more.
        """
        is_plain = not self._trees and _is_plain(output, self._size)
        is_full = len(self._skipped) >= _MOST_SKIPPED
        if self._skipped and (is_full or not is_plain or not _follows(self._last, output)):
            self._enter_skipped(store)
        if is_plain:
            if not self._skipped:
                self._first = output
            self._skipped.append(_token_ids(output, ()))
            self._before_last, self._last = self._last, output
        return is_plain

    def _enter_skipped(self, store: RequestRows) -> None:
        """Enter the steps that were skipped, as one of several tokens of each request."""
        first, last, steps = self._first, self._last, self._skipped
        self._skipped = []
        as_one = last._replace(
            num_scheduled_tokens=(len(steps),) * len(last.request_ids),
            num_computed_tokens=first.num_computed_tokens,
            token_ids=tuple(itertools.chain.from_iterable(zip(*steps, strict=True))),
        )
        rows = np.array([store.row_of(request_id) for request_id in last.request_ids], dtype=np.int64)
        self.begin_step(as_one, rows, store)
        starts = np.array(first.num_computed_tokens, dtype=np.int64)
        self.end_step(rows, starts, starts + len(steps), np.zeros(len(rows), dtype=bool), store)

    def begin_step(self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows) -> None:
        """A step is to be run: enter its blocks that move, and its tokens. ``rows`` [R] int64: in ``store``."""
        for admission in output.admissions:
            known = (*admission.prompt_token_ids, *admission.output_token_ids)
            self._token_ids[store.row_of(admission.request_id), : len(known)] = known
        self._move_tokens(output.moved_keys, store)
        self.move_blocks(output)
        for place, _ in output.trees:
            start = output.num_computed_tokens[place]
            self._trees.append((int(rows[place]), start, start + output.num_scheduled_tokens[place]))
        # Request by request, as in ``end_step``: for few of them that takes less than calls for all at once.
        taken, at = list[tuple[int, int, int]](), 0
        columns = output.num_computed_tokens, output.num_scheduled_tokens, output.feedback
        for row, start, count, source in zip(rows.tolist(), *columns, strict=True):
            end = start + count
            self._token_ids[row, start:end] = output.token_ids[at : at + count]
            at += count
            if source >= 0:
                self._token_ids[row, end - 1] = UNKNOWN
                taken.append((row, end - 1, source))
        self._taken = tuple(np.array(taken, dtype=np.int64).T) if taken else None

    def _move_tokens(self, moved_keys: Sequence[tuple[int, int]], store: RequestRows) -> None:
        """Tokens of trees go where their keys go: see ``SchedulerOutput``."""
        places: dict[int, tuple[int, int]] = {}
        for row, start, end in self._trees if moved_keys else ():
            positions = np.arange(start, end)
            slots = store.block_table[row, positions // self._size] * self._size + positions % self._size
            places |= zip(slots.tolist(), ((row, position) for position in range(start, end)), strict=True)
        pairs = [(places[source], places[target]) for source, target in moved_keys if {source, target} <= places.keys()]
        found = [self._token_ids[source] for source, _ in pairs]
        for (_, target), token_id in zip(pairs, found, strict=True):
            self._token_ids[target] = token_id
        self._trees = []

    def move_blocks(self, output: SchedulerOutput) -> None:
        """Enter the blocks that a step swaps and copies."""
        if self._lacks_some and output.moves_blocks:
            self._move(output, self._first_lacking, self._first_lacking_on_host)

    def _move(self, output: SchedulerOutput, device: np.ndarray, host: np.ndarray) -> None:
        """What is known of blocks moves with them."""
        move(output.swapped_out, device, host)
        move([(block, own) for own, block in output.swapped_in], host, device)
        move(output.copies, device, device)

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        """Files are read into these host blocks: what the drafter has of them is not relied on."""
        self._lacks_some = True
        self._first_lacking_on_host[list(blocks)] = 0

    def learn(self, token_ids: Sequence[int]) -> None:
        """Before ``begin_step``: the step before the last one has sampled ``token_ids``; empty: it was given up."""
        if len(self._skipped) > 1:  # the one that comes is the last of them
            self._skipped[-2] = _token_ids(self._before_last, token_ids)
        elif self._taken is not None and token_ids:
            rows, positions, feedback = self._taken
            self._token_ids[rows, positions] = np.array(token_ids, dtype=np.int32)[feedback]

    def num_covered(self, rows: np.ndarray, starts: np.ndarray, store: RequestRows) -> np.ndarray:
        """How many of their first tokens the drafter has of requests that have computed ``starts`` [R]; at most these.

        Those behind the first that it lacks do not count.
        """
        width = -(-int(starts.max(initial=0)) // self._size)
        if not self._lacks_some or not width:
            return starts
        firsts = np.arange(width) * self._size
        needed = np.clip(starts[:, None] - firsts, 0, self._size)
        first_lacking = self._first_lacking[store.block_table[rows, :width]]
        lacks = first_lacking < needed
        columns = lacks.argmax(1)
        found = firsts[columns] + first_lacking[np.arange(len(rows)), columns]
        return np.where(lacks.any(1), found, starts)

    def tokens(self, row: int, start: int, end: int) -> np.ndarray | None:
        """Of the request in ``row``, tokens ``start..end - 1``; None: one of them is not known."""
        token_ids = self._token_ids[row, start:end]
        return None if (token_ids == UNKNOWN).any() else token_ids

    def end_step(
        self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray, is_covered: np.ndarray, store: RequestRows
    ) -> None:
        """The model has tokens ``starts..ends - 1`` [R] more, and so has the drafter where ``is_covered`` [R] bool.

        There it has all tokens before them, too.
        """
        if not self._lacks_some and is_covered.all():
            return
        self._lacks_some = True
        size, table, first_lacking = self._size, store.block_table, self._first_lacking
        columns = (column.tolist() for column in (rows, starts, ends, is_covered))
        for row, start, end, has_all in zip(*columns, strict=True):
            first, last = start // size, -(-end // size)
            if has_all:
                first_lacking[table[row, first:last]] = size
                continue
            block = table[row, first]
            first_lacking[block] = min(first_lacking[block], start % size)
            if last > first + 1:
                first_lacking[table[row, first + 1 : last]] = 0

    def cover(self, row: int, start: int, end: int, store: RequestRows) -> None:
        """The drafter has tokens ``start..end - 1`` more of the request in ``row``."""
        if not self._lacks_some:
            return
        blocks = store.block_table[row, start // self._size : -(-end // self._size)]
        self._first_lacking[blocks] = self._size
        if end % self._size and len(blocks):
            self._first_lacking[blocks[-1]] = end % self._size


def _is_plain(output: SchedulerOutput, block_size: int) -> bool:
    """Whether it computes a token of each request, and nothing is drafted behind it, admitted, ended or moved.

    Blocks may come behind those that a request has computed tokens in: where its tokens are stays as it was.
    """
    num_requests = len(output.request_ids)
    if (
        output.drafts_next
        or output.admissions
        or output.released_request_ids
        or not 0 < num_requests == len(output.token_ids)
        or (output.swapped_out or output.swapped_in or output.copies or output.moved_keys or output.trees)
        or output.resets
    ):
        return False
    for name, start, _ in output.table_updates:
        if start * block_size < output.num_computed_tokens[output.request_ids.index(name)]:
            return False
    return True


def _follows(last: SchedulerOutput, output: SchedulerOutput) -> bool:
    """Whether ``output`` computes the next token of each request of ``last``; both are plain, and none came between.

    All requests go on by a token then, or none, where steps were given up.
    """
    goes_on = output.num_computed_tokens[0] == last.num_computed_tokens[0] + 1
    return goes_on and last.request_ids == output.request_ids


def _token_ids(output: SchedulerOutput, sampled: Sequence[int]) -> Sequence[int]:
    """The token of each request; ``sampled``: by the step before, empty where that is not known."""
    if max(output.feedback) < 0:
        return output.token_ids
    return [
        token if row < 0 else sampled[row] if sampled else UNKNOWN
        for token, row in zip(output.token_ids, output.feedback, strict=True)
    ]


def move(pairs: Sequence[tuple[int, int]], source: np.ndarray, target: np.ndarray) -> None:
    """What ``source`` has of blocks goes to ``target``, for each pair of blocks."""
    if pairs:
        of, to = np.array(pairs, dtype=np.int64).T
        target[to] = source[of]
