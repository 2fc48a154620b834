"""The kinds of tensor that GGUF files have, and linear layers of these kinds.

A row is blocks of 32 or 256 elements; a block has its codes, and the scales of its groups of 16 or 32. Each kind is
kept in the kernels' form that holds its codes as they are: in 4 bits where it has at most 16 values that lie evenly,
with zero points where a group has a least value, in 8 bits otherwise. github.com/ggml-org/ggml, src/ggml-common.h,
says how a block is laid out.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.scheme import Scheme, StoredPart, power_of_two_scales
from compiled_llm.ops.linear.decode_blocks import decode_blocks
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat


class Decoded(NamedTuple):
    """Blocks ``[n, B]`` of which every group of elements is ``code * scale - least``.

    Attributes:
        codes: ``[n, B * size]`` uint8 or int8.
        scales: ``[n, B * size / group]`` float32.
        least: as ``scales``; None: 0.
    """

    codes: Tensor
    scales: Tensor
    least: Tensor | None = None


class Block(NamedTuple):
    """A kind of block.

    Attributes:
        number: of the kind in a file.
        size: elements of a block.
        nbytes: of a block.
        group: elements that share a scale.
        element: of the kernels' form.
        decode: blocks ``[n, B, nbytes]`` uint8 -> what they hold.
    """

    number: int
    size: int
    nbytes: int
    group: int
    element: str
    decode: Callable[[Tensor], Decoded]


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at ``start`` of each block, ``[n, B]`` float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: Tensor) -> Tensor:
    """``[..., b]`` -> ``[..., 2 b]``: the lower four bits of all bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: Tensor, count: int) -> Tensor:
    """``[..., b]`` -> ``[..., 8 / count, b]``: of all bytes the lowest ``count`` bits, then the next ones."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & (1 << count) - 1


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The 32 bits at ``start`` of a block, each as 16 or 0: ``[n, B, 32]``."""
    return (_bits(blocks[..., start : start + 4], 1).transpose(-1, -2).flatten(-2) << 4).to(torch.uint8)


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 2:]).view(torch.int8) - 8, _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 4:]), _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> Decoded:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return Decoded(codes.view(torch.int8) - 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4), _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded(blocks[..., 2:].view(torch.int8), _halves(blocks, 0))


def _q2_k(blocks: Tensor) -> Decoded:
    scales, packed = blocks[..., :16], blocks[..., 16:80].unflatten(-1, (2, 32))
    d, least = _halves(blocks, 80)[..., None], _halves(blocks, 82)[..., None]
    return Decoded(_bits(packed, 2), d * (scales & 15).float(), least * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Decoded:
    above, packed = blocks[..., :32], blocks[..., 32:96].unflatten(-1, (2, 32))
    codes = _bits(packed, 2).flatten(-3, -2) | _bits(above, 1) << 2  # [n, B, 8, 32]
    low, high = _nibbles(blocks[..., 96:104]), _bits(blocks[..., 104:108], 2).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    return Decoded(codes.view(torch.int8) - 4, _halves(blocks, 108)[..., None] * scales.float())


def _scales_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 least values, float32."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], -1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], -1)
    return scales.float(), least.float()


def _k_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of the 8 groups of a block of Q4_K or Q5_K."""
    scales, least = _scales_of_6_bits(blocks[..., 4:16])
    return _halves(blocks, 0)[..., None] * scales, _halves(blocks, 2)[..., None] * least


def _q4_k(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), *_k_groups(blocks))


def _q5_k(blocks: Tensor) -> Decoded:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [n, B, 8, 32]
    return Decoded(low | _bits(blocks[..., 16:48], 1) << 4, *_k_groups(blocks))


def _q6_k(blocks: Tensor) -> Decoded:
    # Each half of a block has 64 bytes of lower bits: the lower four of all, then the upper four.
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [n, B, 2, 4, 32]
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
    codes = (low | high << 4).view(torch.int8) - 32
    return Decoded(codes, _halves(blocks, 208)[..., None] * blocks[..., 192:208].view(torch.int8).float())


_UNEVEN = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


def _iq4_nl(blocks: Tensor) -> Decoded:
    return Decoded(_UNEVEN[_nibbles(blocks[..., 2:]).int()], _halves(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Decoded:
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).view(torch.int8) - 32
    codes = _UNEVEN[_nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).int()]
    return Decoded(codes, _halves(blocks, 0)[..., None] * scales.float())


def _mxfp4(blocks: Tensor) -> Decoded:
    return Decoded(_nibbles(blocks[..., 1:]), power_of_two_scales(blocks[..., 0], "scales"))


PLAIN = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}
"""Kinds of numbers -> the kind's number in a file, and the dtype."""

BLOCKS = {
    "Q4_0": Block(2, 32, 18, 32, "int4", _q4_0),
    "Q4_1": Block(3, 32, 20, 32, "int4", _q4_1),
    "Q5_0": Block(6, 32, 22, 32, "int8", _q5_0),
    "Q5_1": Block(7, 32, 24, 32, "int8", _q5_1),
    "Q8_0": Block(8, 32, 34, 32, "int8", _q8_0),
    "Q2_K": Block(10, 256, 84, 16, "int4", _q2_k),
    "Q3_K": Block(11, 256, 110, 16, "int4", _q3_k),
    "Q4_K": Block(12, 256, 144, 32, "int4", _q4_k),
    "Q5_K": Block(13, 256, 176, 32, "int8", _q5_k),
    "Q6_K": Block(14, 256, 210, 16, "int8", _q6_k),
    "IQ4_NL": Block(20, 32, 18, 32, "int8", _iq4_nl),
    "IQ4_XS": Block(23, 256, 136, 32, "int8", _iq4_xs),
    "MXFP4": Block(39, 32, 17, 32, "fp4", _mxfp4),
}
"""Kinds of blocks."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of an expert's layer; ``kinds`` has "*" for the number."""
_MOST = 65504.0  # of scales and least values: what float16 holds
_WITH_LEAST = {"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"}


@dataclasses.dataclass(frozen=True)
class Ggml:
    """A linear layer whose weight is of one of the kinds ``BLOCKS``."""

    kind: str
    activations: str = "model"
    static_activations: bool = False
    ordered: bool = False
    in_pieces: str | None = "weight"

    @property
    def form(self) -> WeightFormat:
        block = BLOCKS[self.kind]
        scale = "bfloat16" if block.element == "fp4" else "float32"  # products of two values are exact in it
        return WeightFormat(block.element, block.group, self.kind in _WITH_LEAST, scale, "float32")

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        block = BLOCKS[self.kind]
        if in_features % block.size:
            raise ValueError(f"in_features must be a multiple of {block.size} for {self.kind}, found {in_features}")
        return {"weight": StoredPart(((out_features, in_features // block.size * block.nbytes),), (torch.uint8,))}

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        """In float16 where the model has 16 bits: the scales of a file, or within 2^-12 of a product of two.

        That is less than what rounds to bfloat16 otherwise, a weight or what is multiplied with it.
        """
        if model == torch.float32 or self.form.element == "fp4":
            return self.form
        return self.form._replace(scale_dtype="float16", zero_dtype="float16")

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        block = BLOCKS[self.kind]
        blocks = tensors["weight"].unflatten(1, (-1, block.nbytes))
        found = decode_blocks(self.kind, block.size, blocks, self.form, _MOST)
        return found if found is not None else self._decoded(block.decode(blocks))

    def _decoded(self, decoded: Decoded) -> QuantizedRows:
        block = BLOCKS[self.kind]
        codes = decoded.codes.flatten(1).view(torch.int8)
        scales = _checked(decoded.scales)
        if decoded.least is None:
            return QuantizedRows(codes, scales)
        # A group without a scale is its least value alone.
        least = _checked(decoded.least)
        is_flat, shift = scales == 0, 8 if block.element == "int4" else 0
        zeros = torch.where(is_flat, 1.0, least / scales - shift)
        codes = (codes - shift).masked_fill(is_flat.repeat_interleave(block.group, 1), 0)
        return QuantizedRows(codes, torch.where(is_flat, least, scales), zeros)


def _checked(values: Tensor) -> Tensor:
    """``[n, G]``."""
    values = values.flatten(1)
    if not (values.abs() <= _MOST).all():
        raise ValueError(
            f"scales and least values must be numbers up to {_MOST:g}, as they are not: the file is damaged"
        )
    return values


def dequantized(blocks: Tensor, kind: str) -> Tensor:
    """Rows of blocks ``[n, bytes]`` uint8 -> their values ``[n, K]`` float32."""
    from compiled_llm.ops.linear.quantized_weight import dequantize

    scheme = Ggml(kind)
    return dequantize(scheme.decode({"weight": blocks}, 0, len(blocks)), scheme.form)


def read_ggml(config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    """Name of a linear layer -> its scheme; ``kinds`` of the config is kind -> names of the layers that are of it."""
    fields.known(config, {"quant_method", "kinds"}, "quant_method 'gguf'")
    kinds = fields.table(config.get("kinds"), "kinds")
    of: dict[str, Scheme] = {}
    for kind in kinds:
        if kind not in BLOCKS:
            raise ValueError(f"config.json: kinds must be of {', '.join(BLOCKS)}, given {kind!r:.100}")
        of |= dict.fromkeys(fields.names(kinds, kind), Ggml(kind))
    return lambda module: of.get(EXPERT.sub(".experts.*.", module))
