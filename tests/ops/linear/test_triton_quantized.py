"""The GPU kernels of quantised weights without a GPU: interpreted, and compiled ahead of time."""

import functools
import itertools
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import (
    quantized_tiles,
    triton_int8_scaling,
    triton_quantize_rows,
    triton_quantized,
    triton_quantized_a8,
)
from compiled_llm.ops.linear.quantized_linear_a8 import quantized_linear_a8_reference
from compiled_llm.ops.linear.quantized_tiles import Choice, Layer, Tile
from compiled_llm.ops.linear.quantized_weight import (
    QuantizedRows,
    QuantizedWeight,
    WeightFormat,
    dequantize,
    empty_quantized,
    pack_quantized_rows,
    quantize,
)
from compiled_llm.ops.linear.quantized_weight_gpu import (
    empty_quantized_gpu,
    pack_quantized_rows_gpu,
    unpack_quantized_rows_gpu,
)
from compiled_llm.ops.moe import triton_quantized_grouped
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import PROGRAM_MEMORY, empty, integers

FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", 0, True),
    WeightFormat("int8", 32, True),
    WeightFormat("int8", 128, False, "bfloat16"),
    WeightFormat("int4"),
    WeightFormat("int4", 32),
    WeightFormat("int4", 32, True),
    WeightFormat("int4", 64),
    WeightFormat("int4", 128, True, "float16"),
    WeightFormat("fp8"),
    WeightFormat("fp8", 128),
    WeightFormat("fp4", 32),
    WeightFormat("int4", 64, True),
]
A8_FORMATS = [form for form in FORMATS if form.element.startswith("int")]
BY_GROUPS = [
    WeightFormat("int8", 128, False, "bfloat16"),
    WeightFormat("int4", 32, True),
    WeightFormat("int4", 64, True),
]
"""Forms of which the tests of launches take activations by groups too."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = ((33, 257), (7, 448))  # outputs and inputs: with pieces of blocks, and without


def named(form: WeightFormat) -> str:
    return f"{form.element}-{form.group_size}-{form.zeros}"


def packed(form: WeightFormat, outputs: int, inputs: int, experts: int | None = None) -> tuple:
    """Weights as the kernels read them, on the CPU; and the same dequantised, in float32."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = empty_quantized_gpu(form, outputs, inputs, torch.device("cpu"), experts)
    plain = []
    for expert in range(experts or 1):
        own = weight if experts is None else QuantizedWeight(*(None if t is None else t[expert] for t in weight))
        rows = quantize(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, form)
        pack_quantized_rows_gpu(own, 0, QuantizedRows(*(None if t is None else t[:3] for t in rows)), form)
        pack_quantized_rows_gpu(own, 3, QuantizedRows(*(None if t is None else t[3:] for t in rows)), form)
        plain.append(dequantize(rows, form))
    return weight, plain[0] if experts is None else torch.stack(plain)


def activations(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(*s, generator=generator).to(dtype) for s in ((rows, inputs), (outputs,)))  # type: ignore[return-value]


def rounded(x: Tensor, x_scale: Tensor | None) -> Tensor:
    """``x`` as int8 activations stand for it, float64."""
    scale = x.float().abs().amax(1, keepdim=True) / 127 if x_scale is None else x_scale
    codes = torch.round(x.float() / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127)
    return codes.double() * scale.double()


# ---- packed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=named)
def test_what_is_packed_is_unpacked(form: WeightFormat) -> None:
    for outputs, inputs in SHAPES:
        rows = quantize(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)), form)
        weight = empty_quantized_gpu(form, outputs, inputs, torch.device("cpu"))
        pack_quantized_rows_gpu(weight, 0, rows, form)
        ids = torch.tensor([3, 0, outputs - 1])
        for got, want in zip(unpack_quantized_rows_gpu(weight, ids, form, inputs), rows, strict=True):
            assert (got is None) == (want is None)
            assert want is None or torch.equal(got, want[ids])
        assert weight.codes.shape[1] % 32 == 0


def test_other_group_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size must be one of 0, 32, 64, 128 on a GPU, got 48"):
        empty_quantized_gpu(WeightFormat("int4", 48), 4, 96, torch.device("cpu"))


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(form: WeightFormat, dtype: torch.dtype, device: str = "cpu") -> None:
    for outputs, inputs in SHAPES:
        weight, plain = packed(form, outputs, inputs)
        x, bias = activations(5, inputs, outputs, dtype)
        given = [None if t is None else t.to(device) for t in (x, *weight, bias)]
        got = triton_quantized.quantized_linear(*given, form.element, form.group_size, outputs).cpu()
        assert got.dtype == dtype
        want = x.double() @ plain.double().T + bias.double()
        torch.testing.assert_close(got, want.to(dtype), atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def groups_agree_with_the_reference_of_a8(form: WeightFormat, dtype: torch.dtype, device: str = "cpu") -> None:
    """By groups of inputs: to the bit as the op on CPUs, in one launch and in two, with and without a norm."""
    for outputs, inputs in SHAPES:
        weight, _ = packed(form, outputs, inputs)
        x, bias = activations(11, inputs, outputs, dtype)
        x[2], x[:, 5] = 0, x[:, 5] * 100
        norm = torch.linspace(0.5, 2, inputs).to(dtype)
        on_cpu = empty_quantized(form, outputs, inputs, torch.device("cpu"))
        ids = torch.arange(outputs)
        pack_quantized_rows(on_cpu, 0, unpack_quantized_rows_gpu(weight, ids, form, inputs), form)
        constants = True, form.element, form.group_size, outputs
        want = quantized_linear_a8_reference(x, *on_cpu, bias, None, *constants)
        given = [None if t is None else t.to(device) for t in (*weight, bias, None)]
        for part in (slice(0, 11), slice(1, 4)):  # rows quantised before, and by each program
            got = triton_quantized_a8.quantized_linear_a8(x[part].to(device), *given, *constants)
            assert torch.equal(got.cpu(), want[part])
        normed = rms_norm_reference(x, norm, 1e-6)
        wanted = quantized_linear_a8_reference(normed, *on_cpu, bias, None, *constants)
        for part in (slice(0, 11), slice(1, 4)):
            got = triton_quantized_a8.quantized_linear_a8(
                x[part].to(device), *given, *constants, norm.to(device), 1e-6
            )  # fmt: skip
            torch.testing.assert_close(got.cpu(), wanted[part], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def agrees_with_the_reference_of_a8(form: WeightFormat, dtype: torch.dtype, device: str = "cpu") -> None:
    for (outputs, inputs), static in itertools.product(SHAPES, (False, True)):
        weight, plain = packed(form, outputs, inputs)
        x, bias = activations(5, inputs, outputs, dtype)
        x[2] = 0
        x_scale = torch.tensor([0.02]) if static else None
        given = [None if t is None else t.to(device) for t in (x, *weight, bias, x_scale)]
        got = triton_quantized_a8.quantized_linear_a8(*given, False, form.element, form.group_size, outputs).cpu()
        want = rounded(x, x_scale) @ plain.double().T + bias.double()
        torch.testing.assert_close(got, want.to(dtype), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        x[1, 3] = float("nan")
        alone = triton_quantize_rows.quantize_rows(x.to(device), None, form.group_size, False)[1].isnan()
        assert alone.tolist() == [False, True, False, False, False]


def a_row_has_the_same_bits_in_every_tile(form: WeightFormat, dtype: torch.dtype) -> None:
    """Alone and among others, in each tile, wherever the rows lie."""
    weight, _ = packed(form, 24, 136)
    x, bias = activations(70, 136, 24, dtype)
    name = "FLOAT32" if dtype == torch.float32 else "MMA"
    constants = form.element, form.group_size, 24
    plain, a8 = [], []
    apart = torch.full((70, 139), float("nan"), dtype=dtype)
    apart[:, 2:-1] = x
    for tile in getattr(quantized_tiles, name):
        tile = tile._replace(n=min(tile.n, 32))  # the interpreter's largest tensor is small
        with mock.patch.multiple(quantized_tiles, **{name: (tile,), "INT8": (tile,)}):
            plain.append(triton_quantized.quantized_linear(x, *weight, bias, *constants))
            assert torch.equal(triton_quantized.quantized_linear(apart[:, 2:-1], *weight, bias, *constants), plain[-1])
            for part in (slice(69, 70), slice(3, 20)):
                own = triton_quantized.quantized_linear(x[part], *weight, bias, *constants)
                assert torch.equal(own, plain[-1][part])
            if form in A8_FORMATS:
                a8.append(triton_quantized_a8.quantized_linear_a8(x, *weight, bias, None, False, *constants))
                own = triton_quantized_a8.quantized_linear_a8(x[5:6], *weight, bias, None, False, *constants)
                assert torch.equal(own, a8[-1][5:6])
    for found in (plain, a8):
        assert all(torch.equal(found[0], other) for other in found[1:])


def experts_have_the_bits_of_single_layers(form: WeightFormat) -> None:
    weight, _ = packed(form, 40, 100, experts=4)
    x, _ = activations(12, 100, 40, torch.bfloat16)
    bias = torch.randn(4, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    constants = form.element, form.group_size, 40
    for counts in ([2, 0, 19, 1], [0, 0, 0, 0]):
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        rows = (torch.arange(sum(counts) + 2) * 7 % 11).int()
        got = triton_quantized_grouped.grouped_quantized_linear(x, *weight, bias, rows, starts, *constants)
        a8 = None
        if form in A8_FORMATS:
            by_groups = form.group_size > 0
            given = x, *weight, bias, None, rows, starts, by_groups, *constants
            a8 = triton_quantized_grouped.grouped_quantized_linear_a8(*given)
        for expert, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
            own = *(None if t is None else t[expert] for t in weight), bias[expert]
            alone = triton_quantized.quantized_linear(x[rows[first:end]], *own, *constants)
            assert torch.equal(got[first:end], alone)
            if a8 is not None:
                alone = triton_quantized_a8.quantized_linear_a8(x[rows[first:end]], *own, None, by_groups, *constants)
                assert torch.equal(a8[first:end], alone)


def int_mm_has_the_bits_of_triton(form: WeightFormat, dtype: torch.dtype, device: str = "cpu") -> None:
    """A file that says: Triton for few rows, ``torch._int_mm`` for more."""
    outputs, inputs = 40, 257
    weight, _ = packed(form, outputs, inputs)
    x, bias = activations(70, inputs, outputs, dtype)
    x[2], x[3, 5] = 0, float("nan")
    given = (*(None if t is None else t.to(device) for t in (*weight, bias)),)
    layer = Layer(*form[:3], True, dtype.itemsize, outputs, inputs)
    choices = Choice(16, "triton", Tile(16, 32, 4, 2)), Choice(2048, "int_mm")
    for x_scale, own_bias in ((None, given[3]), (torch.tensor([0.02], device=device), None)):
        arguments = *given[:3], own_bias, x_scale, False, form.element, form.group_size, outputs
        expected = triton_quantized_a8.quantized_linear_a8(x.to(device), *arguments)
        with (
            mock.patch.object(quantized_tiles, "load", return_value={layer: choices}),
            mock.patch.object(triton_quantized_a8, "int_mm", wraps=triton_quantized_a8.int_mm) as product,
        ):
            for part, calls in ((slice(0, 9), 0), (slice(3, 23), 1), (slice(0, 70), 2)):
                got = triton_quantized_a8.quantized_linear_a8(x[part].to(device), *arguments)
                torch.testing.assert_close(got, expected[part], rtol=0, atol=0, equal_nan=True)
                assert product.call_count == calls


BF16 = torch.bfloat16
INTERPRETED = {
    **{f"reference-{named(f)}": functools.partial(agrees_with_the_reference, f, BF16) for f in FORMATS},
    **{f"float32-{named(f)}": functools.partial(agrees_with_the_reference, f, torch.float32) for f in FORMATS[1::2]},
    **{f"float16-{named(f)}": functools.partial(agrees_with_the_reference, f, torch.float16) for f in FORMATS[::3]},
    **{f"a8-{named(f)}": functools.partial(agrees_with_the_reference_of_a8, f, BF16) for f in A8_FORMATS},
    **{
        f"groups-{named(f)}": functools.partial(groups_agree_with_the_reference_of_a8, f, BF16)
        for f in A8_FORMATS
        if f.group_size
    },
    "a8-float32": functools.partial(agrees_with_the_reference_of_a8, FORMATS[8], torch.float32),
    **{
        f"tiles-{named(FORMATS[f])}": functools.partial(a_row_has_the_same_bits_in_every_tile, FORMATS[f], BF16)
        for f in (1, 3, 6, 8, 11)
    },
    **{f"int_mm-{named(f)}": functools.partial(int_mm_has_the_bits_of_triton, f, BF16) for f in FORMATS[:2]},
    "tiles-float32": functools.partial(a_row_has_the_same_bits_in_every_tile, FORMATS[8], torch.float32),
    **{
        f"experts-{named(f)}": functools.partial(experts_have_the_bits_of_single_layers, f)
        for f in (*FORMATS[1::3], FORMATS[11])
    },
}


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

META = torch.device("meta")
MODULES = (triton_quantized, triton_quantized_a8, triton_quantize_rows, triton_int8_scaling, triton_quantized_grouped)


def launches(
    form: WeightFormat, a8: bool, rows: int, capability: tuple[int, int], bias: Tensor | None = None
) -> list[ahead_of_time.Launch]:
    """What a layer of 4096 inputs and 6144 outputs launches."""
    weight, x = empty_quantized_gpu(form, 6144, 4096, META), empty(rows, 4096)
    op = triton_quantized_a8.quantized_linear_a8 if a8 else triton_quantized.quantized_linear
    with ahead_of_time.recorded(capability, *MODULES) as recorded:
        op(x, *weight, bias, *((None, form in BY_GROUPS) if a8 else ()), form.element, form.group_size, 6144)
    return recorded


def of_experts(form: WeightFormat, a8: bool, tokens: int, capability: tuple[int, int]) -> list[ahead_of_time.Launch]:
    """In the sizes of Qwen3-30B-A3B: 128 experts, of which a token uses 8."""
    weight, x = empty_quantized_gpu(form, 1536, 2048, META, 128), empty(tokens, 2048)
    routes, constants = (integers(tokens * 8), integers(129)), (form.element, form.group_size, 1536)
    with ahead_of_time.recorded(capability, *MODULES) as recorded:
        if a8:
            triton_quantized_grouped.grouped_quantized_linear_a8(
                x, *weight, None, None, *routes, form in BY_GROUPS, *constants
            )
        else:
            triton_quantized_grouped.grouped_quantized_linear(x, *weight, None, *routes, *constants)
    return recorded[-1:]


# Each element, each size of a group, and each kernel once.
SOME = [
    (launches, BY_GROUPS[1], True, 64), (launches, WeightFormat("int8"), False, 1),
    (of_experts, WeightFormat("fp4", 32), False, 1),
]  # fmt: skip
COMPILED = [
    (of, form, a8, rows)
    for of, numbers in ((launches, (1, 64, 2048)), (of_experts, (1, 64, 512, 2048)))
    for form, a8, rows in itertools.product(FORMATS, (False, True), numbers)
    if not a8 or form in A8_FORMATS
]


@pytest.mark.parametrize(
    ("of", "form", "a8", "rows"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.battery) for case in COMPILED],
    ids=lambda value: named(value) if isinstance(value, WeightFormat) else getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.battery), (9, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], of: Callable, form: WeightFormat, a8: bool, rows: int
) -> None:
    for launch in of(form, a8, rows, capability):
        binary, registers = ahead_of_time.without_spills(launch, capability)
        shared, ptx, name = binary.metadata.shared // 1024, binary.asm["ptx"], launch[0].__name__
        print(f"| {capability}, {named(form)}, a8 {a8}, {rows} rows | {name} | {registers} | {shared} |")
        if name == "quantize_rows_kernel":
            continue
        wanted = "wgmma.mma_async" if capability == (9, 0) else "mma.sync"
        assert set(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)) == {wanted}
        assert (".s32.s8.s8" in ptx) == a8
        if of is launches:
            assert binary.metadata.shared <= PROGRAM_MEMORY[capability]
            loads = sorted({int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\S+ .*?(0x\w+)", ptx)})
            # With groups of 32, or 8 rows of x, a program's share of a tile may be 8 bytes a thread.
            assert loads[-1] == 16 or ((form.group_size == 32 or launch[2]["BLOCK_M"] == 8) and loads[-1] == 8)


@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.battery), (9, 0)], ids=str)
@pytest.mark.parametrize("choice", [Choice(64, "triton", Tile(64, 64, 4, 4)), Choice(64, "int_mm")], ids=str)
def test_what_follows_integer_sums_leaves_nothing_to_be_fused_or_not(
    choice: Choice, capability: tuple[int, int]
) -> None:
    """So both products have the same operations behind them."""
    with mock.patch.object(quantized_tiles, "choose", return_value=choice):
        launch = launches(WeightFormat("int8", 0, True), True, 64, capability, bias=empty(6144))[-1]
    binary, _ = ahead_of_time.without_spills(launch, capability)
    assert "fma.rn.f32" in binary.asm["ptx"]
    assert re.findall(r"\b(?:add|sub|mul)\S*\.f32\S*", binary.asm["ptx"]) == []
    if choice.implementation == "int_mm":
        assert re.search(r"ld\.global\S*\.v4", binary.asm["ptx"]), "16 bytes at a time"


# ---- refused --------------------------------------------------------------------------------------------------------

FORM = WeightFormat("int4", 64, True)
(C, S, Z), _ = packed(FORM, 8, 128)
X = torch.ones(2, 128)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X[0], C, S, Z, None, "int4", 64, 8), r"x must be \[T, K\]"),
        ((X, C[:, :32], S, Z, None, "int4", 64, 8), r"codes must be a contiguous \[8, 64\] of torch.uint8"),
        ((X, C, S.t().contiguous(), Z, None, "int4", 64, 8), r"scales must be a contiguous \[2, 8\]"),
        ((X, C, S, Z[:1], None, "int4", 64, 8), "zeros must be a contiguous"),
        ((X, C, S, Z.int(), None, "int4", 64, 8), "zeros must be of int8, float32, bfloat16 or float16"),
        ((X, C, S, Z, X[0], "int4", 64, 8), r"bias must be a contiguous \[8\]"),
        ((X, C, S, Z, None, "int4", 48, 8), "group_size must be one of"),
        ((X, C, S, Z, None, "int5", 64, 8), "element must be one of int8, int4, fp8, fp4, got 'int5'"),
    ],
)
def test_refuses_by_name(given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_quantized.quantized_linear(*given)


def test_activations_of_int8_are_for_integers() -> None:
    weight, _ = packed(WeightFormat("fp8"), 8, 128)
    with pytest.raises(ValueError, match="element must be int8 or int4, got 'fp8'"):
        triton_quantized_a8.quantized_linear_a8(X, *weight, None, None, False, "fp8", 0, 8)
    with pytest.raises(ValueError, match=r"x_scale must be one element of torch.float32"):
        triton_quantized_a8.quantized_linear_a8(X, C, S, Z, None, X[0], False, "int4", 64, 8)
    with pytest.raises(ValueError, match="by_groups must be False with x_scale or without groups"):
        triton_quantized_a8.quantized_linear_a8(X, C, S, Z, None, X[0, :1], True, "int4", 64, 8)


def test_starts_of_other_experts_are_refused() -> None:
    weight = empty_quantized_gpu(WeightFormat("int4", 64), 8, 128, torch.device("cpu"), 4)
    starts = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"starts must be a contiguous \[5\] of torch.int32"):
        triton_quantized_grouped.grouped_quantized_linear(X, *weight, None, None, starts, "int4", 64, 8)


# ---- the outcomes of the interpreter, and on a GPU ------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS, ids=named)
def test_on_a_gpu(form: WeightFormat) -> None:
    for dtype in DTYPES:
        agrees_with_the_reference(form, dtype, "cuda")
    if form in A8_FORMATS:
        agrees_with_the_reference_of_a8(form, torch.bfloat16, "cuda")
    if form in A8_FORMATS and form.group_size:
        groups_agree_with_the_reference_of_a8(form, torch.bfloat16, "cuda")
    if form in FORMATS[:2]:
        int_mm_has_the_bits_of_triton(form, torch.bfloat16, "cuda")


ORDINARY = [
    "reference-int8-0-False", "reference-int4-32-True", "reference-fp8-128-False", "reference-fp4-32-False",
    "a8-int8-0-False", "groups-int4-128-True", "experts-int4-64-False",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
