"""The experts' linear layers: each instruction set against float64, and the same bits in any company."""

import itertools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.moe import grouped_linear as grouped
from tests.ops.instruction_sets import by_set, skip_without
from tests.ops.linear.test_packed_linear import KERNELS, assert_rounded_once

OP = "linear_cpu"
EXPERTS, N, K = 6, 50, 65
COUNTS = [3, 0, 1, 17, 0, 40]  # rows of each expert; 3 more belong to none


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)


def problem(dtype: torch.dtype, n: int = N, k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x ``[30, K]``, weight, bias, and the row of x that each of 64 rows takes."""
    x, weight = torch.randn(30, k).to(dtype), torch.randn(EXPERTS, n, k).to(dtype)
    return x, weight, torch.randn(EXPERTS, n).to(dtype), torch.randint(0, 30, (64,), dtype=torch.int32)


def packed_of(weight: Tensor) -> Tensor:
    return grouped.pack_weights(list(weight))


@pytest.mark.parametrize("kernel", by_set(OP, KERNELS))
def test_each_expert_computes_its_own_rows(kernel: tuple[str, torch.dtype]) -> None:
    isa, dtype = kernel
    kernels = skip_without(native.load(OP), isa)
    for n, k in ((N, K), (96, 64), (33, 700)):
        x, weight, bias, rows = problem(dtype, n, k)
        packed, starts = packed_of(weight), starts_of(COUNTS)
        x[29] = float("nan")  # which no row takes
        rows %= 29
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for offset in (None, bias):
                out = kernels.run("grouped_packed_linear", x, packed, offset, rows, starts, n, isa=isa)
                gathered = kernels.run("grouped_packed_linear", x[rows], packed, offset, None, starts, n, isa=isa)
                assert torch.equal(out[:61], gathered[:61])
                for e, (first, end) in enumerate(itertools.pairwise(starts)):
                    if end > first:
                        own = None if offset is None else offset[e]
                        assert_rounded_once(out[first:end], x[rows[first:end]], weight[e], own)


@pytest.mark.parametrize("kernel", by_set(OP, KERNELS))
def test_a_row_has_the_bits_of_a_single_layer_in_any_company(kernel: tuple[str, torch.dtype]) -> None:
    isa, dtype = kernel
    kernels = skip_without(native.load(OP), isa)
    x, weight, bias, _ = problem(dtype, 100, 700)
    packed = packed_of(weight)
    alone = [kernels.run("packed_linear", x, packed[e], bias[e], 100, isa=isa) for e in range(EXPERTS)]
    for counts in ([1, 0, 0, 0, 0, 1], [30, 0, 2, 5, 16, 33], [0, 0, 200, 0, 0, 0], [0, 800, 0, 9, 0, 0]):
        rows = torch.randint(0, 30, (sum(counts),), dtype=torch.int32)
        starts = starts_of(counts)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = kernels.run("grouped_packed_linear", x, packed, bias, rows, starts, 100, isa=isa)
            for e in range(EXPERTS):
                own = slice(starts[e], starts[e + 1])
                assert torch.equal(out[own], alone[e][rows[own]])


def test_strided_rows() -> None:
    wide, (_, weight, bias, rows) = torch.randn(30, 150).bfloat16(), problem(torch.bfloat16, 50, 64)
    packed, starts = packed_of(weight), starts_of(COUNTS)
    for x in (wide[:, 3:67], wide[::2, 7:71].repeat(2, 1), wide[:, :64]):
        args = packed, bias, rows, starts, 50
        assert torch.equal(
            grouped.grouped_packed_linear(x, *args)[:61], grouped.grouped_packed_linear(x.contiguous(), *args)[:61]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_references_agree(dtype: torch.dtype) -> None:
    x, weight, bias, rows = problem(dtype)
    starts = starts_of([*COUNTS[:-1], 43])
    expected = grouped.grouped_linear_reference(x, weight, bias, rows, starts)
    packed = packed_of(weight)
    assert torch.equal(grouped.grouped_packed_linear_reference(x, packed, bias, rows, starts, N), expected)
    assert torch.equal(grouped.grouped_linear(x, weight, bias, rows, starts), expected)
    if dtype == torch.bfloat16:
        ops = torch.ops.compiled_llm
        torch.library.opcheck(ops.grouped_linear.default, (x, weight, bias, rows, starts))
        torch.library.opcheck(ops.grouped_packed_linear.default, (x, packed, bias, rows, starts, N))


def test_without_rows_nothing_is_read() -> None:
    x, weight, _, rows = problem(torch.bfloat16)
    for empty_rows, starts in ((rows, starts_of([0] * EXPERTS)), (rows[:0], starts_of([0] * EXPERTS))):
        out = grouped.grouped_packed_linear(x, packed_of(weight), None, empty_rows, starts, N)
        assert out.shape == (len(empty_rows), N)


def test_refuses_wrong_inputs() -> None:
    x, weight, bias, rows = problem(torch.bfloat16, 50, 64)
    packed, starts = packed_of(weight), starts_of(COUNTS)
    wrong = [
        ((x.double(), packed, bias, rows, starts, 50), ValueError, "x must be bfloat16, float32 or float16"),
        ((x[0], packed, bias, rows, starts, 50), ValueError, r"x must be \[T, K\]"),
        ((x.T.contiguous().T, packed, bias, rows, starts, 50), ValueError, "last stride of x must be 1"),
        ((x, packed[0], bias, rows, starts, 50), ValueError, "take a contiguous packed"),
        ((x, packed, bias, rows, starts, 65), ValueError, "take a contiguous packed"),
        ((x, packed, bias[0], rows, starts, 50), ValueError, "bias must be"),
        ((x, packed, bias, rows.long(), starts, 50), ValueError, "rows must be"),
        ((x, packed, bias, rows, starts[:-1], 50), ValueError, "starts must be"),
        ((x, packed, bias, rows + 5, starts, 50), IndexError, "rows must be from 0 to 29"),
        ((x, packed, bias, rows, starts + 9, 50), IndexError, "starts must rise"),
        ((x, packed, bias, rows, starts.flip(0), 50), IndexError, "starts must rise"),
    ]
    for args, kind, message in wrong:
        with pytest.raises(kind, match=message):
            grouped.grouped_packed_linear(*args)
