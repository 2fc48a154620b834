"""Linear layers of single heads on a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools

import pytest
import torch

from compiled_llm.ops.linear import triton_head_linear, triton_lora
from compiled_llm.ops.linear.head_linear import head_linear, head_linear_reference
from compiled_llm.ops.linear.lora import Following, LoraRows
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.linear.test_lora import weights

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


def adapters_have_the_bits_of_a_launch_of_their_own(
    dtype: torch.dtype, count: int = 7, heads: int = 3, n: int = 33, k: int = 72
) -> None:
    x, weight = arguments(count, dtype, heads, n, k)
    w, flags = weights((n,), k, 20, dtype, slots=3 * heads), torch.zeros(NUM_FLAGS, dtype=torch.int32)
    slots = torch.tensor((0, 2, 3, 1, 1, 0, 2), dtype=torch.int32).repeat(20)[:count]
    want = triton_head_linear.head_linear(x, weight)
    triton_lora.lora_followed(want, x, *LoraRows(slots, groups=heads), *w, flags, *Following())
    for rows in (slice(0, count), slice(3, 4)):
        got = triton_head_linear.head_linear(x[rows], weight, (slots[rows], *w, flags))
        assert torch.equal(got, want[rows])
        assert not flags.any(), "left for the next launch"


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
    w, slots = weights((33,), 72, 20, torch.float32, slots=5), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x must be of 16 bits, got torch\.float32"):
        triton_head_linear.head_linear(x, weight, (slots, *w, slots))


INTERPRETED = {
    "adapters-two-tiles": functools.partial(  # the first of 128 rows
        adapters_have_the_bits_of_a_launch_of_their_own, torch.bfloat16, 130, 1, 17, 24
    ),
    **{
        f"adapters-{str(dtype)[6:]}": functools.partial(adapters_have_the_bits_of_a_launch_of_their_own, dtype)
        for dtype in (torch.float16, torch.bfloat16)
    },
    **{str(dtype)[6:]: functools.partial(agrees_with_the_reference, dtype) for dtype in TOLERANCE},
    "refused": others_are_refused,
}
test_interpreted = interpreted.each_of(INTERPRETED, ["float32", "bfloat16", "adapters-bfloat16", "refused"])
CASES = [(capability, rows) for capability in ((8, 0), (9, 0), (10, 0)) for rows in (1, 8, 64, 256, 2048)]


@pytest.mark.parametrize(
    ("capability", "rows"),
    [pytest.param(*case, marks=() if case == ((9, 0), 8) else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], rows: int) -> None:
    """Of DeepSeek-V3's heads, both ways."""
    with ahead_of_time.recorded(capability, triton_head_linear) as recorded:
        for inputs, outputs in ((128, 512), (512, 128)):
            x, weight = empty(rows, 128, inputs), empty(128, outputs, inputs)
            triton_head_linear.head_linear(x, weight)
            a, b = empty(1024, 1, 16, inputs), empty(1024, outputs // 16, 16, 16)
            rest = integers(1024, 1), floats(1024, 1), integers(2), integers(NUM_FLAGS)
            triton_head_linear.head_linear(x, weight, (integers(rows), a, b, *rest))
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)


def test_the_op() -> None:
    x, weight = arguments(7, torch.float32)
    torch.library.opcheck(torch.ops.compiled_llm.head_linear.default, (x, weight, []))
    torch.testing.assert_close(head_linear(x, weight), torch.einsum("tnk,nok->tno", x, weight), atol=1e-5, rtol=1e-5)
