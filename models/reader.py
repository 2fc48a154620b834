"""What reads the tensors of a checkpoint for a family, and what it is asked for."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Put, PutQuantized
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_weight import WeightFormat


class Wanted(NamedTuple):
    """A tensor that a family asks for.

    Attributes:
        name: in a checkpoint.
        mean, std: of random values, where there is no checkpoint.
        dtype: that it is wanted in; None: the model's.
        whole: ``Reader.rows`` puts a matrix at a time, the last two dimensions.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    dtype: torch.dtype | None = None
    whole: bool = False

    def matrices(self) -> tuple[int, int]:
        """How many matrices it is, one after the other, and the rows of each; what has one dimension is a row."""
        return math.prod(self.shape[:-2]), self.shape[-2] if len(self.shape) > 1 else 1


class Stack(NamedTuple):
    """One of several layers of a size, each of whose tensors lies in one with those of the others.

    So ``NAME_blocks`` ``[size, ...]`` is in the place of ``NAME.blocks`` ``[...]``.
    """

    number: int
    size: int


class Reader(Protocol):
    """Reads the tensors of a checkpoint, or makes them, in the model's dtype on its device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def tensor(self, wanted: Wanted) -> Tensor: ...

    def rows(self, wanted: Sequence[Wanted], put: Put) -> None:
        """As ``Take.rows``; no piece has rows of two matrices."""

    def kept(self, name: str, scheme: Scheme, out_features: int, in_features: int) -> WeightFormat:
        """As ``Take.kept``, of the layer ``name``."""

    def quantized(
        self,
        name: str,
        scheme: Scheme,
        out_features: int,
        in_features: int,
        put: PutQuantized,
        stack: Stack | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """As ``Take.quantized``, of the layer ``name``; with ``stack`` of one of those that are called so."""
