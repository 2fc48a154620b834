"""Linear layer on losslessly compressed bfloat16 weights, for CPUs: layout, reference, schemas, registration.

The upper byte of a bfloat16 is its sign and 7 of the 8 bits of its exponent. Those of a matrix's weights are much
alike: in any 8 outputs the 16 most frequent ones cover nearly all weights. So a weight is kept in 12 bits, its lower
byte and a code of 4 bits for the upper one, and the few whose upper byte has no code are exceptions. All bits come
back, and ``y = x @ W.T + bias`` has those of ``packed_linear``; but a decode step, which reads every weight once, reads
a quarter less. (That exponents take few bits: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression", 2025,
with codes of varying length.)

Outputs are taken in groups of 64, four tiles of 16, and inputs in words of two. N out_features, K in_features, G =
ceil(N / 64), L = ceil(K / 2); output ``64 g + 32 h + 16 t + 4 l + j`` and input ``2 p + i`` have the place ``16 l +
8 t + 2 j + i`` in half ``h`` of the word ``p`` of group ``g``:

    words[g, p, h, place] = lower byte                                        [G, L, 3, 64] uint8
    words[g, p, 2, place] = code of half 0 | code of half 1 << 4
    tables[g, h, l, code] = upper byte                                        [G, 2, 4, 16] uint8
    exceptions[g, ...] = (128 p + 64 h + place) << 8 | upper byte, rising, then END      [G, C] int32

with outputs past N and inputs past K zero. C is the same for all matrices of K inputs, unless one needs more.
"""

import ctypes
import functools
import threading
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import compress_library
from compiled_llm.ops.library import define_op
from compiled_llm.ops.linear.packed_linear import packed_linear_reference
from compiled_llm.ops.linear.quantized_linear import by_experts, grouped_rows_fake, rows_fake

GROUP = 64
END = 0x7FFFFFFF
MOST_INPUTS = 2**16
"""Most in_features: an exception has 23 bits for its place."""


class CompressedWeight(NamedTuple):
    """A matrix ``[N, K]`` as above; or several, with one more dimension in front."""

    words: Tensor
    tables: Tensor
    exceptions: Tensor

    def expert(self, number: int) -> "CompressedWeight":
        """One of several."""
        return CompressedWeight(*(tensor[number] for tensor in self))


def empty_compressed(
    out_features: int, in_features: int, device: torch.device, experts: int | None = None
) -> CompressedWeight:
    """A compressed weight for ``Compressor``, of ``experts`` matrices if given.

    On the CPU in huge pages, which are taken as they are written.
    """
    length, before = -(-in_features // 2), () if experts is None else (experts,)
    groups = -(-out_features // GROUP)

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type == "meta":
            return torch.empty(*before, *shape, dtype=dtype, device=device)
        return native.huge_zeros((*before, *shape), dtype, is_weight=True)

    return CompressedWeight(
        made((groups, length, 3, GROUP), torch.uint8),
        made((groups, 2, 4, 16), torch.uint8),
        made((groups, room_for_exceptions(in_features)), torch.int32),
    )


def room_for_exceptions(in_features: int) -> int:
    """C, unless a matrix needs more: of each group 0.4%, where trained models had less than 0.001% in all."""
    return max(64, in_features // 4)


class Compressor:
    """Takes the rows of a matrix, in any order and from several threads, and compresses them.

    A group is compressed as soon as all its rows are there; rows of other groups are kept until then.

    Args:
        experts: of so many matrices.
    """

    def __init__(self, out_features: int, in_features: int, device: torch.device, experts: int | None = None) -> None:
        assert in_features <= MOST_INPUTS, "exceptions have no room for the places of more inputs"
        self._shape = out_features, in_features
        self._weight = empty_compressed(out_features, in_features, device, experts)
        self._zeros = torch.zeros(in_features, dtype=torch.bfloat16)
        self._lock = threading.Lock()
        # Keys are (expert, group).
        self._parts: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}  # its rows, and how many are missing
        self._many: dict[tuple[int, int], Tensor] = {}  # exceptions that have no room

    def put(self, start: int, rows: Tensor, expert: int = 0) -> None:
        """Rows ``[n, K]`` of ``W`` from ``start`` on, bfloat16 on the CPU."""
        out_features, in_features = self._shape
        assert rows.dtype == torch.bfloat16
        assert rows.shape[1] == in_features
        assert 0 <= start <= start + len(rows) <= out_features, "rows beyond the last one"
        rows, at = rows.contiguous(), 0
        while at < len(rows):
            group, within = divmod(start + at, GROUP)
            size = min(GROUP, out_features - group * GROUP)
            whole = len(rows) - at if start + len(rows) == out_features else (len(rows) - at) // GROUP * GROUP
            count = whole if within == 0 and whole > 0 else min(size - within, len(rows) - at)
            part = rows[at : at + count]
            at += count
            if count >= size:
                self._compress(expert, group, part)
            elif (done := self._joined((expert, group), within, size, part)) is not None:
                self._compress(expert, group, done)

    def finish(self) -> CompressedWeight:
        """The whole matrix, all of whose rows were given."""
        assert not self._parts, f"(expert, group) lack rows: {list(self._parts)}"
        if not self._many:
            return self._weight
        exceptions = self._weight.exceptions
        wider = exceptions.new_zeros(*exceptions.shape[:-1], max(map(len, self._many.values())))
        wider[..., : exceptions.shape[-1]] = exceptions
        for key, each in self._many.items():
            wider.view(-1, *wider.shape[-2:])[key][: len(each)] = each  # also where there is one matrix
        return self._weight._replace(exceptions=wider)

    def _joined(self, key: tuple[int, int], within: int, size: int, part: Tensor) -> Tensor | None:
        """All rows of a group, if those of ``part``, from the row ``within`` on, are the last that were missing."""
        with self._lock:
            if key not in self._parts:
                self._parts[key] = torch.empty(size, part.shape[1], dtype=torch.bfloat16), [size]
            whole, missing = self._parts[key]
            whole[within : within + len(part)] = part
            missing[0] -= len(part)
            if missing[0] > 0:
                return None
            del self._parts[key]
            return whole

    def _compress(self, expert: int, group: int, rows: Tensor) -> None:
        """Whole groups from ``group`` on."""
        one = self._weight.expert(expert) if self._weight.words.dim() == 5 else self._weight
        words, tables, exceptions = (tensor[group:] for tensor in one)

        def compress(exceptions: Tensor) -> int:
            to = words.data_ptr(), tables.data_ptr(), exceptions.data_ptr(), exceptions.shape[1]
            return _function()(rows.data_ptr(), *rows.shape, *to, self._zeros.data_ptr())

        count, room = compress(exceptions), exceptions.shape[1]
        if count < room:
            return
        # In steps, so that few matrices differ in shape.
        more = torch.zeros(-(-len(rows) // GROUP), -(-(count + 1) // 1024) * 1024, dtype=torch.int32)
        compress(more)
        with self._lock:
            self._many |= {(expert, group + i): each for i, each in enumerate(more)}


def compress_weight(weight: Tensor) -> CompressedWeight:
    """``weight`` ``[N, K]`` bfloat16 on the CPU, compressed."""
    out_features, in_features = weight.shape
    compressor = Compressor(out_features, in_features, weight.device)
    compressor.put(0, weight)
    return compressor.finish()


@functools.cache
def _function() -> Any:
    """The C++ function that compresses groups."""
    library = native.open_library(compress_library())
    assert library is not None, "weights are compressed only where there is a compiler"
    size, address = ctypes.c_int64, ctypes.c_void_p
    function = library.compress_groups
    function.argtypes, function.restype = (address, size, size, address, address, address, size, address), size
    return function


def decompress(weight: CompressedWeight, out_features: int, in_features: int) -> Tensor:
    """``[N, K]`` bfloat16, in plain torch."""
    words, tables, exceptions = weight
    groups, length = words.shape[:2]
    both = words[:, :, 2]
    codes = torch.stack((both & 15, both >> 4), 2).view(groups, length, 2, 4, 16)
    lanes = tables[:, None].expand(groups, length, 2, 4, 16)
    upper = lanes.gather(4, codes.long()).reshape(groups, -1).int()
    used = exceptions != END
    used &= used.cumprod(1).bool()
    group, _ = used.nonzero(as_tuple=True)
    upper[group, exceptions[used] >> 8] = exceptions[used] & 255
    bits = upper << 8 | words[:, :, :2].reshape(groups, -1).int()
    of_outputs = bits.view(groups, length, 2, 4, 2, 4, 2).permute(0, 2, 4, 3, 5, 1, 6)  # g, h, t, l, j, p, i
    matrix = of_outputs.reshape(groups * GROUP, 2 * length)[:out_features, :in_features]
    return matrix.to(torch.uint16).view(torch.bfloat16)


def compressed_linear(
    x: Tensor, words: Tensor, tables: Tensor, exceptions: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """``x @ W.T + bias`` for a compressed ``W``, accumulated in float32 and rounded once.

    Args:
        x: ``[T, K]`` bfloat16; rows may be strided, the last stride is 1.
        words, tables, exceptions: of a ``CompressedWeight`` ``[N, K]``, contiguous. Exceptions of a group without END
            would be read beyond their end.
        bias: ``[N]`` bfloat16, or None.
        out_features: N.

    Returns:
        ``[T, N]`` bfloat16, contiguous.
    """
    return torch.ops.compiled_llm.compressed_linear(x, words, tables, exceptions, bias, out_features)


def either_linear(
    x: Tensor, packed: Tensor, weight: CompressedWeight, bias: Tensor | None, out_features: int
) -> Tensor:
    """``compressed_linear`` up to 16 rows, ``packed_linear`` with more: for a ``W`` that is kept both ways.

    With tile registers few rows wait for memory, and many for decompressing. The bits are the same.

    Args:
        x, bias, out_features: as in ``compressed_linear``.
        packed: what ``pack_weight`` made of ``W``.
        weight: the same, compressed.

    Returns:
        ``[T, N]`` bfloat16, contiguous.
    """
    return torch.ops.compiled_llm.either_linear(x, packed, *weight, bias, out_features)


def grouped_compressed_linear(
    x: Tensor, weight: CompressedWeight, bias: Tensor | None, rows: Tensor | None, starts: Tensor, out_features: int
) -> Tensor:
    """``grouped_linear`` (``moe/grouped_linear.py``) for the compressed matrices of E experts, of N outputs each."""
    return torch.ops.compiled_llm.grouped_compressed_linear(x, *weight, bias, rows, starts, out_features)


def compressed_rows(weight: CompressedWeight, ids: Tensor, out_features: int, in_features: int) -> Tensor:
    """Rows ``ids`` ``[T]`` (int32 or int64, contiguous) of a compressed ``W`` ``[N, K]``: ``[T, K]`` bfloat16."""
    return torch.ops.compiled_llm.compressed_rows(*weight, ids, out_features, in_features)


def compressed_linear_reference(
    x: Tensor, words: Tensor, tables: Tensor, exceptions: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """The op in plain torch: decompress, multiply in float32, round once."""
    weight = decompress(CompressedWeight(words, tables, exceptions), out_features, x.shape[1])
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def either_linear_reference(
    x: Tensor, packed: Tensor, words: Tensor, tables: Tensor, exceptions: Tensor, bias: Tensor | None,
    out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    return packed_linear_reference(x, packed, bias, out_features)


def grouped_compressed_linear_reference(
    x: Tensor, words: Tensor, tables: Tensor, exceptions: Tensor, bias: Tensor | None, rows: Tensor | None,
    starts: Tensor, out_features: int,
) -> Tensor:  # fmt: skip
    """The op in plain torch."""
    weight = words, tables, exceptions
    return by_experts(compressed_linear_reference, x, *weight, bias, (), rows, starts, (out_features,))


def compressed_rows_reference(
    words: Tensor, tables: Tensor, exceptions: Tensor, ids: Tensor, out_features: int, in_features: int
) -> Tensor:
    """The op in plain torch."""
    return decompress(CompressedWeight(words, tables, exceptions), out_features, in_features)[ids.long()]


_WEIGHT = "Tensor words, Tensor tables, Tensor exceptions"
define_op(
    f"compressed_linear(Tensor x, {_WEIGHT}, Tensor? bias, int out_features) -> Tensor",
    reference=compressed_linear_reference,
    fake=rows_fake,
    cpu="compressed_linear_cpu",
)
define_op(
    f"either_linear(Tensor x, Tensor packed, {_WEIGHT}, Tensor? bias, int out_features) -> Tensor",
    reference=either_linear_reference,
    fake=rows_fake,
    cpu="compressed_linear_cpu",
)
define_op(
    f"grouped_compressed_linear(Tensor x, {_WEIGHT}, Tensor? bias, Tensor? rows, Tensor starts, int out_features)"
    " -> Tensor",
    reference=grouped_compressed_linear_reference,
    fake=grouped_rows_fake,
    cpu="compressed_linear_cpu",
)
define_op(
    f"compressed_rows({_WEIGHT}, Tensor ids, int out_features, int in_features) -> Tensor",
    reference=compressed_rows_reference,
    fake=lambda words, tables, exceptions, ids, out_features, in_features: words.new_empty(
        ids.shape[0], in_features, dtype=torch.bfloat16
    ),
    cpu="compressed_linear_cpu",
)
