"""Paged attention: time, bandwidth and arithmetic rate of the op, compared with the machine's limits and alternatives.

    python scripts/bench/bench_attention.py                                    # a default grid, some minutes on a CPU
    python scripts/bench/bench_attention.py --device cuda --plot attention.png
    python scripts/bench/bench_attention.py --decode 1x4096 1x8192,31x256 --prefill 512+1024 8x4+4096 --block-size 16 64

A case is BATCHxCONTEXT for decode (CONTEXT keys, the new one included) and [BATCHx]TOKENS+CONTEXT for prefill. Commas
join groups of requests into one step: 1x8192,31x256 is one long request and thirty-one short ones. Such a decode is
also timed with the same number of keys spread evenly over the batch. /uniform is the ratio of the two times; it is 1 if
the time depends only on the number of bytes.

Everything of a case is timed in turns, round after round, so that other load on the machine affects all of it:

    op        compiled_llm::paged_attention, the cache write included; a row for each KV dtype and block size
    gather    every request's blocks gathered into contiguous keys and values, then F.scaled_dot_product_attention
    sdpa      F.scaled_dot_product_attention on keys and values that are contiguous already (no paging at all)
    flex      compiled FlexAttention on the same contiguous keys and values
    hf-paged  attention of transformers' continuous batching: its SDPA function with a mask, over a cache that works as
              its own (write, then gather all requests' keys into one sequence)
    limits    memory: a sum over a large tensor on a CPU, a copy on a GPU (read and written); a large matrix product

gather, sdpa and flex run once for each group of requests. No alternative has a quantised cache: they run in the model's
dtype (gather and hf-paged with the first block size), and their columns are their times divided by that of the op in
that row. /model is the op's time relative to its own with a cache in the model's dtype. GB/s counts keys, values and
scales, each read once, TFLOP/s the two products over the visible keys. `of limit` is the time that these bytes or these
operations, whichever takes longer, would need at the machine's limits, over the time taken: memory for a decode,
arithmetic for a prefill, one or the other for a short query on a long context.

The caches of several layers are used in turns, so that none is in the processor's cache; on a GPU one CUDA graph runs
them all. Before it is timed, the op must agree with SDPA on the keys and values of its cache, or the exit status is 1.
An alternative must agree with the op, or it is left out and the reason is printed.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_checkout
import tables
import torch
from bench_attention_contenders import (
    ALTERNATIVES,
    Attend,
    Case,
    Shape,
    Step,
    WrongResultError,
    check,
    expected,
    op,
    parse_case,
    zeros,
)

from compiled_llm.api.command_line import FlagParser
from compiled_llm.system import hardware as machine

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CASES = {
    ("decode", "cpu"): ["1x1024", "1x4096", "8x1024", "32x1024", "1x8192,31x256"],
    ("prefill", "cpu"): ["512+0", "2048+0", "512+1024", "512+4096", "8x4+4096"],
    ("decode", "cuda"): ["1x8192", "8x8192", "32x8192", "32x1024", "1x131072", "1x131072,31x4096"],
    ("prefill", "cuda"): ["512+0", "2048+0", "2048+6144", "8192+0", "8x4+8192"],
}
LAYERS_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # minimum of all layers' keys and values together...
MAX_LAYERS = 64  # ... if this many layers are enough for it
MATMUL_SIZE = {"cpu": 1536, "cuda": 8192}
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min}
MIN_ROUNDS = 5

Run = tuple[Callable[[], object], int]  # a timed function, and how many calls of an op it makes


def all_layers(attend: Attend, num_layers: int, device: str) -> Run:
    """Layer after layer, as the engine runs them: on a CPU as many as take 5 ms, on a GPU all, as one CUDA graph.

    What ``attend`` holds must be all that it reads: a graph knows addresses, and its replay reads what lies there.
    """
    if device == "cpu":
        layers = itertools.cycle(range(num_layers))
        attend(next(layers))
        calls = max(1, min(num_layers, int(5e-3 / seconds_of(lambda: attend(next(layers)), device))))
        return lambda: [attend(next(layers)) for _ in range(calls)], calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            attend(layer)
    return Replay(graph, attend), num_layers


class Replay:
    """Runs a captured graph again. Keeps ``attend``, which was captured, and so the tensors that the graph reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, attend: Attend) -> None:
        self._graph, self._attend = graph, attend

    def __call__(self) -> None:
        self._graph.replay()


def seconds_of(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(runs: dict[Any, Run], args: argparse.Namespace) -> dict[Any, float]:
    """For each run the statistic of the seconds of a call. They run in turns, in a different order in each round.

    A call after a large matrix product or read is slower, and the order spreads this over all runs.
    """
    times: dict[Any, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for run, _ in runs.values():
        run()
    end, rounds = time.perf_counter() + args.seconds, 0
    while time.perf_counter() < end or rounds < MIN_ROUNDS:
        shuffle(order)
        for name in order:
            run, calls = runs[name]
            times[name].append(seconds_of(run, args.device) / calls)
        rounds += 1
    return {name: STATISTICS[args.statistic](values) for name, values in times.items()}


def limits(args: argparse.Namespace) -> dict[str, tuple[Run, float]]:
    """Runs that reach the machine's limits, each with its bytes or operations per call."""
    size = MATMUL_SIZE[args.device]
    a, b = (torch.randn(size, size, device=args.device).to(DTYPES[args.dtype]) for _ in range(2))
    large = zeros([LAYERS_BYTES[args.device] // 4], torch.float32, args.device).fill_(1)
    matmul = (functools.partial(torch.matmul, a, b), 1), 2.0 * size**3
    if args.device == "cpu":
        return {"memory": ((large.sum, 1), large.nbytes), "matmul": matmul}
    copy = functools.partial(torch.empty_like(large).copy_, large)
    return {"memory": ((copy, 1), 2.0 * large.nbytes), "matmul": matmul}


def alternatives(step: Step, ours: torch.Tensor, args: argparse.Namespace) -> tuple[dict[str, Run], dict[str, str]]:
    """Alternatives that run and agree with the op, and for the others the reason to leave them out."""
    runs, left_out = {}, {}
    for name in [name for name in ALTERNATIVES if name not in args.skip]:
        try:
            attend = ALTERNATIVES[name](step)
            check(name, attend(0), ours)
            runs[name] = all_layers(attend, step.num_layers, args.device)
        except WrongResultError as error:
            left_out[name] = str(error)
        except Exception as error:  # in foreign code, of any version: no reason to stop
            verb, text = "compile" if name == "flex" else "run", " ".join(str(error).split())
            left_out[name] = f"does not {verb}: {type(error).__name__}: {text[:200]}"
    return runs, left_out


def measure(case: Case, args: argparse.Namespace, limit_runs: dict[str, tuple[Run, float]]) -> list[dict[str, Any]]:
    """A row for each KV dtype and block size, all measured in the same rounds."""
    shape = Shape(args.heads, args.kv_heads, args.head_dim, args.block_size[0], DTYPES[args.dtype])
    kv_dtypes = {args.dtype: shape.dtype} | {name: KV_DTYPES[name] for name in args.kv_dtype}
    variants = list(itertools.product(kv_dtypes, args.block_size))
    num_layers = min(MAX_LAYERS, -(-LAYERS_BYTES[args.device] // case.num_bytes(shape, shape.dtype)))
    even = case.uniform()
    cases = {"op": case, "uniform": even} if even else {"op": case}
    steps = {label: Step(some, shape, args.device, num_layers) for label, some in cases.items()}

    runs: dict[Any, Run] = {name: run for name, (run, _) in limit_runs.items()}
    outputs: dict[Any, torch.Tensor] = {}
    for label, step in steps.items():
        for name, block_size in variants:
            key = label, name, block_size
            attend = op(step, kv_dtypes[name], block_size)
            outputs[key] = attend(0)
            check(f"the op ({step.case.name}, {name})", outputs[key], expected(step, kv_dtypes[name]))
            runs[key] = all_layers(attend, num_layers, args.device)
    others, left_out = alternatives(steps["op"], outputs["op", args.dtype, shape.block_size], args)
    seconds = interleaved(runs | others, args)

    rates = {name: amount / seconds[name] for name, (_, amount) in limit_runs.items()}
    rows = []
    for name, block_size in variants:
        num_bytes, num_flops = case.num_bytes(shape, kv_dtypes[name]), case.num_flops(shape)
        ideal = {"memory": num_bytes / rates["memory"], "matmul": num_flops / rates["matmul"]}
        limit = max(ideal, key=lambda key: ideal[key])
        taken = seconds["op", name, block_size]
        row = {
            "case": case.name,
            "kv_dtype": name,
            "block_size": block_size,
            "seconds": {"op": taken} | {other: seconds[other] for other in others},
            "bytes": num_bytes,
            "flops": num_flops,
            "gb_per_s": num_bytes / taken / 1e9,
            "tflop_per_s": num_flops / taken / 1e12,
            "limit": limit,
            "share_of_limit": ideal[limit] / taken,
            "memory_limit_gb_per_s": rates["memory"] / 1e9,
            "matmul_limit_tflop_per_s": rates["matmul"] / 1e12,
            "to_model_dtype": taken / seconds["op", args.dtype, block_size],
            "left_out": left_out,
        }
        if even:
            row["seconds"]["uniform"] = seconds["uniform", name, block_size]
            row["to_uniform"] = taken / row["seconds"]["uniform"]
        rows.append(row)
    return rows


def table_row(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A row of the table for people."""
    seconds = row["seconds"]
    shown = {"case": row["case"], "KV": row["kv_dtype"], "S": row["block_size"], "op us": seconds["op"] * 1e6}
    shown |= {"GB/s": row["gb_per_s"], "TFLOP/s": row["tflop_per_s"]}
    shown |= {"of limit": f"{row['share_of_limit']:.0%} {row['limit']}", "/model": row["to_model_dtype"]}
    shown["/uniform"] = row.get("to_uniform")
    return shown | {name: f"{seconds[name] / seconds['op']:.2f}x" if name in seconds else "-" for name in names}


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Two panels over the cases: the op's share of the limit, and the alternatives' times relative to the op's."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row["case"] for row in rows))
    shares: dict[str, dict[str, float]] = {}
    times: dict[str, dict[str, float]] = {name: {} for name in ALTERNATIVES}
    for row in rows:
        label = f"{row['kv_dtype']}, blocks of {row['block_size']}"
        shares.setdefault(label, {})[row["case"]] = 100 * row["share_of_limit"]
        if label == next(iter(shares)):
            for name in times.keys() & row["seconds"].keys():
                times[name][row["case"]] = row["seconds"][name] / row["seconds"]["op"]

    def bars(axes: Any, series: dict[str, dict[str, float]], base: float, digits: int) -> None:
        width = 0.8 / max(1, len(series))
        for i, (label, values) in enumerate(series.items()):
            places = [cases.index(case) + (i - (len(series) - 1) / 2) * width for case in values]
            drawn = axes.bar(places, [value - base for value in values.values()], width, base, label=label)
            axes.bar_label(drawn, [f"{value:.{digits}f}" for value in values.values()], fontsize=7)
        axes.axhline(base, color="black", linewidth=0.8)
        axes.set_xticks(range(len(cases)), [case.replace(" ", "\n").replace(",", ",\n") for case in cases])
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=max(1, len(series)), frameon=False)

    figure = Figure(figsize=(max(9, 1.5 * len(cases)), 9), layout="constrained")
    figure.suptitle(title)
    upper, lower = figure.subplots(2, 1)
    bars(upper, shares, 0, 0)
    upper.set_ylabel("op: share of the machine's limit (%)")
    bars(lower, {name: values for name, values in times.items() if values}, 1, 1)
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter("{x:g}")
    op = f"the op's with {next(iter(shares))}"
    lower.set_ylabel(f"time relative to {op}\n(ratio, log scale; above 1 the op is faster)")
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--decode", nargs="*", type=functools.partial(parse_case, "decode"), metavar="BATCHxCONTEXT[,...]")
    add("--prefill", nargs="*", type=functools.partial(parse_case, "prefill"), metavar="[BATCHx]TOKENS+CONTEXT[,...]")
    add("--dtype", choices=DTYPES, default="bfloat16", help="the model's: of queries, and of a cache by default")
    add("--kv-dtype", nargs="*", choices=KV_DTYPES, default=list(KV_DTYPES), help="of further caches (default: both)")
    add("--block-size", nargs="+", type=int, default=[16], metavar="S")
    add("--heads", type=int, default=16)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--skip", nargs="+", choices=ALTERNATIVES, default=[], help="alternatives to leave out")
    add("--seconds", type=float, default=5.0, help="for each case, without its preparation (default: %(default)s)")
    add("--statistic", choices=STATISTICS, default="median", help="min on a machine that others use")
    add("--threads", type=int, help="of torch, on the CPU")
    tables.add_json_flag(parser)
    add("--plot", type=Path, metavar="FILE.png", help="draw the table; needs matplotlib")
    return parser.parse_checked(check_arguments, block_size=1, heads=1, kv_heads=1, head_dim=1, seconds=0, threads=1)


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in the cases. ``ValueError`` for what cannot be measured."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA GPU here (torch.cuda.is_available() is False)")
    if args.seconds == float("inf"):
        raise ValueError("--seconds must be finite, given inf")
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, given {args.heads} and {args.kv_heads}")
    tables.check_target("--json", args.json)
    tables.check_target("--plot", args.plot)
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot must end in .png, .svg or .pdf, given {str(args.plot)!r}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or compiled-llm[plot]")
    for kind in ("decode", "prefill"):
        if getattr(args, kind) is None:
            setattr(args, kind, [parse_case(kind, text) for text in CASES[kind, args.device]])
    if not args.decode + args.prefill:
        raise ValueError("nothing to measure: --decode and --prefill are both empty")


def main() -> int:
    args = parse_arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = machine.describe(torch.device(args.device))
    sizes = f"N={args.heads} K={args.kv_heads} H={args.head_dim}, model and alternatives in {args.dtype}"
    title = f"{facts.get('gpu', facts['cpu'])}\n{sizes}"
    names = [name for name in ALTERNATIVES if name not in args.skip]
    print(title, flush=True)
    rows: list[dict[str, Any]] = []
    record = {
        "benchmark": "attention",
        "command": facts["command"],
        "statistic": args.statistic,
        "model": {key: getattr(args, key) for key in ("heads", "kv_heads", "head_dim", "dtype")},
        "rows": rows,
        "machine": facts,
    }
    printed: set[str] = set()
    with torch.inference_mode():
        limit_runs = limits(args)
        for case in args.decode + args.prefill:
            try:
                new = measure(case, args, limit_runs)
            except WrongResultError as error:
                print(f"bench_attention: error: {error}", file=sys.stderr)
                return 1
            print(tables.text_table([table_row(row, names) for row in new]), flush=True)
            for name, reason in new[0]["left_out"].items():
                if f"{name} {reason}" not in printed:
                    print(f"    {name} is left out: {reason}", flush=True)
                printed.add(f"{name} {reason}")
            rows += new
            if args.json:  # after each case: a run that is cut off keeps what was done
                args.json.write_text(json.dumps(record) + "\n")
    if args.plot:
        plot(rows, title, args.plot)
    tables.finish(record, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
