"""A layer's state: what layers keep of a request that compress all tokens before into memory of a fixed size."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """One layer's state of a request, in a slot of its ``StateCache``.

    Attributes:
        convolution: ``(width - 1, C)``, the last inputs of a causal convolution over C channels; in the model's dtype.
        recurrent: the shape of what a recurrence carries from token to token, in float32; None: there is none.
        time_steps: limits of those of Mamba-2.
        max_query_len: an upper bound of the tokens of a request in a step. Set by the engine, for each bucket.
        exact: whether a GPU has to use the kernels that give a row the same bits in every step. Set by the engine.
        runs: sizes of runs of the convolution's channels, of each of which a rank has its part; empty: they are one.
    """

    convolution: tuple[int, int]
    recurrent: tuple[int, ...] | None = None
    time_steps: tuple[float, float] = (0.0, math.inf)
    max_query_len: int = 0
    exact: bool = False
    runs: tuple[int, ...] = ()

    def state_tensors(self, num_slots: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of the layer's ``StateCache``, by its field, for a model in ``dtype``."""
        held: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"convolution": ((num_slots, *self.convolution), dtype)}
        if self.recurrent is not None:
            held["recurrent"] = (num_slots, *self.recurrent), torch.float32
        return held
