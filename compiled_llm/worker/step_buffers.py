"""SchedulerOutput -> StepInput and SamplingInput, in buffers of fixed size and address, padded to a bucket.

On a CPU, where one graph serves all sizes, a step has its own size: it computes no padding, or little with drafts.

What stays the same while a request runs (its row of the block table, its sampling parameters) is in ``RequestRows``
and is written once. What changes with each step is written into a bucket's ``StepBuffers``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineLimits
from compiled_llm.models.inputs import BlockTable, StepInput
from compiled_llm.ops.recurrent.state_rows import SINK_SLOT, StateRows
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.bucket import Bucket, buckets_of, own_sizes
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.state_pool import MOST_SNAPSHOTS
from compiled_llm.scheduling.window_pool import stream_of
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.draft_trees import tree_rows
from compiled_llm.worker.field_buffers import Arrays, FieldBuffers, Fields
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sized_inputs import SizedInputs

_MOST_TAKEN_BYTES = 1 << 18  # one program reads some 20 GB/s of the host's memory


class StepSizes(NamedTuple):
    """The sizes in which steps and engines differ, as compiled code sees them. None: static.

    On a CPU code is generic in all of them, so one graph serves all buckets, and engines of other limits. Nothing is
    lost by that: it calls ops, and in those each row is computed by itself. On a GPU the code of a step is a bucket's;
    what takes the logits of steps is the same for all numbers of rows, unless torch records the CUDA graphs, which are
    of one size each.
    """

    tokens: DynamicSize | None = None  # T
    requests: DynamicSize | None = None  # R
    starts: DynamicSize | None = None  # R + 1
    rows: DynamicSize | None = None  # of logits, to the step
    sampled: DynamicSize | None = None  # of logits, to what takes them
    blocks: DynamicSize | None = None  # M, of a row of a block table
    most_tokens: DynamicSize | None = None  # of a step
    most_rows: DynamicSize | None = None  # of logits
    positions: DynamicSize | None = None  # that a request may have
    most_requests: DynamicSize | None = None  # that run, and a row for padding
    vocabulary: DynamicSize | None = None  # V, to what takes logits
    mask_words: DynamicSize | None = None  # V / 32, rounded up
    prompt_rows: DynamicSize | None = None  # tokens of prompts whose log-probabilities are computed at a time
    kept: DynamicSize | None = None  # K, of rows that go on behind the last attention

    @classmethod
    def of(cls, limits: EngineLimits, device: torch.device, uses_trees: bool = False) -> "StepSizes":
        """``uses_trees``: whether torch records the CUDA graphs."""
        if device.type != "cpu":
            rows = {bucket.num_rows for bucket in buckets_of(limits)}
            # The example decides how loops are cut into programs: few rows are the usual case.
            one_for_all = len(rows) > 1 and not uses_trees
            return cls(sampled=DynamicSize("logits rows", min(8, max(rows))) if one_for_all else None)
        # Small examples: loops over few tokens are not worth waking other threads, and those over many take no time
        # beside the step. They differ, so that the compiler takes none of these sizes for another one.
        of_rows = DynamicSize("logits rows", 3)
        return cls(
            DynamicSize("tokens", 2),
            DynamicSize("requests", 4),
            DynamicSize("requests + 1", 5),
            of_rows,
            of_rows,
            DynamicSize("blocks of a request", 11),
            DynamicSize("most tokens", 23),
            DynamicSize("most logits rows", 13),
            DynamicSize("positions", 37),
            DynamicSize("most requests + 1", 29),
            DynamicSize("vocabulary", 20011),
            DynamicSize("vocabulary / 32", 626),
            DynamicSize("rows of prompts", 7),
            DynamicSize("kept rows", 6),
        )


def mark_sizes(tensor: Tensor, *sizes: DynamicSize | None) -> Tensor:
    """``tensor``, whose first sizes are ``sizes`` to the compiler."""
    for dimension, size in enumerate(sizes):
        if size is not None:
            mark_dynamic_size(tensor, dimension, size)
    return tensor


class StepBuffers:
    """The inputs of one bucket, as the host fills them and the graph reads them.

    Args:
        windows: of the pool.
        tables: where the device has the block tables of all requests. None, as on a CPU: a step's own are filled in.
        uses_trees: whether torch records the CUDA graphs.
        pads: whether a step computes all of the bucket, as a graph of its size does.
        keeps_rows: whether a step goes on behind the last attention with some rows alone; not with ``pads``.

    Attributes:
        step_input, sampling_input: views on the device at fixed addresses; once ``fill`` was called, of ``own_sizes``,
            unless ``pads``.
        feedback: ``[T]`` int32 on the device: for each token the logits row of the step before that samples it, or -1
            where ``input_ids`` has it.
        num_tokens: that the step computes, padding among them.
    """

    def __init__(
        self,
        bucket: Bucket,
        limits: EngineLimits,
        device: torch.device,
        windows: Sequence[int] = (),
        tables: BlockTables | None = None,
        uses_trees: bool = False,
        pads: bool = True,
        keeps_rows: bool = False,
    ) -> None:
        self.bucket = bucket
        self.block_size = limits.block_size
        self._window_fields = [(f"slot_mapping {n}", f"block_table {n}") for n in range(len(windows))]
        self._table_fields = [("slot_mapping", "block_table"), *self._window_fields]
        # Of the one whose requests keep their first tokens besides.
        self._stream_fields = [(f"seq_lens {n}", stream_of(window, limits)) for n, window in enumerate(windows)]
        self._padding_row = None if tables is None else tables.padding_row
        streams = [
            name for (_, name), (_, stream) in zip(self._window_fields, self._stream_fields, strict=True) if stream
        ]
        self._own_tables = ["block_table", *(name for _, name in self._window_fields)] if tables is None else streams
        self._state_fields = StateRows._fields if limits.num_state_slots else ()
        self._adapter_fields = ("adapter_slots",) if limits.max_loras and bucket.adapters is not False else ()
        self._has_trees = limits.has_draft_trees
        assert not (pads and keeps_rows), "code of one size"
        self._keeps_rows = keeps_rows
        fields = ({} if tables is None else self._fields_of_tables()) | self._fields(limits)
        self._tables, self._num_changed = tables, 0
        self._buffers = FieldBuffers(fields, device)
        views, sizes = self._buffers.tensors, StepSizes.of(limits, device, uses_trees)
        self._mark(views, sizes)
        self._pads = pads
        assert pads or sizes.tokens is not None, "code of one size"
        self._all = bucket.num_tokens, bucket.num_requests, bucket.num_rows, bucket.num_tokens
        kinds = dict.fromkeys(self._token_fields, 1) | dict.fromkeys(self._request_fields, 2)
        kinds |= {"query_start_loc": 3, "kept_rows": 4}
        of_all = views if tables is None else views | self._tables_of(tables)
        self._inputs = SizedInputs(of_all, self._inputs_of, _sizes_of(*self._all), kinds)
        self._take(*self._all)
        self._changed = None if tables is None else (views["changed_places"], views["changed_entries"])
        # By the id of a host buffer's arrays: the rows of the requests whose step it has, how many tokens of each, all
        # sampled at, and how many changes of block tables it has seen.
        self._held: dict[int, tuple[np.ndarray | None, tuple[int, ...], int]] = {}
        # And behind how many of its tokens, requests and logits rows all is padding.
        self._filled: dict[int, tuple[int, int, int]] = {}
        self.clear()

    def _tables_of(self, tables: BlockTables) -> dict[str, Tensor]:
        names = ("block_table", *(name for _, name in self._window_fields))
        return dict(zip(names, tables.tensors, strict=True))

    def _inputs_of(self, views: Mapping[str, Tensor]) -> tuple[StepInput, SamplingInput, Tensor]:
        """``step_input``, ``sampling_input`` and ``feedback``."""
        step_input = StepInput(
            **{name: views.get(name) for name in StepInput._fields if name not in ("windows", "plans", "states")},  # type: ignore[arg-type]
            windows=tuple(
                BlockTable(views[slots], views[table], views.get(seq_lens))
                for (slots, table), (seq_lens, _) in zip(self._window_fields, self._stream_fields, strict=True)
            ),
            states=StateRows(*(views[name] for name in self._state_fields)) if self._state_fields else None,
        )
        sampling_input = SamplingInput(**{name: views[name] for name in SamplingInput._fields})
        return step_input, sampling_input, views["feedback"]

    def _take(self, tokens: int, requests: int, rows: int, kept: int) -> None:
        """The inputs are those of so many tokens, requests, logits rows and kept rows from now on; no others."""
        own = self._inputs.first(*_sizes_of(tokens, requests, rows, kept))
        self.step_input, self.sampling_input, self.feedback = own
        self.num_tokens = tokens

    def _fields(self, limits: EngineLimits) -> Fields:
        """Sizes and dtypes of all that a step on a CPU is given."""
        tokens, requests, rows = self.bucket.num_tokens, self.bucket.num_requests, self.bucket.num_rows
        writes = requests, 1 + limits.num_draft_tokens + MOST_SNAPSHOTS
        return {
            "input_ids": ((tokens,), torch.int32),
            "positions": ((tokens,), torch.int32),
            "slot_mapping": ((tokens,), torch.int32),
            "feedback": ((tokens,), torch.int32),
            "query_start_loc": ((requests + 1,), torch.int32),
            "seq_lens": ((requests,), torch.int32),
            "logits_indices": ((rows,), torch.int32),
            **({"kept_rows": ((tokens,), torch.int32)} if self._keeps_rows else {}),
            **({"ancestors": ((tokens,), torch.int64)} if limits.has_draft_trees else {}),
            **{name: ((tokens,), torch.int32) for name, _ in self._window_fields},
            **dict.fromkeys(self._adapter_fields, ((tokens,), torch.int32)),
            **dict.fromkeys(self._own_tables, ((requests, limits.blocks_per_request), torch.int32)),
            **{name: ((requests,), torch.int32) for name, stream in self._stream_fields if stream},
            "position": ((rows,), torch.int32),
            **{field.name: ((rows, *field.shape), field.dtype) for field in SAMPLING},
            **{name: ((requests,) if name == "read_slot" else writes, torch.int32) for name in self._state_fields},
        }

    def _fields_of_tables(self) -> Fields:
        """Sizes and dtypes of what tables on the device need: rows of the requests, and room for a step's changes."""
        requests, blocks = self.bucket.num_requests, self.bucket.num_tokens // self.block_size
        room = (requests + blocks) * len(self._table_fields)
        return {
            "header": ((3,), torch.int32),
            "table_rows": ((requests,), torch.int32),
            "changed_places": ((room,), torch.int64),
            "changed_entries": ((room,), torch.int32),
        }

    @property
    def _token_fields(self) -> tuple[str, ...]:
        """Names of fields with an entry for each token."""
        slots = (name for name, _ in self._window_fields)
        return "input_ids", "positions", "slot_mapping", "feedback", "ancestors", *self._adapter_fields, *slots

    @property
    def _request_fields(self) -> tuple[str, ...]:
        """Names of fields with an entry for each request."""
        tables, lens = (name for _, name in self._table_fields), (name for name, _ in self._stream_fields)
        return "seq_lens", "table_rows", *tables, *lens, *self._state_fields

    def _mark(self, views: dict[str, Tensor], sizes: StepSizes) -> None:
        """Tell the compiler which sizes are dynamic."""
        of_fields: dict[str, DynamicSize | None] = dict.fromkeys(self._token_fields, sizes.tokens)
        of_fields |= dict.fromkeys(self._request_fields, sizes.requests)
        of_fields |= {"query_start_loc": sizes.starts, "logits_indices": sizes.rows, "kept_rows": sizes.kept}
        of_fields |= dict.fromkeys(("header", "changed_places", "changed_entries"))  # no compiled code has them
        for name, view in views.items():
            is_table = name.startswith("block_table")
            mark_sizes(view, of_fields.get(name, sizes.sampled), *([sizes.blocks] if is_table else []))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._buffers.nbytes

    def clear(self) -> None:
        """Make all of it padding: a step on this writes to the sink block, and its results have no meaning."""
        self._held.clear()
        self._filled.clear()
        for fields in self._buffers.all_arrays():
            self._pad(fields, 0, 0, 0)
            for name in self._own_tables:
                fields[name][:] = SINK_BLOCK
            for name in self._state_fields:
                fields[name][:] = 0
        self._buffers.copy()
        self._take(*self._all)

    def fill(
        self, output: SchedulerOutput, rows: np.ndarray, store: RequestRows, slot: int = 0, *, keeps_all: bool = False
    ) -> int:
        """Write a step. Returns the number of logits rows.

        Args:
            rows: ``[R]`` int64, those of its requests in ``store``.
            slot: where a graph that ``begin_graph`` began leaves its tokens.
            keeps_all: whether the head's input is wanted of all tokens, where a step keeps some.
        """
        fields = self._buffers.next_arrays()
        if self._tables is not None:
            fields["header"][1:] = slot, 0
        if self._tables is not None and store.changes:
            self._fill_changes(fields, self._tables, store)
        n, total = len(rows), output.num_tokens
        is_plain = self._is_plain(output)
        held, held_counts, num_changes = self._held.pop(id(fields), (None, (), 0))
        if is_plain:
            self._held[id(fields)] = rows, output.num_samples, store.num_changes
        if is_plain and held is rows and held_counts == output.num_samples:
            self._fill_again(fields, output, rows, store, has_new_blocks=store.num_changes > num_changes)
            return total
        counts = np.array(output.num_scheduled_tokens, dtype=np.int32)
        starts = np.array(output.num_computed_tokens, dtype=np.int32)

        ends, seq_lens = counts.cumsum(dtype=np.int32), starts + counts
        fields["query_start_loc"][1 : n + 1] = ends
        fields["seq_lens"][:n] = seq_lens
        fields["feedback"][:total] = -1
        fields["feedback"][ends - 1] = output.feedback
        fields["input_ids"][:total] = output.token_ids

        if self._padding_row is not None:
            fields["table_rows"][:n] = rows
        if total == n:
            positions, owners = starts, rows
        else:
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
            owners = np.repeat(rows, counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        fields["positions"][:total] = positions
        for name in self._adapter_fields:
            fields[name][:total] = store.adapter_slots[owners]
        for place, distance in output.moved_sinks:
            fields["positions"][ends[place] - counts[place] : ends[place]] += distance
        # Entries past a request's blocks are never read: a table is written as far as the longest reaches.
        has_tables = held is rows and store.num_changes == num_changes
        width = 0 if has_tables or not self._own_tables else int(store.num_blocks[rows].max())
        for (slots, name), known in zip(self._table_fields, store.tables, strict=True):
            fields[slots][:total] = known[owners, blocks] * self.block_size + offsets
            if name in self._own_tables and not has_tables:
                fields[name][:n, :width] = known[rows, :width]
        self._fill_streams(fields, store, rows, starts, seq_lens)
        if self._state_fields:
            self._fill_states(fields, output)

        num_rows = self._fill_logits_rows(fields, output, store, rows, ends - 1, seq_lens)
        if self._has_trees:
            self._fill_trees(fields, output, ends - counts)
        own = total, n, num_rows
        taken = self._all[:3] if self._pads else own_sizes(self.bucket, *own)
        if taken != own:
            self._pad(fields, *own)
        else:
            before = self._filled[id(fields)]  # what is left of it lies behind this step's, where nothing reads it
            self._filled[id(fields)] = max(total, before[0]), max(n, before[1]), max(num_rows, before[2])
        self._take(*taken, self._keep_rows(fields, taken[0], taken[2], num_rows, keeps_all=keeps_all))
        self._copy()
        return num_rows

    def _keep_rows(self, fields: Arrays, tokens: int, rows: int, num_rows: int, *, keeps_all: bool) -> int:
        """Of a step of so many tokens and logits rows, write which tokens are kept. Returns how many.

        ``num_rows``: of logits, without padding.
        """
        if not self._keeps_rows:
            return tokens
        kept, indices = fields["kept_rows"], fields["logits_indices"]
        if keeps_all:
            kept[:tokens] = np.arange(tokens, dtype=np.int32)
            return tokens
        kept[:num_rows], kept[num_rows:rows] = indices[:num_rows], 0
        indices[:rows] = np.arange(rows, dtype=np.int32)
        return rows

    def _fill_logits_rows(
        self,
        fields: Arrays,
        output: SchedulerOutput,
        store: RequestRows,
        rows: np.ndarray,
        indices: np.ndarray,
        next_positions: np.ndarray,
    ) -> int:
        """Of each request: its last token in the step, and the position after. Returns the number of rows."""
        row_owners = rows
        if output.num_tokens > len(rows) and max(output.num_samples) > 1:
            places, distances = logits_rows(output)
            indices, next_positions = indices[places] - distances, next_positions[places] - distances
            row_owners = row_owners[places]
        num_rows = len(indices)
        fields["logits_indices"][:num_rows] = indices
        fields["position"][:num_rows] = next_positions
        for field in SAMPLING:
            fields[field.name][:num_rows] = store.parameters[field.name][row_owners]
        return num_rows

    def _fill_trees(self, fields: Arrays, output: SchedulerOutput, first_tokens: np.ndarray) -> None:
        """Rows of a tree stand as far behind its first as their path is long; their slots are those of a chain."""
        fields["ancestors"][: output.num_tokens] = 0
        first_rows = output.first_rows() if output.trees else []
        for place, parents in output.trees:
            depths, masks = tree_rows(parents)
            token, row, count = int(first_tokens[place]), first_rows[place], len(depths)
            fields["positions"][token : token + count] = output.num_computed_tokens[place] + depths
            fields["position"][row : row + count] = output.num_computed_tokens[place] + depths + 1
            fields["ancestors"][token : token + count] = masks

    def _fill_changes(self, fields: Arrays, tables: BlockTables, store: RequestRows) -> None:
        """Write what changes of the tables on the device; or send it by itself, if that is too much."""
        places, entries = tables.pack(store.changes)
        if len(places) > len(fields["changed_places"]):
            tables.send(places, entries)
            return
        self._num_changed = fields["header"][2] = count = len(places)
        fields["changed_places"][:count], fields["changed_entries"][:count] = places, entries

    def _copy(self) -> None:
        """Copy all to the device, and change the tables there."""
        self._buffers.copy()
        count, self._num_changed = self._num_changed, 0
        if count and self._tables is not None and self._changed is not None and not self._buffers.is_taken:
            places, entries = self._changed
            self._tables.write(places[:count], entries[:count])

    def begin_graph(self, chosen: Tensor) -> bool:
        """The first launch of the bucket's graph: it takes what was filled. ``chosen``, [1] int32, gets the slot.

        False, and there is none: that is too much for one program, or the host reads of it what the graph will write.
        """
        if self._tables is None or self._state_fields or self._buffers.nbytes > _MOST_TAKEN_BYTES:
            return False
        self._buffers.begin_graph(chosen, self._tables.all)
        return True

    @property
    def is_taken(self) -> bool:
        """Whether the bucket's graph takes what is filled."""
        return self._buffers.is_taken

    def start_graph(self) -> None:
        """The bucket's graph is about to be started."""
        self._buffers.start_graph()

    def _is_plain(self, output: SchedulerOutput) -> bool:
        """Whether a step has the next token of each request, chains of drafts after them, and nothing else."""
        if output.num_samples != output.num_scheduled_tokens or output.trees or output.moved_sinks:
            return False
        return not (self._state_fields or any(stream for _, stream in self._stream_fields))

    def _fill_again(
        self, fields: Arrays, output: SchedulerOutput, rows: np.ndarray, store: RequestRows, has_new_blocks: bool
    ) -> None:
        """Write what differs from the step that these arrays hold, whose requests and tokens of each are the same."""
        n, total, owners = len(rows), output.num_tokens, rows
        starts = positions = np.array(output.num_computed_tokens, dtype=np.int32)
        if total == n:
            fields["feedback"][:n] = output.feedback
            fields["seq_lens"][:n] = starts + 1
        else:
            ends = fields["query_start_loc"][1 : n + 1]
            counts = np.array(output.num_samples, dtype=np.int32)
            fields["feedback"][ends - 1] = output.feedback
            fields["seq_lens"][:n] = starts + counts
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
            owners = np.repeat(rows, counts)
        fields["positions"][:total] = positions
        fields["position"][:total] = positions + 1
        fields["input_ids"][:total] = output.token_ids
        blocks, offsets = np.divmod(positions, self.block_size)
        for (slots, name), known in zip(self._table_fields, store.tables, strict=True):
            fields[slots][:total] = known[owners, blocks] * self.block_size + offsets
            if has_new_blocks and name in self._own_tables:
                width = int(store.num_blocks[rows].max())
                fields[name][:n, :width] = known[rows, :width]
        self._copy()

    def _fill_streams(
        self, fields: Arrays, store: RequestRows, rows: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray
    ) -> None:
        """Of a table, leave out the blocks between sink tokens and window: a request seems to be that much shorter."""
        for (_, table), (name, stream), known in zip(
            self._window_fields, self._stream_fields, store.window_tables, strict=True
        ):
            if stream is not None:
                dropped = np.array([stream.num_dropped(start) for start in starts.tolist()], dtype=np.int32)
                fields[name][: len(rows)] = kept = seq_lens - dropped
                width = -(-int(kept.max()) // self.block_size)
                columns = np.arange(width)
                later = columns >= stream.sink_tokens // self.block_size
                columns = columns + later * (dropped // self.block_size)[:, None]
                # Columns past a request's blocks are never read.
                columns = np.minimum(columns, known.shape[1] - 1)
                fields[table][: len(rows), :width] = known[rows[:, None], columns]

    def _fill_states(self, fields: Arrays, output: SchedulerOutput) -> None:
        """Slots that are read and written; unused entries are the sink."""
        read_slot, write_slot, write_after = (fields[name] for name in self._state_fields)
        told = output.states
        read_slot[: len(told.reads)] = told.reads
        for row, writes in enumerate(told.writes):
            write_slot[row, : len(writes)], write_after[row, : len(writes)] = zip(*writes, strict=True)
            write_slot[row, len(writes) :], write_after[row, len(writes) :] = SINK_SLOT, 0
        read_slot[len(told.reads) :] = SINK_SLOT
        write_slot[len(told.writes) :], write_after[len(told.writes) :] = SINK_SLOT, 0

    def _pad(self, fields: Arrays, num_tokens: int, num_requests: int, num_rows: int) -> None:
        """Make all after the step's tokens, requests and logits rows padding that the step before was longer by."""
        bucket = self.bucket
        everything = bucket.num_tokens, bucket.num_requests, bucket.num_rows
        tokens_before, requests_before, rows_before = self._filled.get(id(fields), everything)
        self._filled[id(fields)] = num_tokens, num_requests, num_rows
        fields["query_start_loc"][num_requests + 1 :] = num_tokens
        if num_tokens < tokens_before:
            fields["input_ids"][num_tokens:] = 0
            if self._has_trees:
                fields["ancestors"][num_tokens:] = 0
            fields["positions"][num_tokens:] = 0
            fields["feedback"][num_tokens:] = -1
            for name in self._adapter_fields:
                fields[name][num_tokens:] = 0
        if num_tokens != tokens_before:  # padding tokens share the sink's slots, in turn
            padding = np.arange(bucket.num_tokens - num_tokens, dtype=np.int32)
            for name in ("slot_mapping", *(slots for slots, _ in self._window_fields)):
                fields[name][num_tokens:] = SINK_BLOCK * self.block_size + padding % self.block_size
        if num_requests < requests_before:
            for name in ("seq_lens", *(name for name, stream in self._stream_fields if stream)):
                fields[name][num_requests:] = 0
            if self._padding_row is not None:
                fields["table_rows"][num_requests:] = self._padding_row
        if num_rows < rows_before:
            fields["logits_indices"][num_rows:] = 0
            for field in SAMPLING:
                fields[field.name][num_rows:] = field.padding
            fields["position"][num_rows:] = 0


def _sizes_of(tokens: int, requests: int, rows: int, kept: int) -> tuple[int, int, int, int, int]:
    """For ``SizedInputs``: of fields of logits rows, tokens, requests, of ``query_start_loc`` and of kept rows."""
    return rows, tokens, requests, requests + 1, kept


def logits_rows(output: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
    """For each logits row: the place of its request in the step, and its distance in tokens from the request's last.

    Both ``[rows]`` int64.
    """
    counts = np.maximum(np.array(output.num_samples, dtype=np.int64), 1)
    places = np.repeat(np.arange(len(counts)), counts)
    return places, counts.cumsum()[places] - 1 - np.arange(len(places))
