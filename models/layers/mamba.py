"""Mamba-2 in the place of attention (Dao and Gu, 2024, arXiv:2405.21060), as Granite 4 and Nemotron-H have it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.inputs import StateCache, StepInput
from compiled_llm.models.layers.residual import BlockOutput, Normed
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.linears.sharded import NormOverRanks
from compiled_llm.models.sharding import Cut, Section, by_outputs
from compiled_llm.models.weights import Source
from compiled_llm.ops import gated_rms_norm, mamba2_scan, short_convolution
from compiled_llm.ops.recurrent.short_convolution import MAX_WIDTH


class MambaSizes(NamedTuple):
    heads: int  # H
    head_dim: int  # P
    groups: int  # G; each has heads of its own
    state_size: int  # N
    width: int  # tokens that the convolution sees

    def check(self, names: Sequence[str]) -> None:
        """``ValueError`` for sizes that cannot be; ``names`` are those that ``config.json`` has for them, in order."""
        for name, size in zip(names, self, strict=True):
            if not 0 < size <= 2**24:
                raise ValueError(f"config.json: {name} must be at least 1, given {size!r:.100}")
        if self.heads % self.groups:
            raise ValueError(
                f"config.json: {names[0]} must be a multiple of {names[2]}, given {self.heads} and {self.groups}"
            )
        if not 2 <= self.width <= MAX_WIDTH:
            raise ValueError(f"config.json: {names[4]} must be from 2 to {MAX_WIDTH}, given {self.width}")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    def spec(self, time_steps: tuple[float, float] = (0.0, math.inf)) -> StateSpec:
        """A layer's state; ``time_steps``: as ``StateSpec`` has them."""
        recurrent, grouped = (self.heads, self.head_dim, self.state_size), self.groups * self.state_size
        runs = self.inner, grouped, grouped
        return StateSpec((self.width - 1, self.convolved), recurrent, time_steps, runs=runs)


class MambaWeights(NamedTuple):
    """With H heads of P elements, G groups and N elements of a state; C is ``H * P + 2 * G * N``."""

    qkv: Linear  # [H * P + C + H, D]: the output's gate; what is convolved, x, B and C; and dt of each head
    o: Linear  # [D, H * P]
    convolution: Tensor  # [C, width]
    convolution_bias: Tensor | None  # [C]
    norm: Tensor | NormOverRanks  # [H * P], of a group at a time
    A_log: Tensor  # [H] float32
    D: Tensor  # [H] float32
    dt_bias: Tensor  # [H] float32


def mamba(x: Normed, w: MambaWeights, spec: StateSpec, cache: StateCache, step: StepInput) -> BlockOutput:
    """Mamba-2 of a layer. Also writes the requests' states to the cache."""
    assert step.states is not None
    assert cache.recurrent is not None
    assert spec.recurrent is not None
    heads, size, state_size = spec.recurrent
    channels, inner = spec.convolution[1], heads * size
    grouped = (channels - inner) // 2
    gate, convolved, dt = x.linear(w.qkv).split([inner, channels, heads], dim=-1)
    rows = step.query_start_loc, step.seq_lens, *step.states
    convolved = short_convolution(convolved, w.convolution, w.convolution_bias, cache.convolution, *rows, silu=True)
    inputs, b, c = convolved.split([inner, grouped, grouped], dim=-1)
    dt_min, dt_max = spec.time_steps
    out = mamba2_scan(
        inputs.unflatten(-1, (heads, size)), dt, b.unflatten(-1, (-1, state_size)), c.unflatten(-1, (-1, state_size)),
        w.A_log, w.D, w.dt_bias, cache.recurrent, *rows, max_query_len=spec.max_query_len, dt_min=dt_min,
        dt_max=dt_max, exact=spec.exact,
    )  # fmt: skip
    out = out.flatten(1)
    if isinstance(w.norm, NormOverRanks):  # a group has heads of several ranks
        norm, out, gate = w.norm, w.norm.gathered(out), w.norm.gathered(gate)
        normed = gated_rms_norm(out, gate, norm.weight, x.eps, norm.group_size, norm_first=False)
        return BlockOutput(norm.own(normed), w.o)
    group_size = inner * state_size // grouped
    return BlockOutput(gated_rms_norm(out, gate, w.norm, x.eps, group_size, norm_first=False), w.o)


def take_mamba(
    sizes: MambaSizes, source: Source, name: str, hidden_size: int, *, bias: bool, convolution_bias: bool
) -> MambaWeights:
    """The weights of Mamba-2 whose tensors' names begin with ``name``; ``bias``: of both projections."""
    d, heads, inner, channels = hidden_size, sizes.heads, sizes.inner, sizes.convolved
    of_inner, of_heads = (Section(size, heads, "the number of Mamba's heads") for size in (inner, heads))
    of_groups = Section(sizes.groups * sizes.state_size, sizes.groups, "the number of Mamba's groups", repeats=True)
    convolved = of_inner, of_groups, of_groups
    qkv = StoredLinear(f"{name}.in_proj", inner + channels + heads, d, bias)
    convolution = source.tensor(f"{name}.conv1d.weight", (channels, 1, sizes.width), cut=Cut(convolved))
    convolution_bias_of = (
        source.tensor(f"{name}.conv1d.bias", (channels,), cut=Cut(convolved)) if convolution_bias else None
    )
    return MambaWeights(
        qkv=source.linear(qkv._replace(cut=by_outputs(of_inner, *convolved, of_heads))),
        o=source.linear(StoredLinear(f"{name}.out_proj", d, inner, bias, cut=of_inner.inputs)),
        convolution=convolution.flatten(1),
        convolution_bias=convolution_bias_of,
        norm=source.norm_of_groups(f"{name}.norm", of_inner, sizes.groups),
        **{
            x: source.tensor(f"{name}.{x}", (heads,), dtype=torch.float32, cut=of_heads.outputs)
            for x in ("A_log", "D", "dt_bias")
        },
    )
