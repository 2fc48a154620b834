"""Reads the tensors of a checkpoint in pieces, on several threads, each piece straight to where it is kept.

A piece is read, converted, checked and handed on while it is in the caches. So a model is never in memory twice: what
loading takes besides the weights is a piece for each thread.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, Self

import torch
from torch import Tensor

from compiled_llm.checkpoint.stored_tensors import CHANGES, DTYPES, CheckpointError, StoredTensor
from compiled_llm.models.files import open_file
from compiled_llm.models.linears.protocol import Put, PutQuantized
from compiled_llm.models.reader import Wanted, WantedCodes
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat
from compiled_llm.system.resources import granted_cores

PIECE_BYTES = 1 << 20  # in the file: a piece and what is made of it stay in a core's L2
_MOST_THREADS = 16
_MANY_BYTES = 4096  # of a row, from which on the others are not read: files are read by pages of that size

OnBytes = Callable[[str, int], None]
"""(name of a tensor, bytes): is told from several threads how much of it is in its place, in bytes of the model."""


class _Piece(NamedTuple):
    """Rows ``first`` to ``end`` of a tensor, for ``put`` the rows from ``start`` on."""

    wanted: Wanted
    first: int
    end: int
    start: int
    put: Put


class CheckpointReader:
    """A ``Reader`` of the tensors ``stored`` has, in ``dtype`` on ``device``; to be used in a ``with`` statement."""

    def __init__(
        self, stored: Mapping[str, StoredTensor], dtype: torch.dtype, device: torch.device, on_bytes: OnBytes
    ) -> None:
        self.dtype, self.device = dtype, device
        self._stored, self._on_bytes = stored, on_bytes
        self._files: dict[str, BinaryIO] = {}
        self._lock = threading.Lock()
        self._own = threading.local()
        self._num_torch_threads = torch.get_num_threads()
        # Threads of torch's own within each thread would only be in each other's way.
        self._pool = ThreadPoolExecutor(
            min(_MOST_THREADS, granted_cores()), "read-weights", torch.set_num_threads, (1,)
        )

    def __enter__(self) -> Self:
        torch.set_num_threads(1)  # here too: after each operation the others spin for a while, on cores that read
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._num_torch_threads)
        for file in self._files.values():
            file.close()

    def tensor(self, wanted: Wanted) -> Tensor:
        """The whole tensor.

        Raises:
            CheckpointError: the file has become shorter meanwhile, or the tensor holds NaN or infinite values.
        """
        tensor = torch.empty(wanted.shape, dtype=wanted.dtype or self.dtype, device=self.device)
        into = tensor.view(math.prod(wanted.matrices()), -1)

        def put(start: int, rows: Tensor) -> None:
            into[start : start + len(rows)] = rows

        self.rows([wanted], put)
        return tensor

    def rows(self, wanted: Sequence[Wanted], put: Put) -> None:
        """``Reader.rows``, a piece a thread. Raises what ``tensor`` raises."""
        pieces: list[_Piece] = []
        start = 0
        for one in wanted:
            count, num_rows = one.matrices()
            step = num_rows if one.whole else self._step(one)
            rows = range(num_rows) if one.region is None else range(one.region.first, one.region.end)
            for begin in range(0, count * num_rows, num_rows):
                pieces += [
                    _Piece(one, begin + first, begin + min(first + step, rows.stop), start + begin + first, put)
                    for first in rows[::step]
                ]
            start += count * num_rows
        if len(pieces) == 1:
            self._read(pieces[0])
            return
        for _ in self._pool.map(self._read, pieces):
            pass

    def kept(self, wanted: WantedCodes) -> WeightFormat:
        """``Reader.kept``, by the dtypes that the files have."""
        names = {which: wanted.stored_name(which) for which in wanted.stored()}
        found = {which: DTYPES[self._stored[of].dtype] for which, of in names.items() if of in self._stored}
        return wanted.scheme.kept(found, self.dtype)

    def quantized(self, wanted: WantedCodes, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        """``Reader.quantized``, a piece a thread. Raises what ``tensor`` raises."""
        layer = QuantizedLayer(self._stored, wanted)

        def put_on_device(first: int, rows: QuantizedRows) -> None:
            zeros = None if rows.zeros is None else rows.zeros.to(self.device)
            put(first, QuantizedRows(rows.codes.to(self.device), rows.scales.to(self.device), zeros))
            self._on_bytes(wanted.weight, rows.codes.numel() * self.dtype.itemsize)

        for _ in self._pool.map(lambda piece: layer.decode(piece[0], piece[1], put_on_device), layer.pieces()):
            pass
        besides = layer.order(), layer.input_scale()
        order, input_scale = (None if each is None else each.to(self.device) for each in besides)
        return order, input_scale

    def _step(self, wanted: Wanted) -> int:
        """Rows of a piece."""
        num_rows = math.prod(wanted.matrices())
        made = math.prod(wanted.shape) * (wanted.dtype or self.dtype).itemsize
        step = max(1, PIECE_BYTES * num_rows // max(made, self._stored[wanted.name].nbytes))
        # Whole tiles of packed layers, also of rows in turn, and whole groups of compressed ones.
        return step // 64 * 64 or step // 32 * 32 or step // 16 * 16 or step

    def _read(self, piece: _Piece) -> None:
        wanted, dtype = piece.wanted, piece.wanted.dtype or self.dtype
        original = self._original(piece)
        rows = original.to(device=self.device, dtype=dtype)
        if not _is_finite(rows):
            stored = self._stored[wanted.name]
            what = "NaN or infinite values: the file is damaged"
            if _is_finite(original):
                what = f"values too large for {str(dtype)[6:]}: choose a wider dtype"
            raise CheckpointError(f"{stored.path}: {stored.name} holds {what}")
        piece.put(piece.start, rows)
        self._on_bytes(wanted.name, rows.numel() * self.dtype.itemsize)

    def _original(self, piece: _Piece) -> Tensor:
        """The piece's rows as the checkpoint has them, ``[n, K]``, or the wanted columns of them."""
        num_rows, stored = piece.end - piece.first, self._stored[piece.wanted.name]
        row_bytes, region = stored.nbytes // math.prod(piece.wanted.matrices()), piece.wanted.region
        dtype = DTYPES[stored.dtype]
        if region is not None and not stored.change and not stored.heads:
            begin, width = (columns * dtype.itemsize for columns in (region.left, region.right - region.left))
            if _MANY_BYTES <= width < row_bytes:
                content = self._buffer(num_rows * width)
                for row, of_row in enumerate(content.view(num_rows, width).numpy(), piece.first):
                    stored.read_into(of_row, row * row_bytes + begin, self._file(stored))
                return content.view(dtype).view(num_rows, -1)
        content = self._buffer(num_rows * row_bytes)
        stored.read_into(content.numpy(), piece.first * row_bytes, self._file(stored))
        original = content.view(dtype).view(num_rows, -1)
        original = CHANGES[stored.change](original) if stored.change else original
        return original if region is None else original[:, region.left : region.right]

    def _buffer(self, size: int) -> Tensor:
        """Memory of this thread's own, used for every piece that it reads."""
        if getattr(self._own, "buffer", None) is None or len(self._own.buffer) < size:
            self._own.buffer = torch.empty(size, dtype=torch.uint8)
        return self._own.buffer[:size]

    def _file(self, stored: StoredTensor) -> int:
        """Descriptor of the tensor's file, opened once."""
        with self._lock:
            if str(stored.path) not in self._files:
                self._files[str(stored.path)] = open_file(stored.path)
            return self._files[str(stored.path)].fileno()


def _is_finite(tensor: Tensor) -> bool:
    """Whether all elements are. One pass at the speed of memory; ``isfinite`` would write what it finds."""
    return all(math.isfinite(bound) for bound in torch.aminmax(tensor))


# -- Quantised layers


class QuantizedLayer:
    """The matrix ``wanted``, kept as its scheme says in ``stored``."""

    def __init__(self, stored: Mapping[str, StoredTensor], wanted: WantedCodes) -> None:
        name, self.scheme, self.out_features, self._in_features, stack = wanted
        self.name = name if stack is None else f"{name}, number {stack.number}"
        names = {which: wanted.stored_name(which) for which, part in wanted.stored().items() if part.used}
        self._stored = {which: stored[of] for which, of in names.items() if of in stored}
        if stack is not None:
            self._stored = {which: tensor.part(stack.number) for which, tensor in self._stored.items()}
        self._whole = {which: tensor.read() for which, tensor in self._stored.items() if which != self.scheme.in_pieces}

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
        if rows.codes.shape != (count, self._in_features):
            raise self._damaged(f"rows must have {self._in_features} weights, found {rows.codes.shape[1]}")
        put(first, rows)

    def _damaged(self, why: object) -> CheckpointError:
        paths = sorted({str(tensor.path) for tensor in self._stored.values()})
        return CheckpointError(f"{', '.join(paths)}: {self.name}: {why}")
