"""Linear layers of quantised weights and activations: the reference by its definition, registration."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.ops.linear import quantized_linear_a8 as a8
from compiled_llm.ops.linear import quantized_weight as weights
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, QuantizedWeight, WeightFormat

FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int8", zeros=True, scale_dtype="bfloat16"),
    WeightFormat("int8", 32, scale_dtype="float16"),
    WeightFormat("int4"),
    WeightFormat("int4", 32, scale_dtype="bfloat16"),
    WeightFormat("int4", 32, zeros=True, scale_dtype="float16"),
    WeightFormat("int4", 64, zeros=True),
    WeightFormat("int4", 128, scale_dtype="float16"),
]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


class Problem(NamedTuple):
    x: Tensor
    rows: QuantizedRows
    weight: QuantizedWeight
    bias: Tensor
    form: WeightFormat

    def args(self, x: Tensor | None = None, *, with_bias: bool = True, x_scale: Tensor | None = None) -> tuple:
        bias = self.bias if with_bias else None
        return (
            (self.x if x is None else x), *self.weight, bias, x_scale,
            self.form.element, self.form.group_size, len(self.rows.codes),
        )  # fmt: skip


def packed(rows: QuantizedRows, form: WeightFormat) -> QuantizedWeight:
    weight = weights.empty_quantized(form, *rows.codes.shape, torch.device("cpu"))
    weights.pack_quantized_rows(weight, 0, rows, form)
    return weight


def problem(form: WeightFormat, t: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    generator = torch.Generator().manual_seed(t + n + k)
    rows = weights.quantize(torch.randn(n, k, generator=generator) + 0.2, form)
    x, bias = torch.randn(t, k, generator=generator), torch.randn(n, generator=generator)
    return Problem(x.to(dtype), rows, packed(rows, form), bias.to(dtype), form)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reference_is_the_product_of_what_the_codes_stand_for(form: WeightFormat) -> None:
    for dtype in DTYPES:
        case = problem(form, 9, 50, 331, dtype)
        xq, sx = a8.quantize_activations(case.x, None)
        exact = (xq.double() * sx[:, None]) @ weights.dequantize(case.rows, form).double().T + case.bias.double()
        actual = a8.quantized_linear_a8_reference(*case.args())
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-4)


def test_activations_are_quantised_a_row_at_a_time() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0, 0, 0, 0, 0], [0, 1e-45, 0, 0, 0], [1, torch.nan, 0, 0, 0]])
    codes, scales = a8.quantize_activations(x, None)
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0] * 5, [0] * 5, [0] * 5]
    assert scales[:3].tolist() == [1, 0, 0]
    assert scales[3].isnan()
    codes, scales = a8.quantize_activations(torch.tensor([[300.0, -5, 1.25], [-torch.inf, 0, 0]]), torch.tensor([0.5]))
    assert codes.tolist() == [[127, -10, 2], [0, 0, 0]]
    assert scales[0] == 0.5
    assert scales[1].isnan()


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def experts(form: WeightFormat, count: int, n: int, k: int) -> tuple[list[Problem], QuantizedWeight, Tensor]:
    """A problem each, their weights together, and their biases."""
    cases = [problem(form, 30, n, k) for e in range(count)]
    cases = [case._replace(bias=case.bias + e) for e, case in enumerate(cases)]
    for e, case in enumerate(cases):
        case.weight.scales.mul_(e + 1)
    parts = list(zip(*(case.weight for case in cases), strict=True))
    together = QuantizedWeight(
        torch.stack(parts[0]), torch.stack(parts[1]), torch.stack(parts[2]) if form.zeros else None
    )
    return cases, together, torch.stack([case.bias for case in cases])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_ops(form: WeightFormat) -> None:
    case = problem(form, 5, 50, 65)
    for args in (case.args(), case.args(with_bias=False, x_scale=torch.tensor([0.01]))):
        torch.library.opcheck(torch.ops.compiled_llm.quantized_linear_a8.default, args)
        assert torch.equal(ops.quantized_linear_a8(*args), a8.quantized_linear_a8_reference(*args))


@pytest.mark.parametrize("form", FORMATS[:1] + FORMATS[5:6], ids=str)
def test_grouped_ops(form: WeightFormat) -> None:
    cases, weight, bias = experts(form, 4, 50, 65)
    rows, starts = torch.arange(29, -1, -1, dtype=torch.int32), starts_of([3, 0, 20, 5])
    args = (cases[0].x, *weight, bias, None, rows, starts, form.element, form.group_size, 50)
    torch.library.opcheck(torch.ops.compiled_llm.grouped_quantized_linear_a8.default, (*args[:6], rows[:28], *args[7:]))
    out = ops.grouped_quantized_linear_a8(*args)
    for e, case in enumerate(cases):
        own = slice(starts[e], starts[e + 1])
        alone = ops.quantized_linear_a8(*case.args(cases[0].x[rows[own]]))
        assert torch.equal(out[own], alone)
