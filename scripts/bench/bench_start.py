"""Measure starts, cold and warm, from the start of a process to its first token, stage by stage.

    python scripts/bench/bench_start.py --demo --bucket-sizes 1,8,32
    python scripts/bench/bench_start.py --shape qwen3-0.6b --dtype bfloat16 --max-model-len 1024 --other ../main

Each start is a process of its own. The first one of a checkout finds an empty cache directory and is the cold start;
the others find what it left. ``--other`` measures another checkout too, the two in turns. A shape's weights are random,
and are read from a checkpoint that is written first, so warm starts find them in memory.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_checkout
import tables
import torch
from safetensors.torch import save_file
from workloads import SHAPES, engine_parser

from compiled_llm.api.command_line import engine_config
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.quantization import published
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.registry import family_of
from compiled_llm.system import hardware as machine
from compiled_llm.worker.device import resolve_device

STAGES = ("imports", "kernels", "weights", "compile", "other", "first token")
THIS = own_checkout.ROOT
# Only what each version of the project has; it gets the engine's arguments, and when it was started.
START = """
import dataclasses, json, sys, time
arguments, began = json.loads(sys.argv[1]), float(sys.argv[2])
from compiled_llm import CompiledEngine, SamplingParams
imported = time.monotonic()
with CompiledEngine(**arguments) as engine:
    ready = time.monotonic()
    engine.generate([[1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    ended = time.monotonic()
    report, times = engine.compile_report(), dataclasses.asdict(engine.runner.start_times)
seconds = {"imports": imported - began, **times, "first token": ended - ready}
print(json.dumps({
    "seconds": seconds | {"other": ready - imported - sum(times.values())},
    "total": ended - began,
    "dtype": str(engine.runner.dtype)[6:],
    "cpu": time.process_time(),
    "graphs": {graph.name: round(graph.compile_seconds, 3) for graph in report.reports},
    "hits": report.cache_count("hit"),
    "misses": report.cache_count("miss"),
    "recompiles": report.recompiles,
}))
"""


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--demo", action="store_true", help="the bundled model, in place of a shape")
    parser.add_argument("--other", type=Path, metavar="DIR", help="another checkout of the project, measured in turns")
    parser.add_argument("--warm-runs", type=int, default=3, help="warm starts of each checkout (default: 3)")
    tables.add_json_flag(parser)
    return parser.parse_checked(check_arguments, warm_runs=1)


def check_arguments(args: argparse.Namespace) -> None:
    if args.demo and args.model is not None:
        raise ValueError("--demo and --model name two models: leave one out")
    if args.other is not None and not (args.other / "compiled_llm" / "__init__.py").is_file():
        raise ValueError(f"--other must be a checkout of the project, given {args.other}")
    tables.check_target("--json", args.json)


@contextlib.contextmanager
def engine_arguments(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to give ``CompiledEngine``: the flags that are no defaults. Meanwhile a shape's checkpoint is there."""
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        model = args.model
        if model is None and not args.demo:
            model = directory
            write_checkpoint(Path(directory), args.shape)
        given = dataclasses.asdict(engine_config(argparse.Namespace(**{**vars(args), "model": model})))
        usual = dataclasses.asdict(EngineConfig())
        yield {name: value for name, value in given.items() if value != usual[name]}


def write_checkpoint(directory: Path, shape: str, **fields: Any) -> None:
    """Random weights in bfloat16; matrices of variance 1 / in_features, norms of ones. Those in MXFP4 in random codes.

    Args:
        fields: of config.json besides.
    """
    (directory / "config.json").write_text(json.dumps(SHAPES[shape] | fields))
    config, generator = read_config(directory), torch.Generator().manual_seed(0)
    if config.published and json.loads(config.published)["quant_method"] != "mxfp4":
        raise ValueError(f"random weights are not made of {config.published:.100}; pass --model with a checkpoint")
    weights = {}
    for name, stored in family_of(config).describe(config, linears=published(config, Dense)).stored.items():
        sizes = stored.shapes[0]
        if stored.dtypes == (torch.uint8,):
            weights[name] = torch.randint(100, 128, sizes, generator=generator, dtype=torch.uint8)  # no scale is NaN
            continue
        weight = torch.ones(sizes, dtype=torch.bfloat16)
        weights[name] = weight.normal_(generator=generator).mul_(sizes[-1] ** -0.5) if len(sizes) > 1 else weight
    save_file(weights, str(directory / "model.safetensors"))


def start(checkout: Path, cache: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Start an engine of ``checkout`` in a process of its own, and make a token."""
    environment = {**os.environ, "COMPILED_LLM_CACHE": str(cache), "PYTHONPATH": str(checkout)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-P", "-c", START, json.dumps(arguments), str(time.monotonic())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a start of {checkout} failed with status {done.returncode}; its messages stand above")
    return json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]}


def measure(checkouts: list[Path], arguments: dict[str, Any], warm_runs: int) -> dict[str, list[dict[str, Any]]]:
    """The starts of each checkout: the cold one first. Warm ones are made in turns."""
    with tempfile.TemporaryDirectory(prefix="compiled-llm-start-") as directory:
        caches = {checkout: Path(directory, str(index)) for index, checkout in enumerate(checkouts)}
        starts: dict[str, list[dict[str, Any]]] = {str(checkout): [] for checkout in checkouts}
        for _ in range(1 + warm_runs):
            for checkout, cache in caches.items():
                starts[str(checkout)].append(start(checkout, cache, arguments))
    return starts


def median_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The start whose total is the median (the lower of two): its stages add up, which medians of stages would not."""
    return sorted(starts, key=lambda start: start["total"])[(len(starts) - 1) // 2]


def table(starts: dict[str, dict[str, Any]]) -> str:
    """Seconds of each stage of each start, the processor's time, and what the cache held."""
    rows: dict[str, list[Any]] = {stage: [start["seconds"][stage] for start in starts.values()] for stage in STAGES}
    for name, key in (
        ("total", "total"),
        ("processor time", "cpu"),
        ("graphs found", "hits"),
        ("graphs made", "misses"),
    ):
        rows[name] = [start[key] for start in starts.values()]
    rows["load average"] = [start["load"] for start in starts.values()]
    return tables.text_table(
        [{"seconds": name} | dict(zip(starts, values, strict=True)) for name, values in rows.items()]
    )


def main() -> int:
    args = parse_arguments()
    checkouts = [THIS] if args.other is None else [THIS, args.other.resolve()]
    with engine_arguments(args) as arguments:
        starts = measure(checkouts, arguments, args.warm_runs)
    names = dict(zip(starts, ("this", "other"), strict=False))
    dtype = next(iter(starts.values()))[0]["dtype"]
    shown = {f"cold, {names[path]}": found[0] for path, found in starts.items()}
    shown |= {f"warm, {names[path]}": median_of(found[1:]) for path, found in starts.items()}
    print(f"{dtype}\n{table(shown)}")
    finished = {names[path]: {"cold": found[0], "warm": found[1:]} for path, found in starts.items()}
    tables.finish({"dtype": dtype, **machine.describe(resolve_device(args.device)), **finished}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
