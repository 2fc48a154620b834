"""SchedulerOutput -> StepInput and SamplingInput, in buffers of fixed size and address, padded to a bucket.

What lives as long as a request (its row of the block table, its sampling parameters) stands in ``RequestRows`` and is
written once. What lives for a step is written into a bucket's ``StepBuffers``.
"""

import dataclasses

import numpy as np
import torch

from compiled_llm.config import EngineLimits
from compiled_llm.models.inputs import StepInput
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.worker.field_buffers import Arrays, FieldBuffers


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A set of static sizes that is compiled once. ``kind``: "decode" (a token each) or "tokens" (any mix)."""

    kind: str
    num_tokens: int
    num_requests: int

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.num_tokens}"

    @property
    def max_query_len(self) -> int:
        return 1 if self.kind == "decode" else self.num_tokens


def buckets_of(limits: EngineLimits) -> list[Bucket]:
    """All buckets of an engine, smallest first. Token buckets have a row for every request that may run."""
    rows = limits.decode_bucket_sizes[-1]
    decode = [Bucket("decode", size, size) for size in limits.decode_bucket_sizes]
    return decode + [Bucket("tokens", size, rows) for size in limits.token_bucket_sizes]


def choose_bucket(buckets: list[Bucket], output: SchedulerOutput) -> Bucket:
    """The smallest bucket that holds the step. The scheduler's limits guarantee that there is one."""
    kind, num_tokens = "decode" if output.max_query_len == 1 else "tokens", output.num_tokens
    return next(bucket for bucket in buckets if bucket.kind == kind and bucket.num_tokens >= num_tokens)


class RequestRows:
    """What the runner keeps for each running request, a row each, from admission to release."""

    def __init__(self, limits: EngineLimits, vocab_size: int) -> None:
        rows = limits.max_num_seqs
        self.vocab_size = vocab_size
        self.block_table = np.full((rows, limits.blocks_per_request), SINK_BLOCK, dtype=np.int32)
        self.num_blocks = np.zeros(rows, dtype=np.int32)
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.full(rows, vocab_size, dtype=np.int32)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.seed = np.zeros(rows, dtype=np.int64)
        self.changes_logits = np.zeros(rows, dtype=bool)
        self.wants_logprobs = np.zeros(rows, dtype=bool)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(rows - 1, -1, -1))

    def update(self, output: SchedulerOutput) -> list[int]:
        """Take in a step's releases, admissions and new blocks. Returns the row of each scheduled request."""
        row_of = self._row_of
        for request_id in output.released_request_ids:
            self._free_rows.append(row_of.pop(request_id))
        for admission in output.admissions:
            row_of[admission.request_id] = row = self._free_rows.pop()
            self._admit(row, admission.sampling_params, admission.seed)
        for request_id, start, blocks in output.table_updates:
            row, end = row_of[request_id], start + len(blocks)
            assert start <= self.num_blocks[row], "a block table has a hole"
            self.block_table[row, start:end] = blocks
            self.num_blocks[row] = end
        return [row_of[request_id] for request_id in output.request_ids]

    def row_of(self, request_id: str) -> int:
        """The row of a running request."""
        return self._row_of[request_id]

    def clear(self) -> None:
        """Forget all requests."""
        self._row_of.clear()
        self._free_rows = list(range(len(self.num_blocks) - 1, -1, -1))

    def _admit(self, row: int, params: SamplingParams, seed: int) -> None:
        self.num_blocks[row] = 0
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.min_p[row] = params.min_p
        self.seed[row] = seed
        self.changes_logits[row] = params.changes_logits
        self.wants_logprobs[row] = params.logprobs is not None


class StepBuffers:
    """The inputs of one bucket, as the host fills them and the graph reads them.

    Attributes:
        step_input, sampling_input: views on the device at fixed addresses.
        feedback: [T] int32 on the device; the place in the step before whose sampled token stands here, or -1 where
            ``input_ids`` has it.
    """

    def __init__(self, bucket: Bucket, limits: EngineLimits, device: torch.device) -> None:
        self.bucket = bucket
        self.block_size = limits.block_size
        tokens, rows = bucket.num_tokens, bucket.num_requests
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((tokens,), torch.int32),
            "positions": ((tokens,), torch.int32),
            "slot_mapping": ((tokens,), torch.int32),
            "feedback": ((tokens,), torch.int32),
            "query_start_loc": ((rows + 1,), torch.int32),
            "seq_lens": ((rows,), torch.int32),
            "logits_indices": ((rows,), torch.int32),
            "block_table": ((rows, limits.blocks_per_request), torch.int32),
            "temperature": ((rows,), torch.float32),
            "top_p": ((rows,), torch.float32),
            "top_k": ((rows,), torch.int32),
            "min_p": ((rows,), torch.float32),
            "seed": ((rows,), torch.int64),
            "position": ((rows,), torch.int32),
        }
        self._buffers = FieldBuffers(fields, device)
        views = self._buffers.tensors
        self.step_input = StepInput(**{name: views[name] for name in StepInput._fields})
        self.sampling_input = SamplingInput(**{name: views[name] for name in SamplingInput._fields})
        self.feedback = views["feedback"]
        self.clear()

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._buffers.nbytes

    def clear(self) -> None:
        """All padding: a step on this writes to the sink block and means nothing."""
        for fields in self._buffers.all_arrays():
            self._pad(fields, 0, 0)
            fields["block_table"][:] = SINK_BLOCK
        self._buffers.copy()

    def fill(self, output: SchedulerOutput, rows: list[int], store: RequestRows) -> None:
        """Write a step: ``rows[i]`` is the row of ``output.request_ids[i]`` in ``store``."""
        fields = self._buffers.next_arrays()
        n, total = len(rows), output.num_tokens
        counts = np.array(output.num_scheduled_tokens, dtype=np.int32)
        starts = np.array(output.num_computed_tokens, dtype=np.int32)

        ends = counts.cumsum(dtype=np.int32)
        fields["query_start_loc"][1 : n + 1] = ends
        fields["seq_lens"][:n] = starts + counts
        fields["logits_indices"][:n] = ends - 1
        fields["feedback"][:total] = -1
        fields["feedback"][ends - 1] = output.feedback
        fields["input_ids"][:total] = output.token_ids

        # Entries past a request's blocks are never read: the table is written as far as the longest reaches.
        width = int(store.num_blocks[rows].max())
        block_table = fields["block_table"]
        block_table[:n, :width] = store.block_table[rows, :width]

        if total == n:
            positions, owners = starts, np.arange(n)
        else:
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
            owners = np.repeat(np.arange(n), counts)
        blocks, offsets = np.divmod(positions, self.block_size)
        fields["positions"][:total] = positions
        fields["slot_mapping"][:total] = block_table[owners, blocks] * self.block_size + offsets

        fields["temperature"][:n] = store.temperature[rows]
        fields["top_p"][:n] = store.top_p[rows]
        fields["top_k"][:n] = store.top_k[rows]
        fields["min_p"][:n] = store.min_p[rows]
        fields["seed"][:n] = store.seed[rows]
        fields["position"][:n] = fields["seq_lens"][:n]
        self._pad(fields, total, n)
        self._buffers.copy()

    def _pad(self, fields: Arrays, num_tokens: int, num_requests: int) -> None:
        """Make padding of everything past the step's tokens and requests."""
        fields["input_ids"][num_tokens:] = 0
        fields["positions"][num_tokens:] = 0
        fields["feedback"][num_tokens:] = -1
        # Padding tokens share the sink's slots, in turn.
        padding = np.arange(self.bucket.num_tokens - num_tokens, dtype=np.int32)
        fields["slot_mapping"][num_tokens:] = SINK_BLOCK * self.block_size + padding % self.block_size
        fields["query_start_loc"][num_requests + 1 :] = num_tokens
        fields["seq_lens"][num_requests:] = 0
        fields["logits_indices"][num_requests:] = 0
        fields["temperature"][num_requests:] = 0.0
        fields["top_p"][num_requests:] = 1.0
        fields["top_k"][num_requests:] = 1
        fields["min_p"][num_requests:] = 0.0
        fields["seed"][num_requests:] = 0
        fields["position"][num_requests:] = 0
