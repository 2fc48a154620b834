"""How long each layer of a model takes, measured in the engine's process, to share layers out to stages by time.

A layer is measured alone, with random weights, uncompiled: of layers that are alike one. The first has the embedding
besides, the last one the head and a sampler. What was measured is kept, so that the next start cuts at the same places.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.version import __version__
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.weights import linear_layers
from compiled_llm.ops import native
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.whole_files import write_whole
from compiled_llm.worker.calibration import seconds_of_decode
from compiled_llm.worker.runner import ModelRunner

_REQUESTS = 4  # of the decode that is measured: what a stage has at once, at most
_CONTEXT = 256  # tokens for which the KV cache has room


def layer_costs(
    config: EngineConfig, model_config: ModelConfig, directory: Path, progress: StartProgress, num_threads: int
) -> list[float]:
    """Seconds of each layer in a decode, on so many threads; of the first with the embedding, the last with the head.

    Args:
        config: the engine's; ``model_config``: of the whole model, in ``directory``.
    """
    path = _path(config, model_config, num_threads)
    with contextlib.suppress(OSError, ValueError, TypeError):  # what is no list of numbers is measured again
        costs = json.loads(path.read_bytes())
        if len(costs) == len(layers_of(model_config)):
            return [float(cost) for cost in costs]
    alike = defaultdict[Any, list[int]](list)
    weights = family_of(model_config).describe(model_config).weights
    for number, (spec, layer) in enumerate(zip(layers_of(model_config), weights.layers, strict=True)):
        sizes = tuple((type(one), one.out_features, one.in_features, one.nbytes) for one in linear_layers(layer))
        alike[spec, sizes].append(number)
    last = len(weights.layers) - 1
    of_each = {numbers[len(numbers) // 2]: numbers for numbers in alike.values()}
    measured = sorted({0, last, *of_each})
    found = dict[int, float]()
    with progress.stage("measuring layers", {str(number): 1.0 for number in measured}, is_long=False) as stage:
        for number in measured:
            stage.next(str(number))
            found[number] = _seconds(_alone(config, num_threads), model_config, directory, number)
    costs = [0.0] * (last + 1)
    for number, numbers in of_each.items():
        for one in numbers:
            costs[one] = found[number]
    for number in (0, last):
        costs[number] = max(costs[number], found[number])
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, json.dumps(costs).encode())
    return costs


def _path(config: EngineConfig, model_config: ModelConfig, num_threads: int) -> Path:
    rounding = [getattr(config, field.name) for field in dataclasses.fields(config) if "quantization" in field.name]
    facts = repr(model_config), config.dtype, config.kv_cache_dtype, rounding, num_threads, config.max_logprobs
    versions = __version__, torch.__version__, native.best_isa()
    digest = hashlib.sha256(repr((facts, versions)).encode()).hexdigest()
    return native.cache_directory() / "layer_costs" / f"{digest[:32]}.json"


def _alone(config: EngineConfig, num_threads: int) -> EngineConfig:
    """The arguments of an engine that runs a layer alone."""
    return dataclasses.replace(
        config,
        load_format="dummy",
        revision=None,
        max_model_len=None if config.max_model_len is None else min(config.max_model_len, _CONTEXT),
        max_num_seqs=None,
        bucket_sizes=(_REQUESTS,),
        token_bucket_sizes=(16,),
        max_num_batched_tokens=None,
        num_kv_blocks=-(-_CONTEXT // config.block_size) + 1,
        kv_cache_memory_bytes=None,
        num_state_slots=None,
        swap_space_bytes=0,
        preemption_mode="recompute",
        target_itl_ms=None,
        enable_chunked_prefill=True,
        speculative_config=None,
        sliding_window=None,
        attention_sink_tokens=0,
        logits_transforms=(),
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        tensor_parallel_exact=False,
        enable_expert_parallel=False,
        num_threads=num_threads,
        enforce_eager=True,
        wait_for_compile=True,
        progress="off",
    )


@own_settings()
def _seconds(config: EngineConfig, model_config: ModelConfig, directory: Path, number: int) -> float:
    stage = dataclasses.replace(model_config, own_layers=(number, number + 1), stream=None)
    runner = ModelRunner(config, stage, directory, StartProgress("off"))
    runner.steps.hidden.normal_()  # so that tokens choose different experts
    bucket = next(bucket for bucket in runner.steps.buckets if bucket.kind == "decode")
    seconds, sampling = seconds_of_decode(bucket, runner.steps, runner.limits, runner.facts, lambda seconds: seconds)
    runner.close()
    return seconds + sampling
