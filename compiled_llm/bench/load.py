"""What ``bench arrivals`` and ``bench serve`` share: flags of the load, arrival times, runs at one rate or several, and
the times of each request with their metrics."""

import argparse
import dataclasses
import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench.harness import finish
from compiled_llm.bench.serving import summary

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")  # with --max-concurrency
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass
class Served:
    """The times of a request, in seconds on the loop's clock.

    Attributes:
        arrival: when it was due.
        sent: its arrival, or when ``max_concurrency`` allowed it, if later. Its latencies count from here.
        added: when it was added to the engine, after the step that ran when it was sent; or sent to the server.
        output_len: tokens that it was answered with.
        token_times: when each token was returned; from a server, when each event with text came.
        error: why it failed, or "".
    """

    input_len: int
    arrival: float
    sent: float = math.nan
    added: float = math.nan
    output_len: int = 0
    token_times: list[float] = dataclasses.field(default_factory=list)
    finished: float = math.nan
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end."""
        return self.finished - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is no other."""
        count = self.output_len
        return (self.finished - self.token_times[0]) / (count - 1) if count > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between each token, or event, and the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]

    @property
    def queue_time(self) -> float:
        """Seconds that ``max_concurrency`` held it back."""
        return self.sent - self.arrival


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests arrive, ``rate`` a second, the last after ``count / rate``.

    The intervals have a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less than 1 gives bursts,
    infinity even intervals. The same seed gives the same pattern at any rate. At an infinite rate, all arrive at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    even = math.isinf(burstiness)
    times = np.cumsum(np.ones(count) if even else np.random.default_rng(seed).gamma(shape=burstiness, size=count))
    # With a very small shape all intervals can be zero: then all arrive at once, at the end.
    return (times * (count / rate / times[-1])).tolist() if times[-1] > 0 else [count / rate] * count


def metrics_of(
    served: Sequence[Served],
    duration: float,
    targets_ms: Mapping[str, float],
    metrics: Sequence[str],
    shown_percentiles: Sequence[float],
) -> dict[str, Any]:
    """The keys of ``vllm bench serve``; requests that failed count in ``failed`` alone."""
    done = [request for request in served if not request.error]
    good = sum(all(getattr(request, name) * 1e3 <= most for name, most in targets_ms.items()) for request in done)
    prompt_tokens = sum(request.input_len for request in done)
    output_tokens = sum(request.output_len for request in done)
    delays = [request.added - request.sent for request in done]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(served) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if targets_ms else None,
        "goodput_share": good / len(served) if targets_ms else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": _most_tokens_a_second(done),
        "max_concurrent_requests": _most_at_once(done),
        # Part of these latencies, not of the engine's or server's own: time until it was added or sent.
        "mean_submit_delay_ms": float(np.mean(delays or [0.0])) * 1e3,
        "max_submit_delay_ms": max(delays, default=0.0) * 1e3,
    }
    values: dict[str, list[float]] = {
        "ttft": [request.ttft for request in done],
        "tpot": [request.tpot for request in done if request.output_len > 1],
        "itl": [itl for request in done for itl in request.itls],
        "e2el": [request.e2el for request in done],
        "client_queue_time": [request.queue_time for request in done],
        "e2el_including_client_queue": [request.finished - request.arrival for request in done],
    }
    for metric in metrics:
        result |= summary(metric, values[metric], shown_percentiles)
    return result


def details_of(served: Sequence[Served]) -> dict[str, list[Any]]:
    """vLLM's keys that have an entry for each request; times in seconds."""
    return {
        "input_lens": [request.input_len for request in served],
        "output_lens": [0 if request.error else request.output_len for request in served],
        "ttfts": [0.0 if request.error else request.ttft for request in served],
        "itls": [[] if request.error else request.itls for request in served],
        "latencies": [0.0 if request.error else request.e2el for request in served],
        "start_times": [request.sent for request in served],
        "queue_times": [request.queue_time for request in served],
        "generated_texts": [request.text for request in served],
        "errors": [request.error for request in served],
    }


def highest_rate(passes: Callable[[float], bool], start: float, steps: int) -> float | None:
    """The highest rate that ``passes``, found by doubling or halving ``start``, then by ``steps`` bisections.

    At most 16 times ``start``. None if not even 1/16 of ``start`` passes; lower rates would take very long.
    """
    low, high, rate = None, None, start
    while (low is None or high is None) and start / 16 <= rate <= start * 16:
        if passes(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
    if low is None or high is None:
        return low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _most_tokens_a_second(done: Sequence[Served]) -> float:
    first = min((request.sent for request in done), default=0.0)
    seconds: dict[int, float] = defaultdict(float)
    for request in done:
        for t in request.token_times:  # an event may have brought several tokens
            seconds[int(t - first)] += request.output_len / len(request.token_times)
    return float(max(seconds.values(), default=0))


def _most_at_once(done: Sequence[Served]) -> int:
    # Of requests that end and start at the same moment, those that end come first.
    changes = sorted([(request.sent, 1) for request in done] + [(request.finished, -1) for request in done])
    return max(itertools.accumulate(change for _, change in changes), default=0)


# ---- flags and runs -------------------------------------------------------------------------------------------------


TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2el": "end to end",
    "client_queue_time": "client's queue",
    "e2el_including_client_queue": "end to end, with the queue",
}
_SELDOM = (
    *("--goodput-share", "--goodput-steps", "--percentile-metrics", "--metric-percentiles", "--label"),
    *("--result-dir", "--result-filename", "--save-detailed", "--num-warmups"),
)


class LoadRun(NamedTuple):
    """The requests at one rate: vLLM's keys, and the times of each."""

    rate: float
    metrics: dict[str, Any]
    served: Sequence[Served]


def add_load_flags(made: FlagParser, place: str, percentiles: str) -> None:
    """Flags of vllm bench serve, and what is searched. ``place``: where requests are at once."""
    add = made.add_argument_group("load").add_argument
    add("--request-rate", type=float, help="requests a second; inf: all at once (default: inf)")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly; inf is allowed")
    add("--max-concurrency", type=int, help=f"most requests in the {place} at once (default: any number)")
    add("--num-warmups", type=int, default=1, help="requests served before the measurement (default: 1)")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help=f"targets for {', '.join(GOODPUT_METRICS)}")
    add("--find-goodput", action="store_true", help="search the highest rate within the targets")
    add("--goodput-share", type=float, default=0.9, help="share of the requests that must meet them (default: 0.9)")
    add("--goodput-steps", type=int, default=4, help="bisections of the search (default: 4)")
    add = made.add_argument_group("result").add_argument
    shown = f"of {', '.join((*METRICS, *QUEUE_METRICS))} (default: the first four)"
    add("--percentile-metrics", default=",".join(METRICS), help=shown)
    add("--metric-percentiles", default=percentiles, help=f"e.g. 25,50,75,99.9 (default: {percentiles})")
    add("--save-detailed", action="store_true", help="with the times and texts of each request")
    add("--result-dir", type=Path, default=Path(), help="default: the current directory")
    add("--result-filename", help="default: LABEL-RATEqps-MODEL-DATE.json")
    add("--label", default="compiled-llm", help="start of the file name")
    made.add_argument("--save-result", action="store_true", help="write a JSON file")
    made.seldom |= set(_SELDOM)


def check_load(args: argparse.Namespace, single: Mapping[str, str]) -> None:
    """Parses the lists in place. ``ValueError`` for bad arguments.

    Args:
        single: arguments that a search does not allow, and why.
    """
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
        reasons = {"request_rate": "which is searched", **single}
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
    for pair in (each for text in pairs for each in text.split()):  # in one word as vLLM's documents quote them, too
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS or name in targets:
            raise ValueError(f"--goodput must be METRIC:MS, each of {', '.join(GOODPUT_METRICS)} once; given {pair!r}")
        targets[name] = number(f"--goodput {name}", text, 0, math.inf)
    return targets


def search(run: Callable[[float], LoadRun], args: argparse.Namespace) -> LoadRun:
    """The run at the highest rate within the targets, with all tried ones; of none such, the lowest that was tried."""
    runs: dict[float, LoadRun] = {}

    def passes(rate: float) -> bool:
        metrics = (runs.setdefault(rate, run(rate))).metrics
        print(f"rate {rate:g}: {metrics['goodput_share']:.1%} within the targets", flush=True)
        return metrics["goodput_share"] >= args.goodput_share

    if passes(math.inf):
        best: float | None = math.inf
    else:
        capacity = runs[math.inf].metrics["request_throughput"]
        best = highest_rate(passes, capacity, args.goodput_steps) if capacity > 0 else None
    trials = [
        {"request_rate": rate_of(rate), "goodput_share": metrics["goodput_share"]}
        | {key: metrics[key] for key in ("request_goodput", "request_throughput", "output_throughput")}
        for rate, metrics, _ in runs.values()
    ]
    found = {"share": args.goodput_share, "max_request_rate": best and rate_of(best), "trials": trials}
    shown = runs[min(runs) if best is None else best]
    return shown._replace(metrics=shown.metrics | {"goodput_search": found})


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
    return rows | {"of TTFT, until sent": delays}


def conclude(
    benchmark: str,
    args: argparse.Namespace,
    run: LoadRun,
    facts: Mapping[str, Any],
    *,
    table: Callable[[dict[str, Any]], None],
    device: Any = "cpu",
) -> int:
    """Print the result, write it where ``--save-result`` asks for it, and say what failed; returns the exit status.

    Args:
        facts: of what was measured: backend, model_id, tokenizer_id and more.
        table: prints the result for people.
    """
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    result = {
        "date": date,
        "endpoint_type": facts["backend"],
        "label": args.label,
        "num_prompts": len(run.served),
        "workload": args.workload,
        "request_rate": rate_of(run.rate),
        "burstiness": rate_of(args.burstiness),
        "max_concurrency": args.max_concurrency,
        "goodput_targets_ms": args.goodput or None,
        **facts,
        **run.metrics,
    }
    table(result)
    path = None
    if args.save_result:
        concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        model = facts["model_id"].rstrip("/").split("/")[-1]
        name = f"{args.label}-{run.rate:g}qps{concurrency}-{model}-{date}.json"
        path = args.result_dir / (args.result_filename or name)
    details = details_of(run.served) if args.save_detailed else None
    finish(benchmark, result, path, device=device, details=details)
    for error, count in Counter(request.error for request in run.served if request.error).items():
        print(f"{count} requests failed: {error}", file=sys.stderr)
    found = not args.find_goodput or result["goodput_search"]["max_request_rate"] is not None
    return 0 if found and not result["failed"] else 1
