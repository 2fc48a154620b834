"""Validate and measure on a machine with a CUDA GPU: one command, less than ten minutes, results as JSON.

    python scripts/gpu_validate.py                        # everything that fits into --budget
    python scripts/gpu_validate.py --part e2e attention   # only these, in this order
    python scripts/gpu_validate.py --resume               # only what has no good result in --output yet

For machines that are lent for some minutes at a time, twice the same command:

    python scripts/gpu_validate.py --budget 240 --output results --archive results.tgz --resume

Parts, short ones that decide what is worth doing first:

- ``smoke``: a minute: attention, sampling, and the engine uncompiled and with both kinds of CUDA graphs against
  transformers. If it fails, nothing else runs.
- ``limits``: bandwidth and matrix peak, to compare everything else with.
- ``smoke-engine``: of ``smoke`` the engine alone.
- ``kernels-<shape>-<batch size>``: a decode step, every kernel of it, and the gaps between them; ``-prompts``: also
  prompts of 2,048 and 8,192 tokens; ``-manual``: with launches that begin when the one before has ended; ``-exact``:
  with ``exact=True``; ``-few``: with fewer layers, as these have.
- ``products-<shape>``: every linear layer at 1 to 256 rows, by each way to compute it; ``-around``: with the gate or
  residual that follows it, and a layer's four behind each other.
- ``probe-attention``: the engine's op of a decode and of prompts beside two backends of SDPA.
- ``start``: cold and warm starts with all buckets; ``start-few``: with one of each kind.
- ``host``: the host's time of a step, and how long the GPU idles.
- ``code``: Inductor's programs and the machine code of the kernels so far, for the archive.
- ``e2e``: tokens against transformers, a CUDA graph replayed in every step, preemption, swapping; with all kinds of
  CUDA graphs.
- ``trees-1``, ``manual-1``, to 256 (batch sizes): CUDA graph trees, graphs captured by hand; ``programmatic-1``, ``-8``
  and ``-32``: these with launches that start while the one before still runs.
- ``exact``: ``compiled-llm exact``, the matrix of buckets, chunks and company; ``exact-ops``: its ops by themselves;
  ``exact-1``, ``exact-32`` and ``exact-phases``: what it costs, beside ``trees-1``, ``trees-32`` and
  ``phases-compiled-llm``.
- ``latency`` and ``throughput``: the engine on random weights of real shapes; ``transformers``: the requests of
  ``throughput`` through transformers.generate.
- ``sampling``: the cost of sampling relative to a decode step.
- ``attention``: the op alone with every KV dtype, compared with SDPA and FlexAttention.
- ``serve``: requests that arrive over time; ``report``: how the time of a run was spent; ``phases-compiled-llm`` and
  ``phases-hf``: prefill and decode of long prompts, of the engine and of transformers; ``prefix-on`` and
  ``prefix-off``: requests with a common prefix, with and without the prefix cache.
- ``quantised``: linear layers on quantised weights against the reference, every format; ``quantised-speed``: each kind,
  of layers and of experts, checked, and timed beside bfloat16.
- ``ranks``: two ranks, on one GPU if there is no second: tokens of one process, uncompiled and in CUDA graphs; sums.
- ``kernels``: attention, also over latents, against the reference at real sizes.
- ``gpt-fast``: a token of its Llama-3-8B, if it is named and ``.gpt-fast`` is a checkout of it.
- ``tune`` and ``tune-linear`` run only if they are named: they write the tiles that suit this GPU to ``ops/tiles``,
  files to commit. Name ``code`` after them, and the archive has them too.

Parts from ``smoke`` to ``gpt-fast`` begin together: they load and compile side by side, as far as cores and GPU
memory go, and then measure one after the other (``bench/program_turns.py``). All others run one by one.

Each part is a process of its own with a time limit and writes ``<part>.json`` and ``<part>.log`` to ``--output`` when
it ends, so an interrupted run keeps its results, and ``--resume`` continues it, from the archive where ``--output`` is
gone. Logs have what torch says of recompiles; those of tests also of CUDA graphs, and of what slows code down. It needs
no installation, only a checkout and the packages.

Exit status: 0 if every part passed, 1 if one failed or was left out for lack of time, 2 without a CUDA GPU.
"""

import argparse
import contextlib
import dataclasses
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
from own_checkout import ROOT
from gpu_parts import PARTS

from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.tables import text_table
from compiled_llm.bench.program_turns import VARIABLE, go_file, ready_file, wait_for_turn
from compiled_llm.report import machine_limits
from compiled_llm.system import hardware as machine
from compiled_llm.system.resources import granted_cores

# Of every part, beside what is in the environment already.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TORCH_LOGS": "recompiles"}
# Of tests. Messages of these kinds have the stack of every op, which takes as long as compiling.
_CHATTY = {"TORCH_LOGS": "cudagraphs,perf_hints,recompiles"}
_PROCESSES = 6  # in which a part compiles
_TUNED = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"}


def measure_limits(path: Path) -> None:
    """Bandwidth and bf16 matrix peak."""
    wait_for_turn()
    device = torch.device("cuda", 0)
    limits = machine_limits.measured(device, torch.bfloat16, remeasure=True)
    path.write_text(json.dumps(dataclasses.asdict(limits) | {"machine": machine.describe(device)}) + "\n")
    print(limits)


class Running(NamedTuple):
    """A part that was started. ``turn``: where it says that it is ready, and is told to measure; None: it has none."""

    name: str
    process: subprocess.Popen
    started: float
    turn: Path | None

    @property
    def is_ready(self) -> bool:
        return self.turn is None or ready_file(self.turn).exists() or self.process.poll() is not None


def start_part(name: str, output: Path, turn: Path | None = None) -> Running:
    environment = os.environ | ENVIRONMENT | (_TUNED if name.startswith("products-") else {})
    environment |= _CHATTY if "-m pytest" in PARTS[name].command else {}
    if turn is not None:
        environment |= {VARIABLE: str(turn), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    json_path = output / f"{name}.json"
    json_path.unlink(missing_ok=True)
    with (output / f"{name}.log").open("w") as log:
        words = PARTS[name].command.split()
        full = [sys.executable, *(part.format(json=json_path, folder=output / name) for part in words)]
        process = subprocess.Popen(full, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return Running(name, process, time.perf_counter(), turn)


def end_part(running: Running, output: Path, seconds: float, **facts: Any) -> dict[str, Any]:
    """Let it measure, to its end or its limit; writes and returns its record."""
    name, process = running.name, running.process
    if running.turn is not None:
        go_file(running.turn).touch()
    began = time.perf_counter()
    try:
        status = process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        status = 124
        process.send_signal(signal.SIGINT)  # pytest then prints its results so far
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended = time.perf_counter()
    record: dict[str, Any] = {"part": name, "status": status, "seconds": round(ended - running.started, 1)}
    if running.turn is not None:
        record["turn_seconds"] = round(ended - began, 1)
    json_path, log_path = output / f"{name}.json", output / f"{name}.log"
    lines = log_path.read_text(errors="replace").splitlines()
    printed = (json.loads(line) for line in reversed(lines) if line.startswith("{"))
    record["result"] = json.loads(json_path.read_text()) if json_path.is_file() else next(printed, lines[-1:])
    record |= {"command": f"python {PARTS[name].command}"} | facts
    json_path.write_text(json.dumps(record, indent=1) + "\n")
    outcome = "passed" if status == 0 else f"FAILED ({status})"
    print(f"{name:<12} {outcome:<13} {record['seconds']:>6.1f} s   {log_path}")
    tail = lines[-12:] if status == 0 else lines[-60:]
    print("\n".join(f"    {line[:220]}" for line in tail if not line.startswith("{")), flush=True)
    return record


def run_part(name: str, output: Path, seconds_left: float) -> dict[str, Any]:
    """Run one part alone."""
    return end_part(start_part(name, output), output, min(PARTS[name].seconds, seconds_left))


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
    parts = [name for name in PARTS if not name.startswith(("tune", "gpt-fast"))]
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=parts, help="which parts (default: all that need not be named)"
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
    if args.resume and args.archive and args.archive.is_file() and not args.output.exists():
        args.output.parent.mkdir(parents=True, exist_ok=True)
        unpack(args.archive, args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    facts = machine.describe(torch.device("cuda", 0))
    print(json.dumps(facts), flush=True)
    (args.output / "machine.json").write_text(json.dumps(facts, indent=1) + "\n")
    todo = [name for name in args.part if not (args.resume and passed(name, args.output))]
    return run_parts(todo, args.output, args.archive, args.budget)


class Budget:
    """Seconds for all parts together."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


def run_in_turns(names: list[str], output: Path, budget: Budget, cores: int, gib: float) -> dict[str, bool]:
    """Start these parts side by side and let each measure alone; whether each passed.

    They begin a few at a time, as many as the cores can compile for: all of them at once are all late. A part that
    runs alone otherwise, ``smoke``, runs while the others prepare. No turn begins before it has ended and all others
    that have started are ready, or half the budget is gone. If it fails, so do all.
    """
    waiting, running, passed_by_name = list(names), [], {}
    half, at_once = budget.left / 2, max(1, round(cores / _PROCESSES))
    with tempfile.TemporaryDirectory(prefix="turns-") as folder, contextlib.ExitStack() as at_the_end:
        at_the_end.callback(stop, running)
        while waiting or running:
            for name in list(waiting):
                part, taken = PARTS[name], sum(PARTS[other.name].gib or 0 for other in running)
                if len(running) < at_once and (not running or taken + (part.gib or 0) <= gib):
                    waiting.remove(name)
                    running.append(start_part(name, output, None if part.gib is None else Path(folder, name)))
            alone = [one for one in running if one.turn is None]
            if any(one.process.poll() is None for one in alone) and budget.left > half:
                time.sleep(0.05)
                continue
            for one in alone:
                running.remove(one)
                record = end_part(one, output, PARTS[one.name].seconds - (time.perf_counter() - one.started))
                passed_by_name[one.name] = record["status"] == 0
                if not passed_by_name[one.name]:
                    return passed_by_name
            ready = [one for one in running if one.is_ready]
            if not ready or (len(ready) < len(running) and budget.left > half):
                if budget.left < 0:
                    break
                time.sleep(0.05)
                continue
            one = ready[0]
            running.remove(one)
            beside = [other.name for other in running if not other.is_ready]
            record = end_part(one, output, min(PARTS[one.name].seconds, budget.left), preparing_beside=beside)
            passed_by_name[one.name] = record["status"] == 0
    return passed_by_name


def stop(running: list[Running]) -> None:
    for one in running:
        print(f"{one.name:<12} stopped after {time.perf_counter() - one.started:.0f} s, before its turn", flush=True)
        one.process.kill()
        one.process.wait()


def summary(output: Path) -> str:
    """A line for each step that was measured, also in an earlier call."""
    rows = []
    for path in sorted(output.glob("kernels-*.json")):
        record = json.loads(path.read_text())
        result = record["result"]
        if record["status"] != 0:
            continue
        rows.append({"part": record["part"], "ms": result["step_us"] / 1e3, "launches": result["launches"]})
        for prompt in result.get("prompts", []):
            name = f"  prompt of {prompt['tokens']}, to its first token"
            rows.append({"part": name, "ms": prompt["first_token_ms"], "launches": prompt["launches"]})
    return text_table(rows) if rows else ""


def run_parts(todo: list[str], output: Path, archive: Path | None, budget_seconds: float) -> int:
    """As many of these as fit into the budget; the program's exit status."""
    budget, num_passed = Budget(budget_seconds), 0
    together = [name for name in todo if name == "smoke" or PARTS[name].gib is not None]
    if any(PARTS[name].gib is not None for name in together):
        found = run_in_turns(together, output, budget, granted_cores(), torch.cuda.mem_get_info()[0] / 2**30 - 2)
        num_passed += sum(found.values())
        if archive:
            pack(output, archive)
    else:
        together, found = [], {}
    for name in (name for name in todo if name not in together):
        if found.get("smoke", True) is False:
            break
        if budget.left < PARTS[name].seconds / 2:  # it would probably not finish; a shorter one may
            print(f"{name:<12} left out: {max(0, budget.left):.0f} s of the budget are left; go on with --resume")
            continue
        good = run_part(name, output, budget.left)["status"] == 0
        num_passed += good
        found[name] = good
        if archive:
            pack(output, archive)
    if found.get("smoke", True) is False and len(todo) > 1:
        print("smoke failed: the other parts are left out; name them with --part to run them all the same")
    print(summary(output))
    print(f"{num_passed} of {len(todo)} parts passed")
    return 0 if num_passed == len(todo) else 1


if __name__ == "__main__":
    sys.exit(main())
