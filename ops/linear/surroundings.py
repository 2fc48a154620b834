"""What surrounds a linear layer in a model, and may be in its launch on a GPU: as arguments, and in plain torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.ops.rowwise.reference import activation_reference, gated_activation_reference, rms_norm_reference

FOLLOWING = "str activation, Tensor? residual, bool gated, float multiplier, Tensor? beside"
SCHEMA = f"Tensor? norm, float eps, {FOLLOWING}"


class Surroundings(NamedTuple):
    """Of ``y = layer(rms_norm(x))``: its activation, ``* multiplier``, ``+ beside``, ``+ residual``, in this order.

    What is not given is left out. All is rounded where the ops on their own round. The last arguments of the ops, in
    the order of ``SCHEMA``.

    Attributes:
        norm: ``[K]``, the weight of ``rms_norm``, in the dtype of x or float32; eps: of it.
        activation: one of ``gated_activation``, or "" for none.
        gated: the activation is that of the first half of the outputs, and multiplies the second.
        beside, residual: as the result, ``[T, N]``, with a gated activation ``[T, N / 2]``.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    activation: str = ""
    residual: Tensor | None = None
    gated: bool = True
    multiplier: float = 1.0
    beside: Tensor | None = None

    @property
    def is_gated(self) -> bool:
        return self.gated and self.activation != ""

    @property
    def follow(self) -> bool:
        """Whether anything is behind the layer."""
        return self.activation != "" or self.multiplier != 1.0 or self.beside is not None or self.residual is not None

    @property
    def following(self) -> tuple[Any, ...]:
        """The arguments of ``FOLLOWING``, for a layer whose norm is an op of its own."""
        assert self.norm is None
        return self[2:]

    def outputs(self, wide: int) -> int:
        """Columns of the result, for a weight with ``wide`` rows."""
        return wide // 2 if self.is_gated else wide


def surrounded(layer: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """``layer(x, ...)`` by single ops; the last of ``args`` are its surroundings."""
    count = len(Surroundings._fields)
    around = Surroundings(*args[-count:])
    y = layer(x if around.norm is None else rms_norm_reference(x, around.norm, around.eps), *args[:-count])
    if around.activation:
        y = (gated_activation_reference if around.gated else activation_reference)(y, around.activation)
    if around.multiplier != 1.0:
        y = y * around.multiplier
    if around.beside is not None:
        y = y + around.beside
    return y if around.residual is None else around.residual + y
