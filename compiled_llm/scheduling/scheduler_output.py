"""SchedulerOutput: what the worker is to do in a step, as frozen plain data that can be pickled."""

import itertools
from typing import TYPE_CHECKING, NamedTuple

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.request import BlockSource, RequestId

if TYPE_CHECKING:
    import numpy as np


# (request, index in its block table, the entries from that index on)
TableUpdate = tuple[RequestId, int, tuple[int, ...]]


class StartedRequest(NamedTuple):
    """A request that starts to run, or runs again after a preemption: all that the worker has to know of it."""

    request_id: RequestId
    sampling_params: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    adapter_slot: int = 0  # of its adapter; 0: it has none


class WindowOutput(NamedTuple):
    """What a step is to do in the layers that have one sliding window, with the places where these keep keys.

    The columns are those of the same names in ``SchedulerOutput``, but with places where these have blocks. Entries of
    a table before the first that a query sees may be anything.
    """

    table_updates: tuple[TableUpdate, ...] = ()
    swapped_out: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    moved_keys: tuple[tuple[int, int], ...] = ()

    @property
    def moves_blocks(self) -> bool:
        return bool(self.swapped_out or self.swapped_in or self.copies)


class StateOutput(NamedTuple):
    """What a step is to do with states; slots are those of a ``StatePool``.

    Attributes:
        reads: for each request: the slot of the state that its first token follows; 0: no token is before it.
        writes: for each request: pairs (slot, count): its state after ``count`` tokens of the step goes to ``slot``.
        swapped_out, swapped_in: (slot, host slot) pairs to copy before the step, in this order.
    """

    reads: tuple[int, ...] = ()
    writes: tuple[tuple[tuple[int, int], ...], ...] = ()
    swapped_out: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[tuple[int, int], ...] = ()

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Always empty: a step that writes a state elsewhere than it reads it needs no copy of it."""
        return ()


class FileOutput(NamedTuple):
    """What a step is to do with files of blocks, behind its copies; rows are host blocks, as those of swaps.

    Attributes:
        reads: (digest, row, source): the file of a block is to be read into the row, or the block to be fetched from
            another engine.
        writes: (digest, row, windows): the row is to be written to a file, with the keys of the windows of these
            numbers.
        resets: whether all that is not done yet is to be dropped first, and waited for where that is not possible.
        wait_seconds: how long a step without requests waits until a file is read.
    """

    reads: tuple[tuple[bytes, int, BlockSource | None], ...] = ()
    writes: tuple[tuple[bytes, int, tuple[int, ...]], ...] = ()
    resets: bool = False
    wait_seconds: float = 0.0


class SchedulerOutput(NamedTuple):
    """The work of a step, in columns: entry i of each of the first five belongs to request ``request_ids[i]``.

    A step has logits rows: ``max(1, num_samples[i])`` for request i, one request after another. The last row of a
    request is that of its last scheduled token, the row before is that of the token before, and so on.

    Attributes:
        num_scheduled_tokens: tokens to compute; the last ones may be drafts.
        num_computed_tokens: tokens before these, whose keys and values are in the cache.
        num_samples: tokens to sample: 0 where known tokens remain to be computed, or the request generates none; else
            1, and 1 more for each draft.
        feedback: where the last token is one that the step before samples: its logits row in that step; else -1.
        token_ids: the tokens to compute, one request after another; 0 where ``feedback`` says where the token is.
        admissions: requests that start to run.
        table_updates: (request id, index, block ids): entries of its block table from that index on.
        released_request_ids: requests that ended or were preempted since the step before.
        swapped_out, swapped_in: (device block, host block) pairs to copy before the step, in this order.
        copies: (block, block to copy it to) before the step and after the swaps, in any order.
        moved_sinks: (i, distance): request i computes its sink tokens again, as that many positions later.
        adapter_loads: (slot, digest): the adapter of that digest is to be copied to ``slot`` before the step.
        uses_adapters: whether a running request has an adapter.
        masks: (i, place, words): the tokens that request i may have where it samples for the first, second... time in
            the step (``place`` from 0): bit v % 32 of int32 word v // 32 for token v.
        prompt_targets: (i, place, token ids): the log-probabilities of these tokens are asked for. Of the tokens that
            the step computes of request i, the first of them follows the one with index ``place``, and so on.
        trees: (i, parents): the drafts of request i are a tree, with parents as ``DraftTree`` has them.
        moved_keys: (slot, slot to copy its keys and values to), slots as in ``StepInput``, before all else that is done
            to caches: drafts of the step before that were right, which a chain has elsewhere.
        known_tokens: (i, position, token ids): where a network drafts behind the step, the known tokens of request i
            from that position on; the step before told of those before it. Other requests are not drafted for.
        windows: for each window of the pool.
        states: of layers that keep some.
        files: of blocks that are to be read and written. A step without requests does nothing but this and copies.
        drafts_next: whether a network of the worker is to draft what follows this step, if there is one.
        resets: whether the worker is to forget all requests before this step.
    """

    request_ids: tuple[RequestId, ...] = ()
    num_scheduled_tokens: tuple[int, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()
    num_samples: tuple[int, ...] = ()
    feedback: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    admissions: tuple[StartedRequest, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    released_request_ids: tuple[RequestId, ...] = ()
    swapped_out: tuple[tuple[int, int], ...] = ()
    swapped_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    moved_sinks: tuple[tuple[int, int], ...] = ()
    masks: tuple[tuple[int, int, "np.ndarray"], ...] = ()
    prompt_targets: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    adapter_loads: tuple[tuple[int, str], ...] = ()
    trees: tuple[tuple[int, tuple[int, ...]], ...] = ()
    moved_keys: tuple[tuple[int, int], ...] = ()
    known_tokens: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    windows: tuple[WindowOutput, ...] = ()
    states: StateOutput = StateOutput()
    files: FileOutput = FileOutput()
    drafts_next: bool = False
    uses_adapters: bool = False
    resets: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks are swapped or copied before the step."""
        own = self.swapped_out or self.swapped_in or self.copies or self.states.swapped_out or self.states.swapped_in
        if own or not self.windows:
            return bool(own)
        return any(window.moves_blocks for window in self.windows)

    @property
    def max_query_len(self) -> int:
        """Most tokens of one request; 0 for an empty step."""
        return max(self.num_scheduled_tokens, default=0)

    @property
    def num_rows(self) -> int:
        """Logits rows."""
        return sum(max(1, count) for count in self.num_samples)

    def first_rows(self) -> list[int]:
        """The first logits row of each request."""
        ends = itertools.accumulate((max(1, count) for count in self.num_samples), initial=0)
        return list(ends)[: len(self.num_samples)]
