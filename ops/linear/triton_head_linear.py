"""The linear layers of single heads on the GPU: Triton kernel and launch. ``head_linear.py`` says what it computes.

An output is one accumulator over all inputs, in the tiles and with the instructions of ``triton_linear.py``: so its
bits do not depend on the number of rows.

What adapters change is in the launch, as in ``triton_adapted.py``: its first programs are those of ``triton_lora.py``
that shrink, and the others expand what they have stored, some rows at a time, with the bits of that launch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_linear
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS, changed, check_lora, note_expanded, wait_for_programs
from compiled_llm.ops.linear.triton_lora import ROWS, rows_of_a_piece, rows_together, shrink_rows, shrinking_tile
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.rowwise.triton_kernels import cast
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, refuse


@triton.jit(do_not_specialize=["num_rows", "before", "share"])
def head_linear_kernel(
    x, weight, out, num_rows, stride_t, stride_n,
    slots, lora_a, lora_b, ranks, scales, starts, flags, shrunk, before, share,
    HEADS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RANK: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_R: tl.constexpr, SHRINK_K: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A program a tile of a head's outputs. Those with the same outputs of other rows follow each other.

    With ``slots`` there are ``before`` programs that shrink, before the others.
    """
    number = tl.program_id(0)
    if slots is not None and number < before:
        shrink_rows(
            number, x, slots, None, None, lora_a, ranks, scales, shrunk, num_rows * HEADS, num_rows, share,
            stride_t, stride_n, IN, 1, RANK, HEADS, 1, True, SHRINK_M, SHRINK_R, SHRINK_K,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have stored before one of them counts
        tl.atomic_add(flags, 1, sem="release", scope="gpu")
        return
    number -= before
    num_m = tl.cdiv(num_rows, BLOCK_M)
    tile = number // num_m
    head = (tile % HEADS).to(tl.int64)
    first_row = number % num_m * BLOCK_M
    rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
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
    if slots is not None:
        tl.debug_barrier()  # all threads have stored before one of them loads it again
        wait_for_programs(flags, before)
        for first in range(first_row, tl.minimum(first_row + BLOCK_M, num_rows), PIECE):
            row = (first + tl.arange(0, PIECE)).to(tl.int64)
            slot = tl.load(slots + row, mask=row < num_rows, other=0)
            if tl.max(slot, 0) > 0:
                has_slot = slot > 0
                of_head = tl.where(has_slot, (slot - 1) * HEADS + head, -1)
                y_rows, of_shrunk = out + (row * HEADS + head) * OUT, head * num_rows + row
                sums = changed(
                    y_rows, has_slot, of_head, lora_b, ranks, starts, shrunk, columns, of_shrunk, OUT, 1, RANK, False
                )  # fmt: skip
                mask = has_slot[:, None] & inside_columns[None, :]
                tl.store(y_rows[:, None] + columns[None, :], cast(sums, out.dtype.element_ty), mask=mask)
        note_expanded(flags, tl.num_programs(0) - before)


def head_linear(x: Tensor, weight: Tensor, lora: Sequence[Tensor] = ()) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; float32 with adapters.
    """
    op = "head_linear"
    if x.dim() != 3 or x.stride(2) != 1 or x.dtype not in DTYPES:
        refuse(op, "x", x, "[T, N, K] of float32, bfloat16 or float16 with the last stride 1")
    (rows, heads, in_features), out_features = x.shape, weight.shape[1]
    check_contiguous(op, "weight", weight, (heads, out_features, in_features), x.device, x.dtype)
    tile = triton_linear.row_tile_for(rows, x.itemsize, triton_linear._capability(x.device))
    adapters: tuple[Tensor | None, ...] = (None,) * 8
    before = share = 0
    constants = {"RANK": 0, "SHRINK_M": 0, "SHRINK_R": 0, "SHRINK_K": 0, "PIECE": 0}
    if lora:
        slots, a, b, ranks, scales, starts, flags = lora
        if x.dtype == torch.float32:  # in which products and sums are fused here, not there
            raise ValueError(f"{op}: with adapters x must be of 16 bits, got {x.dtype}")
        if a.dim() != 4 or a.shape[1] != 1 or len(a) % heads:
            refuse(op, "a", a, f"[S * {heads}, 1, R, {in_features}]")
        check_lora(op, x, a, b, ranks, scales, starts)
        check_contiguous(op, "b", b, (len(a), triton.cdiv(out_features, ROWS), a.shape[2], ROWS), x.device, x.dtype)
        check_contiguous(op, "slots", slots, (rows,), x.device, torch.int32)
        check_contiguous(op, "flags", flags, (NUM_FLAGS,), x.device, torch.int32)
        shrunk = torch.empty(rows * heads, a.shape[2], dtype=torch.float32, device=x.device)
        adapters, share = (slots, a, b, ranks, scales, starts, flags, shrunk), rows_together(rows * heads)
        before = triton.cdiv(rows * heads, share)
        names = {"BLOCK_R": "SHRINK_R", "BLOCK_K": "SHRINK_K"}
        stage_bytes = (tile.m + tile.n) * triton_linear.BLOCK_K[x.itemsize] * x.itemsize
        of_a = {names[name]: value for name, value in shrinking_tile(a.shape[2], stage_bytes).items()}
        constants = {"RANK": a.shape[2], "SHRINK_M": ROWS, "PIECE": rows_of_a_piece(tile.warps, tile.n), **of_a}
    out = x.new_empty(rows, heads, out_features)
    tiles = triton.cdiv(rows, tile.m) * heads * triton.cdiv(out_features, tile.n)
    with torch.cuda.device_of(x):
        head_linear_kernel[(before + tiles,)](
            x, weight, out, rows, *x.stride()[:2], *adapters, before, share,
            HEADS=heads, OUT=out_features, IN=in_features,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=triton_linear.BLOCK_K[x.itemsize], **constants,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
    return out
