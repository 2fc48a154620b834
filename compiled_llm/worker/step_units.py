"""What of a bucket's step is one compiled function: the whole of it, or each of its parts (``compile_unit``).

All layers of a model are alike, so one compiled layer serves them all: a first start compiles one layer for each bucket
instead of 28 or more. Between two layers Python takes over for some microseconds.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.compiling.ahead import Job, unavailable
from compiled_llm.compiling.argument_specs import ArgumentCheck, specs_of
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models import family
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.step.step import Feedback, embed_function, head_function, layer_function, step_function

Make = Callable[[Callable, str], CompiledFunction]  # (function, name): with the engine's device, cache and so on


class LayeredStep:
    """A bucket's step as a loop over one compiled layer, between two small functions. For a CPU.

    Called, warmed up and reported like the ``CompiledFunction`` of a whole step. Layers that look different to the
    compiler, such as one whose cache alone is not quantised, have a compiled function of their own.

    Attributes:
        functions: what is compiled, in the order of their first calls. Empty before ``warm_up``.
    """

    def __init__(self, model_config: ModelConfig, bucket: Bucket, make: Make) -> None:
        self.functions: list[CompiledFunction] = []
        self._model_config = model_config
        self._bucket = bucket
        self._make = make
        self._check: ArgumentCheck | None = None
        self._embed: Callable
        self._layers: list[Callable] = []
        self._head: Callable

    def warm_up(self, make_args: Callable[[], tuple]) -> None:
        """Compile every part for what ``make_args`` gives, which stands for all later arguments."""
        weights, step_input, kv_cache, feedback = args = make_args()
        config, name, outer = self._model_config, self._bucket.name, _without_layers(weights)

        def first_call(function: Callable, name: str, args: tuple) -> tuple[CompiledFunction, Any]:
            compiled = self._make(function, name)
            compiled.warm_up(lambda: args)
            self.functions.append(compiled)
            return compiled, compiled(*args)

        embed, (stream, cos_sin) = first_call(embed_function(config), f"embed_{name}", (outer, step_input, feedback))
        of_kind: dict[int, CompiledFunction] = {}
        kinds = layer_kinds(weights, kv_cache)
        for index in dict.fromkeys(kinds):
            layer_args = step_input, stream, cos_sin, weights.layers[index], kv_cache[index]
            layer = layer_function(config, self._bucket.max_query_len)
            of_kind[index], stream = first_call(layer, f"{_layer_name(index)}_{name}", layer_args)
        head, _ = first_call(head_function(config), f"head_{name}", (outer, step_input, stream, feedback))
        self._embed, self._head = embed.unchecked(), head.unchecked()
        codes = {kind: function.unchecked() for kind, function in of_kind.items()}
        self._layers = [codes[kind] for kind in kinds]
        self._check = ArgumentCheck(args) if any(function.report().graphs for function in self.functions) else None

    def record_again(self, make_args: Callable[[], tuple]) -> None:
        """Nothing: there are no CUDA graphs on a CPU."""

    def __call__(self, weights: Any, step_input: StepInput, kv_cache: KVCache, feedback: Feedback) -> Tensor:
        """Logits [R, V]. ``RuntimeError`` for arguments that it was not compiled for."""
        with torch.inference_mode(False), torch.no_grad():
            if self._check is not None:
                # Once for all layers. What one part hands to the next follows from it.
                difference = self._check.difference((weights, step_input, kv_cache, feedback))
                if difference is not None:
                    self.functions[0].refuse(difference)
            outer = _without_layers(weights)
            stream, cos_sin = self._embed(outer, step_input, feedback)
            for layer, layer_weights, cache in zip(self._layers, weights.layers, kv_cache, strict=True):
                stream = layer(step_input, stream, cos_sin, layer_weights, cache)
            return self._head(outer, step_input, stream, feedback)


def check_unit(compile_unit: str, device: torch.device, enforce_eager: bool) -> None:
    """``ValueError`` for "layer" on a GPU, and where torch cannot compile ahead of time.

    There its guards would compile the layer again for every other layer's weights.
    """
    if compile_unit != "layer":
        return
    reason = "a CUDA graph holds a whole step" if device.type != "cpu" else None if enforce_eager else unavailable()
    if reason is not None:
        raise ValueError(f"compile_unit must be 'model', the default, here: {reason}. Given {compile_unit!r}")


def compiled_step(
    compile_unit: str, model_config: ModelConfig, bucket: Bucket, make: Make
) -> CompiledFunction | LayeredStep:
    """The step of a bucket, to be warmed up."""
    if compile_unit == "layer":
        return LayeredStep(model_config, bucket, make)
    return make(step_function(model_config, bucket.max_query_len), bucket.name)


def functions_of(step: CompiledFunction | LayeredStep) -> list[CompiledFunction]:
    """The compiled functions of a step, for reports."""
    return step.functions if isinstance(step, LayeredStep) else [step]


def step_jobs(compile_unit: str, model_config: ModelConfig, bucket: Bucket, args: tuple, threads: int) -> list[Job]:
    """What is to be compiled for a step of these arguments, as other processes can do it."""
    name, max_query_len = bucket.name, bucket.max_query_len
    if compile_unit == "model":
        return [Job(name, functools.partial(step_function, model_config, max_query_len), args, threads)]
    weights, step_input, kv_cache, feedback = args
    outer = _without_layers(weights)
    stream, cos_sin = _described(step_input, weights, model_config)
    layer = functools.partial(layer_function, model_config, max_query_len)
    jobs = []
    for index in dict.fromkeys(layer_kinds(weights, kv_cache)):
        layer_args = step_input, stream, cos_sin, weights.layers[index], kv_cache[index]
        jobs.append(Job(f"{_layer_name(index)}_{name}", layer, layer_args, threads))
    head, embed = functools.partial(head_function, model_config), functools.partial(embed_function, model_config)
    return [
        *jobs,
        Job(f"head_{name}", head, (outer, step_input, stream, feedback), threads),
        Job(f"embed_{name}", embed, (outer, step_input, feedback), threads),
    ]


def layer_kinds(weights: Any, kv_cache: KVCache) -> list[int]:
    """For each layer, the first one whose weights and cache look the same to the compiler."""
    specs = [specs_of(pair) for pair in zip(weights.layers, kv_cache, strict=True)]
    return [specs.index(spec) for spec in specs]


def _layer_name(index: int) -> str:
    return f"layer{index}" if index else "layer"


def _without_layers(weights: Any) -> Any:
    return weights._replace(layers=())


def _described(step_input: StepInput, weights: Any, config: ModelConfig) -> tuple[Any, Tensor]:
    """Tensors such as the first part of a step gives, which has not run."""
    tokens = step_input.input_ids.shape[0]
    x, pending = (torch.empty(tokens, config.hidden_size, dtype=weights.final_norm.dtype) for _ in range(2))
    return family(config.architecture).Stream(x, pending), torch.empty(tokens, 1, config.head_dim)
