"""Low-rank changes on a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import triton_lora
from compiled_llm.ops.linear.lora import (
    Following,
    LoraRows,
    LoraWeights,
    add_lora_reference,
    lora_followed_reference,
    slots_of_rows,
)
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS
from compiled_llm.ops.moe import triton_routing
from compiled_llm.ops.rowwise import triton_rowwise
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.linear.test_lora import DTYPES, problem, weights
from tests.ops.linear.test_triton_adapted import in_order

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


def launched(y: Tensor, x: Tensor, rows: LoraRows, w: LoraWeights, after: Following | None = None) -> list[Tensor]:
    """What follows; flags are zeros again."""
    flags = torch.zeros(NUM_FLAGS, dtype=torch.int32)
    found = triton_lora.lora_followed(y, x, *rows, *w, flags, *(after or Following()))
    assert not flags.any(), "left for the next launch"
    return [*found[:2]]


def what_follows_has_the_bits_of_its_own_op() -> None:
    """Norms of a sum, gates, an activation: of rows with slots and without."""
    w = weights((40, 24), 40, 9, torch.bfloat16)
    y, x, slots = problem(3, w)
    changed = y.clone()
    triton_lora.add_lora(changed, x, slots, *w)
    residual, norm = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    out, total = launched(y.clone(), x, LoraRows(slots), w, Following(residual=residual, norm=norm, eps=1e-6))
    want = triton_rowwise.add_rms_norm(residual, changed, norm, 1e-6)
    assert torch.equal(total, want[0])
    assert torch.equal(out, want[1])
    norms = torch.rand(64).bfloat16(), torch.tensor([0.5])
    after = Following(residual=residual, delta_norm=norms[0], scale=norms[1], norm=norm, eps=1e-6)
    want = triton_rowwise.sum_of_norms(residual, None, changed, *norms, norm, 1e-6)
    assert [*map(torch.equal, launched(y.clone(), x, LoraRows(slots), w, after), reversed(want))] == [True, True]
    bias, beside = torch.randn(64).bfloat16(), torch.randn(3, 64).bfloat16()
    for one in (None, beside):
        after = Following(residual=residual, beside=one, norm=norm, norm_bias=bias, eps=1e-6)
        want = triton_rowwise.add_layer_norm(residual, changed if one is None else changed + one, norm, bias, 1e-6)
        assert [*map(torch.equal, launched(y.clone(), x, LoraRows(slots), w, after), reversed(want))] == [True, True]
    first = triton_rowwise.rms_norm(changed[:, :23], norm[:23], 1e-6)
    for following, expected in (
        (Following(norm=norm[:23], eps=1e-6), first),
        (Following("silu"), triton_rowwise.gated_activation(changed, "silu")),
        (Following("relu2", gated=False), triton_rowwise.activation(changed, "relu2")),
        (Following("clamped_swiglu", alpha=1.7, limit=1.0), triton_rowwise.clamped_swiglu(changed, 1.7, 1.0)),
    ):
        assert torch.equal(launched(y.clone(), x, LoraRows(slots), w, following)[0], expected)


def programs_wait_for_those_before() -> None:
    """Whatever order they come in: gates are of all that was added."""
    w = weights((24, 24), 40, 9, torch.bfloat16)
    y, x, slots = problem(3, w)
    want = y.clone()
    triton_lora.add_lora(want, x, slots, *w)
    for backwards in (False, True):
        with in_order(backwards):
            got = launched(y.clone(), x, LoraRows(slots), w, Following("silu"))[0]
        assert torch.equal(got, triton_rowwise.gated_activation(want, "silu"))


def experts_find_their_slots() -> None:
    """Rows of inputs or of tokens, of experts with no row and nobody's; and their sum."""
    starts, tokens = torch.tensor((0, 3, 3, 7), dtype=torch.int32), torch.tensor((0, 2, 3, 1, 0, 2, 3, -7, 99)).int()
    slots, w = torch.tensor((2, 0, 1, 3), dtype=torch.int32), weights((24, 24), 40, 8, torch.bfloat16, slots=3 * 3)
    y, rows = torch.randn(9, 48).bfloat16(), LoraRows(slots, tokens, starts, 3)
    places, shares = torch.tensor(((0, 4), (3, -1), (1, 5), (2, 6)), dtype=torch.int32), torch.rand(4, 2)
    residual = torch.randn(4, 48).bfloat16()
    for gathered in (False, True):
        x = torch.randn(4 if gathered else 9, 40).bfloat16()
        given, want = rows._replace(gathered=gathered), y.clone()
        own = slots_of_rows(slots, tokens, starts, 3)
        assert own.tolist() == [4, 1, 7, 0, 6, 3, 9, 0, 0]
        triton_lora.add_lora(want, x[tokens.clamp(0, 3)] if gathered else x, own, *w)
        got = y.clone()
        after = Following(residual=residual, places=places, weights=shares)
        expected = triton_routing.weighted_sum(want, places, shares, None, residual)
        assert torch.equal(launched(got, x, given, w, after)[0], expected)
        assert torch.equal(got, want)


def heads_find_their_slots() -> None:
    """Of strided inputs, against the op of rows."""
    slots, w = torch.tensor((2, 0, 1, 3), dtype=torch.int32), weights((24,), 40, 8, torch.bfloat16, slots=3 * 5)
    y, x = torch.randn(4, 5, 24).bfloat16(), torch.randn(4, 5, 48).bfloat16()[..., :40]
    want = y.clone()
    triton_lora.add_lora(want.flatten(0, 1), x.flatten(0, 1), slots_of_rows(slots, None, None, 5), *w)
    launched(y, x, LoraRows(slots, groups=5), w)
    assert torch.equal(y, want)


def agrees_with_its_reference() -> None:
    """The op's own, of heads and of experts with what follows."""
    w = weights((24, 24), 40, 8, torch.float32, slots=6)
    slots = torch.tensor((2, 0, 1), dtype=torch.int32)
    heads = torch.randn(3, 3, 48), torch.randn(3, 3, 40), LoraRows(slots, groups=3), Following()
    tokens, bounds = torch.tensor((2, 0, 1, 2), dtype=torch.int32), torch.tensor((0, 1, 3, 4), dtype=torch.int32)
    experts = (
        torch.randn(4, 48),
        torch.randn(3, 40),
        LoraRows(slots, tokens, bounds, 3, gathered=True),
        Following("silu"),
    )
    dense = torch.randn(3, 48), torch.randn(3, 40), LoraRows(slots)
    sums = Following(residual=torch.randn(3, 48), norm=torch.rand(48), eps=1e-6)
    layer_norms = sums._replace(norm_bias=torch.randn(48), beside=torch.randn(3, 48))
    of_first = Following(norm=torch.rand(23), eps=1e-6)
    for y, x, rows, after in (heads, experts, (*dense, sums), (*dense, layer_norms), (*dense, of_first)):
        expected = y.clone()
        of_reference = lora_followed_reference(expected, x, *rows, *w, None, *after)
        for got, want in zip(launched(y, x, rows, w, after), of_reference, strict=False):
            torch.testing.assert_close(got, want, atol=5e-4, rtol=5e-4)
        torch.testing.assert_close(y, expected, atol=5e-4, rtol=5e-4)


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
        with pytest.raises(ValueError, match=f"lora_followed: {message}"):
            triton_lora.add_lora(*arguments)
    norms = {"residual": torch.ones(3, 48), "norm": torch.ones(48)}
    for more in ({"beside": y}, {"norm_bias": torch.ones(48), "scale": torch.ones(1)}):
        with pytest.raises(ValueError, match="beside and norm_bias must be None but for a layer norm"):
            launched(y, x, LoraRows(slots), w, Following(**norms, **more))
    with pytest.raises(ValueError, match="norm must be of at most 48 elements"):
        launched(y, x, LoraRows(slots), w, Following(norm=torch.ones(49)))


INTERPRETED = {
    **{str(dtype)[6:]: functools.partial(agrees_with_the_reference, dtype) for dtype in DTYPES},
    "alone": a_row_has_the_same_bits_in_any_company,
    "following": what_follows_has_the_bits_of_its_own_op,
    "waits": programs_wait_for_those_before,
    "experts": experts_find_their_slots,
    "heads": heads_find_their_slots,
    "reference": agrees_with_its_reference,
    "refused": others_are_refused,
}
test_interpreted = interpreted.each_of(INTERPRETED, ["following", "waits", "heads", "refused"])
FOLLOWING = ("", "norm", "own norm", "layer norm", "gate", "sum")
CASES = [
    (capability, *case)
    for capability in ((8, 0), (9, 0), (10, 0))
    for case in itertools.product((16, 64, 512), FOLLOWING, (64, 2048))
]


@pytest.mark.parametrize(
    ("capability", "rank", "after", "rows"),
    [pytest.param(*case, marks=() if case == ((9, 0), 16, "norm", 64) else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(capability: tuple[int, int], rank: int, after: str, rows: int) -> None:
    """Of the gates of Llama-3.1-8B; with a sum, of 128 experts; of decodes and of a chunk."""
    wide = 28672 if after == "gate" else 4096
    parts = 2 if after == "gate" else 1
    following, y = Following("silu" if after == "gate" else ""), empty(rows, wide)
    where, num_slots = LoraRows(integers(rows)), 8
    if after == "norm":
        following = Following(residual=empty(rows, wide), norm=empty(wide))
    elif after == "own norm":
        following = Following(norm=empty(1536))
    elif after == "layer norm":
        residual, beside = empty(rows, wide), empty(rows, wide)
        following = Following(residual=residual, beside=beside, norm=empty(wide), norm_bias=empty(wide))
    elif after == "sum":
        following = Following(places=integers(rows // 8, 8), weights=floats(rows // 8, 8))
        where, num_slots = LoraRows(integers(rows // 8), integers(rows), integers(129), 128), 8 * 128
    a, b = empty(num_slots, parts, rank, 4096), empty(num_slots, wide // 16, rank, 16)
    rest = integers(num_slots, parts), floats(num_slots, parts), integers(parts + 1), integers(NUM_FLAGS)
    with ahead_of_time.recorded(capability, triton_lora) as recorded:
        triton_lora.lora_followed(y, empty(rows, 4096), *where, a, b, *rest, *following)
    (launch,) = recorded
    # 8 bytes: the assembler would rather have 128 or 168 registers, with which one more program runs.
    binary, registers = ahead_of_time.without_spills(launch, capability, spilled=8)
    print(f"| {capability} {rank} {after} {rows} | {registers} | {binary.metadata.shared // 1024} KB |")
    ptx = binary.asm["ptx"]
    for stored in ptx.split("global.gpu.release.add")[:-1]:
        assert "bar.sync" in stored[stored.rindex("st.global") :], "all threads have stored"
    assert "global.gpu.acquire." in ptx  # by those that wait


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """What follows has the bits of its own op, also where a step is replayed."""
    w = weights((4096,), 4096, 64, torch.bfloat16, slots=8)
    on_gpu = type(w)(*(tensor.cuda() for tensor in w))
    y, x, residual = (torch.randn(256, 4096).bfloat16().cuda() for _ in range(3))
    norm, flags = torch.rand(4096).bfloat16().cuda(), torch.zeros(NUM_FLAGS, dtype=torch.int32).cuda()
    slots, changed = (torch.arange(256, dtype=torch.int32) % 9).cuda(), y.clone()
    triton_lora.add_lora(changed, x, slots, *on_gpu)
    want = triton_rowwise.add_rms_norm(residual, changed, norm, 1e-6)
    given = *LoraRows(slots), *on_gpu, flags, *Following(residual=residual, norm=norm, eps=1e-6)
    triton_lora.lora_followed(y.clone(), x, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [triton_lora.lora_followed(y.clone(), x, *given)[:2] for _ in range(3)]
    for _ in range(100):
        graph.replay()
    assert all(torch.equal(total, want[0]) and torch.equal(out, want[1]) for out, total in results)
    assert not flags.any()
