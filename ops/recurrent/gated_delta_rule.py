"""The gated delta rule, a linear attention with a state of a fixed size: reference, schema, registration.

Each value head has a state S ``[dk, dv]``, which starts at zero. Token t does (Yang et al., 2024, arXiv:2412.06464)

    S = g_t * S;    d = beta_t * (v_t - S^T k_t);    S = S + k_t d^T;    o_t = S^T q_t

with g_t = exp(-exp(A_log) * softplus(a_t + dt_bias)) and beta_t = sigmoid(b_t), one each of a value head, and with
queries and keys of length 1, the queries times ``dk ** -0.5``. The layer is Qwen3-Next's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.recurrent.reference_rows import first_state, rows_of, write_state


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor, *,
    max_query_len: int, eps: float = 1e-6, exact: bool = False,
) -> Tensor:  # fmt: skip
    """The outputs o of each request's tokens, and the states after some of them.

    Args:
        q, k: ``[T, HK, dk]``; float32, bfloat16 or float16; any strides with the last one 1.
        v: ``[T, HV, dv]``, dtype of ``q``; any strides with the last one 1. HV is a multiple of HK: value head h has
            key head ``h // (HV // HK)``.
        a, b: ``[T, HV]``, dtype of ``q``, any strides with the last one 1.
        A_log, dt_bias: ``[HV]`` float32.
        state: ``[slots, HV, dk, dv]`` float32 contiguous, written in place; in this order on every device. On a CPU
            slots, each contiguous, may be apart.
        query_start_loc, seq_lens: as ``paged_attention`` has them. A request starts from zeros where ``seq_lens`` says
            that it has no tokens but those of this step.
        read_slot, write_slot, write_after: of ``StateRows``.
        max_query_len: an upper bound of a request's tokens that is static in the graph; 1 says that all are decodes.
        eps: added to the sum of squares of a query or key before the root.
        exact: a token has the same bits alone and in any batch, as a decode and in any chunk. The CPU kernel always
            does so: it computes token after token. On a GPU other kernels do.

    Returns:
        ``[T, HV, dv]`` contiguous, dtype of ``q``, a fresh tensor; zeros for padding. Computed in float32.
    """
    op = torch.ops.compiled_llm.gated_delta_rule_exact if exact else torch.ops.compiled_llm.gated_delta_rule
    return op(
        q, k, v, a, b, A_log, dt_bias, state, query_start_loc, seq_lens, read_slot, write_slot, write_after, eps,
        max_query_len,
    )  # fmt: skip


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor, eps: float,
    max_query_len: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch, a token at a time, in float64. All kernels are tested against it."""
    wide, group = torch.float64, v.shape[1] // q.shape[1]

    def unit(x: Tensor) -> Tensor:
        x = x.to(wide)
        return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)).repeat_interleave(group, dim=1)

    queries, keys = unit(q) * q.shape[2] ** -0.5, unit(k)
    decay = torch.exp(-torch.exp(A_log.to(wide)) * F.softplus(a.to(wide) + dt_bias.to(wide)))
    beta = torch.sigmoid(b.to(wide))
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    rows = list(rows_of(query_start_loc, seq_lens, read_slot, write_slot, write_after))
    for row, kept in [(row, first_state(state, row, wide)) for row in rows]:
        for after, t in enumerate(row.tokens, start=1):
            kept = kept * decay[t, :, None, None]
            delta = beta[t, :, None] * (v[t].to(wide) - torch.einsum("hkv,hk->hv", kept, keys[t]))
            kept = kept + keys[t, :, :, None] * delta[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", kept, queries[t]).to(v.dtype)
            write_state(state, row, after, kept)
    return out


define_op(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "Tensor(a!) state, Tensor query_start_loc, Tensor seq_lens, Tensor read_slot, Tensor write_slot, "
    "Tensor write_after, float eps, int max_query_len) -> Tensor",
    reference=gated_delta_rule_reference,
    fake=lambda q, k, v, *args: v.new_empty(v.shape),
    cpu="recurrent_cpu",
    gpu=on_gpu("recurrent.triton_gated_delta:gated_delta_rule"),
    gpu_exact=on_gpu("recurrent.triton_gated_delta:gated_delta_rule", exact=True),
)
