"""Linear layers on quantised weights, activations as they are: references, schemas, registration.

    y[t, n] = bias[n] + sum over g of  scale[n, g] * (sum over k in g of (value(code[n, k]) - zero[n, g]) * x[t, k])

in float32, in one order for any number of rows (CPUs with AMX round the weights of some kinds to bfloat16 first:
``quantized_linear_cpu_amx.h``). ``quantized_weight.py`` has the elements, the groups and the layout. A
decode step reads every code once, so it takes the time that reading those fewer bytes takes. On GPUs weights lie
as ``quantized_weight_gpu.py`` packs them.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.quantized_weight import (
    DTYPE_NAMES,
    QuantizedWeight,
    WeightFormat,
    dequantize,
    unpack_quantized_rows,
)
from compiled_llm.ops.linear.surroundings import SCHEMA, Surroundings, surrounded

WEIGHT = "Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias"
FORM = "str element, int group_size, int out_features"


def quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, element: str, group_size: int,
    out_features: int,
) -> Tensor:  # fmt: skip
    """``x @ W.T + bias`` for a quantised ``W``, accumulated in float32 and rounded once.

    Args:
        x: ``[T, K]`` bfloat16, float32 or float16; rows may be strided, the last stride is 1.
        codes, scales, zeros: of a ``QuantizedWeight`` ``[N, K]``, contiguous; zeros may be None.
        bias: ``[N]`` in the dtype of ``x``, or None.
        element: "int8", "int4", "fp8" or "fp4".
        group_size: inputs of an output that share a scale; 0: all.
        out_features: N.

    Returns:
        ``[T, N]`` in the dtype of ``x``, contiguous.
    """
    return torch.ops.compiled_llm.quantized_linear(x, codes, scales, zeros, bias, element, group_size, out_features)


def grouped_quantized_linear(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: Tensor | None,
    starts: Tensor, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """The layers of E experts, each for rows of its own, as ``grouped_linear`` has them.

    Args:
        x: ``[T, K]`` bfloat16, float32 or float16; rows may be strided, the last stride is 1.
        codes, scales, zeros: those of ``quantized_linear``, with E in front.
        bias: ``[E, N]`` in the dtype of ``x``, or None.
        rows: ``[R]`` int32: the row of ``x`` that each row takes; None: its own, and R is T.
        starts: ``[E + 1]`` int32, ascending, from 0 to at most R. Expert e has rows ``starts[e]`` to ``starts[e + 1]``.
        element, group_size, out_features: those of ``quantized_linear``.

    Returns:
        ``[R, N]`` in the dtype of ``x``, contiguous. Rows that belong to no expert are not written.
    """
    return torch.ops.compiled_llm.grouped_quantized_linear(
        x, codes, scales, zeros, bias, rows, starts, element, group_size, out_features
    )


def fused_quantized_linear(x: Tensor, *weight: Any, around: Surroundings) -> Tensor:
    """``quantized_linear`` of ``x`` ``[T, K]``, bfloat16 or float16, and its other arguments, with ``around`` it.

    On a GPU one launch, for few rows, with the bits of the single ops.

    Returns:
        ``[T, N]``, with a gated activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.fused_quantized_linear(x, *weight, *around)


def quantized_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, element: str, group_size: int,
    out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch: dequantise, multiply in float32, round once."""
    form = WeightFormat(element, group_size, zeros is not None, DTYPE_NAMES[scales.dtype])
    packed = QuantizedWeight(codes, scales, zeros)
    rows = unpack_quantized_rows(packed, torch.arange(out_features, device=codes.device), form, x.shape[1])
    return F.linear(x.float(), dequantize(rows, form), None if bias is None else bias.float()).to(x.dtype)


def grouped_quantized_linear_reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, rows: Tensor | None,
    starts: Tensor, element: str, group_size: int, out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    form = element, group_size, out_features
    return by_experts(quantized_linear_reference, x, codes, scales, zeros, bias, (), rows, starts, form)


def by_experts(
    reference: Callable[..., Tensor], x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None,
    bias: Tensor | None, shared: tuple, rows: Tensor | None, starts: Tensor, form: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """``reference`` of an expert at a time, for the rows that are its own. Rows that belong to no expert are 0."""
    x = x if rows is None else x[rows]
    out = x.new_zeros(x.shape[0], form[-1])
    for expert, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        if end > first:
            own = (None if of is None else of[expert] for of in (codes, scales, zeros, bias))
            out[first:end] = reference(x[first:end], *own, *shared, *form)
    return out


def fused_quantized_linear_reference(x: Tensor, *args) -> Tensor:
    """The op by the single ops."""
    return surrounded(quantized_linear, x, *args)


def rows_fake(x: Tensor, *args) -> Tensor:
    """The fake of a layer's op, whose last argument is N."""
    return x.new_empty(x.shape[0], args[-1])


def grouped_rows_fake(x: Tensor, *args, rows: int = 4) -> Tensor:
    """The fake of the op for experts; ``rows``: the place of these among ``args``."""
    return x.new_empty((x if args[rows] is None else args[rows]).shape[0], args[-1])


def fused_rows_fake(x: Tensor, *args) -> Tensor:
    """The fake of a layer's op with its surroundings, before which N comes."""
    count = len(Surroundings._fields)
    return x.new_empty(x.shape[0], Surroundings(*args[-count:]).outputs(args[-count - 1]))


define_op(
    f"quantized_linear({WEIGHT}, {FORM}) -> Tensor",
    reference=quantized_linear_reference,
    fake=rows_fake,
    cpu="quantized_linear_cpu",
    gpu=on_gpu("linear.triton_quantized:quantized_linear"),
)
define_op(
    f"grouped_quantized_linear({WEIGHT}, Tensor? rows, Tensor starts, {FORM}) -> Tensor",
    reference=grouped_quantized_linear_reference,
    fake=grouped_rows_fake,
    cpu="quantized_linear_cpu",
    gpu=on_gpu("moe.triton_quantized_grouped:grouped_quantized_linear"),
)
define_op(
    f"fused_quantized_linear({WEIGHT}, {FORM}, {SCHEMA}) -> Tensor",
    reference=fused_quantized_linear_reference,
    fake=fused_rows_fake,
    gpu=on_gpu("linear.triton_quantized:quantized_linear"),
)
