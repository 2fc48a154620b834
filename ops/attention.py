"""Paged attention with the cache write fused in: reference, schema, registration.

One op does, for every layer of every step:

1. write this step's keys and values into the paged cache, token ``t`` at ``slot_mapping[t]``;
2. attend causally, each request's queries over all of its cached keys, the ones just written among them.

Shapes (letters as in docs/design.md): T tokens in the step, R requests, N query heads, K KV heads, H head_dim,
B blocks, S block_size, M blocks in a table row.

The queries of request ``r`` are rows ``query_start_loc[r]:query_start_loc[r + 1]`` of ``q``; the last of them is the
token at position ``seq_lens[r] - 1``. So a decode is a request with one row, a prefill chunk one with many, and any
mix may stand in one call. The key of position ``p`` lies in block ``block_table[r, p // S]`` at offset ``p % S``.
Rows of a request with ``seq_lens[r] == 0``, and rows past ``query_start_loc[R]``, are padding: their output is zero.

The method is PagedAttention (Kwon et al., 2023, arXiv:2309.06180) with FlashAttention's online softmax (Dao et al.,
2022, arXiv:2205.14135).
"""

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import LIBRARY

LIBRARY.define(
    "paged_attention("
    "Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor block_table, Tensor query_start_loc, Tensor seq_lens, float sm_scale, int max_query_len) -> Tensor"
)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    sm_scale: float,
    max_query_len: int,
) -> Tensor:
    """Write ``k`` and ``v`` to the cache, then return causal attention of ``q`` over the cache.

    Args:
        q: ``[T, N, H]``; float32, bfloat16 or float16; any strides with the last one 1. N is a multiple of K.
        k, v: ``[T, K, H]``, dtype of ``q``; any strides with the last one 1.
        k_cache, v_cache: ``[B, K, S, H]`` contiguous, dtype of ``q``; written in place.
        slot_mapping: ``[T]`` int32, token -> block * S + offset. Padding tokens point into a block nobody reads.
        block_table: ``[R, M]`` int32; entries past a request's length are never read.
        query_start_loc: ``[R + 1]`` int32, prefix sums of the query lengths; starts at 0, ends at or below T.
        seq_lens: ``[R]`` int32, keys of each request after the write; 0 for padding rows.
        sm_scale: scale of the scores, usually ``H ** -0.5``.
        max_query_len: an upper bound of the query lengths that is static in the graph; 1 selects the decode kernel.

    Returns:
        ``[T, N, H]`` contiguous, dtype of ``q``, a fresh tensor.
    """
    return torch.ops.compiled_llm.paged_attention(
        q, k, v, k_cache, v_cache, slot_mapping, block_table, query_start_loc, seq_lens, sm_scale, max_query_len
    )


def paged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    max_query_len: int,
) -> Tensor:
    """The op in plain torch, one request at a time, in a wider dtype. What every kernel is tested against."""
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    block_size = k_cache.shape[2]
    slots = slot_mapping.long()
    k_cache[slots // block_size, :, slots % block_size] = k
    v_cache[slots // block_size, :, slots % block_size] = v

    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lengths):
        start, end = starts[r], starts[r + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        # [blocks, K, S, H] -> [K, seq_len, H]
        keys, values = (
            cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].to(wide)
            for cache in (k_cache, v_cache)
        )
        queries = q[start:end].to(wide).transpose(0, 1).unflatten(0, (num_kv_heads, num_heads // num_kv_heads))
        scores = torch.einsum("kgqh,kth->kgqt", queries, keys) * sm_scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        visible = torch.arange(seq_len, device=q.device) <= positions[:, None]
        probs = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("kgqt,kth->kgqh", probs, values)
        out[start:end] = attended.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


@torch.library.register_fake("compiled_llm::paged_attention", lib=LIBRARY)
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    max_query_len: int,
) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _cpu(q: Tensor, *args) -> Tensor:
    kernels = native.load("attention_cpu")
    return kernels.paged_attention(q, *args) if kernels else paged_attention_reference(q, *args)


def _cuda(*args) -> Tensor:
    from compiled_llm.ops import attention_triton  # Triton is loaded by the first call on a GPU, not by the import

    return attention_triton.paged_attention(*args)


LIBRARY.impl("paged_attention", _cpu, "CPU")
LIBRARY.impl("paged_attention", _cuda, "CUDA")
