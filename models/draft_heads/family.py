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


@dataclasses.dataclass(frozen=True)
class HeadFamily(Family[C, W]):
    """All that the engine knows of a kind of such networks. Its ``config`` is that of the network.

    ``take`` leaves the embedding or the head None where the checkpoint has none: the model's own serve. ``forward``
    takes the features from ``StepInput.features``, and the tokens that follow as ``input_ids``.

    Attributes:
        feature_size: config -> F, the elements of a token's feature.
        taps: config -> the layers whose inputs features are made of, ascending; the number of layers stands for what
            the last one gives. Empty: features are made of what the model's head takes.
        features: (weights, those of all taps side by side ``[T, taps * D]``, config) -> ``[T, F]``. Pure.
        feed_back: (weights, rows of what ``forward`` gave, config) -> the features ``[R, F]`` of the rows after them.
    """

    feature_size: Callable[[C], int] = dataclasses.field(kw_only=True)
    taps: Callable[[C], tuple[int, ...]] = lambda config: ()
    features: Callable[[W, Tensor, C], Tensor] = _as_they_are
    feed_back: Callable[[W, Tensor, C], Tensor] = _as_they_are


def head_family(config: ModelConfig) -> HeadFamily[Any, Any]:
    """The family of a network that is known to be one of these."""
    family = family_of(config)
    assert isinstance(family, HeadFamily)
    return family


def with_shared(weights: Any, embedding: Any, head: Any) -> Any:
    """``weights`` with the model's own ``embedding`` and ``head``, where the checkpoint has none."""
    if weights.embedding is None:
        weights = weights._replace(embedding=embedding)
    return weights if weights.head is not None else weights._replace(head=head)
