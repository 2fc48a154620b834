"""Validate and measure on a machine with a CUDA GPU: one command, less than ten minutes, results as JSON.

    python scripts/gpu_validate.py                        # everything that fits into --budget
    python scripts/gpu_validate.py --part e2e attention   # only these, in this order
    python scripts/gpu_validate.py --resume               # only what has no good result in --output yet

For machines that are lent for ten minutes at a time, twice the same command:

    python scripts/gpu_validate.py --output results --archive results.tgz --resume

Parts, short ones that decide what is worth doing first:

- ``smoke``: a minute: attention, sampling, and the engine uncompiled and with both kinds of CUDA graphs against
  transformers. If it fails, nothing else runs.
- ``limits``: bandwidth and matrix peak, to compare everything else with.
- ``compile``: compiles what the parts ``kernels-...`` run, all side by side, so that they start from torch's cache.
- ``kernels-<shape>-<batch size>``: every kernel of a decode step, its time and the gap before it.
- ``products-<shape>``: every linear layer at 1 to 256 rows, by each way to compute it.
- ``code``: Inductor's programs and the machine code of the kernels so far, for the archive.
- ``e2e``: tokens against transformers, a CUDA graph replayed in every step, preemption, swapping; with all kinds of
  CUDA graphs.
- ``trees-1``, ``manual-1``, to 256 (batch sizes): CUDA graph trees, graphs captured by hand; ``programmatic-1``, ``-8``
  and ``-32``: these with launches that start while the one before still runs.
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
- ``kernels``: attention, also over latents, against the reference at real sizes.
- ``tune`` and ``tune-linear`` run only if they are named: they write the tiles that suit this GPU to ``ops/tiles``,
  files to commit. Name ``code`` after them, and the archive has them too.

Each part is a process of its own with a time limit and writes ``<part>.json`` and ``<part>.log`` to ``--output`` when
it ends, so an interrupted run keeps its results, and ``--resume`` continues it, from the archive where ``--output`` is
gone. Logs have what torch says of CUDA graphs, of what slows code down, and of recompiles. It needs no installation,
only a checkout and the packages.

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
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.own_checkout import ROOT

from compiled_llm import hardware as machine
from compiled_llm.command_line import FlagParser
from compiled_llm.report import machine_limits
from compiled_llm.resources import granted_cores

# With many cores, hundreds of kernel variants compile in parallel. pytest-benchmark then warns, which is an error here.
_PARALLEL = "-n 12" if importlib.util.find_spec("xdist") else ""
_PYTEST = "-m pytest -v -W default -p no:benchmark -p no:cacheprovider"

_LATENCY = "scripts/bench/bench_latency.py --device cuda --output-json {json}"
_THROUGHPUT = "scripts/bench/bench_throughput.py --device cuda --output-json {json}"
_W2 = "--shape qwen3-0.6b --workload W2"
_BUCKETS = "--bucket-sizes 1,8,32 --token-bucket-sizes 512,2048"
_ATTENTION_TESTS = "tests/ops/attention/test_attention_gpu.py tests/ops/attention/test_triton_latent.py"
_GPU_TESTS = (
    "-m gpu tests/e2e/test_gpu.py tests/ops/test_swap.py tests/ops/sampling/test_sampling_gpu.py "
    "tests/ops/test_programmatic_launch.py"
)
_EXACT_TESTS = (
    "-m gpu tests/ops/rowwise/test_rowwise_gpu.py tests/ops/linear/test_exact_linear.py "
    "tests/ops/linear/test_triton_surroundings.py "
    "tests/ops/attention/test_triton_exact.py"
)
_PHASES = f"{_LATENCY} --input-len 2048 --batch-size 8 --num-iters 3"
_PHASE_BUCKETS = "--bucket-sizes 8 --token-bucket-sizes 2048"
_DECODES = f"{_LATENCY} --input-len 32 --output-len 128 --num-iters 5 --token-bucket-sizes 512"

_KERNELS = "scripts/bench/bench_kernels.py --device cuda"
_SHAPES = {"0.6b": "qwen3-0.6b", "8b": "qwen3-8b"}
_GIB = {"0.6b": 4, "8b": 22}  # of GPU memory, for an engine with a small KV pool

# Part -> (maximum seconds, arguments of Python). {json} is a file for its result, {folder} a folder for more.
PARTS = {
    "smoke": (75, f"{_PYTEST} -m gpu tests/e2e/test_gpu_smoke.py"),
    "limits": (45, "scripts/gpu_validate.py --measure-limits {json}"),
    "compile": (170, "scripts/gpu_validate.py --compile {json}"),
    **{
        f"kernels-{name}-{batch_size}": (60, f"{_KERNELS} --shape {shape} --batch-size {batch_size} --json {{json}}")
        for name, shape in _SHAPES.items()
        for batch_size in (1, 32, 256)
    },
    **{
        f"products-{name}": (60, f"scripts/bench/bench_products.py --shape {shape} --seconds 0.05 --json {{json}}")
        for name, shape in _SHAPES.items()
    },
    "code": (45, "scripts/gpu_code.py --output {folder}"),
    "e2e": (420, f"{_PYTEST} {_GPU_TESTS}"),
    **{
        f"{mode}-{batch_size}": (
            120,
            f"{_DECODES} --cuda-graphs {mode} --bucket-sizes {batch_size} --batch-size {batch_size}",
        )
        for batch_size in (1, 8, 32, 256)
        for mode in ("trees", "manual", "programmatic")
        if (mode, batch_size) not in (("trees", 8), ("programmatic", 256))
    },
    "exact": (240, "scripts/check_exact.py --device cuda --quick --json {json}"),
    "exact-ops": (300, f"{_PYTEST} {_EXACT_TESTS}"),
    **{
        f"exact-{batch_size}": (120, f"{_DECODES} --exact --bucket-sizes {batch_size} --batch-size {batch_size}")
        for batch_size in (1, 32)
    },
    "exact-phases": (150, f"{_PHASES} {_PHASE_BUCKETS} --exact"),
    "latency": (240, f"{_THROUGHPUT} --shape qwen3-8b --workload W1 --bucket-sizes 1 --token-bucket-sizes 128"),
    "throughput": (240, f"{_THROUGHPUT} {_W2} {_BUCKETS}"),
    "transformers": (120, f"{_THROUGHPUT} --backend hf {_W2} --hf-max-batch-size 32"),
    "attention": (240, "scripts/bench/bench_attention.py --device cuda --seconds 1 --json {json}"),
    "sampling": (240, "scripts/bench/bench_sampling.py --batch-size 32 --json {json}"),
    "serve": (
        240,
        f"scripts/bench/bench_serve.py --device cuda {_W2} {_BUCKETS} --request-rate 16 --goodput ttft:200 tpot:20",
    ),
    "report": (120, f"scripts/serve_offline.py --device cuda {_BUCKETS} --quiet --report {{folder}}"),
    "phases-compiled-llm": (150, f"{_PHASES} {_PHASE_BUCKETS}"),
    "phases-hf": (150, f"{_PHASES} --backend hf"),
    **{
        f"prefix-{name}": (120, f"{_THROUGHPUT} --workload W3 --bucket-sizes 16 --token-bucket-sizes 512 --{flag}")
        for name, flag in (("on", "enable-prefix-caching"), ("off", "no-enable-prefix-caching"))
    },
    "quantised": (300, f"{_PYTEST} -m gpu tests/ops/linear/test_triton_quantized.py"),
    "quantised-speed": (480, "scripts/bench/bench_quantized.py --json {json}"),
    "kernels": (500, f"{_PYTEST} {_PARALLEL} -m gpu {_ATTENTION_TESTS}"),
    "tune": (540, "scripts/tune_attention.py --head-dim 128 --kv-cache-dtype auto int8 fp8 --seconds 480"),
    "tune-linear": (540, "scripts/tune_linear.py --seconds 480"),
    "tune-products": (360, "scripts/tune_linear.py --kind bfloat16 --seconds 300"),
}


# Of every part, beside what is in the environment already.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TORCH_LOGS": "cudagraphs,perf_hints,recompiles"}
_TUNED = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}


class Job(NamedTuple):
    """A process beside others: arguments of Python, and the GiB of GPU memory that it takes."""

    name: str
    command: str
    gib: float


def compile_jobs() -> list[Job]:
    """What ``compile`` runs, the largest first: they take longest."""
    parts = [name for name in PARTS if name.startswith("kernels-")]
    jobs = [
        Job(name, PARTS[name][1].split(" --json")[0] + " --compile-only", _GIB[name.split("-")[1]]) for name in parts
    ]
    return sorted(jobs, key=lambda job: -job.gib)


def side_by_side(jobs: list[Job], output: Path, cores: int, gib: float, seconds: float) -> dict[str, int | None]:
    """Run all, as many at once as fit into ``cores`` and ``gib``: statuses by name; None: not done in ``seconds``."""
    waiting, running, end = list(jobs), {}, time.perf_counter() + seconds
    statuses: dict[str, int | None] = {job.name: None for job in jobs}
    while (waiting or running) and time.perf_counter() < end:
        for job in list(waiting):
            taken = sum(other.gib for other, _ in running.values())
            if len(running) < cores and (not running or taken + job.gib <= gib):
                waiting.remove(job)
                with (output / f"{job.name}.compile.log").open("w") as log:
                    command = [sys.executable, *job.command.split()]
                    started = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
                running[job.name] = job, started
        for name, (_, process) in list(running.items()):
            if process.poll() is not None:
                statuses[name] = process.returncode
                del running[name]
        time.sleep(0.05)
    for _, process in running.values():
        process.kill()
        process.wait()
    return statuses


def compile_ahead(path: Path) -> int:
    free = torch.cuda.mem_get_info()[0] / 2**30
    started = time.perf_counter()
    statuses = side_by_side(
        compile_jobs(), path.parent, max(1, granted_cores() // 2), free - 2, PARTS["compile"][0] - 20
    )
    result = {"statuses": statuses, "seconds": round(time.perf_counter() - started, 1)}
    path.write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0 if set(statuses.values()) == {0} else 1


def measure_limits(path: Path) -> None:
    """Bandwidth and bf16 matrix peak."""
    device = torch.device("cuda", 0)
    limits = machine_limits.measured(device, torch.bfloat16, remeasure=True)
    path.write_text(json.dumps(dataclasses.asdict(limits) | {"machine": machine.describe(device)}) + "\n")
    print(limits)


def run_part(name: str, output: Path, seconds_left: float) -> dict[str, Any]:
    """Run one part to its end or its limit; writes and returns its record."""
    limit, command = PARTS[name]
    environment = os.environ | ENVIRONMENT | (_TUNED if name.startswith("products-") else {})
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


def pack(output: Path, archive: Path) -> None:
    """Everything of ``output``, whole or not at all: a run may be ended while it packs."""
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(output, arcname=output.name)
    part.replace(archive)


def unpack(archive: Path, output: Path) -> None:
    """What an earlier run packed, to ``output``, where that is not there."""
    with tempfile.TemporaryDirectory(dir=output.parent) as directory, tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
        (folder,) = Path(directory).iterdir()
        folder.rename(output)


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
    parser.add_argument("--compile", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_validate: no CUDA GPU here (torch.cuda.is_available() is False); nothing was run", file=sys.stderr)
        return 2
    if args.measure_limits:
        measure_limits(args.measure_limits)
        return 0
    if args.compile:
        return compile_ahead(args.compile)
    if args.resume and args.archive and args.archive.is_file() and not args.output.exists():
        args.output.parent.mkdir(parents=True, exist_ok=True)
        unpack(args.archive, args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(torch.device("cuda", 0))
    print(json.dumps(facts), flush=True)
    (args.output / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    todo = [name for name in args.part if not (args.resume and passed(name, args.output))]
    return run_parts(todo, args.output, args.archive, args.budget)


def run_parts(todo: list[str], output: Path, archive: Path | None, budget: float) -> int:
    """As many of these as fit into ``budget`` seconds; the program's exit status."""
    end = time.perf_counter() + budget
    num_passed = 0
    for name in todo:
        seconds_left = end - time.perf_counter()
        if seconds_left < PARTS[name][0] / 2:  # it would probably not finish; a shorter one may
            print(f"{name:<12} left out: {max(0, seconds_left):.0f} s of the budget are left; go on with --resume")
            continue
        good = run_part(name, output, seconds_left)["status"] == 0
        num_passed += good
        if archive:
            pack(output, archive)
        if name == "smoke" and not good and len(todo) > 1:
            print("smoke failed: the other parts are left out; name them with --part to run them all the same")
            break
    print(f"{num_passed} of {len(todo)} parts passed")
    return 0 if num_passed == len(todo) else 1


if __name__ == "__main__":
    sys.exit(main())
