"""SmoothQuant's and AWQ's scales against their formulas, and folding them into what makes the inputs."""

import pytest
import torch
from torch import nn

from compiled_llm.quantizing.folding import Fold, find_folds
from compiled_llm.quantizing.scaling import awq_scales, search, smoothing_scales


def test_smoothing_evens_out_inputs_and_weights() -> None:
    inputs, weights = torch.tensor([100.0, 1.0, 0.0]), torch.tensor([0.5, 2.0, 1.0])
    scales = smoothing_scales(inputs, weights, 0.5)
    assert torch.allclose(scales, torch.tensor([(100 / 0.5) ** 0.5, 0.5**0.5, 1.0]))
    assert torch.allclose((inputs / scales)[:2], (weights * scales)[:2])


def test_awq_scales_follow_the_inputs() -> None:
    scales = awq_scales(torch.tensor([1.0, 4.0, 16.0]), 0.5)
    assert torch.allclose(scales, torch.tensor([0.5, 1.0, 2.0]))


def test_the_first_of_equal_candidates_is_taken() -> None:
    candidates = [torch.full((1,), v) for v in (3.0, -1.0, 1.0)]
    assert search(candidates, lambda s: float(s.abs()))[0] == 1


class Norm(nn.Module):
    def __init__(self, size: int, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.linspace(0.5, 1.5, size) - offset), offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True) * (self.weight + self.offset)


class Block(nn.Module):
    """A norm, then a gated MLP; or, where ``leaks``, one that also adds the norm's output."""

    def __init__(self, offset: float = 0.0, leaks: bool = False) -> None:
        super().__init__()
        self.norm, self.leaks = Norm(16, offset), leaks
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        output = self.down_proj(nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return x + output + (normed if self.leaks else 0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_folding_changes_nothing_in_float64(offset: float) -> None:
    torch.manual_seed(0)
    block, x = Block(offset), torch.randn(5, 16)
    folds = find_folds(block, lambda: block(x))
    assert [(fold.producer, fold.offset) for fold in folds] == [("norm", offset), ("up_proj", 0.0)]
    assert folds[0].consumers == ("gate_proj", "up_proj")
    block, x = block.double(), x.double()
    before = block(x)
    for fold in folds:
        scales = fold.apply(block, torch.rand(len(fold.channels), dtype=torch.float64) + 0.5, torch.float64)
        assert not torch.equal(scales, torch.ones_like(scales))
    assert torch.allclose(block(x), before, rtol=0, atol=1e-6)  # a norm's weights pass through float32


def test_a_norm_whose_output_goes_elsewhere_is_left() -> None:
    torch.manual_seed(0)
    block, x = Block(leaks=True), torch.randn(5, 16)
    state = {name: value.clone() for name, value in block.state_dict().items()}
    assert [fold.producer for fold in find_folds(block, lambda: block(x))] == ["up_proj"]
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


def test_a_norm_rounded_to_bfloat16_gives_the_scales_that_it_stands_for() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, 16)
    block.norm.weight.data = block.norm.weight.data.bfloat16().float()
    before = block(x)
    Fold("norm", ("gate_proj", "up_proj"), torch.arange(16)).apply(block, torch.rand(16) + 0.5, torch.bfloat16)
    assert torch.equal(block.norm.weight, block.norm.weight.bfloat16().float())
    assert torch.allclose(block(x), before, atol=1e-5)


def test_inputs_that_share_an_output_get_one_scale() -> None:
    fold = Fold("v", ("o",), torch.tensor([0, 1, 0, 1]))
    assert fold.tied(torch.tensor([1.0, 2.0, 5.0, 1.0])).tolist() == [5.0, 2.0, 5.0, 2.0]
