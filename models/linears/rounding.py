"""How far weights that were rounded at load are from the checkpoint's."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.ops.linear.quantized_layouts import unpack_quantized_rows
from compiled_llm.ops.linear.quantized_weight import QuantizedWeight, WeightFormat, dequantize

ROUGH = 0.05  # relative error from which a start says so: int8 makes about 1%, fp8 2.5%, int4 7% of normal weights
_EVERY = 64  # rows of which one is compared


class RowErrors(NamedTuple):
    """Of some rows of a layer: sums of squares of what rounding changed, and of the weights."""

    layer: str
    changed: float
    weights: float


class Rounding(NamedTuple):
    """Relative errors of a model's layers, root mean squares: of all, and of the layer with the largest."""

    error: float
    worst: str
    worst_error: float

    def __str__(self) -> str:
        return f"{self.error:.1%}, at most {self.worst_error:.1%} ({self.worst})"


def row_errors(layer: str, weight: QuantizedWeight, start: int, rows: Tensor, form: WeightFormat) -> RowErrors:
    """Of one of 64 of the ``rows`` ``[n, K]`` that were written to ``weight`` from row ``start`` on."""
    given = rows[::_EVERY].float()
    ids = start + torch.arange(0, len(rows), _EVERY, device=rows.device)
    kept = dequantize(unpack_quantized_rows(weight, ids, form, rows.shape[1]), form)
    return RowErrors(layer, float((kept - given).double().square().sum()), float(given.double().square().sum()))


def errors_of(kind: LinearKind) -> list[RowErrors] | None:
    """Where ``kind`` notes them; None where it rounds nothing."""
    found: list[RowErrors] | None = getattr(kind, "errors", None)
    return errors_of(kind.plain) if found is None and hasattr(kind, "plain") else found


def rounding_of(kind: LinearKind) -> Rounding | None:
    """Of the layers that ``kind`` has rounded; None where there are none."""
    found: Sequence[RowErrors] = getattr(kind, "errors", ())
    changed: dict[str, float] = {}
    weights: dict[str, float] = {}
    for rows in found:
        changed[rows.layer] = changed.get(rows.layer, 0.0) + rows.changed
        weights[rows.layer] = weights.get(rows.layer, 0.0) + rows.weights
    errors = {layer: changed[layer] / weights[layer] for layer in changed if weights[layer] > 0}
    if not errors:
        return None if not hasattr(kind, "plain") else rounding_of(kind.plain)
    worst = max(errors, key=errors.__getitem__)
    return Rounding(math.sqrt(sum(errors.values()) / len(errors)), worst, math.sqrt(errors[worst]))
