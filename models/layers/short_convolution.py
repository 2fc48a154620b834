"""A short convolution between two gates in the place of attention (LFM2, arXiv:2511.23404)."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.inputs import StateCache, StepInput
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import short_convolution


class ShortConvolutionWeights(NamedTuple):
    qkv: Linear  # [3 * D, D]: the gate before the convolution, the one behind it, and what is convolved
    o: Linear  # [D, D]
    weight: Tensor  # [D, width]
    bias: Tensor | None  # [D]

    def mixed(
        self, qkv: Tensor, cache: StateCache, step: StepInput, spec: StateSpec, eps: float, max_query_len: int
    ) -> Tensor:
        """What the layer ``o`` takes, ``[T, D]``; see ``StateMixer``."""
        assert step.states is not None
        before, behind, x = qkv.chunk(3, dim=-1)
        return short_convolution(
            x, self.weight, self.bias, cache.convolution, step.query_start_loc, step.seq_lens, *step.states,
            silu=False, gate_before=before, gate_after=behind,
        )  # fmt: skip
