"""The residual stream: what the blocks of a decoder (attention, MLPs, experts) read, and add to.

A layer is written as papers write it::

    x += attention(x.normed(w.input_norm), ...)
    x += mlp(x.normed(w.mlp_norm), w.mlp)

and what is one op on a device is found here, in the order that these lines are run in: nothing in them is computed
before it is needed. ``x.normed(norm)`` is a norm that the linear layer computes that reads it, ``x += block`` a sum
that the next norm computes. On a GPU a product of few rows takes in the sum behind it, and one with quantised weights
the norm before it, too (``linears/fused.py``). Both devices round at the same places.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.linears.adapted import Adapted
from compiled_llm.models.linears.fused import activated_linear, surrounded, takes_norm, takes_what_follows
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops.linear.surroundings import Surroundings


class LayerNorm(NamedTuple):
    """The weights of a layer norm, in the model's dtype."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]


Norm = Tensor | LayerNorm  # a Tensor [D] is the weight of an RMS norm


class TappedNorm(NamedTuple):
    """A norm whose input ``note`` gets while a step is traced (``draft_heads/taps.py``)."""

    norm: "Norm | FetchingNorm"
    note: Callable[[Tensor], None]


class GivenNorm(NamedTuple):
    """A norm of a stream that comes from elsewhere: what was before it counts no more (``models/stages.py``)."""

    norm: Norm | None
    stream: Tensor  # [T, D]


class OfSomeRows(NamedTuple):
    """A block's last linear layer that computes some rows, which go on alone (``models/last_rows.py``)."""

    linear: Linear
    rows: Tensor  # [R] int32


class FetchingNorm(NamedTuple):
    """A norm of a layer's input, before which weights that lie in host memory begin to come (``models/offload.py``).

    Attributes:
        begun: the tensors in host memory, each with the buffer on the device that it is copied to.
        awaited: the buffers that the layer reads.
    """

    norm: Norm
    begun: tuple[tuple[Tensor, Tensor], ...]
    awaited: tuple[Tensor, ...]


class Change(NamedTuple):
    """What adapters change of a block's output: still to be added to it."""

    linear: Adapted
    x: Tensor  # that the linear layer had
    beside: Tensor | None = None  # [T, D], which is added to the changed output


class Summand(Protocol):
    """What a block gives, before it is added to the residual stream that it has read."""

    def add_to(self, residual: "Residual") -> None: ...


class Residual:
    """The sum ``[T, D]`` of a model's first input and all that blocks have given: ``(x + delta) * scale``.

    Attributes:
        eps: of all norms of the model.
        delta: what is still to be added; None: nothing.
        delta_norm: ``[D]``, the weight of an RMS norm of ``delta``, if it has one.
        scale: ``[1]`` float32, of the sum; None: 1.
    """

    def __init__(self, x: Tensor, eps: float) -> None:
        self.x, self.eps = x, eps
        self._delta: Tensor | None = None
        self._change: Change | None = None
        self.delta_norm: Tensor | None = None
        self.scale: Tensor | None = None

    @property
    def delta(self) -> Tensor | None:
        change = self._change
        if change is not None and self._delta is not None:  # which nothing was to follow in its launch
            y = change.linear.change(self._delta, change.x)
            self._delta, self._change = y if change.beside is None else y + change.beside, None
        return self._delta

    def delta_and_change(self) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """``delta`` for a launch that also changes it, and the ``lora`` of ``routed_linear``; () where nothing does."""
        change = self._change
        if change is None or change.beside is not None:
            return self.delta, ()
        return self._delta, (change.x, *change.linear.surroundings)

    @property
    def is_pending(self) -> bool:
        """Whether something is still to be added."""
        return self._delta is not None

    def __iadd__(self, block: Summand) -> "Residual":
        block.add_to(self)
        return self

    def add(self, delta: Tensor, norm: Tensor | None = None, change: "Change | None" = None) -> None:
        """Add ``delta`` ``[T, D]``, or its RMS norm by ``norm`` ``[D]``: with the next norm, and what changes it."""
        if self.is_pending:
            self.tensor()  # what was to be added before
        self._delta, self.delta_norm, self._change = delta, norm, change

    def settle_changed(self, norm: Norm | None) -> Tensor | None:
        """Where adapters change ``delta``: the sum, and its norm by ``norm``, in the launch that changes it.

        Returns the norm, an empty tensor without one; None where there is no such launch, and nothing is done.
        """
        change, delta = self._change, self._delta
        weight, bias = norm if isinstance(norm, LayerNorm) else (norm, None)
        if change is None or delta is None or (change.beside is not None and bias is None):
            return None
        assert bias is None or (self.delta_norm is None and self.scale is None), "as in Normed.tensor"
        following = ops.Following(
            residual=self.x, beside=change.beside, delta_norm=self.delta_norm, scale=self.scale, norm=weight,
            norm_bias=bias, eps=self.eps,
        )  # fmt: skip
        y, x = change.linear.followed(delta, change.x, following)
        self.settle(x)
        return y

    def keep(self, rows: Tensor) -> None:
        """Leave of the sum ``rows`` ``[R]`` int32 alone."""
        self.settle(ops.rows_at(self.tensor(), rows))

    def multiply(self, scale: Tensor) -> None:
        """Multiply the sum by ``scale`` ``[1]`` float32: with the next norm."""
        assert self.is_pending, "multiply follows add"
        self.scale = scale

    def normed(self, norm: "Norm | TappedNorm | GivenNorm | FetchingNorm | None") -> "Normed":
        """Its norm; itself without one."""
        if isinstance(norm, GivenNorm):
            self.settle(norm.stream)
            norm = norm.norm
        note = None
        if isinstance(norm, TappedNorm):
            note, norm = norm.note, norm.norm
        if isinstance(norm, FetchingNorm):
            latest = self.x if self._delta is None else self._delta
            for host, buffer in norm.begun:
                ops.fetch(latest, host, buffer)
            for buffer in norm.awaited:
                ops.await_fetched(latest, buffer)
            norm = norm.norm
        return Normed(self, norm, note)

    def tensor(self) -> Tensor:
        """The sum, ``[T, D]``: computed now, if something is still to be added."""
        if self.settle_changed(None) is None and self.delta is not None:
            self.settle(ops.sum_of_norms(self.x, None, self.delta, self.delta_norm, self.eps, self.scale))
        return self.x

    def settle(self, x: Tensor) -> None:
        """Note that the sum is ``x``, which an op has computed."""
        self.x, self._delta, self._change, self.delta_norm, self.scale = x, None, None, None, None


class Normed:
    """The norm of a residual stream, computed by what reads it. It is read once.

    ``note`` gets the sum, which is often computed together with its norm.
    """

    def __init__(self, residual: Residual, norm: Norm | None, note: Callable[[Tensor], None] | None = None) -> None:
        self.residual, self.norm, self._noted_by = residual, norm, note

    @property
    def eps(self) -> float:
        return self.residual.eps

    def tensor(self) -> Tensor:
        """``[T, D]``. See ``ops.rms_norm`` and ``ops.layer_norm``."""
        y = self._computed()
        self._note()
        return y

    def _note(self) -> None:
        if self._noted_by is not None:
            self._noted_by(self.residual.x)

    def _computed(self) -> Tensor:
        of, norm = self.residual, self.norm
        if norm is None:
            return of.tensor()
        if (changed := of.settle_changed(norm)) is not None:
            return changed
        delta = of.delta
        if delta is None:
            x = of.x
            if isinstance(norm, LayerNorm):
                return ops.layer_norm(x, norm.weight, norm.bias, of.eps)
            return ops.rms_norm(x, norm, of.eps)
        is_plain_sum = of.delta_norm is None and of.scale is None
        if isinstance(norm, LayerNorm):
            assert is_plain_sum, "no family has another beside layer norms"
            x, y = ops.add_layer_norm(of.x, delta, norm.weight, norm.bias, of.eps)
        elif is_plain_sum:
            x, y = ops.add_rms_norm(of.x, delta, norm, of.eps)
        else:
            x, y = ops.norm_of_sum(of.x, delta, of.delta_norm, norm, of.eps, of.scale)
        of.settle(x)
        return y

    def linear(self, linear: Linear, activation: str = "", gated: bool = True, factor: Tensor | None = None) -> Tensor:
        """``activated_linear`` of the norm, ``[T, N]``; norm and linear layer are one op where a GPU has it."""
        of, norm = self.residual, self.norm
        if of.x.is_cuda and not of.is_pending and isinstance(norm, Tensor) and takes_norm(linear, of.x):
            self._note()
            return surrounded(of.x, linear, Surroundings(norm, of.eps, activation, gated=gated))
        return activated_linear(self.tensor(), linear, activation, gated, factor)

    def linear_and_norm(self, linear: Linear, norm: Tensor, eps: float) -> "tuple[Tensor, Normed]":
        """``linear`` of the norm, and the RMS norm of its first outputs by ``norm``.

        Where a launch adds what adapters change, it computes that norm as well.
        """
        x = self.residual.x
        if isinstance(linear, Adapted) and linear.changes_and(x) and not takes_what_follows(linear, x, "residual"):
            x = self.tensor()
            y = activated_linear(x, linear.plain)
            normed = linear.followed(y, x, ops.Following(norm=norm, eps=eps))[0]
            return y, Residual(normed, eps).normed(None)
        y = self.linear(linear)
        return y, Residual(y[:, : len(norm)], eps).normed(norm)


class BlockOutput:
    """A block's last linear layer with its input: ``norm(linear(x) * multiplier + beside)``, a ``Summand``.

    Attributes:
        rows: ``[R]`` int32, those of ``x`` that it computes; the sum that it is added to keeps these. None: all.
    """

    multiplier: float = 1.0
    beside: Tensor | None = None  # [T, D]
    norm: Tensor | None = None  # [D], the weight of an RMS norm

    def __init__(self, x: Tensor, linear: Linear | OfSomeRows) -> None:
        self.rows: Tensor | None = None
        if isinstance(linear, OfSomeRows):
            linear, self.rows = linear
            x = ops.rows_at(x, self.rows)
        self.x, self.linear = x, linear

    def __mul__(self, multiplier: float) -> "BlockOutput":
        self.multiplier = multiplier
        return self

    def plus(self, beside: Tensor) -> "BlockOutput":
        self.beside = beside
        return self

    def normed(self, norm: Tensor) -> "BlockOutput":
        self.norm = norm
        return self

    def tensor(self) -> Tensor:
        """``[T, D]``, without the norm."""
        y = activated_linear(self.x, self.linear)
        if self.multiplier != 1.0:
            y = y * self.multiplier
        return y if self.beside is None else y + self.beside

    def add_to(self, residual: Residual) -> None:
        """Add it in the op of its linear layer, where a GPU has one. Else, or with a norm, the next norm adds it."""
        linear, x = self.linear, self.x
        if self.rows is not None:
            residual.keep(self.rows)
        if self.norm is None and takes_what_follows(linear, x, "residual"):
            around = Surroundings(residual=residual.tensor(), multiplier=self.multiplier, beside=self.beside)
            residual.settle(surrounded(x, linear, around))
        elif isinstance(linear, Adapted) and linear.changes_and(x) and self.multiplier == 1.0:
            residual.add(activated_linear(x, linear.plain), self.norm, Change(linear, x, self.beside))
        else:
            residual.add(self.tensor(), self.norm)
