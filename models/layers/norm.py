"""Root mean square norm."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, in the dtype of ``x`` (Zhang and Sennrich, 2019).

    The norm is computed in float32. A ``weight`` in the dtype of ``x`` multiplies what has been rounded to it, as Llama
    does; a float32 one multiplies before the rounding, as Gemma does with its ``1 + w``.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype) if weight.dtype == x.dtype else (y * weight).to(x.dtype)
