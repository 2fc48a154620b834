"""Heads that adapters bring whole, in the place of the model's: reference, schema, registration.

    y[t] = W[s] @ x[t]        s = slots[t] - 1; a row whose slot is 0, or has no head of its own, stays as it is

PEFT's ``modules_to_save``. Letters: T rows, K inputs, V tokens, S slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.packed_linear import packed_linear_reference


def own_head(y: Tensor, x: Tensor, slots: Tensor, weights: Tensor, present: Tensor) -> None:
    """Write the rows of ``y`` whose slots have a head of their own; sums are in float32, in one order.

    A row is computed by itself: its bits depend neither on the other rows nor on their slots. Where no row has such a
    slot, nothing is read but ``slots`` and ``present``.

    Args:
        y: ``[T, V]`` float32, bfloat16 or float16, the last stride 1; written in place.
        x: ``[T, K]`` in the dtype of ``y``, the last stride 1.
        slots: ``[T]`` int32; those above S have no head of their own.
        weights: ``[S, V, K]`` in the dtype of ``y``, contiguous; for CPUs what ``pack_weight`` makes of each
            ``[V, K]``, ``[S, ceil(V / 16), words, 16, inputs of a word]``.
        present: ``[S]`` int32: 1 for slots that have a head of their own. Other slots' weights are never read.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    torch.ops.compiled_llm.own_head(y, x, slots, weights, present)


def own_head_reference(y: Tensor, x: Tensor, slots: Tensor, weights: Tensor, present: Tensor) -> None:
    """The op in plain torch: a slot after the other."""
    for slot in present.nonzero()[:, 0].tolist():
        rows = (slots == slot + 1).nonzero()[:, 0]
        if len(rows) and weights.dim() == 5:
            y[rows] = packed_linear_reference(x[rows], weights[slot], None, y.shape[1])
        elif len(rows):
            y[rows] = F.linear(x[rows].float(), weights[slot].float()).to(y.dtype)


define_op(
    "own_head(Tensor(a!) y, Tensor x, Tensor slots, Tensor weights, Tensor present) -> ()",
    reference=own_head_reference,
    fake=lambda y, x, slots, weights, present: None,
    cpu="linear_cpu",
    gpu=on_gpu("linear.triton_own_head:own_head"),
)
