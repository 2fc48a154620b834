"""Quantised weights are packed for the device that they are on."""

from types import SimpleNamespace
from unittest import mock

import torch

from compiled_llm.ops.linear import quantized_layouts, quantized_weight_gpu
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, empty_quantized, quantize

FORM = WeightFormat("int4", 32)


def test_on_a_cpu() -> None:
    rows = quantize(torch.randn(20, 96, generator=torch.Generator().manual_seed(0)), FORM)
    weight = quantized_layouts.empty_quantized(FORM, 20, 96, torch.device("cpu"))
    assert weight.codes.shape == empty_quantized(FORM, 20, 96, torch.device("cpu")).codes.shape
    quantized_layouts.pack_quantized_rows(weight, 0, rows, FORM)
    got = quantized_layouts.unpack_quantized_rows(weight, torch.tensor([19, 3]), FORM, 96)
    assert torch.equal(got.codes, rows.codes[[19, 3]])


def test_on_a_gpu() -> None:
    """Which there need not be: what packs for one is given the arguments."""
    names = ("empty_quantized", "pack_quantized_rows", "unpack_quantized_rows")
    codes = SimpleNamespace(device=torch.device("cuda"))
    weight = QuantizedWeight(codes, codes, None)  # type: ignore[arg-type]
    rows = quantize(torch.ones(2, 96), FORM)
    given = ((FORM, 20, 96, torch.device("cuda"), 3), (weight, 0, rows, FORM), (weight, torch.zeros(2), FORM, 96))
    for name, arguments in zip(names, given, strict=True):
        with mock.patch.object(quantized_weight_gpu, f"{name}_gpu") as function:
            getattr(quantized_layouts, name)(*arguments)
        function.assert_called_once_with(*arguments)
