"""Layouts whose rows lie together: codes as numbers of eight bits, in words of 32, or fp4 in bytes."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_llm.models.quantized.scheme import (
    FLOATS,
    StoredPart,
    check_whole_groups,
    checked_scales,
    checked_zero,
    group_order,
    power_of_two_scales,
    repeat_groups,
    signed,
    unpack_nibbles,
    unpack_words,
)
from compiled_llm.ops.linear.quantized_weight import DTYPE_NAMES, QuantizedRows, WeightFormat

# What checkpoints hold besides, for engines that quantise activations or the KV cache in another way.
_LEFT = ("input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale")


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What the layouts share.

    Attributes:
        block: outputs and inputs that share a scale; 0: all of them.
        input_scale: name of the scale of activations; optional, and used where ``static_activations``.
    """

    form: WeightFormat
    activations: str = "model"
    static_activations: bool = False
    block: tuple[int, int] = (1, 0)
    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str = "weight_zero_point"
    input_scale: str = "input_scale"
    ordered: bool = False

    @property
    def in_pieces(self) -> str | None:
        return self.weight

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        return self.form._replace(scale_dtype=DTYPE_NAMES[dtypes[self.scale]])

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def _scale_shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        down, across = self.block
        if (down, across) == (0, 0):
            return ((), (1,), (1, 1))
        rows, columns = -(-out_features // down), -(-in_features // across) if across else 1
        return ((rows, columns), (rows,)) if columns == 1 else ((rows, columns),)

    def _left(self) -> dict[str, StoredPart]:
        one = ((), (1,), (1, 1))
        found = {name: StoredPart(one, (*FLOATS, torch.int8), required=False, used=False) for name in _LEFT}
        used = self.static_activations
        return found | {self.input_scale: StoredPart(one, FLOATS, required=used, used=used)}

    def _of_rows(self, given: Tensor, first: int, count: int, in_features: int) -> Tensor:
        """A scale or zero point of each block -> of each row and group of the kernels, ``[count, G]``."""
        down, across = self.block
        if (down, across) == (0, 0):
            return given.view(1, 1).expand(count, 1)
        ids = torch.arange(first, first + count, device=given.device) // down
        rows = given.view(len(given), -1)[ids]
        times = across // self.form.group_size if self.form.group_size else 1
        return repeat_groups(rows, times, self.form.num_groups(in_features))


@dataclasses.dataclass(frozen=True)
class EightBits(_Rows):
    """Codes as numbers of eight bits, ``[N, K]``: int8 (which may hold codes of four), or fp8 e4m3."""

    zero_dtypes: tuple[torch.dtype, ...] = (torch.int8,)

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        form = super().kept(dtypes, model)
        return form._replace(zero_dtype=DTYPE_NAMES[dtypes[self.zero]]) if form.zeros else form

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        dtype = torch.float8_e4m3fn if self.form.element == "fp8" else torch.int8
        shapes = self._scale_shapes(out_features, in_features)
        zeros = self.form.zeros
        found = {
            self.weight: StoredPart(((out_features, in_features),), (dtype,)),
            self.scale: StoredPart(shapes),
            self.zero: StoredPart(shapes, self.zero_dtypes, required=zeros, used=self.form.element != "fp8"),
        }
        return found | self._left()

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        codes = tensors[self.weight].view(torch.int8)
        in_features = codes.shape[1]
        if self.form.element == "int4" and (codes.min() < -8 or codes.max() > 7):
            raise ValueError(
                f"{self.weight} must be from -8 to 7, as config.json says 4 bits, found {codes.min()} to {codes.max()}"
            )
        scales = self._of_rows(checked_scales(tensors[self.scale], self.scale), first, count, in_features)
        zeros = tensors.get(self.zero)
        if self.form.zeros:
            assert zeros is not None
            return QuantizedRows(codes, scales, self._of_rows(zeros.float(), first, count, in_features))
        if zeros is not None:
            checked_zero(zeros, 0, self.zero)
        return QuantizedRows(codes, scales)


@dataclasses.dataclass(frozen=True)
class Words(_Rows):
    """Codes in words of 32 bits, the lowest first, from 0 on: ``weight_packed`` ``[N, K * bits / 32]``.

    Zero points are packed down the rows: ``[N * bits / 32, G]``. ``weight_g_idx`` has the group of each input, where
    these were ordered by their activations.
    """

    weight: str = "weight_packed"

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        bits, groups = self.form.bits, self._scale_shapes(out_features, in_features)
        count = groups[0][-1] if groups[0] else 1
        found = {
            self.weight: StoredPart(((out_features, -(-in_features * bits // 32)),), (torch.int32,)),
            "weight_shape": StoredPart(((2,),), (torch.int64, torch.int32)),
            self.scale: StoredPart(groups),
        }
        if self.form.zeros:
            found[self.zero] = StoredPart(((-(-out_features * bits // 32), count),), (torch.int32,))
        found["weight_g_idx"] = StoredPart(
            ((in_features,),), (torch.int32, torch.int64), required=self.ordered, used=self.ordered
        )
        return found | self._left()

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        if not self.ordered:
            return None
        return group_order(tensors["weight_g_idx"], self.block[1], "weight_g_idx")

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        bits = self.form.bits
        out_features, in_features = tensors["weight_shape"].tolist()
        held = unpack_words(tensors[self.weight], bits)
        if not 0 <= held.shape[1] - in_features < 32 // bits or first + count > out_features:
            raise ValueError(
                f"weight_shape must be the size of the layer, found {out_features} x {in_features} beside "
                f"{held.shape[1]} codes in a row"
            )
        codes = signed(held[:, :in_features], bits)
        order = self.order(tensors)
        if order is not None:
            codes = codes[:, order]
        scales = self._of_rows(checked_scales(tensors[self.scale], self.scale), first, count, in_features)
        if not self.form.zeros:
            return QuantizedRows(codes, scales)
        packed = signed(unpack_words(tensors[self.zero].t(), bits), bits).t()[:out_features]
        return QuantizedRows(codes, scales, self._of_rows(packed.float(), first, count, in_features))


@dataclasses.dataclass(frozen=True)
class Fp4(_Rows):
    """Two fp4 values in a byte, the lower four bits first: ``[N, K / 2]``, with a scale for each ``block``.

    Attributes:
        whole_scale: name of a scale of the whole matrix; "" where there is none.
        divides: whether scales are divided by it (compressed-tensors) or multiplied (ModelOpt).

    Scales are fp8 (NVFP4), or exponents of powers of two in uint8 (MXFP4).
    """

    weight: str = "weight_packed"
    whole_scale: str = ""
    divides: bool = False
    input_scale: str = "input_global_scale"

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        return self.form  # products of two scales, or powers of two

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        size = self.block[1]
        check_whole_groups(in_features, size)
        dtype = torch.float8_e4m3fn if self.whole_scale else torch.uint8
        found = {
            self.weight: StoredPart(((out_features, in_features // 2),), (torch.uint8,)),
            self.scale: StoredPart(((out_features, in_features // size),), (dtype,)),
        }
        if self.whole_scale:
            found[self.whole_scale] = StoredPart(((), (1,)), (torch.float32,))
        return found | self._left()

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        codes = unpack_nibbles(tensors[self.weight]).view(torch.int8)
        given = tensors[self.scale][first : first + count]
        if not self.whole_scale:
            return QuantizedRows(codes, power_of_two_scales(given, self.scale))
        of_all = checked_scales(tensors[self.whole_scale], self.whole_scale).view(())
        if of_all <= 0:
            raise ValueError(f"{self.whole_scale} must be more than 0, found {float(of_all)}: the file is damaged")
        scales = checked_scales(given, self.scale)
        return QuantizedRows(codes, scales / of_all if self.divides else scales * of_all)
