"""Cases for the kernels of latent attention, shared by the tests of every device.

Each is two of ``attention_cases.py``: one of paged attention with one KV head has the turned parts, and another one of
the same requests the latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from compiled_llm.ops.attention.latent_attention import latent_attention_reference
from tests.ops.attention import attention_cases
from tests.ops.attention.attention_cases import Call, step


@dataclass(frozen=True)
class LatentCase(Call):
    """All arguments of one call."""

    OF_TOKENS: ClassVar = ("q_latent", "q_turned", "k_turned", "latent", "slot_mapping")
    REFERENCE: ClassVar = staticmethod(latent_attention_reference)

    q_latent: Tensor
    q_turned: Tensor
    k_turned: Tensor
    latent: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sm_scale: float
    max_query_len: int
    window: int
    ancestors: Tensor | None = None


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 4,
    latent_dim: int = 128,
    turned_dim: int = 32,
    **options: Any,
) -> LatentCase:
    """A random call of the op; ``options`` are those of ``attention_cases.make_case``."""
    turned, latent = (
        attention_cases.make_case(
            query_lens, context_lens, num_heads=num_heads, num_kv_heads=1, head_dim=size, fused_qkv=True, **options
        )
        for size in (turned_dim, latent_dim)
    )
    return LatentCase(
        latent.q, turned.q, turned.k, latent.v, turned.k_cache, latent.v_cache, turned.k_scale, latent.v_scale,
        latent.slot_mapping, latent.block_table, latent.query_start_loc, latent.seq_lens,
        (latent_dim + turned_dim) ** -0.5, latent.max_query_len, latent.window,
    )  # fmt: skip


MIXED = step([1, 40, 1], [700, 33, 0], padding_query_lens=[1, 2])
GRID: dict[str, dict[str, Any]] = {
    "decode": step([1, 1, 1], [0, 33, 1300], num_heads=16),
    "mixed": {**MIXED, "num_heads": 16, "trailing_rows": 3},
    "as-deepseek": step([1, 5], [600, 60], num_heads=16, latent_dim=512, turned_dim=64),
    "many-heads": step([1, 3], [140, 520], num_heads=128, latent_dim=64),
    "odd-sizes": {**MIXED, "num_heads": 5, "latent_dim": 40, "turned_dim": 12, "block_size": 4},
    "odd-latents": {**MIXED, "num_heads": 3, "latent_dim": 48, "turned_dim": 16},
    "single-slots": step([1, 7], [3, 20], block_size=1),
    "prompt": step([700], [0], num_heads=3, latent_dim=64),
    "window": step([1, 9, 70, 1], [600, 290, 100, 20], window=71),
    "only-padding": step([], [], padding_query_lens=[1, 1], trailing_rows=2),
}
