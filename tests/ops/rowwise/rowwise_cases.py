"""Arguments of the row-wise ops, shared by the tests of every device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KV_HEADS = 4, 2
Arguments = tuple
Case = tuple[str, Callable[[torch.dtype, int, int], Arguments]]


def numbers(rows: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return (torch.randn(rows, size, generator=generator) * scale).to(dtype)


def weight(size: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.5, 1.5, size).to(dtype)


def angles(rows: int, head_dim: int) -> Tensor:
    radians = torch.arange(rows)[:, None] * torch.linspace(0, 1, head_dim // 2)
    return torch.cat([radians.cos(), radians.sin()], dim=1)


def qkv(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return numbers(rows, (HEADS + 2 * KV_HEADS) * size, dtype)


# Each: (dtype, rows, size) -> the op's arguments. Those with as many rows are cut by row in the tests.
CASES: dict[str, Case] = {
    "norm": ("rms_norm", lambda t, r, n: (numbers(r, n, t), weight(n, t), 1e-6)),
    "norm, float32 weight": ("rms_norm", lambda t, r, n: (numbers(r, n, t), weight(n, torch.float32), 1e-6)),
    "add, norm": (
        "add_rms_norm",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), weight(n, t), 1e-5),
    ),
    "layer norm": ("layer_norm", lambda t, r, n: (numbers(r, n, t) + 2, weight(n, t), weight(n, t).flip(0), 1e-5)),
    "add, layer norm": (
        "add_layer_norm",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), weight(n, t), weight(n, t).flip(0), 1e-5),
    ),
    "gated norm of groups": (
        "gated_rms_norm",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), weight(n, t), 1e-5, n // 2, False),
    ),
    "norm of heads, gate": (
        "gated_rms_norm",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), weight(n // 2, t), 1e-5, n // 2, True),
    ),
    "rope": ("rope", lambda t, r, n: (qkv(r, n, t), angles(r, n), None, None, HEADS, KV_HEADS, 1e-6)),
    "norm, rope": (
        "rope",
        lambda t, r, n: (qkv(r, n, t), angles(r, n), weight(n, t), weight(n, t).flip(0), HEADS, KV_HEADS, 1e-6),
    ),
    "float32 norm, rope": (
        "rope",
        lambda t, r, n: (qkv(r, n, t), angles(r, n), *[weight(n, torch.float32)] * 2, HEADS, KV_HEADS, 1e-6),
    ),
    "rope, no values": ("rope", lambda t, r, n: (numbers(r, 6 * n, t), angles(r, n), None, None, 4, 2, 1e-6)),
    "norm, rope of queries alone": (
        "rope",
        lambda t, r, n: (numbers(r, 4 * n, t), angles(r, n), *[weight(n, torch.float32)] * 2, 4, 0, 1e-6),
    ),
    "silu": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 5.0), "silu")),
    "gelu_tanh": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 2.0), "gelu_tanh")),
    "gated gelu": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 2.0), "gelu")),
    "gelu alone": ("activation", lambda t, r, n: (numbers(r, n, t, 2.0), "gelu")),
    "relu2 alone": ("activation", lambda t, r, n: (numbers(r, n, t, 2.0), "relu2")),
    "gated relu2": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 2.0), "relu2")),
    "gelu_tanh alone": ("activation", lambda t, r, n: (numbers(r, n, t, 2.0), "gelu_tanh")),
    "clamped_swiglu": ("clamped_swiglu", lambda t, r, n: (numbers(r, 2 * n, t, 2.0), 1.7, 1.5)),
    "soft_cap": ("soft_cap", lambda t, r, n: (numbers(r, n, t, 40.0), 30.0)),
    "scaled_sum": (
        "scaled_sum",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), torch.tensor([0.7])),
    ),
    "sigmoid_gated": ("sigmoid_gated", lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1))),
    "sigmoid_gated, one a row": ("sigmoid_gated", lambda t, r, n: (numbers(r, n, t), numbers(r, 1, t, 3.0))),
    "log_sum_exp": ("log_sum_exp", lambda t, r, n: (numbers(r, n, t, 5.0),)),
}

# The ops that GPUs alone have, in the same form.
GPU_CASES: dict[str, Case] = {
    "norms of queries and of keys": (
        "qk_norm",
        lambda t, r, n: (numbers(r, 2 * n, t), weight(n, torch.float32), weight(n // 2, torch.float32), 1e-5),
    ),
    "sum of norms": (
        "sum_of_norms",
        lambda t, r, n: (numbers(r, n, t), weight(n, t), numbers(r, n, t, 3.0).flip(1), weight(n, t), None, None, 1e-5),
    ),
    "norm of a scaled sum": (
        "sum_of_norms",
        lambda t, r, n: (
            *(numbers(r, n, t), None, numbers(r, n, t, 3.0).flip(1), weight(n, torch.float32)),
            *(torch.tensor([0.37]), weight(n, torch.float32).flip(0), 1e-5),
        ),
    ),
}


ONES = torch.ones(2, 8)
# Calls, and what they are refused for: by the ops of a CPU, and by the functions of ``triton_rowwise``.
REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda op: op.rms_norm(ONES, torch.ones(9), 1e-6), r"rms_norm: a weight must be .*\[8\]"),
    (lambda op: op.rms_norm(ONES.double(), torch.ones(8), 1e-6), "dtype (of x )?must be float32"),
    (lambda op: op.rms_norm(torch.ones(8, 2).t(), torch.ones(8), 1e-6), "last stride 1"),
    (lambda op: op.add_rms_norm(ONES, torch.ones(1, 8), torch.ones(8), 1e-6), "delta must be like x"),
    (lambda op: op.layer_norm(ONES, torch.ones(8), torch.ones(9), 1e-6), r"layer_norm: .*\[8\]"),
    (lambda op: op.layer_norm(ONES.half(), torch.ones(8), torch.ones(8), 1e-6), "weight and bias must be of"),
    (lambda op: op.rope(torch.ones(2, 35), torch.ones(2, 6), None, None, 4, 2, 0.0), "columns or more, got 35"),
    (lambda op: op.rope(torch.ones(2, 64), torch.ones(1, 8), None, None, 4, 2, 0.0), "cos_sin must be"),
    (lambda op: op.rope(torch.ones(2, 64), torch.ones(2, 8), torch.ones(8), None, 4, 2, 0.0), "or both None"),
    (lambda op: op.gated_activation(torch.ones(2, 7), "silu"), "even number of columns"),
    (lambda op: op.gated_rms_norm(ONES, ONES, ONES[0], 1e-6, 3, True), "group_size must divide the 8 columns, got 3"),
    (lambda op: op.gated_rms_norm(ONES, ONES[:1], ONES[0], 1e-6, 4, True), "gate must be like x"),
    (lambda op: op.soft_cap(ONES, 0.0), "cap must be above 0"),
    (lambda op: op.scaled_sum(ONES, torch.ones(1, 8), torch.ones(1)), "delta must be like x"),
    (lambda op: op.scaled_sum(ONES, ONES, torch.ones(8)), r"scale must be (a contiguous )?\[1\]"),
    (lambda op: op.sigmoid_gated(ONES, ONES[:, :4]), r"gate must be \[2, 8\] or \[2, 1\] of"),
]


def extremes(op: Any, device: str = "cpu") -> None:
    """What the ops, or the functions of ``triton_rowwise``, make of infinities, NaN, zeros and huge numbers."""
    x = torch.tensor([[-1e30, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e30, float("inf")]], device=device)
    ones, nan = torch.ones_like(x), torch.tensor([[float("nan"), 1.0]], device=device)
    gated = op.gated_activation(torch.cat([x, ones], dim=1), "silu").cpu()
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0, 5e-31, 100.0, 1e30, float("inf")]])
    torch.testing.assert_close(gated, want, atol=1e-37, rtol=1e-6)  # where the exponential is not a normal number: 0
    assert op.soft_cap(x, 30.0)[0, [0, -1]].tolist() == [-30, 30]
    squares = torch.tensor([[float("-inf"), -1e30, -0.0, 3.0, float("inf")]], device=device)
    assert op.activation(squares, "relu2").tolist() == [[0.0, 0.0, 0.0, 9.0, float("inf")]]
    for call in (op.soft_cap(nan[:, :1], 30.0), op.gated_activation(nan, "silu"), op.activation(nan[:, :1], "relu2")):
        assert call.isnan().all()
    peak, log_total = op.log_sum_exp(torch.tensor([[3.0, float("-inf"), 3.0]], device=device))
    assert (peak.item(), log_total.item()) == (3, pytest.approx(0.6931472))
    assert op.rms_norm(torch.zeros_like(x), ones[0], 1e-6).eq(0).all()
    beyond = torch.tensor([[-3e38, 3e38]], dtype=torch.bfloat16, device=device)
    total, _ = op.add_rms_norm(beyond, beyond, ones[0, :2].bfloat16(), 1e-6)
    assert torch.equal(total, beyond + beyond)


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def cut(x: object, part: slice) -> object:
    """A part of the rows, of a tensor in which they lie elsewhere and farther apart; numbers and weights stay."""
    if not isinstance(x, Tensor) or x.dim() != 2:
        return x
    apart = torch.full((x.shape[0] + 1, x.shape[1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    apart[1:, 1:-2] = x
    return apart[1:, 1:-2][part]


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype, *, is_gelu: bool) -> None:
    """What an op gave, against its reference: of the arguments themselves, of float32 ones in float64."""
    # What lies next to the middle between two numbers of 16 bits may be rounded to either, once or twice.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2.1 * 2**-8, torch.float16: 2.1 * 2**-11}[dtype]
    for g, w in zip(got, want, strict=True):
        assert g.is_contiguous()
        torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=tolerance)
        if dtype != torch.float32 and g.dtype == dtype and g.numel() and not is_gelu:  # gelu's reference cancels digits
            assert (g != w).float().mean() < 0.02


def widened(x: object) -> object:
    """A float32 tensor in float64."""
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x
