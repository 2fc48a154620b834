"""Times the experts' linear layers for one token on a CPU against a dense packed layer that reads as many bytes.

    python scripts/bench/bench_experts.py --threads 2

The experts are those of published models in bfloat16; a token uses ``top_k`` of them. The dense layer has their outputs
side by side, and so the same inputs and bytes. In every round both take turns with a plain sum of a large tensor, and
use other weights than in the rounds before, so that these come from memory. GB/s counts the weights that are read. The
ratio is the grouped product's rate over the dense layer's, the median over the rounds.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import own_checkout
import tables
import torch
from bench_linear import seconds
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser
from compiled_llm.ops import empty_packed, expert_rows, grouped_packed_linear, native
from compiled_llm.ops.linear.packed_linear import packed_linear
from compiled_llm.system import hardware as machine

READ_BYTES = 1 << 28


class Shape(NamedTuple):
    """Layers of a mixture's experts. ``own_rows``: each expert has a row of its own, not the token's."""

    name: str
    experts: int
    top_k: int
    out_features: int
    in_features: int
    own_rows: bool


SHAPES = [
    Shape("qwen3-30b-a3b gate_up", 128, 8, 1536, 2048, own_rows=False),
    Shape("qwen3-30b-a3b down", 128, 8, 2048, 768, own_rows=True),
    Shape("gpt-oss-20b gate_up", 32, 4, 5760, 2880, own_rows=False),
    Shape("gpt-oss-20b down", 32, 4, 2880, 2880, own_rows=True),
]


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=200, help="calls of each, at most (default: 200)")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for a shape, about (default: 5)")
    tables.add_json_flag(parser)
    return parser.parse_checked(lambda args: tables.check_target("--json", args.json), threads=1, rounds=1, budget=0)


def measure(shape: Shape, rounds: int, budget: float) -> dict[str, list[float]]:
    """Seconds of every round: 'experts', 'dense', and 'read' for ``READ_BYTES``."""
    experts, top_k, n, k, own_rows = shape[1:]
    packed = empty_packed(experts * n, k, torch.bfloat16, torch.device("cpu"))
    packed.copy_(torch.randn(packed.shape[1:], dtype=torch.bfloat16))
    each, dense = packed.unflatten(0, (experts, -1)), packed.unflatten(0, (experts // top_k, -1))  # the same memory
    x = torch.randn(top_k if own_rows else 1, k, dtype=torch.bfloat16)
    rows = None if own_rows else torch.zeros(top_k, dtype=torch.int32)
    one, used = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    big = native.huge_zeros([READ_BYTES // 4], torch.float32).fill_(1.0)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0)).view(-1, top_k).int()
    starts = [expert_rows(chosen[None], one, used, experts)[2] for chosen in order]
    times: dict[str, list[float]] = {"experts": [], "dense": [], "read": []}
    end = time.perf_counter() + budget
    for i in range(rounds):
        chosen, layer = starts[i % len(starts)], dense[(i + len(dense) // 2) % len(dense)]
        calls = {
            "experts": lambda s=chosen: grouped_packed_linear(x, each, None, rows, s, n),
            "dense": lambda w=layer: packed_linear(x[:1], w, None, top_k * n),
        }
        times["read"].append(seconds(big.sum))
        packed_linear(x[:1], each[0], None, n)  # wakes the threads, which in a step follow one op after the other
        for name in sorted(calls, reverse=i % 2 == 0):
            times[name].append(seconds(calls[name]))
        if i >= 4 and time.perf_counter() > end:
            break
    return times


def result_of(shape: Shape, times: dict[str, list[float]]) -> dict[str, Any]:
    nbytes = 2 * shape.top_k * shape.out_features * shape.in_features
    rates = {f"{name}_gb_per_s": nbytes / statistics.median(times[name]) / 1e9 for name in ("experts", "dense")} | {
        "read_gb_per_s": READ_BYTES / statistics.median(times["read"]) / 1e9
    }
    ratio = statistics.median(b / a for a, b in zip(times["experts"], times["dense"], strict=True))
    sizes = f"{shape.top_k} of {shape.experts}, {shape.out_features} x {shape.in_features}"
    return {
        "shape": shape.name,
        "experts": sizes,
        "mb": nbytes / 1e6,
        "rounds": len(times["read"]),
        **rates,
        "ratio": ratio,
    }


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = native.load("linear_cpu")
    path = kernels.supported_isas()[0] if kernels else "plain torch"
    rows = []
    for shape in tqdm([shape for shape in SHAPES if shape.name in args.shapes], disable=None, leave=False):
        measure(shape, 1, 0)  # kernels are built, memory is fetched
        rows.append(result_of(shape, measure(shape, args.rounds, args.budget)))
    print(f"bfloat16, kernels: {path}\n{tables.text_table(rows)}")
    facts = {"threads": args.threads, "kernels": path, "machine": machine.describe(torch.device("cpu"))}
    tables.finish({"benchmark": "experts", "dtype": "bfloat16", "results": rows, **facts}, args.json)


if __name__ == "__main__":
    main()
