"""The linear layer on quantised weights: every instruction set against float64, batch invariance, registration."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.linear import quantized_linear as linear
from compiled_llm.ops.linear import quantized_weight as weights
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat
from tests.ops.instruction_sets import by_set, ordinary_sets, skip_without

BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
DTYPES = [BFLOAT16, FLOAT32, FLOAT16]
FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", 128, zeros=True, scale_dtype="bfloat16"),
    WeightFormat("int4", 16, scale_dtype="float16"),
    WeightFormat("int4", 32, zeros=True, scale_dtype="float16"),
    WeightFormat("int4", 32, zeros=True, zero_dtype="float32"),
    WeightFormat("int4", 64, scale_dtype="bfloat16"),
    WeightFormat("int4", 128, zeros=True, scale_dtype="float16", zero_dtype="bfloat16"),
    WeightFormat("int4"),
    WeightFormat("fp8"),
    WeightFormat("fp8", 128, scale_dtype="bfloat16"),
    WeightFormat("fp4", 32),
]


OP = "quantized_linear_cpu"
BEST = ordinary_sets(OP)[0]
# Each set, and each dtype; the battery has all of them together.
SOME = [FORMATS[1], FORMATS[3], FORMATS[7], FORMATS[9], FORMATS[10]]
SAMPLE = [(BEST, BFLOAT16), (BEST, FLOAT32), ("avx512", FLOAT32), ("avx2", FLOAT16), ("portable", FLOAT16)]


class Problem(NamedTuple):
    x: Tensor
    weight: Tensor
    """What the codes stand for, float64."""
    packed: QuantizedWeight
    bias: Tensor
    form: WeightFormat

    def args(self, x: Tensor, bias: Tensor | None) -> tuple:
        return (x, *self.packed, bias, self.form.element, self.form.group_size, len(self.weight))


def problem(rows: int, n: int, k: int, form: WeightFormat, dtype: torch.dtype) -> Problem:
    torch.manual_seed(rows + 7 * n + 31 * k)
    codes = weights.quantize(torch.randn(n, k), form)
    packed = weights.empty_quantized(form, n, k, torch.device("cpu"))
    weights.pack_quantized_rows(packed, 0, codes, form)
    kept = weights.unpack_quantized_rows(packed, torch.arange(n), form, k)
    spread = weights.dequantize(kept, form).double()
    return Problem(torch.randn(rows, k).to(dtype), spread, packed, torch.randn(n).to(dtype), form)


def becomes_bfloat16(form: WeightFormat) -> bool:
    """Whether weights are rounded for tile registers: not where the sums of 32 codes or more of 4 bits are scaled."""
    return form.bits == 8 or form.group_size % 32 != 0


def on_tiles(of: Problem) -> Tensor:
    """The weights as tile registers multiply them, by their definition in ``quantized_linear_cpu_amx.h``; float64."""
    n, k = of.weight.shape
    kept = weights.unpack_quantized_rows(of.packed, torch.arange(n), of.form, k)
    most, unit = {"int8": (128, 256), "fp8": (512, 1 / 256)}.get(of.form.element, (8, 1))
    zeros = torch.zeros_like(kept.scales) if kept.zeros is None else kept.zeros
    norm = (kept.scales.abs() * (most + zeros.abs()) / most).amax(1, keepdim=True)
    scaled = kept.scales * (torch.tensor(1.00276 * 2**15 / most) / norm)
    size = of.form.group_size or k
    ratio, offset = (
        each.half().double().repeat_interleave(size, 1)[:, :k] for each in (scaled / unit, -(scaled * zeros))
    )
    products = (weights.code_values(kept.codes, of.form.element) * unit * ratio + offset).half().view(torch.int16)
    made = ((products >> 3) & torch.tensor(0x8FFF).to(torch.int16)).view(torch.bfloat16)
    return made.double() * 2.0**112 * norm * most / 2**15


def assert_close(actual: Tensor, of: Problem, x: Tensor, bias: Tensor | None, relative: float) -> None:
    """Half a step of the dtype from the exact result, and ``relative`` of the sum of magnitudes."""
    exact = torch.nn.functional.linear(x.double(), of.weight, None if bias is None else bias.double())
    magnitude = x.double().abs() @ of.weight.abs().T
    assert actual.dtype == x.dtype
    assert actual.is_contiguous()
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(x.dtype).eps / 2 + magnitude * relative + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reference(form: WeightFormat, dtype: torch.dtype) -> None:
    for n, k in ((50, 64), (17, 199)):
        of = problem(5, n, k, form, dtype)
        for bias in (None, of.bias):
            args = of.args(of.x, bias)
            assert_close(linear.quantized_linear_reference(*args), of, of.x, bias, 2**-20)


@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[4], FORMATS[10]], ids=str)
def test_op(form: WeightFormat) -> None:
    of = problem(3, 50, 72, form, BFLOAT16)
    for bias in (None, of.bias):
        torch.library.opcheck(torch.ops.compiled_llm.quantized_linear.default, of.args(of.x, bias))


@pytest.mark.parametrize("counts", [(2, 0, 4), (20, 0, 35)], ids=["few rows", "many"])
def test_grouped_op_and_reference(counts: tuple[int, ...]) -> None:
    form = WeightFormat("int4", 32, zeros=True, scale_dtype="bfloat16")
    experts = [problem(rows, 50, 72, form, BFLOAT16) for rows in (9, 10, 11)]
    codes, scales, zeros = (torch.stack(list(parts)) for parts in zip(*(of.packed for of in experts), strict=True))
    bias, x = torch.stack([of.bias for of in experts]), experts[0].x
    rows = torch.tensor([8, 0, 0, 3, 5, 1] * 10, dtype=torch.int32)[: sum(counts)]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    args = (x, codes, scales, zeros, bias, rows, starts, "int4", 32, 50)
    torch.library.opcheck(torch.ops.compiled_llm.grouped_quantized_linear.default, args)
    out = linear.grouped_quantized_linear(*args)
    assert out.shape == (sum(counts), 50)
    for expert, (first, end) in ((0, (0, counts[0])), (2, (counts[0], sum(counts)))):
        of, own = experts[expert], x[rows[first:end]]
        assert_close(out[first:end], of, own, of.bias, 2**-8)


@pytest.mark.parametrize("kernel", by_set(OP, SAMPLE))
@pytest.mark.parametrize(
    "form", [pytest.param(form, id=str(form), marks=() if form in SOME else pytest.mark.battery) for form in FORMATS]
)
def test_matches_float_and_is_independent_of_the_batch(
    kernels: native.Kernels, form: WeightFormat, kernel: tuple[str, torch.dtype]
) -> None:
    """Odd sizes, a last group that is short, several chunks, tiles past whole blocks; a row alone and in company."""
    isa, dtype = kernel
    skip_without(kernels, isa)
    for n, k in ((1, 1), (97, 1100)):  # of seven tiles one is left by products of two
        of = problem(70, n, k, form, dtype)
        torch.set_num_threads(1)
        args = of.args(of.x, of.bias)[1:]
        alone = torch.cat([kernels.run("quantized_linear", row, *args, isa=isa) for row in of.x.split(1)])
        tiled = isa.startswith("amx") and dtype == BFLOAT16 and becomes_bfloat16(form)
        assert_close(alone, of._replace(weight=on_tiles(of)) if tiled else of, of.x, of.bias, 2**-20)
        for threads, rows in ((1, 3), (2, 4), (3, 5), (2, 17), (2, 33), (3, 70)):
            torch.set_num_threads(threads)
            assert torch.equal(kernels.run("quantized_linear", of.x[:rows], *args, isa=isa), alone[:rows])
            assert torch.equal(kernels.run("quantized_linear", of.x[-rows:], *args, isa=isa), alone[-rows:])


@pytest.mark.parametrize("form", [form for form in FORMATS if becomes_bfloat16(form)], ids=str)
def test_weights_on_tiles_are_those_of_bfloat16(form: WeightFormat) -> None:
    """A unit of the last place from the exact ones; exact where a row is one group."""
    of = problem(1, 50, 200, form, BFLOAT16)
    made, largest = on_tiles(of), of.weight.abs().amax()
    assert ((made - of.weight).abs() <= of.weight.abs() * 2**-7 + largest * 2**-9).all()
    assert (made - of.weight).abs().mean() < of.weight.abs().mean() * 2**-8
    if form.group_size == 0:
        assert (made.float() - of.weight.float()).abs().max() <= largest * 2**-22
    elif not form.zeros:  # neither too large nor too small on average
        assert ((made - of.weight) * of.weight.sign()).mean().abs() < of.weight.abs().mean() * 2**-11


@pytest.mark.parametrize("isa", by_set(OP))
def test_a_code_that_is_no_number(kernels: native.Kernels, isa: str) -> None:
    skip_without(kernels, isa)
    of = problem(20, 20, 40, WeightFormat("fp8"), BFLOAT16)
    of.packed.codes[0, 3, 2, 1] = 127  # of output 2
    for rows in (1, 20):
        out = kernels.run("quantized_linear", *of.args(of.x[:rows], None), isa=isa)
        assert out[:, 2].isnan().all()
        assert out.isnan().sum() == rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("element", ["int8", "int4", "fp8", "fp4"])
def test_every_code_has_its_value(kernels: native.Kernels, element: str, dtype: torch.dtype) -> None:
    """By products of few rows, of some, and of many, which are decoded by other code."""
    form = WeightFormat(element)
    codes = torch.arange(2**form.bits).repeat(32, 1)
    codes = (codes - 8 if element == "int4" else codes.to(torch.uint8).view(torch.int8)).to(torch.int8)
    values = weights.code_values(codes, element)[0]
    packed = weights.empty_quantized(form, 32, len(values), torch.device("cpu"))
    weights.pack_quantized_rows(packed, 0, weights.QuantizedRows(codes, torch.ones(32, 1)), form)
    for k, value in enumerate(values):
        x = torch.zeros(30, len(values), dtype=dtype)
        x[:, k] = 1
        if value.isnan():
            continue
        finite = packed._replace(codes=packed.codes.clone())
        if element == "fp8":
            finite.codes[finite.codes & 127 == 127] = 0
        for rows in (1, 9, 16, 30):
            out = kernels.run("quantized_linear", x[:rows], *finite, None, element, 0, 32)
            assert (out == value).all()


def test_refuses_wrong_inputs(kernels: native.Kernels) -> None:
    of = problem(4, 50, 64, FORMATS[3], BFLOAT16)
    x, codes, scales, zeros = of.x, *of.packed
    form = "int4", 32, 50
    wrong = [
        ((x.double(), codes, scales, zeros, None, *form), "x must be bfloat16, float32 or float16"),
        ((x[0], codes, scales, zeros, None, *form), r"x must be \[T, K\]"),
        ((x.T.contiguous().T, codes, scales, zeros, None, *form), "last stride of x must be 1"),
        ((x, codes.view(torch.int8), scales, zeros, None, *form), "take contiguous codes"),
        ((x, codes, scales, zeros, None, "int8", 32, 50), "take contiguous codes"),
        ((x, codes, scales, zeros, None, "int4", 32, 65), "take contiguous codes"),
        ((x, codes, scales, zeros, None, "int4", 16, 50), "scales must be"),
        ((x, codes, scales, zeros[:, :1].contiguous(), None, *form), "zeros must be"),
        (
            (x, codes, scales, zeros.int(), None, *form),
            "zeros must be .* of int8, float32, bfloat16 or float16, got .* of int32",
        ),
        ((x, codes, scales.double(), zeros, None, *form), "scales must be .* of float32, bfloat16 or float16"),
        ((x, codes, scales, zeros, of.bias.float(), *form), "bias must be"),
        ((x, codes, scales, zeros, None, "int4", 12, 50), "multiple of 8"),
        ((x, codes, scales, zeros, None, "int3", 32, 50), "element must be"),
    ]
    for args, message in wrong:
        with pytest.raises(ValueError, match=message):
            linear.quantized_linear(*args)
