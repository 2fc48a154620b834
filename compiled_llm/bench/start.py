"""Measure starts, cold and warm, from the start of a process to its first token, stage by stage.

    compiled-llm bench start --demo --bucket-sizes 1,8,32
    compiled-llm bench start --shape qwen3-0.6b --dtype bfloat16 --max-model-len 1024 --other ../main
    compiled-llm bench start --shape qwen3-0.6b --device cuda --load-format dummy --seconds 90 --folder F

Each start is a process of its own. The first one of a checkout finds an empty cache directory and is the cold start;
the others find what it left. ``--other`` measures another checkout too, the two in turns. A shape's weights are random,
and are read from a checkpoint that is written first, so warm starts find them in memory; with ``--load-format dummy``
they are made instead. With ``--no-wait-for-compile`` a request follows another until all graphs have taken over.

On a machine that is lent for minutes, ``--seconds`` ends a start that is not ready by then, with all that it started.
``--folder`` keeps what each start said, its stacks when it was ended, and ``start.json`` after each start.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, engine_config
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench.harness import finish
from compiled_llm.checkpoint.shapes import SHAPES, engine_parser
from compiled_llm.models.config_file import read_config
from compiled_llm.models.registry import family_of
from compiled_llm.worker.device import resolve_device

STAGES = ("imports", "device", "weights", "build", "kernels", "load", "pool", "other", "first token")
THIS = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("start_program.py")
_LEFT = 5.0  # seconds that a start has at least, and those before its end in which it writes its stacks


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Starts, cold and warm, from the start of a process to its first token.")
    made.add_argument("--demo", action="store_true", help="the bundled model, in place of a shape")
    made.add_argument("--other", type=Path, metavar="DIR", help="another checkout of the project, measured in turns")
    made.add_argument("--warm-runs", type=int, default=3, help="warm starts of each checkout (default: 3)")
    made.add_argument("--seconds", type=float, default=1e6, help="for all starts together (default: no limit)")
    made.add_argument("--folder", type=Path, metavar="DIR", help="keep what each start said there")
    tables.add_json_flag(made)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    if args.demo and args.model is not None:
        raise ValueError("--demo and --model name two models: leave one out")
    if args.other is not None and not (args.other / "compiled_llm" / "__init__.py").is_file():
        raise ValueError(f"--other must be a checkout of the project, given {args.other}")


@contextlib.contextmanager
def engine_arguments(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What to give ``CompiledEngine``: the flags that are no defaults. Meanwhile a shape's checkpoint is there."""
    with tempfile.TemporaryDirectory(prefix="compiled-llm-") as directory:
        model = args.model
        if model is None and not args.demo:
            model = directory
            if args.load_format == "dummy":
                Path(directory, "config.json").write_text(json.dumps(SHAPES[args.shape]))
            else:
                write_checkpoint(Path(directory), args.shape)
        given = dataclasses.asdict(engine_config(argparse.Namespace(**{**vars(args), "model": model})))
        usual = dataclasses.asdict(EngineConfig())
        yield {name: value for name, value in given.items() if value != usual[name]}


def write_checkpoint(directory: Path, shape: str) -> None:
    """Random weights in bfloat16; matrices of variance 1 / in_features, norms of ones."""
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    config, generator = read_config(directory), torch.Generator().manual_seed(0)
    if config.published:
        raise ValueError(f"random weights are not made of {config.published:.100}; pass --model with a checkpoint")
    weights = {}
    for name, stored in family_of(config).describe(config).stored.items():
        sizes = stored.shapes[0]
        weight = torch.ones(sizes, dtype=torch.bfloat16)
        weights[name] = weight.normal_(generator=generator).mul_(sizes[-1] ** -0.5) if len(sizes) > 1 else weight
    save_file(weights, str(directory / "model.safetensors"))


def start(checkout: Path, cache: Path, arguments: dict[str, Any], log: Path, *, limit: float = 1e6) -> dict[str, Any]:
    """Start an engine of ``checkout`` in a process of its own, and make a token.

    Args:
        log: a file for all that it says.
        limit: seconds after which it is ended, with what it started: the result then has an ``error`` alone.
    """
    environment = {**os.environ, "COMPILED_LLM_CACHE": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    began, words = time.monotonic(), [json.dumps(arguments), str(time.monotonic()), str(limit - _LEFT / 2)]
    command = [sys.executable, "-P", str(PROGRAM), *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    if not found:
        taken = time.monotonic() - began
        return {
            "error": f"a start of {checkout} ended with status {process.returncode} after {taken:.0f} s",
            "log": lines[-40:],
        }
    return found[0] | {"load": os.getloadavg()[0]}


def measure(checkouts: list[Path], arguments: dict[str, Any], args: argparse.Namespace) -> dict[str, list[dict]]:
    """The starts of each checkout: the cold one first. Warm ones are made in turns; none follow one that failed."""
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="compiled-llm-start-") as directory:
        folder = args.folder or Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        starts: dict[str, list[dict[str, Any]]] = {str(checkout): [] for checkout in checkouts}
        for number in range(1 + args.warm_runs):
            for index, checkout in enumerate(checkouts):
                found, left = starts[str(checkout)], end - time.monotonic()
                if left < _LEFT or (found and "error" in found[-1]):
                    continue
                cache = Path(directory, f"cache-{index}")
                cache.mkdir(mode=0o700, exist_ok=True)
                log = folder / f"start-{index}-{number}.log"
                found.append(start(checkout, cache, arguments, log, limit=left - 2))
                if args.folder:
                    (folder / "start.json").write_text(json.dumps(starts, indent=1))
    return starts


def median_of(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The start whose total is the median (the lower of two): its stages add up, which medians of stages would not."""
    return sorted(starts, key=lambda start: start["total"])[(len(starts) - 1) // 2]


def table(starts: dict[str, dict[str, Any]]) -> str:
    """Seconds of each stage of each start, the processor's time, and what the cache held."""
    rows: dict[str, list[Any]] = {stage: [start["seconds"].get(stage) for start in starts.values()] for stage in STAGES}
    names = {"total": "total", "processor time": "cpu", "that of its processes": "cpu of processes"}
    names |= {"graphs found": "hits", "graphs made": "misses", "load average": "load"}
    names |= {name: name for name in ("tokens/s at first", "tokens/s compiled", "all compiled after")}
    rows |= {name: [start[key] for start in starts.values()] for name, key in names.items()}
    return tables.text_table(
        [{"seconds": name} | dict(zip(starts, values, strict=True)) for name, values in rows.items()]
    )


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(check_arguments, arguments, warm_runs=1, seconds=1)
    checkouts = [THIS] if args.other is None else [THIS, args.other.resolve()]
    with engine_arguments(args) as given:
        starts = measure(checkouts, given, args)
    names = dict(zip(starts, ("this", "other"), strict=False))
    errors = [one for found in starts.values() for one in found if "error" in one]
    for one in errors:
        print("\n".join([one["error"], *one["log"]]))
    good = {path: [one for one in found if "error" not in one] for path, found in starts.items()}
    shown = {f"cold, {names[path]}": found[0] for path, found in good.items() if found}
    shown |= {f"warm, {names[path]}": median_of(found[1:]) for path, found in good.items() if found[1:]}
    dtype = next((one["dtype"] for one in shown.values()), None)
    if shown:
        print(f"{dtype}\n{table(shown)}")
    for path, found in good.items():
        if any(one["tokens"] != found[0]["tokens"] for one in found):
            print(f"{names[path]}: cold and warm starts give OTHER TOKENS")
    finished = {names[path]: {"cold": found[:1] and found[0], "warm": found[1:]} for path, found in starts.items()}
    finish("start", {"dtype": dtype, **finished}, args.json, device=resolve_device(args.device))
    return 1 if errors else 0
