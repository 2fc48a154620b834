"""A model's last layer by itself, for tokens of which what goes into it was kept: computed once somebody needs it.

A layer for multi-token prediction reads what the last layer gives at each token of a prompt, and a step needs that at
the tokens alone whose logits it computes (``last_rows.py``). So steps keep what goes into the last layer, and the rest
is computed when the layer that guesses begins to read a prompt, which it may never do. The last layer's keys and values
are in the KV cache by then: no request's are written. A row has the bits that it would have had in the step, where
numbers are the same in any batch (docs/exact.md).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import MixedLayers
from compiled_llm.models.inputs import LayerCache, StepInput
from compiled_llm.models.last_rows import last_layers
from compiled_llm.models.layers.attention import AttentionSpec, for_queries
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.stages import own_weights, with_stream


class LastLayer(NamedTuple):
    """It is the last stage of a model (``stages.py``), of one layer.

    Attributes:
        config: of that stage; weights: its own, which are tensors of the model's.
    """

    config: ModelConfig
    weights: Any

    @property
    def number(self) -> int:
        """Of the layer in the model: the tap that reads its input (``HeadFamily.taps``)."""
        assert self.config.own_layers is not None
        return self.config.own_layers[0]


def last_layer(config: ModelConfig, weights: Any, windows: Sequence[int]) -> LastLayer | None:
    """That of a model; None where a step computes all of its rows, or where it cannot wait.

    It waits if it is attention whose keys and values, no latents, the model's own blocks have, and a dense MLP.

    Args:
        config: of the whole model, which one process has.
        windows: of layers whose caches hold little more than that: there, earlier keys are gone.
    """
    assert config.own_layers is None
    assert config.num_ranks == 1
    spec, count = layers_of(config)[-1], len(weights.layers)
    if not isinstance(spec, AttentionSpec) or spec.latent_dim or spec.shares_cache_of is not None:
        return None
    if spec.window in windows or last_layers(weights) is None or not hasattr(weights.layers[-1], "input_norm"):
        return None
    own = dataclasses.replace(config, own_layers=(count - 1, count))
    return LastLayer(own, own_weights(weights, own))


def last_layer_function(config: ModelConfig, max_query_len: int, exact: bool = False) -> Callable[..., Tensor]:
    """What computes it: (weights, its inputs, step input, its cache) -> what the model's head takes; both ``[T, D]``.

    Args:
        config: as of a ``LastLayer``, as are the weights; ``max_query_len``, ``exact``: see ``AttentionSpec``.
    """
    layers = for_queries(layers_of(config), max_query_len, exact=exact)
    return functools.partial(_through, family_of(config).forward, config, layers)


def _through(
    forward: Callable[..., Tensor],
    config: ModelConfig,
    layers: MixedLayers,
    weights: Any,
    inputs: Tensor,
    step: StepInput,
    cache: LayerCache,
) -> Tensor:
    # Its keys and values come out once more, and go to the sink, the first block: no request reads that. Each to the
    # slot that it has in its own block: if all had one, all cores would write to it.
    step = step._replace(slot_mapping=step.slot_mapping % cache.k.shape[2])
    return forward(with_stream(weights, inputs), step, (cache,), config, layers)
