"""Measures at the start what the scheduler has to choose between: steps of each token bucket, and swaps of blocks."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.compiling.cuda_graphs import begin_step_of_trees
from compiled_llm.ops.user_warnings import warn
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest, WindowOutput
from compiled_llm.scheduling.worker import WorkerFacts
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.block_copies import Caches, SwapSpace
from compiled_llm.worker.compiled_steps import CompiledSteps
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.sampling_stage import SamplingNeeds

_RUNS, _SWAP_BLOCKS = 3, 16
_MANY_TOKENS = 64  # of a decode that is timed once
_CONTEXT = 128  # tokens before those of a decode that is timed


def worker_facts(
    config: EngineConfig,
    steps: CompiledSteps,
    num_blocks: int,
    swap_space: SwapSpace,
    contents: tuple[str, ...],
    progress: StartProgress,
    agreed: Callable[[float], float] = lambda seconds: seconds,
) -> WorkerFacts:
    """What the scheduler has to know. Nothing is measured that it has no use for.

    Args:
        num_blocks: of the KV pool.
        contents: what keys and values depend on besides tokens.
        agreed: of what each rank measured, what all take: they run the same steps.
    """
    limits, places = steps.limits, steps.pool_sizes.places(num_blocks)
    facts = WorkerFacts(
        steps.device.type,
        limits,
        num_blocks,
        swap_space.num_blocks,
        contents,
        window_places=tuple(places.items()),
        num_state_slots=limits.num_state_slots,
        num_swap_slots=swap_space.num_slots,
        num_tier_blocks=swap_space.num_tier_blocks,
        num_tier_slots=swap_space.num_tier_slots,
        host_slot_bytes=swap_space.pools[-1][0].nbytes if len(swap_space.pools[-1]) else 0,
        host_block_bytes=sum(pool[0].nbytes for pool in swap_space.pools[:-1] if len(pool)),
    )
    if facts.num_tier_blocks:
        swap_seconds = measure_swap(steps.cache_groups(), swap_space, facts, steps.device)
        facts = dataclasses.replace(facts, swap_seconds=swap_seconds)
    if config.adapts_drafts and limits.num_draft_tokens:
        decodes = measure_decodes(steps, limits, facts, progress, agreed)
        facts = dataclasses.replace(
            facts,
            decode_seconds=tuple((sizes, seconds) for sizes, (seconds, _) in decodes.items()),
            sampling_seconds=tuple((sizes, seconds) for sizes, (_, seconds) in decodes.items()),
        )
    has_target = config.target_itl_ms is not None and config.waits_for_compile  # else steps are measured as they run
    may_swap = facts.num_swap_blocks and config.preemption_mode == "auto"
    if not has_target and not may_swap:
        return facts
    most_seconds = math.inf if may_swap or config.target_itl_ms is None else config.target_itl_ms / 1e3
    bucket_seconds = measure_buckets(steps, limits, facts, progress, most_seconds, agreed)
    fastest = min(bucket_seconds.values()) * 1e3
    if config.target_itl_ms is not None and fastest > config.target_itl_ms:
        warn(
            f"target_itl_ms={config.target_itl_ms} cannot be met beside a prompt: the fastest of "
            f"token_bucket_sizes takes {fastest:.1f} ms. Prompts run in that one; a smaller bucket would help",
        )
    swap_seconds = measure_swap(steps.cache_groups(), swap_space, facts, steps.device)
    return dataclasses.replace(facts, bucket_seconds=tuple(bucket_seconds.items()), swap_seconds=swap_seconds)


def measure_buckets(
    steps: CompiledSteps,
    limits: EngineLimits,
    facts: WorkerFacts,
    progress: StartProgress,
    most_seconds: float,
    agreed: Callable[[float], float] = lambda seconds: seconds,
) -> dict[int, float]:
    """Seconds of a step in each token bucket up to the first that takes longer than most_seconds, by its tokens.

    Each bucket is full of one or more prompts, on blocks of the pool that no request uses yet.
    """
    buckets = [bucket for bucket in steps.buckets if bucket.kind == "tokens"]
    weights = {bucket.name: float(bucket.num_tokens) for bucket in buckets}
    bucket_seconds = {}
    with progress.stage("measuring steps", weights, is_long=False) as stage:
        for bucket in buckets:
            stage.next(bucket.name)
            rows = RequestRows(limits, steps.model_config.vocab_size, num_windows=len(facts.window_places))
            output = _prompts(bucket, limits, facts)
            steps.fill(bucket, output, rows)
            run = functools.partial(steps.run_step, bucket)
            seconds = statistics.median(_timed(run, steps.device) for _ in range(_RUNS))
            bucket_seconds[bucket.num_tokens] = agreed(seconds)
            steps.buffers[bucket].clear()
            if bucket_seconds[bucket.num_tokens] > most_seconds:
                break
    return bucket_seconds


def measure_decodes(
    steps: CompiledSteps,
    limits: EngineLimits,
    facts: WorkerFacts,
    progress: StartProgress,
    agreed: Callable[[float], float] = lambda seconds: seconds,
) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds of a greedy step in each decode bucket, and of sampling after it.

    Once a bucket of a batch size takes longer than it could be worth, if all its drafts were right, the larger ones of
    that size are not run: so many times as many tokens are taken to last so many times as long.

    Returns:
        By requests and tokens: those of the bucket where a step takes the time of its bucket, and on a CPU those that
        were in the step. There may be fewer of these, in the largest bucket.
    """
    found: dict[tuple[int, int], tuple[float, float]] = {}
    with progress.stage("measuring decodes", {"decode buckets": 1.0}, is_long=False) as stage:
        stage.next("decode buckets")
        for size in limits.decode_bucket_sizes:
            buckets = [bucket for bucket in steps.buckets if bucket.kind == "decode" and bucket.num_requests == size]
            requests = size if steps.device.type != "cpu" else min(size, limits.max_num_seqs)
            first = last = seconds_of_decode(buckets[0], steps, limits, facts, agreed)
            found[requests, requests] = first
            pays, lens = True, 1  # tokens of each request
            for bucket in buckets[1:]:
                more = bucket.num_tokens // size
                longer = more / lens
                if pays:
                    last = seconds_of_decode(bucket, steps, limits, facts, agreed)
                else:
                    last = last[0] * longer, last[1] * longer
                lens = more
                # More was another program's doing.
                found[requests, requests * lens] = min(last[0], first[0] * lens), min(last[1], first[1] * lens)
                pays = pays and last[0] / first[0] < lens
    return found


def seconds_of_decode(
    bucket: Bucket,
    steps: CompiledSteps,
    limits: EngineLimits,
    facts: WorkerFacts,
    agreed: Callable[[float], float],
) -> tuple[float, float]:
    """Seconds of a greedy step that fills ``bucket``, and of sampling a token in each of its rows."""
    rows = RequestRows(limits, steps.model_config.vocab_size, num_windows=len(facts.window_places))
    steps.fill(bucket, _decodes(bucket, limits, facts), rows)
    sampling_input, needs = steps.buffers[bucket].sampling_input, SamplingNeeds(True, False, False)
    logits: list[torch.Tensor] = []
    found = []
    for _ in range(_RUNS if bucket.num_tokens <= _MANY_TOKENS else 1):
        if steps.uses_trees:
            begin_step_of_trees()
        seconds = _timed(lambda: logits.append(steps.run_step(bucket)), steps.device)
        sample = functools.partial(steps.sampling.run, bucket, sampling_input, logits.pop(), needs)
        found.append((seconds, _timed(sample, steps.device)))
    steps.buffers[bucket].clear()
    return agreed(min(seconds for seconds, _ in found)), agreed(min(seconds for _, seconds in found))


def measure_swap(groups: Sequence[Caches], swap_space: SwapSpace, facts: WorkerFacts, device: torch.device) -> float:
    """Seconds that copying one block to the host or back takes; 0 without swap space.

    On the first blocks of a pool, which no request uses yet.
    """
    num_rows = facts.num_swap_blocks + facts.num_tier_blocks
    count = min(_SWAP_BLOCKS, facts.num_blocks, num_rows, *(n for _, n in facts.window_places))
    if not count:
        return 0.0
    pairs = tuple((n, n) for n in range(1, count + 1))
    windows = len(facts.window_places)
    outputs = [
        SchedulerOutput(swapped_out=pairs, windows=(WindowOutput(swapped_out=pairs),) * windows),
        SchedulerOutput(swapped_in=pairs, windows=(WindowOutput(swapped_in=pairs),) * windows),
    ]
    copies = [functools.partial(swap_space.copy, output, groups) for output in outputs]
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


def _decodes(bucket: Bucket, limits: EngineLimits, facts: WorkerFacts) -> SchedulerOutput:
    """A step that fills a decode bucket, of requests with some tokens before, which all have the same blocks.

    With at most ``max_num_seqs`` of them: the largest bucket may have room for more.
    """
    count = bucket.num_tokens // bucket.num_requests
    room = min(limits.max_model_len, min([facts.num_blocks, *(n for _, n in facts.window_places)]) * limits.block_size)
    start = max(0, min(_CONTEXT, room - count))
    output = SchedulerOutputBuilder(len(facts.window_places))
    blocks = tuple(range(1, 1 - (-(start + count) // limits.block_size)))
    for number in range(min(bucket.num_requests, limits.max_num_seqs)):
        name = RequestId(str(number))
        output.request_ids.append(name)
        output.num_scheduled_tokens.append(count)
        output.num_computed_tokens.append(start)
        output.num_samples.append(count)
        output.feedback.append(-1)
        output.token_ids.extend([0] * count)
        output.admissions.append(StartedRequest(name, SamplingParams(temperature=1), 0, (), ()))
        output.table_updates.append((name, 0, blocks))
        for told in output.windows:
            told.table_updates.append((name, 0, blocks))
    return output.build()


def _prompts(bucket: Bucket, limits: EngineLimits, facts: WorkerFacts) -> SchedulerOutput:
    """A step that fills ``bucket`` with prompts, as far as the model's length and the pool allow."""
    num_blocks = facts.num_blocks
    left = min(bucket.num_tokens, num_blocks * limits.block_size)
    output, next_block = SchedulerOutputBuilder(len(facts.window_places)), 1
    while left > 0 and len(output.request_ids) < limits.max_num_seqs:
        count = min(left, limits.max_model_len)
        blocks = list(range(next_block, next_block - (-count // limits.block_size)))
        if blocks[-1] > num_blocks:
            break
        name = RequestId(str(len(output.request_ids)))
        output.request_ids.append(name)
        output.num_scheduled_tokens.append(count)
        output.num_computed_tokens.append(0)
        output.num_samples.append(1)
        output.feedback.append(-1)
        output.token_ids.extend([0] * count)
        output.admissions.append(StartedRequest(name, SamplingParams(temperature=0), 0, (), ()))
        output.table_updates.append((name, 0, tuple(blocks)))
        for told, (_, count_of) in zip(output.windows, facts.window_places, strict=True):
            told.table_updates.append((name, 0, tuple(1 + (block - 1) % count_of for block in blocks)))
        next_block, left = blocks[-1] + 1, left - count
    return output.build()
