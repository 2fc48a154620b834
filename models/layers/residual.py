"""The residual stream: what the blocks of a decoder (attention, MLPs, experts) read, and add to.

A layer is written as papers write it::

    x = x + attention(x.normed(w.input_norm), ...)
    x = x + mlp(x.normed(w.mlp_norm), w.mlp)

and what is one op on a device is found here, in the order that these lines are run in: nothing in them is computed
before it is needed. ``x.normed(norm)`` is a norm that the linear layer computes that reads it, ``x + block`` a sum that
the next norm computes. On a GPU a product of few rows takes in the sum behind it, and one with quantised weights the
norm before it, too (``linears/fused.py``). Both devices round at the same places.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.linears.fused import activated_linear, surrounded, takes_norm, takes_what_follows
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops.linear.surroundings import Surroundings


class LayerNorm(NamedTuple):
    """The weights of a layer norm, in the model's dtype."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]


Norm = Tensor | LayerNorm  # a Tensor [D] is the weight of an RMS norm


class Summand(Protocol):
    """What a block gives, before it is added to the residual stream that it has read."""

    def added_to(self, residual: "Residual") -> "Residual": ...


class Residual:
    """``(x + delta) * scale``, ``[T, D]``, computed when it is first read.

    Attributes:
        eps: of all norms of the model.
        delta: what is still to be added; None: nothing.
        delta_norm: ``[D]``, the weight of an RMS norm of ``delta``, if it has one.
        scale: ``[1]`` float32, of a sum; None: 1.
    """

    def __init__(
        self,
        x: Tensor,
        eps: float,
        delta: Tensor | None = None,
        delta_norm: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        assert delta is not None or scale is None, "of a sum"
        self.x, self.eps, self.delta, self.delta_norm, self.scale = x, eps, delta, delta_norm, scale

    def __add__(self, block: Summand) -> "Residual":
        return block.added_to(self)

    def __mul__(self, scale: Tensor) -> "Residual":
        return Residual(self.x, self.eps, self.delta, self.delta_norm, scale)

    def plus(self, delta: Tensor, norm: Tensor | None = None) -> "Residual":
        """The sum with ``delta`` ``[T, D]``, or with its RMS norm by ``norm`` ``[D]``."""
        return Residual(self.tensor(), self.eps, delta, norm)

    def normed(self, norm: Norm | None) -> "Normed":
        """Its norm; itself without one."""
        return Normed(self, norm)

    def tensor(self) -> Tensor:
        """``[T, D]``."""
        if self.delta is not None:
            self.set_sum(ops.sum_of_norms(self.x, None, self.delta, self.delta_norm, self.eps, self.scale))
        return self.x

    def set_sum(self, x: Tensor) -> None:
        """Note that the sum was computed, and is ``x``."""
        self.x, self.delta, self.delta_norm, self.scale = x, None, None, None


class Normed:
    """The norm of a residual stream, computed by what reads it. It is read once."""

    def __init__(self, residual: Residual, norm: Norm | None) -> None:
        self.residual, self.norm, self.eps = residual, norm, residual.eps

    def tensor(self) -> Tensor:
        """``[T, D]``. See ``ops.rms_norm`` and ``ops.layer_norm``."""
        of, norm, eps = self.residual, self.norm, self.eps
        delta, is_plain_sum = of.delta, of.delta_norm is None and of.scale is None
        if delta is None or norm is None:
            x = of.tensor()
            if isinstance(norm, LayerNorm):
                return ops.layer_norm(x, norm.weight, norm.bias, eps)
            return x if norm is None else ops.rms_norm(x, norm, eps)
        if isinstance(norm, LayerNorm):
            assert is_plain_sum, "no family has another beside layer norms"
            x, y = ops.add_layer_norm(of.x, delta, norm.weight, norm.bias, eps)
        elif is_plain_sum:
            x, y = ops.add_rms_norm(of.x, delta, norm, eps)
        else:
            x, y = ops.norm_of_sum(of.x, delta, of.delta_norm, norm, eps, of.scale)
        of.set_sum(x)
        return y

    def linear(self, linear: Linear, activation: str = "", gated: bool = True, factor: Tensor | None = None) -> Tensor:
        """``activated_linear`` of the norm, ``[T, N]``."""
        of, norm = self.residual, self.norm
        if of.delta is None and isinstance(norm, Tensor) and takes_norm(linear, of.x):
            return surrounded(of.x, linear, Surroundings(norm, self.eps, activation, gated=gated))
        return activated_linear(self.tensor(), linear, activation, gated, factor)


class BlockOutput:
    """A block's last linear layer with its input: ``norm(linear(x) * multiplier + beside)``, a ``Summand``.

    ``multiplier`` comes from ``output * number``, ``beside`` ``[T, D]`` from ``output + tensor``, and ``norm`` from
    ``output.normed(weight)``.
    """

    def __init__(
        self,
        x: Tensor,
        linear: Linear,
        multiplier: float = 1.0,
        beside: Tensor | None = None,
        norm: Tensor | None = None,
    ) -> None:
        self.x, self.linear, self.multiplier, self.beside, self.norm = x, linear, multiplier, beside, norm

    def __mul__(self, multiplier: float) -> "BlockOutput":
        return BlockOutput(self.x, self.linear, multiplier, self.beside, self.norm)

    def __add__(self, beside: Tensor) -> "BlockOutput":
        return BlockOutput(self.x, self.linear, self.multiplier, beside, self.norm)

    def normed(self, norm: Tensor) -> "BlockOutput":
        return BlockOutput(self.x, self.linear, self.multiplier, self.beside, norm)

    def tensor(self) -> Tensor:
        """``[T, D]``, without the norm."""
        y = activated_linear(self.x, self.linear)
        if self.multiplier != 1.0:
            y = y * self.multiplier
        return y if self.beside is None else y + self.beside

    def added_to(self, residual: Residual) -> Residual:
        """The sum; with a norm it is always left to the next norm, as is the norm itself."""
        if self.norm is None and takes_what_follows(self.linear, self.x, "residual"):
            around = Surroundings(residual=residual.tensor(), multiplier=self.multiplier, beside=self.beside)
            return Residual(surrounded(self.x, self.linear, around), residual.eps)
        return residual.plus(self.tensor(), self.norm)
