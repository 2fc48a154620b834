"""The residual stream: its sums and norms are those of the single ops, also where a product takes them in."""

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers import residual
from compiled_llm.models.layers.residual import BlockOutput, LayerNorm, Residual
from compiled_llm.models.linears import fused
from compiled_llm.models.linears.dense import Dense
from compiled_llm.ops import activation, add_layer_norm, add_rms_norm, gated_activation, rms_norm, scaled_sum

EPS = 1e-6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, DELTA, NORM = drawn(3, 16), drawn(3, 16, seed=1), drawn(16, seed=2)
GATE_UP, DOWN = Dense(drawn(24, 16, seed=3) / 4, drawn(24, seed=4)), Dense(drawn(16, 12, seed=5) / 4)


def stream(norm: Tensor | None = None) -> Residual:
    """``X`` with ``DELTA`` still to be added."""
    x = Residual(X, EPS)
    x.add(DELTA, norm)
    return x


@pytest.fixture(params=[False, True], ids=["single", "fused"])
def is_fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for module in (fused, residual):
        monkeypatch.setattr(module, "takes_what_follows", lambda linear, x, around: request.param)
    return bool(request.param)


def test_a_layer_computes_what_the_single_ops_compute(is_fused: bool) -> None:
    total, normed = add_rms_norm(X, DELTA, NORM, EPS)
    want = gated_activation(GATE_UP.apply(normed), "silu")
    x = stream()
    hidden = x.normed(NORM).linear(GATE_UP, "silu")
    assert torch.equal(x.tensor(), total)
    torch.testing.assert_close(hidden, want)
    x += BlockOutput(hidden, DOWN)
    assert (x.delta is None) == is_fused
    torch.testing.assert_close(x.tensor(), total + DOWN.apply(want))
    assert x.delta is None
    first = Residual(X, EPS)
    torch.testing.assert_close(first.normed(NORM).linear(GATE_UP), GATE_UP.apply(rms_norm(X, NORM, EPS)))
    assert first.tensor() is X


def test_layer_norms_and_plain_activations(is_fused: bool) -> None:
    layer_norm = LayerNorm(NORM, DELTA[0])
    total, normed = add_layer_norm(X, DELTA, *layer_norm, EPS)
    x = stream()
    hidden = x.normed(layer_norm).linear(GATE_UP, "gelu", gated=False)
    torch.testing.assert_close(x.tensor(), total)
    torch.testing.assert_close(hidden, activation(GATE_UP.apply(normed), "gelu"))


@pytest.mark.parametrize("norm", [None, NORM], ids=["itself", "norm"])
def test_a_norm_of_what_is_added_is_left_to_the_next_norm(norm: Tensor | None, is_fused: bool) -> None:
    x = Residual(X, EPS)
    x += BlockOutput(DELTA[:, :12], DOWN).normed(NORM)
    assert x.delta is not None
    total = X + rms_norm(DOWN.apply(DELTA[:, :12]), NORM, EPS)
    y = x.normed(norm).linear(GATE_UP)
    torch.testing.assert_close(x.tensor(), total)
    torch.testing.assert_close(y, GATE_UP.apply(total if norm is None else rms_norm(total, norm, EPS)))


def test_a_scaled_sum_and_a_factor(is_fused: bool) -> None:
    total = scaled_sum(X, rms_norm(DELTA, NORM, EPS), torch.tensor([0.3]))
    x = stream(NORM)
    x.multiply(torch.tensor([0.3]))
    y = x.normed(NORM).linear(GATE_UP)
    torch.testing.assert_close(x.tensor(), total)
    torch.testing.assert_close(y, GATE_UP.apply(rms_norm(total, NORM, EPS)))
    factor = drawn(3, 24, seed=6)
    y = stream().normed(None).linear(GATE_UP, "gelu", gated=False, factor=factor)
    torch.testing.assert_close(y, activation(GATE_UP.apply(X + DELTA), "gelu") * factor)


def test_a_multiplier_and_what_is_beside(is_fused: bool) -> None:
    x = Residual(X, EPS)
    x += (BlockOutput(DELTA[:, :12], DOWN) * 0.5).plus(DELTA)
    assert (x.delta is None) == is_fused
    torch.testing.assert_close(x.tensor(), X + (DOWN.apply(DELTA[:, :12]) * 0.5 + DELTA))
