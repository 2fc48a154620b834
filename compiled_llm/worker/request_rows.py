"""RequestRows: the worker's data of each running request, a row each, from its admission to its release."""

from collections.abc import Sequence

import numpy as np
import torch

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.step.logits_transforms import LogitsTransform
from compiled_llm.step.parameters import SAMPLING, Name, logits_parameters
from compiled_llm.worker.block_tables import TableChange


class RequestRows:
    """Block tables and sampling parameters of the running requests.

    Attributes:
        block_table: ``[max_num_seqs, blocks_per_request]`` int32.
        window_tables: a block table of this shape for each window. Entries before the first that a query sees may be
            anything.
        num_blocks: ``[max_num_seqs]`` int32, entries of each row of ``block_table``.
        blocks_end: all blocks that requests have had are below.
        parameters: each sampling parameter, ``[max_num_seqs + 1, *shape]`` in its dtype.
        padding_row: the last row of ``parameters``, for rows of a step that belong to no request.
        changes_logits: ``[max_num_seqs]`` bool, whether its parameters change the logits.
        needs_logprobs: ``[max_num_seqs]`` bool, whether it asks for log-probabilities.
        adapter_slots: ``[max_num_seqs]`` int32, of its adapter; 0: it has none.
        changes: what the last ``update`` wrote to the tables, of which ``block_table`` is number 0.
        num_changes: how many updates wrote something to them.
    """

    def __init__(
        self,
        limits: EngineLimits,
        vocab_size: int,
        transforms: Sequence[LogitsTransform] = (),
        *,
        num_windows: int = 0,
    ) -> None:
        rows = limits.max_num_seqs
        self.vocab_size = vocab_size
        self.padding_row = rows
        self.block_table = np.full((rows, limits.blocks_per_request), SINK_BLOCK, dtype=np.int32)
        self.window_tables = [np.full_like(self.block_table, SINK_BLOCK) for _ in range(num_windows)]
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.blocks_end = 0
        self.changes: list[TableChange] = []
        self.num_changes = 0
        self._fields = *SAMPLING, *logits_parameters(transforms)
        self.parameters: dict[Name, np.ndarray] = {
            field.name: torch.full((rows + 1, *field.shape), field.padding, dtype=field.dtype).numpy()
            for field in self._fields
        }
        self.changes_logits = np.zeros(rows, dtype=bool)
        self.needs_logprobs = np.zeros(rows, dtype=bool)
        self.adapter_slots = np.zeros(rows, dtype=np.int32)
        self._row_of: dict[RequestId, int] = {}
        self._last: tuple[tuple[RequestId, ...], np.ndarray] = (
            (),
            np.zeros(0, dtype=np.int64),
        )  # requests, and their rows
        self._free_rows = list(range(rows - 1, -1, -1))

    def update(self, output: SchedulerOutput) -> np.ndarray:
        """Apply a step's releases, admissions and new blocks. Returns the row of each scheduled request, [R] int64.

        It is the same array as for the step before if the requests are the same, and none was admitted since.
        """
        row_of, self.changes = self._row_of, []
        if output.resets or output.released_request_ids or output.admissions:
            self._last = (), self._last[1]
        if output.resets:
            self.clear()
        for request_id in output.released_request_ids:
            self._free_rows.append(row_of.pop(request_id))
        for admission in output.admissions:
            row_of[admission.request_id] = row = self._free_rows.pop()
            self._admit(row, admission)
        for request_id, start, blocks in output.table_updates:
            row, end = row_of[request_id], start + len(blocks)
            assert start <= self.num_blocks[row], "a block table has a hole"
            self.block_table[row, start:end] = blocks
            self.blocks_end = max(self.blocks_end, 1 + max(blocks, default=-1))
            self.num_blocks[row] = end
            self.changes.append((0, row, start, blocks))
        for number, (table, told) in enumerate(zip(self.window_tables, output.windows, strict=True), 1):
            for request_id, start, places in told.table_updates:
                row = row_of[request_id]
                table[row, start : start + len(places)] = places
                self.changes.append((number, row, start, places))
        self.num_changes += bool(self.changes)
        if not output.request_ids or output.request_ids != self._last[0]:
            rows = np.array([row_of[request_id] for request_id in output.request_ids], dtype=np.int64)
            self._last = output.request_ids, rows
        return self._last[1]

    @property
    def tables(self) -> list[np.ndarray]:
        """All of them, in the order that ``changes`` counts them."""
        return [self.block_table, *self.window_tables]

    def row_of(self, request_id: RequestId) -> int:
        """The row of a running request."""
        return self._row_of[request_id]

    def clear(self) -> None:
        """Forget all requests."""
        self._row_of.clear()
        self._free_rows = list(range(len(self.num_blocks) - 1, -1, -1))

    def _admit(self, row: int, admission: StartedRequest) -> None:
        params = admission.sampling_params
        self.num_blocks[row] = 0
        for field in self._fields:
            self.parameters[field.name][row] = field.value(params, admission.seed, self.vocab_size)
        self.changes_logits[row] = params.changes_logits
        self.needs_logprobs[row] = params.logprobs is not None
        self.adapter_slots[row] = admission.adapter_slot
