"""The kinds of linear layer there are, and which of them a model gets."""

import torch

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind

KINDS: tuple[LinearKind, ...] = (Packed, Dense, Exact)
IN_CACHES = 64 << 20
"""Bytes of linear layers that may stay in a CPU's caches, where compressed ones are 0.80 to 1.4 times as fast."""


def linear_kind(device: torch.device, dtype: torch.dtype, exact: bool = False) -> LinearKind:
    """The kind for models in ``dtype`` on ``device``: the first that serves them, the first exact one if asked for."""
    serving = [kind for kind in KINDS if kind.serves(device, dtype)]
    return next((kind for kind in serving if kind.is_exact()), serving[0]) if exact else serving[0]
