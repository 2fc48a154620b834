"""A model's weights: where a family takes them from, what those of all families share, and what memory they take."""

import abc
from typing import Any, Protocol

import torch
from torch import Tensor

from compiled_llm.models.layers.rope import rope_table
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import Linear, LinearKind, Part
from compiled_llm.models.rope_config import Rope


class ModelWeights(Protocol):
    """What the engine knows of a family's weights: a NamedTuple of tensors, linear layers and tuples of such.

    A step reads all of it, of the embedding and the tables only the rows of its tokens.
    """

    @property
    def embedding(self) -> Linear:
        """``[V, D]``; the very object that ``head`` is where the two are tied."""

    @property
    def layers(self) -> tuple[Any, ...]: ...

    @property
    def head(self) -> Linear:
        """``[V, D]``, makes the logits."""

    @property
    def ropes(self) -> tuple[Tensor, ...]:
        """Tables of rotary embeddings, ``[max_position_embeddings, H]`` float32 each, made from the config."""


class Source(abc.ABC):
    """Where a family's weights come from: a checkpoint, random numbers, or nowhere (``Description``).

    A family names every tensor of its checkpoints once, with its shape, when it asks for it here.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, linears: LinearKind) -> None:
        self.dtype, self.device, self._linears = dtype, device, linears

    @abc.abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float | None = None) -> Tensor:
        """The checkpoint's tensor ``name``, in the model's dtype on its device; each may be taken once.

        Args:
            mean, std: of random weights. None: ``shape[-1] ** -0.5``, so that activations keep their size.
        """

    def norm(self, name: str, size: int) -> Tensor:
        """The weight ``[size]`` of an RMS norm."""
        return self.tensor(f"{name}.weight", (size,), mean=1.0, std=0.1)

    def norm_plus_one(self, name: str, size: int) -> Tensor:
        """The same for checkpoints that hold ``w`` where the norm multiplies by ``1 + w``: that sum, in float32."""
        return 1 + self.tensor(f"{name}.weight", (size,), std=0.1).float()

    def linear(self, *parts: Part) -> Linear:
        """One linear layer that computes all ``parts``, which have the same input."""
        return self._linears.take(self._take, parts)

    def embedding_and_head(
        self, embedding: str, head: str, vocab_size: int, hidden_size: int, *, tied: bool
    ) -> tuple[Linear, Linear]:
        """The embedding and the head, both ``[V, D]``; one object where they are ``tied`` and its kind can be both."""
        table = Dense.take(self._take, [Part(embedding, vocab_size, hidden_size)])
        if not tied:
            return table, self.linear(Part(head, vocab_size, hidden_size))
        # The kind's layer of what has been taken already.
        made = self._linears.take(lambda name, shape: table.weight, [Part(embedding, vocab_size, hidden_size)])
        return made if self._linears.has_rows(hidden_size) else table, made

    def rope(self, rope: Rope, head_dim: int, length: int) -> Tensor:
        """The table of ``rope``, see ``rope_table``."""
        return rope_table(rope, head_dim, length, self.device)

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensor(name, shape, std=0.1) if len(shape) == 1 else self.tensor(name, shape)


class Description(Source):
    """Weights that take no memory, to ask for names, shapes and sizes.

    Attributes:
        shapes: name -> shape of every tensor of the checkpoint that was asked for.
        may_repeat: name of a tensor that some checkpoints hold besides -> the one that it must equal.
    """

    def __init__(self, dtype: torch.dtype, linears: LinearKind) -> None:
        super().__init__(dtype, torch.device("meta"), linears)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.may_repeat: dict[str, str] = {}

    def tensor(self, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float | None = None) -> Tensor:
        assert name not in self.shapes, f"{name} is taken twice"
        self.shapes[name] = shape
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def embedding_and_head(
        self, embedding: str, head: str, vocab_size: int, hidden_size: int, *, tied: bool
    ) -> tuple[Linear, Linear]:
        if tied:
            self.may_repeat[f"{head}.weight"] = f"{embedding}.weight"
        return super().embedding_and_head(embedding, head, vocab_size, hidden_size, tied=tied)


def tensors(weights: Any) -> list[Tensor]:
    """All tensors of a weights tuple, each storage once (tied weights are one tensor)."""
    if isinstance(weights, Tensor):
        return [weights]
    found = [t for item in weights for t in tensors(item)] if isinstance(weights, tuple) else []
    return list({(t.data_ptr() or id(t), t.shape): t for t in found}.values())  # on "meta" there are no addresses


def linears(weights: Any) -> list[Linear]:
    """All linear layers of a weights tuple, each once."""
    if isinstance(weights, Linear):
        return [weights]
    found = [linear for item in weights for linear in linears(item)] if isinstance(weights, tuple) else []
    return list({id(linear): linear for linear in found}.values())


def bytes_to_read(weights: Any) -> int:
    """Bytes that a step reads of a weights tuple that it uses once: tensors, and linear layers without padding."""
    if isinstance(weights, Tensor | Linear):
        return weights.nbytes
    return sum(map(bytes_to_read, weights)) if isinstance(weights, tuple) else 0
