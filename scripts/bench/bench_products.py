"""Every linear layer of a model's shape, at 1 to 256 rows, by each way to compute it on a GPU.

    python scripts/bench/bench_products.py --shape qwen3-8b --rows 1 8 32 --json products.json

The ways, timed in turns: each launch among others whose weights are in no cache, as ``graph_times.py`` says.

    cublas     F.linear
    inductor   F.linear as torch's compiler makes it for this size. Its own settings decide which: with
               TORCHINDUCTOR_MAX_AUTOTUNE=1 and TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 it tries its Triton kernels
    exact      this engine's kernel with one order of sums: up to 32 rows the one in use, above with ``exact=True``

GB/s counts the weights alone. A way that does not run, or whose result is wrong, is left out and the reason printed. On
a CPU there is ``F.linear`` alone.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import own_checkout
import tables
import torch
import torch.nn.functional as F
from bench_attention import STATISTICS, all_layers, interleaved
from graph_times import DISTINCT, launches_for, slopes
from torch import Tensor
from workloads import SHAPES

from compiled_llm.api.command_line import FlagParser
from compiled_llm.compiling.compiler import compile_at_first_call, own_copy
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import linears
from compiled_llm.ops.linear.exact_linear import exact_linear
from compiled_llm.system import hardware as machine

WEIGHT_BYTES = {"cpu": 1 << 20, "cuda": DISTINCT}  # copies together, more than any cache
TOLERANCE = 0.02  # of the largest output, in bfloat16

Way = Callable[[Tensor, Tensor], Tensor]


def layers_of(shape: str) -> list[tuple[int, int]]:
    """(outputs, inputs) of a model's linear layers, each once, in their order."""
    config = parse_config(SHAPES[shape])
    weights = family_of(config).describe(config, torch.bfloat16, Dense).weights
    return list(dict.fromkeys((layer.out_features, layer.in_features) for layer in linears(weights)))


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def ways(device: str, name: str, rows: int) -> dict[str, Way]:
    """``name``: of what is compiled for one size."""
    if device == "cpu":
        return {"cublas": plain}
    compiled = compile_at_first_call(own_copy(plain, name), cuda_graphs=False)
    return {"cublas": plain, "inductor": compiled, "exact": lambda x, weight: exact_linear(x, weight, None)}


def measure(outputs: int, inputs: int, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the table: microseconds of each way, and GB/s of the fastest."""
    x = torch.randn(rows, inputs, device=args.device).bfloat16()
    weight = torch.randn(outputs, inputs, device=args.device).bfloat16() / inputs**0.5
    copies = [weight.clone() for _ in range(max(1, WEIGHT_BYTES[args.device] // weight.nbytes))]
    wanted, runs = F.linear(x.float(), weight.float()), {}
    left_out: dict[str, str] = {}
    for name, way in ways(args.device, f"linear_{outputs}_{inputs}_{rows}", rows).items():
        try:
            error = float((way(x, weight).float() - wanted).abs().max() / wanted.abs().max())
            if error > TOLERANCE:
                left_out[name] = f"off by {error:.2g} of the largest output"
                continue
            # Each run's own names: a loop's would be those of the last way.
            runs[name] = lambda n, way=way: way(x, copies[n % len(copies)])
        except Exception as error:  # in foreign code, of any version: no reason to stop
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if args.device == "cuda":
        seconds = slopes(runs, launches_for(weight.nbytes), args.seconds, left_out, STATISTICS[args.statistic])
    else:
        seconds = interleaved({name: all_layers(runs[name], len(copies), "cpu") for name in runs}, args)
    best = min(seconds, key=lambda name: seconds[name])
    row: dict[str, Any] = {"layer": f"{outputs}x{inputs}", "rows": rows}
    row |= {f"{name}_us": seconds[name] * 1e6 for name in seconds}
    return row | {"best": best, "gb_per_s": weight.nbytes / seconds[best] / 1e9, "left_out": left_out}


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256], metavar="T")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each case, without its preparation")
    parser.add_argument("--statistic", choices=STATISTICS, default="median", help="min on a machine that others use")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    tables.add_json_flag(parser)
    args = parser.parse_checked(lambda args: tables.check_target("--json", args.json), rows=1, seconds=0)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench_products: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(f"{args.shape}, bfloat16", flush=True)
    rows = []
    with torch.inference_mode():
        for outputs, inputs in layers_of(args.shape):
            new = [measure(outputs, inputs, count, args) for count in args.rows]
            print(tables.text_table([{key: row[key] for key in row if key != "left_out"} for row in new]), flush=True)
            for name, reason in {pair for row in new for pair in row["left_out"].items()}:
                print(f"    {name} is left out: {reason}", flush=True)
            rows += new
    result = {"benchmark": "products", "shape": args.shape, "dtype": "bfloat16", "results": rows}
    tables.finish(result | {"machine": machine.describe(torch.device(args.device))}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
