"""Linear layers with their surroundings in one launch, without a GPU: the bits of the single ops, in Triton's
interpreter; and compiled ahead of time.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import ops as registered
from compiled_llm.ops.linear import (
    quantized_layouts,
    triton_linear,
    triton_quantize_rows,
    triton_quantized,
    triton_quantized_a8,
)
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, quantize
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu, pack_quantized_rows_gpu
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.rowwise import triton_rowwise
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import PROGRAM_MEMORY, empty

EPS = 1e-5
FORMS = {
    "int8": WeightFormat("int8"),
    "int8-zeros": WeightFormat("int8", 0, True),
    "int8-128": WeightFormat("int8", 128),
    "int4-32": WeightFormat("int4", 32, scale_dtype="bfloat16"),
    "int4-64-zeros": WeightFormat("int4", 64, True),
    "int4-128-zeros": WeightFormat("int4", 128, True, "float16"),
    "fp8": WeightFormat("fp8"),
    "fp8-128": WeightFormat("fp8", 128),
    "mxfp4": WeightFormat("fp4", 32, scale_dtype="bfloat16"),
}
SURROUNDINGS: dict[str, dict[str, Any]] = {
    "norm": {"norm": torch.bfloat16},
    "norm-float32-gated": {"norm": torch.float32, "activation": "silu"},
    "gelu": {"activation": "gelu_tanh"},
    "residual": {"residual": True},
    "gelu-not-gated": {"norm": torch.bfloat16, "activation": "gelu", "gated": False},
    "multiplier-beside": {"residual": True, "multiplier": 0.37, "beside": True},
    "all": {"norm": torch.bfloat16, "activation": "silu", "residual": True, "multiplier": 1.3, "beside": True},
}

Layer = Callable[..., Tensor]  # (x, and fields of Surroundings)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(kind: str, outputs: int, inputs: int, bias: bool, device: str = "cpu") -> Layer:
    """``kind``: "exact", a name of ``FORMS``, or that and "-a8"."""
    plain = drawn(outputs, inputs, seed=1) / inputs**0.5
    columns = drawn(outputs, seed=2).bfloat16().to(device) if bias else None
    if kind == "exact":
        weight = plain.bfloat16().to(device)
        return lambda x, *around: triton_linear.exact_linear(x, weight, columns, None, *around[2:])
    form = FORMS[kind.removesuffix("-a8")]
    packed = empty_quantized_gpu(form, outputs, inputs, torch.device("cpu"))
    pack_quantized_rows_gpu(packed, 0, quantize(plain, form), form)
    codes = QuantizedWeight(*(None if part is None else part.to(device) for part in packed))  # type: ignore[arg-type]
    constants = form.element, form.group_size, outputs
    if kind.endswith("-a8"):
        return lambda x, *around: triton_quantized_a8.quantized_linear_a8(
            x, *codes, columns, None, False, *constants, *around
        )  # fmt: skip
    return lambda x, *around: triton_quantized.quantized_linear(x, *codes, columns, *constants, *around)


def by_single_ops(layer: Layer, x: Tensor, around: Surroundings) -> Tensor:
    y = layer(x if around.norm is None else triton_rowwise.rms_norm(x, around.norm, EPS))
    if around.activation:
        op = triton_rowwise.gated_activation if around.gated else triton_rowwise.activation
        y = op(y, around.activation)
    y = y * around.multiplier
    y = y if around.beside is None else y + around.beside
    return y if around.residual is None else around.residual + y


# ---- interpreted ----------------------------------------------------------------------------------------------------


def has_the_bits_of_single_ops(kind: str, around: str, inputs: int, device: str = "cpu") -> None:
    """Of 40 rows by the single ops; their tiles and launches are others than those of a few rows."""
    surroundings = SURROUNDINGS[around]
    gated = "activation" in surroundings and surroundings.get("gated", True)
    outputs = 2 * 21 if gated else 21
    layer = layer_of(kind, outputs, inputs, bias=around != "residual", device=device)
    x = drawn(40, inputs, seed=3).bfloat16().to(device)
    norm_dtype = surroundings.get("norm")
    norm = None if norm_dtype is None else (1 + drawn(inputs, seed=4) / 4).to(norm_dtype).to(device)
    added = {
        name: drawn(40, 21, seed=seed).bfloat16().to(device)
        for name, seed in (("residual", 5), ("beside", 6))
        if name in surroundings
    }
    given = Surroundings(**{**surroundings, "norm": norm, "eps": EPS, **added})
    if kind == "exact":  # whose norm is an op of its own
        given = given._replace(norm=None)
    whole = by_single_ops(layer, x, given)
    assert whole.shape == (40, 21)
    assert whole.isfinite().all()
    for rows in (slice(0, 1), slice(3, 10), slice(20, 31), slice(8, 40)):
        own = given._replace(**{name: tensor[rows] for name, tensor in added.items()})
        assert torch.equal(layer(x[rows], *own), whole[rows])


def rows_with_nan_stay_apart(kind: str) -> None:
    layer = layer_of(kind, 16, 64, bias=False)
    x, norm = drawn(5, 64, seed=3).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
    clean = layer(x, norm, EPS)
    x[1, 3], x[4] = float("nan"), 0
    got = layer(x, norm, EPS)
    assert got[1].isnan().all()
    assert not got[4].any()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


KINDS = ("exact", *FORMS, *(f"{name}-a8" for name in FORMS if name.startswith("int")))
INTERPRETED = {
    **{
        f"bits-{kind}-{around}": functools.partial(has_the_bits_of_single_ops, kind, around, 300)
        for kind, around in itertools.product(KINDS, SURROUNDINGS)
    },
    **{  # more inputs than a norm adds up side by side
        f"bits-long-{kind}": functools.partial(has_the_bits_of_single_ops, kind, "all", 2200)
        for kind in ("exact", "int8", "int8-a8")
    },
    **{
        f"nan-{kind}": functools.partial(rows_with_nan_stay_apart, kind)
        for kind in ("exact", "int8", "int8-a8", "int4-32-a8")
    },
}


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

SHAPES = {  # outputs, inputs, surroundings
    "qkv": (6144, 4096, ("norm",)),
    "o": (4096, 4096, ("residual",)),
    "gate_up": (24576, 4096, ("norm", "activation")),
}
CASES = [
    (capability, kind, name, rows)
    for capability in PROGRAM_MEMORY
    for kind, name, rows in itertools.product(KINDS, SHAPES, (1, 16, 32))
]
SOME = {((9, 0), "int8-a8", "qkv", 16), ((8, 0), "int4-32", "gate_up", 16)}


def launches(capability: tuple[int, int], kind: str, name: str, rows: int) -> list[ahead_of_time.Launch]:
    outputs, inputs, around = SHAPES[name]
    norm, activation = empty(inputs) if "norm" in around else None, "silu" if "activation" in around else ""
    residual = empty(rows, outputs) if "residual" in around else None
    x, given = empty(rows, inputs), (norm, EPS, activation, residual)
    modules = triton_linear, triton_quantized, triton_quantized_a8, triton_quantize_rows
    with ahead_of_time.recorded(capability, *modules) as recorded:
        if kind == "exact":
            triton_linear.exact_linear(x, empty(outputs, inputs), None, None, *given[2:])
            return recorded
        form = FORMS[kind.removesuffix("-a8")]
        weight = empty_quantized_gpu(form, outputs, inputs, torch.device("meta"))
        constants = form.element, form.group_size, outputs
        if kind.endswith("-a8"):
            triton_quantized_a8.quantized_linear_a8(x, *weight, None, None, False, *constants, *given)
        else:
            triton_quantized.quantized_linear(x, *weight, None, *constants, *given)
    return recorded


@pytest.mark.parametrize(
    ("capability", "kind", "name", "rows"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], kind: str, name: str, rows: int) -> None:
    made = launches(capability, kind, name, rows)
    assert len(made) == (2 if kind.endswith("-a8") and rows > triton_quantized_a8.FEW_ROWS else 1)
    for launch in made:
        binary, registers = ahead_of_time.without_spills(launch, capability)
        kinds = set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", binary.asm["ptx"]))
        shared, kernel = binary.metadata.shared // 1024, launch[0].__name__
        print(f"| {capability} {kind} {name} {rows} | {kernel} | {registers} | {shared} KB | {kinds} |")
        assert binary.metadata.shared <= PROGRAM_MEMORY[capability]
        if kernel in ("exact_linear_kernel", "quantized_linear_kernel"):
            wanted = {(8, 0): "mma.sync", (9, 0): "wgmma.mma_async"}.get(capability)
            assert wanted is None or kinds == {wanted}


# ---- registered, refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a8", [False, True])
def test_the_ops_are_registered_as_torch_expects(a8: bool) -> None:
    form = FORMS["int8"]
    packed = quantized_layouts.empty_quantized(form, 12, 32, torch.device("cpu"))
    quantized_layouts.quantize_into(packed, 0, drawn(12, 32, seed=1), form)
    x, norm, residual = drawn(3, 32, seed=2).bfloat16(), drawn(32, seed=3).bfloat16(), drawn(3, 6, seed=4).bfloat16()
    weights = *packed, None, *((None, False) if a8 else ()), "int8", 0, 12
    around = Surroundings(norm, EPS, "silu", residual)
    name = "fused_quantized_linear_a8" if a8 else "fused_quantized_linear"
    op, public = getattr(torch.ops.compiled_llm, name), getattr(registered, name)
    torch.library.opcheck(op, (x, *weights, *around), test_utils=("test_schema", "test_faketensor"))
    got = public(x, *weights, around=around)
    exact = torch.nn.functional.rms_norm(x.float(), (32,), norm.float(), EPS) @ drawn(12, 32, seed=1).T
    want = torch.nn.functional.silu(exact[:, :6]) * exact[:, 6:] + residual.float()
    torch.testing.assert_close(got.float(), want, atol=0.5, rtol=0.1)


X, NORM = torch.ones(2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X.float(), NORM.float()), "with norm, activation or residual x must be bfloat16 or float16"),
        ((X, NORM[:32]), r"norm must be a contiguous \[64\] of torch.bfloat16 or torch.float32"),
        ((X, None, 0.0, "relu"), "activation must be silu or"),
        ((X, None, 0.0, "", X), r"residual must be like the result, \[2, 16\]"),
    ],
)
@pytest.mark.parametrize("kind", ["int8", "int8-a8"])
def test_refuses_by_name(kind: str, given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(kind, 16, 64, bias=False)(*given)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str) -> None:
    for around, inputs in itertools.product(SURROUNDINGS, (300, 4096)):
        has_the_bits_of_single_ops(kind, around, inputs, "cuda")


ORDINARY = [
    "bits-exact-all", "bits-int8-multiplier-beside", "bits-int4-64-zeros-a8-all", "nan-int8-a8",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
