"""An offline run of many rows, ``compiled-llm batch``, beside ``generate`` on the same rows, or in another order.

    compiled-llm bench offline --rows 1000000 --prompt-tokens 8 --max-tokens 1 --generated 100000
    compiled-llm bench offline --rows 10000 --prompt-tokens 64 --max-tokens 1 --generated 10000 --rounds 3
    compiled-llm bench offline --order --rows 10000 --prefixes 16 --prefix-tokens 768 --num-kv-blocks 512
    compiled-llm bench offline --order --rows 300 --max-tokens 8 --longest-tokens 512 --bucket-sizes 1,8,32

A run is a process of its own on the bundled model, whose resident memory is read every second. ``generate`` gets
``--generated`` of the rows, 10,000 a call, in another process, in turns with the runs.

``--order`` serves the rows in the given order, and ordered for speed, in turns. With ``--prefixes`` the rows begin with
one of so many, in random order; ``--num-kv-blocks`` leaves room for some of them, as a large model does. With
``--longest-tokens`` rows differ in how many tokens they ask for, and what is seen is the end of the file: the steps
whose buckets are no longer full.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench.harness import finish, in_turns, median_ratio
from compiled_llm.bench.start import THIS
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline.modes import MODES, mode_arguments

GENERATE = """
import itertools, json, sys, time
from compiled_llm import CompiledEngine, SamplingParams
rows, count, max_tokens, arguments = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
engine = CompiledEngine(**arguments, progress="off")
params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
seconds = 0.0
with open(rows) as file:
    for _ in range(0, count, 10_000):
        prompts = [json.loads(line)["prompt_token_ids"] for line in itertools.islice(file, 10_000)]
        started = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        seconds += time.perf_counter() - started
print(count / seconds)
"""


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="An offline run beside generate, or in another order.")
    add = made.add_argument
    add("--rows", type=int, default=100_000, help="(default: 100000)")
    add("--prompt-tokens", type=int, default=8, help="of a row, behind its prefix (default: 8)")
    add("--max-tokens", type=int, default=8, help="that a row asks for (default: 8)")
    add("--mode", choices=MODES, default="balanced", help="(default: balanced)")
    add("--generated", type=int, default=20_000, help="rows for generate (default: 20000); 0: none")
    add("--rounds", type=int, default=1, help="runs of each, in turns (default: 1)")
    add("--workers", type=int, default=1, help="of a run (default: 1)")
    add("--order", action="store_true", help="compare orders of the rows, not generate")
    add("--prefixes", type=int, default=0, help="that rows begin with (default: none)")
    add("--prefix-tokens", type=int, default=768, help="(default: 768)")
    add("--longest-tokens", type=int, help="rows ask for --max-tokens to so many (default: all the same)")
    add("--num-kv-blocks", type=int, help="of 16 tokens, of a run")
    add("--bucket-sizes", help="of a run")
    add("--enforce-eager", action="store_true", help="compile nothing")
    tables.add_json_flag(made)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    least, given = args.max_tokens, args.longest_tokens
    if given is not None and given < least:
        raise ValueError(f"--longest-tokens must be at least --max-tokens, {least}, given {given}")


def write_rows(path: Path, args: argparse.Namespace) -> None:
    """Rows of random token ids, those of all prefixes mixed."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(3, 1000), k=args.prefix_tokens) for _ in range(args.prefixes)] or [[]]
    with open(path, "w") as file:
        for _ in range(args.rows):
            own = rng.choices(range(3, 1000), k=args.prompt_tokens)
            row: dict[str, Any] = {"prompt_token_ids": rng.choice(prefixes) + own}
            if args.longest_tokens is not None:
                row["sampling_params"] = {"max_tokens": rng.randint(args.max_tokens, args.longest_tokens)}
            file.write(json.dumps(row) + "\n")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(THIS), os.environ.get("PYTHONPATH")]))}


def generate(rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Rows a second of ``generate``."""
    given = mode_arguments(args.mode, "cpu") | ({"enforce_eager": True} if args.enforce_eager else {})
    command = [sys.executable, "-c", GENERATE, str(rows), str(args.generated), str(args.max_tokens), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return {"rows_per_s": float(done.stdout)}


def run(rows: Path, output: Path, args: argparse.Namespace, *flags: str) -> dict[str, Any]:
    """Rows a second of the command, and its resident bytes from the first row that was written to the last."""
    command = [sys.executable, "-m", "compiled_llm", "batch", "--device", "cpu", "--quiet", "--details", *flags]
    command += ["--input", str(rows), "--output", str(output), "--max-tokens", str(args.max_tokens)]
    command += ["--temperature", "0", "--ignore-eos", "--workers", str(args.workers), "--mode", args.mode]
    command += ["--enforce-eager"] * args.enforce_eager
    for name in ("num_kv_blocks", "bucket_sizes"):
        given = getattr(args, name)
        command += [] if given is None else [f"--{name.replace('_', '-')}", str(given)]
    with open(output.with_suffix(".log"), "w+") as log:
        process = psutil.Popen(command, stdout=log, stderr=log, env=environment())
        samples, written = list[int](), 0
        while process.poll() is None:
            before, written = written, output.stat().st_size if output.exists() else 0
            if written > before > 0:
                samples.append(process.memory_info().rss)
            time.sleep(min(1.0, 1e-5 * args.rows))
        log.seek(0)
        text = log.read()
    found = re.search(r"rows +(\d+) in ([\d.]+) s", text)
    if process.returncode != 0 or found is None:
        raise RuntimeError(f"a run ended with status {process.returncode}:\n{text[-3000:]}")
    with open(output) as file:
        lines = sorted(file, key=lambda line: int(line[10 : line.index(",")]))
    assert len(lines) == args.rows, "each row once"
    shown = [line.strip() for line in text.split("\n") if re.match(r"  (order|prefix cache|steps|tokens) ", line)]
    return {"rows_per_s": int(found[1]) / float(found[2]), "rss": samples, "lines": lines, "summary": shown}


def memory_of(samples: list[int]) -> dict[str, list[float]]:
    """MiB of each quarter of the second half: single samples go up and down, a leak stays."""
    quarters = [samples[len(samples) * part // 4 : len(samples) * (part + 1) // 4] for part in range(4)]
    return {
        name: [of(quarter) / 2**20 for quarter in quarters]
        for name, of in (("highest", max), ("median", statistics.median))
    }


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"rows": 1, "prompt_tokens": 1, "max_tokens": 1, "prefixes": 0, "prefix_tokens": 1, "generated": 0}
    args = parser(program).parse_checked(check_arguments, arguments, **least, rounds=1, workers=1)
    with tempfile.TemporaryDirectory() as directory:
        rows, number = Path(directory) / "rows.jsonl", 0
        write_rows(rows, args)

        def served(*flags: str) -> dict[str, Any]:
            nonlocal number
            number += 1
            return run(rows, Path(directory) / f"out-{number}.jsonl", args, *flags)

        runs: dict[str, Callable[[], dict[str, Any]]] = {"run": served}
        if args.order:
            runs = {name: lambda window=w: served("--order-window", window) for name, w in ORDERS.items()}  # type: ignore
        elif args.generated:
            runs["generate"] = lambda: generate(rows, args)
        found = in_turns(runs, rounds=args.rounds, warm_up=0)
    if args.order:
        assert found["ordered"][0]["lines"] == found["given"][0]["lines"], "the same results"
        print("\n".join(f"{name}: {line}" for name in found for line in found[name][0]["summary"]))
    rates = {name: [one["rows_per_s"] for one in values] for name, values in found.items()}
    dtype = json.loads((DEMO_MODEL / "config.json").read_text())["dtype"]
    print(f"the bundled model in {dtype}, {args.rows} rows, {args.mode}")
    for name, values in rates.items():
        print(f"  {name}: {', '.join(f'{rate:.1f}' for rate in values)} rows/s")
    result: dict[str, Any] = {"dtype": dtype, "mode": args.mode, "rows": args.rows, "rows_per_s": rates}
    if len(rates) == 2:
        first, second = rates
        result["ratio"] = median_ratio(rates[first], rates[second])
        print(f"  {first} over {second}: {result['ratio']:.3f}")
    samples = next(iter(found.values()))[-1]["rss"]
    if len(samples) >= 8:
        result["resident_mib"] = memory_of(samples)
        print(f"  resident MiB of each quarter: {result['resident_mib']}")
    finish("offline", result, args.json)
    return 0


ORDERS = {"ordered": "16384", "given": "1"}  # name -> --order-window
