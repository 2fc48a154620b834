"""Multi-token prediction: a layer that guesses the token after the next (DeepSeek-AI, 2024, arXiv:2412.19437).

Row p takes the model's hidden state of token p, behind its final norm, and the embedding of token p + 1. The norms of
both go side by side through a projection, then through an ordinary layer of the family, whose key lies in the slot of
token p. Behind a norm of its own it is what the model's head makes the logits of token p + 2 of; and what the next row
takes in the place of the model's hidden state, where there is none yet. So do SGLang and transformers for all these
families, and vLLM but for GLM-4.5, whose row takes what is before that norm.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, StepInput
from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.linears.fused import activated_linear
from compiled_llm.models.linears.protocol import Linear, StoredLinear
from compiled_llm.models.weights import ModelWeights, Source

C = TypeVar("C", bound=ModelConfig)
W = TypeVar("W", bound=ModelWeights)


class MtpWeights(NamedTuple):
    embedding: Linear  # [V, D], the model's
    embedding_norm: Tensor  # [D]
    hidden_norm: Tensor  # [D]
    projection: Linear  # [D, 2 * D], of the embedding and the hidden state
    layers: tuple[Any, ...]  # one, as those of the family
    norm: Tensor  # [D], of what the head takes
    head: Linear  # [V, D], the model's
    ropes: tuple[Tensor, ...]  # the model's


@dataclasses.dataclass(frozen=True)
class Mtp(Generic[C, W]):
    """What a family says of its layer that guesses.

    Attributes:
        field: of ``config.json``: how many such layers a checkpoint has.
        name: what the names of all its tensors begin with.
        take: (config, source, the model's weights) -> weights. Embedding and head are the model's.
        one_layer: config -> that of a model of this layer alone: its KV cache follows from it.
        through_layers: what the family's ``forward`` does between embedding and head.
    """

    field: str
    name: Callable[[C], str]
    take: Callable[[C, Source, W], MtpWeights]
    through_layers: Callable[..., Residual]
    one_layer: Callable[[C], C] = lambda config: dataclasses.replace(config, num_layers=1)

    def forward(
        self, weights: MtpWeights, step: StepInput, features: Tensor, kv_cache: KVCache, config: C, layers: Any
    ) -> Tensor:
        """What ``head`` takes and what may be the features of the next row, ``[T, D]``; keys go to ``kv_cache``.

        Args:
            step: of each row, the token that follows that of its position, and the slot of its position.
            features: ``[T, D]``: of the model (``features_of``), or what this function gave.
            config: of ``one_layer``.
        """
        eps = config.rms_norm_eps
        embedded = ops.rms_norm(weights.embedding.rows(step.input_ids), weights.embedding_norm, eps)
        both = torch.cat((embedded, ops.rms_norm(features, weights.hidden_norm, eps)), dim=-1)
        x = Residual(activated_linear(both, weights.projection), eps)
        return self.through_layers(x, weights, step, kv_cache, config, layers).normed(weights.norm).tensor()

    @staticmethod
    def head(weights: MtpWeights, rows: Tensor, config: C) -> Tensor:
        """Logits ``[R, V]`` of rows ``[R, D]`` of what ``forward`` gave."""
        return activated_linear(rows, weights.head)

    @staticmethod
    def features_of(weights: Any, hidden: Tensor, config: C) -> Tensor:
        """The features ``[T, D]`` of what the model's ``forward`` gave; ``weights``: the model's."""
        return Residual(hidden, config.rms_norm_eps).normed(weights.final_norm).tensor()


def num_mtp_layers(full: Any, *fields: str) -> dict[str, int]:
    """``Family.sizes`` of the first of ``fields`` that transformers' config has; without them the files tell."""
    return {"num_mtp_layers": next((getattr(full, name) or 0 for name in fields if hasattr(full, name)), 1)}


def take_numbered_layer(
    config: Any, source: Source, model: Any, take_layer: Callable[[Any, Source, str], Any]
) -> MtpWeights:
    """The layer behind the last in number. Checkpoints may hold the model's embedding and head once more in it."""
    d, name = config.hidden_size, numbered_layer(config)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    source.may_repeat[f"{name}.embed_tokens.weight"] = "model.embed_tokens.weight"
    source.may_repeat[f"{name}.shared_head.head.weight"] = f"{head}.weight"
    return MtpWeights(
        embedding=model.embedding,
        embedding_norm=source.norm(f"{name}.enorm", d),
        hidden_norm=source.norm(f"{name}.hnorm", d),
        projection=source.linear(StoredLinear(f"{name}.eh_proj", d, 2 * d)),
        layers=(take_layer(config, source, name),),
        norm=source.norm(f"{name}.shared_head.norm", d),
        head=model.head,
        ropes=model.ropes,
    )


def numbered_layer(config: Any) -> str:
    """``Mtp.name`` of that layer."""
    return f"model.layers.{config.num_layers}"
