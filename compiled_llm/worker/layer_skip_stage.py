"""LayerSkipStage: drafts after each step by the model's own first layers, on the model's own KV cache.

The model's step has computed every token that counts in these layers too, so there are no weights, no cache, and
nothing to catch up with (``step/drafting.py``).
"""

import functools
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.step.drafting import DraftInput, layer_skip_function
from compiled_llm.step.kv_cache import layer_dtypes
from compiled_llm.worker import graph_fields
from compiled_llm.worker.draft_stage import DraftStage


class LayerSkipStage(DraftStage):
    """The method of ``config`` is "layer_skip".

    Args:
        num_layers: that draft.
        weights, kv_cache: of the model, the latter to compile on.
        windows: of the pool.
        exact: see ``AttentionSpec``; ``others``: as of ``DraftStage``.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_layers: int,
        model_config: ModelConfig,
        limits: EngineLimits,
        device: torch.device,
        dtype: torch.dtype,
        *,
        weights: Any,
        kv_cache: KVCache,
        windows: tuple[int, ...],
        exact: bool,
        **others: Any,
    ) -> None:
        assert config.speculation is not None
        dtypes = layer_dtypes(config, dtype, model_config)
        depends = graph_fields.of_step(model_config, limits, dtype, dtypes, device)
        super().__init__(
            weights._replace(layers=weights.layers[:num_layers]),
            config.speculation.num_tokens,
            num_layers,
            functools.partial(layer_skip_function, model_config, num_layers, limits.block_size, windows, exact),
            {**depends, "num_draft_layers": num_layers},
            limits,
            device,
            num_windows=len(windows),
            **others,
        )
        self.hold(kv_cache, ())

    def hold(self, kv_cache: KVCache, draft_cache: KVCache) -> None:
        self._model_cache = kv_cache[: self._num_layers]

    def _arguments(self, known: DraftInput) -> tuple:
        return self._weights, known, self._model_cache, self._last_tokens, self.token_ids
