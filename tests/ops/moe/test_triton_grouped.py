"""The grouped product without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs.

As in ``test_exact_linear.py``, the interpreted cases run in one child process: this file as a program.
"""

import functools
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.moe.grouped_linear import grouped_linear, grouped_linear_reference

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import triton_linear  # noqa: E402
from compiled_llm.ops.moe import triton_grouped  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
COUNTS = ([2, 0, 19, 1, 0], [0, 0, 0, 0, 3], [0] * 5, [1, 1, 1, 1, 1])  # rows of each expert


def arguments(counts: list[int], dtype: torch.dtype, device: str = "cpu", n: int = 33, k: int = 72) -> tuple:
    """Of 12 rows of x, the last of which is NaN and taken by no row; 2 rows more belong to no expert."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(12, k, generator=generator), torch.randn(len(counts), n, k, generator=generator) / k**0.5
    bias, rows = torch.randn(len(counts), n, generator=generator), torch.arange(sum(counts) + 2) * 7 % 11
    x[11] = float("nan")
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    return *(t.to(dtype).to(device) for t in (x, weight, bias)), rows.int().to(device), starts.to(device)


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(dtype: torch.dtype, device: str = "cpu") -> None:
    for counts, with_bias in itertools.product(COUNTS, (False, True)):
        x, weight, bias, rows, starts = arguments(counts, dtype, device)
        offset, used = bias if with_bias else None, sum(counts)
        want = grouped_linear_reference(x, weight, offset, rows, starts)[:used]
        got = triton_grouped.grouped_linear(x, weight, offset, rows, starts)
        assert got.shape == (used + 2, 33)
        assert got.dtype == dtype
        torch.testing.assert_close(got[:used], want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        own = triton_grouped.grouped_linear(x[rows], weight, offset, None, starts)
        assert torch.equal(own[:used], got[:used])


def a_row_has_the_bits_of_a_single_layer_in_every_tile(dtype: torch.dtype) -> None:
    x, weight, bias, rows, starts = arguments([2, 0, 19, 1, 0], dtype)
    name = "FLOAT32" if dtype == torch.float32 else "MMA"
    for tile in getattr(triton_linear, name):
        with mock.patch.object(triton_linear, name, (tile._replace(n=min(tile.n, 32)),)):
            out = triton_grouped.grouped_linear(x, weight, bias, rows, starts)
            for expert, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
                alone = triton_linear.exact_linear(x[rows[first:end]], weight[expert], bias[expert])
                assert torch.equal(out[first:end], alone)


INTERPRETED: dict[str, tuple[Callable, tuple]] = {
    **{f"reference-{str(dtype)[6:]}": (agrees_with_the_reference, (dtype,)) for dtype in DTYPES},
    **{f"tiles-{str(d)[6:]}": (a_row_has_the_bits_of_a_single_layer_in_every_tile, (d,)) for d in DTYPES[:2]},
}


def run_interpreted() -> None:
    functions = {name: functools.partial(function, *given) for name, (function, given) in INTERPRETED.items()}
    interpreted.run(functions)


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, pytest.param(2048, marks=pytest.mark.battery)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int], tokens: int, child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the sizes of Qwen3-30B-A3B: 128 experts, of which a token uses 8."""
    recorded: list = []
    monkeypatch.setattr(
        triton_grouped, "grouped_kernel", ahead_of_time.Recorder(triton_grouped.grouped_kernel, recorded)
    )
    monkeypatch.setattr(triton_linear, "_capability", lambda device: capability)
    meta = functools.partial(torch.empty, device="meta")
    x, weight = meta(tokens, 2048, dtype=torch.bfloat16), meta(128, 1536, 2048, dtype=torch.bfloat16)
    rows, starts = meta(tokens * 8, dtype=torch.int32), meta(129, dtype=torch.int32)
    triton_grouped.grouped_linear(x, weight, None, rows, starts)
    ((kernel, args, kwargs),) = recorded
    monkeypatch.undo()
    binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
    usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert ("wgmma" if capability == (9, 0) else "mma.sync") in binary.asm["ptx"]


# ---- refused --------------------------------------------------------------------------------------------------------

X, W, B, ROWS, STARTS = arguments(COUNTS[0], torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X[0], W, B, ROWS, STARTS), r"x must be \[T, K\]"),
        ((X.t(), W, B, ROWS, STARTS), "last stride 1"),
        ((X, W[0], B, ROWS, STARTS), r"weight must be a contiguous \[E, N, 72\]"),
        ((X, W.half(), B, ROWS, STARTS), "weight must be"),
        ((X, W, B[0], ROWS, STARTS), r"bias must be a contiguous \[5, 33\]"),
        ((X, W, B, ROWS.long(), STARTS), "rows must be"),
        ((X, W, B, ROWS, STARTS[1:]), r"starts must be a contiguous \[6\]"),
    ],
)
def test_refuses_by_name(given: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_grouped.grouped_linear(*given)


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    agrees_with_the_reference(dtype, "cuda")
    x, weight, bias, rows, starts = arguments([300, 0, 70, 1, 9], dtype, "cuda", n=500, k=1000)
    out = grouped_linear(x, weight, bias, rows, starts)
    for expert, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        alone = triton_linear.exact_linear(x[rows[first:end]], weight[expert], bias[expert])
        assert torch.equal(out[first:end], alone)


if __name__ == "__main__":
    run_interpreted()
