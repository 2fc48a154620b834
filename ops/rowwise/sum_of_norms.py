"""The sum of two norms: schema and registration. On a GPU one launch; a CPU has its op for each norm."""

import torch
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from compiled_llm.ops.rowwise.rowwise import rms_norm

LIBRARY.define("sum_of_norms(Tensor x, Tensor x_norm, Tensor y, Tensor y_norm, float eps) -> Tensor")


def sum_of_norms(x: Tensor, x_norm: Tensor, y: Tensor, y_norm: Tensor, eps: float) -> Tensor:
    """``rms_norm(x, x_norm, eps) + rms_norm(y, y_norm, eps)``, two ``[T, D]`` of one dtype: ``[T, D]``."""
    if x.is_cuda:
        return torch.ops.compiled_llm.sum_of_norms(x, x_norm, y, y_norm, eps)
    return rms_norm(x, x_norm, eps) + rms_norm(y, y_norm, eps)


def sum_of_norms_reference(x: Tensor, x_norm: Tensor, y: Tensor, y_norm: Tensor, eps: float) -> Tensor:
    """The op in plain torch."""
    return rms_norm_reference(x, x_norm, eps) + rms_norm_reference(y, y_norm, eps)


@torch.library.register_fake("compiled_llm::sum_of_norms", lib=LIBRARY)
def _fake(x: Tensor, *args) -> Tensor:
    return x.new_empty(x.shape)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.rowwise import triton_sum_of_norms  # the first call on a GPU loads Triton, not the import

    return triton_sum_of_norms.sum_of_norms(*args)


LIBRARY.impl("sum_of_norms", sum_of_norms_reference, "CompositeExplicitAutograd")
LIBRARY.impl("sum_of_norms", _cuda, "CUDA")
