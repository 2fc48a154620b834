"""Requests served on this machine, beside the same requests simulated as ``compiled-llm plan`` does it.

    compiled-llm bench plan
    compiled-llm bench plan --model DIR --setups 1x1 2x1 --seconds 60

A setup RxN has R engines of N ranks, which share the cores; the one with least to do gets a request. Requests arrive
as a Poisson process and in bursts, as many a second as keep the engines ``--load`` busy by what steps cost. Compared
are the mean and the 90th percentile of latencies, as a share of the measured ones, and the share of requests within
``--slo-scale`` times what they take alone, as it is.

Requests are simulated twice. "costs around": costs measured before each part of a run and after it, as a plan has
them. "costs of the run": these in proportion to what the steps of the part itself took; what differs then is the
simulator's, and not the machine's, whose steps take longer in one minute than in the next.

The machine must be idle otherwise. Exit status: 0, or 1 where a figure differs by more than ``--tolerance``.
"""

import argparse
import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench.harness import finish
from compiled_llm.bench.step_costs import Engines, Scales, mean_of
from compiled_llm.checkpoint.shapes import config_of, engine_parser
from compiled_llm.planning.costs import ReplicaCosts
from compiled_llm.planning.simulator import GroupPlan, simulate
from compiled_llm.planning.traces import Load, TraceRequest
from compiled_llm.system.resources import granted_cores

_MODEL = "model"


class Latencies(NamedTuple):
    """Seconds from the arrival, float64 ``[n]``."""

    ttft: np.ndarray
    e2el: np.ndarray


def serve(engines: Engines, trace: Sequence[TraceRequest], costs: ReplicaCosts) -> tuple[Latencies, ReplicaCosts]:
    """Send each request when it is due to the engine with least to do, as the simulator counts it.

    Also returns ``costs`` in proportion to what the steps of this load took.
    """
    owed, times = [0] * len(engines.connections), np.full((2, len(trace)), np.inf)
    engine_of = dict[int, int]()
    for connection in engines.connections:
        connection.send(costs)
    begin = time.monotonic() + 0.05

    def take(until: float) -> bool:
        """Read what the engines say, until then. False: nothing came."""
        ready = wait(engines.connections, max(0.0, until - time.monotonic()))
        for connection in ready:
            message = connection.recv()  # type: ignore[union-attr, call-arg]
            if message is not None:
                index, at, is_first, is_last = message
                row = trace[index]
                if is_first:
                    times[0, index] = at - begin - row.arrival
                    owed[engine_of[index]] -= row.prompt_tokens
                if is_last:
                    times[1, index] = at - begin - row.arrival
                    owed[engine_of[index]] -= row.output_tokens
        return bool(ready)

    for index, row in enumerate(trace):
        while time.monotonic() < begin + row.arrival:
            take(begin + row.arrival)
        while take(0.0):
            pass
        engine = engine_of[index] = owed.index(min(owed))
        owed[engine] += row.prompt_tokens + row.output_tokens
        engines.connections[engine].send((index, row.prompt_tokens, row.output_tokens))
    while np.isinf(times).any():
        take(time.monotonic() + 60)
    for connection in engines.connections:
        connection.send(None)
    of_engines: list[Scales] = [connection.recv() for connection in engines.connections]
    return Latencies(*times), mean_of([scales.of(costs) for scales in of_engines])


def figures(latencies: Latencies, targets: np.ndarray) -> dict[str, float]:
    """What is compared; ``targets``: seconds of each request."""
    found = {"attained": float((latencies.e2el <= targets).mean())}
    for name, values in zip(("ttft", "e2el"), latencies, strict=True):
        found |= {f"{name} mean": float(values.mean()), f"{name} p90": float(np.percentile(values, 90))}
    return found


def compared(engines: Engines, args: argparse.Namespace, setup: str) -> list[dict[str, Any]]:
    """A row for each figure of each load, which comes in ``--parts``, each with costs of its own minutes."""
    count, rows = len(engines.connections), []
    before = engines.measure(args.rounds)
    for cv in args.cvs:
        measured, alone = list[Latencies](), list[float]()
        simulated: dict[str, list[Latencies]] = {"costs around": [], "costs of the run": []}
        for part in range(args.parts):
            trace = drawn(before, count, cv, args, args.seed + part)
            latencies, in_run = serve(engines, trace, before)
            measured.append(latencies)
            after = engines.measure(args.rounds)
            costs, before = mean_of([before, after]), after
            for each, own in zip(simulated.values(), (costs, in_run), strict=True):
                outcome = simulate([GroupPlan({_MODEL: (own, own.kv_tokens or 0)})] * count, trace)
                each.append(Latencies(outcome.ttft, outcome.e2el))
            alone += [costs.alone_seconds(row.prompt_tokens, row.output_tokens)[1] for row in trace]
        targets = args.slo_scale * np.array(alone)
        predicted = {name: figures(_joined(each), targets) for name, each in simulated.items()}
        for name, value in figures(_joined(measured), targets).items():
            row = {"setup": setup, "cv": cv, "requests": len(alone), "figure": name, "measured": value}
            differences = {
                kind: (of_kind[name] - value) / (1 if name == "attained" else value)
                for kind, of_kind in predicted.items()
            }
            rows.append(row | differences)
    return rows


def _joined(parts: Sequence[Latencies]) -> Latencies:
    return Latencies(*map(np.concatenate, zip(*parts, strict=True)))


def drawn(costs: ReplicaCosts, count: int, cv: float, args: argparse.Namespace, seed: int) -> list[TraceRequest]:
    """Requests that keep ``count`` engines busy for ``--load`` of the time, by batches of eight."""
    rows = min(8, costs.max_num_seqs)
    keys = rows * (args.prompt_tokens + args.output_tokens / 2)
    seconds = costs.step_seconds(0, 0, args.prompt_tokens, args.prompt_tokens**2 / 2)
    seconds += args.output_tokens * costs.step_seconds(rows, keys) / rows
    lengths = {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens, "seed": seed}
    rate = args.load * count / seconds
    return Load({_MODEL: rate}, args.seconds / args.parts, cv, **lengths).draw()


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Requests served here, beside the same simulated by compiled-llm plan.")
    made.set_defaults(shape=None, max_model_len=1024, seed=0)
    add = made.add_argument
    add(
        "--setups",
        nargs="+",
        default=["1x1", "2x1", "1x2"],
        metavar="RxN",
        help="engines x ranks (default: 1x1 2x1 1x2)",
    )
    add("--load", type=float, default=0.6, help="share of the engines' time (default: 0.6)")
    add("--cvs", type=float, nargs="+", default=[1.0, 4.0], metavar="X", help="burstiness of each run (default: 1 4)")
    add("--seconds", type=float, default=30.0, help="that requests arrive in a run (default: 30)")
    add("--parts", type=int, default=3, help="of a run, with costs measured in between (default: 3)")
    add("--prompt-tokens", type=int, default=128, help="on average (default: 128)")
    add("--output-tokens", type=int, default=48, help="on average (default: 48)")
    add("--slo-scale", type=float, default=2.0, help="targets, times what a request takes alone (default: 2)")
    add("--rounds", type=int, default=3, help="of each measurement of costs (default: 3)")
    add("--tolerance", type=float, default=0.1, help="most difference of a figure (default: 0.1)")
    tables.add_json_flag(made)
    return made


def _check(args: argparse.Namespace) -> None:
    if not 0 < args.load < 1:
        raise ValueError(f"--load must be above 0 and below 1, given {args.load}")
    if not all(re.fullmatch(r"[1-9]x[1248]", setup) for setup in args.setups):
        raise ValueError(f"--setups must be ENGINESxRANKS, as 2x1, given {' '.join(args.setups)}")


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"cvs": 0.1, "seconds": 5, "prompt_tokens": 1, "output_tokens": 2, "rounds": 1, "parts": 1, "tolerance": 0}
    args = parser(program).parse_checked(_check, arguments, **least)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(config_of(args))
        for setup in args.setups:
            count, ranks = map(int, setup.split("x"))
            threads = config.num_threads or max(1, granted_cores() // (count * ranks))
            own: EngineConfig = dataclasses.replace(config, num_threads=threads, tensor_parallel_size=ranks)
            with contextlib.closing(Engines(own, count)) as engines:
                rows += compared(engines, args, setup)
            print(tables.text_table([row for row in rows if row["setup"] == setup]), flush=True)
    worst = {kind: max(abs(row[kind]) for row in rows) for kind in ("costs around", "costs of the run")}
    for kind, share in worst.items():
        print(f"the largest difference with {kind} is {share:.1%}, allowed {args.tolerance:.0%}")
    finish("plan", {"load": args.load, "seconds": args.seconds, "rows": rows, "worst": worst}, args.json)
    return 0 if max(worst.values()) <= args.tolerance else 1
