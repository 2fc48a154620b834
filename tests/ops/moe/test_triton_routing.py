"""The sum of the experts without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools

import pytest
import torch

from compiled_llm.ops.moe import routing, triton_routing
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_the_bits_of_the_reference(dtype: torch.dtype, device: str = "cpu") -> None:
    """Also for padding, whose weights are anything, and where a row of nobody holds NaN."""
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, size in ((1, 8, 24), (5, 2, 1030), (7, 1, 1), (3, 4, 2100)):
        y = torch.randn(tokens * top_k + 1, size, generator=generator).to(dtype)
        y[-1] = float("nan")
        places = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k).int()
        weights = torch.rand(tokens, top_k, generator=generator)
        if tokens > 1:
            places[-1], weights[-1] = -1, float("nan")
        given = [x.to(device) for x in (y, places, weights)]
        got = triton_routing.weighted_sum(*given)
        assert got.dtype == dtype
        assert torch.equal(got, routing.weighted_sum_reference(*given))
    assert triton_routing.weighted_sum(y[:0], places[:0], weights[:0]).shape == (0, 2100)


INTERPRETED = {str(dtype)[6:]: functools.partial(has_the_bits_of_the_reference, dtype) for dtype in DTYPES}
test_interpreted = interpreted.each_of(INTERPRETED)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_compiles_without_spills(capability: tuple[int, int]) -> None:
    """In the sizes of Qwen3-30B-A3B."""
    with ahead_of_time.recorded(capability, triton_routing) as recorded:
        triton_routing.weighted_sum(empty(32 * 8, 2048), integers(32, 8), floats(32, 8))
    (launch,) = recorded
    binary, _ = ahead_of_time.without_spills(launch, capability)
    assert "fma.rn.f32" not in binary.asm["ptx"], "a product that is rounded with the sum has other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    has_the_bits_of_the_reference(dtype, "cuda")
