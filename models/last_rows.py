"""Behind attention of the last layer: the tokens alone whose logits are computed.

The last layer's keys and values are those of all tokens, as in the layers before it. What follows its attention goes
into nothing but the rows of the head: of a prompt's last output layer and MLP all rows but one are not computed. Its
bits are the same as if all were. Families are not touched, but for one: the output layer is exchanged.
"""

from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.layers.mlp import MlpWeights, PlainMlpWeights
from compiled_llm.models.layers.residual import OfSomeRows
from compiled_llm.models.linears.adapted import with_slots
from compiled_llm.models.linears.protocol import Linear


class LastLayers(NamedTuple):
    """The linear layers behind the last attention, or what the last layer has in its place."""

    output: Linear  # [D, N * H]
    mlp: MlpWeights | PlainMlpWeights


def last_layers(weights: Any) -> LastLayers | None:
    """Those of a model's weights. None where something else follows, such as experts, which read the whole step."""
    layers = getattr(weights, "layers", ())
    last = layers[-1] if layers else None
    output, mlp = getattr(getattr(last, "attention", None), "o", None), getattr(last, "mlp", None)
    others = (getattr(last, name, None) for name in ("moe", "per_layer"))  # beside the MLP, and behind it
    if output is None or not isinstance(mlp, MlpWeights | PlainMlpWeights) or any(one is not None for one in others):
        return None
    return LastLayers(output, mlp)


def with_last_rows(weights: Any, rows: Tensor, slots: Tensor | None) -> Any | None:
    """Weights whose ``forward`` gives ``rows`` ``[R]`` int32 of a step, ``[R, D]``. None where it has to give all.

    ``slots``: ``[R]`` int32, those of the rows' adapters; None without adapters.
    """
    found = last_layers(weights)
    if found is None:
        return None
    output, mlp = found if slots is None else with_slots(found, slots)
    *others, last = weights.layers
    last = last._replace(attention=last.attention._replace(o=OfSomeRows(output, rows)), mlp=mlp)
    return weights._replace(layers=(*others, last))
