"""EAGLE-3: one or more of Llama's layers, the first of which reads a token's embedding and the model's hidden states.

Li et al., 2025 (arXiv:2503.01840). A feature is ``fc`` of the inputs of three of the model's layers.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models import llama
from compiled_llm.models.draft_heads.family import HeadFamily, checked_ids
from compiled_llm.models.family import Layers
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.attention import AttentionWeights, attended, attention
from compiled_llm.models.layers.mlp import mlp
from compiled_llm.models.layers.residual import BlockOutput, Residual
from compiled_llm.models.layers.rope import head_arrangement, rope_cos_sin
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.llama import LayerWeights, LlamaConfig
from compiled_llm.models.weights import Source
from compiled_llm.ops import rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(LlamaConfig):
    """Of the network; ``vocab_size`` is that of its embedding, which is the model's.

    Attributes:
        draft_vocab_size: tokens that it can draft; where they are fewer, ``d2t`` says which.
        target_hidden_size: of the model.
        layer_ids: the model's layers whose inputs it reads.
        norm_before_residual: whether the residual stream begins with the norm of the feature, and not with itself.
        norm_before_fc, fc_norm: whether all that ``fc`` reads is normalised at once, or each layer's by itself.
        norm_output: whether a row's normalised output is the feature of the next, and not the output itself.
        first_layer: how the tensors of the first layer are called.
        has_embedding, has_head: whether the checkpoint has them. Else the model's serve.
    """

    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    first_layer: str = "midlayer"
    has_embedding: bool = False
    has_head: bool = True


class Weights(NamedTuple):
    embedding: Linear | None  # [V, D]
    fc: Linear  # [D, taps * target_hidden_size]
    fc_norms: tuple[Tensor, ...]  # one of all that fc reads, or one of each layer's; none
    hidden_norm: Tensor  # [D], of the feature
    layers: tuple[LayerWeights, ...]  # queries, keys and values of the first are made of [*, 2 * D]
    final_norm: Tensor  # [D]
    head: Linear | None  # [draft_vocab_size, D]
    token_ids: Tensor | None  # [draft_vocab_size] int64, of the head's outputs; None: those of the model
    ropes: tuple[Tensor, ...]


def take(config: Eagle3Config, source: Source) -> Weights:
    """The weights. The first layer's queries, keys and values read the embedding beside the feature."""
    d, width = config.hidden_size, config.target_hidden_size
    vocabulary = StoredLinear("embed_tokens", config.vocab_size, d)
    head = StoredLinear("lm_head", config.draft_vocab_size, d, role="head")
    token_ids = None
    if config.draft_vocab_size != config.vocab_size:
        offsets = source.tensor("d2t", (config.draft_vocab_size,), dtype=torch.int64)
        token_ids = offsets + torch.arange(config.draft_vocab_size, device=offsets.device)
        token_ids = checked_ids("d2t", token_ids, config.vocab_size)
    norms = {"input_norm": len(config.layer_ids) * width} if config.norm_before_fc else {}
    norms |= {f"fc_norm.{i}": width for i in range(len(config.layer_ids))} if config.fc_norm else {}
    others = [llama.take_layer(config, source, f"layers.{i}") for i in range(1, config.num_layers)]
    return Weights(
        embedding=source.table(vocabulary) if config.has_embedding else None,
        fc=source.linear(StoredLinear("fc", d, len(config.layer_ids) * width)),
        fc_norms=tuple(source.norm(name, size) for name, size in norms.items()),
        hidden_norm=source.norm(f"{config.first_layer}.hidden_norm", d),
        layers=(_take_first_layer(config, source, config.first_layer), *others),
        final_norm=source.norm("norm", d),
        head=source.linear(head) if config.has_head else None,
        token_ids=token_ids,
        ropes=tuple(source.rope(rope, config.head_dim, config.max_position_embeddings) for rope in config.ropes),
    )


def _take_first_layer(config: Eagle3Config, source: Source, name: str) -> LayerWeights:
    d, h, bias = config.hidden_size, config.head_dim, config.attention_bias
    arrange = head_arrangement(config.ropes[0], h)
    q, k, v = (
        StoredLinear(f"{name}.self_attn.{x}_proj", heads * h, 2 * d, bias, arrange=None if x == "v" else arrange)
        for x, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
    )
    o = StoredLinear(f"{name}.self_attn.o_proj", d, config.num_heads * h, bias)
    return LayerWeights(
        input_norm=source.norm(f"{name}.input_layernorm", d),
        attention=AttentionWeights(source.linear(q, k, v), source.linear(o)),
        mlp_norm=source.norm(f"{name}.post_attention_layernorm", d),
        mlp=llama.take_mlp(config, source, name),
    )


def features(weights: Weights, hidden: Tensor, config: Eagle3Config) -> Tensor:
    """``fc`` of the inputs of the model's layers, ``[T, taps * D]`` side by side."""
    norms = weights.fc_norms
    if norms:
        parts = hidden.split(hidden.shape[1] // len(norms), 1)
        pairs = zip(parts, norms, strict=True)
        hidden = torch.cat([rms_norm(part.contiguous(), norm, config.rms_norm_eps) for part, norm in pairs], 1)
    return activated_linear(hidden, weights.fc)


def forward(weights: Weights, step: StepInput, kv_cache: KVCache, config: Eagle3Config, layers: Layers) -> Tensor:
    """What ``head`` takes, ``[T, D]``, of the features of tokens and of the tokens that follow them."""
    assert weights.embedding is not None
    assert step.features is not None
    eps, first = config.rms_norm_eps, weights.layers[0]
    assert isinstance(first.input_norm, Tensor)
    cos_sin = rope_cos_sin(step.positions, weights.ropes[0])
    embedded = rms_norm(weights.embedding.rows(step.input_ids), first.input_norm, eps)
    normed = rms_norm(step.features, weights.hidden_norm, eps)
    x = Residual(normed if config.norm_before_residual else step.features, eps)
    qkv = activated_linear(torch.cat((embedded, normed), 1), first.attention.qkv)
    x += BlockOutput(attended(qkv, first.attention, cos_sin, layers[0], kv_cache[0], step, eps), first.attention.o)
    x += mlp(x.normed(first.mlp_norm), first.mlp)
    for w, spec, cache in zip(weights.layers[1:], layers[1:], kv_cache[1:], strict=True):
        x += attention(x.normed(w.input_norm), w.attention, cos_sin, spec, cache, step)
        x += mlp(x.normed(w.mlp_norm), w.mlp)
    return x.tensor()


def feed_back(weights: Weights, rows: Tensor, config: Eagle3Config) -> Tensor:
    """The features of the rows after ``rows``."""
    return rms_norm(rows, weights.final_norm, config.rms_norm_eps) if config.norm_output else rows


def head(weights: Weights, rows: Tensor, config: Eagle3Config) -> Tensor:
    """Logits ``[R, V]`` of the model's tokens; of those that the network cannot draft, minus infinity."""
    assert weights.head is not None
    logits = Residual(rows, config.rms_norm_eps).normed(weights.final_norm).linear(weights.head)
    if weights.token_ids is None:
        return logits
    every = logits.new_full((logits.shape[0], config.vocab_size), float("-inf"))
    return every.index_copy(1, weights.token_ids, logits)


FAMILY: HeadFamily[Any, Any] = HeadFamily(
    "LlamaConfig",
    Eagle3Config,
    take,
    llama.layers,
    forward,
    head,
    requires=llama.FAMILY.requires,
    derived_tensors=("rotary_emb.inv_freq", "t2d"),
    feature_size=lambda config: config.hidden_size,
    hidden_size=lambda config: len(config.layer_ids) * config.target_hidden_size,
    taps=lambda config: config.layer_ids,
    features=features,
    feed_back=feed_back,
)
