"""The kinds of linear layer there are, and which of them a model gets."""

import torch

from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind

KINDS: tuple[LinearKind, ...] = (Packed, Dense, Exact)
IN_CACHES = 64 << 20
"""Bytes of a model that may stay in a CPU's caches, where compressed weights are up to 1.2 times as slow."""


def linear_kind(device: torch.device, dtype: torch.dtype, exact: bool = False) -> LinearKind:
    """The kind for models in ``dtype`` on ``device``: the first that serves them, the first exact one if asked for."""
    serving = [kind for kind in KINDS if kind.serves(device, dtype)]
    return next((kind for kind in serving if kind.is_exact()), serving[0]) if exact else serving[0]


def compresses(device: torch.device, dtype: torch.dtype, nbytes: int) -> bool:
    """Whether ``Compressed`` is the faster kind for a model whose linear layers have ``nbytes``."""
    return Compressed.serves(device, dtype) and nbytes > IN_CACHES
