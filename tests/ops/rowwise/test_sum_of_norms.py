"""The sum of two norms: on a CPU, interpreted, and compiled ahead of time."""

import functools
import subprocess
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import sum_of_norms
from compiled_llm.ops.rowwise.sum_of_norms import sum_of_norms_reference
from tests.ops.rowwise.rowwise_cases import check, cut, numbers, weight

triton = pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_sum_of_norms  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

EPS = 1e-5


def arguments(size: int, dtype: torch.dtype, norm: torch.dtype) -> tuple:
    x = numbers(5, size, dtype)
    return x, weight(size, norm), x.flip(0, 1) * 3, weight(size, norm).flip(0), EPS


def agrees_with_the_reference(size: int, dtype: torch.dtype, norm: torch.dtype) -> None:
    """Also for rows that lie elsewhere, whose bits stay."""
    given = arguments(size, dtype, norm)
    got = triton_sum_of_norms.sum_of_norms(*given)
    check((got,), (sum_of_norms_reference(*given),), dtype, is_gelu=False)
    x, x_norm, y, y_norm, _ = given
    rows = slice(2, 4)
    assert torch.equal(triton_sum_of_norms.sum_of_norms(cut(x, rows), x_norm, y[rows], y_norm, EPS), got[rows])


CASES = (
    (96, torch.float32, torch.float32),
    (1100, torch.bfloat16, torch.float32),
    (2048, torch.float16, torch.float16),
)
INTERPRETED = {
    f"{str(dtype)[6:]}-{size}": functools.partial(agrees_with_the_reference, size, dtype, norm)
    for size, dtype, norm in CASES
}


def test_a_cpu_has_an_op_for_each() -> None:
    given = arguments(64, torch.float32, torch.float32)
    torch.testing.assert_close(sum_of_norms(*given), sum_of_norms_reference(*given))


def test_the_op_is_registered_as_torch_expects() -> None:
    given = arguments(64, torch.bfloat16, torch.float32)
    torch.library.opcheck(torch.ops.compiled_llm.sum_of_norms, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded: list = []
    recorder = ahead_of_time.Recorder(triton_sum_of_norms.sum_of_norms_kernel, recorded)
    monkeypatch.setattr(triton_sum_of_norms, "sum_of_norms_kernel", recorder)
    x, norm = torch.empty(8, 2816, dtype=torch.bfloat16, device="meta"), torch.empty(2816, device="meta")
    triton_sum_of_norms.sum_of_norms(x, norm, x, norm, EPS)
    ((kernel, args, kwargs),) = recorded
    binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
    usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0


def test_refuses_by_name() -> None:
    x, norm = torch.ones(2, 12), torch.ones(12)
    for given, message in (
        ((x, norm, x[:1], norm), r"y must be \[2, 12\]"),
        ((x, norm, x, norm.half()), r"y_norm must be \[12\] of torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_sum_of_norms.sum_of_norms(*given, EPS)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


if __name__ == "__main__":
    interpreted.run(INTERPRETED)
