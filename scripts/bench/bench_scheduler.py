"""Host time of a step without the step: scheduling, preparing the batch, entering the results.

    python scripts/bench/bench_scheduler.py

For several numbers of running requests, each with 0 and with 10,000 more waiting: every running request decodes, its
context grows from ``--context`` tokens on, and each step's tokens are made up. What is timed is what the engine does
between two steps: ``Scheduler.schedule``, ``choose_bucket``, ``RequestRows.update``, ``StepBuffers.fill``,
``Scheduler.update``. Prefix caching is on, so full blocks are hashed and published on the way. Ends in one JSON line.
"""

import argparse
import gc
import itertools
import statistics
import time

import own_checkout
import tables
import torch
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.bucket import buckets_of, choose_bucket
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.system import hardware as machine
from compiled_llm.worker.request_rows import RequestRows
from compiled_llm.worker.step_buffers import StepBuffers

PARTS = ("schedule", "prepare", "update")
GREEDY = SamplingParams(temperature=0, max_tokens=2**20, ignore_eos=True)


def request(name: str, prompt_len: int, max_tokens: int) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=[hash((name, i)) % 150_000 for i in range(prompt_len)],
        sampling_params=GREEDY,
        seed=0,
        stop_token_ids=frozenset([2]),
        max_num_tokens=prompt_len + max_tokens,
        arrival_time=0.0,
    )


def bench(num_running: int, num_waiting: int, args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of each part of a step, and of the whole."""
    # The first to run decode while the last ones' prompts are computed, 2048 tokens a step.
    max_tokens = args.steps + 2 * (num_running * args.context // 1024 + 16)
    limits = EngineLimits(
        max_model_len=args.max_model_len,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running),
        block_size=16,
        decode_bucket_sizes=(num_running,),
        token_bucket_sizes=(max(2048, num_running),),
        chunked_prefill=True,
    )
    pool = BlockPool(num_running * (-(-(args.context + max_tokens) // 16) + 2))
    scheduler = Scheduler(limits, pool, prefix_caching=True)
    for n in range(num_running + num_waiting):
        scheduler.add(request(str(n), args.context if n < num_running else 40, max_tokens))
    buckets = buckets_of(limits)
    buffers = {bucket: StepBuffers(bucket, limits, torch.device("cpu")) for bucket in buckets}
    rows = RequestRows(limits, vocab_size=150_000)
    times: dict[str, list[float]] = {part: [] for part in PARTS}

    def step() -> tuple[int, list[float]]:
        marks = [time.perf_counter()]
        output = scheduler.schedule()
        marks.append(time.perf_counter())
        bucket = choose_bucket(buckets, output)
        buffers[bucket].fill(output, rows.update(output), rows)
        marks.append(time.perf_counter())
        result = StepResult(bucket, (17,) * len(output.request_ids))
        before_update = time.perf_counter()
        scheduler.update(output, result)
        seconds = [marks[1] - marks[0], marks[2] - marks[1], time.perf_counter() - before_update]
        return output.max_query_len, seconds

    while len(scheduler.running) < num_running or step()[0] > 1:  # prefill
        step()
    gc.collect()
    gc.freeze()
    for _ in range(args.steps):
        longest, seconds = step()
        assert longest == 1
        for part, value in zip(PARTS, seconds, strict=True):
            times[part].append(value * 1e6)
    gc.unfreeze()
    assert len(scheduler.running) == num_running
    assert scheduler.num_waiting == num_waiting
    whole = [sum(values) for values in zip(*times.values(), strict=True)]
    result = {part: statistics.median(values) for part, values in times.items()}
    return result | {"whole": statistics.median(whole), "p99": sorted(whole)[int(len(whole) * 0.99)]}


def main() -> None:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--running", default="32,64,128,256,512", help="numbers of running requests")
    parser.add_argument("--waiting", default="0,10000", help="numbers of waiting requests")
    parser.add_argument("--context", type=int, default=512, help="tokens of each running request at the start")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    sizes = itertools.product(map(int, args.running.split(",")), map(int, args.waiting.split(",")))
    cases = tqdm(list(sizes), disable=None, leave=False)
    rows = [{"running": running, "waiting": waiting, **bench(running, waiting, args)} for running, waiting in cases]
    print(f"microseconds a step\n{tables.text_table(rows)}")
    tables.finish({"results": rows, "machine": machine.describe(torch.device("cpu"))}, None)


if __name__ == "__main__":
    main()
