"""The linear layer on quantised weights against float64, and its registration."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import quantized_linear as linear
from compiled_llm.ops.linear import quantized_weight as weights
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat

BFLOAT16, FLOAT32, FLOAT16 = torch.bfloat16, torch.float32, torch.float16
DTYPES = [BFLOAT16, FLOAT32, FLOAT16]
FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", 128, zeros=True, scale_dtype="bfloat16"),
    WeightFormat("int4", 16, scale_dtype="float16"),
    WeightFormat("int4", 32, zeros=True),
    WeightFormat("int4", 64, scale_dtype="bfloat16"),
    WeightFormat("int4", 128, zeros=True, scale_dtype="float16"),
    WeightFormat("int4"),
    WeightFormat("fp8"),
    WeightFormat("fp8", 128, scale_dtype="bfloat16"),
    WeightFormat("fp4", 32),
]


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


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_op(form: WeightFormat) -> None:
    of = problem(3, 50, 72, form, BFLOAT16)
    for bias in (None, of.bias):
        torch.library.opcheck(torch.ops.compiled_llm.quantized_linear.default, of.args(of.x, bias))


def test_grouped_op_and_reference() -> None:
    form = WeightFormat("int4", 32, zeros=True, scale_dtype="bfloat16")
    experts = [problem(rows, 50, 72, form, BFLOAT16) for rows in (9, 10, 11)]
    codes, scales, zeros = (torch.stack(list(parts)) for parts in zip(*(of.packed for of in experts), strict=True))
    bias, x = torch.stack([of.bias for of in experts]), experts[0].x
    rows = torch.tensor([8, 0, 0, 3, 5, 1], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    args = (x, codes, scales, zeros, bias, rows, starts, "int4", 32, 50)
    torch.library.opcheck(torch.ops.compiled_llm.grouped_quantized_linear.default, args)
    out = linear.grouped_quantized_linear(*args)
    assert out.shape == (6, 50)
    for expert, (first, end) in ((0, (0, 2)), (2, (2, 5))):
        of, own = experts[expert], x[rows[first:end]]
        assert_close(out[first:end], of, own, of.bias, 2**-8)
