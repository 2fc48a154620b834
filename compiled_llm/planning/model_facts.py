"""What ``compiled-llm plan`` knows of a model: bytes and operations, by its config alone."""

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.models.weights import experts
from compiled_llm.planning.gpu_costs import ModelFacts
from compiled_llm.report.roofline import ModelWork
from compiled_llm.step import kv_cache
from compiled_llm.worker.memory import num_bytes

_RANKS = (1, 2, 4, 8)


def facts_of(name: str, config: ModelConfig) -> ModelFacts:
    """In bfloat16; no weight is read.

    Raises:
        ValueError: layers keep a state or see a window, whose steps the estimate does not know.
    """
    dtype = torch.bfloat16
    layers = layers_of(config)
    if any(isinstance(layer, StateSpec) or layer.window for layer in layers):
        raise ValueError(
            f"--models: {name} ({config.architecture}) has layers with a state or a window, of which steps are not "
            "estimated: measure it (compiled-llm bench step-costs) and give --costs"
        )
    # Facts must not depend on the CPU that estimates.
    plain = EngineConfig(device="cpu", dtype="bfloat16", compress_weights=False)
    linears = linears_of(plain, config, torch.device("cpu"), dtype)
    weights = family_of(config).describe(config, dtype, linears).weights
    cached = kv_cache.bytes_per_layer(config, [dtype] * config.num_layers)
    work, mixtures = ModelWork.of(config, weights, cached), experts(weights)
    ((_, pair_flops),) = work.per_key
    return ModelFacts(
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        weight_bytes=num_bytes(weights),
        read_bytes=work.weight_bytes_per_step + work.head_bytes_per_step,
        flops_per_token=work.linear_flops_per_token + work.last_flops_per_row,  # a GPU computes them for all
        head_flops=work.head_flops_per_row,
        pair_flops=pair_flops,
        kv_bytes=_kv_bytes(config, dtype),
        num_experts=mixtures[0].num_experts if mixtures else 0,
        top_k=mixtures[0].top_k if mixtures else 0,
        expert_bytes=work.expert_bytes * len(mixtures) / 2,
    )


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> dict[int, float]:
    """Of a token on each of so many ranks, where these can share the model."""
    found: dict[int, float] = {}
    for ranks in _RANKS:
        try:
            own = rank_config(config, Shard(0, ranks))
        except ValueError:
            continue
        found[ranks] = sum(kv_cache.bytes_per_layer(own, [dtype] * config.num_layers))
    return found
