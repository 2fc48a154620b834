"""The order of an offline run: rows of some prefixes in random order, served in the given order and ordered for speed.

    python scripts/bench/bench_offline_order.py --rows 10000 --prefixes 16

Each run is a process of its own, the two in turns. The KV pool holds the rows that run and some of the prefixes, as
that of a large model does.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compiled_llm.command_line import FlagParser

SCRIPT = Path(__file__).parents[1] / "serve_offline.py"


def write_rows(path: Path, num_rows: int, num_prefixes: int, prefix_tokens: int, own_tokens: int) -> None:
    """Rows of random token ids, those of all prefixes mixed."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, 1000) for _ in range(prefix_tokens)] for _ in range(num_prefixes)]
    with open(path, "w") as file:
        for _ in range(num_rows):
            own = [rng.randrange(3, 1000) for _ in range(own_tokens)]
            file.write(json.dumps({"prompt_token_ids": rng.choice(prefixes) + own}) + "\n")


def run(arguments: list[str]) -> tuple[float, str]:
    """Seconds for the rows, and the summary."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=True)
    found = re.search(r"rows +\d+ in ([\d.]+) s", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), done.stdout


def main() -> None:
    parser = FlagParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=768)
    parser.add_argument("--own-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--num-kv-blocks", type=int, default=512, help="of 16 tokens")
    parser.add_argument("--runs", type=int, default=1, help="of each order, in turns")
    args = parser.parse_checked(rows=1, prefixes=1, prefix_tokens=1, own_tokens=1, max_tokens=1, runs=1)
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        write_rows(rows, args.rows, args.prefixes, args.prefix_tokens, args.own_tokens)
        common = ["--input", str(rows), "--quiet", "--max-tokens", str(args.max_tokens), "--temperature", "0"]
        common += ["--ignore-eos", "--num-kv-blocks", str(args.num_kv_blocks), "--bucket-sizes", "1,8,32"]
        seconds: dict[str, list[float]] = {"given": [], "ordered": []}
        lines: dict[str, set[str]] = {}
        for turn in range(args.runs):
            for name, window in (("given", "1"), ("ordered", "16384")):
                output = Path(directory) / f"{name}{turn}.jsonl"
                taken, summary = run([*common, "--order-window", window, "--output", str(output)])
                seconds[name].append(taken)
                lines[name] = set(output.read_text().splitlines())
                for row in ("order", "prefix cache", "throughput"):
                    print(next(line for line in summary.split("\n") if line.startswith(f"  {row} ")))
                print(f"{name}: {taken:.1f} s", flush=True)
    assert lines["given"] == lines["ordered"], "the same results"
    given, ordered = (statistics.median(seconds[name]) for name in ("given", "ordered"))
    ratio = given / ordered
    print(f"{args.rows} rows: {given:.1f} s in the given order, {ordered:.1f} s ordered: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
