"""Times what the scheduler may choose between, at the start: steps of each token bucket, and the swapping of blocks."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compiled_llm.config import EngineLimits
from compiled_llm.models.weights import tensors
from compiled_llm.ops import swap
from compiled_llm.progress import StartProgress
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import Admission, SchedulerOutput, SchedulerOutputBuilder
from compiled_llm.worker.request_rows import RequestRows

if TYPE_CHECKING:
    from compiled_llm.worker.runner import ModelRunner

_RUNS, _SWAP_BLOCKS = 3, 16


def measure_costs(runner: "ModelRunner", progress: StartProgress) -> None:
    """Write ``runner.costs``: time every token bucket full of one or more prompts, and the copying of blocks.

    On blocks of the pool that nobody uses yet.
    """
    buckets = [bucket for bucket in runner.buckets if bucket.kind == "tokens"]
    weights = {bucket.name: float(bucket.num_tokens) for bucket in buckets}
    with progress.stage("measuring steps", weights, is_long=False) as stage:
        for bucket in buckets:
            stage.next(bucket.name)
            rows = RequestRows(runner.limits, runner.model_config.vocab_size)
            output = _prompts(bucket, runner.limits, runner.num_blocks)
            runner.buffers[bucket].fill(output, rows.update(output), rows)
            run = functools.partial(runner.run_step, bucket)
            seconds = [_timed(run, runner.device) for _ in range(_RUNS)]
            runner.costs.bucket_seconds[bucket.num_tokens] = statistics.median(seconds)
            runner.buffers[bucket].clear()
    count = min(_SWAP_BLOCKS, runner.num_blocks, runner.num_swap_blocks)
    if count:
        caches, indices = tensors(runner.kv_cache), swap_indices([(n, n) for n in range(1, count + 1)])
        seconds = []
        for copy in [swap.swap_out, swap.swap_in] * _RUNS:
            seconds.append(_timed(functools.partial(copy, caches, runner.swap_space, *indices), runner.device))
        runner.costs.swap_seconds = statistics.median(seconds) / count


def swap_indices(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Pairs of (device block, host block) as index tensors. Pools count from 1; the host has no sink."""
    indices = torch.tensor(pairs, dtype=torch.int64)
    return indices[:, 0].contiguous(), indices[:, 1] - 1


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
