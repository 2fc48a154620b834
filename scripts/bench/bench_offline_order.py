"""The order of an offline run: rows of some prefixes in random order, served in the given order and ordered for speed.

    python scripts/bench/bench_offline_order.py --rows 10000 --prefixes 16
    python scripts/bench/bench_offline_order.py --rows 300 --prefix-tokens 1 --max-tokens 8 --longest-tokens 512

Each run is a process of its own, the two in turns. The KV pool holds the rows that run and some of the prefixes, as
that of a large model does. With ``--longest-tokens`` rows differ in how many tokens they ask for, and what is seen is
the end of the file: the steps whose buckets are no longer full.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import own_checkout

from compiled_llm.api.command_line import FlagParser
from compiled_llm.checkpoint.model_files import DEMO_MODEL

SCRIPT = Path(__file__).parents[1] / "serve_offline.py"


def write_rows(path: Path, args: argparse.Namespace) -> None:
    """Rows of random token ids, those of all prefixes mixed."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, 1000) for _ in range(args.prefix_tokens)] for _ in range(args.prefixes)]
    with open(path, "w") as file:
        for _ in range(args.rows):
            own = [rng.randrange(3, 1000) for _ in range(args.own_tokens)]
            row: dict[str, Any] = {"prompt_token_ids": rng.choice(prefixes) + own}
            if args.longest_tokens is not None:
                row["sampling_params"] = {"max_tokens": rng.randint(args.max_tokens, args.longest_tokens)}
            file.write(json.dumps(row) + "\n")


def run(arguments: list[str]) -> tuple[float, str]:
    """Seconds for the rows, and the summary."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
    found = re.search(r"rows +\d+ in ([\d.]+) s", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), done.stdout


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=768)
    parser.add_argument("--own-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument(
        "--longest-tokens", type=int, help="rows ask for --max-tokens to so many (default: all the same)"
    )
    parser.add_argument("--num-kv-blocks", type=int, default=512, help="of 16 tokens")
    parser.add_argument("--runs", type=int, default=1, help="of each order, in turns")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    return parser.parse_checked(
        check_arguments, rows=1, prefixes=1, prefix_tokens=1, own_tokens=1, max_tokens=1, runs=1
    )


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments."""
    if args.longest_tokens is not None and args.longest_tokens < args.max_tokens:
        raise ValueError(
            f"--longest-tokens must be at least --max-tokens, {args.max_tokens}, given {args.longest_tokens}"
        )


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        write_rows(rows, args)
        common = [
            "--input",
            str(rows),
            "--quiet",
            "--details",
            "--max-tokens",
            str(args.max_tokens),
            "--temperature",
            "0",
        ]
        common += ["--ignore-eos", "--num-kv-blocks", str(args.num_kv_blocks), "--bucket-sizes", "1,8,32"]
        common += ["--enforce-eager"] * args.enforce_eager
        seconds: dict[str, list[float]] = {"given": [], "ordered": []}
        lines: dict[str, set[str]] = {}
        for turn in range(args.runs):
            for name, window in (("given", "1"), ("ordered", "16384")):
                output = Path(directory) / f"{name}{turn}.jsonl"
                taken, summary = run([*common, "--order-window", window, "--output", str(output)])
                seconds[name].append(taken)
                lines[name] = set(output.read_text().splitlines())
                for row in ("order", "prefix cache", "steps", "tokens"):
                    print(next(line for line in summary.split("\n") if line.startswith(f"  {row} ")))
                print(f"{name}: {taken:.1f} s", flush=True)
    assert lines["given"] == lines["ordered"], "the same results"
    print(f"the bundled model in {json.loads((DEMO_MODEL / 'config.json').read_text())['dtype']}")
    given, ordered = (statistics.median(seconds[name]) for name in ("given", "ordered"))
    ratio = given / ordered
    print(f"{args.rows} rows: {given:.1f} s in the given order, {ordered:.1f} s ordered: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
