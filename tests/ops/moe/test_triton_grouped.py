"""The grouped product without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools
import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import triton_linear, triton_lora
from compiled_llm.ops.linear.lora import Following, LoraRows
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS
from compiled_llm.ops.moe import triton_grouped
from compiled_llm.ops.moe.grouped_linear import grouped_linear, grouped_linear_reference
from compiled_llm.ops.moe.routing import weighted_sum_added_reference
from compiled_llm.ops.rowwise.reference import clamped_swiglu_reference, gated_activation_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.linear.test_lora import weights as adapter_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
GATES = (("silu", 0.0, 0.0), ("gelu_tanh", 0.0, 0.0), ("clamped_swiglu", 1.7, 0.5))
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
    for number, counts in enumerate(COUNTS):
        x, weight, bias, rows, starts = arguments(counts, dtype, device)
        offset, used = bias if number % 2 else None, sum(counts)
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


def gates_have_the_bits_of_the_single_ops(dtype: torch.dtype) -> None:
    for counts, (activation, *limits) in itertools.product(COUNTS[:1], GATES):
        x, weight, bias, rows, starts = arguments(counts, dtype, n=40)
        used, given = sum(counts), (x, weight, bias, rows, starts, activation, *limits)
        got = triton_grouped.grouped_linear(*given)[:used]
        wide = triton_grouped.grouped_linear(*given[:5])[:used]
        close = {"atol": 1e-5, "rtol": TOLERANCE[dtype]}
        if activation == "clamped_swiglu":
            torch.testing.assert_close(got, clamped_swiglu_reference(wide, *limits), **close)
        else:
            torch.testing.assert_close(got, gated_activation_reference(wide, activation), **close)


def sums_have_the_bits_of_the_single_ops(dtype: torch.dtype) -> None:
    """With experts without rows, all rows of one, and nothing but padding; counters are left as they were."""
    generator = torch.Generator().manual_seed(1)
    for counts, padding in (([2, 0, 19, 1, 0], 1), ([0, 0, 0, 0, 4], 0), ([0] * 5, 17)):
        real, tokens = sum(counts) // 2, sum(counts) // 2 + padding
        x, weight, bias, _, starts = arguments(counts, dtype, n=40)
        x = torch.randn(2 * tokens, x.shape[1], generator=generator).to(x)
        order = torch.randperm(2 * real, generator=generator).int()
        places = torch.full((tokens, 2), -1, dtype=torch.int32)
        places[:real] = order.view(real, 2)
        rows = torch.empty(2 * tokens, dtype=torch.int32)
        rows[places[:real].flatten().long()] = torch.arange(2 * real, dtype=torch.int32) // 2
        weights = torch.rand(tokens, 2, generator=generator)
        around = [torch.randn(tokens, 40, generator=generator).to(x) for _ in range(2)]
        counters = torch.zeros(3 * tokens, dtype=torch.int32)
        for beside, residual in ((None, None), (None, around[1]), around):
            added = places, weights, beside, residual, counters
            got = triton_grouped.grouped_linear_sum(x, weight, bias, rows, starts, *added)
            y = triton_grouped.grouped_linear(x, weight, bias, None, starts)
            assert torch.equal(got, weighted_sum_added_reference(y, places, weights, beside, residual))
            assert not counters.any()


def adapters_have_the_bits_of_launches_of_their_own(dtype: torch.dtype) -> None:
    """With experts without rows and padding, gates and ups of one part and of two; flags are zeros again.

    Of few rows, and of so many that one expert has two tiles, which take back what they have stored in several pieces.
    """
    for counts in ([2, 0, 3, 1, 0], [30, 0, 140, 8, 0]):
        _adapters_have_the_bits(dtype, counts, sum(counts) // 2 + 1, 2)


def _adapters_have_the_bits(dtype: torch.dtype, counts: list[int], tokens: int, top_k: int) -> None:
    _, weight, bias, _, starts = arguments(counts, dtype, n=40)
    x, real, order = torch.randn(tokens, 72).to(dtype), tokens - 1, torch.randperm(sum(counts))
    places = torch.full((tokens, top_k), -1, dtype=torch.int32)
    places[:real] = order.view(real, top_k)
    rows = torch.tensor((-7, 99), dtype=torch.int32).repeat(tokens)
    rows[order] = torch.arange(sum(counts), dtype=torch.int32) // top_k
    slots, shares = torch.arange(2, 2 + tokens, dtype=torch.int32) % 3, torch.rand(tokens, top_k)
    flags, counters = torch.zeros(NUM_FLAGS, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32)
    where = LoraRows(slots, rows, starts, len(counts))
    for parts, gathered in (((20, 20), True), ((40,), True), ((40,), False)):
        w = adapter_weights(parts, 72, 20, dtype, slots=2 * len(counts))
        lora, given = (slots, *w, flags), x if gathered else torch.randn(tokens * top_k, 72).to(dtype)
        if gathered:
            y = triton_grouped.grouped_linear(given, weight, bias, rows, starts)
            after = Following("silu")
            got = triton_grouped.grouped_linear(given, weight, bias, rows, starts, "silu", lora=lora)
        else:
            y = triton_grouped.grouped_linear(given, weight, bias, None, starts)
            after = Following(places=places, weights=shares)
            sums = places, shares, None, None, counters
            got = triton_grouped.grouped_linear_sum(given, weight, bias, rows, starts, *sums, lora)
        assert not flags.any(), "left for the next launch"
        of_rows = where._replace(gathered=gathered)
        want = triton_lora.lora_followed(y, given, *of_rows, *w, flags, *after)[0]
        count = sum(counts) if gathered else tokens  # other rows are anything
        assert torch.equal(got[:count], want[:count])


INTERPRETED = {
    **{
        f"adapters-{str(d)[6:]}": functools.partial(adapters_have_the_bits_of_launches_of_their_own, d)
        for d in DTYPES[1:]
    },
    **{f"reference-{str(d)[6:]}": functools.partial(agrees_with_the_reference, d) for d in DTYPES},
    **{f"gates-{str(d)[6:]}": functools.partial(gates_have_the_bits_of_the_single_ops, d) for d in DTYPES[1:]},
    **{f"sums-{str(d)[6:]}": functools.partial(sums_have_the_bits_of_the_single_ops, d) for d in DTYPES[1:]},
    **{f"tiles-{str(d)[6:]}": functools.partial(a_row_has_the_bits_of_a_single_layer_in_every_tile, d)
       for d in DTYPES[:2]},
}  # fmt: skip


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


LAYERS = {  # outputs, inputs, experts, experts of a token, activation: "" for the product with the sum behind
    "alone": (1536, 2048, 128, 8, None),
    "gate_up": (768, 2048, 128, 8, "silu"),
    "down": (2048, 768, 128, 8, ""),
    "gate_up of few": (14336, 4096, 8, 2, "silu"),
    "down of few": (4096, 14336, 8, 2, ""),
    "clamped": (2880, 2880, 32, 4, "clamped_swiglu"),
}
SOME = [("alone", 1, (8, 0))]
CASES = [
    (name, tokens, capability)
    for name, (*_, activation) in LAYERS.items()
    for tokens in ((1, 8, 32, 64, 256) if activation == "" else (1, 8, 32, 256, 2048))
    for capability in ((8, 0), (9, 0), (10, 0))
]


@pytest.mark.parametrize(
    ("name", "tokens", "capability", "adapted"),
    [
        pytest.param(*case, adapted, marks=() if case in SOME and not adapted else pytest.mark.battery)
        for case, adapted in itertools.product(CASES, (False, True))
        if not adapted or case[0] != "alone"
    ],
    ids=str,
)
def test_compiles_without_spills(name: str, tokens: int, capability: tuple[int, int], adapted: bool) -> None:
    """Alone, and with gates and sums; with adapters of rank 64."""
    outputs, inputs, experts, top_k, activation = LAYERS[name]
    many = tokens * top_k
    rows, starts = integers(many), integers(experts + 1)
    parts, lora = 2 if activation else 1, tuple[Tensor, ...]()
    if adapted:
        a, b = empty(8 * experts, parts, 64, inputs), empty(8 * experts, outputs * parts // 16, 64, 16)
        of_slots = integers(8 * experts, parts), floats(8 * experts, parts)
        lora = integers(tokens), a, b, *of_slots, integers(parts + 1), integers(NUM_FLAGS)
    with ahead_of_time.recorded(capability, triton_grouped) as recorded:
        if activation == "":
            x, residual, counters = empty(many, inputs), empty(tokens, outputs), integers(2**17)
            added = integers(tokens, top_k), floats(tokens, top_k), None, residual, counters
            triton_grouped.grouped_linear_sum(x, empty(experts, outputs, inputs), None, rows, starts, *added, lora)
        else:
            gate = (activation, 1.7, 7.0) if activation else ()
            x, weight = empty(tokens, inputs), empty(experts, outputs * (2 if activation else 1), inputs)
            triton_grouped.grouped_linear(x, weight, None, rows, starts, *(gate or ("", 0.0, 0.0)), lora)
    (launch,) = recorded
    binary, _ = ahead_of_time.without_spills(launch, capability)
    if activation is None and capability != (10, 0):
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    agrees_with_the_reference(dtype, "cuda")
    x, weight, bias, rows, starts = arguments([300, 0, 70, 1, 9], dtype, "cuda", n=500, k=1000)
    out = grouped_linear(x, weight, bias, rows, starts)
    for expert, (first, end) in enumerate(itertools.pairwise(starts.tolist())):
        alone = triton_linear.exact_linear(x[rows[first:end]], weight[expert], bias[expert])
        assert torch.equal(out[first:end], alone)


ORDINARY = ["reference-bfloat16", "gates-bfloat16", "sums-bfloat16", "tiles-bfloat16"]
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
