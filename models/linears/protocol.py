"""What a kind of linear layer has to provide. Families and engine know a linear layer by this alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.models.sharding import Cut
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat


class StoredLinear(NamedTuple):
    """A linear layer as a checkpoint of plain weights has it: ``NAME.weight``, and ``NAME.bias`` where it has one.

    Attributes:
        transposed: the checkpoint has the weight as ``[in_features, out_features]``.
        role: "head", which makes logits, "embedding", of which single rows are read, or "layer".
        also: another name: of a head that the embedding is as well.
        arrange: rows of the checkpoint's weight (elements of its bias) -> the same in the order that the model takes
            the layer's outputs in. None: they are in it.
        arrange_inputs: the same of the weight's columns, given as rows.
        is_of_file: whether these undo what a GGUF file did to the order: adapters, which are the hub's, are in the
            model's already.
        stacked: of an expert's layer: the name of transformers' parameter that has the weights of all experts.
        cut: how ranks share it; its outputs in the order that ``arrange`` gives. None: nothing says.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool = False
    transposed: bool = False
    arrange: Callable[[Tensor], Tensor] | None = None
    role: str = "layer"
    also: str = ""
    arrange_inputs: Callable[[Tensor], Tensor] | None = None
    stacked: str = ""
    cut: Cut | None = None
    is_of_file: bool = False


PutQuantized = Callable[[int, QuantizedRows], None]
"""(first row, rows): the same of quantised ones."""

Put = Callable[[int, Tensor], None]
"""(first row, rows ``[n, K]``): takes some rows of a matrix. It must be done with them when it returns."""


class Take(Protocol):
    """The tensors of a checkpoint, in the model's dtype on its device. Each is taken once."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device:
        """ "meta" where only names and shapes are asked for."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The whole tensor."""

    def rows(self, shapes: Mapping[str, tuple[int, ...]], put: Put) -> None:
        """The rows of the matrices of these names, one below the other: straight to where a layer keeps them.

        ``put`` gets each row once, in any order, a piece at a time and from several threads. When this returns, it
        has got all. On the device "meta" it gets none.
        """

    def kept(self, part: StoredLinear, scheme: Scheme) -> WeightFormat:
        """The form in which the rows of the weight of ``part`` are kept, none of them changed (``Scheme.kept``)."""

    def quantized(self, part: StoredLinear, scheme: Scheme, put: PutQuantized) -> tuple[Tensor | None, Tensor | None]:
        """The rows of the weight of ``part``, which the checkpoint keeps by ``scheme``, to ``put`` as in ``rows``.

        Returns:
            the order of inputs (``Scheme.order``) where the scheme may have one, and the scale of activations,
            ``[1]`` float32, where these are static.
        """


class Region(NamedTuple):
    """Rows from ``first`` to ``end`` of a matrix, of each the columns from ``left`` to ``right``."""

    first: int
    end: int
    left: int
    right: int


@runtime_checkable
class ReadsRegions(Protocol):
    """A ``Take`` that can leave what is not wanted of a matrix."""

    def regions(self, shapes: Mapping[str, tuple[int, ...]], regions: Mapping[str, Region], put: Put) -> None:
        """As ``rows``, of each of these matrices its region alone: its rows at their places among all, its columns."""


@runtime_checkable
class Linear(Protocol):
    """``x @ W.T + bias`` with ``W`` ``[out_features, in_features]``, however it is kept.

    A NamedTuple of tensors and numbers, since it is an argument of the compiled step. Pure: ``apply`` and ``rows`` are
    traced into the step.
    """

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of weights that ``apply`` has to read, padding left out."""

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        """The ops of ``kernel_build.OPS`` whose kernels ``apply`` runs on a CPU; none where torch's own serve."""

    def apply(self, x: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[T, out_features]`` in the dtype of ``x``."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` ``[T]`` (int32 or int64) of ``W``, ``[T, in_features]``: an embedding of the tokens ``ids``."""


@runtime_checkable
class GroupedLinear(Protocol):
    """``x @ W[e].T + bias[e]`` for each expert e of a mixture, however ``W`` is kept.

    A NamedTuple as ``Linear`` is, and as pure.
    """

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int:
        """Experts that a token uses."""

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights, padding left out."""

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        """The ops of ``kernel_build.OPS`` whose kernels ``apply_to`` runs on a CPU; none where torch's own serve."""

    def apply_to(self, x: Tensor, rows: Tensor | None, starts: Tensor) -> Tensor:
        """``[T, in_features]`` -> ``[R, out_features]``, each row by the expert that it belongs to.

        ``rows`` and ``starts`` are those of ``ops.grouped_linear``.
        """


class LinearKind(Protocol):
    """How linear layers of a kind come about: the class of the layers, with these as class or static methods."""

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether models in ``dtype`` on ``device`` can have this kind; see ``kinds.linear_kind``."""

    def is_exact(self) -> bool:
        """Whether a row's bits are the same for every number of rows."""

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        """One layer that computes all ``parts``, which have the same input: their outputs lie side by side.

        On the device "meta" it tells names and shapes alone, which is how a checkpoint is checked before it is read.
        """

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        """A table of which a step reads single rows: an embedding that is not the head as well."""

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        """The layers of a mixture's experts, of which a token uses ``top_k``; each computes all of its parts."""

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        """The weight of the only part, which has rows for each of ``num_heads`` heads, as two layers of single heads.

        The ``first`` rows of a head go the other way, from outputs to inputs; the others as they are. Of two parts, as
        GGUF files have them, the first is so transposed already. Both layers are always in the model's dtype: a head's
        rows are few, and what they are transposed from is quantised along its inputs.
        """

    def bytes_while_taking(self, nbytes: int) -> int:
        """Bytes that making a layer of ``nbytes`` takes besides, until it is made."""


class AroundKind:
    """A ``LinearKind`` that makes layers of the kind ``plain`` in another way. What it does not say is as with that."""

    plain: LinearKind

    def serves(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.plain.serves(device, dtype)

    def is_exact(self) -> bool:
        return self.plain.is_exact()

    def bytes_while_taking(self, nbytes: int) -> int:
        return self.plain.bytes_while_taking(nbytes)
