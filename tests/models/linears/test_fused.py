"""Linear layers with what surrounds them: where they are one op, and that it computes what the single ops compute."""

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers.norm import LayerNorm
from compiled_llm.models.linears import fused
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.fused import activated_linear, added_linear, normed_linear
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import activation, add_layer_norm, add_rms_norm, gated_activation, rms_norm, scaled_sum
from compiled_llm.ops.linear.product_choices import MAX_ROWS
from compiled_llm.ops.torch_private_gpu import FakeTensorMode

EPS = 1e-6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, DELTA, NORM = drawn(3, 16), drawn(3, 16, seed=1), drawn(16, seed=2)
GATE_UP, DOWN = Dense(drawn(24, 16, seed=3) / 4, drawn(24, seed=4)), Dense(drawn(16, 12, seed=5) / 4)


@pytest.mark.parametrize("is_fused", [False, True])
def test_computes_what_the_single_ops_compute(is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_takes_what_follows", lambda linear, x, around: is_fused)
    total, normed = add_rms_norm(X, DELTA, NORM, EPS)
    want = gated_activation(GATE_UP.apply(normed), "silu")
    x, hidden = normed_linear(X, DELTA, NORM, EPS, GATE_UP, "silu")
    assert torch.equal(x, total)
    torch.testing.assert_close(hidden, want)
    x, delta = added_linear(x, DOWN, hidden)
    assert (delta is None) == is_fused
    torch.testing.assert_close(x if delta is None else x + delta, total + DOWN.apply(want))
    same, plain = normed_linear(X, None, NORM, EPS, GATE_UP)
    assert same is X
    torch.testing.assert_close(plain, GATE_UP.apply(rms_norm(X, NORM, EPS)))
    torch.testing.assert_close(activated_linear(X, GATE_UP, "gelu"), gated_activation(GATE_UP.apply(X), "gelu"))


@pytest.mark.parametrize("is_fused", [False, True])
def test_computes_what_the_single_ops_of_other_families_compute(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_takes_what_follows", lambda linear, x, around: is_fused)
    layer_norm = LayerNorm(NORM, DELTA[0])
    total, normed = add_layer_norm(X, DELTA, *layer_norm, EPS)
    x, hidden = normed_linear(X, DELTA, layer_norm, EPS, GATE_UP, "gelu", gated=False)
    torch.testing.assert_close(x, total)
    torch.testing.assert_close(hidden, activation(GATE_UP.apply(normed), "gelu"))
    # Norms of what is added: left to the next linear layer.
    x, delta = added_linear(X, DOWN, hidden[:, :12], delta_norm=NORM)
    assert x is X
    total = X + rms_norm(DOWN.apply(hidden[:, :12]), NORM, EPS)
    for norm, inputs in ((None, total), (NORM, rms_norm(total, NORM, EPS))):
        x, y = normed_linear(X, delta, norm, EPS, GATE_UP, delta_norm=NORM)
        torch.testing.assert_close(x, total)
        torch.testing.assert_close(y, GATE_UP.apply(inputs))
    scale, factor = torch.tensor([0.3]), drawn(3, 24, seed=6)
    total = scaled_sum(X, rms_norm(DELTA, NORM, EPS), scale)
    x, y = normed_linear(X, DELTA, NORM, EPS, GATE_UP, delta_norm=NORM, scale=scale)
    torch.testing.assert_close(x, total)
    torch.testing.assert_close(y, GATE_UP.apply(rms_norm(total, NORM, EPS)))
    x, y = normed_linear(X, DELTA, None, EPS, GATE_UP, "gelu", gated=False, factor=factor)
    torch.testing.assert_close(x, X + DELTA)
    torch.testing.assert_close(y, activation(GATE_UP.apply(x), "gelu") * factor)
    x, delta = added_linear(X, DOWN, hidden[:, :12], multiplier=0.5, beside=DELTA)
    assert (delta is None) == is_fused
    want = X + (DOWN.apply(hidden[:, :12]) * 0.5 + DELTA)
    torch.testing.assert_close(x if delta is None else x + delta, want)


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "exact", "expected"),
    [
        (MAX_ROWS, torch.bfloat16, "cuda", False, True),
        (1, torch.float16, "cuda", False, True),
        (MAX_ROWS + 1, torch.bfloat16, "cuda", False, False),
        (1, torch.float32, "cuda", False, False),
        (MAX_ROWS, torch.bfloat16, "cuda", True, True),
        (MAX_ROWS + 1, torch.bfloat16, "cuda", True, False),
        (1, torch.bfloat16, "cpu", False, False),
    ],
)
def test_few_rows_on_a_gpu_are_fused(rows: int, dtype: torch.dtype, device: str, exact: bool, expected: bool) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(n, 16, dtype=dtype, device=device) for n in (rows, 16))
        linear: Linear = Exact(Dense(weight)) if exact else Dense(weight)
        total, delta = added_linear(x, linear, x)
    assert (delta is None) == expected
    assert (total is x) != expected
