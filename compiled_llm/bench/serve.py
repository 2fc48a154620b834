"""Requests that arrive over time: latencies and goodput under load, as ``vllm bench serve`` measures them.

    compiled-llm bench serve --request-rate 2 --random-input-len 128 --random-output-len 64 --num-prompts 100
    compiled-llm bench serve --workload W2 --goodput ttft:500 tpot:100 --find-goodput

There is no server: the engine runs in this process, and a loop adds each request when it is due and runs steps. A
request's times count from the moment when it was due, even if the loop could add it only after a running step. With
``--max-concurrency`` they count from the moment when a place was free, as vLLM counts them, and the time before is the
``client_queue_time``. A token's time is when ``step()`` has returned it. Random requests, and those of ``--workload``,
generate exactly ``output_len`` tokens.

Goodput counts the requests that meet all targets, in milliseconds. ``--find-goodput`` searches the highest rate at
which ``--goodput-share`` of the requests meet them. It serves all requests at once to measure the capacity, then tries
rates from 1/16 to 16 times the capacity by halving or doubling and bisection, each with the same requests in the same
pattern. The result is the run at the best rate. Use many requests: with few, a queue has no time to grow.

``--save-result`` writes vLLM's keys, ``--save-detailed`` those of each request too; ``--report`` writes the engine's
report. The last line is JSON. Exit status: 0, 1 if a request failed or no rate was found, 2 for bad serving.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench import serving
from compiled_llm.bench.arrivals import (
    GOODPUT_METRICS,
    METRICS,
    QUEUE_METRICS,
    Served,
    arrival_times,
    details_of,
    drive,
    highest_rate,
    metrics_of,
)
from compiled_llm.bench.harness import finish
from compiled_llm.checkpoint.shapes import engine_parser

TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "end to end",
    "client_queue_time": "client's queue",
    "e2el_including_client_queue": "end to end, with the queue",
}


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Requests that arrive over time: latencies and goodput under load.")
    serving.add_request_flags(made)
    serving.add_engine_flags(made)
    add = made.add_argument_group("load").add_argument
    add("--request-rate", type=float, help="requests a second; inf: all at once (default: inf)")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly; inf is allowed")
    add("--max-concurrency", type=int, help="most requests in the engine at once (default: any number)")
    add("--num-warmups", type=int, default=1, help="requests served before the measurement (default: 1)")
    add("--ignore-eos", action="store_true", help="generate exactly output_len; for --dataset-path")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"targets for {', '.join(GOODPUT_METRICS)}")
    add("--find-goodput", action="store_true", help="search the highest rate within the targets")
    add("--goodput-share", type=float, default=0.9, help="share of the requests that must meet them (default: 0.9)")
    add("--goodput-steps", type=int, default=4, help="bisections of the search (default: 4)")
    add = made.add_argument_group("result").add_argument
    shown = f"of {', '.join((*METRICS, *QUEUE_METRICS))} (default: the first four)"
    add("--percentile-metrics", default=",".join(METRICS), help=shown)
    add("--metric-percentiles", default="99", help="e.g. 25,50,75,99.9 (default: 99)")
    add("--save-detailed", action="store_true", help="with the times and texts of each request")
    add("--result-dir", type=Path, default=Path(), help="default: the current directory")
    add("--result-filename", help="default: LABEL-RATEqps-MODEL-DATE.json")
    add("--label", default="compiled-llm", help="start of the file name")
    made.add_argument("--save-result", action="store_true", help="write a JSON file")
    made.seldom |= {"--goodput-share", "--goodput-steps", "--percentile-metrics", "--metric-percentiles", "--label"}
    made.seldom |= {
        "--result-dir",
        "--result-filename",
        "--save-detailed",
        "--ignore-eos",
        "--disable-detokenize",
        "--num-warmups",
    }
    return made


def check_arguments(args: argparse.Namespace, flags: FlagParser) -> None:
    """Parses the lists in place. ``ValueError`` for bad arguments; checked before a model is loaded."""
    serving.check_serving(args, flags)
    args.percentile_metrics = args.percentile_metrics.split(",")
    allowed = METRICS if args.max_concurrency is None else (*METRICS, *QUEUE_METRICS)
    for name in args.percentile_metrics:
        if name not in allowed:
            note = "" if args.max_concurrency else f"; with --max-concurrency also {', '.join(QUEUE_METRICS)}"
            raise ValueError(f"--percentile-metrics must be of {', '.join(allowed)}{note}; given {name!r}")
    args.metric_percentiles = [number("--metric-percentiles", p, 0, 100) for p in args.metric_percentiles.split(",")]
    args.goodput = targets_of(args.goodput)
    for flag, value in (("--request-rate", args.request_rate), ("--burstiness", args.burstiness)):
        if value is not None and not value > 0:
            raise ValueError(f"{flag} must be above 0, given {value}")
    if args.find_goodput:
        if not args.goodput:
            raise ValueError("--find-goodput needs --goodput, the targets to keep")
        reasons = {"request_rate": "which is searched", "report": "which is many runs"}
        reasons["max_concurrency"] = "since no target counts the time in the client's queue"
        for name, reason in reasons.items():
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} must be left out with --find-goodput, {reason}; given {getattr(args, name)}")
        if not 0 < args.goodput_share <= 1:
            raise ValueError(f"--goodput-share must be above 0 and up to 1, given {args.goodput_share}")
    if args.save_detailed and not args.save_result:
        raise ValueError("--save-detailed needs --save-result")
    if args.save_result:
        args.result_dir.mkdir(parents=True, exist_ok=True)
        folder = (args.result_dir / (args.result_filename or "result.json")).parent
        if not folder.is_dir():
            raise ValueError(f"--result-filename {args.result_filename}: {folder} is not there")


def number(name: str, text: str, low: float, high: float) -> float:
    """``text`` as a number. ``ValueError`` unless it is from ``low`` to ``high``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, given {text!r}")
    return value


def targets_of(pairs: list[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` -> milliseconds by metric. ``ValueError`` for an unknown metric or a bad number."""
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS or name in targets:
            raise ValueError(f"--goodput must be METRIC:MS, each of {', '.join(GOODPUT_METRICS)} once; given {pair!r}")
        targets[name] = number(f"--goodput {name}", text, 0, math.inf)
    return targets


class Bench:
    """Runs of the same requests at different rates."""

    def __init__(self, backend: serving.EngineRuns, args: argparse.Namespace) -> None:
        self.backend, self.engine, self.requests, self.args = backend, backend.engine, backend.requests, args
        ignore_eos = args.dataset_path is None or args.ignore_eos
        self.params = serving.sampling_of(args, self.requests, ignore_eos=ignore_eos)

    def warm_up(self) -> None:
        count = self.args.num_warmups
        drive(self.engine, self.requests[:1] * count, self.params[:1] * count, [0.0] * count)

    def run(self, rate: float) -> tuple[dict[str, Any], list[Served]]:
        """The metrics at ``rate``, and the times of each request."""
        args = self.args
        self.backend.begin(empty_cache=True)  # the prompts are the same in each run
        arrivals = arrival_times(len(self.requests), rate, args.burstiness, args.seed)
        with tqdm(total=len(self.requests), desc=f"rate {rate:g}", disable=None) as bar:
            load = self.requests, self.params, arrivals, args.max_concurrency
            served, duration = drive(self.engine, *load, progress=bar.update)
        metrics = metrics_of(served, duration, args.goodput, args.percentile_metrics, args.metric_percentiles)
        metrics["steps"] = self.backend.steps()
        return metrics, served

    def search(self) -> tuple[float, dict[str, Any], list[Served], dict[str, Any]]:
        """The best rate, its run, and all tried rates. If no rate is good enough, the lowest that was tried."""
        runs: dict[float, tuple[dict[str, Any], list[Served]]] = {}

        def passes(rate: float) -> bool:
            metrics, _ = runs[rate] = self.run(rate)
            print(f"rate {rate:g}: {metrics['goodput_share']:.1%} within the targets", flush=True)
            return metrics["goodput_share"] >= self.args.goodput_share

        if passes(math.inf):
            best: float | None = math.inf
        else:
            capacity = runs[math.inf][0]["request_throughput"]
            best = highest_rate(passes, capacity, self.args.goodput_steps) if capacity > 0 else None
        shown = min(runs) if best is None else best
        trials = [
            {"request_rate": rate_of(rate), "goodput_share": metrics["goodput_share"]}
            | {key: metrics[key] for key in ("request_goodput", "request_throughput", "output_throughput")}
            for rate, (metrics, _) in runs.items()
        ]
        search = {"share": self.args.goodput_share, "max_request_rate": best and rate_of(best), "trials": trials}
        return shown, *runs[shown], search


def rate_of(rate: float) -> float | str:
    """A rate as vLLM writes it in JSON."""
    return "inf" if math.isinf(rate) else rate


def rows_of(result: dict[str, Any], args: argparse.Namespace) -> dict[str, str]:
    """The result as text: name -> value."""
    rows = {
        "requests": f"{result['completed']} completed, {result['failed']} failed, in {result['duration']:.2f} s",
        "tokens": f"{result['total_input_tokens']} prompt, {result['total_output_tokens']} output",
        "throughput": f"{result['request_throughput']:.3f} requests/s, {result['output_throughput']:.1f} output "
        f"tokens/s, {result['total_token_throughput']:.1f} tokens/s",
        "at most": f"{result['max_concurrent_requests']} requests at once, "
        f"{result['max_output_tokens_per_s']:.0f} output tokens in a second",
    }
    if args.goodput:
        targets = ", ".join(f"{name} {ms:g} ms" for name, ms in args.goodput.items())
        rows["goodput"] = f"{result['request_goodput']:.3f} requests/s, {result['goodput_share']:.1%} within {targets}"
    if args.find_goodput:
        best = result["goodput_search"]["max_request_rate"]
        found = "no rate" if best is None else f"{best} requests/s" if best == "inf" else f"{best:.3f} requests/s"
        rows["highest rate"] = f"{found} with {args.goodput_share:.0%} of the requests within the targets"
    for metric in args.percentile_metrics:
        tail = [f"p{p:g} {result[f'p{p:g}_{metric}_ms']:.2f} ms" for p in args.metric_percentiles]
        middle = [f"{kind} {result[f'{kind}_{metric}_ms']:.2f} ms" for kind in ("mean", "median", "std")]
        rows[TITLES[metric]] = ", ".join([*middle, *tail])
    delays = f"mean {result['mean_submit_delay_ms']:.2f} ms, max {result['max_submit_delay_ms']:.2f} ms"
    rows["of TTFT, until added"] = delays
    return rows | serving.engine_rows(result)


def result_path(args: argparse.Namespace, model: str, rate: float, date: str) -> Path | None:
    if not args.save_result:
        return None
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    name = f"{args.label}-{rate:g}qps{concurrency}-{model.rstrip('/').split('/')[-1]}-{date}.json"
    return args.result_dir / (args.result_filename or name)


def measure(bench: Bench, args: argparse.Namespace) -> tuple[float, dict[str, Any], list[Served]]:
    """(rate, metrics, the times of each request) of the one run, or of the search's best."""
    bench.warm_up()
    if not args.find_goodput:
        rate = math.inf if args.request_rate is None else args.request_rate
        return rate, *bench.run(rate)
    rate, metrics, served, search = bench.search()
    return rate, metrics | {"goodput_search": search}, served


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    flags = parser(program)
    least = {"max_concurrency": 1, "num_warmups": 0, "goodput_steps": 0}
    args = flags.parse_checked(lambda args: check_arguments(args, flags), arguments, **least)
    with serving.started(program, args, serving.requests_of) as (backend, start_seconds):
        rate, metrics, served = measure(Bench(backend, args), args)
        figures = backend.figures(start_seconds)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    result = {
        "date": date,
        "endpoint_type": "compiled-llm",
        "backend": "compiled-llm",
        "label": args.label,
        "model": backend.name,
        "model_id": backend.name,
        "tokenizer_id": backend.tokenizer,
        "num_prompts": len(served),
        "workload": args.workload,
        "request_rate": rate_of(rate),
        "burstiness": rate_of(args.burstiness),
        "max_concurrency": args.max_concurrency,
        "goodput_targets_ms": args.goodput or None,
        **figures,
        **metrics,
    }
    tables.print_table(serving.title(result, f"{len(served)} requests, {rate:g} a second"), rows_of(result, args))
    details = details_of(served) if args.save_detailed else None
    finish("serve", result, result_path(args, backend.name, rate, date), device=backend.device, details=details)
    for index, request in enumerate(served):
        if request.error:
            print(f"request {index} failed: {request.error}", file=sys.stderr)
    found = not args.find_goodput or result["goodput_search"]["max_request_rate"] is not None
    return 0 if found and not result["failed"] else 1
