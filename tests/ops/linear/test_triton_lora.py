"""Low-rank changes on a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import triton_lora
from compiled_llm.ops.linear.lora import add_lora_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.linear.test_lora import DTYPES, problem, weights

TOLERANCE = {torch.float32: 5e-4, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def agrees_with_the_reference(dtype: torch.dtype) -> None:
    """Parts that are no whole tiles, in a group of tiles; rows of several slots in a tile; NaN behind ranks."""
    for parts, k, rank in (((40, 7, 130), 37, 8), ((50, 50), 300, 33)):
        w = weights(parts, k, rank, dtype)
        for rows in (1, 21):
            y, x, slots = problem(rows, w)
            expected = y.clone()
            terms = add_lora_reference(expected, x, slots, *w)
            shrunk = triton_lora.add_lora(y, x, slots, *w)
            close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
            torch.testing.assert_close(y, expected, **close)
            torch.testing.assert_close(torch.where(terms == 0, 0, shrunk), terms, atol=1e-4, rtol=1e-4)


def a_row_has_the_same_bits_in_any_company() -> None:
    w = weights((40, 7), 70, 16, torch.bfloat16)
    y, x, slots = problem(19, w)
    alone: list[Tensor] = []
    for row in range(19):
        one = y[row : row + 1].clone()
        triton_lora.add_lora(one, x[row : row + 1], slots[row : row + 1], *w)
        alone.append(one)
    triton_lora.add_lora(y, x, slots, *w)
    assert torch.equal(y, torch.cat(alone))


def others_are_refused() -> None:
    w = weights((32, 16), 64, 16, torch.float32)
    y, x, slots = problem(3, w)
    for arguments, message in (
        ((y, x.double(), slots, *w), "x must be"),
        ((y[:2], x, slots, *w), "y must be"),
        ((y, x, slots.long(), *w), "slots must be"),
        ((y, x, slots, *w._replace(a=w.a[:, :, :8])), "a must be"),
        ((y, x, slots, *w._replace(b=w.b.half())), "b must be"),
    ):
        with pytest.raises(ValueError, match=f"add_lora: {message}"):
            triton_lora.add_lora(*arguments)


INTERPRETED = {
    **{str(dtype)[6:]: functools.partial(agrees_with_the_reference, dtype) for dtype in DTYPES},
    "alone": a_row_has_the_same_bits_in_any_company,
    "refused": others_are_refused,
}
test_interpreted = interpreted.each_of(INTERPRETED, ["bfloat16", "alone", "refused"])
CASES = [(capability, rank) for capability in ((8, 0), (9, 0), (10, 0)) for rank in (16, 64, 512)]


@pytest.mark.parametrize(
    ("capability", "rank"),
    [pytest.param(*case, marks=() if case == ((9, 0), 16) else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], rank: int) -> None:
    """Of the gates of Llama-3.1-8B."""
    with ahead_of_time.recorded(capability, triton_lora) as recorded:
        a, b = empty(8, 2, rank, 4096), empty(8, 1792, rank, 16)
        triton_lora.add_lora(
            empty(8, 28672), empty(8, 4096), integers(8), a, b, integers(8, 2), floats(8, 2), integers(3)
        )
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)
