"""What steps have to read, write and multiply, by arithmetic alone; and how long that takes at a machine's limits.

What is counted is what no implementation can leave out:

- read: all weights once a step, of the embedding only the rows of the step's tokens, of a mixture only the experts that
  a token uses, of the head all rows if the step samples; the keys and values (and scales) of each request's context,
  its new tokens included; of layers with a state, each request's.
- written: keys and values of the step's tokens, and the states.
- floating-point operations, a multiply-add is two: the linear layers for each token, attention for each pair of a query
  and a key that it sees, a recurrence (three for each element of a state) for each token; for each row that is sampled
  from the head, and an output layer and an MLP behind the last attention. Latent attention is counted over latents, as
  it is computed; in a long prompt heads' own keys and values would take fewer.

Padding, activations, norms and softmax count nothing: what they cost is a distance to the limit.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.last_rows import last_layers
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.protocol import GroupedLinear, Linear
from compiled_llm.models.registry import attention_layers, layers_of
from compiled_llm.models.weights import bytes_to_read, experts, linear_layers


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What one step, or several added up, had to do.

    Attributes:
        num_steps: steps; ``num_head_steps`` of them sampled at least one token.
        num_tokens: tokens computed, padding not counted.
        num_logits: rows that were sampled from.
        num_keys: over all requests of a step, tokens of the context, the new ones included.
        num_pairs: over all tokens, keys that they see.
        num_experts: experts that some token used, over all layers.
        in_windows: ``num_keys`` and ``num_pairs`` in layers with a sliding window, for each of the model's windows.
        num_states: states read and written: of each request in a step one, and another where tokens come before.
    """

    num_steps: float = 0
    num_head_steps: float = 0
    num_tokens: float = 0
    num_logits: float = 0
    num_keys: float = 0
    num_pairs: float = 0
    num_experts: float = 0
    in_windows: tuple[tuple[float, float], ...] = ()
    num_states: float = 0

    @classmethod
    def of(cls, requests: list[tuple[int, int]], windows: Sequence[int] = (), num_experts: float = 0) -> "StepWork":
        """One step in which each request runs ``count`` tokens after ``computed`` ones; each samples a token.

        Args:
            requests: (computed, count) of each: (99, 1) decodes with a context of 100, (0, 512) is a prompt of 512.
            windows: the model's, see ``windows_of``.
            num_experts: see ``StepWork``.
        """
        return cls(
            num_steps=1,
            num_head_steps=1 if requests else 0,
            num_tokens=sum(count for _, count in requests),
            num_logits=len(requests),
            num_keys=sum(computed + count for computed, count in requests),
            num_pairs=sum(num_pairs(computed, count) for computed, count in requests),
            num_experts=num_experts,
            in_windows=tuple(work_in_window(window, requests) for window in windows),
            num_states=sum(1 + (computed > 0) for computed, _ in requests),
        )


def num_pairs(computed: int, count: int) -> int:
    """Pairs of a query and a key that it sees, where ``count`` tokens run after ``computed`` ones."""
    return count * computed + count * (count + 1) // 2


def work_in_window(window: int, requests: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Keys and pairs as in ``StepWork``, where a query sees ``window`` keys at most, itself included."""
    keys = pairs = 0
    for computed, count in requests:
        seeing_all = min(max(window - computed, 0), count)  # queries that the window hides nothing from
        keys += min(computed, window - 1) + count
        pairs += num_pairs(computed, seeing_all) + (count - seeing_all) * window
    return keys, pairs


def windows_of(config: ModelConfig) -> tuple[int, ...]:
    """The sliding windows of a model's layers, each once."""
    return tuple(sorted({layer.window for layer in attention_layers(layers_of(config))} - {0}))


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """What a model makes of each unit of ``StepWork``: bytes, and floating-point operations.

    Attributes:
        expert_bytes: of one expert, on average.
        last_flops_per_row: of a row of logits, by the layers behind the last attention.
        state_bytes: of one request's states in all layers that keep some.
        windows: the sizes of sliding windows that its layers have.
        per_key: bytes that are read for a key, and operations of a pair: first in all layers without a window, then in
            all layers of each window.
    """

    weight_bytes_per_step: int
    head_bytes_per_step: int
    embedding_bytes_per_token: int
    kv_bytes_per_token: int
    expert_bytes: float
    linear_flops_per_token: int
    head_flops_per_row: int
    last_flops_per_row: int
    windows: tuple[int, ...]
    per_key: tuple[tuple[int, int], ...]
    state_bytes: int = 0
    state_flops_per_token: int = 0

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Any, kv_bytes_per_token: Sequence[int], state_bytes: int = 0
    ) -> "ModelWork":
        """The work of a model with the weights tuple ``weights``, as it was loaded or as its family describes it.

        ``kv_bytes_per_token``: of each layer's cache; ``state_bytes``: of a slot.
        """
        windows = windows_of(config)
        per_key = dict.fromkeys((0, *windows), (0, 0))
        state_flops = 0
        for layer, own in zip(layers_of(config), kv_bytes_per_token, strict=True):
            if isinstance(layer, StateSpec):
                state_flops += 6 * math.prod(layer.recurrent or (0,))
                continue
            key_bytes = own if layer.shares_cache_of is None else kv_bytes_per_token[layer.shares_cache_of]
            num_bytes, flops = per_key[layer.window]
            per_key[layer.window] = num_bytes + key_bytes, flops + layer.flops_per_pair
        # The embeddings and the tables of positions are not read whole.
        rows = ("embedding", "per_layer_embedding", "head", "positions", "ropes")
        read = [getattr(weights, name) for name in weights._fields if name not in rows]
        positions = getattr(weights, "positions", None)  # of families that learn a vector for each
        tables = [weights.embedding, getattr(weights, "per_layer_embedding", None)]
        row_bytes = sum(table.nbytes // table.out_features for table in tables if table is not None)
        # What follows the last attention need only be computed where logits are wanted.
        last = last_layers(weights)
        last_flops = 0 if last is None else sum(map(_flops_per_row, linear_layers(last)))
        return cls(
            weight_bytes_per_step=sum(map(bytes_to_read, read)),
            head_bytes_per_step=bytes_to_read(weights.head),
            embedding_bytes_per_token=row_bytes + (0 if positions is None else positions[0].nbytes),
            kv_bytes_per_token=sum(kv_bytes_per_token),
            expert_bytes=_expert_bytes(experts(weights)),
            linear_flops_per_token=sum(map(_flops_per_row, linear_layers(tuple(read)))) - last_flops,
            head_flops_per_row=_flops_per_row(weights.head),
            last_flops_per_row=last_flops,
            windows=windows,
            per_key=tuple(per_key.values()),
            state_bytes=state_bytes,
            state_flops_per_token=state_flops,
        )

    def bytes(self, work: StepWork) -> float:
        """Bytes of memory that ``work`` has to read and write."""
        return (
            work.num_steps * self.weight_bytes_per_step
            + work.num_head_steps * self.head_bytes_per_step
            + work.num_experts * self.expert_bytes
            + work.num_tokens * self.embedding_bytes_per_token
            + work.num_tokens * self.kv_bytes_per_token
            + work.num_states * self.state_bytes
            + sum(keys * num_bytes for (keys, _), (num_bytes, _) in self._attention(work))
        )

    def flops(self, work: StepWork) -> float:
        """Floating-point operations that ``work`` has to do."""
        return (
            work.num_tokens * (self.linear_flops_per_token + self.state_flops_per_token)
            + work.num_logits * (self.head_flops_per_row + self.last_flops_per_row)
            + sum(pairs * flops for (_, pairs), (_, flops) in self._attention(work))
        )

    def _attention(self, work: StepWork) -> Iterable[tuple[tuple[float, float], tuple[int, int]]]:
        return zip(((work.num_keys, work.num_pairs), *work.in_windows), self.per_key, strict=True)

    def seconds(self, work: StepWork, bytes_per_second: float, flops_per_second: float) -> float:
        """Least seconds for steps that are all alike: their bytes or their operations, whichever take longer."""
        return max(self.bytes(work) / bytes_per_second, self.flops(work) / flops_per_second)


def _flops_per_row(linear: Linear | GroupedLinear) -> int:
    return 2 * linear.in_features * linear.out_features * (linear.top_k if isinstance(linear, GroupedLinear) else 1)


def _expert_bytes(layers: Sequence[GroupedLinear]) -> float:
    """An expert has two layers: into its inner size, and out of it."""
    return sum(layer.nbytes for layer in layers) / max(1, sum(layer.num_experts for layer in layers) / 2)
