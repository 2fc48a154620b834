"""Linear layers of int8 activations on quantised weights on the GPU: the Triton kernel, and the launches.

Up to ``FEW_ROWS`` rows it is one launch, whose programs each norm and quantise all of x as they go: some passes over
it, for which they have time while they wait for weights. Above it is two. The first norms and quantises x, a program a
row (``triton_quantize_rows.py``). The second multiplies int8 by int8 into int32; where the GPU's file of tiles says
"int_mm", and neither activation nor residual follows, torch does, and a third launch scales. A row's bits do not depend
on its batch: sums of integers are exact in any order, and sums of groups are added in float32 in their order.

    y = sum_g scale[n, g] * (sum_k code * xq - zero[n, g] * sum_k xq) * sx + bias

Zero points are taken off sums, so that they may be any number; the sums of xq are made with xq.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.quantized_tiles import INT8, Choice
from compiled_llm.ops.linear.quantized_weight import BITS
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_adapted import MOST_ROWS, adapters_of, expand, note_expanded, shrink
from compiled_llm.ops.linear.triton_int8_scaling import finished, load_columns, scale_sums, scaled
from compiled_llm.ops.linear.triton_multiply import INTERPRET
from compiled_llm.ops.linear.triton_quantize_rows import (
    codes_of_rows,
    group_scales_of_rows,
    quantize_rows,
    scales_of_rows,
)
from compiled_llm.ops.linear.triton_quantized import aligned, check, choice_for
from compiled_llm.ops.linear.triton_surroundings import columns_of, inverse_rms_of_rows, outputs_of, store_outputs
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.torch_private import int_mm
from compiled_llm.ops.triton_programmatic import prefetch_rows, wait_for_launches_before

FEW_ROWS = 8  # that each program quantises by itself


@triton.jit
def _part_sums(sums, x, codes, ELEMENT: tl.constexpr):
    """``sums`` and the products of weights ``codes`` ``[N, K]`` and ``x`` ``[M, K]``, int32."""
    weights = codes.to(tl.int8, bitcast=True)
    if ELEMENT == "int4":
        weights -= 8
    if INTERPRET:
        return sums + tl.sum(weights.to(tl.int32)[:, :, None] * tl.trans(x).to(tl.int32)[None, :, :], 1)
    else:
        return tl.dot(weights, tl.trans(x), sums, out_dtype=tl.int32)


@triton.jit
def _sums_of_x(made, x_sums, zeros, group, rows, inside_rows, COUNT: tl.constexpr):
    """The sums of xq of a group, ``[M]`` int32: ``made`` here, or in memory; None where no zero point asks for them."""
    if zeros is None:
        return  # see load_columns
    elif x_sums is None:
        return made
    else:
        return tl.load(x_sums + rows * COUNT + group, mask=inside_rows, other=0)


@triton.jit
def _x_codes(x_rows, inside_rows, x_scales, norm, inverse, places, IN: tl.constexpr):
    """xq ``[M, K]``: from memory, or where ``x_scales`` are given from x itself."""
    if x_scales is None:
        return tl.load(x_rows[:, None] + places[None, :], mask=inside_rows[:, None], other=0)
    else:
        return codes_of_rows(x_rows, inside_rows, x_scales, norm, inverse, places, IN)


@triton.jit
def _group_scales(
    x_rows, inside_rows, x_scales, of_groups, rows, norm, inverse, group, GROUP: tl.constexpr, IN: tl.constexpr,
    COUNT: tl.constexpr, BY_GROUPS: tl.constexpr,
):  # fmt: skip
    """sx of a group, ``[M]``: ``by_groups`` from memory or of x itself; else ``x_scales``, which may be None."""
    if not BY_GROUPS:
        return x_scales
    elif of_groups is None:
        return group_scales_of_rows(x_rows, inside_rows, norm, inverse, group, GROUP, IN)
    else:
        return tl.load(of_groups + rows * COUNT + group, mask=inside_rows & (rows * 0 + group < COUNT), other=0.0)


@triton.jit
def tile_sums(
    x, x_sums, rows, inside_rows, codes, scales, zeros, columns,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, X_STRIDE,
    ROW_BYTES: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    x_scales=None, norm=None, inverse=None, of_groups=None, BY_GROUPS: tl.constexpr = False,
):  # fmt: skip
    """``W x.T`` of a tile, but for the scales of x: ``[BLOCK_N, BLOCK_M]`` float32. ``rows`` are those of x.

    ``x`` has codes, and ``x_sums`` their sums; or, with ``x_scales`` ``[M]``, numbers that are quantised here, after
    their norm if there is one. BY_GROUPS: each group has scales of its own, which are multiplied here; those of codes
    are in ``of_groups``.
    """
    HALVES: tl.constexpr = 2 if ELEMENT == "int4" else 1
    COUNT: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    inner = tl.arange(0, PART)
    inside = columns < OUT
    code_tile = codes + columns.to(tl.int64)[:, None] * ROW_BYTES + inner[None, :]
    x_rows = x + rows * X_STRIDE
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    whole = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    made = tl.zeros([BLOCK_M], tl.int32)
    for place in range(0, ROW_BYTES, PART):
        k = place * HALVES
        packed = tl.load(code_tile + place, mask=inside[:, None], other=0)
        lower = packed & 15 if HALVES == 2 else packed
        sums = whole if GROUP == 0 else tl.zeros_like(whole)
        sx = x_scales
        if GROUP > 0:
            sx = _group_scales(
                x_rows, inside_rows, x_scales, of_groups, rows, norm, inverse, k // GROUP, GROUP, IN, COUNT, BY_GROUPS
            )  # fmt: skip
        xq = _x_codes(x_rows, inside_rows, None if x_scales is None else sx, norm, inverse, k + inner, IN)
        if zeros is not None and x_scales is not None:
            made = tl.sum(xq.to(tl.int32), 1) + (made if GROUP == 0 else 0)
        sums = _part_sums(sums, xq, lower, ELEMENT)
        if HALVES == 2:
            if GROUP == PART:
                scale = load_columns(scales, k // GROUP * OUT + columns, inside)
                zero = load_columns(zeros, k // GROUP * OUT + columns, inside)
                of_x = _sums_of_x(made, x_sums, zeros, k // GROUP, rows, inside_rows, COUNT)
                acc = scaled(sums, acc, scale, zero, of_x, sx if BY_GROUPS else None)
                sums = tl.zeros_like(whole)
                made = tl.zeros_like(made)
            k += PART
            if GROUP == PART:
                sx = _group_scales(
                    x_rows, inside_rows, x_scales, of_groups, rows, norm, inverse, k // GROUP, GROUP, IN, COUNT,
                    BY_GROUPS,
                )  # fmt: skip
            xq = _x_codes(x_rows, inside_rows, None if x_scales is None else sx, norm, inverse, k + inner, IN)
            if zeros is not None and x_scales is not None:
                made += tl.sum(xq.to(tl.int32), 1)
            sums = _part_sums(sums, xq, packed >> 4, ELEMENT)
        if GROUP == 0:
            whole = sums
        else:
            start = k // GROUP * GROUP  # past all inputs where they end in the lower half
            own = inside & (tl.zeros_like(columns) + start < IN)
            scale = load_columns(scales, k // GROUP * OUT + columns, own)
            zero = load_columns(zeros, k // GROUP * OUT + columns, own)
            own_rows = inside_rows & (tl.zeros_like(rows) + start < IN)
            of_x = _sums_of_x(made, x_sums, zeros, k // GROUP, rows, own_rows, COUNT)
            acc = scaled(sums, acc, scale, zero, of_x, sx if BY_GROUPS else None)
    if GROUP == 0:
        scale = load_columns(scales, columns, inside)
        zero = load_columns(zeros, columns, inside)
        acc = scaled(whole, acc, scale, zero, _sums_of_x(made, x_sums, zeros, 0, rows, inside_rows, COUNT))
    return acc


@triton.jit(do_not_specialize=["num_rows", "before"])
def quantized_linear_a8_kernel(
    x, x_scale, x_scales, x_sums, codes, scales, zeros, bias, norm, beside, residual, out, num_rows, x_stride,
    beside_stride, residual_stride, eps, given, given_stride, given_norm,
    slots, lora_a, lora_b, ranks, lora_scales, starts, flags, shrunk, before,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ROW_BYTES: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_GROUPS: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights.

    ``x`` has codes and ``x_scales`` their scales; or x is quantised here, which ``x_scale`` and ``norm`` are for.
    With ``slots`` there are ``before`` programs that shrink x as it was ``given``, before the others.
    """
    WIDE: tl.constexpr = 2 * OUT if GATED else OUT
    num_m = tl.cdiv(num_rows, BLOCK_M)
    number = tl.program_id(0)
    if slots is not None:
        number = tl.maximum(number - before, 0)
    rows = (number % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    tile = number // num_m
    columns = columns_of(tile, OUT, GATED, BLOCK_N)
    if PROGRAMMATIC:
        prefetch_rows(codes + tl.minimum(columns, WIDE - 1).to(tl.int64) * ROW_BYTES, ROW_BYTES, BLOCK_N)
        wait_for_launches_before()
    if slots is not None and tl.program_id(0) < before:
        shrink(
            given, given_stride, num_rows, given_norm, eps, slots, lora_a, lora_b, ranks, lora_scales, starts,
            flags, shrunk, IN, PARTS, RANK, SHRINK_M, SHRINK_K, PROGRAMMATIC,
        )  # fmt: skip
        return
    inside_rows = rows < num_rows
    of_rows = tl.full([BLOCK_M], 1.0, tl.float32)  # the scales of groups are multiplied with these
    if x_scales is not None:
        if not BY_GROUPS:
            of_rows = tl.load(x_scales + rows, mask=inside_rows, other=0.0)
        acc = tile_sums(
            x, x_sums, rows, inside_rows, codes, scales, zeros, columns, ELEMENT, GROUP, WIDE, IN, x_stride, ROW_BYTES,
            PART, BLOCK_M, BLOCK_N, of_groups=x_scales, BY_GROUPS=BY_GROUPS,
        )  # fmt: skip
    else:
        x_rows = x + rows * x_stride
        inverse = None
        if norm is not None:
            inverse = inverse_rms_of_rows(x_rows, inside_rows, eps, IN, BLOCK_M)
        if not BY_GROUPS:
            of_rows = scales_of_rows(x_rows, inside_rows, x_scale, norm, inverse, IN, BLOCK_M)
        acc = tile_sums(
            x, None, rows, inside_rows, codes, scales, zeros, columns, ELEMENT, GROUP, WIDE, IN, x_stride, ROW_BYTES,
            PART, BLOCK_M, BLOCK_N, of_rows, norm, inverse, BY_GROUPS=BY_GROUPS,
        )  # fmt: skip
    acc = finished(acc, of_rows, load_columns(bias, columns, columns < WIDE))
    changes = None
    if slots is not None:
        changes = expand(
            slots, lora_b, ranks, starts, flags, shrunk, before, columns, rows, inside_rows, WIDE, PARTS, RANK
        )  # fmt: skip
    store_outputs(
        acc, None, beside, residual, out, tile, columns, rows, inside_rows, beside_stride, residual_stride,
        OUT, ACTIVATION, GATED, MULTIPLIER, BLOCK_M, BLOCK_N, changes=changes,
    )  # fmt: skip
    if slots is not None:
        note_expanded(flags, tl.num_programs(0) - before)


def quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    by_groups: bool, element: str, group_size: int, out_features: int, *surroundings: Any, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter), with or without surroundings.

    Weights as ``quantized_weight_gpu.py`` packs them. ``surroundings``: fields of ``Surroundings``, the first or all of
    them. ``choice`` replaces this GPU's for the layer. Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an element or group size that it lacks; those
            of ``outputs_of``.
    """
    name = "quantized_linear_a8"
    check(name, x, codes, scales, zeros, bias, element, group_size, out_features)
    check_a8(name, x, x_scale, by_groups, element, group_size)
    x = aligned(x)
    rows, in_features = x.shape
    around = Surroundings(*surroundings)
    norm, eps = around.norm, around.eps
    out, beside, residual, *strides = outputs_of(name, x, out_features, around)
    if not out.numel():
        return out
    choice = choice or choice_for(rows, x, zeros is not None, element, group_size, out_features, int8_activations=True)
    adapters = adapters_of(name, x, out_features, around.lora)
    x_scales, x_sums, x_stride = None, None, x.stride(0) if rows > 1 else in_features
    given = (x, x_stride, norm) if around.lora else (None, 0, None)
    if rows > FEW_ROWS:
        x, x_scales, x_sums = quantize_rows(x, x_scale, group_size, zeros is not None, norm, eps, by_groups=by_groups)
        x_scale, norm, x_stride = None, None, x.shape[1]
    if choice.implementation == "int_mm" and not around.follow:
        sums = int_mm(x[:, : codes.shape[1]], codes.view(torch.int8).t())  # past K all codes are 0
        assert x_scales is not None, "int_mm takes many rows"
        scale_sums(sums, x_scales, x_sums, scales, zeros, bias, out)
        return out
    tile = choice.tile or INT8[2]  # where int_mm cannot serve
    if around.lora:
        tile = tile._replace(m=min(tile.m, MOST_ROWS))
    part = block_bytes(BITS[element], group_size)
    programs = adapters.before + triton.cdiv(rows, tile.m) * triton.cdiv(out_features, tile.n)
    with torch.cuda.device_of(out):
        quantized_linear_a8_kernel[(programs,)](
            x, x_scale, x_scales, x_sums, codes, scales, zeros, bias, norm, beside, residual, out, rows, x_stride,
            *strides, eps, *given, *adapters,
            ELEMENT=element, GROUP=group_size, OUT=out.shape[1], IN=in_features, ROW_BYTES=codes.shape[-1],
            ACTIVATION=around.activation, GATED=around.is_gated, MULTIPLIER=around.multiplier,
            PART=part, BLOCK_M=tile.m, BLOCK_N=tile.n, BY_GROUPS=by_groups,
            **adapters.constants(rows, part * (tile.n + 8 // BITS[element] * tile.m)),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, **launch_options(rows),
        )  # fmt: skip
    return out


def check_a8(
    name: str, x: Tensor, x_scale: Tensor | None, by_groups: bool, element: str, group_size: int
) -> None:  # fmt: skip
    """``ValueError`` where activations cannot be quantised so."""
    if element not in ("int8", "int4"):
        raise ValueError(f"{name}: element must be int8 or int4, got {element!r} of {sorted(BITS)}")
    if by_groups and (x_scale is not None or not group_size):
        raise ValueError(
            f"{name}: by_groups must be False with x_scale or without groups, got group_size={group_size} and "
            f"{'an' if x_scale is not None else 'no'} x_scale"
        )
    if x_scale is not None and (x_scale.numel(), x_scale.dtype, x_scale.device) != (1, torch.float32, x.device):
        raise ValueError(
            f"{name}: x_scale must be one element of torch.float32 on {x.device}, got {list(x_scale.shape)} of "
            f"{x_scale.dtype} on {x_scale.device}"
        )
