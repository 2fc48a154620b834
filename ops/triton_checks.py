"""What launches of Triton kernels refuse: tensors of another shape, dtype, layout or device than a kernel takes."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse(op: str, name: str, given: Tensor, allowed: str) -> NoReturn:
    """``ValueError`` that says what the argument ``name`` of ``op`` must be."""
    raise ValueError(
        f"{op}: {name} must be {allowed}, got {list(given.shape)} of {given.dtype} with strides "
        f"{list(given.stride())} on {given.device}"
    )


def check_rows(op: str, x: Tensor) -> None:
    """``ValueError`` unless ``x`` has rows of numbers."""
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] != 1) or x.dtype not in DTYPES:
        refuse(op, "x", x, "[T, K] of float32, bfloat16 or float16 with the last stride 1")


def check_contiguous(
    op: str, name: str, given: Tensor | None, shape: Sequence[int], device: torch.device, *dtypes: torch.dtype
) -> None:
    """``ValueError`` unless ``given`` is None, or contiguous, of this shape and of one of ``dtypes``."""
    if given is None:
        return
    fits = tuple(given.shape) == tuple(shape) and given.dtype in dtypes and given.device == device
    if not fits or not given.is_contiguous():
        refuse(op, name, given, f"a contiguous {list(shape)} of {' or '.join(map(str, dtypes))} on {device}")


def check_strided(
    op: str, name: str, given: Tensor | None, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> None:
    """``ValueError`` unless ``given`` is None, or of this shape and dtype, with the last stride 1."""
    if given is None:
        return
    fits = tuple(given.shape) == tuple(shape) and given.dtype == dtype and given.device == device
    if not fits or (given.stride(-1) != 1 and given.shape[-1] != 1):
        refuse(op, name, given, f"{list(shape)} of {dtype} on {device} with the last stride 1")
