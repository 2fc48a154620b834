"""Linear layers whose weights are quantised, at load or in the checkpoint (ops/linear/quantized_weight.py)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import (
    grouped_quantized_linear,
    grouped_quantized_linear_a8,
    quantized_linear,
    quantized_linear_a8,
)
from compiled_llm.ops.linear.quantized_layouts import unpack_quantized_rows
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, dequantize


class Scheme(NamedTuple):
    """How a layer is computed.

    Attributes:
        form: how its weights are kept.
        activations: "model": they stay in the model's dtype; "int8": each row is quantised on its own; "int8_groups":
            each group of a row.
    """

    form: WeightFormat
    activations: str = "model"

    @property
    def cpu_op(self) -> str:
        return "quantized_linear_a8_cpu" if self.int8_activations else "quantized_linear_cpu"

    @property
    def int8_activations(self) -> bool:
        return self.activations != "model"

    @property
    def by_groups(self) -> bool:
        """``by_groups`` of ``ops.quantized_linear_a8``."""
        return self.activations == "int8_groups"


class Quantized(NamedTuple):
    """``x @ W.T + bias`` with a quantised ``W``."""

    weight: QuantizedWeight
    bias: Tensor | None  # [out_features]
    scheme: Scheme
    out_features: int
    in_features: int
    dtype: str  # of an embedding's rows
    input_scale: Tensor | None = None  # [1] float32: a scale of all activations, where it is known beforehand
    order: Tensor | None = None  # [in_features] int32: the input that each column of W is for; None: its own

    @property
    def nbytes(self) -> int:
        others = (self.bias, self.input_scale, self.order)
        read = sum(tensor.nbytes for tensor in others if tensor is not None)
        return self.scheme.form.nbytes(self.out_features, self.in_features) + read

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (self.scheme.cpu_op,)

    def apply(self, x: Tensor) -> Tensor:
        if self.order is not None:
            x = x[:, self.order]
        form, weight = self.scheme.form, self.weight
        constants = form.element, form.group_size, self.out_features
        if self.scheme.int8_activations:
            return quantized_linear_a8(x, *weight, self.bias, self.input_scale, self.scheme.by_groups, *constants)
        return quantized_linear(x, *weight, self.bias, *constants)

    def rows(self, ids: Tensor) -> Tensor:
        form = self.scheme.form
        rows = dequantize(unpack_quantized_rows(self.weight, ids, form, self.in_features), form)
        if self.order is not None:  # of a head: embeddings have none
            rows = rows[:, self.order.argsort()]
        return rows.to(getattr(torch, self.dtype))


class QuantizedExperts(NamedTuple):
    """The linear layers of a mixture's experts, quantised alike."""

    weight: QuantizedWeight  # of all experts
    bias: Tensor | None  # [num_experts, out_features]
    scheme: Scheme
    num_experts: int
    out_features: int
    in_features: int
    top_k: int

    @property
    def nbytes(self) -> int:
        weights = self.num_experts * self.scheme.form.nbytes(self.out_features, self.in_features)
        return weights + (0 if self.bias is None else self.bias.nbytes)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (self.scheme.cpu_op,)

    def arguments(self, tokens: Tensor, starts: Tensor) -> tuple[Any, ...]:
        """``experts`` of ``ops.gated_quantized_experts`` and ``ops.summed_quantized_experts``."""
        form = self.scheme.form.element, self.scheme.form.group_size, self.out_features
        return *self.weight, self.bias, tokens, starts, *form, self.scheme.activations

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        form = self.scheme.form.element, self.scheme.form.group_size, self.out_features
        if self.scheme.int8_activations:
            by_groups = self.scheme.by_groups
            return grouped_quantized_linear_a8(x, *self.weight, self.bias, None, rows, starts, by_groups, *form)
        return grouped_quantized_linear(x, *self.weight, self.bias, rows, starts, *form)


class Joined(NamedTuple):
    """Several layers with the same input whose outputs lie side by side: parts that are not kept alike."""

    layers: tuple[Linear, ...]

    @property
    def out_features(self) -> int:
        return sum(layer.out_features for layer in self.layers)

    @property
    def in_features(self) -> int:
        return self.layers[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return tuple(op for layer in self.layers for op in layer.cpu_ops)

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat([layer.apply(x) for layer in self.layers], 1)

    def rows(self, ids: Tensor) -> Tensor:
        raise AssertionError("an embedding is one layer")
