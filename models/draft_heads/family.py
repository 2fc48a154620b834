"""What a network is that drafts from a model's hidden states: a ``Family`` with more functions.

A row of it is the *feature* of a token, which is made of the model's hidden states there, beside the token that
follows. Row p stands at position p, and its key and value in the slot of token p.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import C, Family, W
from compiled_llm.models.registry import family_of


def _as_they_are(weights: Any, rows: Tensor, config: Any) -> Tensor:
    return rows


def shared(weights: Any, target: Any) -> Any:
    """``weights`` with the embedding and the head of the model, where the checkpoint has none."""
    if weights.embedding is None:
        weights = weights._replace(embedding=target.embedding)
    return weights if weights.head is not None else weights._replace(head=target.head)


@dataclasses.dataclass(frozen=True)
class HeadFamily(Family[C, W]):
    """All that the engine knows of a kind of such networks. Its ``config`` is that of the network.

    ``forward`` takes the features from ``StepInput.features``, and the tokens that follow as ``input_ids``.

    Attributes:
        feature_size: config -> F, the elements of a token's feature; 0: none is kept, and there is no cache.
        hidden_size: config -> the elements of what ``features`` makes a feature of.
        taps: config -> the layers whose inputs features are made of, ascending; the number of layers stands for what
            the last one gives. Empty: features are made of what the model's head takes.
        features: (weights, those of all taps side by side ``[T, taps * D]``, config) -> ``[T, F]``. Pure.
        share: (weights, the model's) -> the weights with what is the model's. A checkpoint that has neither embedding
            nor head leaves them None.
        prefix: config -> what the names of all its tensors begin with, where the model's checkpoint has them; "": it
            has a checkpoint of its own.
        feed_back: (weights, rows of what ``forward`` gave, config) -> the features ``[R, F]`` of the rows after them.
    """

    feature_size: Callable[[C], int] = dataclasses.field(kw_only=True)
    hidden_size: Callable[[C], int] = lambda config: 0
    taps: Callable[[C], tuple[int, ...]] = lambda config: ()
    features: Callable[[W, Tensor, C], Tensor] = _as_they_are
    share: Callable[[W, Any], W] = shared
    feed_back: Callable[[W, Tensor, C], Tensor] = _as_they_are
    prefix: Callable[[C], str] = lambda config: ""


def head_family(config: ModelConfig) -> HeadFamily[Any, Any]:
    """The family of a network that is known to be one of these."""
    family = family_of(config)
    assert isinstance(family, HeadFamily)
    return family


def prefix_of(config: ModelConfig) -> str:
    """``HeadFamily.prefix``; "" for all but heads."""
    family = family_of(config)
    return family.prefix(config) if isinstance(family, HeadFamily) else ""


def checked_ids(name: str, token_ids: Tensor, vocab_size: int) -> Tensor:
    """``token_ids`` of the tensor ``name``. ``ValueError`` where one is no token of the model."""
    if not token_ids.is_meta and len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"{name} must have ids of tokens, 0 to {vocab_size - 1}, given others: the file is damaged")
    return token_ids
