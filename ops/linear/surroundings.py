"""What surrounds a linear layer in a model, and may be in its launch on a GPU: as arguments, and in plain torch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.ops.linear.lora import add_lora_reference
from compiled_llm.ops.rowwise.reference import activation_reference, gated_activation_reference, rms_norm_reference

FOLLOWING = "str activation, Tensor? residual, bool gated, float multiplier, Tensor? beside, Tensor[] lora"
SCHEMA = f"Tensor? norm, float eps, {FOLLOWING}"


class Surroundings(NamedTuple):
    """Of ``y = layer(rms_norm(x))``: what adapters change of it, its activation, ``* multiplier``, ``+ beside``,
    ``+ residual``, in this order.

    What is not given is left out. All is rounded where the ops on their own round. The last arguments of the ops, in
    the order of ``SCHEMA``.

    Attributes:
        norm: ``[K]``, the weight of ``rms_norm``, in the dtype of x or float32; eps: of it.
        activation: one of ``gated_activation``, or "" for none.
        gated: the activation is that of the first half of the outputs, and multiplies the second.
        beside, residual: as the result, ``[T, N]``, with a gated activation ``[T, N / 2]``.
        lora: slots ``[T]`` int32, the tensors of ``LoraWeights``, and int32 ``[2]``, zeros, and zeros again when the op
            has run; two ops that run at the same time need their own. Of 32 rows at most.
    """

    norm: Tensor | None = None
    eps: float = 0.0
    activation: str = ""
    residual: Tensor | None = None
    gated: bool = True
    multiplier: float = 1.0
    beside: Tensor | None = None
    lora: Sequence[Tensor] = ()

    @property
    def is_gated(self) -> bool:
        return self.gated and self.activation != ""

    @property
    def follow(self) -> bool:
        """Whether anything is behind the layer."""
        added = self.beside is not None or self.residual is not None or len(self.lora) > 0
        return self.activation != "" or self.multiplier != 1.0 or added

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
    if around.norm is not None:
        x = rms_norm_reference(x, around.norm, around.eps)
    y = layer(x, *args[:-count])
    if around.lora:
        add_lora_reference(y, x, *around.lora[:-1])
    if around.activation:
        y = (gated_activation_reference if around.gated else activation_reference)(y, around.activation)
    if around.multiplier != 1.0:
        y = y * around.multiplier
    if around.beside is not None:
        y = y + around.beside
    return y if around.residual is None else around.residual + y
