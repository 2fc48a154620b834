"""Rows of quantised checkpoints in another order than the file's."""

import pytest
import torch

from compiled_llm.models.linears.published import in_columns, in_order_of
from compiled_llm.models.linears.quantized import Quantized, Scheme
from compiled_llm.ops.linear.quantized_layouts import empty_quantized, quantize_into
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat, dequantize

FORM = WeightFormat("int8", 16, zeros=True, zero_dtype="float32")


def rows(count: int) -> QuantizedRows:
    torch.manual_seed(0)
    codes = torch.randint(-128, 128, (count, 64)).to(torch.int8)
    return QuantizedRows(codes, torch.rand(count, 4), torch.randn(count, 4))


def test_pieces_and_rows_in_order() -> None:
    whole = rows(6)
    pieces = [(4, QuantizedRows(*(part[4:] for part in whole))), (0, QuantizedRows(*(part[:4] for part in whole)))]
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    assert torch.equal(dequantize(in_order_of(pieces, order), FORM), dequantize(whole, FORM)[order])


def test_columns_move_with_their_scales() -> None:
    whole, found = rows(3), []
    order = torch.arange(64).view(4, 16)[[2, 0, 3, 1]].flatten()
    in_columns(lambda first, made: found.append((first, made)), order, 16)(7, whole)
    assert found[0][0] == 7
    assert torch.equal(dequantize(found[0][1], FORM), dequantize(whole, FORM)[:, order])
    with pytest.raises(ValueError, match="groups of 32 inputs must lie within a head each"):
        in_columns(lambda first, made: None, order, 32)


def test_rows_of_a_head_whose_inputs_have_an_order() -> None:
    """What adapters that bring a head, or rows of one, are compared with."""
    form = WeightFormat("int8", 16)
    weight = empty_quantized(form, 20, 64, torch.device("cpu"))
    quantize_into(weight, 0, torch.randn(20, 64), form)
    head = Quantized(weight, None, Scheme(form), 20, 64, "float32", order=torch.randperm(64).int())
    torch.testing.assert_close(head.rows(torch.tensor([3, 17])), head.apply(torch.eye(64)).t()[[3, 17]])
