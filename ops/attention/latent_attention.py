"""Attention over latents, for multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

Reference, schema, registration.

A token keeps a latent of C elements and a key part of H elements that is turned by its position, both for all heads
together. Instead of each head's keys and values being made from the latents, the queries are brought to the latents'
space, and what they see is brought out of it (``models/layers/latent_attention.py``). So for all N query heads

    score  = (q_latent . latent + q_turned . k_turned) * sm_scale
    output = sum of softmax(scores) * latent

The latents are keys and values and are kept once, in ``v_cache``; ``k_cache`` has the turned parts. All else is as in
``paged_attention.py`` for one KV head: the write, the masks, padding, and an order in memory that each implementation
chooses. A quantised cache has a scale for each token's latent and one for its turned part, which have sizes of
their own.
"""

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.paged_attention import seen_in_tree
from compiled_llm.ops.library import define_op, like_first


def latent_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, *, sm_scale: float, max_query_len: int, window: int = 0, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write ``k_turned`` and ``latent`` to the cache, then return causal attention over it.

    On a CPU; a GPU has ``rotary_latent_attention`` for that. Kernels take C and H up to 512. A row has the same bits
    alone and in any batch, as a decode and in any chunk.

    Args:
        q_latent: ``[T, N, C]``; float32, bfloat16 or float16; any strides with the last one 1.
        q_turned: ``[T, N, H]``, k_turned: ``[T, 1, H]``, latent: ``[T, 1, C]``; dtype of ``q_latent``; any strides with
            the last one 1.
        k_cache: ``[B, 1, S, H]``, v_cache: ``[B, 1, S, C]``: of contiguous blocks, which may be apart; dtype of
            ``q_latent``, or int8 or float8_e4m3fn; written in place.
        k_scale, v_scale, slot_mapping, block_table, query_start_loc, seq_lens, max_query_len, window, ancestors: as of
            ``paged_attention``.
        sm_scale: positive scale of the scores.

    Returns:
        ``[T, N, C]`` contiguous, dtype of ``q_latent``, a fresh tensor.
    """
    return torch.ops.compiled_llm.latent_attention(
        q_latent, q_turned, k_turned, latent, k_cache, v_cache, k_scale, v_scale, slot_mapping, block_table,
        query_start_loc, seq_lens, sm_scale, max_query_len, window, ancestors,
    )  # fmt: skip


def latent_attention_reference(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None, slot_mapping: Tensor, block_table: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, sm_scale: float, max_query_len: int, window: int, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The op in plain torch, one request at a time, in a wider dtype. All kernels are tested against it."""
    wide = torch.float64 if q_latent.dtype == torch.float32 else torch.float32
    block_size, slots = k_cache.shape[2], slot_mapping.long()
    for new, cache, scale in ((k_turned, k_cache, k_scale), (latent, v_cache, v_scale)):
        if scale is not None:
            new, new_scale = kv_quant.quantise(new, cache.dtype)
            scale[slots // block_size, :, slots % block_size] = new_scale
            new, cache = new.view(torch.int8), cache.view(torch.int8)  # torch cannot index fp8
        cache[slots // block_size, :, slots % block_size] = new

    def rows(cache: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
        """What is in some blocks, ``[blocks * S, H]`` or ``[blocks * S, C]``."""
        if scale is None:
            return cache[blocks].to(wide).flatten(0, 2)
        codes = cache.view(torch.int8)[blocks].view(cache.dtype)
        return (codes.to(wide) * scale[blocks].to(wide)[..., None]).flatten(0, 2)

    out = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    starts = query_start_loc.tolist()
    for r, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[r], starts[r + 1]
        if seq_len == 0 or start == end:
            continue
        blocks = block_table[r, : -(-seq_len // block_size)].long()
        keys, latents = rows(k_cache, k_scale, blocks)[:seq_len], rows(v_cache, v_scale, blocks)[:seq_len]
        scores = torch.einsum("qnc,tc->nqt", q_latent[start:end].to(wide), latents)
        scores = (scores + torch.einsum("qnh,th->nqt", q_turned[start:end].to(wide), keys)) * sm_scale
        positions = torch.arange(seq_len - (end - start), seq_len, device=out.device)[:, None]
        key_positions = torch.arange(seq_len, device=out.device)
        visible = key_positions <= positions
        if ancestors is not None and ancestors[start] != 0:
            visible, positions, key_positions = seen_in_tree(ancestors[start:end], seq_len)
        if window > 0:
            visible &= key_positions > positions - window
        probs = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        # As in paged_attention: zero times NaN is NaN.
        latents = latents.masked_fill(~visible.any(0)[:, None], 0.0)
        out[start:end] = torch.einsum("nqt,tc->qnc", probs, latents).to(out.dtype)
    return out


define_op(
    "latent_attention(Tensor q_latent, Tensor q_turned, Tensor k_turned, Tensor latent, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor slot_mapping, Tensor block_table, "
    "Tensor query_start_loc, Tensor seq_lens, float sm_scale, int max_query_len, int window, Tensor? ancestors) "
    "-> Tensor",
    reference=latent_attention_reference,
    fake=like_first,
    cpu="latent_attention_cpu",
)
