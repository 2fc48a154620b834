"""The scan of Mamba-2, a recurrence with a state of a fixed size: reference, schema, registration.

Each head has a state h ``[P, N]``, which starts at zero. Token t does (Dao and Gu, 2024, arXiv:2405.21060)

    h = exp(-exp(A_log) * dt_t) * h + (dt_t * x_t) B_t^T;    y_t = h C_t + D * x_t

with dt_t = softplus(dt + dt_bias), kept within limits, one of a head; B and C are shared by the heads of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.recurrent.reference_rows import first_state, rows_of, write_state


def mamba2_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor, *,
    max_query_len: int, dt_min: float = 0.0, dt_max: float = float("inf"), exact: bool = False,
) -> Tensor:  # fmt: skip
    """The outputs y of each request's tokens, and the states after some of them.

    Args:
        x: ``[T, H, P]``; float32, bfloat16 or float16; any strides with the last one 1.
        dt: ``[T, H]``, dtype of ``x``; any strides with the last one 1.
        B, C: ``[T, G, N]``, dtype of ``x``; any strides with the last one 1. H is a multiple of G: head h has group
            ``h // (H // G)``.
        A_log, D, dt_bias: ``[H]`` float32.
        state: ``[slots, H, P, N]`` float32 contiguous, written in place; in this order on every device. On a CPU slots,
            each contiguous, may be apart.
        query_start_loc, seq_lens: as ``paged_attention`` has them. A request starts from zeros where ``seq_lens`` says
            that it has no tokens but those of this step.
        read_slot, write_slot, write_after: of ``StateRows``.
        max_query_len: an upper bound of a request's tokens that is static in the graph; 1 says that all are decodes.
        dt_min, dt_max: limits of dt after softplus, for all tokens. (transformers do not apply them in a decode.)
        exact: a token has the same bits alone and in any batch, as a decode and in any chunk. The CPU kernel always
            does so: it computes token after token. On a GPU other kernels do.

    Returns:
        ``[T, H, P]`` contiguous, dtype of ``x``, a fresh tensor; zeros for padding. Computed in float32.
    """
    op = torch.ops.compiled_llm.mamba2_scan_exact if exact else torch.ops.compiled_llm.mamba2_scan
    return op(
        x, dt, B, C, A_log, D, dt_bias, state, query_start_loc, seq_lens, read_slot, write_slot, write_after, dt_min,
        dt_max, max_query_len,
    )  # fmt: skip


def mamba2_scan_reference(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor,
    dt_min: float, dt_max: float, max_query_len: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch, a token at a time, in float64. All kernels are tested against it."""
    wide, group = torch.float64, x.shape[1] // B.shape[1]
    steps = F.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(dt_min, dt_max)
    decay = torch.exp(-torch.exp(A_log.to(wide)) * steps)
    values = x.to(wide)
    ins, outs = (y.to(wide).repeat_interleave(group, dim=1) for y in (B, C))
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = list(rows_of(query_start_loc, seq_lens, read_slot, write_slot, write_after))
    for row, kept in [(row, first_state(state, row, wide)) for row in rows]:
        for after, t in enumerate(row.tokens, start=1):
            added = (steps[t, :, None] * values[t])[:, :, None] * ins[t, :, None]
            kept = kept * decay[t, :, None, None] + added
            out[t] = (torch.einsum("hpn,hn->hp", kept, outs[t]) + D.to(wide)[:, None] * values[t]).to(x.dtype)
            write_state(state, row, after, kept)
    return out


define_op(
    "mamba2_scan(Tensor x, Tensor dt, Tensor B, Tensor C, Tensor A_log, Tensor D, Tensor dt_bias, Tensor(a!) state, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor read_slot, Tensor write_slot, Tensor write_after, "
    "float dt_min, float dt_max, int max_query_len) -> Tensor",
    reference=mamba2_scan_reference,
    fake=like_first,
    cpu="recurrent_cpu",
    gpu=on_gpu("recurrent.triton_mamba2:mamba2_scan"),
    gpu_exact=on_gpu("recurrent.triton_mamba2:mamba2_scan", exact=True),
)
