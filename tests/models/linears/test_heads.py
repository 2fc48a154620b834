"""Linear layers of single heads: each computes what the checkpoint's one matrix says, quantised there or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.heads import DenseHeads, HeadRows, PackedHeads
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import Linear, LinearKind, StoredLinear
from compiled_llm.models.linears.published import Published
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat
from tests.models.linears.test_kinds import TensorTake

HEADS, FIRST, OTHERS, INPUTS = 5, 12, 20, 33
NAME = "model.layers.0.self_attn.kv_b_proj"
PART = StoredLinear(NAME, HEADS * (FIRST + OTHERS), INPUTS)


def check(layers: tuple[Linear, Linear], weight: Tensor) -> None:
    """The two layers against torch, of ``weight`` ``[N * (first + others), K]``."""
    by_head = weight.double().view(HEADS, FIRST + OTHERS, INPUTS)
    q, seen = torch.randn(7, HEADS, FIRST + 3)[..., :FIRST], torch.randn(7, HEADS, INPUTS)
    q, seen = q.to(weight.dtype), seen.to(weight.dtype)
    to_inputs, to_outputs = layers
    wanted = torch.einsum("tnk,nkc->tnc", q.double(), by_head[:, :FIRST])
    tolerance = {"atol": 0.1, "rtol": 0.02} if weight.dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
    for where in (None, HeadRows.of(q, HEADS)):
        torch.testing.assert_close(to_inputs.apply(q, where).double(), wanted, **tolerance)
    wanted = torch.einsum("tnc,nvc->tnv", seen.double(), by_head[:, FIRST:])
    torch.testing.assert_close(to_outputs.apply(seen).double(), wanted, **tolerance)
    if isinstance(to_outputs, PackedHeads):
        one = to_outputs.apply(seen)[3:4]
        assert torch.equal(to_outputs.apply(seen[3:4]), one), "a row depends on the others"
    assert (to_inputs.out_features, to_inputs.in_features) == (HEADS * INPUTS, FIRST)
    assert (to_outputs.out_features, to_outputs.in_features) == (HEADS * OTHERS, INPUTS)
    assert to_inputs.nbytes + to_outputs.nbytes == weight.nbytes
    rows = weight.view(HEADS, -1, INPUTS)[:, FIRST:].flatten(0, 1)
    assert torch.equal(to_outputs.rows(torch.tensor([0, 21, 99])), rows[[0, 21, 99]])
    assert all(isinstance(layer, Linear) for layer in layers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Dense, Packed])
def test_both_halves(kind: LinearKind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(PART.out_features, INPUTS).to(dtype)
    check(kind.take_heads(TensorTake({f"{NAME}.weight": weight}), [PART], HEADS, FIRST), weight)


def test_halves_of_a_tensor_each() -> None:
    torch.manual_seed(0)
    weight = torch.randn(PART.out_features, INPUTS)
    by_head = weight.view(HEADS, -1, INPUTS)
    held = {
        "k.weight": by_head[:, :FIRST].transpose(1, 2).reshape(HEADS * INPUTS, FIRST),
        "v.weight": by_head[:, FIRST:].reshape(HEADS * OTHERS, INPUTS),
    }
    parts = [StoredLinear("k", HEADS * INPUTS, FIRST), StoredLinear("v", HEADS * OTHERS, INPUTS)]
    check(Packed.take_heads(TensorTake(held), parts, HEADS, FIRST), weight)


def test_they_are_not_rounded_at_load() -> None:
    weight = torch.randn(PART.out_features, INPUTS)
    kind = Quantizing(Packed, torch.float32, SCHEMES["int4"])
    layers = kind.take_heads(TensorTake({f"{NAME}.weight": weight}), [PART], HEADS, FIRST)
    assert all(isinstance(layer, PackedHeads) for layer in layers)
    check(layers, weight)


class QuantizedTake(TensorTake):
    """Gives ``tensors`` as int8 codes of a scale for each row, in two pieces."""

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return WeightFormat("int8")

    def quantized(self, part: StoredLinear, scheme: Scheme, put: Callable) -> tuple[Tensor | None, Tensor | None]:
        rows = self.tensors[f"{part.name}.weight"]
        scales = torch.full((len(rows), 1), 0.5)
        for start in (40, 0):
            own = slice(start, 40 if start == 0 else None)
            put(start, QuantizedRows((rows[own] * 2).to(torch.int8), scales[own]))
        return None, None


def test_a_quantised_checkpoint_is_decoded() -> None:
    weight = torch.randint(-60, 60, (PART.out_features, INPUTS)) / 2
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    plan = read_quantization({"quantization_config": fields})
    assert plan is not None
    layers = Published(Dense, plan).take_heads(QuantizedTake({f"{NAME}.weight": weight}), [PART], HEADS, FIRST)
    assert all(isinstance(layer, DenseHeads) for layer in layers)
    check(layers, weight)
