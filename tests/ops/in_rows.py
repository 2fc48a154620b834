"""Tensors between others, as the caches of an engine on a CPU lie."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops import native


class InRows:
    """Copies of ``tensors``, ``[B, ...]`` each, in rows with a block of each: neighbours of NaN are before and behind.

    Attributes:
        copies: in the order of ``tensors``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds = [kind for tensor in tensors for kind in (((3,), torch.float32), (tensor.shape[1:], tensor.dtype))]
        made = native.huge_zeros_in_rows(len(tensors[0]), [*kinds, ((3,), torch.float32)])
        self.copies, self._others = made[1::2], made[::2]
        for copy, tensor in zip(self.copies, tensors, strict=True):
            copy.copy_(tensor)
        for other in self._others:
            other.fill_(torch.nan)

    def put_back(self, tensors: Sequence[Tensor]) -> None:
        """Give what the copies hold to ``tensors``. Nothing has written to the neighbours."""
        for copy, tensor in zip(self.copies, tensors, strict=True):
            tensor.copy_(copy)
        assert all(other.isnan().all() for other in self._others), "a neighbour was written to"
