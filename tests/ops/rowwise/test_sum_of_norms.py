"""Sums of norms, and their norms: on a CPU, interpreted, and compiled ahead of time."""

import functools
import subprocess
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import norm_of_sum, sum_of_norms
from compiled_llm.ops.rowwise.reference import sum_of_norms_reference
from tests.ops.rowwise.rowwise_cases import check, cut, numbers, weight

triton = pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_rowwise  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

EPS = 1e-5


BOTH, OF_DELTA, OF_BOTH_AND_SUM = ("x", "y"), ("y", "scale", "sum"), ("x", "y", "scale", "sum")


def arguments(size: int, dtype: torch.dtype, norm: torch.dtype, given: tuple[str, ...] = BOTH) -> tuple:
    """``given``: which of the norms there are, and whether a scale."""
    x = numbers(5, size, dtype)
    norms = {"x": weight(size, norm), "y": weight(size, norm).flip(0), "sum": weight(size, norm).roll(3)}
    own = {name: tensor if name in given else None for name, tensor in norms.items()}
    scale = torch.tensor([0.37]) if "scale" in given else None
    return x, own["x"], x.flip(0, 1) * 3, own["y"], scale, own["sum"], EPS


def agrees_with_the_reference(size: int, dtype: torch.dtype, norm: torch.dtype, which: tuple[str, ...]) -> None:
    """Also for rows that lie elsewhere, whose bits stay."""
    given = arguments(size, dtype, norm, which)
    got = triton_rowwise.sum_of_norms(*given)
    check(got, sum_of_norms_reference(*given), dtype, is_gelu=False)
    x, x_norm, y, *rest = given
    rows = slice(2, 4)
    again = triton_rowwise.sum_of_norms(cut(x, rows), x_norm, y[rows], *rest)
    assert all(torch.equal(part, whole[rows]) for part, whole in zip(again, got, strict=True) if whole.numel())


def has_the_bits_of_single_ops(norm: torch.dtype) -> None:
    """So that an exact engine may have either."""
    x, _, y, y_norm, scale, sum_norm, _ = arguments(1300, torch.bfloat16, norm, OF_DELTA)
    total, out = triton_rowwise.sum_of_norms(x, None, y, y_norm, scale, sum_norm, EPS)
    expected = triton_rowwise.scaled_sum(x, triton_rowwise.rms_norm(y, y_norm, EPS), scale)
    assert torch.equal(total, expected)
    assert torch.equal(out, triton_rowwise.rms_norm(expected, sum_norm, EPS))
    together = triton_rowwise.sum_of_norms(x, None, y, y_norm, None, sum_norm, EPS)
    apart = triton_rowwise.add_rms_norm(x, triton_rowwise.rms_norm(y, y_norm, EPS), sum_norm, EPS)
    assert all(map(torch.equal, together, apart))


CASES = (
    (96, torch.float32, torch.float32, BOTH),
    (1100, torch.bfloat16, torch.float32, OF_BOTH_AND_SUM),
    (2048, torch.float16, torch.float16, OF_DELTA),
    (40, torch.bfloat16, torch.bfloat16, ()),
)
INTERPRETED = {
    f"{str(dtype)[6:]}-{size}": functools.partial(agrees_with_the_reference, size, dtype, norm, given)
    for size, dtype, norm, given in CASES
} | {
    f"bits-{str(norm)[6:]}": functools.partial(has_the_bits_of_single_ops, norm)
    for norm in (torch.float32, torch.bfloat16)
}  # fmt: skip


@pytest.mark.parametrize("given", [BOTH, OF_DELTA, ("y", "sum")], ids=str)
def test_a_cpu_has_an_op_for_each(given: tuple[str, ...]) -> None:
    x, x_norm, y, y_norm, scale, norm, _ = arguments(64, torch.float32, torch.float32, given)
    total, out = sum_of_norms_reference(x, x_norm, y, y_norm, scale, norm, EPS)
    torch.testing.assert_close(sum_of_norms(x, x_norm, y, y_norm, EPS, scale), total)
    if norm is not None:
        got = norm_of_sum(x, y, y_norm, norm, EPS, scale)
        torch.testing.assert_close(got, (total, out))


def test_the_op_is_registered_as_torch_expects() -> None:
    given = arguments(64, torch.bfloat16, torch.float32, OF_DELTA)
    torch.library.opcheck(torch.ops.compiled_llm.sum_of_norms, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "capability", [(9, 0), *(pytest.param(each, marks=pytest.mark.battery) for each in ((8, 0), (10, 0)))], ids=str
)
def test_compiles_without_spills(
    capability: tuple[int, int], child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_rowwise)
    x, norm = torch.empty(8, 2816, dtype=torch.bfloat16, device="meta"), torch.empty(2816, device="meta")
    triton_rowwise.sum_of_norms(x, norm, x, norm, torch.empty(1, device="meta"), norm, EPS)
    (launch,) = recorded
    ahead_of_time.without_spills(launch, capability, tmp_path)


def test_refuses_by_name() -> None:
    x, norm = torch.ones(2, 12), torch.ones(12)
    for given, message in (
        ((x, norm, x[:1], norm, None, None), r"y must be \[2, 12\]"),
        ((x, norm, x, norm.half(), None, None), r"y_norm must be a contiguous \[12\] of torch.float32"),
        ((x, None, x, None, norm, None), r"scale must be a contiguous \[1\] of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_rowwise.sum_of_norms(*given, EPS)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    interpreted.run(INTERPRETED)
