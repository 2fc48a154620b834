"""Measures at the start what the scheduler has to choose between: steps of each token bucket, and swaps of blocks."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm.config import EngineLimits
from compiled_llm.ops import swap
from compiled_llm.progress import StartProgress
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import Admission, SchedulerOutput, SchedulerOutputBuilder
from compiled_llm.worker.block_copies import swap_indices
from compiled_llm.worker.compiled_steps import CompiledSteps
from compiled_llm.worker.request_rows import RequestRows

_RUNS, _SWAP_BLOCKS = 3, 16


def measure_buckets(
    steps: CompiledSteps, limits: EngineLimits, num_blocks: int, progress: StartProgress
) -> dict[int, float]:
    """Seconds of a step in each token bucket, by the bucket's tokens.

    Each bucket is full of one or more prompts, on blocks of the pool that no request uses yet.
    """
    buckets = [bucket for bucket in steps.buckets if bucket.kind == "tokens"]
    weights = {bucket.name: float(bucket.num_tokens) for bucket in buckets}
    bucket_seconds = {}
    with progress.stage("measuring steps", weights, is_long=False) as stage:
        for bucket in buckets:
            stage.next(bucket.name)
            rows = RequestRows(limits, steps.model_config.vocab_size)
            output = _prompts(bucket, limits, num_blocks)
            steps.buffers[bucket].fill(output, rows.update(output), rows)
            run = functools.partial(steps.run_step, bucket)
            bucket_seconds[bucket.num_tokens] = statistics.median(_timed(run, steps.device) for _ in range(_RUNS))
            steps.buffers[bucket].clear()
    return bucket_seconds


def measure_swap(caches: Sequence[Tensor], swap_space: Tensor, num_blocks: int, device: torch.device) -> float:
    """Seconds that copying one block to the host or back takes; 0 without swap space.

    On the first blocks of a pool of ``num_blocks``, which no request uses yet.
    """
    count = min(_SWAP_BLOCKS, num_blocks, len(swap_space))
    if not count:
        return 0.0
    indices = swap_indices([(n, n) for n in range(1, count + 1)])
    copies = [functools.partial(copy, caches, swap_space, *indices) for copy in (swap.swap_out, swap.swap_in)]
    return statistics.median(_timed(copy, device) for copy in copies * _RUNS) / count


def _timed(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds that ``run`` takes until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _prompts(bucket: Bucket, limits: EngineLimits, num_blocks: int) -> SchedulerOutput:
    """A step that fills ``bucket`` with prompts, as far as the model's length and the pool allow."""
    left = min(bucket.num_tokens, num_blocks * limits.block_size)
    output, next_block = SchedulerOutputBuilder(), 1
    while left > 0 and len(output.request_ids) < limits.max_num_seqs:
        count = min(left, limits.max_model_len)
        blocks = list(range(next_block, next_block - (-count // limits.block_size)))
        if blocks[-1] > num_blocks:
            break
        name = str(len(output.request_ids))
        output.request_ids.append(name)
        output.num_scheduled_tokens.append(count)
        output.num_computed_tokens.append(0)
        output.num_samples.append(1)
        output.feedback.append(-1)
        output.token_ids.extend([0] * count)
        output.admissions.append(Admission(name, SamplingParams(temperature=0), 0, (), ()))
        output.table_updates.append((name, 0, tuple(blocks)))
        next_block, left = blocks[-1] + 1, left - count
    return output.build()
