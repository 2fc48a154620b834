"""Linear layers and experts on quantised weights on a GPU: checked against the reference, timed beside bfloat16.

    python scripts/bench/bench_quantized.py --json found.json
    python scripts/bench/bench_quantized.py --kind int4 int4_w4a8 --layer 6144x4096 --rows 1 32
    python scripts/bench/bench_quantized.py --layer 1536x2048x128x8    # outputs, inputs, experts, of which a row uses 8

Everything of a case is timed in turns, each as one CUDA graph of several copies of the weights, so that none is in the
GPU's cache:

    op         the layer as the engine runs it
    bf16       F.linear (cuBLAS); of experts, this project's grouped_linear, in bfloat16
    int_mm     torch._int_mm and the scaling of its sums, where the layer can have it; it must have the op's bits
    int4pack   torch's int4 product, of int4 in groups with activations as they are

GB/s counts codes and scales that are read, of experts those in use; TFLOP/s the products. `error` is the largest
difference from the reference in plain torch, of 32 rows, relative to the largest output. An alternative that does not
run or has another result is left out, and the reason printed.

In Triton's interpreter (``TRITON_INTERPRET=1``) it runs on a CPU, which checks the program: such times mean nothing.

Exit status: 0; 1 if the op's result is wrong; 2 without a CUDA GPU.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import own_checkout
import tables
import torch
import torch.nn.functional as F
from bench_attention import STATISTICS, all_layers, interleaved
from torch import Tensor

from compiled_llm.api.command_line import FlagParser
from compiled_llm.models.linears.quantizing import SCHEMES
from compiled_llm.ops.linear.quantized_linear_a8 import quantize_activations
from compiled_llm.ops.linear.quantized_tiles import INT_MM_ROWS, Choice, Layer, takes_int_mm
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, QuantizedWeight, dequantize, quantize
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu, pack_quantized_rows_gpu
from compiled_llm.ops.moe.grouped_linear import grouped_linear
from compiled_llm.ops.torch_private import int4_mm, int4_packed
from compiled_llm.system import hardware as machine
from compiled_llm.system.gpu_packages import check_triton

LAYERS = ["6144x4096", "24576x4096", "4096x12288", "1536x2048x128x8"]  # of Qwen3-8B and of Qwen3-30B-A3B
WEIGHT_BYTES = 256 << 20
CHECKED_ROWS = 32
TOLERANCE = 2.0**-6  # bfloat16 outputs, and weights that are rounded to it after scaling
Attend = Callable[[int], Tensor]


class WrongResultError(Exception):
    """The op does not compute what the reference does."""


class Weights(NamedTuple):
    """A layer in one kind. ``plain`` ``[N, K]``, of experts ``[E, N, K]``: the same dequantised, float32."""

    kind: str
    sizes: tuple[int, ...]
    packed: QuantizedWeight
    rows: QuantizedRows  # of the last expert
    plain: Tensor

    @property
    def nbytes(self) -> int:
        """Of one matrix."""
        return SCHEMES[self.kind].form.nbytes(*self.sizes[:2])


def parse_layer(text: str) -> tuple[int, ...]:
    """Outputs, inputs; of experts their number too, and how many a row uses."""
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
    if len(sizes) not in (2, 4) or not all(sizes) or (len(sizes) == 4 and sizes[3] > sizes[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is neither OUTPUTSxINPUTS nor OUTPUTSxINPUTSxEXPERTSxUSED")
    return sizes


def weights(kind: str, sizes: tuple[int, ...], device: str) -> Weights:
    form, (outputs, inputs), experts = SCHEMES[kind].form, sizes[:2], (*sizes, None)[2]
    packed = empty_quantized_gpu(form, outputs, inputs, torch.device(device), experts)
    plain = torch.empty(experts or 1, outputs, inputs, device=device)
    for expert in range(experts or 1):
        rows = quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5, form)
        pack_quantized_rows_gpu(packed if experts is None else packed.expert(expert), 0, rows, form)
        plain[expert] = dequantize(rows, form)
    return Weights(kind, sizes, packed, rows, plain if experts else plain[0])


def routed(tokens: int, experts: int, used: int, device: str) -> tuple[Tensor, Tensor]:
    """``rows`` and ``starts`` of ``grouped_linear``, for tokens that choose at random."""
    chosen = torch.rand(tokens, experts, device=device).topk(used).indices.flatten()
    starts = torch.cat([chosen.new_zeros(1), chosen.bincount(minlength=experts).cumsum(0)])
    return (chosen.argsort(stable=True) // used).int(), starts.int()


def op_of(of: Weights, x: Tensor, route: tuple[Tensor, Tensor] | None, choice: Choice | None) -> Callable:
    """The layer's launch, of one copy of its weights."""
    from compiled_llm.ops.linear import triton_quantized, triton_quantized_a8
    from compiled_llm.ops.moe import triton_quantized_grouped

    (element, group, *_), a8 = SCHEMES[of.kind].form, SCHEMES[of.kind].activations == "int8"
    given = (None, None, *(route or ())) if a8 else (None, *(route or ()))  # bias, x_scale
    if route is not None:
        ops = triton_quantized_grouped
        launch = ops.grouped_quantized_linear_a8 if a8 else ops.grouped_quantized_linear
    else:
        launch = triton_quantized_a8.quantized_linear_a8 if a8 else triton_quantized.quantized_linear
    return lambda packed: launch(x, *packed, *given, element, group, of.sizes[0], choice=choice)  # type: ignore[operator]


def expected(of: Weights, x: Tensor, route: tuple[Tensor, Tensor] | None) -> Tensor:
    """Outputs of the first rows in plain torch, float32."""
    if route is None:
        x, matrices = x[:CHECKED_ROWS], of.plain
    else:
        rows, starts = (part.long() for part in route)
        places = torch.arange(min(CHECKED_ROWS, len(rows)), device=x.device)
        x, matrices = x[rows[places]], of.plain[torch.searchsorted(starts, places, right=True) - 1]
    if SCHEMES[of.kind].activations == "int8":
        codes, scales = quantize_activations(x, None)
        x = codes * scales[:, None]
    return F.linear(x.float(), matrices) if route is None else torch.einsum("tk,tnk->tn", x.float(), matrices)


def error_of(got: Tensor, want: Tensor) -> float:
    return float((got[: len(want)].float() - want).abs().max() / want.abs().max())


def int4pack(of: Weights, x: Tensor) -> Attend | None:
    """torch's int4 product, or None where it is for other weights."""
    form, (outputs, inputs) = SCHEMES[of.kind].form, of.sizes[:2]
    fits = outputs % 8 == 0 and inputs % 128 == 0 and x.is_cuda
    if of.kind != "int4" or len(of.sizes) == 4 or not fits:
        return None
    packed = int4_packed((of.rows.codes + 8).to(torch.uint8))
    scales = of.rows.scales.t().bfloat16()
    scales_and_zeros = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()
    copies = [packed.clone() for _ in range(max(1, WEIGHT_BYTES // packed.nbytes))]
    return lambda layer: int4_mm(x, copies[layer % len(copies)], form.group_size, scales_and_zeros)


def alternatives(
    of: Weights, x: Tensor, copies: list[QuantizedWeight], ours: Tensor, want: Tensor
) -> tuple[dict, dict]:
    """What else could serve a layer of its own: name -> product, and name -> why one is left out."""
    form, a8 = SCHEMES[of.kind].form, SCHEMES[of.kind].activations == "int8"
    layer = Layer(*form[:3], a8, 2, *of.sizes[:2])
    found: dict[str, Attend] = {}
    left_out: dict[str, str] = {}
    products: dict[str, Callable[[], Attend | None]] = {"int4pack": lambda: int4pack(of, x)}
    if takes_int_mm(layer) and len(x) > INT_MM_ROWS:
        launch = op_of(of, x, None, Choice(len(x), "int_mm"))
        products["int_mm"] = lambda: lambda number: launch(copies[number % len(copies)])
    for name, make in products.items():
        try:
            product = make()
            got = None if product is None else product(0)
        except RuntimeError as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        if product is None or got is None:
            continue
        if error_of(got, want) > TOLERANCE or (name == "int_mm" and not torch.equal(got, ours)):
            left_out[name] = "another result"
        else:
            found[name] = product
    return found, left_out


def measure(of: Weights, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    outputs, inputs, *mixture = of.sizes
    route = routed(tokens, *mixture, args.device) if mixture else None
    x = torch.randn(tokens, inputs, device=args.device).bfloat16()
    total = of.nbytes * (mixture[0] if mixture else 1)
    num = max(1, WEIGHT_BYTES // total) if args.device == "cuda" else 1
    copies = [QuantizedWeight(*(None if t is None else t.clone() for t in of.packed)) for _ in range(num)]  # type: ignore[arg-type]
    dense = of.plain.bfloat16()
    num_dense = max(1, WEIGHT_BYTES // dense.nbytes) if args.device == "cuda" else 1
    dense_copies = [dense.clone() for _ in range(num_dense)]
    launch = op_of(of, x, route, None)

    def bf16(layer: int) -> Tensor:
        weight = dense_copies[layer % num_dense]
        return F.linear(x, weight) if route is None else grouped_linear(x, weight, None, *route)

    ours, want = launch(copies[0]), expected(of, x, route)
    error = error_of(ours, want)
    sizes = "x".join(map(str, of.sizes))
    if not error <= TOLERANCE:
        raise WrongResultError(f"{of.kind}, {sizes}, {tokens} rows: off by {error:.2g} of the largest output")
    others, left_out = ({}, {}) if route else alternatives(of, x, copies, ours, want)
    products: dict[str, Attend] = {"op": lambda layer: launch(copies[layer % num]), "bf16": bf16, **others}
    bf16(0)
    runs = {name: all_layers(product, max(num, num_dense), args.device) for name, product in products.items()}
    seconds = interleaved(runs, args)
    used = 1 if route is None else int((route[1].diff() > 0).sum())
    flops = 2.0 * outputs * inputs * len(ours)
    row: dict[str, Any] = {"kind": of.kind, "layer": sizes, "rows": tokens}
    for name, nbytes in (("op", of.nbytes * used), ("bf16", 2 * outputs * inputs * used)):
        row[f"{name}_us"] = seconds[name] * 1e6
        row[f"{name}_gb_per_s"] = nbytes / seconds[name] / 1e9
        row[f"{name}_tflop_per_s"] = flops / seconds[name] / 1e12
    row |= {"faster": seconds["bf16"] / seconds["op"], "error": error}
    row |= {f"{name}_us": seconds[name] * 1e6 if name in seconds else None for name in ("int_mm", "int4pack")}
    return row | {"left_out": left_out}


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for what could not be measured or written in the end."""
    check_triton("bench_quantized.py")
    tables.check_target("--json", args.json)


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--layer", nargs="+", type=parse_layer, default=[parse_layer(text) for text in LAYERS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512, 2048], metavar="T")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each case, without its preparation")
    parser.add_argument("--statistic", choices=STATISTICS, default="median", help="min on a machine that others use")
    tables.add_json_flag(parser)
    args = parser.parse_checked(check_arguments, rows=1, seconds=0)
    from triton import knobs

    if not torch.cuda.is_available() and not knobs.runtime.interpret:
        print("bench_quantized: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    print("activations and outputs in bfloat16", flush=True)
    rows = []
    with torch.inference_mode():
        for kind, sizes in itertools.product(args.kind, args.layer):
            of = weights(kind, sizes, args.device)
            try:
                new = [measure(of, tokens, args) for tokens in args.rows]
            except WrongResultError as error:
                print(f"bench_quantized: error: {error}", file=sys.stderr)
                return 1
            print(tables.text_table([{key: row[key] for key in row if key != "left_out"} for row in new]), flush=True)
            for name, reason in {pair for row in new for pair in row["left_out"].items()}:
                print(f"    {name} is left out: {reason}", flush=True)
            rows += new
    result = {"benchmark": "quantized", "dtype": "bfloat16", "statistic": args.statistic, "results": rows}
    tables.finish(result | {"machine": machine.describe(torch.device(args.device))}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
