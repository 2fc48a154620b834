"""An offline run of many short rows beside ``generate`` on the same rows: throughput, and memory over time.

    python scripts/bench/bench_offline.py --rows 1000000 --prompt-tokens 8 --max-tokens 1 --generated 100000
    python scripts/bench/bench_offline.py --rows 100000 --prompt-tokens 64 --max-tokens 1 --generated 0
    python scripts/bench/bench_offline.py --rows 10000 --prompt-tokens 64 --max-tokens 1 --generated 10000 --rounds 3

The run is a process of its own, whose resident memory is read every second. ``generate`` gets ``--generated`` of the
rows, 10,000 a call, in another process, before each run and after the last. Both have the engine arguments of
``--mode``.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import own_checkout
import psutil

from compiled_llm.api.command_line import FlagParser
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline.modes import MODES, mode_arguments

SCRIPT = Path(__file__).parents[1] / "serve_offline.py"
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


def write_rows(path: Path, count: int, num_tokens: int) -> None:
    """Rows of random token ids."""
    rng = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"prompt_token_ids": rng.choices(range(3, 1000), k=num_tokens)}) + "\n")


def generate(rows: Path, count: int, max_tokens: int, mode: str) -> float:
    """Rows a second of ``generate``."""
    arguments = json.dumps(mode_arguments(mode, "cpu"))
    command = [sys.executable, "-c", GENERATE, str(rows), str(count), str(max_tokens), arguments]
    environment = {**os.environ, "PYTHONPATH": str(own_checkout.ROOT)}
    return float(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def run(rows: Path, output: Path, max_tokens: int, extra: list[str]) -> tuple[float, list[int]]:
    """Rows a second of the command, and its resident bytes from the first row that was written to the last."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quiet", "--input", str(rows)]
    command += ["--output", str(output), "--max-tokens", str(max_tokens), "--temperature", "0", "--ignore-eos", *extra]
    with open(output.with_suffix(".log"), "w+") as log:
        process = psutil.Popen(command, stdout=log, stderr=log)
        samples: list[int] = []
        written = 0
        while process.poll() is None:
            before, written = written, output.stat().st_size if output.exists() else 0
            if written > before > 0:
                samples.append(process.memory_info().rss)
            time.sleep(1.0)
        log.seek(0)
        text = log.read()
    found = re.search(r"rows +(\d+) in ([\d.]+) s", text)
    assert process.returncode == 0, text
    assert found is not None, text
    return int(found[1]) / float(found[2]), samples


def print_memory(samples: list[int]) -> None:
    """The second half, quarter against quarter: single samples go up and down, a leak stays."""
    quarters = [samples[len(samples) * part // 4 : len(samples) * (part + 1) // 4] for part in range(4)]
    for name, of in (("highest", max), ("median", statistics.median)):
        values = [of(quarter) / 2**20 for quarter in quarters]
        listed = ", ".join(f"{value:.1f}" for value in values)
        print(f"resident, {name} of each quarter: {listed} MiB; the last one {values[3] / values[2] - 1:+.2%}")
    half = quarters[2] + quarters[3]
    print(f"all {len(half)} samples of the second half: {min(half) / 2**20:.1f} to {max(half) / 2**20:.1f} MiB")


def main() -> None:
    parser = FlagParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--mode", choices=MODES, default="balanced")
    parser.add_argument(
        "--generated", type=int, default=20_000, help="rows for generate, a multiple of 10,000; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs, in turns with generate")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_checked(rows=1, prompt_tokens=1, max_tokens=1, generated=0, rounds=1, workers=1)
    rates, generated, samples = [], list[float](), list[int]()
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.jsonl"
        write_rows(rows, args.rows, args.prompt_tokens)
        for number in range(args.rounds):
            output = Path(directory) / f"out-{number}.jsonl"
            generated += [generate(rows, args.generated, args.max_tokens, args.mode)] if args.generated else []
            extra = ["--workers", str(args.workers), "--mode", args.mode]
            rate, samples = run(rows, output, args.max_tokens, extra)
            rates.append(rate)
            with open(output) as file:
                indices = [int(line[10 : line.index(",")]) for line in file]
            assert sorted(indices) == list(range(args.rows)), "each row once"
        generated += [generate(rows, args.generated, args.max_tokens, args.mode)] if args.generated else []
    listed = ", ".join(f"{rate:.0f}" for rate in rates)
    dtype = json.loads((DEMO_MODEL / "config.json").read_text())["dtype"]
    sizes = f"{args.rows} rows of {args.prompt_tokens} tokens in, {args.max_tokens} out"
    print(f"the bundled model in {dtype}, {sizes}, {args.mode}: {listed} rows/s")
    if generated:
        share = statistics.median(rates) / statistics.median(generated)
        print(f"generate: {', '.join(f'{rate:.0f}' for rate in generated)} rows/s; the run reached {share:.1%} of it")
    if len(samples) >= 8:
        print_memory(samples)


if __name__ == "__main__":
    main()
