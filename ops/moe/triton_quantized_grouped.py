"""The experts' linear layers on quantised weights on the GPU: Triton kernels, and the launches.

Which tile of which expert a program computes is found as in ``triton_grouped.py``: the grid follows from the shapes. An
output is added up as in ``triton_quantized.py`` and ``triton_quantized_a8.py``, so it has the bits of a single layer.
So has what may follow in the same launch: a gate, or the sum of a token's experts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear import triton_quantize_rows, triton_quantized, triton_quantized_a8
from compiled_llm.ops.linear.quantized_tiles import Choice
from compiled_llm.ops.linear.quantized_weight import BITS
from compiled_llm.ops.linear.quantized_weight_gpu import block_bytes
from compiled_llm.ops.linear.triton_int8_scaling import finished, load_columns
from compiled_llm.ops.linear.triton_quantize_rows import scales_of_rows
from compiled_llm.ops.linear.triton_surroundings import columns_of, store_outputs
from compiled_llm.ops.moe.triton_grouped import SUMMED_AT_ONCE, add_complete, add_padding, check_counters, own_tile
from compiled_llm.ops.moe.triton_routing import check_sum
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise.reference import GATES
from compiled_llm.ops.triton_checks import check_contiguous
from compiled_llm.ops.triton_programmatic import wait_for_launches_before


@triton.jit
def _of_expert(tensor, expert, SIZE: tl.constexpr):
    """Where the matrix of an expert begins; None for None."""
    if tensor is None:
        return  # see load_columns
    else:
        return tensor + expert * SIZE


@triton.jit
def _rows_of(rows, targets, inside):
    """The rows of x that a tile reads, which writes the rows ``targets``."""
    if rows is None:
        return targets.to(tl.int64)
    else:
        return tl.load(rows + targets, mask=inside, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["num_tokens"])
def grouped_kernel(
    x, x_scale, x_scales, x_sums, codes, scales, zeros, bias, rows, starts, y, tokens, places, weights, beside,
    residual, out, counters, x_stride, num_tokens, alpha, limit, NUM_M: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, GROUPS: tl.constexpr, ELEMENT: tl.constexpr, GROUP: tl.constexpr, OUT: tl.constexpr,
    IN: tl.constexpr, ROW_BYTES: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INT8_X: tl.constexpr, BY_GROUPS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights.

    INT8_X: x has codes with ``x_scales``, or rows that are quantised here. Outputs go to ``y``. With ``counters`` the
    program that writes the last row of a token adds up the token's rows.
    """
    if PROGRAMMATIC:
        wait_for_launches_before()
    GATED: tl.constexpr = ACTIVATION != ""
    WIDE: tl.constexpr = 2 * OUT if GATED else OUT
    place, tile = tl.program_id(0) % NUM_M, tl.program_id(0) // NUM_M
    found, targets, inside, num_rows = own_tile(starts, place, EXPERTS, EXPERTS_POW2, BLOCK_M)
    columns = columns_of(tile, OUT, GATED, BLOCK_N)
    if found < EXPERTS:
        expert = found.to(tl.int64)
        if INT8_X:
            sources = _rows_of(rows, targets, inside)
            own_scales = None
            of_rows = tl.full([BLOCK_M], 1.0, tl.float32)  # the scales of groups are multiplied with these
            if x_scales is None and BY_GROUPS:
                own_scales = of_rows
            elif x_scales is None:
                own_scales = scales_of_rows(x + sources * x_stride, inside, x_scale, None, None, IN, BLOCK_M)
            acc = triton_quantized_a8.tile_sums(
                x, x_sums, sources, inside, codes + expert * WIDE * ROW_BYTES,
                _of_expert(scales, expert, GROUPS * WIDE), _of_expert(zeros, expert, GROUPS * WIDE), columns,
                ELEMENT, GROUP, WIDE, IN, x_stride, ROW_BYTES, PART, BLOCK_M, BLOCK_N, own_scales,
                of_groups=x_scales, BY_GROUPS=BY_GROUPS,
            )  # fmt: skip
            if not BY_GROUPS:
                of_rows = own_scales if x_scales is None else tl.load(x_scales + sources, mask=inside, other=0.0)
            acc = finished(acc, of_rows, load_columns(_of_expert(bias, expert, WIDE), columns, columns < WIDE))
            bias_left = None
        else:
            acc = triton_quantized.tile_sums(
                x + _rows_of(rows, targets, inside) * x_stride, inside, codes + expert * WIDE * ROW_BYTES,
                _of_expert(scales, expert, GROUPS * WIDE), _of_expert(zeros, expert, GROUPS * WIDE), columns,
                ELEMENT, GROUP, WIDE, IN, ROW_BYTES, PART, BLOCK_M, BLOCK_N,
                MASKED=True,  # or some tiles of 128 rows spill
            )  # fmt: skip
            bias_left = _of_expert(bias, expert, WIDE)
        store_outputs(
            acc, bias_left, None, None, y, tile, columns, targets.to(tl.int64), inside, 0, 0,
            OUT, ACTIVATION, GATED, 1.0, BLOCK_M, BLOCK_N, alpha, limit,
        )  # fmt: skip
        if counters is not None:
            add_complete(
                y, tokens, places, weights, beside, residual, out, counters, targets, inside, columns.to(tl.int64),
                tile, num_tokens, OUT, TOP_K, BLOCK_T,
            )  # fmt: skip
    if counters is not None:
        add_padding(
            y, places, weights, beside, residual, out, num_rows, place, columns.to(tl.int64), num_tokens,
            NUM_M, OUT, TOP_K, BLOCK_T,
        )  # fmt: skip


class Sum(NamedTuple):
    """What adds up the rows of a token's experts, see ``summed_quantized_experts``."""

    tokens: Tensor
    places: Tensor
    weights: Tensor
    beside: Tensor | None
    residual: Tensor | None
    counters: Tensor


class _Behind(NamedTuple):
    """What follows a product in its launch: a gate, a sum or nothing."""

    activation: str = ""
    alpha: float = 0.0
    limit: float = 0.0
    sum: Sum | None = None


_NOTHING = _Behind()


def grouped_quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: Tensor | None,
    starts: Tensor, element: str, group_size: int, out_features: int, choice: Choice | None = None,
    behind: _Behind = _NOTHING,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Weights as ``quantized_weight_gpu.py`` packs them. ``choice`` replaces this GPU's for the layer.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; a group size that the GPU kernels lack.
    """
    form = element, group_size, out_features
    weight = codes, scales, zeros, bias
    return _multiplied(x, weight, None, rows, starts, form, choice, behind, activations="model")


def grouped_quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    rows: Tensor | None, starts: Tensor, by_groups: bool, element: str, group_size: int, out_features: int,
    choice: Choice | None = None, behind: _Behind = _NOTHING,
) -> Tensor:  # fmt: skip
    """As ``grouped_quantized_linear``, of int8 activations.

    A token's row is quantised once, for all of its experts; where tiles have few rows, by each program that takes it.
    """
    weight, form = (codes, scales, zeros, bias), (element, group_size, out_features)
    activations = "int8_groups" if by_groups else "int8"
    return _multiplied(x, weight, x_scale, rows, starts, form, choice, behind, activations=activations)


def gated_quantized_experts(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, tokens: Tensor, starts: Tensor,
    element: str, group_size: int, out_features: int, activations: str, activation: str, alpha: float,
    limit: float,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter).

    Raises:
        ValueError: those of the product; an unknown activation; x in float32.
    """
    if activation not in GATES or out_features % 2 or x.dtype == torch.float32:
        raise ValueError(
            f"gated_quantized_experts: activation must be {' or '.join(GATES)}, N even and x in 16 bits, got "
            f"{activation!r}, N={out_features} and {x.dtype}"
        )
    weight, form = (codes, scales, zeros, bias), (element, group_size, out_features)
    behind = _Behind(activation, alpha, limit)
    return _multiplied(x, weight, None, tokens, starts, form, None, behind, activations=activations)


def summed_quantized_experts(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, tokens: Tensor, starts: Tensor,
    element: str, group_size: int, out_features: int, activations: str, *added: Any,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter).

    Raises:
        ValueError: those of the product; a tensor of another shape, dtype, layout or device; too few counters.
    """
    weight, form, own = (codes, scales, zeros, bias), (element, group_size, out_features), Sum(tokens, *added)
    if x.dtype == torch.float32 or x.shape[0] != own.places.numel() or len(tokens) != len(x):
        raise ValueError(
            f"summed_quantized_experts: x must be [{own.places.numel()}, K] of bfloat16 or float16, got "
            f"{list(x.shape)} of {x.dtype} with {len(tokens)} tokens"
        )
    check_sum(x, own.places, own.weights, own.beside, own.residual, out_features)
    return _multiplied(x, weight, None, None, starts, form, None, _Behind(sum=own), activations=activations)


def _multiplied(
    x: Tensor, weight: tuple[Tensor, Tensor, Tensor | None, Tensor | None], x_scale: Tensor | None, rows: Tensor | None,
    starts: Tensor, form: tuple[str, int, int], choice: Choice | None, behind: _Behind, *, activations: str,
) -> Tensor:  # fmt: skip
    """Check, quantise x if it is to be and no program does it for itself, and launch the kernel."""
    int8_activations, by_groups = activations != "model", activations == "int8_groups"
    name = "grouped_quantized_linear" + "_a8" * int8_activations
    (codes, scales, zeros, _), (element, group_size, wide), own = weight, form, behind.sum
    _check(name, x, *weight, rows, starts, *form)
    if int8_activations:
        triton_quantized_a8.check_a8(name, x, x_scale, by_groups, element, group_size)
    y = x.new_empty((x if rows is None else rows).shape[0], wide // (2 if behind.activation else 1))
    out = y if own is None else x.new_empty(len(own.places), wide)
    if not y.numel():
        return out
    x, in_features, experts = triton_quantized.aligned(x), x.shape[1], len(codes)
    per_expert = -(-2 * len(y) // experts)  # twice the average, so that one with some more rows still has one tile
    choice = choice or triton_quantized.choice_for(
        per_expert, x, zeros is not None, *form, int8_activations=int8_activations, experts=experts
    )
    tile = choice.tile
    assert tile is not None, "experts are multiplied by Triton"
    x_scales, x_sums, x_stride = None, None, x.stride(0) if x.shape[0] > 1 else in_features
    if int8_activations and tile.m > triton_quantized_a8.FEW_ROWS:
        x, x_scales, x_sums = triton_quantize_rows.quantize_rows(
            x, x_scale, group_size, zeros is not None, by_groups=by_groups
        )
        x_scale, x_stride = None, x.shape[1]
    num_m, tiles = min(len(y), len(y) // tile.m + experts), triton.cdiv(wide, tile.n)
    num_tokens, top_k = (0, 1) if own is None else own.places.shape
    added = (None,) * 5 if own is None else own[:5]
    if own is not None:
        check_counters("summed_quantized_experts", own.counters, num_tokens * tiles)
    with torch.cuda.device_of(y):
        grouped_kernel[(num_m * tiles,)](
            x, x_scale, x_scales, x_sums, *weight, rows, starts, y, *added, None if own is None else out,
            None if own is None else own.counters, x_stride, num_tokens, behind.alpha, behind.limit,
            NUM_M=num_m, EXPERTS=experts, EXPERTS_POW2=triton.next_power_of_2(experts), GROUPS=scales.shape[1],
            ELEMENT=element, GROUP=group_size, OUT=y.shape[1], IN=in_features,
            ROW_BYTES=codes.shape[-1], ACTIVATION=behind.activation, TOP_K=top_k,
            BLOCK_T=min(SUMMED_AT_ONCE, triton.next_power_of_2(max(1, num_tokens))),
            PART=block_bytes(BITS[element], group_size), BLOCK_M=tile.m, BLOCK_N=tile.n, INT8_X=int8_activations,
            BY_GROUPS=by_groups,
            num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=x.itemsize == 4 and not int8_activations,
            **launch_options(len(x) if own is None else num_tokens),
        )  # fmt: skip
    return out


def _check(
    name: str, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    rows: Tensor | None, starts: Tensor, element: str, group_size: int, out_features: int,
) -> None:  # fmt: skip
    triton_quantized.check(
        name, x, codes, scales, zeros, bias, element, group_size, out_features, (codes.shape[0],)
    )  # fmt: skip
    check_contiguous(name, "rows", rows, () if rows is None else rows.shape[:1], x.device, torch.int32)
    check_contiguous(name, "starts", starts, (len(codes) + 1,), x.device, torch.int32)
