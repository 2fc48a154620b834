"""What steps have to read, write and multiply, by arithmetic alone; and how long that takes at a machine's limits.

What is counted is what no implementation can leave out:

- read: all weights once a step, of the embedding only the rows of the step's tokens, of the head all rows if the step
  samples; the keys and values (and scales) of each request's context, its new tokens included.
- written: keys and values of the step's tokens.
- floating-point operations, a multiply-add is two: the linear layers for each token, attention for each pair of a query
  and a key that it sees, the head for each row that is sampled from.

Padding, activations, norms and softmax count nothing: what they cost is a distance to the limit.
"""

import dataclasses

import torch

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import Linear, LinearKind
from compiled_llm.models.registry import family
from compiled_llm.models.weights import bytes_to_read, linears


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one step, or several added up, had to do.

    Attributes:
        num_steps: steps; ``num_head_steps`` of them sampled at least one token.
        num_tokens: tokens computed, padding not counted.
        num_logits: rows that were sampled from.
        num_keys: over all requests of a step, tokens of the context, the new ones included.
        num_pairs: over all tokens, keys that they see.
    """

    num_steps: float = 0
    num_head_steps: float = 0
    num_tokens: float = 0
    num_logits: float = 0
    num_keys: float = 0
    num_pairs: float = 0

    @classmethod
    def of(cls, requests: list[tuple[int, int]]) -> "StepWork":
        """One step in which each request runs ``count`` tokens behind ``computed`` ones; each samples a token.

        Args:
            requests: (computed, count) of each: (99, 1) decodes with a context of 100, (0, 512) is a prompt of 512.
        """
        return cls(
            num_steps=1,
            num_head_steps=1 if requests else 0,
            num_tokens=sum(count for _, count in requests),
            num_logits=len(requests),
            num_keys=sum(computed + count for computed, count in requests),
            num_pairs=sum(num_pairs(computed, count) for computed, count in requests),
        )


def num_pairs(computed: int, count: int) -> int:
    """Pairs of a query and a key that it sees, where ``count`` tokens run behind ``computed`` ones."""
    return count * computed + count * (count + 1) // 2


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """What a model makes of each unit of ``StepWork``: bytes, and floating-point operations."""

    weight_bytes_per_step: int
    head_bytes_per_step: int
    embedding_bytes_per_token: int
    kv_bytes_per_token: int
    linear_flops_per_token: int
    head_flops_per_row: int
    attention_flops_per_pair: int

    @classmethod
    def of(
        cls, config: ModelConfig, dtype: torch.dtype, kv_bytes_per_token: int, kind: LinearKind = Dense
    ) -> "ModelWork":
        """Of a model in ``dtype`` with linears of ``kind``, whose cache takes ``kv_bytes_per_token`` in all layers."""
        model = family(config.architecture)
        _, weights = model.describe(config, dtype, kind)
        # The embedding and the tables of rotary embeddings are not read whole.
        read = [getattr(weights, name) for name in weights._fields if name not in ("embedding", "head", "ropes")]
        return cls(
            weight_bytes_per_step=sum(map(bytes_to_read, read)),
            head_bytes_per_step=bytes_to_read(weights.head),
            embedding_bytes_per_token=weights.embedding.nbytes // weights.embedding.out_features,
            kv_bytes_per_token=kv_bytes_per_token,
            linear_flops_per_token=sum(_flops_per_row(linear) for part in read for linear in linears(part)),
            head_flops_per_row=_flops_per_row(weights.head),
            attention_flops_per_pair=sum(4 * layer.num_heads * layer.head_dim for layer in model.layers(config)),
        )

    def bytes(self, work: StepWork) -> float:
        """Bytes of memory that ``work`` has to read and write."""
        return (
            work.num_steps * self.weight_bytes_per_step
            + work.num_head_steps * self.head_bytes_per_step
            + work.num_tokens * self.embedding_bytes_per_token
            + (work.num_keys + work.num_tokens) * self.kv_bytes_per_token
        )

    def flops(self, work: StepWork) -> float:
        """Floating-point operations that ``work`` has to do."""
        return (
            work.num_tokens * self.linear_flops_per_token
            + work.num_logits * self.head_flops_per_row
            + work.num_pairs * self.attention_flops_per_pair
        )

    def seconds(self, work: StepWork, bytes_per_second: float, flops_per_second: float) -> float:
        """Least seconds for steps that are all alike: their bytes or their operations, whichever take longer."""
        return max(self.bytes(work) / bytes_per_second, self.flops(work) / flops_per_second)


def _flops_per_row(linear: Linear) -> int:
    return 2 * linear.in_features * linear.out_features
