"""The linear layers of experts, each for rows of its own: references, schemas, registration.

    y[r] = x[rows[r]] @ W[e].T + bias[e]        for the rows r from starts[e] to starts[e + 1]

One op for all experts. It reads the weights of each expert that has rows once. Its shapes are the same whichever
experts have rows. An output is one float32 sum over the inputs in one order, whatever other rows the expert has.
``routing.py`` makes ``rows`` and ``starts``. E experts, R rows, N out_features, K in_features.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.lora import add_lora_reference, slots_of_rows
from compiled_llm.ops.linear.packed_linear import pack_weight
from compiled_llm.ops.moe.routing import weighted_sum_added_reference
from compiled_llm.ops.rowwise.reference import GATES, clamped_swiglu_reference, gated_activation_reference


def rows_of_a_tile(rows: int, num_experts: int) -> int:
    """On a GPU: twice the average, so that an expert with some more rows still has one tile."""
    return -(-2 * rows // num_experts)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor) -> Tensor:
    """The experts' layers, accumulated in float32 and rounded once.

    Args:
        x: ``[T, K]`` float32, bfloat16 or float16; rows may be strided, the last stride is 1.
        weight: ``[E, N, K]`` contiguous, bias: ``[E, N]`` or None; dtype of ``x``.
        rows: ``[R]`` int32: the row of ``x`` that each row takes; None: its own, and R is T.
        starts: ``[E + 1]`` int32, ascending, from 0 to at most R.

    Returns:
        ``[R, N]`` in the dtype of ``x``, contiguous. Rows that belong to no expert are not written.
    """
    return torch.ops.compiled_llm.grouped_linear(x, weight, bias, rows, starts)


def grouped_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor, activation: str,
    alpha: float = 0.0, limit: float = 0.0, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """``grouped_linear``, and ``gated_activation`` or ``clamped_swiglu`` of what it gives, in one launch of a GPU.

    Args:
        activation: one of ``gated_activation``, or "clamped_swiglu", which ``alpha`` and ``limit`` belong to.
        lora: of adapters, as ``Surroundings.lora``, of S E slots, in 16 bits: ``rows`` are then tokens.

    Returns:
        ``[R, N / 2]``.
    """
    assert activation in GATES
    return torch.ops.compiled_llm.grouped_gated_linear(
        x, weight, bias, rows, starts, activation, alpha, limit, list(lora)
    )


def grouped_linear_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, starts: Tensor, places: Tensor, weights: Tensor,
    beside: Tensor | None, residual: Tensor | None, counters: Tensor, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """``grouped_linear`` and ``weighted_sum_added`` of what it gives, in one launch of a GPU: for few rows.

    Args:
        x: ``[R, K]``; bfloat16 or float16.
        tokens, starts, places, weights: as ``routed_rows`` gives them: padding is behind the tokens that are real.
        counters: int32, one for each token and 16 outputs or more, zero before and after.
        lora: as of ``grouped_gated_linear``.

    Returns:
        ``[T, N]`` in the dtype of ``x``.
    """
    return torch.ops.compiled_llm.grouped_linear_sum(
        x, weight, bias, tokens, starts, places, weights, beside, residual, counters, list(lora)
    )


def grouped_packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor, out_features: int
) -> Tensor:
    """``grouped_linear`` for weights packed by ``pack_weights``, for CPUs. ``out_features``: N."""
    return torch.ops.compiled_llm.grouped_packed_linear(x, packed, bias, rows, starts, out_features)


def pack_weights(weights: list[Tensor]) -> Tensor:
    """Each expert's ``[N, K]`` as ``pack_weight`` packs it: ``[E, ceil(N / 16), ceil(K / I), 16, I]``."""
    return torch.stack([pack_weight(weight) for weight in weights])


def grouped_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor
) -> Tensor:
    """The op in plain torch: an expert at a time. Rows that belong to none are 0."""
    x = x if rows is None else x[rows]
    out = x.new_zeros(x.shape[0], weight.shape[1])
    ends = starts.tolist()
    for expert, (first, end) in enumerate(itertools.pairwise(ends)):
        if end > first:
            own = None if bias is None else bias[expert].float()
            out[first:end] = F.linear(x[first:end].float(), weight[expert].float(), own).to(x.dtype)
    return out


def grouped_gated_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor, activation: str, alpha: float,
    limit: float, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    y = grouped_linear_reference(x, weight, bias, rows, starts)
    if lora:
        assert rows is not None, "tokens"
        add_lora_reference(y, x[rows], slots_of_rows(lora[0], rows, starts, len(weight)), *lora[1:-1])
    if activation == "clamped_swiglu":
        return clamped_swiglu_reference(y, alpha, limit)
    return gated_activation_reference(y, activation)


def grouped_linear_sum_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, starts: Tensor, places: Tensor, weights: Tensor,
    beside: Tensor | None, residual: Tensor | None, counters: Tensor, lora: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    y = grouped_linear_reference(x, weight, bias, None, starts)
    if lora:
        add_lora_reference(y, x, slots_of_rows(lora[0], tokens, starts, len(weight)), *lora[1:-1])
    return weighted_sum_added_reference(y, places, weights, beside, residual)


def grouped_packed_linear_reference(
    x: Tensor, packed: Tensor, bias: Tensor | None, rows: Tensor | None, starts: Tensor, out_features: int
) -> Tensor:
    """The op in plain torch: unpack, multiply."""
    weight = packed.transpose(2, 3).reshape(packed.shape[0], packed.shape[1] * packed.shape[3], -1)
    return grouped_linear_reference(x, weight[:, :out_features, : x.shape[1]], bias, rows, starts)


_EXPERTS = "Tensor? bias, Tensor? rows, Tensor starts"


def _rows(x: Tensor, rows: Tensor | None, columns: int) -> Tensor:
    """A fake result."""
    return x.new_empty((x if rows is None else rows).shape[0], columns)


define_op(
    f"grouped_linear(Tensor x, Tensor weight, {_EXPERTS}) -> Tensor",
    reference=grouped_linear_reference,
    fake=lambda x, weight, bias, rows, *args: _rows(x, rows, weight.shape[1]),
    gpu=on_gpu("moe.triton_grouped:grouped_linear"),
)
define_op(
    f"grouped_gated_linear(Tensor x, Tensor weight, {_EXPERTS}, str activation, float alpha, float limit,"
    " Tensor[] lora) -> Tensor",
    reference=grouped_gated_linear_reference,
    fake=lambda x, weight, bias, rows, *args: _rows(x, rows, weight.shape[1] // 2),
    gpu=on_gpu("moe.triton_grouped:grouped_linear"),
)
define_op(
    "grouped_linear_sum(Tensor x, Tensor weight, Tensor? bias, Tensor tokens, Tensor starts, Tensor places,"
    " Tensor weights, Tensor? beside, Tensor? residual, Tensor(a!) counters, Tensor[] lora) -> Tensor",
    reference=grouped_linear_sum_reference,
    fake=lambda x, weight, bias, tokens, starts, places, *args: x.new_empty(places.shape[0], weight.shape[1]),
    gpu=on_gpu("moe.triton_grouped:grouped_linear_sum"),
)
define_op(
    f"grouped_packed_linear(Tensor x, Tensor packed, {_EXPERTS}, int out_features) -> Tensor",
    reference=grouped_packed_linear_reference,
    fake=lambda x, packed, bias, rows, starts, out_features: _rows(x, rows, out_features),
    cpu="linear_cpu",
)
