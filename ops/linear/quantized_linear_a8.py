"""Linear layers of quantised weights and quantised activations (W8A8, W4A8): references, schemas, registration.

    sx[t] = max over k |x[t, k]| / 127                    or the static x_scale
    xq[t, k] = round(x[t, k] / sx[t])                     from -127 to 127, halves to even
    y[t, n] = bias[n] + sx[t] * sum over g of  scale[n, g] * sum over k in g of  (code[n, k] - zero[n, g]) * xq[t, k]

``by_groups``: each group of a row of x has its own sx[t, g], so that one large input makes the codes of its own group
coarse and no others.

The sums over k of ``code * xq`` and of ``xq`` are exact integers. The rest is float32 in one order, so every
instruction set gives the same bits, and a row's are the same in any batch. For a row of x:

    total = 0
    for each group: part = fma(-zero, sum of xq, sum of code * xq)
                    total = fma(part, scale, total)               by groups: fma(part * sx, scale, total)
    y = fma(total, sx, bias), rounded to the dtype of x           by groups: total + bias

compressed-tensors calibrates a static x_scale as absmax / 127.5 and has codes down to -128. Ours end at -127. Within
the calibrated range they are as near, since its end, -127.5, lies between two codes; what lies beyond is clipped by
both. So the sum of two products fits 16 bits, whatever the weights are.

A row with a NaN or an infinity is NaN. A row of zeros, or of numbers so small that sx would be 0, has the codes 0.
``quantized_weight.py`` has the layout of the weights. T rows, K in_features, N out_features, E experts.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.quantized_linear import (
    FORM as FORM_OF_WEIGHT,
)
from compiled_llm.ops.linear.quantized_linear import (
    WEIGHT,
    by_experts,
    fused_rows_fake,
    grouped_rows_fake,
    rows_fake,
)
from compiled_llm.ops.linear.quantized_weight import DTYPE_NAMES, QuantizedWeight, WeightFormat, unpack_quantized_rows
from compiled_llm.ops.linear.surroundings import SCHEMA, Surroundings, surrounded

FORM = f"bool by_groups, {FORM_OF_WEIGHT}"


def quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    by_groups: bool, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """``x @ W.T + bias``, with integer products of quantised rows of ``x`` and the codes of ``W``.

    Args:
        x: ``[T, K]`` bfloat16, float32 or float16; rows may be strided, the last stride is 1.
        codes, scales, zeros: ``W`` as ``pack_quantized_rows`` packs it.
        bias: ``[N]`` in the dtype of ``x``, or None.
        x_scale: ``[1]`` float32, for all rows; or None: each row's own, or that of each group of a row.
        by_groups: whether each group of a row of ``x`` has a scale of its own; not with ``x_scale`` or without groups.
        element: "int8" or "int4".
        group_size: inputs of an output that share a scale; 0: all.
        out_features: N.

    Returns:
        ``[T, N]`` in the dtype of ``x``, contiguous.
    """
    return torch.ops.compiled_llm.quantized_linear_a8(
        x, codes, scales, zeros, bias, x_scale, by_groups, element, group_size, out_features
    )


def grouped_quantized_linear_a8(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    rows: Tensor | None, starts: Tensor, by_groups: bool, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """``quantized_linear_a8`` of experts, each with rows of its own.

    Weights, and ``bias`` ``[E, N]``, have one more dimension in front. ``rows`` and ``starts`` are those of
    ``grouped_linear``: rows that belong to no expert are not written.
    """
    return torch.ops.compiled_llm.grouped_quantized_linear_a8(
        x, codes, scales, zeros, bias, x_scale, rows, starts, by_groups, element, group_size, out_features
    )


def fused_quantized_linear_a8(x: Tensor, *weight: Any, around: Surroundings) -> Tensor:
    """``quantized_linear_a8`` with ``around`` it. Its ``x_scale`` is that of activations after the norm.

    On a GPU one launch, of more than ``triton_quantized_a8.FEW_ROWS`` rows two, with the bits of the single ops.
    """
    return torch.ops.compiled_llm.fused_quantized_linear_a8(x, *weight, *around)


# -- In plain torch


def quantize_activations(x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """``xq`` ``[T, K]`` int8 and ``sx`` ``[T]`` float32, which is NaN where a row has a number that is not finite."""
    values = x.float()
    largest = values.abs().amax(1)
    scale = largest / 127 if x_scale is None else x_scale.expand(len(x))
    finite = values.isfinite().all(1)
    divisor = torch.where(finite & (scale > 0), scale, torch.full_like(scale, torch.inf))
    codes = torch.round(values / divisor[:, None]).nan_to_num(0).clamp(-127, 127).to(torch.int8)
    return codes, torch.where(finite, scale, torch.full_like(scale, torch.nan))


def quantize_activations_by_groups(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``xq`` ``[T, K]`` int8 and ``sx`` ``[T, G]`` float32, each group quantised as a row of its own."""
    rows, in_features = x.shape
    groups = F.pad(x, (0, -in_features % group_size)).unflatten(1, (-1, group_size))
    codes, scales = quantize_activations(groups.flatten(0, 1), None)
    return codes.view(rows, groups.shape[1] * group_size)[:, :in_features], scales.view(rows, groups.shape[1])


def quantized_linear_a8_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    by_groups: bool, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch. Sums and the steps of float32 are computed in float64 and then rounded."""
    form = WeightFormat(element, group_size, zeros is not None, DTYPE_NAMES[scales.dtype])
    in_features = x.shape[1]
    ids = torch.arange(out_features, device=codes.device)
    rows = unpack_quantized_rows(QuantizedWeight(codes, scales, zeros), ids, form, in_features)
    assert not by_groups or x_scale is None, "a scale of all activations"
    xq, sx = quantize_activations_by_groups(x, group_size) if by_groups else quantize_activations(x, x_scale)
    size, total = group_size or in_features, torch.zeros(len(x), out_features, device=x.device)
    for g in range(form.num_groups(in_features)):
        inputs = slice(g * size, (g + 1) * size)
        part = xq[:, inputs].double()
        products = (part @ rows.codes[:, inputs].double().T).float()
        if rows.zeros is not None:
            products = _fma(-rows.zeros[:, g], part.sum(1, keepdim=True).float(), products)
        if by_groups:
            products = products * sx[:, g : g + 1]
        total = _fma(products, rows.scales[:, g], total)
    added = torch.zeros_like(total) if bias is None else bias.float()
    return (total + added if by_groups else _fma(total, sx[:, None], added)).to(x.dtype)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` of float32, rounded once (but for one in 2^29 that are rounded twice)."""
    return (a.double() * b.double() + c.double()).float()


def grouped_quantized_linear_a8_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, x_scale: Tensor | None,
    rows: Tensor | None, starts: Tensor, by_groups: bool, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    form = by_groups, element, group_size, out_features
    return by_experts(quantized_linear_a8_reference, x, codes, scales, zeros, bias, (x_scale,), rows, starts, form)


def fused_quantized_linear_a8_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return surrounded(quantized_linear_a8, x, *args)


define_op(
    f"quantized_linear_a8({WEIGHT}, Tensor? x_scale, {FORM}) -> Tensor",
    reference=quantized_linear_a8_reference,
    fake=rows_fake,
    cpu="quantized_linear_a8_cpu",
    gpu=on_gpu("linear.triton_quantized_a8:quantized_linear_a8"),
)
define_op(
    f"grouped_quantized_linear_a8({WEIGHT}, Tensor? x_scale, Tensor? rows, Tensor starts, {FORM}) -> Tensor",
    reference=grouped_quantized_linear_a8_reference,
    fake=functools.partial(grouped_rows_fake, rows=5),
    cpu="quantized_linear_a8_cpu",
    gpu=on_gpu("moe.triton_quantized_grouped:grouped_quantized_linear_a8"),
)
define_op(
    f"fused_quantized_linear_a8({WEIGHT}, Tensor? x_scale, {FORM}, {SCHEMA}) -> Tensor",
    reference=fused_quantized_linear_a8_reference,
    fake=fused_rows_fake,
    gpu=on_gpu("linear.triton_quantized_a8:quantized_linear_a8"),
)
