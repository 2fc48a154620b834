"""A kind of linear layer whose weights are read as a quantised checkpoint has them (models/quantized)."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.experts import take_biases
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.parts import take_bias
from compiled_llm.models.linears.protocol import (
    AroundKind,
    GroupedLinear,
    Linear,
    LinearKind,
    Put,
    PutQuantized,
    StoredLinear,
    Take,
)
from compiled_llm.models.linears.quantized import Joined, Quantized, QuantizedExperts
from compiled_llm.models.linears.quantized import Scheme as Computed
from compiled_llm.models.quantized.plan import QuantizationPlan
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_layouts import empty_quantized, pack_quantized_rows
from compiled_llm.ops.linear.quantized_weight import DTYPE_NAMES, ZERO_DTYPES, QuantizedRows, WeightFormat, dequantize


@dataclasses.dataclass(frozen=True)
class Published(AroundKind):
    """A ``LinearKind`` that packs a checkpoint's codes as they are; codes that no kernel reads, as ``plain``.

    Attributes:
        plain: the kind of the layers that the checkpoint does not quantise.
        plan: which layers it does, and how.
    """

    plain: LinearKind
    plan: QuantizationPlan

    def scheme(self, part: StoredLinear) -> Scheme | None:
        """How a layer is kept; None: plainly."""
        return self.plan.scheme(part.name)

    def _is_plain(self, parts: Sequence[StoredLinear]) -> bool:
        schemes = [self.scheme(part) for part in parts]
        return all(scheme is None or not scheme.form.has_kernels for scheme in schemes)

    def _decoded(self, take: Take, parts: Sequence[StoredLinear]) -> Take:
        """``take``, in which the weights of ``parts`` are in the model's dtype."""
        schemes = {f"{part.name}.weight": (part, scheme) for part in parts if (scheme := self.scheme(part))}
        return _Decoded(take, schemes) if schemes else take

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        if self._is_plain(parts):
            return self.plain.take(self._decoded(take, parts), parts)
        schemes = [self.scheme(part) for part in parts]
        first = schemes[0]
        # Parts that have an order of inputs or a scale of activations each need not have the same.
        alike = (
            first is not None and schemes == [first] * len(parts) and not (first.ordered or first.static_activations)
        )
        if len(parts) > 1 and not alike:
            return Joined(tuple(self.take(take, [part]) for part in parts))
        assert first is not None
        out_features, in_features = sum(part.out_features for part in parts), parts[0].in_features
        form = _kept(take, parts, first)
        weight = empty_quantized(form, out_features, in_features, take.device)
        start, order, input_scale = 0, None, None
        for part in parts:

            def put(row: int, rows: QuantizedRows, start: int = start) -> None:
                pack_quantized_rows(weight, start + row, rows, form)

            order, input_scale = take.quantized(part, first, put)
            start += part.out_features
        computed = Computed(form, first.activations)
        dtype = str(take.dtype)[6:]
        return Quantized(weight, take_bias(take, parts), computed, out_features, in_features, dtype, input_scale, order)

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        if self._is_plain([part]):
            return self.plain.take_table(self._decoded(take, [part]), part)
        scheme = self.scheme(part)
        if scheme is not None and scheme.ordered:
            raise ValueError(
                f"actorder must be 'weight' or null for {part.name}, of which rows are read, given 'group'"
            )
        return self.take(take, [part])

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        parts = [part for each in experts for part in each]
        schemes = [self.scheme(part) for part in parts]
        first = schemes[0]
        if any(scheme != first for scheme in schemes) or (first and (first.ordered or first.static_activations)):
            raise ValueError(
                "config.json: quantization_config must quantise all experts of a layer alike, without an order of "
                f"inputs or static activations, as it does not for {parts[0].name} and others. Load another checkpoint"
            )
        if first is None or not first.form.has_kernels:
            return self.plain.take_experts(self._decoded(take, parts), experts, top_k)
        out_features, in_features = sum(part.out_features for part in experts[0]), parts[0].in_features
        form = _kept(take, parts, first)
        weight = empty_quantized(form, out_features, in_features, take.device, len(experts))
        for number, each in enumerate(experts):
            start, own = 0, weight.expert(number)
            for part in each:

                def put(row: int, rows: QuantizedRows, start: int = start, own=own) -> None:
                    pack_quantized_rows(own, start + row, rows, form)

                take.quantized(part, first, put)
                start += part.out_features
        computed = Computed(form, first.activations)
        biases = take_biases(take, experts)
        return QuantizedExperts(weight, biases, computed, len(experts), out_features, in_features, top_k)

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        return self.plain.take_heads(self._decoded(take, parts), parts, num_heads, first)


def rounds_activations(linears: LinearKind) -> bool:
    """Whether layers round activations that the checkpoint leaves as they are."""
    return isinstance(linears, Published) and linears.plan.int8_activations


class _Decoded(NamedTuple):
    """What ``take`` gives, with the weights that ``schemes`` names in the model's dtype."""

    take: Take
    schemes: Mapping[str, tuple[StoredLinear, Scheme]]

    @property
    def dtype(self) -> torch.dtype:
        return self.take.dtype

    @property
    def device(self) -> torch.device:
        return self.take.device

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.schemes:
            return self.take(name, shape)
        part, scheme = self.schemes[name]
        form = self.take.kept(part, scheme)
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)

        def put(start: int, rows: QuantizedRows) -> None:
            values = dequantize(rows, form).to(self.dtype)
            if not values.isfinite().all():
                raise ValueError(f"{name} holds values too large for {str(self.dtype)[6:]}: choose a wider dtype")
            weight[start : start + len(values)] = values

        order, _ = self.take.quantized(part, scheme, put)
        if order is None or weight.is_meta:
            return weight
        return weight[:, order.argsort()]

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        first = 0
        for name, shape in shapes.items():
            weight = self(name, shape)
            if not weight.is_meta:
                put(first, weight)
            first += shape[0]

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        return self.take.kept(part, scheme)

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        return self.take.quantized(part, scheme, put)


def _kept(take: Take, parts: Sequence[StoredLinear], scheme: Scheme) -> WeightFormat:
    """One form for all ``parts``: in the least dtypes that hold the scales and the zero points of each."""
    forms = [take.kept(part, scheme) for part in parts]

    def widest(names: set[str]) -> str:
        return DTYPE_NAMES[functools.reduce(torch.promote_types, (ZERO_DTYPES[name] for name in names))]

    return forms[0]._replace(
        scale_dtype=widest({form.scale_dtype for form in forms}), zero_dtype=widest({form.zero_dtype for form in forms})
    )


def in_order_of(rows: Sequence[tuple[int, QuantizedRows]], order: Tensor) -> QuantizedRows:
    """Pieces of a whole matrix, with the row that each begins with -> all of it, its rows in ``order`` ``[N]``."""
    pieces = [piece for _, piece in sorted(rows, key=lambda pair: pair[0])]
    codes = torch.cat([piece.codes for piece in pieces])[order]
    scales = torch.cat([piece.scales for piece in pieces])[order]
    zeros = [piece.zeros for piece in pieces if piece.zeros is not None]
    return QuantizedRows(codes, scales, torch.cat(zeros)[order] if zeros else None)


def in_columns(put: PutQuantized, order: Tensor, group_size: int) -> PutQuantized:
    """``put`` of rows whose columns are in ``order`` ``[K]``, which moves whole groups.

    Raises:
        ValueError: it does not.
    """
    groups = order[::group_size] // group_size if group_size else order[:1]
    whole = (groups[:, None] * group_size + torch.arange(group_size)).flatten()
    if not torch.equal(whole, order):
        raise ValueError(f"groups of {group_size} inputs must lie within a head each: load another file of this model")

    def put_in_order(first: int, rows: QuantizedRows) -> None:
        zeros = None if rows.zeros is None else rows.zeros[:, groups]
        put(first, QuantizedRows(rows.codes[:, order], rows.scales[:, groups], zeros))

    return put_in_order
