"""Which tiles of one linear kernel are the fastest on this GPU, and whether all give a row the same bits.

    python scripts/bench/probe_linear.py --output FOLDER

For the linear layers of two models in bfloat16, at 1 to 256 rows: microseconds of ``F.linear``, of the engine's ops,
and of every tiling of ``probe_linear_kernel.py``; alone, with what surrounds the layer in a model, and the layers of a
model behind each other. A time is the slope between graphs of N and 2 N launches, median of some replays in turns; each
launch has weights of its own, hundreds of megabytes together.

All kernels are compiled first, in parallel processes. A kernel whose result is wrong is not timed.
``probe_linear.json`` in FOLDER is written as it goes; a table is printed at the end.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import own_checkout
import torch
from probe_linear_cases import (
    BUFFER,
    MOST_ROWS,
    POINTS,
    PRODUCTS,
    Data,
    Product,
    Run,
    arounds_of,
    engine_run,
    exact_at_once,
    few_rows,
    named,
    programmatic_run,
    variant_run,
    variants_of,
)
from probe_linear_kernel import Variant, read
from probe_linear_times import best, chain, slopes
from torch import Tensor
from turns import wait_for_turn

from compiled_llm.command_line import FlagParser
from compiled_llm.ops.linear.surroundings import surrounded
from compiled_llm.ops.programmatic_launch import programmatic_launches

DISTINCT = 256 << 20  # bytes of weights in the shorter of the two graphs, at least: several times the L2 cache
TOLERANCE = 0.02  # of the largest output

# ---- compiled in parallel -------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """What a process compiles: the launch of a variant, or (None) an op of the engine."""

    product: Product
    rows: int
    around: str
    variant: Variant | None
    programmatic: bool = False
    way: str = ""


def key_of(job: Job) -> tuple:
    """What a kernel depends on: of a variant only these."""
    if job.variant is None:
        return job.product, job.rows, job.around, job.way, job.programmatic
    return job.variant, job.product.inputs, job.around, job.programmatic


def jobs() -> list[Job]:
    """Each kernel once."""
    found = [Job(product, MOST_ROWS, "", None, False, "exact") for product in PRODUCTS]
    for model, rows in POINTS:
        for product in (p for p in PRODUCTS if p.model == model):
            for around in arounds_of(product, rows):
                found += [Job(product, rows, around, *pair) for pair in variants_of(product, rows, around)]
                found.append(Job(product, rows, around, None, False, "exact"))
                if rows <= 32:
                    found.append(Job(product, rows, around, None, False, "fused"))
                    if around:
                        found.append(Job(product, rows, around, None, True, "fused"))
    return list({key_of(job): job for job in found}.values())


_buffer: list[Tensor] = []  # of a process that compiles: memory of any contents, made at the first job


def compile_job(job: Job) -> tuple[Job, str]:
    """Why it does not compile; "" if it does."""
    try:
        if not _buffer:
            _buffer.append(torch.empty(BUFFER // 3, dtype=torch.bfloat16, device="cuda"))
        data = Data.of(job.product, _buffer[0])
        if job.variant is None:
            with programmatic_launches(job.programmatic):
                engine_run(data, job.rows, job.around, job.way)(0)
            torch.cuda.synchronize()
        else:
            variant_run(data, job.rows, job.around, job.variant, job.programmatic, 132, warm_up=True)(0)
    except Exception as error:  # one kernel fewer
        return job, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return job, ""


def compile_all(processes: int, seconds: float, log: dict[str, Any]) -> set[tuple]:
    """Keys of those that are compiled in time."""
    todo, done, end = jobs(), set(), time.monotonic() + seconds
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # whose end stops what still runs
        results = pool.imap_unordered(compile_job, todo)
        for _ in todo:
            try:
                job, reason = results.next(max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                log["left_out"].append([f"{len(todo) - len(done)} kernels", f"not compiled in {seconds} s"])
                break
            if reason:
                log["left_out"].append([str(job), reason])
            else:
                done.add(key_of(job))
    log["compiled"] = f"{len(done)} of {len(todo)} kernels"
    return done


# ---- measured -------------------------------------------------------------------------------------------------------


def in_float64(data: Data, rows: int, around: str) -> Tensor:
    def product(x: Tensor) -> Tensor:
        parts = data.weight().split(16384)
        return torch.cat([x.double() @ part.double().T for part in parts], dim=1)

    x = data.x[:rows]
    double = [t.double() if isinstance(t, Tensor) else t for t in data.around(rows, around)]
    return surrounded(product, x.double(), *double)


def error_of(got: Tensor, want: Tensor) -> float:
    found = float((got.double() - want).abs().max() / want.abs().max())
    return found if found == found else float("inf")


def measure(
    data: Data, rows: int, around: str, compiled: set[tuple], sms: int, log: dict[str, Any], rounds: int
) -> dict[str, Any]:
    """A case: microseconds of each way and variant, and whether bits are those of today's ``exact`` at 256 rows."""
    product = data.product
    want = in_float64(data, rows, around)
    base = exact_at_once(data, around)[:rows]
    runs: dict[str, Run] = {}
    ways = ["cublas", "exact"] + (["fused"] if rows <= 32 else [])
    for way in ways:
        runs[way] = engine_run(data, rows, around, way)
        if way == "fused" and around:
            runs["fused, programmatic"] = programmatic_run(runs[way])
    for variant, programmatic in variants_of(product, rows, around):
        if key_of(Job(product, rows, around, variant, programmatic)) in compiled:
            runs[named(variant, programmatic)] = variant_run(data, rows, around, variant, programmatic, sms)
    errors, same = {}, {}
    for name in list(runs):
        try:
            data.out.fill_(float("nan"))
            got = runs[name](0)
            torch.cuda.synchronize()
            errors[name], same[name] = error_of(got, want), torch.equal(got, base)
        except Exception as error:  # one fewer
            errors[name] = float("inf")
            log["left_out"].append([f"{product.name} {rows} {name}", f"{type(error).__name__}: {str(error)[:200]}"])
        if errors[name] > TOLERANCE:
            log["left_out"].append([f"{product.name} {rows} {around} {name}", f"off by {errors[name]:.2g}"])
            del runs[name]
    weight_bytes = data.weight().nbytes
    if not around:  # the limit: as many bytes are read
        ends = torch.empty(16 * sms, device="cuda")
        runs["read"] = lambda copy: read(data.weight(copy).flatten(), ends, 4 * sms)
    launches = 4 if weight_bytes > DISTINCT else max(16, DISTINCT // weight_bytes)
    found = slopes(runs, launches, rounds, log)
    return {
        "model": product.model, "layer": product.name, "outputs": product.outputs, "inputs": product.inputs,
        "around": around, "rows": rows, "launches": launches,
        "us": dict(sorted(found.items(), key=lambda pair: pair[1])), "same_bits": same, "errors": errors,
    }  # fmt: skip


# ---- the program ----------------------------------------------------------------------------------------------------


def table(log: dict[str, Any]) -> str:
    lines = ["layer rows around: read | cublas exact fused | fastest | fastest with the bits of exact"]
    for case in (
        c for c in log["cases"] if c["rows"] != 16 and (c["around"] not in ("", "gate") or c["layer"] == "head")
    ):
        us = case["us"]
        ours = [n for n in us if n not in ("read", "cublas", "exact", "fused", "fused, programmatic")][:1]
        ours += [n for n in [best(case, False)] if n and n not in ours]
        engine = " ".join(f"{us[w]:.1f}" if w in us else "-" for w in ("cublas", "exact", "fused"))
        shown = " | ".join(f"{us[n]:.1f} {n}" for n in ours)
        head = f"{case['model'][:5]} {case['layer']} {case['rows']} {case['around'] or 'alone'}"
        lines.append(f"{head}: {us.get('read', 0):.1f} | {engine} | {shown}")
    for entry in log["chains"]:
        lines.append(f"{entry['model']} {entry['rows']} rows, a layer: ")
        lines += [f"    {time:.1f} {name}" for name, time in entry["us"].items()]
    differing = sorted({n for case in log["cases"] for n, same in case["same_bits"].items() if not same})
    lines.append(f"other bits than exact: {', '.join(differing) or 'none'}")
    lines.append(f"{log['compiled']} in {log['compile_s']:.0f} s, {len(log['left_out'])} left out, {log['s']:.0f} s")
    return "\n".join(lines)


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for probe_linear.json")
    parser.add_argument("--seconds", type=float, default=50, help="for measuring")
    parser.add_argument("--compile-seconds", type=float, default=45, help="for compiling")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--dry-run", action="store_true", help="print what would be compiled")
    args = parser.parse_args()
    begun = time.monotonic()
    if args.dry_run:
        todo = jobs()
        print(f"{len(todo)} kernels, {len(POINTS)} points, {len(few_rows(16))} tilings of 16 rows")
        return 0
    if not torch.cuda.is_available():
        print("probe_linear: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    args.output.mkdir(parents=True, exist_ok=True)
    log: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "left_out": [], "cases": []}
    log |= {"chains": [], "compiled": "", "compile_s": 0.0, "s": 0.0}

    def save() -> None:
        log["s"] = time.monotonic() - begun
        (args.output / "probe_linear.json").write_text(json.dumps(log, indent=1))

    compiled = compile_all(args.processes, args.compile_seconds, log)
    log["compile_s"] = time.monotonic() - begun
    save()
    wait_for_turn()
    begun = time.monotonic()
    buffer = torch.empty(BUFFER + (1 << 16), dtype=torch.bfloat16, device="cuda").normal_()[:BUFFER]
    torch.cuda.synchronize()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for model, rows in POINTS:
            cases = {}
            for product in (p for p in PRODUCTS if p.model == model):
                for around in arounds_of(product, rows):
                    if time.monotonic() - begun > args.seconds:
                        break
                    try:
                        data = Data.of(product, buffer)
                        case = measure(data, rows, around, compiled, sms, log, 3 if product.name == "head" else 5)
                        cases[product.name, around] = case
                        log["cases"].append(case)
                    except Exception as error:  # the next case
                        log["left_out"].append([f"{product} {rows}", f"{type(error).__name__}: {str(error)[:300]}"])
                    save()
            if rows <= 32 and time.monotonic() - begun < args.seconds:
                try:
                    log["chains"].append(chain(model, rows, cases, buffer, sms, log))
                except Exception as error:  # likewise
                    log["left_out"].append([f"chain {model} {rows}", f"{type(error).__name__}: {str(error)[:300]}"])
                save()
    print(table(log))
    for name, reason in log["left_out"][:12]:
        print(f"left out: {name[:150]}: {reason[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
