"""The experts' linear layers on the GPU: Triton kernel and launch. ``grouped_linear.py`` says what it computes.

The grid is fixed by the shapes, so the launch needs no look at which expert has how many rows, and may be part of a
CUDA graph. A program computes one tile of rows of one expert; it finds which from ``starts``. Experts share no tiles,
so there are at most ``R / m + E`` of them, of m rows each; the programs that are left over end at once.

An output is one accumulator over all inputs, in the tiles and with the instructions of ``triton_linear.py``: so its
bits do not depend on the rows that its expert has besides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_linear
from compiled_llm.ops.linear.triton_linear import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes


@triton.jit
def grouped_kernel(
    x, weight, bias, rows, starts, out, x_stride, NUM_M: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    place = tl.program_id(0) % NUM_M
    experts = tl.arange(0, EXPERTS_POW2)
    first = tl.load(starts + experts, mask=experts < EXPERTS, other=0)
    count = tl.load(starts + experts + 1, mask=experts < EXPERTS, other=0) - first
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= place).to(tl.int32), 0)  # whose tiles end after this place
    if expert < EXPERTS:
        own = experts == expert
        row = tl.sum(tl.where(own, first + (place - (ends - tiles)) * BLOCK_M, 0), 0)
        end = tl.sum(tl.where(own, first + count, 0), 0)
        targets = row + tl.arange(0, BLOCK_M)
        inside_rows = targets < end
        sources = targets
        if rows is not None:
            sources = tl.load(rows + targets, mask=inside_rows, other=0)
        columns = (tl.program_id(0) // NUM_M * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        inner = tl.arange(0, BLOCK_K)
        x_tile = x + sources.to(tl.int64)[:, None] * x_stride + inner[None, :]
        w_tile = weight + expert.to(tl.int64) * OUT * IN + columns[:, None] * IN + inner[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, IN, BLOCK_K):
            inside = (inner < IN - k)[None, :]
            a = tl.load(x_tile + k, mask=inside_rows[:, None] & inside, other=0.0)
            b = tl.load(w_tile + k, mask=(columns < OUT)[:, None] & inside, other=0.0)
            acc = multiply_add(a, tl.trans(b), acc)
        if bias is not None:
            acc += tl.load(bias + expert * OUT + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + targets.to(tl.int64)[:, None] * OUT + columns[None, :],
            cast(acc, out.dtype.element_ty),
            mask=inside_rows[:, None] & (columns < OUT)[None, :],
        )


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    _check(x, weight, bias, rows, starts)
    experts, out_features, in_features = weight.shape
    count = x.shape[0] if rows is None else rows.shape[0]
    if x.data_ptr() % _ALIGNMENT or (x.shape[0] > 1 and x.stride(0) * x.itemsize % _ALIGNMENT):
        x = x.clone(memory_format=torch.contiguous_format)
    out = x.new_empty(count, out_features)
    if not out.numel():
        return out
    # Twice the average, so that an expert with some more rows still has one tile.
    tile = triton_linear.tile_for(
        -(-2 * count // experts), x.itemsize, triton_linear._capability(x.device), outputs_first=False
    )
    num_m = min(count, count // tile.m + experts)
    with torch.cuda.device_of(x):
        grouped_kernel[(num_m * triton.cdiv(out_features, tile.n),)](
            x, weight, bias, rows, starts, out, x.stride(0) if x.shape[0] > 1 else in_features, NUM_M=num_m,
            EXPERTS=experts, EXPERTS_POW2=triton.next_power_of_2(experts), OUT=out_features, IN=in_features,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=triton_linear._BLOCK_K[x.itemsize],
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor) -> None:
    def refuse(name: str, allowed: str, given: Tensor) -> None:
        raise ValueError(
            f"grouped_linear: {name} must be {allowed}, got {list(given.shape)} of {given.dtype} with strides "
            f"{list(given.stride())} on {given.device}"
        )

    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] != 1) or x.dtype not in _DTYPES:
        refuse("x", "[T, K] of float32, bfloat16 or float16 with the last stride 1", x)
    like = (x.dtype, x.device)
    if weight.dim() != 3 or weight.shape[2] != x.shape[1] or not weight.numel() or not weight.is_contiguous():
        refuse("weight", f"a contiguous [E, N, {x.shape[1]}]", weight)
    expected = {
        "weight": (weight, weight.shape, like),
        "bias": (bias, weight.shape[:2], like),
        "rows": (rows, None if rows is None else rows.shape[:1], (torch.int32, x.device)),
        "starts": (starts, (len(weight) + 1,), (torch.int32, x.device)),
    }
    for name, (given, shape, kind) in expected.items():
        if given is None:
            continue
        if tuple(given.shape) != tuple(shape or ()) or (given.dtype, given.device) != kind or not given.is_contiguous():
            refuse(name, f"a contiguous {list(shape or ())} of {kind[0]} on {kind[1]}", given)
