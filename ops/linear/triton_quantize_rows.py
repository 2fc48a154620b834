"""Rows quantised to int8 on the GPU, with the RMS norm before it: a Triton kernel, and what other kernels do alike."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.triton_surroundings import AHEAD, normed
from compiled_llm.ops.rowwise.triton_kernels import PLACES, inverse_root, sum_of_places, weighted

_PADDING = 128  # rows of codes are a multiple of this, so that no kernel has to look where they end
CHUNK = tl.constexpr(1024)  # elements of a row at a time
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added and taken off: rounds float32 below 2^22 to integers, halves to even


@triton.jit
def scale_of(most, bad):
    """Of rows with the largest absolute values ``most``; NaN where ``bad`` is 1."""
    scale = tl.div_rn(most, tl.full(most.shape, 127.0, tl.float32))
    scale = tl.where(scale > 0.0, scale, 1.0)
    return tl.where(bad > 0, float("nan"), scale)


@triton.jit
def codes_of(values, scale):
    """float32 and scales of the same shape -> int32 from -127 to 127."""
    scaled = tl.minimum(tl.maximum(tl.div_rn(values, scale), -127.0), 127.0)
    return ((scaled + TO_INTEGER) - TO_INTEGER).to(tl.int32)


@triton.jit
def scales_of_parts(values):
    """Of each row of ``values`` ``[M, K]`` float32."""
    bad = values != values
    return scale_of(tl.max(tl.where(bad, 0.0, tl.abs(values)), 1), tl.max(bad.to(tl.int32), 1))


@triton.jit
def _loaded(x, norm, inverse, k, IN: tl.constexpr):
    """Elements of one row from ``k`` on, after their norm, float32."""
    inner = tl.arange(0, CHUNK)
    y = tl.load(x + k + inner, mask=inner < IN - k, other=0.0)
    if norm is None:
        return y.to(tl.float32)
    else:
        weights = tl.load(norm + k + inner, mask=inner < IN - k, other=0.0)
        return weighted(y.to(tl.float32) * inverse, weights, y.dtype).to(tl.float32)


@triton.jit
def quantize_rows_kernel(
    x, x_scale, norm, codes, scales, sums, x_stride, eps,
    GROUP: tl.constexpr, IN: tl.constexpr, PADDED: tl.constexpr, BY_GROUPS: tl.constexpr,
):  # fmt: skip
    """A program a row. A row with NaN, or its group of inputs, gets the scale NaN."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    inner = tl.arange(0, CHUNK)
    ones = tl.full([CHUNK], 1.0, tl.float32)
    inverse = None
    if norm is not None:
        places = tl.arange(0, PLACES)
        squares = tl.zeros([PLACES], tl.float32)
        for k in tl.static_range(0, IN, PLACES):
            few = tl.load(x + k + places, mask=places < IN - k, other=0.0).to(tl.float32)
            squares += few * few
        inverse = inverse_root(sum_of_places(squares[None, :]), eps, IN)
    scale = ones
    if BY_GROUPS:
        pass  # see below: those of a chunk's groups, with its codes
    elif x_scale is None:
        most = tl.zeros([CHUNK], tl.float32)
        bad = tl.zeros([CHUNK], tl.int32)
        for k in range(0, IN, CHUNK):
            part = _loaded(x, norm, inverse, k, IN)
            most = tl.maximum(most, tl.abs(part))
            bad |= (part != part).to(tl.int32)
        scale = scale_of(ones * tl.max(most, 0), tl.max(bad, 0))
    else:
        scale = ones * tl.load(x_scale)
    if not BY_GROUPS:
        tl.store(scales + row + inner, scale, mask=inner == 0)
    total = tl.zeros([CHUNK], tl.int32)
    for k in range(0, PADDED, CHUNK):
        part = _loaded(x, norm, inverse, k, IN)
        if BY_GROUPS:
            of_group, in_row = k // GROUP + tl.arange(0, CHUNK // GROUP), (IN + GROUP - 1) // GROUP
            grouped = tl.reshape(part, [CHUNK // GROUP, GROUP])
            of_groups = scales_of_parts(grouped)
            tl.store(scales + row * in_row + of_group, of_groups, mask=of_group < in_row)
            scale = tl.reshape(tl.broadcast_to(of_groups[:, None], grouped.shape), [CHUNK])
        code = codes_of(part, scale)
        tl.store(codes + row * PADDED + k + inner, code.to(tl.int8), mask=inner < PADDED - k)
        if sums is not None:
            if GROUP == 0:
                total += code
            else:
                groups = tl.arange(0, CHUNK // GROUP)
                count: tl.constexpr = (IN + GROUP - 1) // GROUP
                of_groups = tl.sum(tl.reshape(code, [CHUNK // GROUP, GROUP]), 1)
                tl.store(sums + row * count + k // GROUP + groups, of_groups, mask=groups < count - k // GROUP)
    if sums is not None and GROUP == 0:
        tl.store(sums + row + inner, ones.to(tl.int32) * tl.sum(total, 0), mask=inner == 0)


def quantize_rows(
    x: Tensor, x_scale: Tensor | None, group_size: int, with_sums: bool, norm: Tensor | None = None, eps: float = 0.0,
    *, by_groups: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Rows ``[T, K]``, after their norm if any, to int8, symmetric, a row at a time; or by the one scale ``x_scale``.

    Returns:
        Codes ``[T, P]``, K rounded up to 128, zeros past K; scales ``[T]`` float32, ``by_groups`` ``[T, G]``; sums of
        codes ``[T, G]`` int32.
    """
    rows, in_features = x.shape
    padded = -(-in_features // _PADDING) * _PADDING
    groups = -(-in_features // group_size) if group_size else 1
    codes = x.new_empty(rows, padded, dtype=torch.int8)
    scales = x.new_empty((rows, groups) if by_groups else (rows,), dtype=torch.float32)
    sums = x.new_empty(rows, groups, dtype=torch.int32) if with_sums else None
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(rows,)](
            x, x_scale, norm, codes, scales, sums, x.stride(0) if rows > 1 else in_features, eps,
            GROUP=group_size, IN=in_features, PADDED=padded, BY_GROUPS=by_groups, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, sums


# -- Several rows at a time, by a program that needs them itself


@triton.jit
def scales_of_rows(
    x_rows, inside_rows, x_scale, norm, inverse, IN: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Of the rows that ``x_rows`` ``[BLOCK_M]`` points to, after their norm: those of ``quantize_rows_kernel``."""
    if x_scale is not None:
        return tl.zeros([BLOCK_M], tl.float32) + tl.load(x_scale)
    else:
        inner = tl.arange(0, PLACES)
        most = tl.zeros([BLOCK_M, PLACES], tl.float32)
        for k in tl.range(0, IN, PLACES, num_stages=AHEAD):
            inside = inside_rows[:, None] & (inner < IN - k)[None, :]
            y = tl.load(x_rows[:, None] + k + inner[None, :], mask=inside, other=0.0)
            y = normed(y, inverse, norm, k + inner, IN).to(tl.float32)
            most = tl.maximum(most, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
        bad = most != most
        return scale_of(tl.max(tl.where(bad, 0.0, most), 1), tl.max(bad.to(tl.int32), 1))


@triton.jit
def codes_of_rows(x_rows, inside_rows, scales, norm, inverse, places, IN: tl.constexpr):
    """Elements ``places`` ``[K]`` of these rows, ``[BLOCK_M, K]`` int8."""
    y = tl.load(x_rows[:, None] + places[None, :], mask=inside_rows[:, None] & (places < IN)[None, :], other=0.0)
    y = normed(y, inverse, norm, places, IN).to(tl.float32)
    return codes_of(y, tl.broadcast_to(scales[:, None], y.shape)).to(tl.int8)


@triton.jit
def group_scales_of_rows(x_rows, inside_rows, norm, inverse, group, GROUP: tl.constexpr, IN: tl.constexpr):
    """Of a group of inputs of these rows, ``[BLOCK_M]``: those of ``quantize_rows_kernel``."""
    places = group * GROUP + tl.arange(0, GROUP)
    y = tl.load(x_rows[:, None] + places[None, :], mask=inside_rows[:, None] & (places < IN)[None, :], other=0.0)
    return scales_of_parts(normed(y, inverse, norm, places, IN).to(tl.float32))
