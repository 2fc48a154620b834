"""What reads the tensors of a checkpoint for a family, and what it is asked for."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Put, PutQuantized, Region
from compiled_llm.models.quantized.scheme import Scheme, StoredPart
from compiled_llm.ops.linear.quantized_weight import WeightFormat


class Wanted(NamedTuple):
    """A tensor that a family asks for.

    Attributes:
        name: in a checkpoint.
        mean, std: of random values, where there is no checkpoint.
        dtype: that it is wanted in; None: the model's.
        whole: ``Reader.rows`` puts a matrix at a time, the last two dimensions.
        region: of a matrix, ``Reader.rows`` puts this alone, each row at its place in the matrix. None: all.
    """

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    dtype: torch.dtype | None = None
    whole: bool = False
    region: Region | None = None

    def matrices(self) -> tuple[int, int]:
        """How many matrices it is, one after the other, and the rows of each; what has one dimension is a row."""
        return math.prod(self.shape[:-2]), self.shape[-2] if len(self.shape) > 1 else 1


class Stack(NamedTuple):
    """One of several layers of a size, each of whose tensors lies in one with those of the others.

    So ``NAME_blocks`` ``[size, ...]`` is in the place of ``NAME.blocks`` ``[...]``.
    """

    number: int
    size: int


class WantedCodes(NamedTuple):
    """A quantised matrix ``[out_features, in_features]`` that a family asks for: the layer ``name``, or one of a stack.

    Attributes:
        stack: given where ``name`` is the stack's.
    """

    name: str
    scheme: Scheme
    out_features: int
    in_features: int
    stack: Stack | None = None

    @property
    def weight(self) -> str:
        """The name of the tensor that holds it in a checkpoint that is not quantised."""
        return f"{self.name}.weight" if self.stack is None else self.name

    def stored(self) -> dict[str, StoredPart]:
        """``Scheme.stored``: its tensors in a checkpoint, by the ends of their names."""
        return self.scheme.stored(self.out_features, self.in_features)

    def stored_name(self, which: str) -> str:
        """The name of the tensor ``which`` of ``stored``."""
        return f"{self.name}{'.' if self.stack is None else '_'}{which}"


class Reader(Protocol):
    """Reads the tensors of a checkpoint, or makes them, in the model's dtype on its device."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def tensor(self, wanted: Wanted) -> Tensor: ...

    def rows(self, wanted: Sequence[Wanted], put: Put) -> None:
        """As ``Take.rows``; no piece has rows of two matrices."""

    def kept(self, wanted: WantedCodes) -> WeightFormat:
        """As ``Take.kept``."""

    def quantized(self, wanted: WantedCodes, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        """As ``Take.quantized``."""
