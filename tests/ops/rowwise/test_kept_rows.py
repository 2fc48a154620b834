"""Rows that are kept and rows that are given: on a CPU, interpreted, and compiled ahead of time."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import keep_rows
from compiled_llm.ops.rowwise.reference import keep_rows_reference

triton = pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_rowwise  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402


def kept_and_given(run: Callable, dtype: torch.dtype, size: int, device: str = "cpu") -> None:
    """Of more rows than there are, and of none; the others stay."""
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).to(device, dtype)
    for rows in ([0, 4, 4, 2, 0, 1, 3], [3], []):
        indices = torch.tensor(rows, dtype=torch.int32, device=device)
        kept = torch.full((6, size), 7.0, dtype=dtype, device=device)
        assert torch.equal(run(x, indices, kept), x[indices.long()])
        assert torch.equal(kept, torch.cat([x, torch.full_like(x[:1], 7.0)]))


CASES = ((torch.float32, 24), (torch.bfloat16, 4100))
INTERPRETED = {
    f"{str(dtype)[6:]}-{size}": functools.partial(kept_and_given, triton_rowwise.keep_rows, dtype, size)
    for dtype, size in CASES
}


@pytest.mark.parametrize(("dtype", "size"), CASES, ids=str)
def test_a_cpu_keeps_and_gives(dtype: torch.dtype, size: int) -> None:
    kept_and_given(keep_rows, dtype, size)


def test_the_op_is_registered_as_torch_expects() -> None:
    given = (torch.randn(3, 8), torch.tensor([2, 0], dtype=torch.int32), torch.zeros(4, 8))
    torch.library.opcheck(
        torch.ops.compiled_llm.keep_rows, given, test_utils=("test_schema", "test_faketensor")
    )  # fmt: skip
    kept_and_given(keep_rows_reference, torch.float16, 3)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_rowwise)
    rows = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    triton_rowwise.keep_rows(rows, torch.empty(8, dtype=torch.int32, device="meta"), rows)
    (launch,) = recorded
    ahead_of_time.without_spills(launch, capability, tmp_path)


def test_refuses_by_name() -> None:
    x, indices = torch.ones(3, 8), torch.tensor([0])
    for given, message in (
        ((x, indices, torch.ones(2, 8)), r"kept a contiguous \[3, 8\] or longer of torch.float32 on cpu, got \[2, 8\]"),
        ((x, indices, x.half()), "got .* of torch.float16"),
        ((x, torch.tensor([0.0]), x), r"indices must be a contiguous \[R\] of int32 or int64"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_rowwise.keep_rows(*given)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    interpreted.run(INTERPRETED)
