"""Multi-token prediction: the layer of a model's own checkpoint that guesses the token after the next.

DeepSeek-AI, 2024 (arXiv:2412.19437, section 2.2). A feature is what the model's head multiplies. The norms of a token's
embedding and of the feature before it go side by side through a projection, then through a layer of the model's kind,
whose output behind a norm is what the model's head takes, and the feature of the next row. So do SGLang and
transformers; vLLM feeds GLM-4.5's output back before that norm.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import deepseek_v3, glm4_moe, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from compiled_llm.models.config import FULL, MtpConfig
from compiled_llm.models.draft_heads.family import HeadFamily
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.registry import MTP, code_of
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm

TakeLayer = Callable[[Any, Source, str], Any]


class Weights(NamedTuple):
    embedding_norm: Tensor  # [D]
    feature_norm: Tensor  # [D]
    projection: Linear  # [D, 2 * D]
    layers: tuple[Any, ...]  # one
    norm: Tensor  # [D], of what the layer gives
    # The model's own.
    embedding: Linear | None = None  # [V, D]
    final_norm: Tensor | None = None  # [D]
    head: Linear | None = None  # [V, D]
    ropes: tuple[Tensor, ...] = ()


def take_numbered(config: MtpConfig, source: Source, take_layer: TakeLayer) -> Weights:
    """The layer behind the model's last in number; in it a checkpoint may have the model's embedding and head again."""
    d, name = config.hidden_size, prefix(config)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    source.may_repeat[f"{name}embed_tokens.weight"] = "model.embed_tokens.weight"
    source.may_repeat[f"{name}shared_head.head.weight"] = f"{head}.weight"
    return Weights(
        embedding_norm=source.norm(f"{name}enorm", d),
        feature_norm=source.norm(f"{name}hnorm", d),
        projection=source.linear(StoredLinear(f"{name}eh_proj", d, 2 * d)),
        layers=(take_layer(config, source, name.removesuffix(".")),),
        norm=source.norm(f"{name}shared_head.norm", d),
    )


def take_named(config: MtpConfig, source: Source, take_layer: TakeLayer) -> Weights:
    """Qwen's, whose norms multiply by one more than the checkpoint has."""
    d, name = config.hidden_size, prefix(config)
    return Weights(
        embedding_norm=source.norm_plus_one(f"{name}pre_fc_norm_embedding", d),
        feature_norm=source.norm_plus_one(f"{name}pre_fc_norm_hidden", d),
        projection=source.linear(StoredLinear(f"{name}fc", d, 2 * d)),
        layers=(take_layer(config, source, f"{name}layers.0"),),
        norm=source.norm_plus_one(f"{name}norm", d),
    )


def share(weights: Weights, model: Any) -> Weights:
    """``weights`` with what is the model's."""
    return weights._replace(embedding=model.embedding, final_norm=model.final_norm, head=model.head, ropes=model.ropes)


def features(weights: Weights, hidden: Tensor, config: MtpConfig) -> Tensor:
    """What the model's head multiplies, ``[T, D]``."""
    assert weights.final_norm is not None
    return rms_norm(hidden, weights.final_norm, config.rms_norm_eps)


def forward(
    weights: Weights,
    step: StepInput,
    kv_cache: KVCache,
    config: MtpConfig,
    layers: Layers,
    through_layers: Callable[..., Residual],
) -> Tensor:
    """What ``head`` takes and the features of the rows that follow, ``[T, D]``."""
    assert weights.embedding is not None
    assert step.features is not None
    eps = config.rms_norm_eps
    embedded = rms_norm(weights.embedding.rows(step.input_ids), weights.embedding_norm, eps)
    both = torch.cat((embedded, rms_norm(step.features, weights.feature_norm, eps)), 1)
    x = Residual(activated_linear(both, weights.projection), eps)
    return through_layers(x, weights, step, kv_cache, config, layers).normed(weights.norm).tensor()


def head(weights: Weights, rows: Tensor, config: MtpConfig) -> Tensor:
    """Logits ``[R, V]``."""
    assert weights.head is not None
    return activated_linear(rows, weights.head)


def prefix(config: MtpConfig) -> str:
    """What the names of all its tensors begin with."""
    return "mtp." if hasattr(config, "layer_types") else f"model.layers.{config.num_layers_before}."


def _of(
    model: Family, take: Callable[..., Weights], take_layer: TakeLayer, through_layers: Callable[..., Residual]
) -> HeadFamily[Any, Any]:
    """``model``: the family of the models."""
    return HeadFamily(
        model.hf_config,
        model.config,
        functools.partial(take, take_layer=take_layer),
        model.layers,
        functools.partial(forward, through_layers=through_layers),
        head,
        feature_size=lambda config: config.hidden_size,
        hidden_size=lambda config: config.hidden_size,
        features=features,
        share=share,
        prefix=prefix,
    )


# By the architecture of the model.
FAMILIES = {
    "DeepseekV3ForCausalLM": _of(deepseek_v3.FAMILY, take_numbered, deepseek_v3.take_layer, deepseek_v3.through_layers),
    "Glm4MoeForCausalLM": _of(glm4_moe.FAMILY, take_numbered, glm4_moe.take_layer, qwen3_moe.through_layers),
    "Qwen3NextForCausalLM": _of(qwen3_next.FAMILY, take_named, qwen3_next.take_layer, qwen3_next.through_layers),
    "Qwen3_5ForCausalLM": _of(qwen3_5.FAMILY, take_named, qwen3_5.take_layer, qwen3_5.through_layers),
    "Qwen3_5MoeForCausalLM": _of(qwen3_5_moe.FAMILY, take_named, qwen3_5_moe.take_layer, qwen3_next.through_layers),
}


def mtp_config(model: Any) -> MtpConfig:
    """The config of the layer alone, for a model of config ``model``.

    Raises:
        ValueError: the model has none, by its architecture or its ``config.json``, or several.
    """
    if model.architecture not in FAMILIES or not isinstance(model, MtpConfig):
        raise ValueError(
            f"speculative_config: method 'mtp' drafts with a layer that checkpoints of {', '.join(FAMILIES)} have, "
            f"given {model.architecture}, by {code_of(model)}. Choose another method"
        )
    if model.num_mtp_layers != 1:
        raise ValueError(
            "speculative_config: method 'mtp' is for models with one layer that guesses (num_nextn_predict_layers or "
            f"mtp_num_hidden_layers of config.json, 1 where it says nothing), given {model.num_mtp_layers!r:.100}: "
            + ("publishers do not agree on how several go on" if model.num_mtp_layers else "it has none")
            + ". Choose another method"
        )
    own: dict[str, Any] = {"layer_types": (FULL,)} if hasattr(model, "layer_types") else {}
    own |= {"architecture": f"{model.architecture}{MTP}", "num_layers": 1, "num_layers_before": model.num_layers}
    return dataclasses.replace(model, stream=None, **own)
