"""A causal convolution of each channel over few tokens, as hybrid models have it: reference, schema, registration."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.recurrent.reference_rows import first_state, rows_of, write_state

MAX_WIDTH = 8


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    read_slot: Tensor, write_slot: Tensor, write_after: Tensor, *, silu: bool,
    gate_before: Tensor | None = None, gate_after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``y[t] = bias + sum(weight[:, j] * x[t - width + 1 + j])`` for each request's tokens, and its ``silu`` if asked.

    The state is the last ``width - 1`` inputs, the oldest first. Sums are in float32 from the oldest input on and
    rounded once, so a token's bits do not depend on how its request is cut into steps.

    Args:
        x: ``[T, C]``; float32, bfloat16 or float16; rows may be strided, the last stride is 1.
        weight: ``[C, width]`` contiguous, dtype of ``x``, ``width`` from 2 to 8.
        bias: ``[C]``, dtype of ``x``, or None.
        state: ``[slots, width - 1, C]`` contiguous, dtype of ``x``, written in place. On a CPU slots, each
            contiguous, may be apart.
        query_start_loc, seq_lens: as ``paged_attention`` has them. A request starts from zeros where ``seq_lens`` says
            that it has no tokens but those of this step.
        read_slot, write_slot, write_after: of ``StateRows``.
        gate_before, gate_after: like ``x``. ``x * gate_before``, rounded, takes the place of ``x``; the result is
            multiplied with ``gate_after`` before it is rounded (LFM2 has both).

    Returns:
        ``[T, C]`` contiguous, dtype of ``x``, a fresh tensor; zeros for padding.
    """
    return torch.ops.compiled_llm.short_convolution(
        x, weight, bias, state, query_start_loc, seq_lens, read_slot, write_slot, write_after, gate_before, gate_after,
        silu,
    )  # fmt: skip


def short_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    read_slot: Tensor, write_slot: Tensor, write_after: Tensor, gate_before: Tensor | None, gate_after: Tensor | None,
    silu: bool,
) -> Tensor:  # fmt: skip
    """The op in plain torch, a token at a time, in a wider dtype. All kernels are tested against it."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows = list(rows_of(query_start_loc, seq_lens, read_slot, write_slot, write_after))
    for row, before in [(row, first_state(state, row, wide)) for row in rows]:
        for after, t in enumerate(row.tokens, start=1):
            new = x[t] if gate_before is None else x[t] * gate_before[t]
            window = torch.cat([before, new.to(wide)[None]])
            y = (weight.to(wide).t() * window).sum(0)
            if bias is not None:
                y = y + bias.to(wide)
            y = F.silu(y) if silu else y
            out[t] = (y if gate_after is None else y * gate_after[t].to(wide)).to(x.dtype)
            before = window[1:]
            write_state(state, row, after, before)
    return out


define_op(
    "short_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor query_start_loc, "
    "Tensor seq_lens, Tensor read_slot, Tensor write_slot, Tensor write_after, Tensor? gate_before, "
    "Tensor? gate_after, bool silu) -> Tensor",
    reference=short_convolution_reference,
    fake=like_first,
    cpu="recurrent_cpu",
    gpu=on_gpu("recurrent.triton_convolution:short_convolution"),
)
