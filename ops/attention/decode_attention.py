"""Attention of a decode on a GPU: ``rope``, the write to the cache and ``paged_attention`` as one launch.

A step of one query a request has a plan (``decode_plan.py``) that says which keys a program takes. The program that has
the new key's split makes that key and its value, so no launch need come before. Reference, schema, registration.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops.attention.arguments import AttentionKind, Turn
from compiled_llm.ops.attention.decode_plan import DecodePlan
from compiled_llm.ops.attention.heads import turned_heads, without_keys
from compiled_llm.ops.attention.paged_attention import paged_attention
from compiled_llm.ops.library import define_op, like_first, on_gpu


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, plan: DecodePlan, *,
    sinks: Tensor | None, sm_scale: float, window: int, soft_cap: float,
) -> Tensor:  # fmt: skip
    """``paged_attention`` of at most one query a request.

    Args:
        plan: made with this ``window``, for no fewer KV heads.

    The others, and the result ``[T, N, H]``, are those of ``paged_attention``. Padding rows write nothing.
    """
    return torch.ops.compiled_llm.decode_attention(
        q, k, v, k_cache, v_cache, k_scale, v_scale, *plan, sinks, sm_scale, window, soft_cap
    )


def rotary_decode_attention(
    qkv: Tensor, turn: Turn, cache: Sequence[Tensor | None], plan: DecodePlan, kind: AttentionKind,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``rotary_attention`` of at most one query a request, with the arguments of ``rotary_attention``.

    Args:
        cache: ``k_cache``, ``v_cache``, ``k_scale`` and ``v_scale``.
        plan: as that of ``decode_attention``.
    """
    *to_turn, eps = turn
    return torch.ops.compiled_llm.rotary_decode_attention(
        qkv, *to_turn, kind.num_heads, eps, *cache, *plan, sinks, kind.scale, kind.masked_window, kind.soft_cap
    )


def decode_attention_reference(
    q: Tensor, k: Tensor | None, v: Tensor | None,
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    block_table: Tensor, tasks: Tensor, counters: Tensor, sinks: Tensor | None, sm_scale: float, window: int,
    soft_cap: float,
) -> Tensor:  # fmt: skip
    """By the op that a CPU has, with lengths and slots as the tasks have them. Without keys the cache has them."""
    slots, table, starts, seq_lens = keys_of_tasks(block_table, tasks, len(q))
    if k is None or v is None:
        k, v, slots = without_keys(q, k_cache.shape[1], slots)
    return paged_attention(
        q, k, v, k_cache, v_cache, k_scale, v_scale, slots, table, starts, seq_lens, sinks=sinks,
        sm_scale=sm_scale, max_query_len=1, window=window, soft_cap=soft_cap,
    )  # fmt: skip


def keys_of_tasks(block_table: Tensor, tasks: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A plan's slots, block table, starts of queries and lengths for ``count`` rows, as a CPU's ops take them.

    Rows without a request write their keys and values to slot 0, which is never a request's.
    """
    seq_lens, slots, rows = torch.zeros(3, count, dtype=torch.int32, device=tasks.device)
    for row, table_row, _, end, _, _, slot, _ in tasks[1 : 1 + int(tasks[0, 0])].tolist():
        if slot >= 0:
            seq_lens[row], slots[row], rows[row] = end, slot, table_row
    starts = torch.arange(count + 1, dtype=torch.int32, device=tasks.device)
    return slots, block_table[rows.long()], starts, seq_lens


def rotary_decode_attention_reference(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, num_heads: int, eps: float, k_cache: Tensor, *rest,
) -> Tensor:  # fmt: skip
    """By the ops that a CPU has."""
    heads = turned_heads(qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, num_heads, k_cache.shape[1], eps)
    return decode_attention_reference(*heads, k_cache, *rest)


# The counters end as they began, as zeros: they are not said to be mutated.
_REST = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor block_table, "
    "Tensor tasks, Tensor counters, Tensor? sinks, float sm_scale, int window, float soft_cap"
)
define_op(
    f"decode_attention(Tensor q, Tensor k, Tensor v, {_REST}) -> Tensor",
    reference=decode_attention_reference,
    fake=like_first,
    gpu=on_gpu("attention.triton_decode:plain_decode_attention"),
)
define_op(
    "rotary_decode_attention(Tensor qkv, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, Tensor? v_norm, "
    f"Tensor? query_scale, int num_heads, float eps, {_REST}) -> Tensor",
    reference=rotary_decode_attention_reference,
    fake=lambda qkv, cos_sin, *args: qkv.new_empty(qkv.shape[0], args[4], cos_sin.shape[1]),
    gpu=on_gpu("attention.triton_decode:rotary_decode_attention"),
)
