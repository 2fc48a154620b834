"""Paged attention of queries and keys that are still to be turned by their positions: ``ops.rope`` and
``ops.paged_attention``, and on a GPU one op.

There turned keys go straight to the cache, and the kernel that writes them turns the queries and norms the values
besides: a launch less in every layer. A CPU has its ops, whose calls the compiled step makes itself. Both compute the
same, and round at the same places.
"""

import torch
from torch import Tensor

from compiled_llm.ops.attention.arguments import AttentionKind, Keys, Turn
from compiled_llm.ops.attention.heads import turned_heads, without_keys
from compiled_llm.ops.attention.paged_attention import paged_attention
from compiled_llm.ops.library import define_op, on_gpu


def rotary_attention(
    qkv: Tensor, turn: Turn, keys: Keys, kind: AttentionKind, sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``paged_attention`` of the queries, keys and values in ``qkv``, the first two turned by ``rope``.

    Args:
        qkv: ``[T, (N + 2 * K) * H]``: queries, keys and values side by side. ``[T, (N + K) * H]``: values are what the
            keys are made of. ``[T, N * H]``: the cache has the step's keys and values, and nothing is written.
        turn: ``cos_sin``, ``q_norm``, ``k_norm`` and ``eps`` are those of ``rope``; without keys there is no
            ``k_norm``. ``v_norm`` ``[H]`` is the weight of ``rms_norm`` of each head of the values, or None, and
            ``query_scale`` ``[T, 1]`` in the dtype of ``qkv`` multiplies the turned queries, or None.
        keys, sinks, ancestors: as ``paged_attention`` has them; K and H are those of the cache.
        kind: its other arguments, and ``num_heads``: N.

    Returns:
        ``[T, N, H]``, as ``paged_attention`` does.
    """
    cos_sin, q_norm, k_norm, v_norm, query_scale, eps = turn
    num_heads, scale, max_query_len, window, soft_cap = (
        kind.num_heads, kind.scale, kind.max_query_len, kind.masked_window, kind.soft_cap
    )  # fmt: skip
    if qkv.is_cuda:
        name = "rotary_attention_exact" if kind.exact else "rotary_attention"
        return getattr(torch.ops.compiled_llm, name)(
            qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, *keys, sinks,
            num_heads, eps, scale, max_query_len, window, soft_cap, ancestors,
        )  # fmt: skip
    num_kv_heads = keys.k_cache.shape[1]
    q, k, v = turned_heads(qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, num_heads, num_kv_heads, eps)
    if k is None or v is None:
        k, v, slot_mapping = without_keys(q, num_kv_heads, keys.slot_mapping)
        keys = keys._replace(slot_mapping=slot_mapping)
    return paged_attention(
        q, k, v, *keys, sinks=sinks, sm_scale=scale, max_query_len=max_query_len, window=window, soft_cap=soft_cap,
        exact=kind.exact, ancestors=ancestors,
    )  # fmt: skip


def _fake(qkv: Tensor, cos_sin: Tensor, q_norm, k_norm, v_norm, query_scale, k_cache: Tensor, *args) -> Tensor:
    num_heads = args[8]
    return qkv.new_empty(qkv.shape[0], num_heads, k_cache.shape[3])


define_op(
    "rotary_attention(Tensor qkv, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, Tensor? v_norm, Tensor? query_scale, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, "
    "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, int num_heads, float eps, "
    "float sm_scale, int max_query_len, int window, float soft_cap, Tensor? ancestors) -> Tensor",
    fake=_fake,
    gpu=on_gpu("attention.triton_attention:rotary_attention"),
    gpu_exact=on_gpu("attention.triton_exact:rotary_attention"),
)
