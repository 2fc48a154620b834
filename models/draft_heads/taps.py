"""Reading the inputs of a model's layers on the way, in any family whose layers begin with a norm of the stream."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.layers.residual import TappedNorm
from compiled_llm.models.registry import family_of
from compiled_llm.ops import write_slots


class Taps:
    """The inputs of ``layers`` (ascending) in one pass of a model; see ``HeadFamily.taps``."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._taken: list[Tensor] = []
        self._num_noted = 0  # what ``on`` has let norms of layers note

    def ends_before(self, weights: Any) -> bool:
        """Whether nothing is read of what the last layer of ``weights`` gives."""
        return bool(self._layers) and max(self._layers) < len(weights.layers)

    def on(self, weights: Any) -> Any:
        """``weights`` that note them. Nothing else is computed, and no number is another one."""
        self._num_noted = sum(number < len(weights.layers) for number in self._layers)
        tapped = [
            layer._replace(input_norm=TappedNorm(layer.input_norm, self._note)) if number in self._layers else layer
            for number, layer in enumerate(weights.layers)
        ]
        weights = weights._replace(layers=tuple(tapped))
        # Some families end with this norm, in others it is the head's, which takes the sum itself.
        if len(weights.layers) not in self._layers:
            return weights
        return weights._replace(final_norm=TappedNorm(weights.final_norm, self._note))

    def _note(self, x: Tensor) -> None:
        self._taken.append(x)

    def taken(self, hidden: Tensor) -> Tensor:
        """All side by side, ``[T, taps * D]``. ``hidden`` ``[T, D]``: what the last layer gave; all without taps."""
        if not self._layers:
            return hidden
        self._check(len(self._taken))
        return torch.cat([*self._taken, hidden][: len(self._layers)], 1)

    def _check(self, found: int) -> None:
        wanted = self._num_noted, len(self._layers)
        assert found in wanted, f"a norm notes its input once, when it is read: {found} of {self._layers} are noted"


class KeptTaps(Taps):
    """Taps that go to the ``slots`` ``[T]`` int32 of ``cache`` ``[B, S, taps * D]`` as they are noted.

    So on a CPU they are written among the ops of the layers, and no piece of torch's code comes between those.
    """

    def __init__(self, layers: Sequence[int], cache: Tensor, slots: Tensor) -> None:
        super().__init__(layers)
        self._cache, self._slots, self._num_columns = cache, slots, 0

    def _note(self, x: Tensor) -> None:
        write_slots(self._cache, self._slots, x, self._num_columns)
        self._num_columns += x.shape[1]

    def keep_last(self, hidden: Tensor) -> None:
        """Write ``hidden`` ``[T, D]``, what the last layer gave, if it is one of them."""
        self._check(self._num_columns // hidden.shape[1])
        if self._num_columns < self._cache.shape[2]:
            self._note(hidden)


def check_taps(config: ModelConfig, taps: Sequence[int]) -> None:
    """``ValueError`` unless the inputs of these layers can be read in the model of ``config``."""
    count = config.num_layers
    if not taps:
        return
    if any(not 0 <= tap <= count for tap in taps):
        raise ValueError(f"speculative_config: model reads layers {list(taps)}, and {config.architecture} has {count}")
    layers = () if isinstance(config, TransformersConfig) else family_of(config).describe(config).weights.layers
    if len(layers) != count or not all(hasattr(layer, "input_norm") for layer in layers):
        raise ValueError(
            f"speculative_config: method must be another for {config.architecture}, the inputs of whose layers are not "
            "within reach of a drafter"
        )
