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

PHASES = ("imports", "kernels", "weights", "compile", "other", "first token")


def parse_arguments() -> argparse.Namespace:
    from workloads import add_model_arguments

    from compiled_llm.command_line import FlagParser, add_engine_arguments

    parser = FlagParser(description=(__doc__ or "").split("\n")[0], conflict_handler="resolve")
    add_engine_arguments(parser)
    add_model_arguments(parser)  # its --model takes the place of the engine's
    parser.add_argument("--warm-runs", type=int, default=3, help="warm starts, of which the median counts (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line there too")
    parser.add_argument("--one-start", action="store_true", help=argparse.SUPPRESS)  # what the fresh processes are told
    args = parser.parse_args()
    if args.warm_runs < 1:
        parser.error(f"--warm-runs must be at least 1, given {args.warm_runs}")
    return args


def start_once(args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process, make a token, and say when what was done."""
    import psutil
    from workloads import model_of

    from compiled_llm import CompiledEngine, SamplingParams
    from compiled_llm.command_line import engine_config

    began = psutil.Process().create_time()
    imported = time.time()
    with model_of(args) as arguments:
        config = engine_config(argparse.Namespace(**{**vars(args), **arguments}))
        with CompiledEngine.from_config(config) as engine:
            ready = time.time()
            engine.generate([[1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            ended = time.time()
            report, times = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
    seconds = {"imports": imported - began, **times, "first token": ended - ready}
    return {
        "seconds": seconds | {"other": ready - imported - sum(times.values())},
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
    rows = [("phase", *(f"{name} s" for name in starts))]
    rows += [(phase, *(f"{start['seconds'][phase]:.2f}" for start in starts.values())) for phase in PHASES]
    rows.append(("total", *(f"{start['total']:.2f}" for start in starts.values())))
    without = (f"{start['total'] - start['seconds']['weights']:.2f}" for start in starts.values())
    rows.append(("without weights", *without))
    graphs = next(iter(starts.values()))["graphs"]
    rows += [(f"  {name}", *(f"{start['graphs'][name]:.2f}" for start in starts.values())) for name in graphs]
    rows.append(("cache hits, misses", *(f"{start['hits']}, {start['misses']}" for start in starts.values())))
    rows.append(("load average", *(f"{start['load']:.1f}" for start in starts.values())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def main() -> int:
    args = parse_arguments()
    if args.one_start:
        print(json.dumps(start_once(args)))
        return 0
    from compiled_llm import hardware as machine
    from compiled_llm.worker.device import resolve_device

    with tempfile.TemporaryDirectory(prefix="compiled-llm-start-") as directory:
        cold = in_fresh_process(Path(directory))
        warm = [in_fresh_process(Path(directory)) for _ in range(args.warm_runs)]
    starts = {"cold": cold, "warm": median_of(warm)}
    print(table(starts))
    result = {
        **machine.describe(resolve_device(args.device)),
        **starts,
        "warm_median_total": median(start["total"] for start in warm),
    }
    line = json.dumps(result)
    if args.json is not None:
        args.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
