"""A copy of a layer is what its kind makes of the same weight."""

import pytest
import torch
from torch import Tensor

from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.copied import copied
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind, StoredLinear
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.weights import tensors
from compiled_llm.ops import native

CPU, BF16 = torch.device("cpu"), torch.bfloat16


class OneMatrix:
    """A ``Take`` of one matrix, all of it at once."""

    dtype, device = BF16, CPU

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def rows(self, shapes, put) -> None:  # type: ignore[no-untyped-def]
        put(0, self.weight)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.weight


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("kind", [Dense, Packed, Compressed])
@pytest.mark.parametrize("scheme", ["int8_w8a8", "int4_w4a8"])
def test_a_copy_in_fewer_bits_is_made_of_the_rows_that_the_layer_has(kind: LinearKind, scheme: str) -> None:
    if not kind.serves(CPU, BF16):
        pytest.skip("no kernels for it on this CPU")
    weight = torch.randn(2100, 96, generator=torch.Generator().manual_seed(0)).to(BF16)
    part = StoredLinear("lm_head", 2100, 96, role="head")
    rounds = Quantizing(kind, BF16, None, SCHEMES[scheme])
    layer = kind.take(OneMatrix(weight), [part])  # type: ignore[arg-type]
    expected, found = rounds.take(OneMatrix(weight), [part]), copied(layer, rounds, "head", BF16, CPU)  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(tensors(found), tensors(expected), strict=True))
    x = torch.randn(3, 96).to(BF16)
    assert torch.equal(found.apply(x), expected.apply(x))
    assert found.nbytes < 0.6 * weight.nbytes
