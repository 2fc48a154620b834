"""LayerSkipStage: drafts after each step by the model's own first layers, on the model's own KV cache.

Beside ``DraftStage`` there is little to do: the model's step has computed every token that counts in these layers too,
so there are no weights, no cache, and nothing to catch up with (``step/drafting.py``).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.compiling.build_processes import Job
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size, mark_static_address
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.step.drafting import NO_DRAFT, layer_skip_function
from compiled_llm.step.kv_cache import layer_dtypes
from compiled_llm.worker import graph_fields
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.draft_stage import DraftBuffers, Drafts
from compiled_llm.worker.request_rows import RequestRows

_NAME = "draft"


class LayerSkipStage:
    """Owns the functions that draft, and their inputs. The method of ``config`` is "layer_skip".

    Attributes:
        token_ids: ``[most requests, K]`` int64 on the device: what was drafted last.
        network, coverage, kv_cache: of its own: none.

    Args:
        num_layers: that draft.
        weights, kv_cache: of the model, the latter to compile on; when it is exchanged, ``hold`` and ``record_again``.
        windows: of the pool.
        last_tokens: ``[rows]`` int64, where a step leaves its tokens.
        tables: on a GPU, the block tables of all requests.
        exact: see ``AttentionSpec``.
    """

    network, coverage = None, None
    kv_cache: KVCache = ()

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
        last_tokens: Tensor,
        tables: BlockTables | None,
        exact: bool,
    ) -> None:
        assert config.speculation is not None
        num_tokens, requests = config.speculation.num_tokens, limits.decode_bucket_sizes
        self.num_layers = num_layers
        self._weights, self._last_tokens = weights._replace(layers=weights.layers[:num_layers]), last_tokens
        self._one_for_all = device.type == "cpu"
        self.token_ids = torch.full((requests[-1], num_tokens), NO_DRAFT, dtype=torch.int64, device=device)
        mark_static_address(self.token_ids)
        if self._one_for_all:
            mark_dynamic_size(self.token_ids, 0, DynamicSize("most drafted requests", 17))
        self._inputs = {size: DraftBuffers(size, num_tokens, limits, device, tables, len(windows)) for size in requests}
        self._recipe = functools.partial(
            layer_skip_function, model_config, num_layers, limits.block_size, windows, exact
        )
        dtypes = layer_dtypes(config, dtype, model_config)
        self._depends = {
            **graph_fields.of_step(model_config, limits, dtype, dtypes, device),
            "num_speculative_tokens": num_tokens,
            "num_draft_layers": num_layers,
        }
        self._functions: dict[str, CompiledFunction] = {}
        self.hold(kv_cache)

    @property
    def nbytes(self) -> int:
        """Bytes of all inputs on the device, weights and KV cache left out."""
        return self.token_ids.nbytes + sum(each.buffers.nbytes for each in self._inputs.values())

    def hold(self, kv_cache: KVCache) -> None:
        """``kv_cache`` is the model's from now on."""
        self._model_cache = kv_cache[: self.num_layers]

    # -- Compiling

    def jobs(self, weight_of_step: float, weight_of_layer: float) -> list[Job]:
        """Everything to compile, for other processes: how long a step takes besides its layers, and each of them."""
        weight = (weight_of_step + weight_of_layer * self.num_layers) * self.token_ids.shape[1]
        threads = torch.get_num_threads()
        jobs = {
            name: Job(name, self._recipe, arguments(), threads, weight, self._depends)
            for name, arguments in self._to_compile()
        }
        return list(jobs.values())

    def warm_up(self, make: Callable[..., CompiledFunction]) -> None:
        """Compile everything, and run it once on padding. ``make``: (function, name, what it depends on)."""
        for name, arguments in self._to_compile():
            if name not in self._functions:
                self._functions[name] = make(self._recipe(), name, self._depends)
                self._functions[name].warm_up(arguments)

    def record_again(self) -> None:
        """The KV cache is another one: on a GPU, record every CUDA graph on it."""
        for name, arguments in self._to_compile():
            self._functions[name].record_again(arguments)

    def functions(self) -> dict[str, CompiledFunction]:
        """All of them, by their names."""
        return dict(self._functions)

    def _to_compile(self) -> Iterator[tuple[str, Callable[[], tuple]]]:
        """Name, and what makes the arguments. On a GPU the largest come first: their memory serves all."""
        for size in sorted(self._inputs, reverse=not self._one_for_all):
            yield self._name(size), functools.partial(self._arguments, size)

    def _name(self, size: int) -> str:
        """Of the function for so many requests: on a CPU one for all, see ``StepSizes``."""
        return _NAME if self._one_for_all else f"{_NAME}_{size}"

    def _arguments(self, size: int) -> tuple:
        return self._weights, self._inputs[size].input, self._model_cache, self._last_tokens, self.token_ids

    # -- Running

    def run(self, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, store: RequestRows) -> Drafts | None:
        """Draft for the requests of a step whose work is on its way to the device; None: for none of them.

        Args:
            bucket: of the step.
            rows: ``[R]`` int64, those of its requests in ``store``.
        """
        places = np.flatnonzero(np.array(output.num_samples) > 0)
        if not output.drafts_next or not len(places):
            return None
        size = next(size for size in self._inputs if size >= len(places))
        self._inputs[size].fill(places, output, rows, store)
        self._functions[self._name(size)](*self._arguments(size))
        return Drafts(places, self.token_ids)

    def run_largest(self) -> None:
        """Run it in its largest size, all padding: what it allocates depends on that alone."""
        size = max(self._inputs)
        self._functions[self._name(size)](*self._arguments(size))
