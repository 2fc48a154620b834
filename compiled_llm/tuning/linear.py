"""Products and tiles of quantised linear layers that are fast on this GPU.

For each kind, layer (outputs x inputs) and range of rows, the search starts from the choice in use. A candidate must
give each row the bits of the others, and be 2% faster over the range: that the bits are the same in every tile is so
checked on this GPU. The file, ``ops/tiles/linear/<GPU>.json`` or another, is used by every engine that is started after
that.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.quantizing import KINDS
from compiled_llm.ops.linear import product_choices, quantized_tiles
from compiled_llm.ops.linear.product_choices import Product
from compiled_llm.ops.linear.quantized_tiles import INT_MM_ROWS, Choice, Layer, Tile
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, quantize
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes, empty_quantized_gpu, pack_quantized_rows_gpu
from compiled_llm.tuning import products
from compiled_llm.tuning.search import Gpu, call_seconds, tuned_ranges

SIZES = (16, 32, 64, 128, 256), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5)  # of Tile
LARGEST_TILE = 128 * 256
PLAIN = "bfloat16"
WEIGHT_BYTES = 256 << 20  # weights of one measurement: more than any GPU's L2 cache


class Job(NamedTuple):
    """A layer, how its weights are kept, and whether each group of a row of activations has a scale of its own."""

    kind: str
    layer: Layer
    form: WeightFormat
    by_groups: bool = False


def candidates(layer: Layer, below: int, rows: int, start: Choice, gpu: Gpu) -> list[Choice]:
    """Choices for more than ``below`` and up to ``rows`` rows that may fit, the closest to ``start`` first."""
    form = WeightFormat(layer.element, layer.group_size)
    part = block_bytes(form.bits, layer.group_size)
    inputs = part * 8 // form.bits * (1 if layer.int8_activations else layer.itemsize)
    found = []
    for sizes in itertools.product(*SIZES):
        tile = Tile(*sizes)
        loads = (tile.stages - 1) * (tile.n * part + tile.m * inputs)
        fits = loads <= gpu.shared_memory and tile.m * tile.n <= LARGEST_TILE and tile.m < max(32, 2 * rows)
        choice = Choice(rows, "triton", tile)
        if fits and quantized_tiles.keeps_instruction(layer, tile, gpu.capability) and choice != start:
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
        constants: tuple = layer.element, layer.group_size, layer.out_features
        if layer.int8_activations:
            constants = self.job.by_groups, *constants
        scale = (None,) if layer.int8_activations else ()
        if not layer.experts:
            a8: Any = triton_quantized_a8.quantized_linear_a8
            op = a8 if layer.int8_activations else triton_quantized.quantized_linear
            return op(self.x[:rows], *weight, None, *scale, *constants, choice=choice)
        count = max(1, rows * layer.experts // 2)
        starts = (torch.arange(layer.experts + 1, device=self.device) * count // layer.experts).int()
        grouped: Any = triton_quantized_grouped
        op = grouped.grouped_quantized_linear_a8 if layer.int8_activations else grouped.grouped_quantized_linear
        return op(self.x[:count], *weight, None, *scale, None, starts, *constants, choice=choice)

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
        return call_seconds(lambda copy: self.run(copy, rows, choice), len(self.copies), self.device)

    def say(self, message: str) -> None:
        if message not in self.said:
            print(f"  {message}", flush=True)
        self.said.add(message)


def tune(job: Job, bounds: Sequence[int], gpu: Gpu, seconds: float) -> tuple[Choice, ...]:
    """A choice for each range of rows, each with an even share of the time."""
    case = Case(job, bounds[-1], gpu.device)
    first = quantized_tiles.choose(job.layer, 1, gpu.capability, gpu.name)

    def seconds_of(rows: int, choice: Choice) -> float:
        return case.seconds(rows, choice, case.right(rows, bounds[-1], first))

    def start_of(below: int, rows: int) -> Choice:
        start = quantized_tiles.choose(job.layer, rows, gpu.capability, gpu.name)._replace(rows=rows)
        if start.implementation == "int_mm" and below < INT_MM_ROWS:  # another range than it was chosen for
            start = Choice(rows, "triton", quantized_tiles.default_tiles(job.layer, gpu.capability)[0])
        return start

    def candidates_of(below: int, rows: int, start: Choice) -> list[Choice]:
        return candidates(job.layer, below, rows, start, gpu)

    return tuned_ranges(bounds, seconds, start_of, candidates_of, seconds_of)


def job_of(kind: str, sizes: tuple[int, int], experts: int, group_size: int | None) -> Job:
    """A layer of a quantised ``kind``.

    Args:
        sizes: outputs, inputs.
        group_size: of int4; None: the kind's own.
    """
    scheme = KINDS[kind]
    form = scheme.form
    if group_size and kind.startswith("int4"):
        form = form._replace(group_size=group_size)
    return Job(kind, Layer(*form[:3], scheme.int8_activations, 2, *sizes, experts), form, scheme.by_groups)


def tune_files(
    jobs: Sequence[Job], plain: Sequence[Product], rows: list[int], gpu: Gpu, seconds: float, output: Path | None
) -> list[Path]:
    """Tune all of them, and write each as soon as it is done; files keep what they have of others.

    Args:
        rows: ends of the ranges.
        seconds: for all together.
        output: in the place of the files that the kernels read.

    Returns:
        What was written.

    Raises:
        InUseError: of the tiles in use.
    """
    torch.manual_seed(0)
    share, written = seconds / (len(jobs) + len(plain)), []
    if plain:
        written.append(output or product_choices.path_of(gpu.name))
        choices = dict(product_choices.load(written[-1]))
        for product in plain:
            print(f"{PLAIN}, {product.out_features}x{product.in_features}, {product.around}", flush=True)
            choices[product] = products.tune(product, rows, gpu, share)
            product_choices.save(written[-1], gpu.name, choices)
    if jobs:
        written.append(output or quantized_tiles.path_of(gpu.name))
        layers = dict(quantized_tiles.load(written[-1]))
        for job in jobs:
            sizes = f"{job.layer.out_features}x{job.layer.in_features}"
            print(f"{job.kind}, {sizes}, {job.layer.experts} experts", flush=True)
            layers[job.layer] = tune(job, rows, gpu, share)
            quantized_tiles.save(written[-1], gpu.name, gpu.capability, layers)
    return written
