"""Linear layer on packed weights, for CPUs: packing, reference, schema, registration.

``y = x @ W.T + bias`` in bfloat16, float32 or float16, accumulated in float32 in one order for any number of rows. A
decode step reads every weight once and does little else, so it is as fast as memory can be read. The packed layout has
the weights in the order in which the kernel reads them, word by word:

    packed[n, p, j, i] = W[n * TILE + j, I * p + i]        [ceil(N / TILE), ceil(K / I), TILE, I]

with rows past N and columns past K zero. N out_features, K in_features, TILE = 16 (sums of a 512-bit register), I
inputs of a word: 2 in bfloat16, the pairs that its dot-product instructions take, and else 1.
"""

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import pack_library
from compiled_llm.ops.library import define_op

TILE = 16
WORDS = {torch.bfloat16: torch.int32, torch.float32: torch.int32, torch.float16: torch.int16}
"""The dtypes that can be packed, and what has the size of one of their words."""


def pack_weight(weight: Tensor) -> Tensor:
    """Pack ``weight`` ``[N, K]`` -> ``[ceil(N / 16), ceil(K / I), 16, I]`` in its dtype, contiguous on the CPU."""
    out_features, in_features = weight.shape
    packed = empty_packed(out_features, in_features, weight.dtype, weight.device)
    if not weight.is_meta:
        pack_rows(packed, 0, weight)
    return packed


def empty_packed(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A packed weight of zeros, for ``pack_rows``. On the CPU in huge pages, which are taken as they are written."""
    word = WORDS[dtype]
    inputs = word.itemsize // dtype.itemsize
    shape = -(-out_features // TILE), -(-in_features // inputs), TILE
    words = (
        torch.empty(shape, dtype=word, device=device)
        if device.type == "meta"
        else native.huge_zeros(shape, word, is_weight=True)
    )
    return words.view(dtype).unflatten(-1, (TILE, inputs))


def pack_rows(packed: Tensor, start: int, rows: Tensor) -> None:
    """Write ``rows`` ``[n, K]``, the rows of ``W`` from ``start`` on, into ``packed``, in its dtype on the CPU.

    Several threads may do so at once, each with rows of its own.
    """
    count, in_features = rows.shape
    num_words, inputs = packed.shape[1], packed.shape[3]
    assert rows.dtype == packed.dtype, "rows are packed in their own dtype"
    assert num_words == -(-in_features // inputs), f"rows of {in_features} inputs for {num_words} words"
    assert 0 <= start <= start + count <= packed.shape[0] * TILE, "rows beyond the last tile"
    word = WORDS[rows.dtype]
    padded = F.pad(rows, (0, 1)) if in_features % inputs else rows
    words = padded.contiguous().view(word)
    pack_words(packed.flatten(2).view(word), start, words)


def pack_words(packed: Tensor, start: int, words: Tensor) -> None:
    """Write ``words`` ``[n, words]`` of 1, 2 or 4 bytes, contiguous, into ``packed`` ``[tiles, words, 16]``."""
    assert packed.dtype == words.dtype, "words are packed as they are"
    pack = _packing().get(words.itemsize)
    if pack is not None:
        assert packed.is_contiguous()
        assert words.is_contiguous()
        pack(words.data_ptr(), *words.shape, start, packed.data_ptr())
    else:
        into = torch.arange(start, start + len(words), device=words.device)
        packed[into // TILE, :, into % TILE] = words


@functools.cache
def _packing() -> dict[int, Any]:
    """Bytes of a word -> the C++ function that packs rows of such words; none without a compiler."""
    library = native.open_library(pack_library())
    if library is None:
        return {}
    functions = {4: library.pack_words32, 2: library.pack_words16}
    for function in functions.values():
        size, address = ctypes.c_int64, ctypes.c_void_p
        function.argtypes, function.restype = (address, size, size, size, address), None
    return functions


def unpack_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """Rows ``[T]`` (int32 or int64) of ``W`` from what ``pack_weight`` made of it: ``[T, K]`` in its dtype.

    In bfloat16 where K is odd, ``[T, K + 1]``: a zero follows each row.
    """
    return packed[rows // TILE, :, rows % TILE].flatten(1)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x @ W.T + bias`` for a packed ``W``, accumulated in float32 and rounded once.

    Args:
        x: ``[T, K]`` bfloat16, float32 or float16; rows may be strided, the last stride is 1.
        packed: what ``pack_weight`` made of ``W`` ``[N, K]``, in the dtype of ``x``.
        bias: ``[N]`` in that dtype, or None.
        out_features: N.

    Returns:
        ``[T, N]`` in that dtype, contiguous.
    """
    return torch.ops.compiled_llm.packed_linear(x, packed, bias, out_features)


def packed_linear_reference(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The op in plain torch: unpack, multiply in float32, round once."""
    weight = packed.transpose(1, 2).reshape(packed.shape[0] * TILE, -1)[:out_features, : x.shape[1]]
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


define_op(
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
    reference=packed_linear_reference,
    fake=lambda x, packed, bias, out_features: x.new_empty(x.shape[0], out_features),
    cpu="linear_cpu",
)
