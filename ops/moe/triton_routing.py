"""The sum of what a token's experts give, on the GPU: Triton kernel and launch. ``routing.py`` says what it computes.

One launch, whose grid follows from shapes alone. A program adds up a piece of a token's row in the order of its
experts, and fuses no product with a sum: so it has the bits of the plain version.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import cast, rounded

_PIECE = 1024  # elements of a program


@triton.jit
def _term(y, places, weights, tokens, inside, columns, j, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    """What the j-th experts of ``tokens`` give there, weighted; 0 for padding."""
    choice = tokens.to(tl.int64) * TOP_K + j
    place = tl.load(places + choice, mask=inside, other=-1)
    weight = tl.load(weights + choice, mask=inside, other=0.0)
    real = (place >= 0)[:, None] & (columns < SIZE)[None, :]
    # From the L2 cache: that of this SM may have older bytes, where the rows were written by the same launch.
    row = tl.load(
        y + tl.maximum(place, 0).to(tl.int64)[:, None] * SIZE + columns[None, :],
        mask=real, other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    return tl.where(real, weight[:, None] * row.to(tl.float32), 0.0)


@triton.jit
def store_sums(
    y, places, weights, beside, residual, out, tokens, inside, columns, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    UNROLLED: tl.constexpr,
):  # fmt: skip
    """What the experts of ``tokens`` give in ``columns``, in the order of their choice, and what is added to it.

    UNROLLED: many rows are loaded at once, for a program that nothing else runs beside.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([tokens.shape[0], columns.shape[0]], tl.float32)
    if UNROLLED:
        for j in tl.static_range(TOP_K):
            total += _term(y, places, weights, tokens, inside, columns, j, TOP_K, SIZE)
    else:
        for j in range(TOP_K):
            total += _term(y, places, weights, tokens, inside, columns, j, TOP_K, SIZE)
    target = tokens.to(tl.int64)[:, None] * SIZE + columns[None, :]
    mask = inside[:, None] & (columns < SIZE)[None, :]
    if beside is not None:
        total = rounded(total, dtype) + tl.load(beside + target, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        total = rounded(total, dtype) + tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, cast(total, dtype), mask=mask)


@triton.jit
def weighted_sum_kernel(
    y, places, weights, beside, residual, out, TOP_K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for ``BLOCK`` elements of a token."""
    token = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    store_sums(y, places, weights, beside, residual, out, token, token >= 0, columns, TOP_K, SIZE, False)


def weighted_sum(
    y: Tensor, places: Tensor, weights: Tensor, beside: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The ops ``weighted_sum`` and ``weighted_sum_added`` on CUDA tensors.

    On CPU tensors under Triton's interpreter. Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    assert y.dim() == 2, "rows of what the experts gave"
    assert y.is_contiguous(), "as the ops give them"
    check_sum(y, places, weights, beside, residual, y.shape[1])
    tokens, top_k = places.shape
    out = y.new_empty(tokens, y.shape[1])
    if not out.numel():
        return out
    block = min(_PIECE, triton.next_power_of_2(y.shape[1]))
    with torch.cuda.device_of(y):
        weighted_sum_kernel[(tokens, triton.cdiv(y.shape[1], block))](
            y, places, weights, beside, residual, out, TOP_K=top_k, SIZE=y.shape[1], BLOCK=block,
            num_warps=min(8, max(1, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def check_sum(
    y: Tensor, places: Tensor, weights: Tensor, beside: Tensor | None, residual: Tensor | None, size: int
) -> None:
    """Of a sum of tokens' experts, whose rows are of the dtype of ``y``."""
    assert places.shape == weights.shape, "a weight for each place"
    assert places.dtype == torch.int32, "of the rows in y"
    assert weights.dtype == torch.float32, "as route gives them"
    assert all(tensor.is_contiguous() for tensor in (places, weights)), "as the ops give them"
    for name, added in (("beside", beside), ("residual", residual)):
        fits = added is None or (added.shape == (len(places), size) and added.is_contiguous())
        if added is not None and not (fits and (added.dtype, added.device) == (y.dtype, y.device)):
            raise ValueError(
                f"sum of experts: {name} must be a contiguous {[len(places), size]} of {y.dtype} on {y.device}, got "
                f"{list(added.shape)} of {added.dtype} on {added.device}"
            )
