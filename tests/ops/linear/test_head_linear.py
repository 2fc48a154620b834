"""Linear layers of single heads on a GPU: run in Triton's interpreter, and compiled ahead of time.

As in ``test_exact_linear.py``, the interpreted cases run in one child process: this file as a program.
"""

import functools
import subprocess
from pathlib import Path

import pytest
import torch

from compiled_llm.ops.linear.head_linear import head_linear, head_linear_reference

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import triton_head_linear  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def arguments(rows: int, dtype: torch.dtype, heads: int = 5, n: int = 33, k: int = 72) -> tuple:
    """Of heads that lie in wider rows, with NaN between them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((rows, heads * (k + 8) + 3), torch.nan)
    x = x[:, : heads * (k + 8)].unflatten(1, (heads, k + 8))[..., :k]
    x.copy_(torch.randn(rows, heads, k, generator=generator))
    return x.to(dtype), (torch.randn(heads, n, k, generator=generator) / k**0.5).to(dtype)


def agrees_with_the_reference(dtype: torch.dtype) -> None:
    whole, weight = arguments(150, dtype)
    first = triton_head_linear.head_linear(whole[:1], weight)
    for rows in (1, 7, 64, 150):
        x = whole[:rows]
        y, expected = triton_head_linear.head_linear(x, weight), head_linear_reference(x, weight)
        assert y.is_contiguous()
        torch.testing.assert_close(y, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert torch.equal(y[:1], first), "a row depends on the others"


def others_are_refused() -> None:
    x, weight = arguments(2, torch.float32)
    for change, message in (
        ({"x": x.transpose(1, 2)}, "x must be"),
        ({"x": x.double()}, "x must be"),
        ({"weight": weight.transpose(1, 2)}, "weight must be"),
        ({"weight": weight.half()}, "weight must be"),
    ):
        with pytest.raises(ValueError, match=f"head_linear: {message}"):
            triton_head_linear.head_linear(**{"x": x, "weight": weight, **change})


CASES = {
    **{str(dtype): functools.partial(agrees_with_the_reference, dtype) for dtype in TOLERANCE},
    "refused": others_are_refused,
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


@pytest.mark.parametrize("rows", [1, 8, pytest.param(512, marks=pytest.mark.battery)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), pytest.param((10, 0), marks=pytest.mark.battery)])
def test_compiles_without_spills(
    capability: tuple[int, int], rows: int, child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of DeepSeek-V3's heads, both ways."""
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_head_linear)
    for inputs, outputs in ((128, 512), (512, 128)):
        x = torch.empty(rows, 128, inputs, dtype=torch.bfloat16, device="meta")
        triton_head_linear.head_linear(x, x.new_empty(128, outputs, inputs))
    monkeypatch.undo()
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability, tmp_path)


def test_the_op() -> None:
    x, weight = arguments(7, torch.float32)
    torch.library.opcheck(torch.ops.compiled_llm.head_linear.default, (x, weight))
    torch.testing.assert_close(head_linear(x, weight), torch.einsum("tnk,nok->tno", x, weight), atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    interpreted.run(CASES)
