"""Reads a quantised linear layer of a checkpoint: its tensors, decoded to codes piece by piece."""

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_llm.checkpoint.stored_tensors import DTYPES, CheckpointError, StoredTensor
from compiled_llm.models.linears.protocol import PutQuantized
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.reader import Stack

PIECE_BYTES = 1 << 20


class QuantizedLayer:
    """One layer ``name``, ``[out_features, in_features]``, kept as ``scheme`` says in ``stored``; or one of a stack."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        name: str,
        scheme: Scheme,
        out_features: int,
        in_features: int,
        stack: Stack | None = None,
    ) -> None:
        self.scheme, self.out_features = scheme, out_features
        self.name = name if stack is None else f"{name}, number {stack.number}"
        self._in_features = in_features
        wanted = scheme.stored(out_features, in_features)
        names = {which: f"{name}{'.' if stack is None else '_'}{which}" for which, part in wanted.items() if part.used}
        self._stored = {which: stored[of] for which, of in names.items() if of in stored}
        if stack is not None:
            self._stored = {which: tensor.part(stack.number) for which, tensor in self._stored.items()}
        self._whole = {which: tensor.read() for which, tensor in self._stored.items() if which != scheme.in_pieces}

    def pieces(self) -> list[tuple[int, int]]:
        """First rows and numbers of rows that are decoded at a time."""
        step = max(16, PIECE_BYTES // self._in_features // 16 * 16)
        return [(first, min(step, self.out_features - first)) for first in range(0, self.out_features, step)]

    def order(self) -> Tensor | None:
        """See ``Scheme.order``; a tensor wherever the layer may have one."""
        try:
            order = self.scheme.order(self._whole)
        except ValueError as error:
            raise self._damaged(error) from error
        if not self.scheme.ordered:
            if order is not None:
                raise self._damaged("the inputs must lie in order, as config.json says, but g_idx gives another one")
            return None
        return torch.arange(self._in_features, dtype=torch.int32) if order is None else order

    def input_scale(self) -> Tensor | None:
        """``[1]`` float32, where activations are static."""
        if not self.scheme.static_activations:
            return None
        scale = self._whole["input_scale"].float().view(1)
        if not (scale.isfinite() & (scale > 0)).all():
            raise self._damaged(f"input_scale must be a number above 0, found {float(scale)}")
        return scale

    def decode(self, first: int, count: int, put: PutQuantized) -> None:
        """Hand on some rows."""
        tensors = dict(self._whole)
        which = self.scheme.in_pieces
        if which is not None:
            stored = self._stored[which]
            row_bytes = stored.nbytes // self.out_features
            content = torch.empty(count * row_bytes, dtype=torch.uint8)
            with open(stored.path, "rb") as file:
                stored.read_into(content.numpy(), first * row_bytes, file.fileno())
            tensors[which] = content.view(DTYPES[stored.dtype]).view(count, *stored.shape[1:])
        try:
            rows = self.scheme.decode(tensors, first, count)
        except ValueError as error:
            raise self._damaged(error) from error
        if self.scheme.form.element == "fp8" and ((rows.codes & 127) == 127).any():
            raise self._damaged("the weights hold NaN: the file is damaged")
        put(first, rows)

    def _damaged(self, why: object) -> CheckpointError:
        paths = sorted({str(tensor.path) for tensor in self._stored.values()})
        return CheckpointError(f"{', '.join(paths)}: {self.name}: {why}")
