"""Requests that arrive over time at an engine of this process: latencies and goodput under load.

    compiled-llm bench arrivals --request-rate 2 --random-input-len 128 --random-output-len 64 --num-prompts 100
    compiled-llm bench arrivals --workload W2 --goodput ttft:500 tpot:100 --find-goodput

There is no server, as there is for ``bench serve``, which has the same flags: a loop adds each request when it is due
and runs steps. A request's times count from the moment when it was due, even if the loop could add it only after a
running step. With ``--max-concurrency`` they count from the moment when a place was free, as vLLM counts them, and the
time before is the ``client_queue_time``. A token's time is when ``step()`` has returned it. Random requests, and those
of ``--workload``, generate exactly ``output_len`` tokens.

Goodput counts the requests that meet all targets, in milliseconds. ``--find-goodput`` searches the highest rate at
which ``--goodput-share`` of the requests meet them. It serves all requests at once to measure the capacity, then tries
rates from 1/16 to 16 times the capacity by halving or doubling and bisection, each with the same requests in the same
pattern. The result is the run at the best rate. Use many requests: with few, a queue has no time to grow.

``--save-result`` writes vLLM's keys, ``--save-detailed`` those of each request too; ``--report`` writes the engine's
report. The last line is JSON. Exit status: 0, 1 if a request failed or no rate was found, 2 for bad arguments.
"""

import argparse
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.bench import serving
from compiled_llm.bench.load import (
    LoadRun,
    Served,
    add_load_flags,
    arrival_times,
    check_load,
    conclude,
    metrics_of,
    rows_of,
    search,
)
from compiled_llm.bench.workloads import Requests
from compiled_llm.checkpoint.shapes import engine_parser
from compiled_llm.engine.engine import CompiledEngine


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Requests that arrive over time: latencies and goodput under load.")
    serving.add_request_flags(made)
    serving.add_engine_flags(made)
    add_load_flags(made, "engine", percentiles="99")
    made.add_argument("--ignore-eos", action="store_true", help="generate exactly output_len; for --dataset-path")
    made.seldom |= {"--disable-detokenize", "--ignore-eos"}
    return made


def _check(args: argparse.Namespace, flags: FlagParser) -> None:
    """``ValueError`` for bad arguments; checked before a model is loaded."""
    serving.check_serving(args, flags)
    check_load(args, {"report": "which is many runs"})


class Bench:
    """Runs of the same requests at different rates."""

    def __init__(self, backend: serving.EngineRuns, args: argparse.Namespace) -> None:
        self.backend, self.engine, self.requests, self.args = backend, backend.engine, backend.requests, args
        ignore_eos = args.dataset_path is None or args.ignore_eos
        self.params = serving.sampling_of(args, self.requests, ignore_eos=ignore_eos)

    def warm_up(self) -> None:
        count = self.args.num_warmups
        drive(self.engine, self.requests[:1] * count, self.params[:1] * count, [0.0] * count)

    def run(self, rate: float) -> LoadRun:
        args = self.args
        self.backend.begin(empty_cache=True)  # the prompts are the same in each run
        arrivals = arrival_times(len(self.requests), rate, args.burstiness, args.seed)
        with tqdm(total=len(self.requests), desc=f"rate {rate:g}", disable=None) as bar:
            load = self.requests, self.params, arrivals, args.max_concurrency
            served, duration = drive(self.engine, *load, progress=bar.update)
        metrics = metrics_of(served, duration, args.goodput, args.percentile_metrics, args.metric_percentiles)
        return LoadRun(rate, metrics | {"steps": self.backend.steps()}, served)


def drive(
    engine: CompiledEngine,
    requests: Requests,
    params: Sequence[SamplingParams],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    progress: Callable[[], object] = lambda: None,
) -> tuple[list[Served], float]:
    """Serve the requests as they arrive; ``progress`` is called for each that ends.

    Returns:
        The times of each request, in the order given, and the seconds from the start until all had ended.
    """
    start = clock()
    served = [Served(len(r.prompt_token_ids), start + t) for r, t in zip(requests, arrivals, strict=True)]
    waiting = deque(sorted(range(len(served)), key=lambda index: served[index].arrival))
    in_flight: dict[str, Served] = {}
    # Since when each of max_concurrency places is free, the earliest first.
    seats = [start] * min(max_concurrency or len(served), len(served))
    while waiting or in_flight:
        while waiting and seats and served[waiting[0]].arrival <= clock():
            index = waiting.popleft()
            request = served[index]
            request.sent = max(request.arrival, heapq.heappop(seats))
            request.added = clock()
            try:
                engine.add_request(str(index), requests[index].prompt_token_ids, params[index])
                in_flight[str(index)] = request
            except ValueError as error:
                request.error, request.finished = str(error), request.added
                heapq.heappush(seats, request.sent)
                progress()
        if in_flight:
            outputs = engine.step()
            now = clock()
            for output in outputs:
                _advance(in_flight[output.request_id], output, now)
                if output.finished:
                    del in_flight[output.request_id]
                    heapq.heappush(seats, now)
                    progress()
        elif waiting:
            sleep(max(0.0, served[waiting[0]].arrival - clock()))
    return served, clock() - start


def _advance(request: Served, output: RequestOutput, now: float) -> None:
    """Record its output of a step that ended at ``now``."""
    completion = output.outputs[0]
    request.token_times += [now] * (len(completion.token_ids) - request.output_len)
    request.output_len = len(completion.token_ids)
    if output.finished:
        request.finished, request.text = now, completion.text
        if completion.finish_reason == "error":
            request.error = str(completion.stop_reason)


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    least = {"max_concurrency": 1, "num_warmups": 0, "goodput_steps": 0}
    args = flags.parse_checked(lambda args: _check(args, flags), arguments, **least)
    with serving.started(program, args, serving.requests_of) as (backend, start_seconds):
        bench = Bench(backend, args)
        bench.warm_up()
        if args.find_goodput:
            run = search(bench.run, args)
        else:
            run = bench.run(math.inf if args.request_rate is None else args.request_rate)
        figures = backend.figures(start_seconds)
    names = {"backend": "compiled-llm", "model": backend.name, "model_id": backend.name}

    def table(result: dict[str, Any]) -> None:
        title = serving.title(result, f"{len(run.served)} requests, {run.rate:g} a second")
        tables.print_table(title, rows_of(result, args) | serving.engine_rows(result))

    facts = {**names, "tokenizer_id": backend.tokenizer, **figures}
    return conclude("arrivals", args, run, facts, table=table, device=backend.device)
