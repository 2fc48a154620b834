"""The quantised KV cache: int8 or fp8 codes, with one float32 scale for each token and KV head.

A key or value row ``x`` of H elements is kept as ``codes = round(x / scale)`` with ``scale = max|x| / CODE_MAX``,
computed from the row itself as it is written. So nothing has to be calibrated and later tokens change nothing. The
kernels apply scales where that costs least, to the score in ``q . k = (q . codes) * scale`` and to the weight in
``sum p v = sum (p * scale) codes``, so no element is ever multiplied by its scale.

Memory a token, KV head and tensor: H + 4 bytes, against 2 H in bfloat16; 51.6% of it at H = 128.

Rows of unusual data:

- all zeros: codes 0 and the smallest scale, which is neither zero nor denormal.
- not finite (NaN or infinity anywhere in the row): codes 0 and scale NaN, so every query that sees this token becomes
  NaN, as it would without quantisation; other requests do not change.

Operations and their order are fixed (``inverse = 1 / maximum * CODE_MAX``, one product an element, ``scale = maximum /
CODE_MAX``, each operation correctly rounded; codes are rounded with ties to even), so that every implementation writes
the same bits.
"""

import torch
from torch import Tensor

CODE_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert e4m3
# Below this a row's maximum counts as this: its reciprocal and its scale are then normal float32 numbers.
SMALLEST_MAXIMUM = 2.0**-100


def is_quantised(dtype: torch.dtype) -> bool:
    """Whether a KV cache of this dtype needs scales."""
    return dtype in CODE_MAX


def check_capability(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """``ValueError`` unless CUDA GPUs of this compute capability have the numbers of a KV cache's dtype."""
    if dtype == torch.float8_e4m3fn and capability < FP8_CAPABILITY:
        wanted, given = (".".join(map(str, numbers)) for numbers in (FP8_CAPABILITY, capability))
        raise ValueError(
            f"kv_cache_dtype='fp8' needs a GPU of compute capability {wanted} or more, given one of {given}: use "
            "'int8', which takes the same memory"
        )


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows ``[..., H]`` -> codes ``[..., H]`` of ``dtype``, int8 or float8_e4m3fn, and scales ``[...]`` float32."""
    maximum = x.float().abs().amax(-1)
    finite = maximum.isfinite()  # amax keeps a NaN
    maximum = torch.where(finite, maximum, 0.0).clamp_min(SMALLEST_MAXIMUM)
    limit = CODE_MAX[dtype]
    scaled = x.float() * (maximum.reciprocal() * limit)[..., None]
    scaled = torch.where(finite[..., None], scaled, 0.0).clamp(-limit, limit)
    codes = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    scale = maximum / torch.full_like(maximum, limit)  # by a number, CUDA would multiply with its reciprocal
    return codes, torch.where(finite, scale, float("nan"))


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers ``[..., H]`` float32 of codes ``[..., H]`` and their scales ``[...]``."""
    return codes.float() * scale[..., None]
