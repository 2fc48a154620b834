"""Linear layer on packed bfloat16 weights, for CPUs: packing, reference, schema, registration.

``y = x @ W.T + bias``. A decode step reads every weight once and does little else, so it is as fast as memory can be
read. The packed layout has the weights in the order in which the kernel reads them, in the pairs that the bfloat16
dot-product instructions take:

    packed[n, p, j, i] = W[n * TILE + j, 2 * p + i]        [ceil(N / TILE), ceil(K / 2), TILE, 2]

with rows past N and columns past K zero. N out_features, K in_features, TILE = 16 (one 512-bit register of pairs).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import LIBRARY

TILE = 16

LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")


def pack_weight(weight: Tensor) -> Tensor:
    """Pack ``weight`` ``[N, K]`` bfloat16 -> ``[ceil(N / 16), ceil(K / 2), 16, 2]`` bfloat16, contiguous on the CPU."""
    out_features, in_features = weight.shape
    if out_features % TILE or in_features % 2:
        weight = F.pad(weight, (0, in_features % 2, 0, -out_features % TILE))
    pairs = weight.contiguous().view(torch.int32)  # a pair is copied as one number: 10 times as fast
    tiles = pairs.view(-1, TILE, pairs.shape[1]).transpose(1, 2)
    packed = tiles.contiguous() if weight.is_meta else native.huge_zeros(tiles.shape, torch.int32).copy_(tiles)
    return packed.view(torch.bfloat16).unflatten(-1, (TILE, 2))


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[T]`` (int32 or int64) of ``W`` from what ``pack_weight`` made of it: ``[T, K]`` bfloat16.

    Where K is odd, ``[T, K + 1]``: a zero follows each row.
    """
    return packed[rows // TILE, :, rows % TILE].flatten(1)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ W.T + bias`` for a packed ``W``, accumulated in float32.

    Args:
        x: ``[T, K]`` bfloat16; rows may be strided, the last stride is 1.
        packed: what ``pack_weight`` made of ``W`` ``[N, K]``.
        bias: ``[N]`` bfloat16, or None.
        out_features: N.

    Returns:
        ``[T, N]`` bfloat16 contiguous.
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
