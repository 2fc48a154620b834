"""Gated DeltaNet in the place of attention: Qwen3-Next's linear attention (Yang et al., 2024, arXiv:2412.06464)."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.inputs import StateCache, StepInput
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import gated_delta_rule, gated_rms_norm, short_convolution


class DeltaNetWeights(NamedTuple):
    """With HK key heads of dk elements and HV value heads of dv; C is ``2 * HK * dk + HV * dv``."""

    # [C + HV * dv + 2 * HV, D]: queries, keys and values, which are convolved; the output's gate; and of each value
    # head b, which says how much of a token is written, and a, which says how much is forgotten.
    qkv: Linear
    o: Linear  # [D, HV * dv]
    convolution: Tensor  # [C, width]
    norm: Tensor  # [dv], of each value head
    A_log: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32


def delta_net(x: Normed, w: DeltaNetWeights, spec: StateSpec, cache: StateCache, step: StepInput) -> BlockOutput:
    """Gated DeltaNet of a layer. Also writes the requests' states to the cache."""
    assert step.states is not None
    assert cache.recurrent is not None
    assert spec.recurrent is not None
    heads, dk, dv = spec.recurrent
    channels, values = spec.convolution[1], heads * dv
    convolved, gate, b, a = x.linear(w.qkv).split([channels, values, heads, heads], dim=-1)
    rows = step.query_start_loc, step.seq_lens, *step.states
    convolved = short_convolution(convolved, w.convolution, None, cache.convolution, *rows, silu=True)
    keys = (channels - values) // 2
    q, k, v = convolved.split([keys, keys, values], dim=-1)
    out = gated_delta_rule(
        q.unflatten(-1, (-1, dk)), k.unflatten(-1, (-1, dk)), v.unflatten(-1, (-1, dv)), a, b, w.A_log, w.dt_bias,
        cache.recurrent, *rows, max_query_len=spec.max_query_len, exact=spec.exact,
    )  # fmt: skip
    return BlockOutput(gated_rms_norm(out.flatten(1), gate, w.norm, x.eps, dv, norm_first=True), w.o)
