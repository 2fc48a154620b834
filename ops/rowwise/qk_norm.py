"""Norms of all queries of a token together, and of all keys: schema and registration. On a GPU one launch.

A CPU norms the parts and joins them again, by ops that the compiled step calls itself.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from compiled_llm.ops.rowwise.rowwise import rms_norm


def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """``qkv`` with ``rms_norm`` of its queries and of its keys in their places.

    Args:
        qkv: ``[T, (N + 2 * K) * H]``: queries, keys and values side by side.
        q_norm, k_norm: ``[N * H]`` and ``[K * H]``, of one dtype: that of ``qkv`` or float32.

    Returns:
        As ``qkv``, contiguous.
    """
    if qkv.is_cuda:
        return torch.ops.compiled_llm.qk_norm(qkv, q_norm, k_norm, eps)
    q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], dim=1)
    return torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), v], dim=1)


def qk_norm_reference(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """The op in plain torch."""
    q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], dim=1)
    return torch.cat([rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps), v], dim=1)


define_op(
    "qk_norm(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps) -> Tensor",
    reference=qk_norm_reference,
    fake=like_first,
    gpu=on_gpu("rowwise.triton_rowwise:qk_norm"),
)
