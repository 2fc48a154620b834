"""Quantised weights as the GPU kernels read them: packing and unpacking. ``quantized_weight.py`` says what they mean.

    8 bits    codes[n, k] = code[n, k]                                                           [N, B]
    4 bits    codes[n, H b + p] = code[n, 2 H b + p] | code[n, 2 H b + H + p] << 4               [N, B]
    scales[g, n] = scale[n, g], zeros as scales                                                  [G, N]

A block is H = 64 bytes, or 32 where groups have 32 inputs; of 8 bits 128 where they have 128. Its lower four bits are
one run of H inputs and the upper ones the next: a tile of bytes becomes two tiles of weights with no exchange among
threads. Each half lies within one group. B is K in bytes, rounded up to whole blocks. Codes past K are 0; the kernels
multiply them by zeros. Scales of neighbouring outputs lie side by side. A code of ``int4`` is kept as 0 to 15 (8 more
than its value), one of ``int8`` as its value.
"""

import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import (
    SCALE_DTYPES,
    ZERO_DTYPES,
    QuantizedRows,
    QuantizedWeight,
    WeightFormat,
)

GROUP_SIZES = (0, 32, 64, 128)
"""Those that the GPU kernels have; 0: one group of all inputs."""


def block_bytes(bits: int, group_size: int) -> int:
    """H. ``ValueError`` for a group size that the kernels lack."""
    if group_size not in GROUP_SIZES:
        raise ValueError(
            f"group_size must be one of {', '.join(map(str, GROUP_SIZES))} on a GPU, got {group_size}: quantise with "
            "one of these, or run the model on a CPU"
        )
    return 32 if group_size == 32 else 128 if (bits, group_size) == (8, 128) else 64


def row_bytes(form: WeightFormat, in_features: int) -> int:
    """B: bytes of a row of codes."""
    block = block_bytes(form.bits, form.group_size)
    inputs = block * 8 // form.bits
    return -(-in_features // inputs) * block


def empty_quantized_gpu(
    form: WeightFormat, out_features: int, in_features: int, device: torch.device, experts: int | None = None
) -> QuantizedWeight:
    """A weight for ``pack_quantized_rows_gpu``, of ``experts`` matrices if given."""
    before = () if experts is None else (experts,)
    codes = torch.zeros(*before, out_features, row_bytes(form, in_features), dtype=torch.uint8, device=device)
    of_groups = (*before, form.num_groups(in_features), out_features)
    scales = torch.zeros(of_groups, dtype=SCALE_DTYPES[form.scale_dtype], device=device)
    zeros = torch.zeros(of_groups, dtype=ZERO_DTYPES[form.zero_dtype], device=device) if form.zeros else None
    return QuantizedWeight(codes, scales, zeros)


def pack_quantized_rows_gpu(weight: QuantizedWeight, start: int, rows: QuantizedRows, form: WeightFormat) -> None:
    """Write ``rows``, the rows of one matrix from ``start`` on, into ``weight``.

    Several threads may do so at once, each with rows of its own.
    """
    codes, into = rows.codes, slice(start, start + len(rows.codes))
    inputs = weight.codes.shape[1] * 8 // form.bits
    if form.element == "int4":
        codes = codes + 8
    codes = torch.nn.functional.pad(codes, (0, inputs - codes.shape[1])).view(torch.uint8)
    if form.bits == 4:
        halves = codes.view(len(codes), -1, 2, block_bytes(form.bits, form.group_size))
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    weight.codes[into] = codes
    weight.scales[:, into] = rows.scales.t().to(weight.scales.dtype)
    if weight.zeros is not None:
        assert rows.zeros is not None, "a format with zero points"
        weight.zeros[:, into] = rows.zeros.t().to(weight.zeros.dtype)


def unpack_quantized_rows_gpu(
    weight: QuantizedWeight, ids: Tensor, form: WeightFormat, in_features: int
) -> QuantizedRows:
    """Rows ``ids`` ``[T]`` (int32 or int64) of a packed matrix. Traced into the step, where it is an embedding's."""
    codes = weight.codes[ids]
    if form.bits == 4:
        blocks = codes.unflatten(1, (-1, 1, block_bytes(form.bits, form.group_size)))
        codes = torch.cat([blocks & 15, blocks >> 4], 2).flatten(1)
    codes = codes[:, :in_features].view(torch.int8)
    if form.element == "int4":
        codes = codes - 8
    zeros = None if weight.zeros is None else weight.zeros[:, ids].t().float()
    return QuantizedRows(codes, weight.scales[:, ids].t().float(), zeros)
