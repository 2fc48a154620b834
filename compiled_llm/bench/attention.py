"""Paged attention: time, bandwidth and arithmetic rate of the op, compared with the machine's limits and alternatives.

    compiled-llm bench attention                                    # a default grid, some minutes on a CPU
    compiled-llm bench attention --device cuda
    compiled-llm bench attention --decode 1x4096 1x8192,31x256 --prefill 512+1024 8x4+4096 --block-size 16 64

A case is BATCHxCONTEXT for decode (CONTEXT keys, the new one included) and [BATCHx]TOKENS+CONTEXT for prefill. Commas
join groups of requests into one step: 1x8192,31x256 is one long request and thirty-one short ones. It should take as
long as 32x504, which has as many keys.

Everything of a case is timed in turns:

    op        compiled_llm::paged_attention, the cache write included; a row for each KV dtype and block size. With
              --turned it is the op of a step, which turns queries and keys by their positions before
    gather    every request's blocks gathered into contiguous keys and values, then F.scaled_dot_product_attention
    sdpa      F.scaled_dot_product_attention on keys and values that are contiguous already (no paging at all); on a
              GPU cudnn and flash are two of its backends
    flex      compiled FlexAttention on the same contiguous keys and values
    limits    memory: a sum over a large tensor on a CPU, a copy on a GPU (read and written); a large matrix product

gather, sdpa and flex run once for each group of requests. No alternative has a quantised cache: they run in the model's
dtype (gather with the first block size), and their columns are their times divided by that of the op in
that row. /model is the op's time relative to its own with a cache in the model's dtype. GB/s counts keys, values and
scales, each read once, TFLOP/s the two products over the visible keys. `of limit` is the time that these bytes or these
operations, whichever takes longer, would need at the machine's limits, over the time taken.

The caches of several layers are used in turns, so that none is in the processor's cache; with --hot it is one layer.
Before it is timed, the op must agree with SDPA on the keys and values of its cache, or the exit status is 1. An
alternative must agree with the op, or it is left out and the reason is printed. On a GPU the kernels of all cases are
compiled first, in parallel processes, for --compile-seconds; cases that --limit leaves no time for are left out.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.bench.attention_ways import ALTERNATIVES, ON_GPU, Case, Shape, Step, check, expected, op, parse_case
from compiled_llm.bench.harness import (
    STATISTICS,
    TORCH_DTYPES,
    Row,
    Run,
    WrongResultError,
    add_case_flags,
    call_seconds,
    copies_of,
    finish,
    has_gpu,
    limit_runs,
    reason_of,
    run_cases,
)
from compiled_llm.system import hardware

Limits = dict[str, tuple[Run, float]]
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CASES = {
    ("decode", "cpu"): ["1x1024", "1x4096", "8x1024", "32x1024", "1x8192,31x256", "32x504"],
    ("prefill", "cpu"): ["512+0", "2048+0", "512+1024", "512+4096", "8x4+4096"],
    ("decode", "cuda"): ["1x8192", "8x8192", "32x8192", "32x1024", "1x131072", "1x131072,31x4096"],
    ("prefill", "cuda"): ["512+0", "2048+0", "2048+6144", "8192+0", "8x4+8192"],
}


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Paged attention beside the machine's limits and alternatives.")
    add = made.add_argument
    decode, prefill = (functools.partial(parse_case, kind) for kind in ("decode", "prefill"))
    add("--decode", nargs="*", type=decode, metavar="CASE", help="BATCHxCONTEXT[,...] (default: a grid)")
    add("--prefill", nargs="*", type=prefill, metavar="CASE", help="[BATCHx]TOKENS+CONTEXT[,...] (default: a grid)")
    add("--kv-dtype", nargs="*", choices=KV_DTYPES, default=list(KV_DTYPES), help="of further caches (default: both)")
    add("--block-size", nargs="+", type=int, default=[16], metavar="S", help="(default: 16)")
    add("--heads", type=int, default=16, help="of queries (default: 16)")
    add("--kv-heads", type=int, default=8, help="(default: 8)")
    add("--head-dim", type=int, default=128, help="(default: 128)")
    add("--skip", nargs="+", choices=ALTERNATIVES, default=[], help="alternatives to leave out")
    add("--turned", action="store_true", help="the op turns queries and keys first, as in a step")
    add("--hot", action="store_true", help="one layer again and again, whose keys may be in a cache")
    add_case_flags(made, 5)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in the cases. ``ValueError`` for what cannot be measured."""
    if args.seconds == float("inf"):
        raise ValueError("--seconds must be finite, given inf")
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, given {args.heads} and {args.kv_heads}")
    for kind in ("decode", "prefill"):
        if getattr(args, kind) is None:
            setattr(args, kind, [parse_case(kind, text) for text in CASES[kind, args.device]])
    if not args.decode + args.prefill:
        raise ValueError("nothing to measure: --decode and --prefill are both empty")


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(args.heads, args.kv_heads, args.head_dim, args.block_size[0], TORCH_DTYPES[args.dtype])


def variants_of(args: argparse.Namespace) -> dict[tuple[str, int], torch.dtype]:
    """(name of a KV dtype, block size) -> the KV dtype."""
    kv_dtypes = {args.dtype: TORCH_DTYPES[args.dtype]} | {name: KV_DTYPES[name] for name in args.kv_dtype}
    return {key: kv_dtypes[key[0]] for key in itertools.product(kv_dtypes, args.block_size)}


def compile_case(job: tuple[Case, argparse.Namespace]) -> None:
    """In a process of its own: run the op once in each of its variants, so that its kernels lie compiled on disk."""
    case, args = job
    step = Step(case, shape_of(args), args.device, 1)
    with torch.inference_mode():
        for (_, block_size), dtype in variants_of(args).items():
            op(step, dtype, block_size, args.turned)(0)


def alternatives(step: Step, ours: torch.Tensor, skip: Sequence[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """Alternatives that run and agree with the op, and for the others the reason to leave them out."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name in names_of(step.device, skip):
        try:
            attend = ALTERNATIVES[name](step)
            check(name, attend(0), ours)
            runs[name] = attend
        except WrongResultError as error:
            left_out[name] = str(error)
        except Exception as error:  # in foreign code, of any version: no reason to stop
            left_out[name] = f"does not {'compile' if name == 'flex' else 'run'}: {reason_of(error)}"
    return runs, left_out


def names_of(device: str, skip: Sequence[str]) -> list[str]:
    return [name for name in ALTERNATIVES if name not in skip and (device == "cuda" or name not in ON_GPU)]


def rates_of(limits: Limits, seconds: Mapping[Any, float]) -> dict[str, float]:
    """Bytes or operations a second."""
    return {name: amount / seconds[name] for name, (_, amount) in limits.items()}


def measure(
    case: Case, args: argparse.Namespace, limits: Limits, rates: dict[str, float] | None
) -> list[dict[str, Any]]:
    """A row for each KV dtype and block size, measured in the same rounds, ``limits`` too without ``rates``."""
    shape, variants = shape_of(args), variants_of(args)
    num_layers = 1 if args.hot else copies_of(case.num_bytes(shape, shape.dtype))
    step = Step(case, shape, args.device, num_layers)
    runs: dict[Any, Run] = {} if rates else {name: run for name, (run, _) in limits.items()}
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    for key, dtype in variants.items():
        runs[key] = attend = op(step, dtype, key[1], args.turned)
        outputs[key] = attend(0)
        check(f"the op ({key[0]})", outputs[key], expected(step, dtype))
    others, left_out = alternatives(step, outputs[args.dtype, shape.block_size], args.skip)
    found = call_seconds(runs | others, num_layers, args.device, seconds=args.seconds, left_out=left_out)
    seconds = {name: STATISTICS[args.statistic](values) for name, values in found.items()}

    rates = rates or rates_of(limits, seconds)
    rows = []
    for (name, block_size), dtype in variants.items():
        num_bytes, num_flops = case.num_bytes(shape, dtype), case.num_flops(shape)
        ideal = {"memory": num_bytes / rates["memory"], "matmul": num_flops / rates["matmul"]}
        limit = max(ideal, key=lambda key: ideal[key])
        taken = seconds[name, block_size]
        row: dict[str, Any] = {"case": case.name, "kv_dtype": name, "block_size": block_size}
        row |= {"seconds": {"op": taken} | {other: seconds[other] for other in others if other in seconds}}
        row |= {"bytes": num_bytes, "flops": num_flops, "gb_per_s": num_bytes / taken / 1e9}
        row |= {"tflop_per_s": num_flops / taken / 1e12, "limit": limit, "share_of_limit": ideal[limit] / taken}
        row |= {"memory_limit_gb_per_s": rates["memory"] / 1e9, "matmul_limit_tflop_per_s": rates["matmul"] / 1e12}
        rows.append(row | {"to_model_dtype": taken / seconds[args.dtype, block_size], "left_out": left_out})
    return rows


def table_row(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A row of the table for people."""
    seconds = row["seconds"]
    shown = {"case": row["case"], "KV": row["kv_dtype"], "S": row["block_size"], "op us": seconds["op"] * 1e6}
    shown |= {"GB/s": row["gb_per_s"], "TFLOP/s": row["tflop_per_s"]}
    shown |= {"of limit": f"{row['share_of_limit']:.0%} {row['limit']}", "/model": row["to_model_dtype"]}
    return shown | {name: f"{seconds[name] / seconds['op']:.2f}x" if name in seconds else "-" for name in names}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"block_size": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "seconds": 0, "threads": 1}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    if not has_gpu(program, args.device):
        return 2
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = hardware.describe(torch.device(args.device))
    names = names_of(args.device, args.skip)
    sizes = f"N={args.heads} K={args.kv_heads} H={args.head_dim}, model and alternatives in {args.dtype}"
    print(f"{facts.get('gpu', facts['cpu'])}\n{sizes}", flush=True)
    rows: list[Row] = []
    record: dict[str, Any] = {"statistic": args.statistic, "rows": rows, "turned": args.turned, "hot": args.hot}
    record["model"] = {key: getattr(args, key) for key in ("heads", "kv_heads", "head_dim", "dtype")}
    limits, rates = limit_runs(args.device, TORCH_DTYPES[args.dtype]), None
    if args.device == "cuda":  # nobody else uses it
        found = call_seconds({name: run for name, (run, _) in limits.items()}, 1, "cuda", seconds=0.1)
        rates = rates_of(limits, {name: min(values) for name, values in found.items()})
    cases = {case.name: case for case in args.decode + args.prefill}
    with errors_end(program, (WrongResultError,), status=1):
        for new in run_cases(args, cases, compile_case, lambda case: measure(case, args, limits, rates)):
            print(tables.text_table([table_row(row, names) for row in new]), flush=True)
            rows += new
            if args.json:  # after each case: a run that is cut off keeps what was done
                args.json.write_text(json.dumps(record | {"machine": facts}) + "\n")
    finish("attention", record, args.json, device=args.device)
    return 0
