"""Row-wise ops against their references, and: a row's bits depend on nothing but the row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from compiled_llm.ops import native
from compiled_llm.ops.rowwise import reference, rowwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = native.load("rowwise_cpu")
ISAS = KERNELS.supported_isas() if KERNELS else []
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


# Each: (dtype, rows, size) -> the op's arguments. Those with as many rows are cut by row below.
CASES: dict[str, Case] = {
    "norm": ("rms_norm", lambda t, r, n: (numbers(r, n, t), weight(n, t), 1e-6)),
    "norm, float32 weight": ("rms_norm", lambda t, r, n: (numbers(r, n, t), weight(n, torch.float32), 1e-6)),
    "add, norm": (
        "add_rms_norm",
        lambda t, r, n: (numbers(r, n, t), numbers(r, n, t, 3.0).flip(1), weight(n, t), 1e-5),
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
    "silu": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 5.0), "silu")),
    "gelu_tanh": ("gated_activation", lambda t, r, n: (numbers(r, 2 * n, t, 2.0), "gelu_tanh")),
    "soft_cap": ("soft_cap", lambda t, r, n: (numbers(r, n, t, 40.0), 30.0)),
    "log_sum_exp": ("log_sum_exp", lambda t, r, n: (numbers(r, n, t, 5.0),)),
}
PARAMS = [pytest.param(*case, id=name) for name, case in CASES.items()]


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_every_instruction_set_computes_what_the_reference_does(
    name: str, arguments: Callable, dtype: torch.dtype, isa: str
) -> None:
    for size in (2, 24, 64, 1030):
        given = arguments(dtype, 5, size)
        got = outputs(getattr(KERNELS, name)(*given, isa))
        wide = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in given]
        want = outputs(getattr(reference, f"{name}_reference")(*(wide if dtype == torch.float32 else given)))
        # What lies next to the middle between two numbers of 16 bits may be rounded to either, once or twice.
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 2.1 * 2**-8, torch.float16: 2.1 * 2**-11}[dtype]
        for g, w in zip(got, want, strict=True):
            assert g.is_contiguous()
            torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=tolerance)
            if dtype != torch.float32 and g.dtype == dtype and "gelu_tanh" not in given:
                assert (g != w).float().mean() < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    name: str, arguments: Callable, dtype: torch.dtype, isa: str
) -> None:
    rows, size = 67, 200
    op = getattr(KERNELS, name)
    given = arguments(dtype, rows, size)
    whole = outputs(op(*given, isa))

    def cut(x: object, part: slice) -> object:
        """A part of the rows, of a tensor in which they lie elsewhere and farther apart."""
        if not isinstance(x, Tensor) or x.dim() != 2:
            return x
        apart = torch.full((x.shape[0] + 1, x.shape[1] + 3), float("nan"), dtype=x.dtype)
        apart[1:, 1:-2] = x
        return apart[1:, 1:-2][part]

    for part in (slice(0, 1), slice(3, 4), slice(66, 67), slice(0, 8), slice(5, 38)):
        alone = outputs(op(*[cut(x, part) for x in given], isa))
        for some, every in zip(alone, whole, strict=True):
            assert torch.equal(some, every[part])


@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_threads_change_no_bit(name: str, arguments: Callable) -> None:
    given = arguments(torch.bfloat16, 300, 400)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(outputs(getattr(rowwise, name)(*given)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_ops_are_registered_as_torch_expects(name: str, arguments: Callable, dtype: torch.dtype) -> None:
    op = getattr(torch.ops.compiled_llm, name)
    torch.library.opcheck(op, arguments(dtype, 3, 32), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_are_rounded_as_in_transformers(dtype: torch.dtype) -> None:
    x, own = numbers(5, 48, dtype, 3.0), numbers(1, 48, dtype)[0]
    for theirs, ours in ((LlamaRMSNorm(48, eps=1e-5), own), (Gemma2RMSNorm(48, eps=1e-5), 1 + own.float())):
        theirs.weight.data = own
        got = rowwise.rms_norm(x, ours, 1e-5)
        assert got.dtype == dtype
        torch.testing.assert_close(got, theirs(x), atol=0, rtol=1e-6 if dtype == torch.float32 else 0)


def test_extremes() -> None:
    x = torch.tensor([[-1e30, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e30, float("inf")]])
    gated = rowwise.gated_activation(torch.cat([x, torch.ones_like(x)], dim=1), "silu")
    want = torch.tensor([[0.0, 0.0, 0.0, 0.0, 5e-31, 100.0, 1e30, float("inf")]])
    torch.testing.assert_close(gated, want, atol=1e-37, rtol=1e-6)  # where the exponential is not a normal number: 0
    capped = rowwise.soft_cap(x, 30.0)
    assert capped[0, 0] == -30
    assert capped[0, -1] == 30
    assert rowwise.soft_cap(torch.tensor([[float("nan")]]), 30.0).isnan().all()
    assert rowwise.gated_activation(torch.tensor([[float("nan"), 1.0]]), "silu").isnan().all()
    peak, log_total = rowwise.log_sum_exp(torch.tensor([[3.0, float("-inf"), 3.0]]))
    assert peak.item() == 3
    assert log_total.item() == pytest.approx(0.6931472)
    assert rowwise.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6).eq(0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rowwise.rms_norm(torch.ones(2, 8), torch.ones(9), 1e-6), r"rms_norm: a weight must be .*\[8\]"),
        (lambda: rowwise.rms_norm(torch.ones(2, 8).double(), torch.ones(8), 1e-6), "dtype must be float32"),
        (lambda: rowwise.rms_norm(torch.ones(8, 2).t(), torch.ones(8), 1e-6), "last stride 1"),
        (lambda: rowwise.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-6), "delta must be like x"),
        (lambda: rowwise.rope(torch.ones(2, 64), torch.ones(2, 6), None, None, 4, 2, 0.0), "columns, got 64"),
        (lambda: rowwise.rope(torch.ones(2, 64), torch.ones(1, 8), None, None, 4, 2, 0.0), "cos_sin must be"),
        (lambda: rowwise.rope(torch.ones(2, 64), torch.ones(2, 8), torch.ones(8), None, 4, 2, 0.0), "or both None"),
        (lambda: rowwise.gated_activation(torch.ones(2, 7), "silu"), "even number of columns"),
        (lambda: rowwise.soft_cap(torch.ones(2, 7), 0.0), "cap must be above 0"),
    ],
)
def test_refuses_by_name(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
