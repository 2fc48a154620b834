"""Matrices that a checkpoint keeps in other tensors than their own, and how these are decoded as they are read."""

import dataclasses
import functools
import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GROUP = 32  # elements with one scale in MXFP4


class Stored(NamedTuple):
    """What a checkpoint has under a name. ``dtype`` None: any floating-point one that can be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class Encoding(Protocol):
    """How a matrix, or several of one shape, lie in other tensors, row by row.

    All of these tensors begin with the matrices' own dimensions but the last. So a row follows from the same row of
    each, and pieces of rows can be read and decoded by themselves.
    """

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        """The tensors that the matrices ``name``, ``[..., K]``, are made from."""

    def decode(self, rows: Sequence[Tensor]) -> Tensor:
        """The same rows of each of them, ``[n, ...]`` on the host, -> rows ``[n, K]``, without rounding.

        Any number of threads may decode at once. The result holds until the same thread decodes again.
        """


class Mxfp4:
    """Two values of four bits in a byte, and for each 32 values of a row the exponent of a power of two.

    OCP Microscaling Formats (MX) v1.0, 2023: elements are e2m1, scales e8m0, whose code 255 is NaN. The lower four bits
    of a byte are the first of its two values.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        *before, size = shape
        assert size % GROUP == 0, "the config is checked before"
        groups = *before, size // GROUP
        return {
            f"{name}_blocks": Stored((*groups, GROUP // 2), torch.uint8),
            f"{name}_scales": Stored(groups, torch.uint8),
        }

    def decode(self, rows: Sequence[Tensor]) -> Tensor:
        """``[n, K / 2]`` and ``[n, K / 32]`` uint8 -> ``[n, K]`` bfloat16, in which all values are exact."""
        blocks, exponents = rows
        codes, pairs = self._memory(blocks.numel())
        # Pairs are gathered as words of 32 bits, which is many times faster than one by one.
        torch.index_select(_pairs(), 0, codes.copy_(blocks.flatten()), out=pairs)
        scales = _powers_of_two().index_select(0, exponents.flatten().to(torch.int32))
        return pairs.view(torch.bfloat16).view(-1, GROUP).mul_(scales[:, None]).view(len(blocks), -1)

    def _memory(self, count: int) -> Tensor:
        """``[2, count]`` int32 of this thread's own, used for every piece: new memory would cost more than decoding."""
        if getattr(self._own, "memory", None) is None or self._own.memory.shape[1] < count:
            self._own.memory = torch.empty(2, count, dtype=torch.int32)
        return self._own.memory[:, :count]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How weights are kept.

    Attributes:
        method: as ``quant_method`` calls it.
        not_converted: patterns of modules that are kept as plain tensors; ``*`` stands for anything.
    """

    method: str
    not_converted: tuple[str, ...] = ()

    def encoding(self, module: str) -> Encoding | None:
        """How the matrices of ``module``, such as ``model.layers.0.mlp.experts``, are kept; None: as they are."""
        parts = module.split(".")
        around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        for pattern in self.not_converted:
            if module.endswith(pattern) or any(fnmatchcase(name, pattern) for name in around):
                return None
        return Mxfp4()


@functools.cache
def _pairs() -> Tensor:
    """Byte -> its two values in bfloat16, as one word: ``[256]`` int32."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes]).bfloat16()
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1).view(torch.int32).view(-1)


@functools.cache
def _powers_of_two() -> Tensor:
    """e8m0 code -> ``2 ** (code - 127)``, 255 -> NaN: ``[256]`` bfloat16, whose exponents have the same bias."""
    bits = torch.arange(256) << 7
    bits[0] = 1 << 6  # a subnormal number
    bits[255] |= 1 << 6
    return bits.to(torch.int16).view(torch.bfloat16)
