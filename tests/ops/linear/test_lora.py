"""Low-rank changes: every instruction set against the reference, rows in any company, the op's registration."""

import itertools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import LoraWeights, add_lora, native
from compiled_llm.ops.kernel_build import isas_of
from compiled_llm.ops.linear import lora
from tests.ops.instruction_sets import by_set, skip_without

OP = "lora_cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (outputs of each part, inputs, largest rank): one of each, whole tiles, parts that are no whole tiles, odd inputs
SHAPES = [((1,), 1, 1), ((32, 16, 16), 64, 16), ((40, 7, 7), 37, 8), ((50, 50), 100, 33)]


def weights(parts: tuple[int, ...], k: int, rank: int, dtype: torch.dtype, slots: int = 3) -> LoraWeights:
    """Random slots, of several ranks; NaN where nothing is to be read."""
    made = LoraWeights.empty(list(parts), k, slots, rank, dtype, torch.device("cpu"))
    made.a.fill_(torch.nan)
    made.b.fill_(torch.nan)
    for slot in range(slots):
        tile = 0
        for part, outputs in enumerate(parts):
            own = (rank, (rank + 1) // 2, 0)[(slot + part) % 3]
            b = lora.tiles_of(torch.randn(outputs, own).to(dtype) if own else torch.zeros(outputs, 0, dtype=dtype))
            made.a[slot, part, :own] = torch.randn(own, k).to(dtype)
            made.b[slot, tile : tile + len(b), :own] = b
            made.ranks[slot, part], made.scales[slot, part] = own, 0.5 + slot
            tile += len(b)
    return made


def exact(y: Tensor, x: Tensor, slots: Tensor, w: LoraWeights) -> Tensor:
    """Row by row in float64, from the definition."""
    y, bounds = y.double(), w.starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        tile = 0
        for part, (start, end) in enumerate(itertools.pairwise(bounds)):
            count = -(-(end - start) // 16)
            rank = int(w.ranks[slot - 1, part])
            if slot and rank:
                b = w.b[slot - 1, tile : tile + count, :rank].double().transpose(1, 2).reshape(-1, rank)[: end - start]
                change = b @ (w.a[slot - 1, part, :rank].double() @ x[row].double())
                y[row, start:end] += change * w.scales[slot - 1, part].double()
            tile += count
    return y


def problem(rows: int, w: LoraWeights) -> tuple[Tensor, Tensor, Tensor]:
    dtype = w.a.dtype
    slots = torch.randint(0, len(w.a) + 1, (rows,), dtype=torch.int32)
    return torch.randn(rows, int(w.starts[-1])).to(dtype), torch.randn(rows, w.a.shape[-1]).to(dtype), slots


def assert_near(actual: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(actual.dtype).eps
    assert ((actual.double() - expected).abs() <= expected.abs() * eps / 2 + 2e-5 * expected.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "k", "rank"), SHAPES)
@pytest.mark.parametrize("isa", by_set(OP))
def test_matches_float64(
    isa: str, parts: tuple[int, ...], k: int, rank: int, dtype: torch.dtype, kernels: native.Kernels
) -> None:
    skip_without(native.load(OP), isa)
    w = weights(parts, k, rank, dtype)
    for rows in (0, 1, 5, 40):
        y, x, slots = problem(rows, w)
        expected, before = exact(y, x, slots, w), y.clone()
        native.load(OP).run("add_lora", y, x, slots, *w, isa=isa)
        assert torch.equal(y[slots == 0], before[slots == 0])
        if rows:
            assert_near(y, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_matches_float64(dtype: torch.dtype) -> None:
    w = weights((40, 7, 7), 37, 8, dtype)
    y, x, slots = problem(20, w)
    expected = exact(y, x, slots, w)
    lora.add_lora_reference(y, x, slots, *w)
    assert_near(y, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", by_set(OP, isas_of(OP)))
def test_a_row_has_the_same_bits_in_any_company(isa: str, dtype: torch.dtype, kernels: native.Kernels) -> None:
    skip_without(native.load(OP), isa)
    run = native.load(OP).run
    w = weights((40, 7, 7), 237, 16, dtype)
    y, x, slots = problem(300, w)
    alone = y.clone()
    for row in range(0, 300, 7):
        one = slice(row, row + 1)
        run("add_lora", alone[one], x[one], slots[one], *w, isa=isa)
    run("add_lora", y, x, slots, *w, isa=isa)
    assert torch.equal(y[::7], alone[::7])


def test_rows_may_be_strided() -> None:
    w = weights((32, 16), 64, 16, torch.bfloat16)
    y, x, slots = problem(9, w)
    wide_y, wide_x = torch.randn(9, 60).bfloat16(), torch.randn(9, 80).bfloat16()
    wide_y[:, 5:53], wide_x[:, 7:71] = y, x
    add_lora(wide_y[:, 5:53], wide_x[:, 7:71], slots, w)
    add_lora(y, x, slots, w)
    assert torch.equal(wide_y[:, 5:53], y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, x, slots, w: (y, x[:4], slots, *w), "as many rows"),
        (lambda y, x, slots, w: (y.float(), x, slots, *w), "one dtype"),
        (lambda y, x, slots, w: (y, x, slots.long(), *w), "slots must be"),
        (lambda y, x, slots, w: (y, x, slots, *w._replace(a=w.a[:, :, :8])), "a must be"),
        (lambda y, x, slots, w: (y, x, slots, *w._replace(b=w.b[:, :1].contiguous())), "starts must rise"),
        (lambda y, x, slots, w: (y[:, :40], x, slots, *w), "starts must rise"),
    ],
)
def test_refuses_what_does_not_fit(change, message: str) -> None:
    w = weights((32, 16), 64, 16, torch.bfloat16)
    if native.load(OP) is None:
        pytest.skip("the reference checks nothing")
    with pytest.raises(ValueError, match=message):
        torch.ops.compiled_llm.add_lora(*change(*problem(9, w), w))


def test_refuses_a_slot_that_there_is_not() -> None:
    w = weights((32,), 64, 16, torch.float32)
    y, x, slots = problem(9, w)
    slots[4] = 4
    if native.load(OP) is None:
        pytest.skip("the reference checks nothing")
    with pytest.raises(IndexError, match="from 0 to 3, got 4"):
        add_lora(y, x, slots, w)


def test_registration() -> None:
    w = weights((32, 16), 64, 16, torch.float32)
    torch.library.opcheck(
        torch.ops.compiled_llm.add_lora, (*problem(5, w), *w), test_utils=("test_schema", "test_faketensor")
    )
    flags, rows = torch.zeros(2, dtype=torch.int32), lora.LoraRows(torch.zeros(5, dtype=torch.int32))
    following = (
        lora.Following(),
        lora.Following("silu"),
        lora.Following(residual=torch.ones(5, 48), norm=torch.ones(48)),
        lora.Following(places=torch.zeros(5, 1, dtype=torch.int32), weights=torch.ones(5, 1)),
    )
    for after in following:
        y, x, _ = problem(5, w)
        torch.library.opcheck(
            torch.ops.compiled_llm.lora_followed,
            (y, x, *rows, *w, flags, *after),
            test_utils=("test_schema", "test_faketensor"),
        )
