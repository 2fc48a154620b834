"""GPT-2 (Radford et al., 2019): layer norms, biases, a plain MLP, and a learned vector for each position."""

import dataclasses
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_values import check_size
from compiled_llm.models.family import Family, Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import LayerNorm, Residual
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.llama import LayerWeights
from compiled_llm.models.rope_config import Rope
from compiled_llm.models.sharding import REPLICATED, by_outputs, of_heads
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
    n_positions: int  # of the checkpoint; max_position_embeddings may be set to fewer
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool


class Weights(NamedTuple):
    embedding: Linear  # [V, D]
    positions: Tensor  # [n_positions, D]
    layers: tuple[LayerWeights, ...]
    final_norm: LayerNorm
    head: Linear  # [V, D]
    ropes: tuple[Tensor, ...]  # none


def _take_layer(config: GPT2Config, source: Source, name: str) -> LayerWeights:
    d, intermediate, transposed = config.hidden_size, config.intermediate_size, not config.gguf_layout

    own = of_heads(config, d)
    qkv = StoredLinear(f"{name}.attn.c_attn", 3 * d, d, True, transposed, cut=by_outputs(own, own, own))
    o = StoredLinear(f"{name}.attn.c_proj", d, d, True, transposed, cut=own.inputs)
    return LayerWeights(
        input_norm=source.layer_norm(f"{name}.ln_1", d),
        attention=AttentionWeights(source.linear(qkv), source.linear(o)),
        mlp_norm=source.layer_norm(f"{name}.ln_2", d),
        mlp=source.plain_mlp(f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", d, intermediate, True, transposed),
    )


def take(config: GPT2Config, source: Source) -> Weights:
    """The weights."""
    d = config.hidden_size
    embedding, head = source.embedding_and_head(
        "transformer.wte", "lm_head", config.vocab_size, d, tied=config.tie_word_embeddings
    )
    return Weights(
        embedding=embedding,
        positions=source.tensor("transformer.wpe.weight", (config.n_positions, d), cut=REPLICATED),
        layers=tuple(_take_layer(config, source, f"transformer.h.{i}") for i in range(config.num_layers)),
        final_norm=source.layer_norm("transformer.ln_f", d),
        head=head,
        ropes=(),
    )


def layers(config: GPT2Config) -> Layers:
    """All are alike, but for their scale where ``scale_attn_by_inverse_layer_idx`` says so."""
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=scale, rotary=False)
    by_layer = config.scale_attn_by_inverse_layer_idx
    return tuple(dataclasses.replace(spec, scale=scale / (i + 1 if by_layer else 1)) for i in range(config.num_layers))


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: GPT2Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``, normalised; the step's keys and values go to ``kv_cache``."""
    embeddings = weights.embedding.rows(step.input_ids) + F.embedding(step.positions, weights.positions)
    x = Residual(embeddings, config.rms_norm_eps)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        x += attention(x.normed(w.input_norm), w.attention, None, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp, "gelu_tanh")
    return x.normed(weights.final_norm).tensor()


def head(weights: Weights, rows: Tensor, config: GPT2Config) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return weights.head.apply(rows)


def no_ropes(config: Any) -> tuple[Rope, ...]:
    """Positions are learned."""
    return ()


def sizes(config: Any) -> dict[str, Any]:
    """Every head has a key and a value of its own."""
    if config.n_embd % config.n_head:
        raise ValueError(
            f"config.json: n_embd must be a multiple of n_head, given {config.n_embd!r:.100} and {config.n_head!r:.100}"
        )
    if config.n_inner is not None:
        check_size("intermediate_size", config.n_inner, "n_inner")
    return {
        "rms_norm_eps": config.layer_norm_epsilon,
        "num_key_value_heads": config.n_head,
        "intermediate_size": 4 * config.n_embd if config.n_inner is None else config.n_inner,
    }


FAMILY = Family(
    "GPT2Config",
    GPT2Config,
    take,
    layers,
    forward,
    head,
    requires={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "reorder_and_upcast_attn": (False, True),  # of the precision of a product that is float32 here
    },
    read_ropes=no_ropes,
    old_fields=("layer_norm_epsilon", "n_inner"),
    sizes=sizes,
    derived_tensors=(".attn.bias", ".attn.masked_bias"),
    ends_normed=True,
)
