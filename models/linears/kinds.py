"""The kinds of linear layer there are, and which of them a model gets."""

import torch

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind

KINDS: tuple[LinearKind, ...] = (Packed, Dense)  # the first that serves a model is taken


def linear_kind(device: torch.device, dtype: torch.dtype) -> LinearKind:
    """The kind for models in ``dtype`` on ``device``."""
    return next(kind for kind in KINDS if kind.serves(device, dtype))
