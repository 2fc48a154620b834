"""Find fast products and tiles for linear layers on this GPU and write them where the kernels look for them.

    python scripts/tune_linear.py                                      # all quantised kinds, the layers of Qwen3-8B
    python scripts/tune_linear.py --kind int4 --group-size 128 --layer 6144x4096    # the file keeps the others
    python scripts/tune_linear.py --kind int8_w8a8 --layer 1536x2048 --experts 128
    python scripts/tune_linear.py --kind bfloat16                      # plain weights: what takes in norms and gates
    python scripts/tune_linear.py --dry-run                            # what would be tried; needs no GPU

For each kind, layer (outputs x inputs) and range of rows, the search starts from the choice in use. A candidate must
give each row the bits of the others, and be 2% faster over the range: that the bits are the same in every tile is so
checked on this GPU. ``--seconds`` is divided among the ranges; tiles closest to the start are tried first. The file,
``ops/tiles/linear/<GPU>.json`` or ``--output``, is used by every engine that is started after that. Plain weights, kind
``bfloat16``, have ``ops/tiles/products/<GPU>.json``; ``tune_linear_products.py`` says what is tried.

In Triton's interpreter (``TRITON_INTERPRET=1``, with ``--output``) the program runs on a CPU. That checks the program:
such times mean nothing.

Exit status: 0; 1 if tiles in use give a row other bits than others do; 2 without a CUDA GPU.
"""

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

import bench.own_checkout
import torch
import tune_linear_products
from torch import Tensor
from tune_attention import graph_seconds, search

from compiled_llm.api.command_line import FlagParser
from compiled_llm.models.linears.quantizing import SCHEMES
from compiled_llm.ops.linear import product_choices, quantized_tiles
from compiled_llm.ops.linear.product_choices import Product
from compiled_llm.ops.linear.quantized_tiles import INT_MM_ROWS, Choice, Layer, Tile
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, quantize
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes, empty_quantized_gpu, pack_quantized_rows_gpu
from compiled_llm.system import hardware as machine
from compiled_llm.system.gpu_packages import check_triton

QWEN3_8B = ["6144x4096", "4096x4096", "24576x4096", "4096x12288"]
ROWS = [16, 64, 256, 2048]
SIZES = (16, 32, 64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5)  # of Tile
LARGEST_TILE = 128 * 256
PLAIN = "bfloat16"
WEIGHT_BYTES = 256 << 20  # weights of one measurement: more than any GPU's L2 cache
SHARED_MEMORY = 227 * 1024  # of a program on Hopper: for --dry-run


class BitsError(Exception):
    """The tiles in use give a row bits that depend on how many rows there are."""


class Job(NamedTuple):
    """A layer, and how its weights are kept."""

    kind: str
    layer: Layer
    form: WeightFormat


def candidates(layer: Layer, below: int, rows: int, start: Choice, capability: tuple[int, int], memory: int) -> list:
    """Choices for more than ``below`` and up to ``rows`` rows that may fit, the closest to ``start`` first."""
    form = WeightFormat(layer.element, layer.group_size)
    part = block_bytes(form.bits, layer.group_size)
    inputs = part * 8 // form.bits * (1 if layer.int8_activations else layer.itemsize)
    found = []
    for sizes in itertools.product(*SIZES):
        tile = Tile(*sizes)
        loads = (tile.stages - 1) * (tile.n * part + tile.m * inputs)
        fits = loads <= memory and tile.m * tile.n <= LARGEST_TILE and tile.m < max(32, 2 * rows)
        choice = Choice(rows, "triton", tile)
        if fits and quantized_tiles.keeps_instruction(layer, tile, capability) and choice != start:
            distance = sum(a != b for a, b in zip(tile, start.tile or tile, strict=True))
            found.append((distance, choice))
    other = [Choice(rows, "int_mm")] if quantized_tiles.takes_int_mm(layer) and below >= INT_MM_ROWS else []
    return [one for one in other if one != start] + [choice for _, choice in sorted(found, key=lambda pair: pair[0])]


class Case:
    """The weights of one job, in several copies, and inputs of the largest number of rows."""

    def __init__(self, job: Job, rows: int, device: str) -> None:
        self.job, self.device = job, device
        layer, form = job.layer, job.form
        nbytes = form.nbytes(layer.out_features, layer.in_features) * max(1, layer.experts)
        copies = max(1, WEIGHT_BYTES // nbytes) if device == "cuda" else 1
        weight = self._weight(layer, form)
        self.copies = [QuantizedWeight(*(None if t is None else t.clone() for t in weight)) for _ in range(copies)]  # type: ignore[arg-type]
        dtype = torch.float32 if layer.itemsize == 4 else torch.bfloat16
        count = rows * layer.experts // 2 if layer.experts else rows
        self.x = torch.randn(max(1, count), layer.in_features, device=device).to(dtype)
        self.expected: dict[int, Tensor] = {}
        self.said: set[str] = set()

    def _weight(self, layer: Layer, form: WeightFormat) -> QuantizedWeight:
        sizes = layer.out_features, layer.in_features
        weight = empty_quantized_gpu(form, *sizes, torch.device(self.device), layer.experts or None)
        for expert in range(layer.experts or 1):
            own = weight.expert(expert) if layer.experts else weight
            rows = quantize(torch.randn(*sizes, device=self.device) / layer.in_features**0.5, form)
            pack_quantized_rows_gpu(own, 0, rows, form)
        return weight

    def run(self, copy: int, rows: int, choice: Choice | None) -> Tensor:
        """The layer, of ``rows`` rows; of experts, of half as many for each of them on average."""
        from compiled_llm.ops.linear import triton_quantized, triton_quantized_a8
        from compiled_llm.ops.moe import triton_quantized_grouped

        layer, weight = self.job.layer, self.copies[copy]
        constants = layer.element, layer.group_size, layer.out_features
        scale = (None,) if layer.int8_activations else ()
        if not layer.experts:
            a8, plain = triton_quantized_a8.quantized_linear_a8, triton_quantized.quantized_linear
            op = a8 if layer.int8_activations else plain
            return op(self.x[:rows], *weight, None, *scale, *constants, choice=choice)  # type: ignore[operator]
        count = max(1, rows * layer.experts // 2)
        starts = (torch.arange(layer.experts + 1, device=self.device) * count // layer.experts).int()
        a8, plain = (
            triton_quantized_grouped.grouped_quantized_linear_a8,
            triton_quantized_grouped.grouped_quantized_linear,
        )
        op = a8 if layer.int8_activations else plain
        return op(self.x[:count], *weight, None, *scale, None, starts, *constants, choice=choice)  # type: ignore[operator]

    def right(self, rows: int, most: int, start: Choice) -> Tensor:
        """What ``rows`` rows must give: of a layer of its own, those rows among the ``most``."""
        if self.job.layer.experts:
            most = rows
        if most not in self.expected:
            self.expected[most] = self.run(0, most, start)
        return self.expected[most][:rows]

    def seconds(self, rows: int, choice: Choice, right: Tensor) -> float:
        """Median time of one call; infinite, with the reason printed once, if it does not run or gives other bits."""
        from triton.runtime.errors import OutOfResources

        try:
            out = self.run(0, rows, choice)
        except OutOfResources:
            return math.inf
        except RuntimeError as error:
            self.say(f"{choice.implementation} does not run: {str(error).splitlines()[0]}")
            return math.inf
        if not torch.equal(out, right):
            self.say(f"left out, as a row's bits would depend on the batch: {choice}")
            return math.inf
        if self.device == "cuda":
            return graph_seconds(lambda copy: self.run(copy, rows, choice), len(self.copies))
        start = time.perf_counter()
        self.run(0, rows, choice)
        return time.perf_counter() - start

    def say(self, message: str) -> None:
        if message not in self.said:
            print(f"  {message}", flush=True)
        self.said.add(message)


def tune(
    job: Job, bounds: list[int], capability: tuple[int, int], gpu: str, memory: int, seconds: float, device: str
) -> tuple[Choice, ...]:  # fmt: skip
    """A choice for each range of rows, each with an even share of the time. ``BitsError``: see there."""
    case, chosen, below = Case(job, bounds[-1], device), [], 0
    first = quantized_tiles.choose(job.layer, 1, capability, gpu)
    for rows in bounds:
        steps = sorted({max(1, math.isqrt(below * rows)), rows})
        start = quantized_tiles.choose(job.layer, rows, capability, gpu)._replace(rows=rows)
        if start.implementation == "int_mm" and below < INT_MM_ROWS:  # another range than it was chosen for
            start = Choice(rows, "triton", quantized_tiles.default_tiles(job.layer, capability)[0])
        rights = [case.right(step, bounds[-1], first) for step in steps]

        def cost(choice: Choice, steps: list[int] = steps, rights: list[Tensor] = rights) -> float:
            times = [case.seconds(*given) for given in zip(steps, itertools.repeat(choice), rights, strict=False)]
            return math.exp(sum(map(math.log, times)) / len(times))

        if math.isinf(cost(start)):
            raise BitsError(f"{job.kind}, {job.layer}: {start} in use gives rows other bits, or does not run")
        tried = candidates(job.layer, below, rows, start, capability, memory)
        best, ratio, count = search(start, tried, cost, seconds / len(bounds))
        print(f"  {below + 1:5} to {rows:5} rows{ratio:8.1%} of the time before, {count} of {len(tried)}: {best[1:]}")
        chosen.append(best)
        below = rows
    return tuple(chosen)


def jobs(args: argparse.Namespace) -> list[Job]:
    """Those of quantised weights. ``ValueError`` for a layer that is none."""
    found = []
    for kind, text in itertools.product(args.kind, args.layer):
        sizes = text.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"--layer must be OUTPUTSxINPUTS, as 6144x4096, given {text!r}")
        if kind == PLAIN:
            continue
        form, activations = SCHEMES[kind]
        if args.group_size and kind.startswith("int4"):
            form = form._replace(group_size=args.group_size)
        outputs, inputs = map(int, sizes)
        layer = Layer(*form[:3], activations == "int8", 2, outputs, inputs, args.experts)
        found.append(Job(kind, layer, form))
    return found


def check_arguments(args: argparse.Namespace) -> None:
    """``ValueError`` for what cannot be tuned."""
    check_triton("tune_linear.py")
    jobs(args)
    if args.rows != sorted(set(args.rows)):
        raise ValueError(f"--rows must rise, given {' '.join(map(str, args.rows))}")
    if PLAIN in args.kind and (args.experts or (args.output and len(args.kind) > 1)):
        raise ValueError(f"--kind {PLAIN} has no --experts, and an --output of its own, given {' '.join(args.kind)}")
    if PLAIN in args.kind and args.rows[0] > tune_linear_products.MAX_ROWS:
        raise ValueError(f"--rows must begin with up to {tune_linear_products.MAX_ROWS} for --kind {PLAIN}")


def print_candidates(
    args: argparse.Namespace, todo: list[Job], plain: list[Product], gpu: str, capability: tuple[int, int], memory: int
) -> None:
    """How many choices would be tried."""
    print(f"for {gpu or 'a GPU of compute capability 9.0'}; candidates for each range of rows:")
    for job in todo:
        for below, rows in itertools.pairwise([0, *args.rows]):
            start = quantized_tiles.choose(job.layer, rows, capability, gpu)
            found = candidates(job.layer, below, rows, start._replace(rows=rows), capability, memory)
            names = sorted({choice.implementation for choice in found})
            sizes = f"{job.layer.out_features}x{job.layer.in_features}"
            print(f"  {job.kind} {sizes}, {below + 1} to {rows}: {len(found)} of {', '.join(names)}")
    for product, rows in itertools.product(plain, args.rows):
        start = product_choices.choose(product, rows, gpu)._replace(rows=rows)
        count = len(tune_linear_products.candidates(product, rows, start, memory))
        print(f"  {PLAIN} {product.out_features}x{product.in_features}, {product.around}, to {rows}: {count}")


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=[*SCHEMES, PLAIN], default=list(SCHEMES))
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help="inputs with one scale (int4: 32)")
    parser.add_argument("--layer", nargs="+", default=QWEN3_8B, metavar="OUTPUTSxINPUTS")
    parser.add_argument("--experts", type=int, default=0, help="each layer is that of so many experts (default: 0)")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="ends of the ranges; of an expert's rows")
    parser.add_argument("--seconds", type=float, default=1200, help="for all together (default: 1200)")
    parser.add_argument("--output", type=Path, help="file to write (default: the one that the kernels read)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be tried, measure and write nothing")
    args = parser.parse_checked(check_arguments, experts=0, rows=1, seconds=0)
    from triton import knobs

    has_gpu, todo = torch.cuda.is_available(), jobs(args)
    sizes = [tuple(map(int, text.split("x"))) for text in args.layer if PLAIN in args.kind]
    plain = [product for layer in sizes for product in tune_linear_products.products(*layer)]
    if not has_gpu and not args.dry_run and not (knobs.runtime.interpret and args.output):
        print("tune_linear: no CUDA GPU here (torch.cuda.is_available() is False); nothing to tune", file=sys.stderr)
        return 2
    gpu, capability, memory = "", (9, 0), SHARED_MEMORY
    if has_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu, memory = properties.name, properties.shared_memory_per_block_optin
        capability = properties.major, properties.minor
    if args.dry_run:
        print_candidates(args, todo, plain, gpu, capability, memory)
        return 0
    torch.manual_seed(0)
    share, device = args.seconds / (len(todo) + len(plain)), "cuda" if has_gpu else "cpu"
    written = []
    if plain:
        written.append(args.output or product_choices.path_of(gpu))
        choices = dict(product_choices.load(written[-1]))
        for product in plain:
            print(f"{PLAIN}, {product.out_features}x{product.in_features}, {product.around}", flush=True)
            choices[product] = tune_linear_products.tune(product, args.rows, gpu, memory, share, device)
            product_choices.save(written[-1], gpu, choices)
    path = args.output or quantized_tiles.path_of(gpu)
    layers = dict(quantized_tiles.load(path)) if todo else {}
    for job in todo:
        print(f"{job.kind}, {job.layer.out_features}x{job.layer.in_features}, {job.layer.experts} experts", flush=True)
        try:
            layers[job.layer] = tune(job, args.rows, capability, gpu, memory, share, device)
        except BitsError as error:
            print(f"tune_linear: {error}", file=sys.stderr)
            return 1
        quantized_tiles.save(path, gpu, capability, layers)
    written += [path] if todo else []
    print(f"written: {', '.join(map(str, written))}")
    facts = machine.describe(torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu"))
    print(json.dumps({"benchmark": "tune_linear", "tiles": str(written[-1]), "machine": facts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
