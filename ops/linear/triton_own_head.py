"""Heads that adapters bring whole, on the GPU: a Triton kernel and its launch. ``own_head.py`` says what is computed.

A program has 16 rows and some tokens, and takes the rows' slots one after the other, so each matrix is read once for
16 rows. A row's sums are its own: over the inputs in steps of one size, by the same instructions whatever rows there
are. Programs without such rows end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast
from compiled_llm.ops.triton_checks import check_rows, refuse

_ROWS, _TOKENS, _INPUTS = 16, 64, 128


@triton.jit(do_not_specialize=["num_rows", "num_slots", "vocab_size"])
def own_head_kernel(
    y, x, slots, weights, present, num_rows, num_slots, vocab_size, stride_y, stride_x,
    IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``y[t] = W[s] x[t]`` for 16 rows and ``BLOCK_N`` tokens."""
    rows = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner, inside_vocab = tl.arange(0, BLOCK_K), tokens < vocab_size
    left = tl.load(slots + rows, mask=rows < num_rows, other=0)
    left = tl.where(left <= num_slots, left, 0)
    slot = tl.max(left, 0)
    while slot > 0:
        own = left == slot
        if tl.load(present + slot - 1) != 0:
            # A matrix of rows of all slots may have more than 2**31 elements.
            of_slot = weights + ((slot - 1).to(tl.int64) * vocab_size + tokens[None, :]) * IN
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for k in range(0, IN, BLOCK_K):
                inside = inner < IN - k
                x_tile = x + rows[:, None] * stride_x + k + inner[None, :]
                of_x = tl.load(x_tile, mask=own[:, None] & inside[None, :], other=0.0)
                w_tile = of_slot + k + inner[:, None]
                of_w = tl.load(w_tile, mask=inside[:, None] & inside_vocab[None, :], other=0.0)
                acc = multiply_add(of_x, of_w, acc)
            target = y + rows[:, None] * stride_y + tokens[None, :]
            tl.store(target, cast(acc, y.dtype.element_ty), mask=own[:, None] & inside_vocab[None, :])
        left = tl.where(own, 0, left)
        slot = tl.max(left, 0)


def own_head(y: Tensor, x: Tensor, slots: Tensor, weights: Tensor, present: Tensor) -> None:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    check_rows("own_head", x)
    if y.dim() != 2 or y.stride(1) != 1 or y.dtype != x.dtype or len(y) != len(x):
        refuse("own_head", "y", y, f"[{len(x)}, V] of {x.dtype} with the last stride 1")
    if slots.dtype != torch.int32 or slots.shape != x.shape[:1] or not slots.is_contiguous():
        refuse("own_head", "slots", slots, f"[{len(x)}] of int32, contiguous")
    whole = (len(weights), y.shape[1], x.shape[1])
    if weights.shape != whole or weights.dtype != x.dtype or not weights.is_contiguous():
        refuse("own_head", "weights", weights, f"[S, {whole[1]}, {whole[2]}] of {x.dtype}, contiguous")
    if present.dtype != torch.int32 or present.shape != weights.shape[:1] or not present.is_contiguous():
        refuse("own_head", "present", present, f"[{len(weights)}] of int32, contiguous")
    if not len(x):
        return
    grid = triton.cdiv(y.shape[1], _TOKENS), triton.cdiv(len(x), _ROWS)
    with torch.cuda.device_of(x):
        own_head_kernel[grid](
            y, x, slots, weights, present, len(x), len(weights), y.shape[1], y.stride(0), x.stride(0), IN=x.shape[1],
            BLOCK_M=_ROWS, BLOCK_N=_TOKENS, BLOCK_K=_INPUTS, num_warps=4, num_stages=3,
            enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
