"""Times the packed linear of the CPU against ``F.linear``; with ``--kind``, quantised ones against the packed one.

Every round reads a large tensor, runs the op, then ``F.linear``, so that other load on the machine affects all three.
Each call uses a different copy of the weights, as the layers of a model do, so that they come from memory and not from
a cache. GB/s counts only the weights with their scales. With few rows,
reading them is most of the work, and the read rate is the limit.

    python scripts/bench/bench_linear.py --dtype float32 --rows 1 8 32 --threads 4
    python scripts/bench/bench_linear.py --kind int4_w4a8 --shapes gate_up down --rows 1 32 2048
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import own_checkout
import tables
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser
from compiled_llm.ops import native
from compiled_llm.ops.linear.packed_linear import pack_weight, packed_linear
from compiled_llm.ops.linear.quantized_linear import quantized_linear
from compiled_llm.ops.linear.quantized_linear_a8 import quantized_linear_a8
from compiled_llm.ops.linear.quantized_weight import (
    QuantizedWeight,
    WeightFormat,
    empty_quantized,
    pack_quantized_rows,
    quantize,
)
from compiled_llm.system import hardware as machine

# (name, out_features, in_features) of Qwen3-0.6B, with q, k, v fused and gate, up fused.
SHAPES = [
    ("qkv", 4096, 1024),
    ("o", 1024, 2048),
    ("gate_up", 6144, 1024),
    ("down", 1024, 3072),
    ("lm_head", 151936, 1024),
]


# The engine's kinds: groups of int4 are those of its default.
KINDS = {
    "int8": WeightFormat("int8"),
    "int8_w8a8": WeightFormat("int8"),
    "int4": WeightFormat("int4", 32, scale_dtype="bfloat16"),
    "int4_w4a8": WeightFormat("int4", 32, scale_dtype="bfloat16"),
    "fp8": WeightFormat("fp8"),
    "mxfp4": WeightFormat("fp4", 32, scale_dtype="bfloat16"),
}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    out_features: int, in_features: int, dtype: torch.dtype, rows: int, rounds: int, budget: float, footprint: int
) -> dict[str, list[float]]:
    """Seconds of every round: 'op', 'linear', and 'read' for ``footprint`` bytes."""
    copies = max(1, footprint // (out_features * in_features * dtype.itemsize))
    weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(copies)]
    packed = [pack_weight(weight) for weight in weights]
    x = torch.randn(rows, in_features).to(dtype)
    big = native.huge_zeros([footprint // 4], torch.float32).fill_(1.0)  # as pack_weight allocates
    times: dict[str, list[float]] = {"op": [], "linear": [], "read": []}
    packed_linear(x, packed[0], None, out_features)
    F.linear(x, weights[0])
    end = time.perf_counter() + budget
    for i in itertools.islice(itertools.cycle(range(copies)), rounds):
        if i % 4 == 0:
            times["read"].append(seconds(big.sum))
        times["op"].append(seconds(lambda p=packed[i]: packed_linear(x, p, None, out_features)))
        times["linear"].append(seconds(lambda w=weights[i]: F.linear(x, w)))
        if len(times["op"]) >= 5 and time.perf_counter() > end:
            break
    return times


def quantized_copies(form: WeightFormat, weight: Tensor, copies: int) -> list[QuantizedWeight]:
    def one() -> QuantizedWeight:
        made = empty_quantized(form, *weight.shape, weight.device)
        pack_quantized_rows(made, 0, rows, form)
        return made

    rows = quantize(weight, form)
    return [one() for _ in range(copies)]


def measure_quantized(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    rows: int,
    rounds: int,
    budget: float,
    footprint: int,
) -> dict[str, list[float]]:
    """As ``measure``; 'op' is quantised, 'linear' is the packed linear in ``dtype``."""
    weight, form = torch.randn(shape), KINDS[kind]
    quantized = quantized_copies(form, weight, max(1, footprint // form.nbytes(*shape)))
    packed = [pack_weight(weight.to(dtype)) for _ in range(max(1, footprint // (weight.numel() * dtype.itemsize)))]
    x = torch.randn(rows, shape[1]).to(dtype)
    big = native.huge_zeros([footprint // 4], torch.float32).fill_(1.0)

    def run(w: QuantizedWeight) -> Tensor:
        of = form.element, form.group_size, shape[0]
        if kind.endswith("a8"):
            return quantized_linear_a8(x, *w, None, None, *of)
        return quantized_linear(x, *w, None, *of)

    run(quantized[0])
    packed_linear(x, packed[0], None, shape[0])
    times: dict[str, list[float]] = {"op": [], "linear": [], "read": []}
    end = time.perf_counter() + budget
    each = zip(range(rounds), itertools.cycle(quantized), itertools.cycle(packed), strict=False)
    for i, mine, dense in each:
        if i % 4 == 0:
            times["read"].append(seconds(big.sum))
        times["op"].append(seconds(lambda w=mine: run(w)))
        times["linear"].append(seconds(lambda p=dense: packed_linear(x, p, None, shape[0])))
        if len(times["op"]) >= 5 and time.perf_counter() > end:
            break
    return times


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[name for name, _, _ in SHAPES], metavar="NAME")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float16"], default="bfloat16")
    parser.add_argument("--kind", choices=["packed", *KINDS], default="packed", help="quantised ones beside packed")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 32, 128, 512], metavar="T")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=200, help="calls of each, at most")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for a line of the table, about")
    parser.add_argument("--statistic", choices=["median", "min"], default="median", help="min on a machine in use")
    args = parser.parse_args()
    unknown = set(args.shapes) - {name for name, _, _ in SHAPES}
    if unknown:
        parser.error(f"unknown shapes {sorted(unknown)}: choose from {[name for name, _, _ in SHAPES]}")

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    statistic = statistics.median if args.statistic == "median" else min
    a8 = args.kind.endswith("a8")
    op = "linear_cpu" if args.kind == "packed" else "quantized_linear_a8_cpu" if a8 else "quantized_linear_cpu"
    kernels = native.load(op)
    path = kernels.supported_isas()[0] if kernels else "plain torch"
    facts = machine.describe(torch.device("cpu"))
    calls = f"{args.statistic} of up to {args.rounds} calls"
    print(f"{facts['cpu']}, {args.threads} threads, {args.dtype}, kernels: {path}, {calls}")
    rows = []
    cases = [(shape, rows) for shape in SHAPES if shape[0] in args.shapes for rows in args.rows]
    for (name, out_features, in_features), num_rows in tqdm(cases, disable=None, leave=False):
        form, dense_bytes = KINDS.get(args.kind), out_features * in_features * dtype.itemsize
        nbytes = dense_bytes if form is None else form.nbytes(out_features, in_features)
        footprint, limits = max(256 << 20, dense_bytes), (num_rows, args.rounds, args.budget)
        if form is None:
            times = measure(out_features, in_features, dtype, *limits, footprint)
        else:
            times = measure_quantized(args.kind, (out_features, in_features), dtype, *limits, footprint)
        mine, linear, read = (statistic(times[key]) for key in ("op", "linear", "read"))
        row = {"shape": name, "N": out_features, "K": in_features, "rows": num_rows}
        for kind, seconds, weights in (("op", mine, nbytes), ("linear", linear, dense_bytes)):
            row[f"{kind}_ms"] = round(seconds * 1e3, 4)
            row[f"{kind}_gb_per_s"] = round(weights / seconds / 1e9, 2)
            row[f"{kind}_tflop_per_s"] = round(2 * out_features * in_features * num_rows / seconds / 1e12, 4)
        row["read_gb_per_s"] = round(footprint / read / 1e9, 2)
        rows.append(row | {"of_read": nbytes / mine / (footprint / read), "faster": linear / mine})
    print(tables.text_table(rows))
    result = {
        "benchmark": "linear",
        "dtype": args.dtype,
        "kind": args.kind,
        "kernels": path,
        "statistic": args.statistic,
        "results": rows,
        "machine": facts,
    }
    tables.finish(result, None)


if __name__ == "__main__":
    main()
