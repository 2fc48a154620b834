"""Linear layers of single heads on a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools

import pytest
import torch

from compiled_llm.ops.linear import triton_head_linear
from compiled_llm.ops.linear.head_linear import head_linear, head_linear_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def arguments(rows: int, dtype: torch.dtype, heads: int = 5, n: int = 33, k: int = 72) -> tuple:
    """Of heads that lie in wider rows, with NaN between them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((rows, heads * (k + 8) + 3), torch.nan)
    x = x[:, : heads * (k + 8)].unflatten(1, (heads, k + 8))[..., :k]
    x.copy_(torch.randn(rows, heads, k, generator=generator))
    return x.to(dtype), (torch.randn(heads, n, k, generator=generator) / k**0.5).to(dtype)


def agrees_with_the_reference(dtype: torch.dtype) -> None:
    whole, weight = arguments(90, dtype, heads=2)
    first = triton_head_linear.head_linear(whole[:1], weight)
    for rows in (1, 7, 90):
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


INTERPRETED = {
    **{str(dtype)[6:]: functools.partial(agrees_with_the_reference, dtype) for dtype in TOLERANCE},
    "refused": others_are_refused,
}
test_interpreted = interpreted.each_of(INTERPRETED, ["float32", "bfloat16", "refused"])
CASES = [(capability, rows) for capability in ((8, 0), (9, 0), (10, 0)) for rows in (1, 8, 512)]


@pytest.mark.parametrize(
    ("capability", "rows"),
    [pytest.param(*case, marks=() if case == ((9, 0), 8) else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], rows: int) -> None:
    """Of DeepSeek-V3's heads, both ways."""
    with ahead_of_time.recorded(capability, triton_head_linear) as recorded:
        for inputs, outputs in ((128, 512), (512, 128)):
            triton_head_linear.head_linear(empty(rows, 128, inputs), empty(128, outputs, inputs))
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)


def test_the_op() -> None:
    x, weight = arguments(7, torch.float32)
    torch.library.opcheck(torch.ops.compiled_llm.head_linear.default, (x, weight))
    torch.testing.assert_close(head_linear(x, weight), torch.einsum("tnk,nok->tno", x, weight), atol=1e-5, rtol=1e-5)
