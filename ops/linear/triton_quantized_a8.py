"""Linear layers of int8 activations on quantised weights on the GPU: Triton kernels, and the launches.

Two launches. The first quantises x, a program a row: Inductor could not do it with the norm before, which is an op and
opaque to it, and an op of one signature for all devices takes x as it is. The second multiplies int8 by int8 into
int32; where the GPU's file of tiles says "int_mm", torch does, and a third launch scales. A row's bits do not depend on
its batch: sums of integers are exact in any order, and sums of groups are added in float32 in the order of the groups.

    y = sum_g scale[n, g] * (sum_k code * xq - zero[n, g] * sum_k xq) * sx + bias

Zero points are taken off sums, so that they may be any number; the sums of xq are made with xq.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.quantized_tiles import Choice
from compiled_llm.ops.linear.quantized_weight import BITS
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes
from compiled_llm.ops.linear.triton_int8_scaling import finished, load_columns, scale_sums, scaled
from compiled_llm.ops.linear.triton_linear import INTERPRET
from compiled_llm.ops.linear.triton_quantized import check, choice_for
from compiled_llm.ops.torch_private import int_mm

_PADDING = 128  # rows of quantised activations are a multiple of this, so that no kernel has to look where they end
_CHUNK = 1024
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added and taken off: rounds float32 below 2^22 to integers, halves to even


@triton.jit
def quantize_rows_kernel(
    x, x_scale, codes, scales, sums, x_stride,
    GROUP: tl.constexpr, IN: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program a row. A row with NaN gets the scale NaN."""
    row = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, CHUNK)
    ones = tl.full([CHUNK], 1.0, tl.float32)
    if x_scale is None:
        most = tl.zeros([CHUNK], tl.float32)
        bad = tl.zeros([CHUNK], tl.int32)
        for k in range(0, IN, CHUNK):
            part = tl.load(x + row * x_stride + k + inner, mask=inner < IN - k, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(part))
            bad |= (part != part).to(tl.int32)
        scale = tl.div_rn(ones * tl.max(most, 0), ones * 127.0)
        scale = tl.where(scale > 0.0, scale, 1.0)
        scale = tl.where(tl.max(bad, 0) > 0, float("nan"), scale)
    else:
        scale = ones * tl.load(x_scale)
    tl.store(scales + row + inner, scale, mask=inner == 0)
    total = tl.zeros([CHUNK], tl.int32)
    for k in range(0, PADDED, CHUNK):
        part = tl.load(x + row * x_stride + k + inner, mask=inner < IN - k, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.div_rn(part, scale), -127.0), 127.0)
        code = ((scaled + TO_INTEGER) - TO_INTEGER).to(tl.int32)
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
def tile_sums(
    x, x_sums, rows, inside_rows, codes, scales, zeros, columns,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PADDED: tl.constexpr,
    ROW_BYTES: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``W x.T`` of a tile, but for the scales of x: ``[BLOCK_N, BLOCK_M]`` float32. ``rows`` are those of x."""
    HALVES: tl.constexpr = 2 if ELEMENT == "int4" else 1
    COUNT: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    inner = tl.arange(0, PART)
    inside = columns < OUT
    code_tile = codes + columns.to(tl.int64)[:, None] * ROW_BYTES + inner[None, :]
    x_tile = x + rows[:, None] * PADDED + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    whole = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for place in range(0, ROW_BYTES, PART):
        k = place * HALVES
        packed = tl.load(code_tile + place, mask=inside[:, None], other=0)
        lower = packed & 15 if HALVES == 2 else packed
        sums = whole if GROUP == 0 else tl.zeros_like(whole)
        sums = _part_sums(sums, tl.load(x_tile + k, mask=inside_rows[:, None], other=0), lower, ELEMENT)
        if HALVES == 2:
            if GROUP == PART:
                scale = load_columns(scales, k // GROUP * OUT + columns, inside)
                zero = load_columns(zeros, k // GROUP * OUT + columns, inside)
                acc = scaled(sums, acc, scale, zero, x_sums, k // GROUP, rows, inside_rows, COUNT)
                sums = tl.zeros_like(whole)
            k += PART
            sums = _part_sums(sums, tl.load(x_tile + k, mask=inside_rows[:, None], other=0), packed >> 4, ELEMENT)
        if GROUP == 0:
            whole = sums
        else:
            start = k // GROUP * GROUP  # past all inputs where they end in the lower half
            own = inside & (tl.zeros_like(columns) + start < IN)
            scale = load_columns(scales, k // GROUP * OUT + columns, own)
            zero = load_columns(zeros, k // GROUP * OUT + columns, own)
            own_rows = inside_rows & (tl.zeros_like(rows) + start < IN)
            acc = scaled(sums, acc, scale, zero, x_sums, k // GROUP, rows, own_rows, COUNT)
    if GROUP == 0:
        scale = load_columns(scales, columns, inside)
        acc = scaled(
            whole, acc, scale, load_columns(zeros, columns, inside), x_sums, 0, rows, inside_rows, COUNT
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, x_scales, x_sums, codes, scales, zeros, bias, out, num_rows,
    ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, PADDED: tl.constexpr,
    ROW_BYTES: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    num_m = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(0) // num_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_rows = rows < num_rows
    acc = tile_sums(
        x, x_sums, rows, inside_rows, codes, scales, zeros, columns, ELEMENT, GROUP, OUT, IN, PADDED, ROW_BYTES,
        PART, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    x_scale = tl.load(x_scales + rows, mask=inside_rows, other=0.0)
    acc = finished(acc, x_scale, load_columns(bias, columns, columns < OUT))
    tl.store(
        out + rows[:, None] * OUT + columns[None, :],
        tl.trans(acc).to(out.dtype.element_ty),
        mask=inside_rows[:, None] & (columns < OUT)[None, :],
    )


def quantize_rows(
    x: Tensor, x_scale: Tensor | None, group_size: int, with_sums: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows ``[T, K]`` to int8, symmetric, a row at a time; or by the one scale ``x_scale``.

    Returns:
        Codes ``[T, P]``, K rounded up to 128, zeros past K; scales ``[T]`` float32; sums of codes ``[T, G]`` int32.
    """
    rows, in_features = x.shape
    padded = -(-in_features // _PADDING) * _PADDING
    groups = -(-in_features // group_size) if group_size else 1
    codes = x.new_empty(rows, padded, dtype=torch.int8)
    scales = x.new_empty(rows, dtype=torch.float32)
    sums = x.new_empty(rows, groups, dtype=torch.int32) if with_sums else None
    with torch.cuda.device_of(x):
        quantize_rows_kernel[(rows,)](
            x, x_scale, codes, scales, sums, x.stride(0) if rows > 1 else in_features,
            GROUP=group_size, IN=in_features, PADDED=padded, CHUNK=_CHUNK, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales, sums


def quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    element: str, group_size: int, out_features: int, choice: Choice | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    Weights as ``quantized_weight_gpu.py`` packs them. ``choice`` replaces this GPU's for the layer.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; an element or group size that it lacks.
    """
    name = "quantized_linear_a8"
    check(name, x, codes, scales, zeros, bias, element, group_size, out_features)
    check_a8(name, x, x_scale, element)
    (rows, in_features), out = x.shape, x.new_empty(x.shape[0], out_features)
    if not out.numel():
        return out
    quantized, x_scales, x_sums = quantize_rows(x, x_scale, group_size, zeros is not None)
    form = zeros is not None, element, group_size, out_features
    choice = choice or choice_for(rows, x, *form, int8_activations=True)
    if choice.implementation == "int_mm":
        row_bytes = codes.shape[1]  # past K all codes are 0
        sums = int_mm(quantized[:, :row_bytes], codes.view(torch.int8).t())
        scale_sums(sums, x_scales, x_sums, scales, zeros, bias, out)
        return out
    tile = choice.tile
    assert tile is not None, "Triton's choices have one"
    with torch.cuda.device_of(x):
        linear_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(out_features, tile.n),)](
            quantized, x_scales, x_sums, codes, scales, zeros, bias, out, rows,
            ELEMENT=element, GROUP=group_size, OUT=out_features, IN=in_features, PADDED=quantized.shape[1],
            ROW_BYTES=codes.shape[-1], PART=block_bytes(BITS[element], group_size), BLOCK_M=tile.m, BLOCK_N=tile.n,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def check_a8(name: str, x: Tensor, x_scale: Tensor | None, element: str) -> None:
    """``ValueError`` where activations cannot be quantised so."""
    if element not in ("int8", "int4"):
        raise ValueError(f"{name}: element must be int8 or int4, got {element!r} of {sorted(BITS)}")
    if x_scale is not None and (x_scale.numel(), x_scale.dtype, x_scale.device) != (1, torch.float32, x.device):
        raise ValueError(
            f"{name}: x_scale must be one element of torch.float32 on {x.device}, got {list(x_scale.shape)} of "
            f"{x_scale.dtype} on {x_scale.device}"
        )
