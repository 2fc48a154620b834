"""Measure a start, cold and warm, in fresh processes: from the process's begin to its first token, phase by phase.

    python scripts/bench/bench_start.py --shape qwen3-0.6b --dtype bfloat16 --max-model-len 1024 --warm-runs 3

Cold starts use an empty cache directory, which is deleted afterwards; warm ones use what the cold one left. Reading or
making weights is a phase of its own, and ``without weights`` is all the others.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import tables
from workloads import add_model_arguments, model_of

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser, add_engine_arguments, engine_config
from compiled_llm.worker.runner import resolve_device

IMPORTED = time.time()
PHASES = ("imports", "kernels", "weights", "compile", "other", "first token")


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0], conflict_handler="resolve")
    add_engine_arguments(parser)
    add_model_arguments(parser)  # its --model takes the place of the engine's
    parser.add_argument("--warm-runs", type=int, default=3, help="warm starts, of which the median counts (default: 3)")
    tables.add_json_flag(parser)
    parser.add_argument("--one-start", action="store_true", help=argparse.SUPPRESS)  # what the fresh processes are told
    return parser.parse_checked(warm_runs=1)


def start_once(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process, make a token, and say when what was done."""
    began = psutil.Process().create_time()
    with model_of(args) as arguments:
        config = engine_config(argparse.Namespace(**{**vars(args), **arguments}))
        with CompiledEngine.from_config(config) as engine:
            ready = time.time()
            engine.generate([[1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            ended = time.time()
            report, times = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
    imports = IMPORTED - began
    seconds = {"imports": imports, **times, "first token": ended - ready}
    return {
        "seconds": seconds | {"other": ready - IMPORTED - sum(times.values())},
        "total": ended - began,
        "graphs": {r.name: round(r.compile_seconds, 3) for r in report.reports},
        "hits": report.cache_count("hit"),
        "misses": report.cache_count("miss"),
        "recompiles": report.recompiles,
    }


def in_fresh_process(cache: Path) -> dict[str, Any]:
    environment = {**os.environ, "COMPILED_LLM_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, *sys.argv, "--one-start"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a start failed with status {done.returncode}; its messages stand above")
    return json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]}


def median_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The start whose total is the median (the lower of two): its phases add up, which medians of phases would not."""
    return sorted(starts, key=lambda start: start["total"])[(len(starts) - 1) // 2]


def table(starts: dict[str, dict[str, Any]]) -> str:
    """Seconds of each phase and graph of each start, and what the cache held."""
    rows: dict[str, list[Any]] = {phase: [start["seconds"][phase] for start in starts.values()] for phase in PHASES}
    rows["total"] = [start["total"] for start in starts.values()]
    rows["without weights"] = [start["total"] - start["seconds"]["weights"] for start in starts.values()]
    for graph in next(iter(starts.values()))["graphs"]:
        rows[f"  {graph}"] = [start["graphs"][graph] for start in starts.values()]
    for name, key in (("cache hits", "hits"), ("cache misses", "misses"), ("load average", "load")):
        rows[name] = [start[key] for start in starts.values()]
    return tables.text_table(
        [{"seconds": name} | dict(zip(starts, values, strict=True)) for name, values in rows.items()]
    )


def main() -> int:
    args = parse_arguments()
    if args.one_start:
        print(json.dumps(start_once(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="compiled-llm-start-") as directory:
        cold = in_fresh_process(Path(directory))
        warm = [in_fresh_process(Path(directory)) for _ in range(args.warm_runs)]
    starts = {"cold": cold, "warm": median_of(warm)}
    print(table(starts))
    warm_median_total = median(start["total"] for start in warm)
    facts = machine.describe(resolve_device(args.device))
    tables.finish({**facts, **starts, "warm_median_total": warm_median_total}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
