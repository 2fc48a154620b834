"""What surrounds experts: where it is one op, and that it computes what the single ops compute."""

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers.residual import Residual
from compiled_llm.models.linears import mixture
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.experts import DenseExperts
from compiled_llm.models.linears.mixture import (
    Gate,
    Routed,
    Router,
    RouterWeights,
    UsedExperts,
    gated_experts,
    routed,
    routes_at_once,
    summed_experts,
)
from compiled_llm.ops import rms_norm
from compiled_llm.ops.moe.routing import MAX_EXPERTS, MAX_ROWS
from compiled_llm.ops.torch_private_gpu import FakeTensorMode

EPS = 1e-6


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, DELTA, NORM = drawn(5, 16), drawn(5, 16, seed=9), drawn(16, seed=1)
ROUTER = Router(2, "sigmoid", 1.5, in_float32=True)
WEIGHTS = RouterWeights(
    Dense(drawn(6, 16, seed=2, dtype=torch.float32)), drawn(6, seed=3, dtype=torch.float32), torch.rand(6)
)
GATE_UP = DenseExperts(drawn(6, 24, 16, seed=4) / 4, drawn(6, 24, seed=5), 2)
DOWN = DenseExperts(drawn(6, 16, 12, seed=6) / 4, None, 2)
NUM_TOKENS = torch.tensor([4], dtype=torch.int32)


def used() -> UsedExperts:
    return UsedExperts(torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int32))


def test_computes_what_the_single_ops_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops for a GPU, here by their references, beside those of a CPU."""
    apart, together = used(), used()
    total, same_total = Residual(X, EPS), Residual(X, EPS)
    for residual in (total, same_total):
        residual.add(DELTA)
    normed, chosen = routed(total.normed(NORM), WEIGHTS, NUM_TOKENS, apart, ROUTER)
    monkeypatch.setattr(mixture, "routes_at_once", lambda *args: True)
    same, at_once = routed(same_total.normed(NORM), WEIGHTS, NUM_TOKENS, together, ROUTER)
    assert same_total.delta is None
    assert torch.equal(same_total.tensor(), total.tensor())
    torch.testing.assert_close(same, normed)
    assert torch.equal(at_once.places, chosen.places)
    torch.testing.assert_close(at_once.weights, chosen.weights)
    assert apart.total == together.total > 0
    hidden = gated_experts(X, GATE_UP, chosen, Gate("gelu_tanh"))
    beside, residual = drawn(5, 16, seed=7), drawn(5, 16, seed=8)
    plain = summed_experts(hidden, DOWN, chosen, apart)
    torch.testing.assert_close(
        summed_experts(hidden, DOWN, chosen, apart, beside, residual), residual + (plain + beside)
    )
    monkeypatch.setattr(mixture, "_sums_at_once", lambda *args: True)
    assert torch.equal(summed_experts(hidden, DOWN, chosen, apart), plain)
    torch.testing.assert_close(
        summed_experts(hidden, DOWN, chosen, apart, beside, residual), residual + (plain + beside)
    )
    assert (plain[4:] == 0).all(), "padding"


def test_a_router_may_have_a_norm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    router, weights = Router(2, "softmax_of_chosen", multiplier=0.3), WEIGHTS._replace(norm=drawn(16, seed=11))
    weights = weights._replace(linear=Dense(drawn(6, 16, seed=2)))
    plain = WEIGHTS._replace(linear=weights.linear)
    assert weights.norm is not None
    seen = rms_norm(X, weights.norm, EPS) * 0.3
    want = routed(Residual(seen, EPS).normed(None), plain, NUM_TOKENS, used(), router)[1]
    for at_once in (False, True):
        monkeypatch.setattr(mixture, "routes_at_once", lambda *args, at_once=at_once: at_once)
        x = Residual(X, EPS)
        normed, chosen = routed(x.normed(NORM), weights, NUM_TOKENS, used(), router)
        assert torch.equal(x.tensor(), X)
        torch.testing.assert_close(normed, rms_norm(X, NORM, EPS))
        assert torch.equal(chosen.places, want.places)
        torch.testing.assert_close(chosen.weights, want.weights, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "exact", "experts", "groups", "expected"),
    [
        (MAX_ROWS, torch.bfloat16, "cuda", False, MAX_EXPERTS, 1, True),
        (1, torch.float16, "cuda", False, 8, 4, True),
        (MAX_ROWS + 1, torch.bfloat16, "cuda", False, 8, 1, False),
        (1, torch.float32, "cuda", False, 8, 1, False),
        (1, torch.bfloat16, "cuda", True, 8, 1, False),
        (1, torch.bfloat16, "cuda", False, MAX_EXPERTS + 1, 1, False),
        (1, torch.bfloat16, "cuda", False, MAX_EXPERTS, 4, False),
        (1, torch.bfloat16, "cpu", False, 8, 1, False),
    ],
)
def test_few_rows_on_a_gpu_are_routed_at_once(
    rows: int, dtype: torch.dtype, device: str, exact: bool, experts: int, groups: int, expected: bool
) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(n, 16, dtype=dtype, device=device) for n in (rows, experts))
        linear = Exact(Dense(weight)) if exact else Dense(weight)
        router = Router(2, "sigmoid", groups=groups, top_groups=1)
        w = RouterWeights(linear, None, None)
        assert routes_at_once(x, w, router) == expected


@pytest.mark.parametrize(("tokens", "top_k", "expected"), [(256, 8, True), (257, 8, False), (1, 17, False)])
def test_few_tokens_on_a_gpu_are_summed_at_once(tokens: int, top_k: int, expected: bool) -> None:
    with FakeTensorMode():
        places = torch.empty(tokens, top_k, dtype=torch.int32, device="cuda")
        chosen = Routed(places, places, places, places)
        for dtype in (torch.bfloat16, torch.float32):
            hidden = torch.empty(tokens * top_k, 12, dtype=dtype, device="cuda")
            at_once = mixture._sums_at_once(DOWN, hidden, chosen)
            assert at_once == (expected and dtype == torch.bfloat16)


def test_a_gpu_gates_experts_in_their_product() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 16, dtype=torch.bfloat16, device="cuda")
        weight = torch.empty(6, 24, 16, dtype=torch.bfloat16, device="cuda")
        rows = torch.empty(6, dtype=torch.int32, device="cuda")
        chosen = Routed(rows, rows, rows, torch.empty(7, dtype=torch.int32, device="cuda"))
        gate = Gate("clamped_swiglu", 1.7, 7.0)
        assert gated_experts(x, DenseExperts(weight, None, 2), chosen, gate).shape == (6, 12)
