"""Linear layer whose outputs add up their inputs in one order for every number of rows, for GPUs: schema, registration.

``y = x @ W.T + bias``. A library chooses among many kernels by the number of rows, and cuts the sum over the inputs
into other pieces for one row than for a thousand. ``triton_linear.py`` says why this one does not.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import LIBRARY

LIBRARY.define("exact_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32 (never in TF32) and rounded once.

    Args:
        x: ``[T, K]``; float32, bfloat16 or float16; rows may be strided, the last stride is 1.
        weight: ``[N, K]`` contiguous, bias: ``[N]`` or None; dtype of ``x``.

    Returns:
        ``[T, N]`` contiguous, dtype of ``x``.
    """
    return torch.ops.compiled_llm.exact_linear(x, weight, bias)


def exact_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op in plain torch: its numbers, not its order."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@torch.library.register_fake("compiled_llm::exact_linear", lib=LIBRARY)
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from compiled_llm.ops.linear import triton_linear  # the first call on a GPU loads Triton, not the import

    return triton_linear.exact_linear(x, weight, bias)


LIBRARY.impl("exact_linear", exact_linear_reference, "CompositeExplicitAutograd")
LIBRARY.impl("exact_linear", _cuda, "CUDA")
