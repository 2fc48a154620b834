"""Attention of a decode on a GPU: ``rope``, the write to the cache and ``paged_attention`` as one launch.

A step of one query a request has a plan (``decode_plan.py``) that says which keys a program takes. The program that has
the new key's split makes that key and its value, so no launch need come before. Reference, schema, registration.
"""

import torch
from torch import Tensor

from compiled_llm.ops.attention.decode_plan import DecodePlan
from compiled_llm.ops.attention.paged_attention import paged_attention
from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.rowwise.rowwise import rope

# The counters end as they began, as zeros: they are not said to be mutated.
LIBRARY.define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? cos_sin, Tensor? q_norm, Tensor? k_norm, "
    "Tensor? query_scale, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, "
    "Tensor block_table, Tensor tasks, Tensor counters, Tensor? sinks, float eps, float sm_scale, int window, "
    "float soft_cap) -> Tensor"
)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    query_scale: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    plan: DecodePlan, *, sinks: Tensor | None, eps: float, sm_scale: float, window: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    """``paged_attention``, or with ``cos_sin`` ``rotary_attention``, of at most one query a request.

    Args:
        q: ``[T, N, H]``, with ``cos_sin`` still to be turned, and then its heads side by side in memory.
        k, v: ``[T, K, H]``, likewise.
        cos_sin, q_norm, k_norm, query_scale, eps: of ``rotary_attention``; None and unused where heads are as they are.
        plan: made with this ``window``, for no fewer KV heads.

    The others, and the result ``[T, N, H]``, are those of ``paged_attention``. Padding rows write nothing.
    """
    return torch.ops.compiled_llm.decode_attention(
        q, k, v, cos_sin, q_norm, k_norm, query_scale, k_cache, v_cache, k_scale, v_scale, *plan, sinks, eps, sm_scale,
        window, soft_cap,
    )  # fmt: skip


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    query_scale: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor, tasks: Tensor, counters: Tensor, sinks: Tensor | None, eps: float, sm_scale: float,
    window: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    """By the ops that a CPU has, with lengths and slots as the tasks have them."""
    num_tokens, num_heads, num_kv_heads = len(q), q.shape[1], k.shape[1]
    seq_lens, slots, rows = torch.zeros(3, num_tokens, dtype=torch.int32, device=q.device)
    for row, table_row, _, end, _, _, slot, _ in tasks[1 : 1 + int(tasks[0, 0])].tolist():
        if slot >= 0:
            seq_lens[row], slots[row], rows[row] = end, slot, table_row
    if cos_sin is not None:
        qkv = torch.cat([q, k, v], dim=1).flatten(1)
        q, k = rope(qkv, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, eps)
        q = q if query_scale is None else q * query_scale[:, None]
    # Rows without a request write their keys and values to slot 0, which is never a request's.
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device)
    return paged_attention(
        q, k, v, k_cache, v_cache, k_scale, v_scale, slots, block_table[rows.long()], starts, seq_lens, sinks=sinks,
        sm_scale=sm_scale, max_query_len=1, window=window, soft_cap=soft_cap,
    )  # fmt: skip


@torch.library.register_fake("compiled_llm::decode_attention", lib=LIBRARY)
def _fake(q: Tensor, *args) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.attention import triton_decode  # the first call on a GPU loads Triton, not the import

    return triton_decode.decode_attention(*args)


LIBRARY.impl("decode_attention", decode_attention_reference, "CompositeExplicitAutograd")
LIBRARY.impl("decode_attention", _cuda, "CUDA")
