"""Linear layers on quantised weights on the GPU: the Triton kernel, and the launch. Activations as they are.

A tile's codes are turned into numbers in registers, and are the first operand of the product: ``W x.T``. So the outputs
fill the 64 rows that ``wgmma`` wants, its other side holds as few as 16 rows of x, and weights never pass through
shared memory a second time.

Where the scales go, a rule for each format:

- one group of all inputs: codes are multiplied as they are, and the float32 sum by the scale at the end;
- groups of 64 and 128: the same for each group, whose sum is scaled and added to the accumulator in float32;
- groups of 32: the weights themselves are scaled, in float32, and rounded to the dtype of x. A group is too short for
  sums of its own. For MXFP4, whose scales are powers of two, that loses nothing in bfloat16.

Zero points are taken off in float32. Codes less whole zero points are exact in bfloat16 and float16.

Why a row's bits do not depend on how many rows there are: as in ``triton_linear.py``, one program adds up an output in
steps of 16 inputs, from the first to the last, by one kind of instruction whatever the tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import quantized_tiles, triton_linear
from compiled_llm.ops.linear.quantized_tiles import Choice, Layer
from compiled_llm.ops.linear.quantized_weight import BITS, SCALE_DTYPES, ZERO_DTYPES
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_adapted import MOST_ROWS, adapters_of, expand, note_expanded, shrink
from compiled_llm.ops.linear.triton_int8_scaling import load_columns
from compiled_llm.ops.linear.triton_linear import inside_inputs
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.linear.triton_surroundings import (
    columns_of,
    inverse_rms_of_rows,
    normed,
    outputs_of,
    store_outputs,
)
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.triton_checks import check_contiguous, check_rows, refuse
from compiled_llm.ops.triton_programmatic import prefetch_rows, wait_for_launches_before

_ALIGNMENT = 16  # bytes


@triton.jit
def _values(codes, ELEMENT: tl.constexpr):
    """The numbers that codes stand for, float32: uint8, of 4 bits 0 to 15."""
    if ELEMENT == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif ELEMENT == "int4":
        # The bits of 128 + code
        return (codes.to(tl.int32) << 16 | 0x43000000).to(tl.float32, bitcast=True) - 136.0
    elif ELEMENT == "fp8":
        # Exponent and mantissa where float32 has them: its exponents are 120 larger. Also right where they are 0.
        bits = codes.to(tl.int32)
        return ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    else:
        bits = codes.to(tl.int32)
        return ((bits & 8) << 28 | (bits & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _part_sums(sums, x, codes, scale, zero, ELEMENT: tl.constexpr, SCALED: tl.constexpr):
    """``sums`` and the products of weights ``codes`` ``[N, K]``, all of one group, and ``x`` ``[M, K]``."""
    weights = _values(codes, ELEMENT)
    if zero is not None:
        weights -= zero[:, None]
    if SCALED:
        weights *= scale[:, None]
    return multiply_add(weights.to(x.dtype), tl.trans(x), sums)


@triton.jit
def tile_sums(
    x_rows, inside_rows, codes, scales, zeros, columns,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ROW_BYTES: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, norm=None, inverse=None,
    MASKED: tl.constexpr = False,
):  # fmt: skip
    """``W x.T`` of a tile: ``[BLOCK_N, BLOCK_M]`` float32.

    ``x_rows`` ``[BLOCK_M]`` points to rows of x; ``codes``, ``scales`` and ``zeros`` to one matrix; ``columns`` are its
    outputs. ``norm``: the weight of the RMS norm of x, whose ``inverse`` is that of ``inverse_rms_of_rows``.
    MASKED: inputs have a mask even where all of them are there.
    """
    HALVES: tl.constexpr = 2 if ELEMENT == "int4" or ELEMENT == "fp4" else 1
    SCALED: tl.constexpr = GROUP == 32
    SUMMED: tl.constexpr = GROUP > 32
    WHOLE: tl.constexpr = IN % (PART * HALVES) == 0 and not MASKED
    inner = tl.arange(0, PART)
    inside = columns < OUT
    code_tile = codes + columns.to(tl.int64)[:, None] * ROW_BYTES + inner[None, :]
    x_tile = x_rows[:, None] + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GROUP == 0:
        only_scale = load_columns(scales, columns, inside)
        only_zero = load_columns(zeros, columns, inside)
    for place in range(0, ROW_BYTES, PART):
        k = place * HALVES
        packed = tl.load(code_tile + place, mask=inside[:, None], other=0)
        known = inside_rows[:, None] & inside_inputs(inner, k, IN, WHOLE)[None, :]
        x = normed(tl.load(x_tile + k, mask=known, other=0.0), inverse, norm, k + inner, IN)
        if GROUP == 0:
            scale = only_scale
            zero = only_zero
        else:
            scale = load_columns(scales, k // GROUP * OUT + columns, inside)
            zero = load_columns(zeros, k // GROUP * OUT + columns, inside)
        lower = packed & 15 if HALVES == 2 else packed
        sums = tl.zeros_like(acc) if SUMMED else acc
        sums = _part_sums(sums, x, lower, scale, zero, ELEMENT, SCALED)
        if HALVES == 2:
            k += PART
            known = inside_rows[:, None] & inside_inputs(inner, k, IN, WHOLE)[None, :]
            x = normed(tl.load(x_tile + k, mask=known, other=0.0), inverse, norm, k + inner, IN)
            if GROUP == PART:
                if SUMMED:
                    acc = tl.fma(sums, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_M]), acc)
                    sums = tl.zeros_like(acc)
                own = inside & (tl.zeros_like(columns) + k < IN)
                scale = load_columns(scales, k // GROUP * OUT + columns, own)
                zero = load_columns(zeros, k // GROUP * OUT + columns, own)
            sums = _part_sums(sums, x, packed >> 4, scale, zero, ELEMENT, SCALED)
        acc = tl.fma(sums, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_M]), acc) if SUMMED else sums
    if GROUP == 0:
        acc *= only_scale[:, None]
    return acc


@triton.jit(do_not_specialize=["num_rows", "before"])
def quantized_linear_kernel(
    x, codes, scales, zeros, bias, norm, beside, residual, out, num_rows, x_stride, beside_stride, residual_stride, eps,
    slots, lora_a, lora_b, ranks, lora_scales, starts, flags, shrunk, before,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ROW_BYTES: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights.

    With ``slots`` there are ``before`` programs that shrink, before the others.
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
            x, x_stride, num_rows, norm, eps, slots, lora_a, lora_b, ranks, lora_scales, starts, flags, shrunk,
            IN, PARTS, RANK, SHRINK_M, SHRINK_K, PROGRAMMATIC,
        )  # fmt: skip
        return
    x_rows, inside_rows = x + rows * x_stride, rows < num_rows
    inverse = None
    if norm is not None:
        inverse = inverse_rms_of_rows(x_rows, inside_rows, eps, IN, BLOCK_M)
    acc = tile_sums(
        x_rows, inside_rows, codes, scales, zeros, columns, ELEMENT, GROUP, WIDE, IN, ROW_BYTES, PART, BLOCK_M,
        BLOCK_N, norm, inverse,
    )  # fmt: skip
    changes = None
    if slots is not None:
        changes = expand(
            slots, lora_b, ranks, starts, flags, shrunk, before, columns, rows, inside_rows, WIDE, PARTS, RANK
        )  # fmt: skip
    store_outputs(
        acc, bias, beside, residual, out, tile, columns, rows, inside_rows, beside_stride, residual_stride,
        OUT, ACTIVATION, GATED, MULTIPLIER, BLOCK_M, BLOCK_N, changes=changes,
    )  # fmt: skip
    if slots is not None:
        note_expanded(flags, tl.num_programs(0) - before)


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    element: str, group_size: int, out_features: int, *surroundings: Any, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter), with or without surroundings.

    Weights as ``quantized_weight_gpu.py`` packs them. ``surroundings``: fields of ``Surroundings``, the first or all of
    them. ``choice`` replaces this GPU's for the layer: ``compiled-llm tune linear`` looks for a better one. Never
    synchronises.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; a group size that the GPU kernels lack; those
            of ``outputs_of``.
    """
    check("quantized_linear", x, codes, scales, zeros, bias, element, group_size, out_features)
    x = aligned(x)
    rows, in_features = x.shape
    around = Surroundings(*surroundings)
    out, beside, residual, *strides = outputs_of("quantized_linear", x, out_features, around)
    if not out.numel():
        return out
    tile = (choice or choice_for(rows, x, zeros is not None, element, group_size, out_features)).tile
    assert tile is not None, "only int8 activations have another product than Triton's"
    if around.lora:
        tile = tile._replace(m=min(tile.m, MOST_ROWS))
    adapters = adapters_of("quantized_linear", x, out_features, around.lora)
    part = block_bytes(BITS[element], group_size)
    programs = adapters.before + triton.cdiv(rows, tile.m) * triton.cdiv(out_features, tile.n)
    with torch.cuda.device_of(x):
        quantized_linear_kernel[(programs,)](
            x, codes, scales, zeros, bias, around.norm, beside, residual, out, rows,
            x.stride(0) if rows > 1 else in_features, *strides, around.eps, *adapters,
            ELEMENT=element, GROUP=group_size, OUT=out.shape[1], IN=in_features, ROW_BYTES=codes.shape[-1],
            ACTIVATION=around.activation, GATED=around.is_gated, MULTIPLIER=around.multiplier,
            PART=part, BLOCK_M=tile.m, BLOCK_N=tile.n,
            **adapters.constants(rows, part * (tile.n + 8 // BITS[element] * tile.m * x.itemsize)),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4, **launch_options(rows),
        )  # fmt: skip
    return out


def choice_for(
    rows: int, x: Tensor, zeros: bool, element: str, group_size: int, out_features: int, *,
    int8_activations: bool = False, experts: int = 0,
) -> Choice:  # fmt: skip
    """The measured or default choice of a layer for so many rows, on the GPU of ``x`` ``[T, K]``."""
    layer = Layer(element, group_size, zeros, int8_activations, x.itemsize, out_features, x.shape[1], experts)
    capability, gpu = triton_linear._capability(x.device), triton_linear.gpu_name(x.device)
    return quantized_tiles.choose(layer, rows, capability, gpu)


def aligned(x: Tensor) -> Tensor:
    """``x`` if its rows can be loaded 16 bytes at a time, else a copy."""
    if x.data_ptr() % _ALIGNMENT or (x.shape[0] > 1 and x.stride(0) * x.itemsize % _ALIGNMENT):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def check(
    name: str, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    element: str, group_size: int, out_features: int, experts: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """``ValueError`` where weights are not those of ``experts`` (none: one matrix) of K inputs, or x not ``[T, K]``."""
    if element not in BITS:
        raise ValueError(f"{name}: element must be one of {', '.join(BITS)}, got {element!r}")
    check_rows(name, x)
    if not x.shape[1]:
        refuse(name, "x", x, "[T, K] with K above 0")
    block, in_features = block_bytes(BITS[element], group_size), x.shape[1]
    row_bytes = -(-in_features * BITS[element] // (8 * block)) * block
    groups = -(-in_features // group_size) if group_size else 1
    if scales.dtype not in SCALE_DTYPES.values():
        refuse(name, "scales", scales, "of float32, bfloat16 or float16")
    if zeros is not None and zeros.dtype not in ZERO_DTYPES.values():
        refuse(name, "zeros", zeros, "of int8, float32, bfloat16 or float16")
    of_groups = (*experts, groups, out_features)
    check_contiguous(name, "codes", codes, (*experts, out_features, row_bytes), x.device, torch.uint8)
    check_contiguous(name, "scales", scales, of_groups, x.device, scales.dtype)
    check_contiguous(name, "zeros", zeros, of_groups, x.device, *ZERO_DTYPES.values())
    check_contiguous(name, "bias", bias, (*experts, out_features), x.device, x.dtype)
