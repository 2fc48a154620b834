"""Latent attention of queries and keys that are still to be turned, and of latents that are still to be normalised:
``ops.rope``, ``ops.rms_norm`` and ``ops.latent_attention``, and on a GPU one op.

There the kernel that writes to the cache turns and normalises, in a decode the one that attends. A CPU has its ops,
whose calls the compiled step makes itself. Both compute the same, and round at the same places.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops.attention.arguments import AttentionKind, Keys
from compiled_llm.ops.attention.decode_attention import keys_of_tasks
from compiled_llm.ops.attention.decode_plan import DecodePlan
from compiled_llm.ops.attention.latent_attention import latent_attention
from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.rowwise.rowwise import rms_norm, rope


def rotary_latent_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor,
    query_scale: Tensor | None, eps: float, keys: Keys, kind: AttentionKind, ancestors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``latent_attention`` after ``rope`` of the turned parts and ``rms_norm`` of the latents.

    Args:
        q_turned, k_turned: ``[T, N, H]`` and ``[T, 1, H]``, not turned yet; latent: ``[T, 1, C]``, not normalised yet.
        cos_sin: ``[T, H]`` float32, that of ``rope``.
        norm: ``[C]``, the weights of ``rms_norm``, and its ``eps``.
        query_scale: ``[T, 1]`` in the dtype of ``q_turned``, multiplies the turned parts of queries; or None.
        keys, kind, ancestors: the arguments of ``latent_attention``. With ``kind.exact`` a row has the same bits alone
            and in any batch, as a decode and in any chunk. On a CPU it always does; on a GPU other tiles and an order
            of their own do that, without trees.

    Returns:
        ``[T, N, C]``, as ``latent_attention`` does.
    """
    scale, max_query_len, window = kind.scale, kind.max_query_len, kind.masked_window
    if q_latent.is_cuda:
        name = "rotary_latent_attention_exact" if kind.exact else "rotary_latent_attention"
        return getattr(torch.ops.compiled_llm, name)(
            q_latent, q_turned, k_turned, latent, cos_sin, norm, query_scale, eps, *keys,
            scale, max_query_len, window, ancestors,
        )  # fmt: skip
    q_turned, k_turned, latent = _turned(q_turned, k_turned, latent, cos_sin, norm, query_scale, eps)
    return latent_attention(
        q_latent, q_turned, k_turned, latent, *keys,
        sm_scale=scale, max_query_len=max_query_len, window=window, ancestors=ancestors,
    )  # fmt: skip


def _turned(
    q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor, query_scale: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Turned parts of queries and keys, and normalised latents, by the ops that a CPU has."""
    to_turn = torch.cat([q_turned.flatten(1), k_turned.flatten(1)], dim=-1)
    q_turned, k_turned = rope(to_turn, cos_sin, None, None, q_turned.shape[1], 1, eps)
    if query_scale is not None:
        q_turned = q_turned * query_scale[:, None]
    return q_turned, k_turned, rms_norm(latent[:, 0], norm, eps)[:, None]


def rotary_latent_decode_attention(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor,
    query_scale: Tensor | None, eps: float, cache: Sequence[Tensor | None], plan: DecodePlan, kind: AttentionKind,
) -> Tensor:  # fmt: skip
    """``rotary_latent_attention`` of at most one query a request.

    Args:
        cache: ``k_cache``, ``v_cache``, ``k_scale`` and ``v_scale``.
        plan: of ``decode_plan`` of latents, for the window of ``kind``. Padding rows write nothing.
    """
    return torch.ops.compiled_llm.rotary_latent_decode_attention(
        q_latent, q_turned, k_turned, latent, cos_sin, norm, query_scale, eps, *cache, plan.block_table, plan.tasks,
        kind.scale, kind.masked_window,
    )  # fmt: skip


def _decode_reference(
    q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, cos_sin: Tensor, norm: Tensor,
    query_scale: Tensor | None, eps: float, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, block_table: Tensor, tasks: Tensor, sm_scale: float, window: int,
) -> Tensor:  # fmt: skip
    """By the ops that a CPU has."""
    made = _turned(q_turned, k_turned, latent, cos_sin, norm, query_scale, eps)
    return latent_attention(
        q_latent, *made, k_cache, v_cache, k_scale, v_scale, *keys_of_tasks(block_table, tasks, len(q_latent)),
        sm_scale=sm_scale, max_query_len=1, window=window,
    )  # fmt: skip


_NEW = (
    "Tensor q_latent, Tensor q_turned, Tensor k_turned, Tensor latent, Tensor cos_sin, Tensor norm, "
    "Tensor? query_scale, float eps, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale"
)
define_op(
    f"rotary_latent_attention({_NEW}, Tensor slot_mapping, Tensor block_table, Tensor query_start_loc, "
    "Tensor seq_lens, float sm_scale, int max_query_len, int window, Tensor? ancestors) -> Tensor",
    fake=like_first,
    gpu=on_gpu("attention.triton_latent:rotary_latent_attention"),
    gpu_exact=on_gpu("attention.triton_latent:rotary_latent_attention", exact=True),
)
define_op(
    f"rotary_latent_decode_attention({_NEW}, Tensor block_table, Tensor tasks, float sm_scale, int window) -> Tensor",
    reference=_decode_reference,
    fake=like_first,
    gpu=on_gpu("attention.triton_latent:rotary_latent_decode_attention"),
)
