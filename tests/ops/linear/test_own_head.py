"""Heads that adapters bring whole: on a CPU, in any company, in Triton's interpreter and compiled ahead."""

import functools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import own_head, pack_weight, packed_linear
from compiled_llm.ops.linear import triton_own_head
from compiled_llm.ops.linear.own_head import own_head_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, integers
from tests.ops.linear.test_lora import DTYPES

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
SLOTS = torch.tensor([0, 1, 2, 3, 4, 1, 3] * 3, dtype=torch.int32)  # the third is of an adapter without, 4 beyond
PRESENT = torch.tensor([1, 1, 0], dtype=torch.int32)


def problem(dtype: torch.dtype, vocab_size: int = 75, inputs: int = 141) -> tuple[Tensor, Tensor, Tensor]:
    """``y``, ``x`` and matrices, with NaN where nothing is to be read."""
    torch.manual_seed(0)
    weights = torch.randn(3, vocab_size, inputs).to(dtype) / inputs**0.5
    weights[2] = torch.nan
    return torch.randn(len(SLOTS), vocab_size).to(dtype), torch.randn(len(SLOTS), inputs).to(dtype), weights


def expected(y: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    made = y.clone()
    for row, slot in enumerate(SLOTS.tolist()):
        if slot in (1, 2):
            made[row] = (weights[slot - 1].float() @ x[row].float()).to(y.dtype)
    return made


def agrees(dtype: torch.dtype) -> None:
    y, x, weights = problem(dtype)
    right = expected(y, x, weights)
    triton_own_head.own_head(y, x, SLOTS, weights, PRESENT)
    torch.testing.assert_close(y, right, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def a_row_has_the_same_bits_in_any_company() -> None:
    y, x, weights = problem(torch.bfloat16)
    rows, alone = (1, 2, 19), y.clone()
    for row in rows:
        one = slice(row, row + 1)
        triton_own_head.own_head(alone[one], x[one], SLOTS[one], weights, PRESENT)
    triton_own_head.own_head(y, x, SLOTS, weights, PRESENT)
    for row in rows:
        assert torch.equal(y[row], alone[row])


def others_are_refused() -> None:
    y, x, weights = problem(torch.float32)
    for arguments, message in (
        ((y[:2], x, SLOTS, weights, PRESENT), "y must be"),
        ((y, x, SLOTS.long(), weights, PRESENT), "slots must be"),
        ((y, x, SLOTS, weights[:, :5], PRESENT), "weights must be"),
        ((y, x, SLOTS, weights, PRESENT[:1]), "present must be"),
    ):
        with pytest.raises(ValueError, match=f"own_head: {message}"):
            triton_own_head.own_head(*arguments)


INTERPRETED = {
    **{str(dtype)[6:]: functools.partial(agrees, dtype) for dtype in DTYPES},
    "alone": a_row_has_the_same_bits_in_any_company,
    "refused": others_are_refused,
}
test_interpreted = interpreted.each_of(INTERPRETED, ["bfloat16", "alone", "refused"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu(dtype: torch.dtype) -> None:
    """Packed: a row has the bits of a packed layer, in any company, wherever it lies."""
    y, x, weights = problem(dtype)
    right, packed = expected(y, x, weights), torch.stack([*map(pack_weight, weights)])
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for own in (weights, packed):
        found = y.clone()
        own_head_reference(found, x, SLOTS, own, PRESENT)
        torch.testing.assert_close(found, right, **close)
    made, alone = torch.randn(len(y), 100).to(dtype)[:, : y.shape[1]].copy_(y), y.clone()
    own_head(made, x, SLOTS, packed, PRESENT)
    torch.testing.assert_close(made, right, **close)
    for row, slot in enumerate(SLOTS.tolist()):
        one = slice(row, row + 1)
        own_head(alone[one], x[one], SLOTS[one], packed, PRESENT)
        if slot in (1, 2):
            assert torch.equal(made[one], packed_linear(x[one], packed[slot - 1], None, y.shape[1]))
    assert torch.equal(made, alone)
    torch.library.opcheck(torch.ops.compiled_llm.own_head, (y, x, SLOTS, packed, PRESENT))
    own_head(made, x, torch.zeros_like(SLOTS), packed * torch.nan, PRESENT)
    own_head(made[:0], x[:0], SLOTS[:0], packed, PRESENT)
    assert torch.equal(made, alone)


def test_a_cpu_refuses_by_name() -> None:
    y, x, weights = problem(torch.bfloat16)
    packed = torch.stack([*map(pack_weight, weights)])
    for given, message in (
        ((y[:2], x, SLOTS, packed, PRESENT), "y must have 21 rows"),
        ((y.t(), x, SLOTS, packed, PRESENT), "y must be a matrix"),
        ((y.float(), x, SLOTS, packed, PRESENT), "y must have 21 rows of bfloat16"),
        ((y, x, SLOTS.long(), packed, PRESENT), "slots must be"),
        ((y, x, SLOTS, packed[:, :3], PRESENT), "take a contiguous packed"),
        ((y, x, SLOTS, weights, PRESENT), "take a contiguous packed"),
        ((y, x, SLOTS, packed, PRESENT[:1]), "present must be"),
    ):
        with pytest.raises(ValueError, match=f"own_head: .*{message}"):
            own_head(*given)


@pytest.mark.parametrize(
    "capability",
    [pytest.param((8, 0), marks=pytest.mark.battery), (9, 0), pytest.param((10, 0), marks=pytest.mark.battery)],
)
def test_compiles_without_spills(capability: tuple[int, int]) -> None:
    """Of Llama-3.1-8B's head."""
    with ahead_of_time.recorded(capability, triton_own_head) as recorded:
        triton_own_head.own_head(empty(8, 128256), empty(8, 4096), integers(8), empty(2, 128256, 4096), integers(2))
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)
