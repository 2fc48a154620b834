"""Linear layer on packed weights, for CPUs: packing, reference, schema, registration.

``y = x @ W.T + bias`` in bfloat16, float32 or float16, accumulated in float32 in one order for any number of rows. A
decode step reads every weight once and does little else, so it is as fast as memory can be read. The packed layout has
the weights in the order in which the kernel reads them, word by word:

    packed[n, p, j, i] = W[n * TILE + j, I * p + i]        [ceil(N / TILE), ceil(K / I), TILE, I]

with rows past N and columns past K zero. N out_features, K in_features, TILE = 16 (sums of a 512-bit register), I
inputs of a word: 2 in bfloat16, the pairs that its dot-product instructions take, and else 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import LIBRARY

TILE = 16
WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int32, torch.float16: torch.int16}
"""The dtypes that can be packed, and what has the size of one of their words."""

LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def pack_weight(weight: Tensor) -> Tensor:
    """Pack ``weight`` ``[N, K]`` -> ``[ceil(N / 16), ceil(K / I), 16, I]`` in its dtype, contiguous on the CPU."""
    out_features, in_features = weight.shape
    word = WORDS[weight.dtype]
    inputs = word.itemsize // weight.itemsize
    if out_features % TILE or in_features % inputs:
        weight = F.pad(weight, (0, in_features % inputs, 0, -out_features % TILE))
    words = weight.contiguous().view(word)  # a pair is copied as one number: 10 times as fast
    tiles = words.view(-1, TILE, words.shape[1]).transpose(1, 2)
    packed = tiles.contiguous() if weight.is_meta else native.huge_zeros(tiles.shape, word).copy_(tiles)
    return packed.view(weight.dtype).unflatten(-1, (TILE, inputs))


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[T]`` (int32 or int64) of ``W`` from what ``pack_weight`` made of it: ``[T, K]`` in its dtype.

    In bfloat16 where K is odd, ``[T, K + 1]``: a zero follows each row.
    """
    return packed[rows // TILE, :, rows % TILE].flatten(1)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ W.T + bias`` for a packed ``W``, accumulated in float32 and rounded once.

    Args:
        x: ``[T, K]`` bfloat16, float32 or float16; rows may be strided, the last stride is 1.
        packed: what ``pack_weight`` made of ``W`` ``[N, K]``, in the dtype of ``x``.
        bias: ``[N]`` in that dtype, or None.
        out_features: N.

    Returns:
        ``[T, N]`` in that dtype, contiguous.
    """
    return torch.ops.compiled_llm.packed_linear(x, packed, bias, out_features)


def packed_linear_reference(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The op in plain torch: unpack, multiply in float32, round once."""
    weight = packed.transpose(1, 2).reshape(packed.shape[0] * TILE, -1)[:out_features, : x.shape[1]]
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@torch.library.register_fake("compiled_llm::packed_linear", lib=LIBRARY)
def _fake(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _without_kernels(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """Until linear_cpu.cpp is loaded, which registers its own implementation; or for good, without a compiler."""
    implementation = packed_linear if native.load("linear_cpu") else packed_linear_reference
    return implementation(x, packed, bias, out_features)


LIBRARY.impl("packed_linear", _without_kernels, "CompositeExplicitAutograd")
