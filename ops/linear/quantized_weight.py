"""Quantised weights of linear layers: what the numbers mean, and how they are packed for the CPU kernels.

    W[n, k] = (value(code[n, k]) - zero[n, g]) * scale[n, g]        g = k // group_size

Elements are ``int8`` and ``int4`` (-8 to 7), ``fp8`` (e4m3, without infinities) and ``fp4`` (e2m1). A group is
``group_size`` inputs of one output, or all of them. MXFP4 is fp4 in groups of 32 whose scales are powers of two. No
kernel reads ``nf4``, 16 quantiles of the normal distribution: layers that have it are expanded at the load.

For CPUs codes lie as the kernels read them, in tiles of 16 outputs; N out_features, K in_features, G groups of a row:

    8 bits    codes[n, p, j, i] = code[n * 16 + j, 4 p + i]                                  [N / 16, K / 4, 16, 4]
    4 bits    codes[n, p, j, i] = code[n * 16 + j, 8 p + i] | code[n * 16 + j, 8 p + 4 + i] << 4
                                                                                             [N / 16, K / 8, 16, 4]
    scales[n, g, j] = scale[n * 16 + j, g], zeros as scales                                  [N / 16, G, 16]

with N and K rounded up; outputs past N have the scale 0, and inputs past K count as 0 whatever their code. A code of
``int4`` is kept as 0 to 15 (8 more than its value), one of ``int8`` as its value. On GPUs they lie row by row
(``quantized_weight_gpu.py``).
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.linear.packed_linear import TILE, pack_words

BITS = {"int8": 8, "int4": 4, "fp8": 8, "fp4": 4}  # of the elements that kernels read
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "fp4": 6.0, "nf4": 1.0}
"""The largest value of each element that has a negative of the same size."""
# Dettmers et al., 2023, appendix E.
NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MOST_ZERO = 2.0**15  # codes are lost beside a larger zero point, which float16 does not hold
SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ZERO_DTYPES = {"int8": torch.int8, **SCALE_DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in ZERO_DTYPES.items()}


class WeightFormat(NamedTuple):
    """How the weights of a layer are quantised.

    Attributes:
        element: "int8", "int4", "fp8" (e4m3), "fp4" (e2m1) or "nf4".
        group_size: inputs of an output that share a scale; 0: all. A multiple of 8, of 16 at most 128 where not 0.
        zeros: whether groups have a zero point.
        scale_dtype: what scales are kept in: "float32", "bfloat16" or "float16".
        zero_dtype: what zero points are kept in: the same or "int8", which holds all that ``quantize`` makes.
    """

    element: str
    group_size: int = 0
    zeros: bool = False
    scale_dtype: str = "float32"
    zero_dtype: str = "int8"

    @property
    def has_kernels(self) -> bool:
        return self.element in BITS

    @property
    def bits(self) -> int:
        return BITS[self.element]

    def num_groups(self, in_features: int) -> int:
        """Groups of a row. The last one may be shorter."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of a matrix: codes, scales and zeros, padding left out."""
        of_group = SCALE_DTYPES[self.scale_dtype].itemsize
        if self.zeros:
            of_group += ZERO_DTYPES[self.zero_dtype].itemsize
        return out_features * (-(-in_features * self.bits // 8) + of_group * self.num_groups(in_features))


class QuantizedRows(NamedTuple):
    """Rows of a quantised matrix, in no kernel's order.

    Attributes:
        codes: ``[n, K]`` int8; integers as they are, fp8 as its bits, fp4 and nf4 as 0 to 15 (the sign of
            fp4 is bit 3).
        scales: ``[n, G]`` float32.
        zeros: ``[n, G]`` float32, in units of the codes; or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class QuantizedWeight(NamedTuple):
    """A quantised matrix as a kernel reads it; or several, with one more dimension in front."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def expert(self, number: int) -> "QuantizedWeight":
        """One of several."""
        zeros = None if self.zeros is None else self.zeros[number]
        return QuantizedWeight(self.codes[number], self.scales[number], zeros)


def code_values(codes: Tensor, element: str) -> Tensor:
    """What codes ``[...]`` of ``QuantizedRows`` stand for, float32."""
    if element == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if element == "fp4":
        return _fp4_values().to(codes.device)[codes.long()]
    if element == "nf4":
        return torch.tensor(NF4_VALUES, device=codes.device)[codes.long()]
    return codes.float()


def dequantize(rows: QuantizedRows, form: WeightFormat) -> Tensor:
    """``[n, K]`` float32."""
    values = code_values(rows.codes, form.element)
    in_features = values.shape[1]
    size = form.group_size or in_features

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(size, 1)[:, :in_features]

    if rows.zeros is not None:
        values = values - spread(rows.zeros)
    return values * spread(rows.scales)


def quantize(rows: Tensor, form: WeightFormat) -> QuantizedRows:
    """Round ``rows`` ``[n, K]`` to the nearest values of ``form``. A row's codes depend on that row alone."""
    return round_to_codes(rows, *group_scales(rows, form), form)


def group_scales(rows: Tensor, form: WeightFormat, shrink: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros ``[n, G]`` float32 for ``rows`` ``[n, K]``, as ``QuantizedRows`` has them.

    Scales are those of the largest absolute value of a group (of its range, with zero points), rounded to
    ``scale_dtype`` first, so that codes fit the scale that is kept. Those of fp4 are powers of two, as the
    microscaling formats have them (OCP MX v1.0, 6.3): the exponent of the largest value less 2.

    Args:
        shrink: takes this part of the largest value (of the range); what lies beyond it is clipped.
    """
    values = _grouped(rows, form)
    if form.zeros:
        steps = float(2**form.bits - 1)
        low, high = values.amin(2).clamp(max=0) * shrink, values.amax(2).clamp(min=0) * shrink
        scales = kept_scales((high - low) / steps, form)
        least = -(2 ** (form.bits - 1))
        return scales, torch.round(least - low / scales).clamp(least, -least - 1)
    return scales_of(values.abs().amax(2) * shrink, form), None


def scales_of(largest: Tensor, form: WeightFormat) -> Tensor:
    """The scales of groups whose largest absolute values are ``largest``, float32."""
    if form.element == "fp4":
        return torch.exp2((torch.frexp(largest)[1] - 1 - 2).clamp(-126, 127).float())
    return kept_scales(largest / LARGEST[form.element], form)


def round_to_codes(rows: Tensor, scales: Tensor, zeros: Tensor | None, form: WeightFormat) -> QuantizedRows:
    """``rows`` ``[n, K]`` as the nearest codes under given scales and zeros ``[n, G]``."""
    scaled = _grouped(rows, form) / scales[:, :, None]
    codes = _codes(scaled if zeros is None else scaled + zeros[:, :, None], form)
    return QuantizedRows(codes.view(len(rows), -1)[:, : rows.shape[1]], scales, zeros)


def _grouped(rows: Tensor, form: WeightFormat) -> Tensor:
    """``[n, G, group]`` float32, the last group filled up with 0."""
    count, in_features = rows.shape
    size, groups = form.group_size or in_features, form.num_groups(in_features)
    return torch.nn.functional.pad(rows.float(), (0, groups * size - in_features)).view(count, groups, size)


def kept_scales(scales: Tensor, form: WeightFormat) -> Tensor:
    """Scales as they will be kept, none of them 0."""
    kept = scales.to(SCALE_DTYPES[form.scale_dtype]).float()
    return torch.where(kept > 0, kept, torch.ones_like(kept))


def _codes(scaled: Tensor, form: WeightFormat) -> Tensor:
    """The nearest codes; halves to even."""
    most = LARGEST[form.element]
    if form.element == "fp8":
        return scaled.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.int8)
    if form.element == "fp4":
        # Between two neighbours the bound itself goes to the one of even code.
        magnitude = scaled.abs()
        bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=scaled.device)
        above = sum((magnitude > b) if i % 2 == 0 else (magnitude >= b) for i, b in enumerate(bounds.tolist()))
        assert isinstance(above, Tensor)
        return (above + 8 * torch.signbit(scaled)).to(torch.int8)
    if form.element == "nf4":
        values = torch.tensor(NF4_VALUES, device=scaled.device)
        return torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.int8)
    least = -most - 1 if form.zeros or form.element == "int4" else -most
    return torch.round(scaled).clamp(least, most).to(torch.int8)


@functools.cache
def _fp4_values() -> Tensor:
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([magnitudes, -magnitudes])


def as_kept(rows: QuantizedRows, form: WeightFormat) -> QuantizedRows:
    """``rows`` with scales that ``form`` can keep, and zero points that leave codes around 0 their values.

    A group whose scale would vanish beside its zero point, or whose zero point would be too large, becomes one value.
    """
    dtype = SCALE_DTYPES[form.scale_dtype]
    if rows.zeros is None or dtype == torch.float32 or form.zero_dtype == "int8":
        return rows
    scales, subtracted = rows.scales.to(dtype).float(), rows.zeros * rows.scales
    is_flat = subtracted.abs() > _MOST_ZERO * scales.abs()
    codes = rows.codes
    if is_flat.any():
        size = form.group_size or codes.shape[1]
        codes = codes.masked_fill(is_flat.repeat_interleave(size, 1)[:, : codes.shape[1]], 0)
    zeros = torch.where(is_flat, 1.0, subtracted / torch.where(scales == 0, 1.0, scales))
    return QuantizedRows(codes, torch.where(is_flat, subtracted, scales), zeros)


# -- Packed for CPUs


def empty_quantized(
    form: WeightFormat, out_features: int, in_features: int, device: torch.device, experts: int | None = None
) -> QuantizedWeight:
    """A packed weight for ``pack_quantized_rows``, of ``experts`` matrices if given; padding is in it."""
    tiles, groups = -(-out_features // TILE), form.num_groups(in_features)
    words = -(-in_features * form.bits // 32)
    before = () if experts is None else (experts,)

    of_groups = (*before, tiles, groups, TILE)

    def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if device.type == "meta":
            return torch.empty(shape, dtype=dtype, device=device)
        return native.huge_zeros(shape, dtype, is_weight=True)

    return QuantizedWeight(
        made((*before, tiles, words, TILE, 4), torch.uint8),
        made(of_groups, SCALE_DTYPES[form.scale_dtype]),
        made(of_groups, ZERO_DTYPES[form.zero_dtype]) if form.zeros else None,
    )


def pack_quantized_rows(weight: QuantizedWeight, start: int, rows: QuantizedRows, form: WeightFormat) -> None:
    """Write ``rows``, the rows of one matrix from ``start`` on, into ``weight``.

    Several threads may do so at once, each with rows of its own.
    """
    codes = rows.codes
    if missing := weight.codes.shape[1] * 32 // form.bits - codes.shape[1]:
        codes = torch.nn.functional.pad(codes, (0, missing))
    if form.element == "int4":
        codes = codes + 8
    packed = codes.contiguous().view(torch.int32)
    if form.bits == 4:  # no code of four bits reaches the byte beside it
        packed = packed[:, ::2] | packed[:, 1::2] << 4
    pack_words(weight.codes.view(torch.int32)[..., 0], start, packed.contiguous())
    pack_words(weight.scales, start, rows.scales.to(weight.scales.dtype).contiguous())
    if weight.zeros is not None:
        assert rows.zeros is not None, "a format with zero points"
        pack_words(weight.zeros, start, rows.zeros.to(weight.zeros.dtype).contiguous())


def unpack_quantized_rows(weight: QuantizedWeight, ids: Tensor, form: WeightFormat, in_features: int) -> QuantizedRows:
    """Rows ``ids`` ``[T]`` (int32 or int64) of a packed matrix. Traced into the step, where it is an embedding's."""
    tile, lane = ids // TILE, ids % TILE
    packed = weight.codes[tile, :, lane]  # [T, words, 4]
    if form.bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], 2)
    codes = packed.flatten(1)[:, :in_features].view(torch.int8)
    if form.element == "int4":
        codes = codes - 8
    zeros = None if weight.zeros is None else weight.zeros[tile, :, lane].float()
    return QuantizedRows(codes, weight.scales[tile, :, lane].float(), zeros)
