"""Validate and measure on a machine with a CUDA GPU: one command, less than ten minutes, results as JSON.

    python scripts/gpu_validate.py                        # everything that fits into --budget
    python scripts/gpu_validate.py --part e2e attention   # only these, in this order
    python scripts/gpu_validate.py --resume               # only what has no good result in --output yet

Parts, the most valuable first:

- ``limits``: bandwidth and matrix peak, to compare everything else with.
- ``e2e``: tokens against transformers, a CUDA graph replayed in every step, preemption, swapping; with both kinds of
  CUDA graphs.
- ``trees-1``, ``manual-1``, ``trees-32``, ``manual-32`` (batch sizes): CUDA graph trees and graphs captured by hand.
- ``exact``: ``check_exact.py``, the matrix of buckets, chunks and company; ``exact-ops``: its ops by themselves;
  ``exact-1``, ``exact-32`` and ``exact-phases``: what it costs, beside ``trees-1``, ``trees-32`` and
  ``phases-compiled-llm``.
- ``latency`` and ``throughput``: the engine on random weights of real shapes; ``transformers``: the requests of
  ``throughput`` through transformers.generate.
- ``sampling``: the cost of sampling relative to a decode step.
- ``attention``: the op alone with every KV dtype, compared with SDPA, FlexAttention and transformers' paged attention.
- ``serve``: requests that arrive over time; ``report``: how the time of a run was spent; ``phases-compiled-llm`` and
  ``phases-hf``: prefill and decode of long prompts, of the engine and of transformers; ``prefix-on`` and
  ``prefix-off``: requests with a common prefix, with and without the prefix cache.
- ``quantised``: linear layers on quantised weights against the reference, every format; ``quantised-speed``: each kind,
  of layers and of experts, checked, and timed beside bfloat16.
- ``kernels``: attention against the reference at real sizes.
- ``tune`` and ``tune-linear`` run only if they are named: they write the tiles that suit this GPU to ``ops/tiles``,
  files to commit.

Each part is a process of its own with a time limit and writes ``<part>.json`` and ``<part>.log`` to ``--output`` when
it ends, so an interrupted run keeps its results, and ``--resume`` continues it. It needs no installation, only a
checkout and the packages.

Exit status: 0 if every part passed, 1 if one failed or was left out for lack of time, 2 without a CUDA GPU.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import torch

from compiled_llm.command_line import FlagParser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package may not be installed

from compiled_llm import hardware as machine  # noqa: E402
from compiled_llm.report import machine_limits  # noqa: E402

# With many cores, hundreds of kernel variants compile in parallel. pytest-benchmark then warns, which is an error here.
_PARALLEL = "-n 12" if importlib.util.find_spec("xdist") else ""
_PYTEST = "-m pytest -v -W default -p no:benchmark -p no:cacheprovider"

_LATENCY = "scripts/bench/bench_latency.py --device cuda --output-json {json}"
_THROUGHPUT = "scripts/bench/bench_throughput.py --device cuda --output-json {json}"
_W2 = "--shape qwen3-0.6b --workload W2"
_BUCKETS = "--bucket-sizes 1,8,32 --token-bucket-sizes 512,2048"
_GPU_TESTS = "-m gpu tests/e2e/test_gpu.py tests/ops/test_swap.py tests/ops/sampling/test_sampling_gpu.py"
_EXACT_TESTS = (
    "-m gpu tests/ops/rowwise/test_rowwise_gpu.py tests/ops/linear/test_exact_linear.py "
    "tests/ops/attention/test_triton_exact.py"
)
_PHASES = f"{_LATENCY} --input-len 2048 --batch-size 8 --num-iters 3"
_DECODES = f"{_LATENCY} --input-len 32 --output-len 128 --num-iters 5 --bucket-sizes 1,32"

# Part -> (maximum seconds, arguments of Python). {json} is a file for its result, {folder} a folder for more.
PARTS = {
    "limits": (60, "scripts/gpu_validate.py --measure-limits {json}"),
    "e2e": (300, f"{_PYTEST} {_GPU_TESTS}"),
    **{
        f"{mode}-{batch_size}": (120, f"{_DECODES} --cuda-graphs {mode} --batch-size {batch_size}")
        for batch_size in (1, 32)
        for mode in ("trees", "manual")
    },
    "exact": (240, "scripts/check_exact.py --device cuda --quick --json {json}"),
    "exact-ops": (300, f"{_PYTEST} {_EXACT_TESTS}"),
    **{f"exact-{batch_size}": (120, f"{_DECODES} --exact --batch-size {batch_size}") for batch_size in (1, 32)},
    "exact-phases": (150, f"{_PHASES} --exact"),
    "latency": (240, f"{_THROUGHPUT} --shape qwen3-8b --workload W1 --bucket-sizes 1 --token-bucket-sizes 128"),
    "throughput": (240, f"{_THROUGHPUT} {_W2} {_BUCKETS}"),
    "transformers": (120, f"{_THROUGHPUT} --backend hf {_W2} --hf-max-batch-size 32"),
    "attention": (240, "scripts/bench/bench_attention.py --device cuda --seconds 1 --json {json}"),
    "sampling": (240, "scripts/bench/bench_sampling.py --batch-size 32 --json {json}"),
    "serve": (
        240,
        f"scripts/bench/bench_serve.py --device cuda {_W2} {_BUCKETS} --request-rate 16 --goodput ttft:200 tpot:20",
    ),
    "report": (120, "scripts/serve_offline.py --device cuda --quiet --report {folder}"),
    **{f"phases-{backend}": (150, f"{_PHASES} --backend {backend}") for backend in ("compiled-llm", "hf")},
    **{
        f"prefix-{name}": (120, f"{_THROUGHPUT} --workload W3 --bucket-sizes 16 --token-bucket-sizes 512 --{flag}")
        for name, flag in (("on", "enable-prefix-caching"), ("off", "no-enable-prefix-caching"))
    },
    "quantised": (300, f"{_PYTEST} -m gpu tests/ops/linear/test_triton_quantized.py"),
    "quantised-speed": (480, "scripts/bench/bench_quantized.py --json {json}"),
    "kernels": (500, f"{_PYTEST} {_PARALLEL} tests/ops/attention/test_attention_gpu.py"),
    "tune": (540, "scripts/tune_attention.py --head-dim 128 --kv-cache-dtype auto int8 fp8 --seconds 480"),
    "tune-linear": (540, "scripts/tune_linear.py --seconds 480"),
}


def measure_limits(path: Path) -> None:
    """Bandwidth and bf16 matrix peak."""
    device = torch.device("cuda", 0)
    limits = machine_limits.measured(device, torch.bfloat16, remeasure=True)
    path.write_text(json.dumps(dataclasses.asdict(limits) | {"machine": machine.describe(device)}) + "\n")
    print(limits)


def run_part(name: str, output: Path, seconds_left: float) -> dict[str, Any]:
    """Run one part to its end or its limit; writes and returns its record."""
    limit, command = PARTS[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    json_path, log_path = output / f"{name}.json", output / f"{name}.log"
    json_path.unlink(missing_ok=True)
    started = time.perf_counter()
    with log_path.open("w") as log:
        full = [sys.executable, *(part.format(json=json_path, folder=output / name) for part in command.split())]
        process = subprocess.Popen(full, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(timeout=min(limit, seconds_left))
        except subprocess.TimeoutExpired:
            status = 124
            process.send_signal(signal.SIGINT)  # pytest then prints its results so far
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    record: dict[str, Any] = {"part": name, "status": status, "seconds": round(time.perf_counter() - started, 1)}
    lines = log_path.read_text(errors="replace").splitlines()
    printed = (json.loads(line) for line in reversed(lines) if line.startswith("{"))
    record["result"] = json.loads(json_path.read_text()) if json_path.is_file() else next(printed, lines[-1:])
    record["command"] = f"python {command}"
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    outcome = "passed" if status == 0 else f"FAILED ({status})"
    print(f"{name:<12} {outcome:<13} {record['seconds']:>6.1f} s   {log_path}")
    tail = lines[-12:] if status == 0 else lines[-60:]
    print("\n".join(f"    {line[:220]}" for line in tail if not line.startswith("{")), flush=True)
    return record


def passed(name: str, output: Path) -> bool:
    path = output / f"{name}.json"
    return path.is_file() and json.loads(path.read_text()).get("status") == 0


def main() -> int:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parts = [name for name in PARTS if not name.startswith("tune")]
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=parts, help="which parts (default: all but those that tune)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "gpu", help="folder for the results")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all parts together (default: 560)")
    parser.add_argument("--archive", type=Path, metavar="FILE.tgz", help="pack --output there after each part")
    parser.add_argument("--resume", action="store_true", help="leave out parts whose result there is good")
    parser.add_argument("--measure-limits", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_validate: no CUDA GPU here (torch.cuda.is_available() is False); nothing was run", file=sys.stderr)
        return 2
    if args.measure_limits:
        measure_limits(args.measure_limits)
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(torch.device("cuda", 0))
    print(json.dumps(facts), flush=True)
    (args.output / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    todo = [name for name in args.part if not (args.resume and passed(name, args.output))]
    end = time.perf_counter() + args.budget
    num_passed = 0
    for name in todo:
        seconds_left = end - time.perf_counter()
        if seconds_left < PARTS[name][0] / 2:  # it would probably not finish; a shorter one may
            print(f"{name:<12} left out: {max(0, seconds_left):.0f} s of the budget are left; go on with --resume")
            continue
        num_passed += run_part(name, args.output, seconds_left)["status"] == 0
        if args.archive:
            with tarfile.open(args.archive, "w:gz") as archive:
                archive.add(args.output, arcname=args.output.name)
    print(f"{num_passed} of {len(todo)} parts passed")
    return 0 if num_passed == len(todo) else 1


if __name__ == "__main__":
    sys.exit(main())
