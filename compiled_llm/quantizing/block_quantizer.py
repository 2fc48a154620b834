"""Quantising one decoder block by its inputs over a text."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat, dequantize, quantize, round_to_codes
from compiled_llm.ops.linear.searched_scales import quantize_searched
from compiled_llm.quantizing import METHODS, scaling
from compiled_llm.quantizing.folding import Fold, linear_at
from compiled_llm.quantizing.gptq import best_scales, gptq
from compiled_llm.quantizing.outliers import split_outliers
from compiled_llm.quantizing.schemes import Scheme, quantize_inputs
from compiled_llm.quantizing.statistics import InputStatistics, mean_of


@dataclasses.dataclass(frozen=True)
class Settings:
    """How blocks are quantised.

    Attributes:
        method: one of ``METHODS``; of two, the first finds scales of inputs, the second rounds.
        alpha: SmoothQuant's; None: for each group of layers the one with the least output error.
        act_order: whether GPTQ begins with the largest inputs.
        skip: parts of the names of layers that stay as they are.
        least_tokens: an expert that saw fewer is rounded to nearest, and keeps its scales.

    Raises:
        ValueError: the method does nothing for the scheme.
    """

    method: str
    scheme: Scheme
    alpha: float | None = None
    act_order: bool = True
    skip: tuple[str, ...] = ()
    least_tokens: int = 128

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, given {self.method!r}")
        if self.smooths and not self.scheme.quantizes_inputs:
            raise ValueError(
                f"method {self.method} is for kinds that quantise inputs, int8_w8a8 and int4_w4a8, "
                f"given {self.scheme.kind}: choose method awq, gptq or awq+gptq"
            )
        if self.alpha is not None and (not self.smooths or not 0 <= self.alpha <= 1):
            raise ValueError(
                f"alpha must be from 0 to 1, with method smoothquant or smoothquant+gptq, "
                f"given {self.alpha} with method {self.method}"
            )

    @property
    def smooths(self) -> bool:
        return "smoothquant" in self.method

    @property
    def moves_scales(self) -> bool:
        return self.smooths or "awq" in self.method

    def can_calibrate(self, seen: InputStatistics | None) -> bool:
        """Whether the method goes by what a layer's inputs were; None: it saw none."""
        if self.method == "rtn" or seen is None:
            return False
        return seen.count >= self.least_tokens or not seen.of_expert

    def skips(self, name: str) -> bool:
        return any(part in name for part in self.skip)


class Shared(NamedTuple):
    """An input, of which some rows are kept, with the layers that take it, and what they make of the kept rows."""

    seen: InputStatistics
    rows: Tensor
    weights: list[Tensor]
    outputs: list[Tensor]


def scale_block(
    block: nn.Module,
    folds: Sequence[Fold],
    statistics: dict[str, InputStatistics],
    quantized: set[str],
    of: Settings,
    dtype: torch.dtype,
) -> None:
    """Move scales from inputs to weights where that makes the rounded layers better, and change both in place.

    Args:
        statistics: by layer; where a layer's inputs are divided, so are its statistics. Experts that saw too few
            tokens have no say in the scales.
        quantized: names of the layers that will be quantised.
    """
    for fold in folds:
        layers = [name for name in fold.consumers if name in quantized and of.can_calibrate(statistics.get(name))]
        producer = block.get_submodule(fold.producer)
        if not layers or (isinstance(producer, nn.Linear) and fold.producer not in quantized):
            continue
        by_input: dict[int, Shared] = {}
        for name in layers:
            seen, weight = statistics[name], linear_at(block, name).weight.data
            shared = by_input.setdefault(id(seen), Shared(seen, seen.rows, [], []))
            shared.weights.append(weight)
            shared.outputs.append(shared.rows @ weight.T)
        inputs = list(by_input.values())
        if of.smooths:
            columns = torch.stack([w.abs().amax(0) for shared in inputs for w in shared.weights]).amax(0)
            largest = torch.stack([shared.seen.largest for shared in inputs]).amax(0)
            candidates = scaling.smoothing_candidates(largest, columns, of.alpha)
        else:
            candidates = scaling.awq_candidates(mean_of([shared.seen for shared in inputs]))

        def loss(scales: Tensor, inputs: list[Shared] = inputs) -> float:
            return sum(_loss(shared, scales, of.scheme) for shared in inputs)

        best, scales = scaling.search([fold.tied(c) for c in candidates], loss)
        if best > 0 or of.alpha is not None:
            used = fold.apply(block, scales, dtype)
            for changed in {id(s): s for name in fold.consumers if (s := statistics.get(name))}.values():
                changed.divide(used)


def _loss(shared: Shared, scales: Tensor, scheme: Scheme) -> float:
    """The squared error over all tokens, estimated from the rows that are kept of them."""
    scaled, total = _inputs(shared.rows / scales, scheme), 0.0
    for weight, wanted in zip(shared.weights, shared.outputs, strict=True):
        output = scaled @ dequantize(quantize(weight * scales, scheme.form), scheme.form).T
        total += float((output - wanted).double().square().sum())
    return total * shared.seen.count / len(shared.rows)


def quantize_layer(weight: Tensor, seen: InputStatistics | None, of: Settings) -> QuantizedRows:
    """``[N, K]`` float32, rounded as the method does; to nearest where ``can_calibrate`` is false."""
    form = of.scheme.form
    if seen is None or not of.can_calibrate(seen):
        return quantize_searched(weight, form)
    if "gptq" in of.method:
        scales, zeros = best_scales(weight, seen.hessian, form)
        return gptq(weight, seen.hessian, form, scales, zeros, of.act_order)
    if of.method == "awq":
        return round_to_codes(weight, *best_scales(weight, seen.hessian, form), form)
    return quantize_searched(weight, form)


def layer_errors(
    original: Tensor, rows: Tensor, largest: Tensor, layer: Tensor, scaled: Tensor, rounded: Tensor, scheme: Scheme
) -> dict[str, Any]:
    """Relative errors of a layer's outputs: as quantised, by rounding alone, and with LLM.int8()'s split.

    Args:
        original: weights ``[N, K]``, before scaling.
        rows, largest: inputs ``[R, K]`` and their largest ``[K]``, before scaling.
        layer: weights after scaling, of which outputs may have been divided too.
        scaled: the inputs after scaling.
        rounded: the dequantised weights.
    """
    wanted = rows @ original.T

    def error(output: Tensor, wanted: Tensor = wanted) -> float:
        return float((output - wanted).double().norm() / wanted.double().norm())

    plain = dequantize(quantize(original, scheme.form), scheme.form)
    split, columns = split_outliers(rows, largest, original)
    return {
        "error": error(_inputs(scaled, scheme) @ rounded.T, scaled @ layer.T),
        "rtn_error": error(_inputs(rows, scheme) @ plain.T),
        "llm_int8_error": error(split),
        "outlier_columns": columns,
        "columns": len(largest),
    }


def replace_weight(layer: nn.Linear, rounded: Tensor, scheme: Scheme) -> None:
    """Let a layer compute what it will with its quantised weight."""
    layer.weight.data = rounded
    if scheme.quantizes_inputs:
        layer.register_forward_pre_hook(lambda module, args: (quantize_inputs(args[0]),))


def check_groups(name: str, in_features: int, form: WeightFormat) -> None:
    """``ValueError`` where groups do not fill a row."""
    if form.group_size and in_features % form.group_size:
        raise ValueError(
            f"{name} has {in_features} inputs, no multiple of the group size {form.group_size}: choose another "
            "--group-size, or leave it with --skip"
        )


def _inputs(rows: Tensor, scheme: Scheme) -> Tensor:
    return quantize_inputs(rows) if scheme.quantizes_inputs else rows
