"""Paged attention with the cache write fused in: reference, schema, registration.

One op does, for every layer of every step:

1. write this step's keys and values into the paged cache, token ``t`` at ``slot_mapping[t]``;
2. attend causally, each request's queries over all of its cached keys, the ones just written among them.

Shapes (letters as in docs/design.md): T tokens in the step, R requests, N query heads, K KV heads, H head_dim,
B blocks, S block_size, M blocks in a table row.

The queries of request ``r`` are rows ``query_start_loc[r]:query_start_loc[r + 1]`` of ``q``; the last of them is the
token at position ``seq_lens[r] - 1``. So a decode is a request with one row, a prefill chunk one with many, and one
call may have any mix of them. The key of position ``p`` is in block ``block_table[r, p // S]`` at offset ``p % S``.
Rows of a request with ``seq_lens[r] == 0``, and rows past ``query_start_loc[R]``, are padding: their output is zero,
but their keys and values are written to their slots.

Rows of a request may be a tree, of tokens that may follow its first row: each sees the keys before the request's rows
and those of its own path. Row ``i`` of the request keeps its key where position ``seq_lens[r] - rows + i`` is, but
stands as many positions after the first row as its path is long, for the window. On a CPU a row has the bits that it
has as the last row of its path alone. (SpecInfer, Miao et al., 2023, arXiv:2305.09781.)

The cache may be quantised, see ``kv_quant.py``. The op has a sliding window, a soft cap of the scores, and attention
sinks.

Each implementation orders the ``S * H`` elements of one block and KV head in memory as it likes: the reference and the
Triton kernels as ``[S, H]``, the CPU kernel as its dot products read them (see ``attention_cpu.cpp``). So whole blocks
may be copied, as swapping and sharing do, but no other code may read single elements.

The method is PagedAttention (Kwon et al., 2023, arXiv:2309.06180) with FlashAttention's online softmax (Dao et al.,
2022, arXiv:2205.14135).
"""

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.library import define_op, like_first, on_gpu


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, *,
    sinks: Tensor | None = None, sm_scale: float, max_query_len: int, window: int = 0, soft_cap: float = 0.0,
    exact: bool = False, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write ``k`` and ``v`` to the cache, then return causal attention of ``q`` over the cache.

    Index tensors and sinks are contiguous. Kernels take H up to 512.

    Args:
        q: ``[T, N, H]``; float32, bfloat16 or float16; any strides with the last one 1. N is a multiple of K.
        k, v: ``[T, K, H]``, dtype of ``q``; any strides with the last one 1.
        k_cache, v_cache: ``[B, K, S, H]`` contiguous; dtype of ``q``, or int8 or float8_e4m3fn; written in place.
        k_scale, v_scale: ``[B, K, S]`` float32 contiguous, written in place, if the cache is int8 or float8_e4m3fn;
            else None. On a CPU blocks of caches and scales, each contiguous, may also be apart: those of both caches
            equally far, and those of both scales.
        slot_mapping: ``[T]`` int32, token -> block * S + offset. Padding tokens have slots of a block nobody reads.
        block_table: ``[R, M]`` int32; entries past a request's length are never read.
        query_start_loc: ``[R + 1]`` int32, prefix sums of the query lengths; starts at 0, ends at or below T.
        seq_lens: ``[R]`` int32, keys of each request after the write; 0 for padding rows.
        sinks: ``[N]`` float32 or None: for each query head the score of one more key whose value is zero (Xiao et al.,
            2023, arXiv:2309.17453, as gpt-oss has it), not scaled and not capped.
        sm_scale: positive scale of the scores, usually ``H ** -0.5``.
        max_query_len: an upper bound of the query lengths that is static in the graph; 1 says that all are decodes.
        window: keys that a query sees, itself included; 0 means all before it (Beltagy et al., 2020,
            arXiv:2004.05150).
        soft_cap: if positive, scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv:2408.00118).
        exact: a row has the same bits alone and in any batch, as a decode and in any chunk, whatever ``max_query_len``
            says. The CPU kernel always does so; on a GPU other kernels do.
        ancestors: ``[T]`` int64 or None: of each row of a tree, which rows of its request it sees: bit i for the
            ``i``-th, its own bit and that of row 0 among them; of other rows 0. A tree has up to 64 rows, parents
            before their children; on a GPU up to 16, and none with ``exact`` or a window of less than 16.

    Returns:
        ``[T, N, H]`` contiguous, dtype of ``q``, a fresh tensor.
    """
    op = torch.ops.compiled_llm.paged_attention_exact if exact else torch.ops.compiled_llm.paged_attention
    return op(
        q, k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens, sinks,
        sm_scale, max_query_len, window, soft_cap, ancestors,
    )  # fmt: skip


def paged_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, sinks: Tensor | None,
    sm_scale: float, max_query_len: int, window: int, soft_cap: float, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The op in plain torch, one request at a time, in a wider dtype. All kernels are tested against it."""
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    num_heads, num_kv_heads, head_dim, block_size = q.shape[1], k.shape[1], q.shape[2], k_cache.shape[2]
    slots = slot_mapping.long()
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is not None:
            new, new_scale = kv_quant.quantise(new, cache.dtype)
            scale[slots // block_size, :, slots % block_size] = new_scale
            if cache.dtype != torch.int8:  # torch cannot index fp8
                new, cache = new.view(torch.int8), cache.view(torch.int8)
        cache[slots // block_size, :, slots % block_size] = new

    def rows(cache: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
        """The keys or values in some blocks, ``[K, blocks * S, H]``."""
        if scale is None:
            found = cache[blocks].to(wide)
        else:
            codes = cache.view(torch.int8)[blocks].view(cache.dtype)
            found = codes.to(wide) * scale[blocks].to(wide)[..., None]
        return found.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)

    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for r, seq_len in enumerate(lengths):
        start, end = starts[r], starts[r + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        keys, values = rows(k_cache, k_scale, blocks)[:, :seq_len], rows(v_cache, v_scale, blocks)[:, :seq_len]
        queries = q[start:end].to(wide).transpose(0, 1).unflatten(0, (num_kv_heads, num_heads // num_kv_heads))
        scores = torch.einsum("kgqh,kth->kgqt", queries, keys) * sm_scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_positions = torch.arange(seq_len, device=q.device)
        visible = key_positions <= positions
        if ancestors is not None and ancestors[start] != 0:
            visible, positions, key_positions = seen_in_tree(ancestors[start:end], seq_len)
        if window > 0:
            visible &= key_positions > positions - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(num_kv_heads, -1, 1, 1).expand(-1, -1, end - start, 1)
            scores = torch.cat([scores, sink], dim=-1)
        probs = scores.softmax(dim=-1)[..., :seq_len]
        # Values of keys that no query here sees must not be multiplied, even with zero: zero times NaN is NaN.
        values = values.masked_fill(~visible.any(0)[:, None], 0.0)
        attended = torch.einsum("kgqt,kth->kgqh", probs, values)
        out[start:end] = attended.flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


def seen_in_tree(ancestors: Tensor, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys a tree's rows see, ``[rows, seq_len]``; where they stand, ``[rows, 1]``; and where keys do."""
    count = len(ancestors)
    nodes = (ancestors[:, None] >> torch.arange(count, device=ancestors.device)) & 1
    depths = nodes.sum(1) - 1
    context = torch.arange(seq_len - count, device=ancestors.device)
    visible = torch.cat([torch.ones(count, len(context), dtype=torch.bool, device=ancestors.device), nodes != 0], dim=1)
    return visible, len(context) + depths[:, None], torch.cat([context, len(context) + depths])


define_op(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor? sinks, float sm_scale, int max_query_len, int window, float soft_cap, Tensor? ancestors) -> Tensor",
    reference=paged_attention_reference,
    fake=like_first,
    cpu="attention_cpu",
    gpu=on_gpu("attention.triton_attention:paged_attention"),
    gpu_exact=on_gpu("attention.triton_exact:paged_attention"),
)
