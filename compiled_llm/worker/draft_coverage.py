"""DraftCoverage: of which tokens a drafter has keys and values, and which tokens those are that it lacks.

A drafter's cache has the blocks of the model's, and shares their fate: prefixes found, forks, copies and swaps are
valid for both at once. But it may lack tokens that the model has computed: while nobody drafts, it computes none, and a
prefix may have been computed meanwhile. What it lacks is known here, block by block, and caught up with before the next
draft.

A block has nothing when a request gets it, and what the drafter computes is entered. So steps behind which nothing is
drafted need not be entered, but for the blocks that they move and give to requests. Behind many such steps in a row,
most of a drafter that is of no use, all is forgotten, and then there is nothing to enter at all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.request_rows import RequestRows

_MOST_IDLE = 256  # steps in a row behind which nothing is drafted, until all is forgotten that the drafter has


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
        self._first_lacking = np.zeros(num_blocks + 1, dtype=np.int32)
        self._first_lacking_on_host = np.zeros(num_host_blocks + 1, dtype=np.int32)
        # Requests of which it has all tokens that the model has computed. Blocks that such a request writes to count as
        # if nothing was lacking, since it is not known yet which of its drafts were right.
        self._complete = set[RequestId]()
        self._admitted = set[RequestId]()  # requests that have not been in a step
        # Known tokens of each row of ``RequestRows``. Memory that is never written to is never taken.
        self._token_ids = np.zeros((limits.max_num_seqs, limits.max_model_len), dtype=np.int32)
        self._num_known: dict[RequestId, int] = {}
        self._num_idle = _MOST_IDLE  # steps since one that was drafted behind, up to this

    def expect(self, output: SchedulerOutput) -> bool:
        """A step is about to come, which moves blocks or gives some to requests: that is entered.

        Returns whether there is nothing more to enter.
        """
        if output.drafts_next:
            self._num_idle = 0
        elif self._num_idle < _MOST_IDLE:
            self._num_idle += 1
            if self._num_idle == _MOST_IDLE:
                self._empty_all()
        if self._num_idle == _MOST_IDLE:
            if output.resets:
                self._reset()
            for name in output.released_request_ids:
                self._num_known.pop(name, None)
            return True
        self._enter(output)
        return not output.drafts_next and (not self._complete or self._complete.isdisjoint(output.request_ids))

    def _enter(self, output: SchedulerOutput) -> None:
        """Enter the blocks that a step moves, and those that requests get."""
        if output.resets:
            self._reset()
        if output.moves_blocks:
            self._move_blocks(output)
        for name in output.released_request_ids:
            self._forget(name)
        for admission in output.admissions:
            self._admit(admission.request_id)
        if output.table_updates:
            self._enter_tables(output)
        if self._admitted:  # a step may leave out a request that it admits
            for name, start in zip(output.request_ids, output.num_computed_tokens, strict=True):
                if name in self._admitted:
                    self._admitted.discard(name)
                    self._begin(name, start)

    def _reset(self) -> None:
        """A step has failed: what the drafter has is not relied on, and all requests are told of anew."""
        self._empty_all()
        self._num_known.clear()

    def _empty_all(self) -> None:
        """From now on the drafter has nothing of any block."""
        self._complete.clear()
        self._admitted.clear()
        self._first_lacking[:] = 0
        self._first_lacking_on_host[:] = 0

    def _admit(self, name: RequestId) -> None:
        """A request begins to run."""
        self._forget(name)
        self._admitted.add(name)

    def _begin(self, name: RequestId, num_found: int) -> None:
        """A request is in a step for the first time, which found so many of its tokens computed."""

    def _forget(self, name: RequestId) -> None:
        """A request does not run any more, or begins to."""
        self._complete.discard(name)
        self._admitted.discard(name)
        self._num_known.pop(name, None)

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """What is known of blocks moves with them."""
        self._move(output, self._first_lacking, self._first_lacking_on_host)

    def _move(self, output: SchedulerOutput, device: np.ndarray, host: np.ndarray) -> None:
        move(output.swapped_out, device, host)
        move([(block, own) for own, block in output.swapped_in], host, device)
        move(output.copies, device, device)

    def _enter_tables(self, output: SchedulerOutput) -> None:
        """Of the blocks that requests get, those behind the tokens that are computed have nothing.

        Those before may be of another request that has computed the same: what the drafter has of these is known.
        """
        places = {name: place for place, name in enumerate(output.request_ids)}
        for name, first, blocks in output.table_updates:
            computed = output.num_computed_tokens[places[name]] - first * self._size
            if computed > 0:
                self._complete.discard(name)
            whole, rest = divmod(max(0, computed), self._size)
            if rest and whole < len(blocks):
                self._first_lacking[blocks[whole]] = min(self._first_lacking[blocks[whole]], rest)
                whole += 1
            # A request that decodes gets one block: indexing by a number takes a tenth of what a list does.
            self._empty(blocks[whole] if len(blocks) == whole + 1 else list(blocks[whole:]))

    def _empty(self, blocks: int | list[int]) -> None:
        """Nothing is computed in this block, or these."""
        self._first_lacking[blocks] = 0

    def lack_on_host(self, blocks: Sequence[int]) -> None:
        """Files are read into these host blocks: what the drafter has of them is not relied on."""
        self._first_lacking_on_host[list(blocks)] = 0

    def begin_step(self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows) -> None:
        """A step is to be drafted behind: enter the tokens that are known. ``rows`` [R] int64: in ``store``."""
        for place, start, token_ids in output.known_tokens:
            name, end = output.request_ids[place], start + len(token_ids)
            assert start <= self._num_known.get(name, 0), "known tokens have a gap"
            self._token_ids[rows[place], start:end] = token_ids
            self._num_known[name] = end

    def has_all_of(self, output: SchedulerOutput) -> bool:
        """Whether the drafter has all tokens before a step of decoding, of all its requests.

        That is: each token is known, and a step computes the last one and drafts behind it. False says nothing.
        """
        decodes = output.num_scheduled_tokens == output.num_samples and len(output.known_tokens) == len(output.feedback)
        return decodes and max(output.feedback) < 0 and self._complete.issuperset(output.request_ids)

    def num_covered(self, name: RequestId, row: int, start: int, store: RequestRows) -> int:
        """How many of its first tokens the drafter has of a request that has computed ``start``; at most these.

        Those behind the first that it lacks do not count.
        """
        if name in self._complete or not start:
            return start
        first_lacking = self._first_lacking[store.block_table[row, : -(-start // self._size)]]
        needed = np.full(len(first_lacking), self._size)
        needed[-1] = start - (len(needed) - 1) * self._size
        lacks = first_lacking < needed
        column = int(lacks.argmax())
        return column * self._size + int(first_lacking[column]) if lacks[column] else start

    def tokens(self, name: RequestId, row: int, start: int, end: int) -> np.ndarray | None:
        """Of the request in ``row``, tokens ``start..end - 1``; None: one of them is not known."""
        return self._token_ids[row, start:end] if end <= self._num_known.get(name, 0) else None

    def end_step(self, output: SchedulerOutput, rows: np.ndarray, is_covered: np.ndarray, store: RequestRows) -> None:
        """The model has the tokens of a step, and so has the drafter where ``is_covered`` [R] bool.

        There it has all tokens before them, too. Others of which it had all lack tokens from this step's first on.
        """
        if not is_covered.all():
            self.lack_from_here(output, rows, ~is_covered, store)
        of_each = output.request_ids, rows.tolist(), output.num_computed_tokens, output.num_scheduled_tokens
        for name, row, start, count, covered in zip(*of_each, is_covered.tolist(), strict=True):
            if covered:
                self._complete.add(name)
                first, last = start // self._size, (start + count - 1) // self._size
                # By a number where there is one block: by a slice takes five times as long.
                blocks = store.block_table[row, first if first == last else slice(first, last + 1)]
                self._first_lacking[blocks] = self._size

    def lack_from_here(self, output: SchedulerOutput, rows: np.ndarray, which: np.ndarray, store: RequestRows) -> None:
        """Of requests of a step, ``which`` [R] bool, the drafter lacks this step's tokens, and those that follow."""
        if self._complete.isdisjoint(output.request_ids):
            return
        for place in np.flatnonzero(which).tolist():
            if (name := output.request_ids[place]) in self._complete:
                self._complete.discard(name)
                first, rest = divmod(output.num_computed_tokens[place], self._size)
                blocks = store.block_table[rows[place], first : store.num_blocks[rows[place]]]
                self._first_lacking[blocks[0]] = min(self._first_lacking[blocks[0]], rest)
                self._first_lacking[blocks[1:]] = 0

    def cover(self, row: int, start: int, end: int, store: RequestRows) -> None:
        """The drafter has tokens ``start..end - 1`` more of the request in ``row``."""
        blocks = store.block_table[row, start // self._size : -(-end // self._size)]
        self._first_lacking[blocks] = self._size
        if end % self._size and len(blocks):
            self._first_lacking[blocks[-1]] = end % self._size


def move(pairs: Sequence[tuple[int, int]], source: np.ndarray, target: np.ndarray) -> None:
    """What ``source`` has of blocks goes to ``target``, for each pair of blocks."""
    if pairs:
        of, to = np.array(pairs, dtype=np.int64).T
        target[to] = source[of]
