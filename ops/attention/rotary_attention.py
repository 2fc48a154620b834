"""Paged attention of queries and keys that are still to be turned by their positions: ``ops.rope`` and
``ops.paged_attention``, and on a GPU one op.

There turned keys go straight to the cache, and the kernel that writes them turns the queries and norms the values
besides: a launch less in every layer. A CPU has its ops, whose calls the compiled step makes itself. Both compute the
same, and round at the same places.
"""

import torch
from torch import Tensor

from compiled_llm.ops.attention.heads import turned_heads, without_keys
from compiled_llm.ops.attention.paged_attention import paged_attention
from compiled_llm.ops.library import define_op, on_gpu


def rotary_attention(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, v_norm: Tensor | None,
    query_scale: Tensor | None, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, *,
    num_heads: int, eps: float, sinks: Tensor | None = None, sm_scale: float, max_query_len: int, window: int = 0,
    soft_cap: float = 0.0, exact: bool = False,
) -> Tensor:  # fmt: skip
    """``paged_attention`` of the queries, keys and values in ``qkv``, the first two turned by ``rope``.

    Args:
        qkv: ``[T, (N + 2 * K) * H]``: queries, keys and values side by side. ``[T, (N + K) * H]``: values are what the
            keys are made of. ``[T, N * H]``: the cache has the step's keys and values, and nothing is written.
        cos_sin, q_norm, k_norm, eps: those of ``rope``; without keys there is no ``k_norm``.
        v_norm: ``[H]``, the weight of ``rms_norm`` of each head of the values; or None.
        query_scale: ``[T, 1]`` in the dtype of ``qkv``, multiplies the turned queries; or None.
        num_heads: N; K and H are those of the cache.

    The others, and the result ``[T, N, H]``, are those of ``paged_attention``.
    """
    rest = (k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens)
    if qkv.is_cuda:
        name = "rotary_attention_exact" if exact else "rotary_attention"
        return getattr(torch.ops.compiled_llm, name)(
            qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, *rest, sinks,
            num_heads, eps, sm_scale, max_query_len, window, soft_cap,
        )  # fmt: skip
    num_kv_heads = k_cache.shape[1]
    q, k, v = turned_heads(qkv, cos_sin, q_norm, k_norm, v_norm, query_scale, num_heads, num_kv_heads, eps)
    if k is None or v is None:
        k, v, slot_mapping = without_keys(q, num_kv_heads, slot_mapping)
        rest = (k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens)
    return paged_attention(
        q, k, v, *rest, sinks=sinks, sm_scale=sm_scale, max_query_len=max_query_len, window=window, soft_cap=soft_cap,
        exact=exact,
    )  # fmt: skip


def _fake(qkv: Tensor, cos_sin: Tensor, q_norm, k_norm, v_norm, query_scale, k_cache: Tensor, *args) -> Tensor:
    num_heads = args[8]
    return qkv.new_empty(qkv.shape[0], num_heads, k_cache.shape[3])


define_op(
    "rotary_attention(Tensor qkv, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, Tensor? v_norm, Tensor? query_scale, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, "
    "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, Tensor? sinks, int num_heads, float eps, "
    "float sm_scale, int max_query_len, int window, float soft_cap) -> Tensor",
    fake=_fake,
    gpu=on_gpu("attention.triton_attention:rotary_attention"),
    gpu_exact=on_gpu("attention.triton_exact:rotary_attention"),
)
