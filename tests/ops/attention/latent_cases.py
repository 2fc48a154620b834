"""Cases for the kernels of latent attention, shared by the tests of every device.

Each is two of ``attention_cases.py``: one of paged attention with one KV head has the turned parts, and another one of
the same requests the latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.attention.latent_attention import latent_attention_reference
from tests.ops.attention import attention_cases

CACHES = attention_cases.CACHES


@dataclass(frozen=True)
class LatentCase:
    """All arguments of one call, in the op's order. ``args()`` gives them with fresh copies of the caches."""

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

    def args(self) -> tuple:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in CACHES:
            values[name] = None if values[name] is None else values[name].clone()
        return tuple(values.values())

    @property
    def tolerance(self) -> float:
        plain, quantised = attention_cases.TOLERANCE, attention_cases.QUANTISED_TOLERANCE
        return (plain if self.k_scale is None else quantised)[self.q_latent.dtype]

    def rows(self, request: int) -> slice:
        """The rows of ``q_latent`` that belong to one request."""
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))


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


MIXED: dict[str, Any] = {"query_lens": [1, 40, 1], "context_lens": [700, 33, 0], "padding_query_lens": [1, 2]}
GRID: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": [1, 1, 1], "context_lens": [0, 33, 1300], "num_heads": 16},
    "mixed": {**MIXED, "num_heads": 16, "trailing_rows": 3},
    "as-deepseek": {
        "query_lens": [1, 5],
        "context_lens": [600, 60],
        "num_heads": 16,
        "latent_dim": 512,
        "turned_dim": 64,
    },
    "many-heads": {"query_lens": [1, 3], "context_lens": [140, 520], "num_heads": 128, "latent_dim": 64},
    "odd-sizes": {**MIXED, "num_heads": 5, "latent_dim": 40, "turned_dim": 12, "block_size": 4},
    "odd-latents": {**MIXED, "num_heads": 3, "latent_dim": 48, "turned_dim": 16},
    "single-slots": {"query_lens": [1, 7], "context_lens": [3, 20], "block_size": 1},
    "prompt": {"query_lens": [700], "context_lens": [0], "num_heads": 3, "latent_dim": 64},
    "window": {"query_lens": [1, 9, 70, 1], "context_lens": [600, 290, 100, 20], "window": 71},
    "only-padding": {"query_lens": [], "context_lens": [], "padding_query_lens": [1, 1], "trailing_rows": 2},
}


OF_TOKENS = ("q_latent", "q_turned", "k_turned", "latent", "slot_mapping")


def alone(case: LatentCase, request: int) -> LatentCase:
    """One request of a case by itself, its table no wider than it must be."""
    rows = case.rows(request)
    seq_len = int(case.seq_lens[request])
    blocks = max(1, -(-seq_len // case.k_cache.shape[2]))
    return replace(
        case,
        **{name: getattr(case, name)[rows] for name in OF_TOKENS},
        block_table=case.block_table[request : request + 1, :blocks].contiguous(),
        query_start_loc=case.query_start_loc[request : request + 2] - case.query_start_loc[request],
        seq_lens=case.seq_lens[request : request + 1],
        max_query_len=rows.stop - rows.start,
    )


def one_chunk(case: LatentCase, start: int, length: int) -> LatentCase:
    """Some tokens of the only request of a case, which begins with it."""
    rows = slice(start, start + length)
    return replace(
        case,
        **{name: getattr(case, name)[rows] for name in OF_TOKENS},
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([start + length], dtype=torch.int32),
        max_query_len=length,
    )


def check(case: LatentCase, op: Callable[..., Tensor]) -> Tensor:
    """Run ``op`` (the arguments by position) and compare output and caches with the reference; returns the output."""
    args, expected_args = case.args(), case.args()
    out, expected = op(*args), latent_attention_reference(*expected_args)
    assert out.dtype == case.q_latent.dtype
    assert out.is_contiguous()
    padding = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        padding[case.rows(request)] = seq_len == 0
    assert not out[padding].any(), "padding rows are not zero"
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
    names = [field.name for field in fields(case)]
    for name in CACHES:
        written, wanted = args[names.index(name)], expected_args[names.index(name)]
        if written is None:
            continue
        # Bit for bit, so that the poison compares too. The padding block may have anything.
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[written.itemsize]
        assert torch.equal(written[1:].view(integer), wanted[1:].view(integer)), f"{name} differs"
    return out
