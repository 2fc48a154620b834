"""A short convolution between two gates in the place of attention (LFM2, arXiv:2511.23404)."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.inputs import StateCache, StepInput
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import short_convolution


class ShortConvolutionWeights(NamedTuple):
    qkv: Linear  # [3 * D, D]: the gate before the convolution, the one behind it, and what is convolved
    o: Linear  # [D, D]
    weight: Tensor  # [D, width]
    bias: Tensor | None  # [D]


def gated_convolution(
    x: Normed, w: ShortConvolutionWeights, spec: StateSpec, cache: StateCache, step: StepInput
) -> BlockOutput:
    """The convolution of a layer and its gates. Also writes the requests' last inputs to the cache."""
    assert step.states is not None
    before, behind, inputs = x.linear(w.qkv).chunk(3, dim=-1)
    rows = step.query_start_loc, step.seq_lens, *step.states
    out = short_convolution(
        inputs, w.weight, w.bias, cache.convolution, *rows, silu=False, gate_before=before, gate_after=behind
    )
    return BlockOutput(out, w.o)
