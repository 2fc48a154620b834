"""Plain 16-bit products on this GPU: which of them take in what surrounds them, and in which tiles.

Of each layer (outputs x inputs) and what may follow it (``ops/linear/product_choices.py``) the search starts from the
choice in use. "apart" is a library's product, with a launch for the gate; a residual is then part of the next norm, so
it costs nothing here. A tile must give the bits of the default one.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.linears.dense import counters_on
from compiled_llm.ops import gated_activation
from compiled_llm.ops.linear import product_choices
from compiled_llm.ops.linear.product_choices import AROUND, Choice, LinearTile, Product
from compiled_llm.tuning.search import Gpu, call_seconds, tuned_ranges

MAX_ROWS = 256  # of a range: larger steps are bound by arithmetic, which a library does best
SIZES = (16, 32, 64, 128, 256), (16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4, 5, 6, 8)  # of LinearTile
LARGEST_TILE = 128 * 256
WEIGHT_BYTES = 256 << 20  # weights of one measurement: more than any GPU's L2 cache
TOLERANCE = 0.03  # of the largest output, in bfloat16


def products(outputs: int, inputs: int) -> list[Product]:
    """Of a layer, with all that may surround it; gates and ups need an even number of outputs."""
    return [Product(outputs, inputs, around) for around in AROUND if around != "gate" or outputs % 2 == 0]


def candidates(product: Product, rows: int, start: Choice, gpu: Gpu) -> list[Choice]:
    """Choices for up to ``rows`` rows that may fit, the closest to ``start`` first."""
    from compiled_llm.ops.linear.triton_linear import tile_for

    used = start.tile or tile_for(rows, product.out_features, 2, gpu.capability)
    found = []
    for sizes in itertools.product(*SIZES):
        tile = LinearTile(*sizes)
        fits = tile.stages * tile.k * (tile.m + tile.n) * 2 <= gpu.shared_memory and tile.m * tile.n <= LARGEST_TILE
        if fits and tile.m < max(32, 2 * rows):
            distance = sum(a != b for a, b in zip(tile, used, strict=True))
            found.append((distance, Choice(rows, "fused", tile)))
    ordered = [choice for _, choice in sorted(found, key=lambda pair: pair[0])]
    return [choice for choice in (Choice(rows, "apart"), Choice(rows, "fused"), *ordered) if choice != start]


class Case:
    """The weights of one product, in several copies, and inputs of the largest number of rows."""

    def __init__(self, product: Product, rows: int, gpu: Gpu) -> None:
        self.product, self.gpu, device = product, gpu, gpu.device
        outputs, inputs, around = product
        nbytes = 2 * outputs * inputs
        copies = max(1, WEIGHT_BYTES // nbytes) if device == "cuda" else 1
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).bfloat16()
        self.copies = [weight.clone() for _ in range(copies)]
        self.x = torch.randn(rows, inputs, device=device).bfloat16()
        self.activation = "silu" if around == "gate" else ""
        self.residual = torch.randn(rows, outputs, device=device).bfloat16() if around == "residual" else None
        self._counters = counters_on(weight.device, outputs, inputs)
        self._right: dict[int, Tensor] = {}
        self._default: dict[int, Tensor] = {}

    def run(self, copy: int, rows: int, choice: Choice) -> Tensor:
        """The product and what surrounds it, of ``rows`` rows."""
        from compiled_llm.ops.linear.triton_linear import exact_linear

        x, weight = self.x[:rows], self.copies[copy]
        residual = None if self.residual is None else self.residual[:rows]
        if choice.way == "fused":
            return exact_linear(x, weight, None, self._counters, self.activation, residual, tile=choice.tile)
        y = F.linear(x, weight)
        return gated_activation(y, self.activation) if self.activation else y

    def right(self, rows: int) -> Tensor:
        """The numbers of the product, apart; with the residual that others have added."""
        if rows not in self._right:
            y = self.run(0, rows, Choice(rows, "apart"))
            self._right[rows] = y if self.residual is None else self.residual[:rows] + y
        return self._right[rows]

    def default(self, rows: int) -> Tensor:
        """What the default tile computes: each other one must give its bits."""
        if rows not in self._default:
            from compiled_llm.ops.linear.triton_linear import tile_for

            tile = tile_for(rows, self.product.out_features, 2, self.gpu.capability)
            self._default[rows] = self.run(0, rows, Choice(rows, "fused", tile))
        return self._default[rows]

    def seconds(self, rows: int, choice: Choice) -> float:
        """Median time of one call; infinite if it does not fit, or gives other numbers, which is printed."""
        from triton.runtime.errors import OutOfResources

        try:
            out = self.run(0, rows, choice)
        except OutOfResources:
            return math.inf
        is_apart = self.residual is not None and choice.way == "apart"
        out = self.residual[:rows] + out if is_apart and self.residual is not None else out
        right = self.right(rows)
        if choice.tile is not None and not torch.equal(out, self.default(rows)):
            print(f"  left out, as a row's bits would depend on the batch: {choice}", flush=True)
            return math.inf
        error = float((out.float() - right.float()).abs().max() / right.float().abs().max())
        if not error <= TOLERANCE:
            print(f"  left out, off by {error:.2g} of the largest output: {choice}", flush=True)
            return math.inf
        return call_seconds(lambda copy: self.run(copy, rows, choice), len(self.copies), self.gpu.device)


def tune(product: Product, bounds: list[int], gpu: Gpu, seconds: float) -> tuple[Choice, ...]:
    """A choice for each range of rows up to ``MAX_ROWS``, each with an even share of the time."""
    bounds = [rows for rows in bounds if rows <= MAX_ROWS]
    case = Case(product, bounds[-1], gpu)

    def start_of(below: int, rows: int) -> Choice:
        return product_choices.choose(product, rows, gpu.name)._replace(rows=rows)

    def candidates_of(below: int, rows: int, start: Choice) -> list[Choice]:
        return candidates(product, rows, start, gpu)

    return tuned_ranges(bounds, seconds, start_of, candidates_of, case.seconds)
