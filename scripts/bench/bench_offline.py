"""An offline run of many short rows beside ``generate`` on the same rows: throughput, and memory over time.

    python scripts/bench/bench_offline.py --rows 1000000 --prompt-tokens 8 --max-tokens 1 --generated 100000
    python scripts/bench/bench_offline.py --rows 100000 --prompt-tokens 64 --max-tokens 1 --generated 20000

The run is a process of its own, whose resident memory is read every second. ``generate`` gets ``--generated`` of the
rows, 10,000 a call, in another process, before the run and after it. Both have the engine arguments of ``--mode``.
"""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from compiled_llm.command_line import FlagParser
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
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def run(rows: Path, output: Path, max_tokens: int, extra: list[str]) -> tuple[float, list[int]]:
    """Rows a second of the command, and its resident bytes while it served."""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quiet", "--input", str(rows)]
    command += ["--output", str(output), "--max-tokens", str(max_tokens), "--temperature", "0", "--ignore-eos", *extra]
    with open(output.with_suffix(".log"), "w+") as log:
        process = psutil.Popen(command, stdout=log, stderr=log)
        samples: list[int] = []
        while process.poll() is None:
            if output.exists() and output.stat().st_size:
                samples.append(process.memory_info().rss)
            time.sleep(1.0)
        log.seek(0)
        text = log.read()
    found = re.search(r"rows +(\d+) in ([\d.]+) s", text)
    assert process.returncode == 0, text
    assert found is not None, text
    return int(found[1]) / float(found[2]), samples


def main() -> None:
    parser = FlagParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--mode", choices=MODES, default="balanced")
    parser.add_argument("--generated", type=int, default=20_000, help="rows for generate, a multiple of 10,000")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_checked(rows=1, prompt_tokens=1, max_tokens=1, generated=10_000, workers=1)
    with tempfile.TemporaryDirectory() as directory:
        rows, output = Path(directory) / "rows.jsonl", Path(directory) / "out.jsonl"
        write_rows(rows, args.rows, args.prompt_tokens)
        before = generate(rows, args.generated, args.max_tokens, args.mode)
        rate, samples = run(rows, output, args.max_tokens, ["--workers", str(args.workers), "--mode", args.mode])
        after = generate(rows, args.generated, args.max_tokens, args.mode)
        with open(output) as file:
            indices = {int(line[10 : line.index(",")]) for line in file}
    assert indices == set(range(args.rows)), "each row once"
    half = samples[len(samples) // 2 :]
    middle = statistics.median([before, after])
    print(
        f"{args.rows} rows of {args.prompt_tokens} tokens in, {args.max_tokens} out, {args.mode}: {rate:.0f} rows/s; "
        f"generate {before:.0f} and {after:.0f} rows/s"
    )
    print(f"the run reached {rate / middle:.1%} of generate")
    if half:
        grown = (max(half) - min(half)) / min(half)
        print(f"resident: {half[0] / 2**20:.1f} MiB at half, {half[-1] / 2**20:.1f} at the end; within {grown:.2%}")


if __name__ == "__main__":
    main()
