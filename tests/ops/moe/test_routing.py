"""Routing and the sum of the experts: the kernels against the references, and the references against plain loops."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm.ops import native
from compiled_llm.ops.moe import routing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTERS = {  # scoring, choice bias, scale, groups, top groups
    "softmax": ("softmax", False, 1.0, 1, 1),
    "chosen": ("softmax_of_chosen", False, 1.0, 1, 1),
    "sigmoid": ("sigmoid", True, 2.5, 1, 1),
    "groups": ("sigmoid", True, 1.5, 4, 2),
    "groups by their best": ("softmax", False, 1.5, 4, 2),
}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if native.load("rowwise_cpu") is None:
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)


def arguments(name: str, dtype: torch.dtype, tokens: int = 37, experts: int = 24) -> tuple:
    scoring, biased, scale, groups, top_groups = ROUTERS[name]
    bias = torch.randn(experts) / 4 if biased else None
    return torch.randn(tokens, experts).to(dtype), bias, 3, scoring, scale, groups, top_groups


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTERS)
def test_route_is_the_reference(name: str, dtype: torch.dtype) -> None:
    args = arguments(name, dtype)
    weights, experts = routing.route(*args)
    expected_weights, expected = routing.route_reference(*args)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    if dtype == torch.bfloat16:
        torch.library.opcheck(torch.ops.compiled_llm.route.default, args)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_is_routed_the_same_in_any_company(name: str) -> None:
    logits, *others = arguments(name, torch.bfloat16, tokens=100)
    weights, experts = routing.route(logits, *others)
    for row in (0, 41, 99):
        alone_weights, alone = routing.route(logits[row : row + 1], *others)
        assert torch.equal(alone, experts[row : row + 1])
        assert torch.equal(alone_weights, weights[row : row + 1])


def test_the_bias_is_for_the_choice_alone() -> None:
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0])
    weights, experts = routing.route(torch.tensor([[1.0, 2.0, -3.0, 0.0]]), bias, 2, "sigmoid")
    assert experts.tolist() == [[2, 1]]
    scores = torch.tensor([-3.0, 2.0]).sigmoid()
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_experts_are_of_the_best_groups() -> None:
    """Group 0 has the largest score, group 1 the largest sum of two."""
    logits = torch.tensor([[3.0, -9.0, -9.0, 1.9, 1.8, -9.0, 0.0, 0.0, 0.0]])
    assert routing.route(logits, None, 2, "sigmoid", groups=3, top_groups=1)[1].tolist() == [[3, 4]]
    assert routing.route(logits, None, 2, "sigmoid", groups=1, top_groups=1)[1].tolist() == [[0, 3]]
    assert routing.route(logits, None, 2, "softmax", groups=3, top_groups=1)[1].tolist() == [[0, 1]]


def test_equal_scores_go_to_the_lower_number() -> None:
    for function in (routing.route, routing.route_reference):
        _, experts = function(torch.zeros(2, 9), None, 4, "softmax", 1.0, 1, 1)
        assert experts.tolist() == [[0, 1, 2, 3]] * 2


def test_logits_that_are_not_numbers_still_choose_experts() -> None:
    logits = torch.tensor([[float("nan")] * 5, [float("-inf")] * 5, [float("inf"), 0, 1, float("nan"), 2]])
    _, experts = routing.route(logits, None, 3, "softmax")
    for row in experts.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(5))


@pytest.mark.parametrize("real", [0, 1, 20, 37])
def test_rows_lie_by_expert(real: int) -> None:
    experts = routing.route(*arguments("groups", torch.float32))[1]
    num_tokens = torch.tensor([real], dtype=torch.int32)
    used, expected_used = torch.tensor([100]), torch.tensor([100])
    places, tokens, starts = routing.expert_rows(experts, num_tokens, used, 24)
    expected = routing.expert_rows_reference(experts, num_tokens, expected_used, 24)
    for one, other in zip((places, tokens, starts), expected, strict=True):
        assert torch.equal(one, other)
    assert used == expected_used == 100 + len(experts[:real].unique())
    assert starts[0] == 0
    assert starts[-1] == 3 * real
    assert (places[real:] == -1).all()
    for token in range(real):
        for choice in range(3):
            place, expert = places[token, choice], experts[token, choice]
            assert starts[expert] <= place < starts[expert + 1]
            assert tokens[place] == token
    args = (experts, num_tokens, used, 24)
    torch.library.opcheck(torch.ops.compiled_llm.expert_rows.default, args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 50])
def test_weighted_sum(size: int, dtype: torch.dtype) -> None:
    y, weights = torch.randn(30, size).to(dtype), torch.rand(10, 3)
    places = torch.randperm(30).int().view(10, 3)
    places[7:] = -1
    exact = (weights[:, :, None].double() * y.double()[places.clamp(min=0)]).sum(1)
    exact[7:] = 0
    y[places[:7].flatten().bincount(minlength=30) == 0] = float("nan")  # rows of nobody
    for out in (routing.weighted_sum(y, places, weights), routing.weighted_sum_reference(y, places, weights)):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(
        routing.weighted_sum(y, places[3:4], weights[3:4]), routing.weighted_sum(y, places, weights)[3:4]
    )
    if size == 50 and dtype == torch.bfloat16:
        torch.library.opcheck(torch.ops.compiled_llm.weighted_sum.default, (y[:, :], places, weights))


class _Kernels(TorchDispatchMode):
    """Counts what torch launches for code that runs on "meta", and sees that no tensor is made anywhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            assert not isinstance(tensor, Tensor) or tensor.is_meta, f"{func} makes a tensor on the host"
        self.count += not func.is_view and "empty" not in str(func)
        return made


@pytest.mark.parametrize("name", ROUTERS)
def test_a_gpu_is_asked_for_no_number(name: str) -> None:
    """What CUDA runs for these two alone: no shape follows from data, and nothing waits for the device."""
    logits, bias, _, scoring, scale, groups, top_groups = arguments(name, torch.bfloat16, experts=128)
    meta = torch.device("meta")
    with _Kernels() as routed:
        weights, experts = routing.route_reference(
            logits.to(meta), None if bias is None else bias.to(meta), 8, scoring, scale, groups, top_groups
        )
    with _Kernels() as sorted_by_expert:
        real, used = torch.empty(1, dtype=torch.int32, device=meta), torch.empty(1, dtype=torch.int64, device=meta)
        places, tokens, starts = routing.expert_rows_reference(experts, real, used, 128)
    assert [t.shape for t in (weights, experts, places, tokens, starts)] == [*[(37, 8)] * 3, (37 * 8,), (129,)]
    assert [t.dtype for t in (weights, experts, places, tokens, starts)] == [torch.float32, *[torch.int32] * 4]
    assert routed.count <= 23
    assert sorted_by_expert.count <= 18


def refused(function: object, *args: object) -> str:
    with pytest.raises((ValueError, IndexError)) as error:
        function(*args)  # type: ignore[operator]
    return str(error.value)


def test_what_is_refused() -> None:
    logits, ops = torch.randn(4, 6), torch.ops.compiled_llm
    assert "dtype must be float32" in refused(ops.route, logits.double(), None, 2, "softmax", 1.0, 1, 1)
    assert "scoring must be" in refused(ops.route, logits, None, 2, "relu", 1.0, 1, 1)
    for top_k, groups, top_groups in ((7, 1, 1), (0, 1, 1), (2, 4, 1), (3, 3, 1), (2, 3, 4)):
        assert "top_k must be" in refused(ops.route, logits, None, top_k, "sigmoid", 1.0, groups, top_groups)
    assert "choice_bias must be" in refused(ops.route, logits, torch.randn(5), 2, "sigmoid", 1.0, 1, 1)
    experts: Tensor = torch.tensor([[0, 9]], dtype=torch.int32)
    one, used = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    assert "experts must be from 0 to 5" in refused(ops.expert_rows, experts, one, used, 6)
    assert "num_tokens must be from 0 to 1" in refused(ops.expert_rows, experts, 2 * one, used, 10)
    assert "used must be" in refused(ops.expert_rows, experts, one, one, 10)
    assert "places must be from" in refused(ops.weighted_sum, logits, experts, torch.rand(1, 2))
