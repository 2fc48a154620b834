"""SchedulerOutput -> StepInput and SamplingInput, in buffers of fixed size and address, padded to a bucket.

What lives as long as a request (its row of the block table, its sampling parameters) stands in ``RequestRows`` and is
written once. What lives for a step is written into a bucket's ``StepBuffers``: one block of host memory with a view for
each field, so that filling is numpy and a GPU gets the whole step by one copy.
"""

import dataclasses

import numpy as np
import torch

from compiled_llm.block_pool import SINK_BLOCK
from compiled_llm.config import Limits
from compiled_llm.models.inputs import StepInput
from compiled_llm.sampler import SamplingInput
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler import ScheduledRequest, SchedulerOutput

_ALIGNMENT = 64  # bytes; Inductor copies inputs that are not aligned to 16


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


def buckets_of(limits: Limits) -> list[Bucket]:
    """All buckets of an engine, smallest first. Token buckets have a row for every request that may run."""
    rows = limits.decode_bucket_sizes[-1]
    decode = [Bucket("decode", size, size) for size in limits.decode_bucket_sizes]
    return decode + [Bucket("tokens", size, rows) for size in limits.token_bucket_sizes]


def choose_bucket(buckets: list[Bucket], output: SchedulerOutput) -> Bucket:
    """The smallest bucket that holds the step. The scheduler's limits guarantee that there is one."""
    kind = "decode" if output.max_query_len == 1 else "tokens"
    return next(bucket for bucket in buckets if bucket.kind == kind and bucket.num_tokens >= output.num_tokens)


class RequestRows:
    """What the runner keeps for each running request, a row each, from admission to release."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        rows = limits.max_num_seqs
        self.vocab_size = vocab_size
        self.block_table = np.full((rows, limits.blocks_per_request), SINK_BLOCK, dtype=np.int32)
        self.num_blocks = [0] * rows
        self.temperature = np.zeros(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k = np.full(rows, vocab_size, dtype=np.int32)
        self.seed = np.zeros(rows, dtype=np.int64)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(rows - 1, -1, -1))

    def update(self, output: SchedulerOutput) -> list[int]:
        """Take in a step's releases, admissions and new blocks. Returns the row of each scheduled request."""
        for request_id in output.released_request_ids:
            self._free_rows.append(self._row_of.pop(request_id))
        rows = []
        for item in output.requests:
            if item.admission is not None:
                self._row_of[item.request_id] = row = self._free_rows.pop()
                self._admit(row, *item.admission)
            row = self._row_of[item.request_id]
            if item.new_block_ids:
                start, end = self.num_blocks[row], self.num_blocks[row] + len(item.new_block_ids)
                self.block_table[row, start:end] = item.new_block_ids
                self.num_blocks[row] = end
            rows.append(row)
        return rows

    def _admit(self, row: int, params: SamplingParams, seed: int) -> None:
        self.num_blocks[row] = 0
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self.seed[row] = seed


class StepBuffers:
    """The inputs of one bucket: a host array, its copy on the device, and the views that the graph reads.

    Attributes:
        step_input, sampling_input: views on the device at fixed addresses.
    """

    def __init__(self, bucket: Bucket, limits: Limits, device: torch.device) -> None:
        self.bucket = bucket
        self.block_size = limits.block_size
        tokens, rows = bucket.num_tokens, bucket.num_requests
        fields: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "input_ids": ((tokens,), torch.int32),
            "positions": ((tokens,), torch.int32),
            "slot_mapping": ((tokens,), torch.int32),
            "query_start_loc": ((rows + 1,), torch.int32),
            "seq_lens": ((rows,), torch.int32),
            "logits_indices": ((rows,), torch.int32),
            "block_table": ((rows, limits.blocks_per_request), torch.int32),
            "temperature": ((rows,), torch.float32),
            "top_p": ((rows,), torch.float32),
            "top_k": ((rows,), torch.int32),
            "seed": ((rows,), torch.int64),
            "position": ((rows,), torch.int32),
        }
        offsets, size = {}, 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self._host

        def view(memory: torch.Tensor, name: str) -> torch.Tensor:
            shape, dtype = fields[name]
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            return memory[offsets[name] : offsets[name] + num_bytes].view(dtype).view(shape)

        host = {name: view(self._host, name).numpy() for name in fields}
        device_views = {name: view(self._device, name) for name in fields}
        for tensor in device_views.values():
            torch._dynamo.mark_static_address(tensor)
        self.step_input = StepInput(**{name: device_views[name] for name in StepInput._fields})
        self.sampling_input = SamplingInput(**{name: device_views[name] for name in SamplingInput._fields})
        self._input_ids, self._positions = host["input_ids"], host["positions"]
        self._slot_mapping, self._block_table = host["slot_mapping"], host["block_table"]
        self._query_start_loc, self._seq_lens = host["query_start_loc"], host["seq_lens"]
        self._logits_indices = host["logits_indices"]
        self._temperature, self._top_p, self._top_k = host["temperature"], host["top_p"], host["top_k"]
        self._seed, self._position = host["seed"], host["position"]
        self.clear()

    def clear(self) -> None:
        """All padding: a step on this writes to the sink block and means nothing."""
        self._fill(0, 0)
        self._copy()

    def fill(self, requests: list[ScheduledRequest], rows: list[int], store: RequestRows) -> None:
        """Write a step: ``rows[i]`` is the row of ``requests[i]`` in ``store``."""
        n = len(requests)
        counts = np.array([len(item.token_ids) for item in requests], dtype=np.int32)
        starts = np.array([item.num_computed_tokens for item in requests], dtype=np.int32)
        total = int(counts.sum())

        ends = counts.cumsum(dtype=np.int32)
        self._query_start_loc[1 : n + 1] = ends
        self._seq_lens[:n] = starts + counts
        self._logits_indices[:n] = ends - 1
        self._block_table[:n] = store.block_table[rows]
        self._input_ids[:total] = [token for item in requests for token in item.token_ids]

        positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        owners = np.repeat(np.arange(n, dtype=np.int32), counts)
        blocks = self._block_table[owners, positions // self.block_size]
        self._positions[:total] = positions
        self._slot_mapping[:total] = blocks * self.block_size + positions % self.block_size

        self._temperature[:n] = store.temperature[rows]
        self._top_p[:n] = store.top_p[rows]
        self._top_k[:n] = store.top_k[rows]
        self._seed[:n] = store.seed[rows]
        self._position[:n] = self._seq_lens[:n]
        self._fill(total, n)
        self._copy()

    def _fill(self, num_tokens: int, num_requests: int) -> None:
        """Make padding of everything past the step's tokens and requests."""
        self._input_ids[num_tokens:] = 0
        self._positions[num_tokens:] = 0
        # Padding tokens share the sink's slots, in turn.
        padding = np.arange(self.bucket.num_tokens - num_tokens, dtype=np.int32)
        self._slot_mapping[num_tokens:] = SINK_BLOCK * self.block_size + padding % self.block_size
        self._query_start_loc[num_requests + 1 :] = num_tokens
        self._seq_lens[num_requests:] = 0
        self._logits_indices[num_requests:] = 0
        self._block_table[num_requests:] = SINK_BLOCK
        self._temperature[num_requests:] = 0.0
        self._top_p[num_requests:] = 1.0
        self._top_k[num_requests:] = 1
        self._seed[num_requests:] = 0
        self._position[num_requests:] = 0

    def _copy(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
