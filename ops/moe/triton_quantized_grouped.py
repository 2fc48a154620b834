"""The experts' linear layers on quantised weights on the GPU: Triton kernels, and the launches.

Which tile of which expert a program computes is found as in ``triton_grouped.py``: the grid follows from the shapes. An
output is added up as in ``triton_quantized.py`` and ``triton_quantized_a8.py``, so it has the bits of a single layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_quantize_rows, triton_quantized, triton_quantized_a8
from compiled_llm.ops.linear.quantized_tiles import Choice
from compiled_llm.ops.linear.quantized_weight import BITS
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes
from compiled_llm.ops.linear.triton_int8_scaling import finished, load_columns
from compiled_llm.ops.rowwise.triton_kernels import cast


@triton.jit
def _own_rows(rows, starts, place, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the tile at ``place``: its expert, the rows it writes, those of x it reads, and which of them there are.

    The expert is EXPERTS where no tile is left.
    """
    experts = tl.arange(0, EXPERTS_POW2)
    first = tl.load(starts + experts, mask=experts < EXPERTS, other=0)
    count = tl.load(starts + experts + 1, mask=experts < EXPERTS, other=0) - first
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= place).to(tl.int32), 0)  # whose tiles end after this place
    own = experts == expert
    row = tl.sum(tl.where(own, first + (place - (ends - tiles)) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(own, first + count, 0), 0)
    targets = row + tl.arange(0, BLOCK_M)
    inside = targets < end  # none where no tile is left
    sources = targets
    if rows is not None:
        sources = tl.load(rows + targets, mask=inside, other=0)
    return tl.minimum(expert, EXPERTS), targets.to(tl.int64), sources.to(tl.int64), inside


@triton.jit
def _of_expert(tensor, expert, SIZE: tl.constexpr):
    """Where the matrix of an expert begins; None for None."""
    if tensor is None:
        return None
    else:
        return tensor + expert * SIZE


@triton.jit
def grouped_kernel(
    x, codes, scales, zeros, bias, rows, starts, out, x_stride, NUM_M: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, GROUPS: tl.constexpr,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ROW_BYTES: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    found, targets, sources, inside = _own_rows(
        rows, starts, tl.program_id(0) % NUM_M, EXPERTS, EXPERTS_POW2, BLOCK_M
    )  # fmt: skip
    if found < EXPERTS:
        expert = found.to(tl.int64)
        columns = tl.program_id(0) // NUM_M * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = triton_quantized.tile_sums(
            x + sources * x_stride, inside, codes + expert * OUT * ROW_BYTES,
            _of_expert(scales, expert, GROUPS * OUT), _of_expert(zeros, expert, GROUPS * OUT), columns,
            ELEMENT, GROUP, OUT, IN, ROW_BYTES, PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if bias is not None:
            acc += load_columns(bias, expert * OUT + columns, columns < OUT)[:, None]
        tl.store(
            out + targets[:, None] * OUT + columns[None, :],
            cast(tl.trans(acc), out.dtype.element_ty),
            mask=inside[:, None] & (columns < OUT)[None, :],
        )


@triton.jit
def grouped_a8_kernel(
    x, x_scales, x_sums, codes, scales, zeros, bias, rows, starts, out, NUM_M: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, GROUPS: tl.constexpr,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PADDED: tl.constexpr,
    ROW_BYTES: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As ``grouped_kernel``, of int8 activations."""
    found, targets, sources, inside = _own_rows(
        rows, starts, tl.program_id(0) % NUM_M, EXPERTS, EXPERTS_POW2, BLOCK_M
    )  # fmt: skip
    if found < EXPERTS:
        expert = found.to(tl.int64)
        columns = tl.program_id(0) // NUM_M * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = triton_quantized_a8.tile_sums(
            x, x_sums, sources, inside, codes + expert * OUT * ROW_BYTES,
            _of_expert(scales, expert, GROUPS * OUT), _of_expert(zeros, expert, GROUPS * OUT), columns,
            ELEMENT, GROUP, OUT, IN, PADDED, ROW_BYTES, PART, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        x_scale = tl.load(x_scales + sources, mask=inside, other=0.0)
        acc = finished(acc, x_scale, load_columns(bias, expert * OUT + columns, columns < OUT))
        tl.store(
            out + targets[:, None] * OUT + columns[None, :],
            cast(tl.trans(acc), out.dtype.element_ty),
            mask=inside[:, None] & (columns < OUT)[None, :],
        )


def grouped_quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: Tensor | None,
    starts: Tensor, element: str, group_size: int, out_features: int, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Weights as ``quantized_weight_gpu.py`` packs them. ``choice`` replaces this GPU's for the layer.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; a group size that the GPU kernels lack.
    """
    name = "grouped_quantized_linear"
    _check(name, x, codes, scales, zeros, bias, rows, starts, element, group_size, out_features)
    experts, count = len(codes), x.shape[0] if rows is None else rows.shape[0]
    x = triton_quantized.aligned(x)
    out = x.new_empty(count, out_features)
    if not out.numel():
        return out
    # Twice the average, so that an expert with some more rows still has one tile.
    form = zeros is not None, element, group_size, out_features
    per_expert = -(-2 * count // experts)
    tile = (choice or triton_quantized.choice_for(per_expert, x, *form, experts=experts)).tile
    assert tile is not None, "experts are multiplied by Triton"
    num_m = min(count, count // tile.m + experts)
    with torch.cuda.device_of(x):
        grouped_kernel[(num_m * triton.cdiv(out_features, tile.n),)](
            x, codes, scales, zeros, bias, rows, starts, out, x.stride(0) if x.shape[0] > 1 else x.shape[1],
            NUM_M=num_m, EXPERTS=experts, EXPERTS_POW2=triton.next_power_of_2(experts), GROUPS=scales.shape[1],
            ELEMENT=element, GROUP=group_size, OUT=out_features, IN=x.shape[1], ROW_BYTES=codes.shape[-1],
            PART=block_bytes(BITS[element], group_size), BLOCK_M=tile.m, BLOCK_N=tile.n,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
    return out


def grouped_quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    rows: Tensor | None, starts: Tensor, element: str, group_size: int, out_features: int,
    choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """As ``grouped_quantized_linear``, of int8 activations. A token's row is quantised once, for all of its experts."""
    name = "grouped_quantized_linear_a8"
    _check(name, x, codes, scales, zeros, bias, rows, starts, element, group_size, out_features)
    triton_quantized_a8.check_a8(name, x, x_scale, element)
    experts, count = len(codes), x.shape[0] if rows is None else rows.shape[0]
    out = x.new_empty(count, out_features)
    if not out.numel():
        return out
    quantized, x_scales, x_sums = triton_quantize_rows.quantize_rows(x, x_scale, group_size, zeros is not None)
    form = zeros is not None, element, group_size, out_features
    per_expert = -(-2 * count // experts)
    own = choice or triton_quantized.choice_for(per_expert, x, *form, int8_activations=True, experts=experts)
    tile = own.tile
    assert tile is not None, "experts are multiplied by Triton"
    num_m = min(count, count // tile.m + experts)
    with torch.cuda.device_of(x):
        grouped_a8_kernel[(num_m * triton.cdiv(out_features, tile.n),)](
            quantized, x_scales, x_sums, codes, scales, zeros, bias, rows, starts, out,
            NUM_M=num_m, EXPERTS=experts, EXPERTS_POW2=triton.next_power_of_2(experts), GROUPS=scales.shape[1],
            ELEMENT=element, GROUP=group_size, OUT=out_features, IN=x.shape[1], PADDED=quantized.shape[1],
            ROW_BYTES=codes.shape[-1], PART=block_bytes(BITS[element], group_size), BLOCK_M=tile.m, BLOCK_N=tile.n,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _check(
    name: str, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    rows: Tensor | None, starts: Tensor, element: str, group_size: int, out_features: int,
) -> None:  # fmt: skip
    triton_quantized.check(
        name, x, codes, scales, zeros, bias, element, group_size, out_features, (codes.shape[0],)
    )  # fmt: skip
    shapes = {"rows": (rows, None if rows is None else rows.shape[:1]), "starts": (starts, (len(codes) + 1,))}
    for what, (given, shape) in shapes.items():
        if given is not None and (
            tuple(given.shape) != tuple(shape or ())
            or (given.dtype, given.device) != (torch.int32, x.device)
            or not given.is_contiguous()
        ):
            raise ValueError(
                f"{name}: {what} must be a contiguous {list(shape or ())} of torch.int32 on {x.device}, got "
                f"{list(given.shape)} of {given.dtype} on {given.device}"
            )
