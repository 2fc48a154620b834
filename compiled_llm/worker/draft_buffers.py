"""What the functions of a ``DraftStage`` are given, as the host fills it: DraftBuffers, and PromptBuffers of a network.

On a CPU it ends with a step's own requests and tokens; on a GPU padding follows them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.models.inputs import StepInput
from compiled_llm.ops.torch_private import DynamicSize
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.drafting import DraftInput
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.draft_coverage import Tokens
from compiled_llm.worker.field_buffers import Arrays, FieldBuffers, Fields
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sized_inputs import SizedInputs
from compiled_llm.worker.step_buffers import StepSizes, mark_sizes


class _Held(NamedTuple):
    """What a host buffer has of the step before, and need not be written again.

    Attributes:
        rows, places: as ``fill`` was given them, the places as bytes, which compare faster.
        counts: of the step's tokens and samples, and ``has_all``.
        indices: [N, K + 1], where ``token_ids`` lie in the step.
        computed: [N] int32, of a request's tokens in the step those before the first that it samples behind, and one.
        num_changes: of block tables.
        width: entries of each table.
    """

    rows: np.ndarray
    places: bytes
    counts: tuple[tuple[int, ...], tuple[int, ...], bool]
    indices: np.ndarray
    computed: np.ndarray
    num_changes: int
    width: int


class DraftBuffers:
    """A ``DraftInput`` for ``num_requests``, as the host fills it and the graph reads it.

    On a CPU what ``fill`` gives ends with the requests that are drafted for; on a GPU padding follows them.

    Args:
        num_windows: block tables of windows that it has besides.
        num_rows: of each request in a network's first pass, for ``DraftInput.row_numbers``; 0: it has no use for them.

    Attributes:
        whole: of all requests.
    """

    def __init__(
        self,
        num_requests: int,
        num_tokens: int,
        limits: EngineLimits,
        device: torch.device,
        tables: BlockTables | None,
        num_windows: int = 0,
        num_rows: int = 0,
    ) -> None:
        self._limits, self._padding_row = limits, None if tables is None else tables.padding_row
        self._num_tokens, self._num_rows = num_tokens, num_rows
        self._pads = device.type != "cpu"
        each = (num_requests,)
        fields: Fields = dict.fromkeys(
            ("first_row", "num_samples", "position", "end", "token_row"), (each, torch.int32)
        )
        fields["token_ids"] = (num_requests, num_tokens + 1), torch.int32
        self._tables = ["block_table", *(f"block_table {number}" for number in range(num_windows))]
        if tables is None:
            fields |= dict.fromkeys(self._tables, ((num_requests, limits.blocks_per_request), torch.int32))
        else:
            fields["table_rows"] = each, torch.int32
        fields |= {field.name: ((num_requests, *field.shape), field.dtype) for field in SAMPLING}
        if num_rows:
            fields["row_numbers"] = (num_requests * num_rows,), torch.int32
        if limits.has_draft_trees:
            fields["parents"] = (num_requests, num_tokens + 1), torch.int32
        self.buffers = FieldBuffers(fields, device)
        views = dict(self.buffers.tensors)
        if device.type == "cpu":
            requests = DynamicSize("drafted requests", 6)
            blocks = [StepSizes.of(limits, device).blocks]
            for name, view in views.items():
                first = DynamicSize("their first rows", 19) if name == "row_numbers" else requests
                mark_sizes(view, first, *(blocks if name in self._tables else []))
        if tables is not None:
            views |= zip(self._tables, tables.tensors, strict=False)
        sizes = num_requests, num_requests * num_rows
        self._inputs = SizedInputs(views, self._input_of, sizes, {"row_numbers": 1})
        self.whole = self._inputs.whole
        self._held: dict[int, _Held] = {}  # by the id of a host buffer's arrays
        for arrays in self.buffers.all_arrays():
            self._pad(arrays, 0)
            if num_rows:
                arrays["row_numbers"][:] = np.arange(len(arrays["row_numbers"]))
        self.buffers.copy()

    def _input_of(self, views: Mapping[str, Tensor]) -> DraftInput:
        own: dict[str, Any] = {name: views.get(name) for name in DraftInput._fields}
        own["window_tables"] = tuple(views[name] for name in self._tables[1:])
        own["sampling"] = SamplingInput(**{name: views[name] for name in SamplingInput._fields})
        return DraftInput(**own)

    def fill(
        self,
        places: np.ndarray,
        output: SchedulerOutput,
        rows: np.ndarray,
        store: RequestRows,
        *,
        has_all: bool = True,
    ) -> DraftInput:
        """``places`` [N] int64: those in the step of the requests to draft for, whose rows ``rows`` [R] has.

        ``has_all``: see ``StepOutputs``.
        """
        arrays, n = self.buffers.next_arrays(), len(places)
        held = self._held.pop(id(arrays), None)
        of_places = places.tobytes()
        if held is not None and (held.rows is not rows or held.places != of_places):
            held = None
        own = rows[places]
        if held is None:
            for field in SAMPLING:
                arrays[field.name][:n] = store.parameters[field.name][own]
            if self._padding_row is not None:
                arrays["table_rows"][:n] = own
            if self._pads:
                self._pad(arrays, n)
        counts = output.num_scheduled_tokens, output.num_samples, has_all
        if held is None or held.counts != counts:
            indices, computed = self._fill_counts(arrays, places, output, has_all=has_all)
        else:
            indices, computed = held.indices, held.computed
        arrays["token_ids"][:n] = np.array(output.token_ids, dtype=np.int32)[indices]
        if self._limits.has_draft_trees:
            self._fill_trees(arrays, places, output)
        positions = np.array(output.num_computed_tokens, dtype=np.int32)[places] + computed
        arrays["position"][:n] = positions
        # As far as drafts may come; what is behind a request's own blocks is read, and never used.
        width = int(positions.max() + 2 * self._num_tokens) // self._limits.block_size + 1
        if held is None or held.num_changes != store.num_changes or held.width < width:
            width = self._fill_tables(arrays, own, store, width)
        else:
            width = held.width
        self._held[id(arrays)] = _Held(rows, of_places, counts, indices, computed, store.num_changes, width)
        self.buffers.copy()
        return self.whole if self._pads else self._inputs.first(n, n * self._num_rows)

    def _fill_counts(
        self, arrays: Arrays, places: np.ndarray, output: SchedulerOutput, *, has_all: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """What follows from how many tokens a step has of each request. Returns ``indices`` and ``computed``."""
        n = len(places)
        samples = np.array(output.num_samples, dtype=np.int32)
        counts = np.array(output.num_scheduled_tokens, dtype=np.int32)
        samples_of, logits_rows = samples[places], np.maximum(samples, 1)
        arrays["first_row"][:n] = (logits_rows.cumsum() - logits_rows)[places]
        arrays["num_samples"][:n] = samples_of
        ends = counts.cumsum()[places]
        arrays["token_row"][:n] = ends - samples_of if has_all else arrays["first_row"][:n]
        indices = np.minimum((ends - samples_of)[:, None] + np.arange(self._num_tokens + 1), (ends - 1)[:, None])
        return indices, counts[places] - samples_of + 1

    def _fill_trees(self, arrays: Arrays, places: np.ndarray, output: SchedulerOutput) -> None:
        arrays["parents"][: len(places)] = np.maximum(np.arange(self._num_tokens + 1) - 1, 0)
        trees = dict(output.trees)
        for row, place in enumerate(places.tolist()):
            if place in trees:
                arrays["parents"][row, 1 : 1 + len(trees[place])] = trees[place]

    def _fill_tables(self, arrays: Arrays, own: np.ndarray, store: RequestRows, width: int) -> int:
        """The block tables of the requests in the rows ``own``, as far as these have blocks, and ``width`` at least.

        Returns how many entries of each it has written.
        """
        n, num_blocks = len(own), store.num_blocks[own]
        arrays["end"][:n] = np.minimum(num_blocks * self._limits.block_size, self._limits.max_model_len)
        width = max(width, int(num_blocks.max()))
        if self._padding_row is None:
            is_own = np.arange(min(width, self._limits.blocks_per_request)) < num_blocks[:, None]
            for name, known in zip(self._tables, store.tables, strict=False):
                entries = known[own, : is_own.shape[1]]
                arrays[name][:n, : is_own.shape[1]] = np.where(is_own, entries, SINK_BLOCK)
        return width

    def _pad(self, arrays: Arrays, n: int) -> None:
        """Make everything after the first ``n`` requests padding."""
        for name in ("first_row", "num_samples", "position", "end", "token_row", "token_ids"):
            arrays[name][n:] = 0
        if self._padding_row is not None:
            arrays["table_rows"][n:] = self._padding_row
        for field in SAMPLING:
            arrays[field.name][n:] = field.padding


class PromptBuffers:
    """The ``StepInput`` of ``draft_prompt`` for ``num_tokens``, as ``DraftBuffers``. Nothing reads its logits' rows."""

    def __init__(
        self, num_tokens: int, limits: EngineLimits, device: torch.device, tables: BlockTables | None, sizes: StepSizes
    ) -> None:
        self._size, self._num_tokens, self._pads = limits.block_size, num_tokens, device.type != "cpu"
        self._padding_row = None if tables is None else tables.padding_row
        requests = limits.decode_bucket_sizes[-1]
        fields: Fields = dict.fromkeys(("input_ids", "positions", "slot_mapping"), ((num_tokens,), torch.int32))
        fields |= dict.fromkeys(("seq_lens", "logits_indices"), ((requests,), torch.int32))
        fields["query_start_loc"] = (requests + 1,), torch.int32
        name = "block_table" if tables is None else "table_rows"
        fields[name] = ((requests, limits.blocks_per_request) if tables is None else (requests,)), torch.int32
        self.buffers = FieldBuffers(fields, device)
        views = dict(self.buffers.tensors)
        kinds = dict.fromkeys(("input_ids", "positions", "slot_mapping"), 1) | {"query_start_loc": 2}
        for name, view in views.items():
            first = (sizes.requests, sizes.tokens, sizes.starts)[kinds.get(name, 0)]
            mark_sizes(view, first, *([sizes.blocks] if name == "block_table" else []))
        if tables is not None:
            views["block_table"] = tables.tensors[0]
        of_all = requests, num_tokens, requests + 1
        self._inputs = SizedInputs(views, self._input_of, of_all, kinds)
        self.whole = self._inputs.whole
        for arrays in self.buffers.all_arrays():
            self._pad(arrays, 0, 0)
        self.buffers.copy()

    def _input_of(self, views: Mapping[str, Any]) -> StepInput:
        return StepInput(**views)

    def fill(self, chosen: Sequence[Tokens], store: RequestRows) -> StepInput:
        arrays, n = self.buffers.next_arrays(), len(chosen)
        rows = np.array([row for row, _, _ in chosen])
        starts = np.array([start for _, start, _ in chosen], dtype=np.int32)
        counts = np.array([len(token_ids) for *_, token_ids in chosen], dtype=np.int32)
        ends = counts.cumsum(dtype=np.int32)
        total = int(ends[-1])
        positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        arrays["input_ids"][:total] = np.concatenate([token_ids for *_, token_ids in chosen])
        arrays["positions"][:total] = positions
        blocks, offsets = np.divmod(positions, self._size)
        arrays["slot_mapping"][:total] = store.block_table[np.repeat(rows, counts), blocks] * self._size + offsets
        arrays["query_start_loc"][1 : n + 1] = ends
        arrays["seq_lens"][:n] = starts + counts
        if self._padding_row is None:
            width = -(-int((starts + counts).max()) // self._size)
            arrays["block_table"][:n, :width] = store.block_table[rows, :width]
        else:
            arrays["table_rows"][:n] = rows
        if self._pads:
            self._pad(arrays, total, n)
        self.buffers.copy()
        return self.whole if self._pads else self._inputs.first(n, total, n + 1)

    def _pad(self, arrays: Arrays, num_tokens: int, num_requests: int) -> None:
        """Make everything after the tokens and requests padding."""
        for name in ("input_ids", "positions"):
            arrays[name][num_tokens:] = 0
        padding = np.arange(self._num_tokens - num_tokens, dtype=np.int32)
        arrays["slot_mapping"][num_tokens:] = SINK_BLOCK * self._size + padding % self._size
        arrays["query_start_loc"][num_requests + 1 :] = num_tokens
        arrays["seq_lens"][num_requests:] = 0
        if self._padding_row is not None:
            arrays["table_rows"][num_requests:] = self._padding_row
