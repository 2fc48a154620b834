"""Rows quantised in C++: the codes and scales of ``quantize_searched``, to the bit."""

import pytest
import torch

from compiled_llm.ops.linear import quantize_rows
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, empty_quantized, pack_quantized_rows
from compiled_llm.ops.linear.searched_scales import quantize_searched

FORMS = [
    WeightFormat("int8"),
    WeightFormat("int8", 32, scale_dtype="float16"),
    WeightFormat("int4", 32, scale_dtype="bfloat16"),
    WeightFormat("int4", 128),
    WeightFormat("int4", 64, zeros=True),
    WeightFormat("fp8"),
    WeightFormat("fp8", 64, scale_dtype="bfloat16"),
    WeightFormat("fp4", 32, scale_dtype="bfloat16"),
    WeightFormat("int4", 32, zeros=True, scale_dtype="bfloat16", zero_dtype="bfloat16"),
    WeightFormat("int4", 128, zeros=True, scale_dtype="bfloat16", zero_dtype="bfloat16"),
]


def both(rows: torch.Tensor, form: WeightFormat, start: int) -> tuple[QuantizedWeight, QuantizedWeight]:
    made = [empty_quantized(form, 70, rows.shape[1], torch.device("cpu")) for _ in range(2)]
    quantize_rows.quantize_into(made[0], start, rows, form)
    pack_quantized_rows(made[1], start, quantize_searched(rows, form), form)
    return made[0], made[1]


def assert_same(actual: QuantizedWeight, expected: QuantizedWeight) -> None:
    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.scales, expected.scales)
    assert expected.zeros is None or (actual.zeros is not None and torch.equal(actual.zeros, expected.zeros))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_have_the_codes_and_scales_of_plain_torch(form: WeightFormat, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for count, inputs, start in [(1, 1, 0), (37, 333, 5), (70, 256, 0)]:
        rows = torch.randn(count, inputs, generator=generator).to(dtype)
        assert_same(*both(rows, form, start))
        assert_same(*both(rows.repeat(1, 2)[:, :inputs], form, start))  # strided


@pytest.mark.parametrize("form", [form for form in FORMS if form.element != "fp8"], ids=str)
def test_halves_zeros_and_extremes(form: WeightFormat) -> None:
    rows = torch.arange(-256, 256).repeat(4, 1) * 0.5
    rows[1] = 0
    rows[2] *= 1e-44
    rows[3] *= 1e36
    assert_same(*both(rows, form, 3))


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_rows, "_functions", dict)
    assert_same(*both(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), FORMS[-1], 1))
