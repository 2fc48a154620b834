"""Mixtures of experts as linear layers, one module for each, where transformers has the weights of all in one tensor.

So statistics, folds and rounding see a layer of an expert as any other, over the tokens that were routed to it.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

# Names in checkpoints -> names of transformers' modules, with an expert's layers in the place of the tensors of all.
_NAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)


def module_name(stored: str) -> str:
    """What a tensor of a checkpoint is called among a model's modules."""
    for pattern, name in _NAMES:
        stored = pattern.sub(name, stored)
    return stored


class Expert(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, in_features: int, inner: int, act_fn: Any, device: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(in_features, inner, bias=False, device=device)
        self.up_proj = nn.Linear(in_features, inner, bias=False, device=device)
        self.down_proj = nn.Linear(inner, in_features, bias=False, device=device)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """The experts of a layer, called as transformers' module of them.

    Attributes:
        share: of the tokens that an expert sees if all see as many.
    """

    def __init__(self, count: int, in_features: int, inner: int, act_fn: Any, top_k: int, device: str = "meta") -> None:
        super().__init__(Expert(in_features, inner, act_fn, device) for _ in range(count))
        self.share = top_k / count

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """``hidden`` ``[T, D]``; ``chosen``, ``weights`` ``[T, top_k]`` -> the weighted sums ``[T, D]``."""
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                output.index_add_(0, tokens, expert(hidden[tokens]) * weights[tokens, places, None])
        return output


def split_experts(block: nn.Module, top_k: int) -> None:
    """Put ``Experts`` on the device "meta" in the place of transformers' modules of experts in a block."""
    for name, module in list(block.named_modules()):
        shapes = {own: tuple(p.shape) for own, p in module.named_parameters(recurse=False)}
        if (
            set(shapes) == {"gate_up_proj", "down_proj"}
            and len(shapes["down_proj"]) == 3
            and _computes_the_same(module)
        ):
            count, in_features, inner = shapes["down_proj"]
            owner, _, last = name.rpartition(".")
            experts = Experts(count, in_features, inner, module.act_fn, min(top_k, count))
            setattr(block.get_submodule(owner), last, experts)


def _computes_the_same(module: nn.Module) -> bool:
    """Whether transformers' module of experts, here two small ones, gives what ``Experts`` gives."""
    generator = torch.Generator().manual_seed(0)
    count, in_features, inner = 2, 16, 8
    gate_up = torch.randn(count, 2 * inner, in_features, generator=generator)
    down = torch.randn(count, in_features, inner, generator=generator)
    small, own = copy.copy(module), Experts(count, in_features, inner, getattr(module, "act_fn", None), 2, "cpu")
    small._parameters = {"gate_up_proj": nn.Parameter(gate_up), "down_proj": nn.Parameter(down)}
    small.num_experts = count  # type: ignore[assignment]
    for number in range(count):
        own.get_submodule(f"{number}.gate_proj").weight, own.get_submodule(f"{number}.up_proj").weight = map(
            nn.Parameter, gate_up[number].chunk(2)
        )
        own.get_submodule(f"{number}.down_proj").weight = nn.Parameter(down[number])
    hidden, weights = torch.randn(5, in_features, generator=generator), torch.rand(5, 2, generator=generator)
    chosen = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [0, 1]])
    try:
        with torch.no_grad():
            return torch.allclose(small(hidden, chosen, weights), own(hidden, chosen, weights), atol=1e-4, rtol=1e-4)
    except (RuntimeError, TypeError, AttributeError):  # of other shapes or arguments
        return False
