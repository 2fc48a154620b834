"""What ``probe_linear.py`` compares: layers, tilings, and how each is run on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from probe_linear_kernel import Variant, launch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.linears import fused as layers
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.fused import activated_linear, added_linear, normed_linear
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.programmatic_launch import programmatic_launches

EPS = 1e-5
BUFFER = 1 << 31  # elements of bfloat16, of which all weights are views
MOST_ROWS = 256


class Product(NamedTuple):
    """A linear layer. ``around``: what surrounds it in a model; "norm", "norm and gate", "residual" or ""."""

    model: str
    name: str
    outputs: int
    inputs: int
    around: str


PRODUCTS = [
    Product("llama-3.1-8b", "qkv", 6144, 4096, "norm"),
    Product("llama-3.1-8b", "o", 4096, 4096, "residual"),
    Product("llama-3.1-8b", "gate_up", 28672, 4096, "norm and gate"),
    Product("llama-3.1-8b", "down", 4096, 14336, "residual"),
    Product("llama-3.1-8b", "head", 128256, 4096, ""),
    Product("qwen3-0.6b", "qkv", 4096, 1024, "norm"),
    Product("qwen3-0.6b", "o", 1024, 2048, "residual"),
    Product("qwen3-0.6b", "gate_up", 6144, 1024, "norm and gate"),
    Product("qwen3-0.6b", "down", 1024, 3072, "residual"),
    Product("qwen3-0.6b", "head", 151936, 1024, ""),
]
BIG, SMALL = "llama-3.1-8b", "qwen3-0.6b"
# In the order of their weight, should the time run out.
POINTS = [(BIG, 1), (BIG, 32), (BIG, 16), (BIG, 8), (SMALL, 1), (SMALL, 32), (BIG, 256), (BIG, 64), (SMALL, 16)]


def few_rows(m: int) -> list[Variant]:
    """Those of ``m`` rows, the most promising first: of these all are tried with surroundings and in small models."""
    first = [
        Variant(64, m, 64, 4, 8),
        Variant(64, m, 128, 4, 5),
        Variant(64, m, 256, 4, 3),
        Variant(64, m, 128, 4, 5, ahead=8),
        Variant(64, m, 128, 4, 5, ahead=8, keep_ahead=True),
        Variant(64, m, 256, 4, 3, ahead=4, keep_ahead=True),
        Variant(128, m, 128, 8, 4),
        Variant(32, 64, 128, 4, 4, "x", ahead=8, keep_ahead=True),
        Variant(64, m, 128, 4, 5, ahead=4),
        Variant(64, m, 128, 4, 3, ahead=8, keep_ahead=True),
        Variant(128, m, 128, 8, 4, ahead=4, keep_ahead=True),
        Variant(32, 64, 128, 4, 5, "x"),
    ]
    second = [
        Variant(64, m, 64, 4, 4, ahead=16, keep_ahead=True),
        Variant(64, m, 128, 4, 4),
        Variant(64, m, 128, 4, 8),
        Variant(64, m, 128, 4, 5, evict=True),
        Variant(64, m, 128, 4, 5, ahead=16, keep_ahead=True),
        Variant(64, m, 256, 4, 4),
        Variant(128, m, 64, 8, 8),
        Variant(128, m, 128, 4, 4),
        Variant(64, m, 128, 4, 5, persistent=1),
        Variant(64, m, 128, 4, 5, persistent=2),
        Variant(64, m, 128, 4, 5, ahead=8, keep_ahead=True, persistent=2),
        Variant(128, m, 128, 8, 4, persistent=1),
        Variant(32, 64, 64, 4, 8, "x"),
        Variant(32, 64, 256, 4, 2, "x", ahead=4, keep_ahead=True),
        Variant(16, 64, 256, 4, 3, "x"),
        Variant(64, 64, 128, 4, 5, "x"),
        Variant(16, m, 256, 4, 4),
        Variant(32, m, 256, 4, 4),
        Variant(32, m, 128, 4, 6),
    ]
    return first + second


PROMISING = {BIG: 12, SMALL: 8}  # of which all are tried
MORE_ROWS = {
    64: [
        Variant(64, 64, 64, 4, 6),
        Variant(64, 64, 128, 4, 4),
        Variant(128, 64, 128, 8, 3),
        Variant(64, 64, 128, 4, 4, ahead=8, keep_ahead=True),
        Variant(64, 128, 64, 4, 4),
        Variant(32, 64, 128, 4, 5, "x"),
    ],
    256: [
        Variant(64, 128, 64, 4, 4),
        Variant(128, 128, 64, 8, 4),
        Variant(64, 256, 64, 4, 3),
        Variant(128, 256, 64, 8, 3),
        Variant(128, 256, 64, 8, 4),
        Variant(128, 128, 64, 4, 4),
    ],
}


def arounds_of(product: Product, rows: int) -> list[str]:
    """What is tried around a product: nothing, all, and the gate without the norm."""
    if rows > 32 or not product.around:
        return [""]
    return ["", product.around] + (["gate"] if "gate" in product.around else [])


def variants_of(product: Product, rows: int, around: str) -> list[tuple[Variant, bool]]:
    """Those tried, and whether by a programmatic launch."""
    if rows > 32:
        return [(variant, False) for variant in MORE_ROWS[rows]]
    found = few_rows(16 if rows <= 16 else 32)
    if around or product.model == SMALL or rows not in (1, 32):
        found = found[: PROMISING[product.model]]
    early = found[: PROMISING[product.model]] if around or product.name == "qkv" else []
    early = [variant for variant in early if variant.ahead]
    return [(variant, False) for variant in found] + [(variant, True) for variant in early]


def named(variant: Variant, programmatic: bool) -> str:
    return variant.name + (", programmatic" if programmatic else "")


def by_name() -> dict[str, Variant]:
    found = [*few_rows(16), *few_rows(32), *MORE_ROWS[64], *MORE_ROWS[256]]
    return {variant.name: variant for variant in found}


# ---- what is run ----------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Of a product, on the GPU."""

    product: Product
    buffer: Tensor  # [BUFFER] bfloat16
    x: Tensor  # [MOST_ROWS, inputs]
    norm: Tensor  # [inputs]
    residual: Tensor  # [MOST_ROWS, outputs]
    out: Tensor  # [MOST_ROWS, outputs]

    @classmethod
    def of(cls, product: Product, buffer: Tensor) -> "Data":
        x = torch.randn(MOST_ROWS, product.inputs, device="cuda") / product.inputs**0.5
        norm = 1 + torch.randn(product.inputs, device="cuda") / 8
        residual = torch.randn(MOST_ROWS, product.outputs, device="cuda")
        out = torch.empty(MOST_ROWS, product.outputs, device="cuda")
        return cls(product, buffer, *(t.bfloat16() for t in (x, norm, residual, out)))

    def weight(self, copy: int = 0) -> Tensor:
        size = self.product.outputs * self.product.inputs
        start = copy % (len(self.buffer) // size) * size
        return self.buffer[start : start + size].view(self.product.outputs, self.product.inputs)

    def around(self, rows: int, around: str) -> Surroundings:
        return Surroundings(
            norm=self.norm if "norm" in around else None, eps=EPS, activation="silu" if "gate" in around else "",
            residual=self.residual[:rows] if around == "residual" else None,
        )  # fmt: skip


Run = Callable[[int], Any]  # of which copy of the weights; the result, or None if it is in ``Data.out``


def engine_run(data: Data, rows: int, around: str, way: str) -> Run:
    """``way``: "cublas", "fused" or "exact": the engine's own layers. "cublas" has what surrounds it as single ops."""
    x = data.x[:rows]
    if not around:
        if way == "cublas":
            return lambda copy: F.linear(x, data.weight(copy))
        if way == "exact":
            return lambda copy: ops.exact_linear(x, data.weight(copy), None)
        return lambda copy: ops.fused_linear(x, data.weight(copy))
    residual, gate = data.residual[:rows], "silu" if "gate" in around else ""

    def run(copy: int) -> Tensor:
        dense = Dense(data.weight(copy))
        layer: Any = Exact(dense) if way == "exact" else dense
        with mock.patch.object(layers, "is_fused", return_value=way == "fused"):
            if around == "residual":
                y, delta = added_linear(residual, layer, x)
                return y if delta is None else y + delta
            if "norm" in around:
                return normed_linear(x, None, data.norm, EPS, layer, gate)[1]
            return activated_linear(x, layer, gate)

    return run


def programmatic_run(run: Run) -> Run:
    def inside(copy: int) -> Any:
        with programmatic_launches():
            return run(copy)

    return inside


def variant_run(
    data: Data, rows: int, around: str, variant: Variant, programmatic: bool, sms: int, warm_up: bool = False
) -> Run:
    surroundings = data.around(rows, around)
    out = data.out.flatten()[: rows * surroundings.outputs(data.product.outputs)].view(rows, -1)

    def run(copy: int) -> Tensor:
        launch(variant, data.x[:rows], data.weight(copy), out, surroundings, sms, programmatic, warm_up)
        return out

    return run


def exact_at_once(data: Data, around: str) -> Tensor:
    """Today's exact op on ``MOST_ROWS`` rows, with what surrounds it by single ops."""
    given = data.around(MOST_ROWS, around)
    y = ops.exact_linear(data.x if given.norm is None else ops.rms_norm(data.x, given.norm, EPS), data.weight(), None)
    y = ops.gated_activation(y, given.activation) if given.activation else y
    return y if given.residual is None else given.residual + y
