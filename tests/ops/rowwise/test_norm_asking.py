"""Norms that ask for weights: the numbers of the norms alone; what is asked for, seen in what is launched."""

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import add_rms_norm, rms_norm
from compiled_llm.ops.programmatic_launch import programmatic_launches
from compiled_llm.ops.rowwise.norm_asking import norm_asking

pytest.importorskip("triton")

from compiled_llm.ops.rowwise import triton_rowwise
from tests.ops import ahead_of_time

EPS = 1e-5


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, DELTA, NORM, ASKED = drawn(3, 64, seed=0), drawn(3, 64, seed=1), drawn(64, seed=2), drawn(5, 64, seed=3)


def test_elsewhere_they_are_the_norms_alone() -> None:
    assert all(map(torch.equal, norm_asking(X, DELTA, NORM, EPS, ASKED, 999), add_rms_norm(X, DELTA, NORM, EPS)))
    same, normed = norm_asking(X, None, NORM, EPS, ASKED, 999)
    assert same is X
    assert torch.equal(normed, rms_norm(X, NORM, EPS))
    for name, given in (("rms_norm_asking", (X,)), ("add_rms_norm_asking", (X, DELTA))):
        op = getattr(torch.ops.compiled_llm, name)
        torch.library.opcheck(op, (*given, NORM, EPS, ASKED, 999), test_utils=("test_schema", "test_faketensor"))


def launched(monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, nbytes: int) -> tuple[int, tuple, dict]:
    """Programs, arguments and constants of the launch of a norm of two rows, from tensors without storage."""
    recorded: list = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *args, **kwargs: recorded.append((grid[0], args, kwargs))

    kernel = triton_rowwise.norm_kernel
    monkeypatch.setattr(triton_rowwise, "norm_kernel", Recorder())
    x, norm, asked = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((2, inputs), (inputs,), (outputs, inputs))
    )
    triton_rowwise.rms_norm_asking(x, norm, EPS, asked, nbytes)
    monkeypatch.setattr(triton_rowwise, "norm_kernel", kernel)
    return recorded[0]


@pytest.mark.parametrize(
    ("outputs", "inputs", "nbytes"),
    [(6144, 4096, 12 << 20), (28672, 4096, 12 << 20), (4096, 1024, 12 << 20), (24, 128, 1 << 20), (300, 4096, 1)],
)
def test_so_many_lines_of_each_row_are_asked_for(
    outputs: int, inputs: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, _, constants = launched(monkeypatch, outputs, inputs, nbytes)
    width, lines = constants["WIDTH"], constants["LINES"]
    assert 1 <= width <= inputs * 2 // 128, "lines of a row that there are"
    assert width == 1 or width * 128 * outputs <= nbytes
    assert (width + 1) * 128 * outputs > min(nbytes, outputs * inputs * 2)
    assert (programs - 3) * lines < width * outputs <= (programs - 2) * lines, "a program for each row, and no more"


def test_it_asks_and_spills_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    _, args, constants = launched(monkeypatch, 6144, 4096, 12 << 20)
    binary = ahead_of_time.compiled(triton_rowwise.norm_kernel, args, constants, (9, 0))
    usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")  # type: ignore[operator]
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert "prefetch.global.L2" in binary.asm["ptx"]


def test_with_a_programmatic_launch_the_product_asks_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with programmatic_launches():
        programs, args, constants = launched(monkeypatch, 6144, 4096, 12 << 20)
    assert programs == 2
    assert args[5] is None
    assert constants["PROGRAMMATIC"]


def test_refuses_by_name() -> None:
    for asked in (ASKED[:, :32], ASKED.t().contiguous().t(), ASKED[0]):
        with pytest.raises(ValueError, match=r"asked must be a contiguous \[N, 64\] on cpu, got"):
            triton_rowwise.rms_norm_asking(X, NORM, EPS, asked, 1)
