"""Linear layers of single heads on a GPU, each for its own head's rows: reference, schema, registration.

    y[t, n] = W[n] @ x[t, n]

One op for all heads, which takes ``x`` as it lies and gives ``y`` in the order of tokens: nothing is copied around it.
A CPU has ``grouped_linear`` for that. T tokens, N heads, K inputs of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.lora import add_lora_reference, slots_of_rows


def head_linear(x: Tensor, weight: Tensor, lora: Sequence[Tensor] = ()) -> Tensor:
    """Accumulated in float32 over the inputs in one order, whatever T is, and rounded once.

    Args:
        x: ``[T, N, K]`` float32, bfloat16 or float16; any strides with the last one 1.
        weight: ``[N, outputs of a head, K]`` contiguous, dtype of ``x``.
        lora: of adapters, as ``Surroundings.lora``, in 16 bits: with the bits of ``lora_followed``.

    Returns:
        ``[T, N, outputs of a head]`` contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.head_linear(x, weight, list(lora))


def head_linear_reference(x: Tensor, weight: Tensor, lora: Sequence[Tensor] = ()) -> Tensor:
    """The op in plain torch."""
    y = x.transpose(0, 1).float() @ weight.transpose(1, 2).float()
    y = y.to(x.dtype).transpose(0, 1).contiguous()
    if lora:
        slots = slots_of_rows(lora[0], None, None, x.shape[1])
        add_lora_reference(y.flatten(0, 1), x.flatten(0, 1), slots, *lora[1:-1])
    return y


define_op(
    "head_linear(Tensor x, Tensor weight, Tensor[] lora) -> Tensor",
    reference=head_linear_reference,
    fake=lambda x, weight, lora: x.new_empty(*x.shape[:2], weight.shape[1]),
    gpu=on_gpu("linear.triton_head_linear:head_linear"),
)
