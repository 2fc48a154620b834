"""GPTQ and the choice of scales, against what they are meant to make small."""

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat, dequantize, quantize, round_to_codes
from compiled_llm.quantizing.gptq import best_scales, gptq


def problem() -> tuple[Tensor, Tensor]:
    """Weights ``[24, 64]`` and the Hessian of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(16, 64, generator=generator)
    x = torch.randn(400, 16, generator=generator) @ mixing + 0.3 * torch.randn(400, 64, generator=generator)
    return torch.randn(24, 64, generator=generator), x.T @ x


def loss(rows: QuantizedRows, weight: Tensor, hessian: Tensor, form: WeightFormat) -> Tensor:
    error = (dequantize(rows, form) - weight).double()
    return ((error @ hessian.double()) * error).sum()


FORMS = [
    WeightFormat("int4", 16),
    WeightFormat("int4", 16, True),
    WeightFormat("int8"),
    WeightFormat("fp8"),
    WeightFormat("fp4", 32),
]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_error_feedback_is_better_than_rounding(form: WeightFormat, act_order: bool) -> None:
    weight, hessian = problem()
    plain = quantize(weight, form)
    rows = gptq(weight, hessian, form, plain.scales, plain.zeros, act_order)
    assert loss(rows, weight, hessian, form) < 0.7 * loss(plain, weight, hessian, form)
    assert torch.equal(rows.scales, plain.scales)


def test_inputs_without_correlation_are_rounded_to_nearest() -> None:
    weight, form = problem()[0], WeightFormat("int4", 16)
    plain = quantize(weight, form)
    assert torch.equal(gptq(weight, torch.eye(64), form, plain.scales, None).codes, plain.codes)


@pytest.mark.parametrize("form", [WeightFormat("int4", 16), WeightFormat("int4", 16, True)], ids=str)
def test_best_scales_of_separate_groups_are_never_worse(form: WeightFormat) -> None:
    weight, hessian = problem()
    hessian = hessian * torch.block_diag(*[torch.ones(16, 16)] * 4)
    plain = quantize(weight, form)
    chosen = round_to_codes(weight, *best_scales(weight, hessian, form), form)
    assert loss(chosen, weight, hessian, form) < loss(plain, weight, hessian, form)
