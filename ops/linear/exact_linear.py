"""Linear layer whose outputs add up their inputs in one order for every number of rows, for GPUs: schema, registration.

``y = x @ W.T + bias``, with what follows it in a model. A library chooses among many kernels by the number of rows,
and cuts the sum over the inputs into other pieces for one row than for a thousand. ``triton_linear.py`` says why this
one does not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.surroundings import FOLLOWING, Surroundings, surrounded

NOTHING = Surroundings()


def exact_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    around: Surroundings = NOTHING,
    counters: Tensor | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32 (never in TF32) and rounded once, with what is ``around`` it.

    On a GPU with the bits of the single ops. A norm before it is an op of its own: each program would compute it anew,
    and wait for it before it multiplies (measured on an H200, docs/design.md).

    Args:
        x: ``[T, K]``; bfloat16 or float16, without surroundings also float32; rows may be strided, the last stride
            is 1.
        weight: ``[N, K]`` contiguous, bias: ``[N]`` or None; dtype of ``x``.
        counters: int32 ``[num_counters(N, K)]``, zeros, and zeros again when the op has run; two ops that run at the
            same time need their own. With them several programs share a sum; without, or of many rows, one has it all,
            and the same bits.

    Returns:
        ``[T, N]``, with a gated activation ``[T, N / 2]``; contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.exact_linear(x, weight, bias, counters, *around.following)


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in plain torch, rounded once to the dtype of ``x``."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def exact_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, counters, *following) -> Tensor:
    """The op in plain torch: its numbers, not its order."""
    return surrounded(linear_in_float32, x, weight, bias, None, 0.0, *following)


def _fake(x: Tensor, weight: Tensor, bias, counters, *following) -> Tensor:
    return x.new_empty(x.shape[0], Surroundings(None, 0.0, *following).outputs(weight.shape[0]))


define_op(
    f"exact_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? counters, {FOLLOWING}) -> Tensor",
    reference=exact_linear_reference,
    fake=_fake,
    gpu=on_gpu("linear.triton_linear:exact_linear"),
)
