"""Mamba-2 in the place of attention (Dao and Gu, 2024, arXiv:2405.21060), as Granite 4 and Nemotron-H have it."""

from typing import NamedTuple

from torch import Tensor

from compiled_llm.models.inputs import StateCache, StepInput
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import gated_rms_norm, mamba2_scan, short_convolution


class MambaWeights(NamedTuple):
    """With H heads of P elements, G groups and N elements of a state; C is ``H * P + 2 * G * N``."""

    qkv: Linear  # [H * P + C + H, D]: the output's gate; what is convolved, x, B and C; and dt of each head
    o: Linear  # [D, H * P]
    convolution: Tensor  # [C, width]
    convolution_bias: Tensor | None  # [C]
    norm: Tensor  # [H * P], of a group at a time
    A_log: Tensor  # [H] float32
    D: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32

    def mixed(
        self, qkv: Tensor, cache: StateCache, step: StepInput, spec: StateSpec, eps: float, max_query_len: int
    ) -> Tensor:
        """What the layer ``o`` takes, ``[T, H * P]``; see ``StateMixer``."""
        assert step.states is not None
        assert cache.recurrent is not None
        assert spec.recurrent is not None
        heads, size, state_size = spec.recurrent
        channels, inner = spec.convolution[1], heads * size
        grouped = (channels - inner) // 2
        gate, convolved, dt = qkv.split([inner, channels, heads], dim=-1)
        rows = step.query_start_loc, step.seq_lens, *step.states
        convolved = short_convolution(
            convolved, self.convolution, self.convolution_bias, cache.convolution, *rows, silu=True
        )
        x, b, c = convolved.split([inner, grouped, grouped], dim=-1)
        out = mamba2_scan(
            x.unflatten(-1, (heads, size)), dt, b.unflatten(-1, (-1, state_size)), c.unflatten(-1, (-1, state_size)),
            self.A_log, self.D, self.dt_bias, cache.recurrent, *rows, max_query_len=max_query_len, exact=spec.exact,
        )  # fmt: skip
        return gated_rms_norm(out.flatten(1), gate, self.norm, eps, inner * state_size // grouped, norm_first=False)
