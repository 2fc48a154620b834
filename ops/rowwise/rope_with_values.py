"""Queries and keys turned by their positions, and values normed: schema and registration. On a GPU one launch.

A CPU has its two ops, which the compiled step calls itself.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.reference import rms_norm_reference, rope_reference
from compiled_llm.ops.rowwise.rowwise import rms_norm, rope

LIBRARY.define(
    "rope_with_values(Tensor qkv, Tensor cos_sin, Tensor q_norm, Tensor k_norm, Tensor v_norm, int num_heads,"
    " int num_kv_heads, float eps) -> (Tensor, Tensor, Tensor)"
)


def rope_with_values(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor, k_norm: Tensor, v_norm: Tensor, num_heads: int, num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``rope``, and ``rms_norm`` of each head of the values.

    Args:
        qkv: ``[T, (N + K) * H]`` or more columns: queries and keys first; the last ``K * H`` are the values, which may
            be what the keys are made of.
        v_norm: ``[H]``.

    The other arguments are those of ``rope``.

    Returns:
        Queries ``[T, N, H]``, keys and values ``[T, K, H]``.
    """
    given = qkv, cos_sin, q_norm, k_norm, v_norm, num_heads, num_kv_heads, eps
    if qkv.is_cuda:
        return torch.ops.compiled_llm.rope_with_values(*given)
    q, k = rope(qkv, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, eps)
    last = qkv[:, -num_kv_heads * cos_sin.shape[1] :]
    v = rms_norm(last.reshape(-1, cos_sin.shape[1]), v_norm, eps)
    return q, k, v.unflatten(0, (-1, num_kv_heads))


def rope_with_values_reference(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor, k_norm: Tensor, v_norm: Tensor, num_heads: int, num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The op in plain torch."""
    q, k = rope_reference(qkv, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, eps)
    values = qkv[:, -num_kv_heads * cos_sin.shape[1] :].unflatten(-1, (num_kv_heads, -1))
    return q, k, rms_norm_reference(values, v_norm, eps)


@torch.library.register_fake("compiled_llm::rope_with_values", lib=LIBRARY)
def _fake(
    qkv: Tensor, cos_sin: Tensor, q_norm, k_norm, v_norm, num_heads: int, num_kv_heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, head_dim = cos_sin.shape
    q, k = qkv.new_empty(rows, num_heads, head_dim), qkv.new_empty(rows, num_kv_heads, head_dim)
    return q, k, torch.empty_like(k)


def _cuda(*args) -> tuple[Tensor, Tensor, Tensor]:
    from compiled_llm.ops.rowwise import triton_rowwise  # the first call on a GPU loads Triton, not the import

    return triton_rowwise.rope_with_values(*args)


LIBRARY.impl("rope_with_values", rope_with_values_reference, "CompositeExplicitAutograd")
LIBRARY.impl("rope_with_values", _cuda, "CUDA")
