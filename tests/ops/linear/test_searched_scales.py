"""Searched scales: no worse than those of ``quantize``, and what lies on the format's values is found as it is."""

import pytest
import torch

from compiled_llm.ops.linear.quantized_weight import WeightFormat, dequantize, quantize
from compiled_llm.ops.linear.searched_scales import quantize_searched

FITTED = WeightFormat("int4", 32, zeros=True, scale_dtype="bfloat16", zero_dtype="bfloat16")
PLAIN_INT4 = WeightFormat("int4", 32, scale_dtype="bfloat16")
FP4, FP8 = WeightFormat("fp4", 32, scale_dtype="bfloat16"), WeightFormat("fp8")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def errors(rows: torch.Tensor, form: WeightFormat, *, searched: bool) -> torch.Tensor:
    """Of each group."""
    off = dequantize((quantize_searched if searched else quantize)(rows, form), form) - rows
    return off.double().square().unflatten(1, (-1, form.group_size or rows.shape[1])).sum(2)


@pytest.mark.parametrize("levels", [16, 13, 9])
def test_values_at_even_distances_are_found_as_they_are(levels: int) -> None:
    """As Q4_1 has them: any of 16 values, and not always the outer ones."""
    generator = torch.Generator().manual_seed(levels)
    codes = torch.randint(0, levels, (40, 4, 32), generator=generator)
    codes[:, :, 0], codes[:, :, 1] = 0, levels - 1
    scales = (torch.rand(40, 4, 1, generator=generator) * 0.01 + 0.001).bfloat16().float()
    offsets = torch.randint(-64, 64, (40, 4, 1), generator=generator) / 8  # fractions of a step
    rows = ((codes - 8 - offsets) * scales).flatten(1)
    found = dequantize(quantize_searched(rows, FITTED), FITTED)
    torch.testing.assert_close(found, rows, rtol=0, atol=1e-3 * float(scales.min()))


@pytest.mark.parametrize(
    ("form", "plain", "most"), [(FITTED, PLAIN_INT4, 0.65), (FP4, FP4, 0.95), (FP8, FP8, 0.95)], ids=str
)
def test_no_group_is_worse_than_with_plain_scales(form: WeightFormat, plain: WeightFormat, most: float) -> None:
    rows = drawn(64, 256) * torch.linspace(1e-3, 10, 64)[:, None]
    rows[3] = 0
    rows[4] = 5
    rows[5, ::7] *= 50
    before, after = errors(rows, plain, searched=False), errors(rows, form, searched=True)
    assert (after <= before * (1 + 1e-6) + 1e-9).all()
    gaussian = [row for row in range(64) if row not in (3, 4, 5)]
    assert after[gaussian].sum() < most * before[gaussian].sum()


def test_values_far_from_zero_and_without_spread() -> None:
    rows = torch.stack([torch.full((32,), 3.0), torch.full((32,), -1e-20), 100 + 1e-3 * drawn(32), 1e30 * drawn(32)])
    found = dequantize(quantize_searched(rows, FITTED), FITTED)
    assert found.isfinite().all()
    torch.testing.assert_close(found[[0, 2]], rows[[0, 2]], rtol=2e-3, atol=0)


def test_other_forms_are_those_of_quantize() -> None:
    rows = drawn(8, 128)
    for form in (PLAIN_INT4, WeightFormat("int8"), WeightFormat("int4", 32, zeros=True)):
        assert all(
            torch.equal(one, other)
            for one, other in zip(quantize_searched(rows, form), quantize(rows, form), strict=True)
            if one is not None
        )
