"""SchedulerOutput -> StepInput and SamplingInput, in buffers of fixed size and address, padded to a bucket.

What lasts as long as a request (its row of the block table, its sampling parameters) is in ``RequestRows`` and is
written once. What lasts for a step is written into a bucket's ``StepBuffers``.
"""

import numpy as np
import torch

from compiled_llm.config import EngineLimits
from compiled_llm.models.inputs import StepInput
from compiled_llm.scheduling.block_pool import SINK_BLOCK
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.worker.field_buffers import Arrays, FieldBuffers, Fields
from compiled_llm.worker.request_rows import RequestRows


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
        fields: Fields = {
            "input_ids": ((tokens,), torch.int32),
            "positions": ((tokens,), torch.int32),
            "slot_mapping": ((tokens,), torch.int32),
            "feedback": ((tokens,), torch.int32),
            "query_start_loc": ((rows + 1,), torch.int32),
            "seq_lens": ((rows,), torch.int32),
            "logits_indices": ((rows,), torch.int32),
            "block_table": ((rows, limits.blocks_per_request), torch.int32),
            "position": ((rows,), torch.int32),
            **{field.name: ((rows, *field.shape), field.dtype) for field in SAMPLING},
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

        for field in SAMPLING:
            fields[field.name][:n] = store.parameters[field.name][rows]
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
        for field in SAMPLING:
            fields[field.name][num_requests:] = field.padding
        fields["position"][num_requests:] = 0
