"""RMS norms whose launch on a GPU also asks the L2 cache for weights of the product that follows.

A norm of few rows leaves the memory idle, and the product behind it begins with a wait for weights. What is asked for
changes no number: on other devices these are the norms alone. ``triton_rowwise.py`` has the launches.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.rowwise import add_rms_norm, rms_norm

LIBRARY.define("rms_norm_asking(Tensor x, Tensor weight, float eps, Tensor asked, int asked_bytes) -> Tensor")
LIBRARY.define(
    "add_rms_norm_asking(Tensor x, Tensor delta, Tensor weight, float eps, Tensor asked, int asked_bytes)"
    " -> (Tensor, Tensor)"
)


def norm_asking(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, asked: Tensor, asked_bytes: int
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm``; without a ``delta``, ``x`` itself and its ``rms_norm``.

    Args:
        asked: ``[N, D]`` contiguous; asked_bytes: about so many of it, the first ones of each row.
    """
    if delta is None:
        return x, torch.ops.compiled_llm.rms_norm_asking(x, weight, eps, asked, asked_bytes)
    return torch.ops.compiled_llm.add_rms_norm_asking(x, delta, weight, eps, asked, asked_bytes)


def _reference(x: Tensor, weight: Tensor, eps: float, asked: Tensor, asked_bytes: int) -> Tensor:
    return rms_norm(x, weight, eps)


def _add_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, asked: Tensor, asked_bytes: int
) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, delta, weight, eps)


@torch.library.register_fake("compiled_llm::rms_norm_asking", lib=LIBRARY)
def _fake(x: Tensor, *args) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("compiled_llm::add_rms_norm_asking", lib=LIBRARY)
def _add_fake(x: Tensor, *args) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.rowwise import triton_rowwise  # the first call on a GPU loads Triton, not the import

    return triton_rowwise.rms_norm_asking(*args)


def _add_cuda(*args) -> tuple[Tensor, Tensor]:
    from compiled_llm.ops.rowwise import triton_rowwise

    return triton_rowwise.add_rms_norm_asking(*args)


LIBRARY.impl("rms_norm_asking", _reference, "CompositeExplicitAutograd")
LIBRARY.impl("rms_norm_asking", _cuda, "CUDA")
LIBRARY.impl("add_rms_norm_asking", _add_reference, "CompositeExplicitAutograd")
LIBRARY.impl("add_rms_norm_asking", _add_cuda, "CUDA")
