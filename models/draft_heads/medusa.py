"""Medusa: heads that each guess one of the next tokens from the model's last hidden state, all at once.

Cai et al., 2024 (arXiv:2401.10774). Head j is some blocks ``x + SiLU(W x + b)``, and a matrix that makes logits.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads.family import HeadFamily, checked_ids
from compiled_llm.models.family import Layers
from compiled_llm.models.layers.residual import Norm, Residual
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.weights import Source
from compiled_llm.ops import scaled_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig(ModelConfig):
    """Of the heads; the sizes of ``ModelConfig`` are the model's.

    Attributes:
        block_names: of each head, what its blocks are called.
        head_names: what the matrices are called that make logits; none: the model's own head makes them.
        draft_vocab_size: rows of these; where they are fewer than the model's tokens, ``token_map`` says of which.
        bias: whether blocks have one.
        is_normed: whether the model's hidden states come normalised already.
    """

    block_names: tuple[tuple[str, ...], ...]
    head_names: tuple[str, ...]
    draft_vocab_size: int
    bias: bool
    is_normed: bool


class Weights(NamedTuple):
    embedding: None
    layers: tuple[tuple[Linear, ...], ...]  # of each head its blocks, [D, D]
    heads: tuple[Linear, ...]  # [draft_vocab_size, D] each; one: all have it; none: ``head``
    token_ids: Tensor | None  # [draft_vocab_size] int64, of their outputs; None: those of the model
    one: Tensor  # [1] float32
    head: Linear | None = None  # [V, D], the model's own
    final_norm: Norm | None = None  # the model's own
    ropes: tuple[Tensor, ...] = ()


def take(config: MedusaConfig, source: Source) -> Weights:
    """The weights."""
    d, size = config.hidden_size, config.draft_vocab_size
    token_ids = None
    if size != config.vocab_size:
        token_ids = checked_ids("token_map", source.tensor("token_map", (size,), dtype=torch.int64), config.vocab_size)
    return Weights(
        None,
        tuple(tuple(source.linear(StoredLinear(x, d, d, config.bias)) for x in names) for names in config.block_names),
        tuple(source.linear(StoredLinear(name, size, d, role="head")) for name in config.head_names),
        token_ids,
        source.constant(1),
    )


def layers(config: MedusaConfig) -> Layers:
    """None has a cache."""
    return ()


def share(weights: Weights, target: Any) -> Weights:
    """``weights`` with what is the model's."""
    return weights._replace(head=target.head, final_norm=target.final_norm)


def features(weights: Weights, hidden: Tensor, config: MedusaConfig) -> Tensor:
    """What all heads read, ``[R, D]``: the model's hidden states behind its last norm."""
    return hidden if config.is_normed else Residual(hidden, config.rms_norm_eps).normed(weights.final_norm).tensor()


def logits_of(weights: Weights, count: int, x: Tensor, config: MedusaConfig) -> list[Tensor]:
    """Logits ``[R, V]`` of each of the first ``count`` heads; of tokens that they cannot draft, minus infinity."""
    rows = [_behind_blocks(weights.layers[number], x, weights.one) for number in range(count)]
    if len(weights.heads) > 1:
        found = [head.apply(own) for head, own in zip(weights.heads, rows, strict=False)]
    else:  # one matrix for all, which is read once
        head = weights.heads[0] if weights.heads else weights.head
        assert head is not None
        logits = head.apply(torch.cat(rows))
        found = [logits.narrow(0, number * x.shape[0], x.shape[0]) for number in range(count)]
    if weights.token_ids is None:
        return found
    every = found[0].new_full((x.shape[0], config.vocab_size), float("-inf"))
    return [every.index_copy(1, weights.token_ids, logits) for logits in found]


def _behind_blocks(blocks: tuple[Linear, ...], x: Tensor, one: Tensor) -> Tensor:
    for block in blocks:
        y = activated_linear(x, block, "silu", gated=False)
        # On a CPU an op: so products, activations and sums of all blocks are one native program.
        x = x + y if x.is_cuda else scaled_sum(x, y, one)
    return x


def _no_forward(*arguments: Any) -> Tensor:
    raise AssertionError("its heads are not run one after another")


FAMILY: HeadFamily[Any, Any] = HeadFamily(
    "LlamaConfig",
    MedusaConfig,
    take,
    layers,
    _no_forward,
    _no_forward,
    feature_size=lambda config: 0,
    features=features,
    share=share,
)
