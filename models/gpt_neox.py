"""GPT-NeoX (Black et al., 2022, arXiv:2204.06745) and Pythia (Biderman et al., 2023, arXiv:2304.01373).

Layer norms, biases, a plain MLP beside attention, both on the same residual, and a part of each head that is turned.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.family import Family, Layers, one_partial_rope
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionSpec, AttentionWeights, attention
from compiled_llm.models.layers.mlp import mlp, plain_activation
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.layers.rope import head_arrangement, rope_cos_sin
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.llama import LayerWeights, Weights
from compiled_llm.models.sharding import by_outputs, of_heads
from compiled_llm.models.weights import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    attention_bias: bool
    hidden_act: str
    use_parallel_residual: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        plain_activation(self.hidden_act)


def _take_attention(config: GPTNeoXConfig, source: Source, name: str) -> AttentionWeights:
    d, n, h, bias = config.hidden_size, config.num_heads, config.head_dim, config.attention_bias
    turn = head_arrangement(config.ropes[0], h) or (lambda rows: rows)

    def arrange(rows: Tensor) -> Tensor:
        """From each head's query, key and value to the queries, the keys and the values of all heads."""
        q, k, v = (part.flatten(0, 1) for part in rows.unflatten(0, (n, 3, h)).unbind(1))
        return torch.cat([turn(q), turn(k), v])

    own = of_heads(config, d)
    cut = by_outputs(own, own, own)
    qkv = source.linear(StoredLinear(f"{name}.query_key_value", 3 * d, d, bias, arrange=arrange, cut=cut))
    return AttentionWeights(qkv, source.linear(StoredLinear(f"{name}.dense", d, d, bias, cut=own.inputs)))


def _take_layer(config: GPTNeoXConfig, source: Source, name: str) -> LayerWeights:
    d, intermediate = config.hidden_size, config.intermediate_size
    up, down = (f"{name}.mlp.dense_{x}" for x in ("h_to_4h", "4h_to_h"))
    return LayerWeights(
        input_norm=source.layer_norm(f"{name}.input_layernorm", d),
        attention=_take_attention(config, source, f"{name}.attention"),
        mlp_norm=source.layer_norm(f"{name}.post_attention_layernorm", d),
        mlp=source.plain_mlp(up, down, d, intermediate, bias=True),
    )


def take(config: GPTNeoXConfig, source: Source) -> Weights:
    """The weights."""
    embedding, head = source.embedding_and_head(
        "gpt_neox.embed_in", "embed_out", config.vocab_size, config.hidden_size, tied=config.tie_word_embeddings
    )
    source.may_be_called("embed_out.weight", "lm_head.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(_take_layer(config, source, f"gpt_neox.layers.{i}") for i in range(config.num_layers)),
        final_norm=source.layer_norm("gpt_neox.final_layer_norm", config.hidden_size),
        head=head,
        ropes=(source.rope(config.ropes[0], config.head_dim, config.max_position_embeddings),),
    )


def layers(config: GPTNeoXConfig) -> Layers:
    """All are alike."""
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_dim, scale=config.head_dim**-0.5)
    return (spec,) * config.num_layers


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: GPTNeoXConfig, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``, normalised; the step's keys and values go to ``kv_cache``."""
    x = Residual(weights.embedding.rows(step.input_ids), config.rms_norm_eps)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    activation = plain_activation(config.hidden_act)
    for w, spec, cache in zip(weights.layers, layers, kv_cache, strict=True):
        attended = attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        if config.use_parallel_residual:  # attention and MLP read the same
            beside = attended.tensor()
            if attended.rows is not None:
                x.keep(attended.rows)
            x += mlp(x.normed(w.mlp_norm), w.mlp, activation).plus(beside)
        else:
            x += attended
            x += mlp(x.normed(w.mlp_norm), w.mlp, activation)
    # Two additions in a row would be rounded once where they are compiled; the norm's is an op of its own.
    return x.normed(weights.final_norm).tensor()


def head(weights: Weights, rows: Tensor, config: ModelConfig) -> Tensor:
    """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
    return weights.head.apply(rows)


def sizes(config: Any) -> dict[str, Any]:
    """Every head has a key and a value of its own."""
    return {"rms_norm_eps": config.layer_norm_eps, "num_key_value_heads": config.num_attention_heads}


FAMILY = Family(
    "GPTNeoXConfig",
    GPTNeoXConfig,
    take,
    layers,
    forward,
    head,
    requires={"is_decoder": (False, True)},  # which says that it is one
    read_ropes=one_partial_rope,
    old_fields=("layer_norm_eps", "rotary_emb_base", "rotary_pct"),
    sizes=sizes,
    derived_tensors=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ends_normed=True,
)
