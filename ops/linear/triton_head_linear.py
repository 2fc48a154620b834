"""The linear layers of single heads on the GPU: Triton kernel and launch. ``head_linear.py`` says what it computes.

An output is one accumulator over all inputs, in the tiles and with the instructions of ``triton_linear.py``: so its
bits do not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_linear
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, refuse


@triton.jit(do_not_specialize=["num_rows"])
def head_linear_kernel(
    x, weight, out, num_rows, stride_t, stride_n, HEADS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program a tile of a head's outputs. Those with the same outputs of other rows follow each other."""
    num_m = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) // num_m
    head = (tile % HEADS).to(tl.int64)
    rows = (tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tile // HEADS * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    inside_rows, inside_columns = rows < num_rows, columns < OUT
    x_tile = x + head * stride_n + rows[:, None] * stride_t + inner[None, :]
    w_tile = weight + head * (OUT * IN) + columns[:, None] * IN + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = (inner < IN - k)[None, :]
        a = tl.load(x_tile + k, mask=inside_rows[:, None] & inside, other=0.0)
        b = tl.load(w_tile + k, mask=inside_columns[:, None] & inside, other=0.0)
        acc = multiply_add(a, tl.trans(b), acc)
    target = out + (rows * HEADS + head)[:, None] * OUT + columns[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=inside_rows[:, None] & inside_columns[None, :])


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    if x.dim() != 3 or x.stride(2) != 1 or x.dtype not in DTYPES:
        refuse("head_linear", "x", x, "[T, N, K] of float32, bfloat16 or float16 with the last stride 1")
    (rows, heads, in_features), out_features = x.shape, weight.shape[1]
    check_contiguous("head_linear", "weight", weight, (heads, out_features, in_features), x.device, x.dtype)
    out = x.new_empty(rows, heads, out_features)
    tile = triton_linear.row_tile_for(rows, x.itemsize, triton_linear._capability(x.device))
    with torch.cuda.device_of(x):
        head_linear_kernel[(triton.cdiv(rows, tile.m) * heads * triton.cdiv(out_features, tile.n),)](
            x, weight, out, rows, *x.stride()[:2], HEADS=heads, OUT=out_features, IN=in_features,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=triton_linear.BLOCK_K[x.itemsize],
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
    return out
