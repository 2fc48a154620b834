"""Experts of transformers' mixtures, in whose place this engine's grouped products are recorded.

transformers keeps the weights of all experts of a layer in one parameter. Checkpoints have a tensor for each expert
(``stored_names.py``), or that parameter as it is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compiled_llm.models.fallback.attention import Unsupported
from compiled_llm.models.fallback.stored_names import StoredNames
from compiled_llm.ops import weighted_sum
from compiled_llm.ops.library import define_op


def _fake_rows(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = experts.shape[0] * experts.shape[1]
    return experts.new_empty(experts.shape), experts.new_empty(rows), experts.new_empty(num_experts + 1)


def _fake_experts(
    x: Tensor, rows: Tensor | None, tokens: Tensor, starts: Tensor, index: int, out_features: int
) -> Tensor:
    return x.new_empty(tokens.shape[0], out_features)


# Ops that stand in a recorded graph, and are never run.
define_op("recorded_expert_rows(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)", fake=_fake_rows)
define_op(
    "recorded_experts(Tensor x, Tensor? rows, Tensor tokens, Tensor starts, int index, int out_features) -> Tensor",
    fake=_fake_experts,
)


class ExpertsName(NamedTuple):
    """A linear layer of all experts of a mixture.

    Attributes:
        name: of transformers' parameter for all.
        parts: names of a checkpoint's tensors whose rows it has one below the other, with "*" for the expert's number.
            Empty where a checkpoint has the parameter as it is.
        stored: the name of the parameter in such a checkpoint.
        out_features: of one part; of all, where there are none.
    """

    name: str
    parts: tuple[str, ...]
    stored: str
    num_experts: int
    out_features: int
    in_features: int


class RecordedExperts(nn.Module):
    """In the place of a mixture's experts.

    Attributes:
        top_k: experts that a token uses; known once it was called.
    """

    def __init__(self, experts: Any, index: int) -> None:
        super().__init__()
        self._of = (experts,)  # no part of the module: its parameters are taken from elsewhere
        self.index, self.top_k = index, 0
        self.num_experts, self.hidden_size, self.inner = experts.down_proj.shape

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.top_k = top_k_index.shape[1]
        ops = torch.ops.compiled_llm
        places, tokens, starts = ops.recorded_expert_rows(top_k_index.int(), self.num_experts)
        gate_up = ops.recorded_experts(hidden_states, tokens, tokens, starts, self.index, 2 * self.inner)
        hidden = self._of[0]._apply_gate(gate_up)
        y = ops.recorded_experts(hidden, None, tokens, starts, self.index + 1, self.hidden_size)
        return weighted_sum(y, places, top_k_weights.float())


def is_experts(module: nn.Module) -> bool:
    """Whether transformers knows a module as the experts of a mixture (``use_experts_implementation``)."""
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def experts_names(name: str, module: Any, stored: StoredNames) -> tuple[ExpertsName, ExpertsName]:
    """The two layers of the experts ``module``, whose ``name`` that is. ``Unsupported`` for another kind."""
    is_plain = module.has_gate and module.is_concatenated and not module.is_transposed
    if not is_plain or module.has_bias or module.has_post_expert_norm:
        raise Unsupported(f"experts of another kind than gated MLPs without biases ({type(module).__name__})")
    num_experts, hidden_size, inner = module.down_proj.shape
    if module.gate_up_proj.shape != (num_experts, 2 * inner, hidden_size):
        raise Unsupported(f"experts whose layers differ in size ({type(module).__name__})")

    def layer(of: str, num_parts: int, outputs: int, inputs: int) -> ExpertsName:
        own = f"{name}.{of}"
        parts = stored.of_experts(own)
        if parts is None:
            return ExpertsName(own, (), stored.of(own), num_experts, outputs, inputs)
        if len(parts) != num_parts:
            raise Unsupported(f"experts that checkpoints hold in parts of another kind ({type(module).__name__})")
        return ExpertsName(own, parts, own, num_experts, outputs // num_parts, inputs)

    return layer("gate_up_proj", 2, 2 * inner, hidden_size), layer("down_proj", 1, hidden_size, inner)
