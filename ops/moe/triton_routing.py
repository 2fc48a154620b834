"""The sum of what a token's experts give, on the GPU: Triton kernel and launch. ``routing.py`` says what it computes.

One launch, whose grid follows from shapes alone. A program adds up a piece of a token's row in the order of its
experts, and fuses no product with a sum: so it has the bits of the plain version.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import cast

_PIECE = 1024  # elements of a program


@triton.jit
def weighted_sum_kernel(y, places, weights, out, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A program for ``BLOCK`` elements of a token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        place = tl.load(places + token * TOP_K + j)
        weight = tl.load(weights + token * TOP_K + j)
        row = tl.load(y + tl.maximum(place, 0).to(tl.int64) * SIZE + i, mask=i < SIZE, other=0.0)
        total += tl.where(place >= 0, weight * row.to(tl.float32), 0.0)
    tl.store(out + token * SIZE + i, cast(total, out.dtype.element_ty), mask=i < SIZE)


def weighted_sum(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises."""
    assert y.dim() == 2, "rows of what the experts gave"
    assert places.shape == weights.shape, "a weight for each place"
    assert places.dtype == torch.int32, "of the rows in y"
    assert weights.dtype == torch.float32, "as route gives them"
    assert all(tensor.is_contiguous() for tensor in (y, places, weights)), "as the ops give them"
    tokens, top_k = places.shape
    out = y.new_empty(tokens, y.shape[1])
    if not out.numel():
        return out
    block = min(_PIECE, triton.next_power_of_2(y.shape[1]))
    with torch.cuda.device_of(y):
        weighted_sum_kernel[(tokens, triton.cdiv(y.shape[1], block))](
            y, places, weights, out, TOP_K=top_k, SIZE=y.shape[1], BLOCK=block,
            num_warps=min(8, max(1, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
    return out
