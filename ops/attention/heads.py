"""Queries, keys and values of rows that have them side by side."""

import torch
from torch import Tensor

from compiled_llm.ops.rowwise.rowwise import rms_norm, rope


def heads_of(
    qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Queries, keys and values ``[T, N or K, H]``, views of ``qkv``; None where it has no keys."""
    heads = qkv.unflatten(-1, (-1, head_dim))
    q = heads[:, :num_heads]
    if heads.shape[1] == num_heads:
        return q, None, None
    return q, heads[:, num_heads : num_heads + num_kv_heads], heads[:, -num_kv_heads:]


def turned_heads(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, num_heads: int, num_kv_heads: int, eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """What ``paged_attention`` takes, by the ops of a CPU; None for the keys and values that ``qkv`` has not."""
    _, k, v = heads_of(qkv, num_heads, num_kv_heads, cos_sin.shape[1])
    if k is None:
        q, _ = rope(qkv, cos_sin, q_norm, q_norm, num_heads, 0, eps)
    else:
        q, k = rope(qkv, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, eps)
    if query_scale is not None:
        q = q * query_scale[:, None]
    if v is not None and v_norm is not None:
        v = rms_norm(v.reshape(-1, v.shape[2]), v_norm, eps).unflatten(0, (-1, num_kv_heads))
    return q, k, v


def without_keys(q: Tensor, num_kv_heads: int, slot_mapping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and slots for an op that writes some, where the cache has them: any, to slot 0, as padding."""
    return q[:, :num_kv_heads], q[:, :num_kv_heads], torch.zeros_like(slot_mapping)
