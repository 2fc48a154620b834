"""Linear layers and experts: the engine's op beside the other ways to compute the same, on a CPU or a GPU.

    compiled-llm bench products --rows 1 8 32 --threads 4               # packed weights beside F.linear, on a CPU
    compiled-llm bench products --kind int4_w4a8 --layers gate_up down --rows 1 32 2048
    compiled-llm bench products --experts --rows 1                      # of published models
    compiled-llm bench products --device cuda --shape llama-3.1-8b --around
    compiled-llm bench products --device cuda --kind int8 int4 --size 6144x4096 1536x2048x128x8

What is timed, in turns, each call with other weights than the one before, so that none are in a cache:

    op         the engine's: packed weights on a CPU, on a GPU its kernel with one order of sums
    linear     F.linear; beside quantised weights the layer as the engine has it in --dtype; beside experts on a CPU a
               dense packed layer that reads as many bytes
    inductor   on a GPU, F.linear as torch's compiler makes it for this size. Its own settings decide which: with
               TORCHINDUCTOR_MAX_AUTOTUNE=1 and TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 it tries its Triton kernels
    int_mm     on a GPU torch._int_mm and the scaling of its sums, where the layer can have it
    int4pack   on a GPU torch's int4 product, of int4 in groups with activations as they are

--size names a layer by OUTPUTSxINPUTS, experts by OUTPUTSxINPUTSxEXPERTSxUSED, of which a token uses USED. With
--around the gate or the residual that follows a layer is part of it, and a line for each number of rows has a decoder
layer's four products behind each other, with norms ("programmatic": launched before the one before has ended).

GB/s counts the weights that are read, with their scales; on a CPU `of read` is that rate relative to a plain sum's in
the same rounds. `faster` is the median of the ratios of linear to op within a round. Each way is checked against plain
torch. If the op is wrong, the exit status is 1; another way that does not run or is wrong is left out, and the reason
printed. On a GPU kernels are compiled first, in parallel processes, for --compile-seconds; cases that --limit leaves no
time for are left out. In Triton's interpreter (``TRITON_INTERPRET=1``) a GPU's quantised kernels run on a CPU, which
checks the program: such times mean nothing.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.bench.harness import (
    STATISTICS,
    Row,
    WrongResultError,
    add_case_flags,
    call_seconds,
    finish,
    has_gpu,
    limit_runs,
    median_ratio,
    reason_of,
    run_cases,
)
from compiled_llm.bench.product_ways import EXPERTS, Case, Layer, case_of, chain, interprets, layers_of, parse_layer
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.models.linears.quantizing import KINDS
from compiled_llm.ops import native

TOLERANCE = 0.02  # of the largest output: weights and outputs are rounded to bfloat16
ROWS = {"cpu": [1, 2, 8, 32, 128, 512], "cuda": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
Sized = tuple[Layer | None, str, int]  # a layer, the kind of its weights, rows; None: all of a decoder layer


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Linear layers and experts beside other ways to compute the same.")
    add = made.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b", help="whose layers are measured (default: qwen3-0.6b)")
    add("--layers", nargs="+", metavar="NAME", help="only these of it, such as qkv or gate_up")
    add("--size", nargs="+", type=parse_layer, metavar="SIZE", help="other layers instead, as OUTPUTSxINPUTS")
    add("--experts", action="store_true", help="the experts of two published models instead")
    add("--kind", nargs="+", choices=["plain", *KINDS], default=["plain"], help="of weights (default: plain)")
    add("--rows", nargs="+", type=int, metavar="T", help="tokens of a step (default: 1 to 512)")
    add("--around", action="store_true", help="on a GPU, with the gate or residual behind each layer")
    add("--rounds", type=int, default=200, help="of a line, at most (default: 200)")
    add_case_flags(made, 3)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in rows and layers. ``ValueError`` for what cannot be measured."""
    args.rows = args.rows or ROWS[args.device]
    layers = list(EXPERTS) if args.experts else args.size or layers_of(args.shape)
    names = [layer.name for layer in layers]
    for name in args.layers or ():
        if name not in names:
            raise ValueError(f"--layers must be of {', '.join(names)}, given {name!r}")
    args.layers = [layer for layer in layers if args.layers is None or layer.name in args.layers]
    quantised, experts = set(args.kind) - {"plain"}, any(layer.experts for layer in args.layers)
    if experts and args.device == "cpu" and quantised and not interprets():
        raise ValueError("--kind must be plain with experts on a CPU: their quantised op is timed on a GPU alone")
    if experts and args.device == "cuda" and "plain" in args.kind:
        raise ValueError("--kind must be quantised with experts on a GPU, where plain weights are what it is beside")
    if args.around and args.device != "cuda":
        raise ValueError("--around needs --device cuda: a CPU's products have nothing around them")


def checked(case: Case) -> dict[str, str]:
    """Runs each way once; takes out of the case what does not run or is wrong, and says why."""
    left_out: dict[str, str] = {}
    for name in list(case.ways):
        try:
            got: Any = case.ways[name](0)
            if name == "linear" and got.shape[-1] != case.want.shape[-1]:
                continue  # a layer of as many bytes
            error = float((got[: len(case.want)].float() - case.want).abs().max() / case.want.abs().max())
            if not error <= TOLERANCE:
                raise WrongResultError(f"off by {error:.2g} of the largest output")
        except Exception as error:  # of foreign code, of any version: no reason to stop
            if name == "op":
                raise
            left_out[name] = str(error) if isinstance(error, WrongResultError) else reason_of(error)
            del case.ways[name]
    return left_out


def built(sized: Sized, args: argparse.Namespace) -> Case:
    layer, kind, count = sized
    return chain(args.layers, count) if layer is None else case_of(layer, kind, count, args)


def measure(sized: Sized, args: argparse.Namespace) -> Row:
    """Figures of a case: microseconds of each way, rates of the op."""
    layer, kind, count = sized
    case = built(sized, args)
    left_out = checked(case)
    limits = limit_runs("cpu", torch.float32, 16) if args.device == "cpu" else {}
    runs = case.ways | ({"read": limits["memory"][0]} if limits else {})
    options = {"seconds": args.seconds, "rounds": args.rounds, "left_out": left_out}
    times = call_seconds(runs, case.copies, args.device, **options)
    seconds = {name: STATISTICS[args.statistic](values) for name, values in times.items()}
    assert "op" in seconds, left_out
    sizes = "" if layer is None else "x".join(map(str, layer[1 : 5 if layer.experts else 3]))
    row: Row = {"layer": layer.name if layer else "all of a layer, norms", "sizes": sizes, "kind": kind, "rows": count}
    row |= {f"{name}_us": seconds[name] * 1e6 for name in seconds if name != "read"}
    rate = case.nbytes["op"] / seconds["op"]
    row["gb_per_s"] = rate / 1e9
    row["tflop_per_s"] = case.flops / seconds["op"] / 1e12
    if limits:
        row["read_gb_per_s"] = limits["memory"][1] / seconds["read"] / 1e9
        row["of read"] = rate / 1e9 / row["read_gb_per_s"]
    if "linear" in times:
        row["faster"] = median_ratio(times["linear"], times["op"])
    row["best"] = min((name for name in seconds if name != "read"), key=lambda name: seconds[name])
    return row | {"rounds": len(times["op"]), "left_out": left_out}


def compile_case(job: tuple[Sized, argparse.Namespace]) -> None:
    """In a process of its own: run the op once, so that its kernels lie compiled on disk."""
    with torch.inference_mode():
        built(*job).ways["op"](0)


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"rows": 1, "seconds": 0, "rounds": 1, "threads": 1}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    if not has_gpu(program, args.device):
        return 2
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = native.load("linear_cpu") if args.device == "cpu" else None
    path = "Triton" if args.device == "cuda" else kernels.supported_isas()[0] if kernels else "plain torch"
    what = "experts" if args.experts else "sizes as given" if args.size else args.shape
    print(f"{what}, {args.dtype}, kernels: {path}", flush=True)
    sized: list[Sized] = [(layer, kind, rows) for kind in args.kind for layer in args.layers for rows in args.rows]
    if args.around and not args.size and len(args.layers) > 3:
        sized += [(None, "plain", rows) for rows in args.rows]
    cases = {
        f"{kind}, {layer.name if layer else 'all'}, {rows} rows": (layer, kind, rows) for layer, kind, rows in sized
    }
    with errors_end(program, (WrongResultError,), status=1):
        found = list(tqdm(run_cases(args, cases, compile_case, lambda case: [measure(case, args)]), disable=None))
    rows = [row for (row,) in found]
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("left_out", "rounds", "best"))
    print(tables.text_table([{name: row.get(name) for name in columns} for row in rows]))
    facts = {"shape": args.shape, "dtype": args.dtype, "kernels": path, "statistic": args.statistic}
    finish("products", facts | {"around": args.around, "results": rows}, args.json, device=args.device)
    return 0
