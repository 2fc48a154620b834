"""The exact linear layer without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools
import itertools
import re

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import product_choices, triton_linear
from compiled_llm.ops.linear.exact_linear import NOTHING, exact_linear, exact_linear_reference
from compiled_llm.ops.linear.product_choices import LinearTile, num_chains, num_counters
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.programmatic_launch import programmatic_launches
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import PROGRAM_MEMORY, empty

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def arguments(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, bias: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(outputs * inputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    columns = torch.randn(outputs, generator=generator) if bias else None
    return tuple(None if t is None else t.to(dtype).to(device) for t in (x, weight, columns))  # type: ignore[return-value]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return exact_linear_reference(x, weight, bias, None, *NOTHING.following)


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(dtype: torch.dtype, device: str = "cpu") -> None:
    for rows, outputs, inputs, bias in ((1, 40, 100, True), (5, 33, 64, False), (17, 7, 129, True), (3, 64, 8, False)):
        given = arguments(rows, outputs, inputs, dtype, bias, device)
        got, want = triton_linear.exact_linear(*given), reference(*given)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    x, weight, bias_ = arguments(4, 16, 32, dtype, True, device)
    assert triton_linear.exact_linear(x[:0], weight, bias_).shape == (0, 16)


def a_row_has_the_same_bits_in_every_tile(dtype: torch.dtype, tiles: tuple[LinearTile, ...]) -> None:
    """Alone and among others, in each tile of a GPU, wherever the rows lie; with a last block of inputs cut short."""
    x, weight, bias = arguments(70, 40, 100, dtype, True)
    found = []
    for tile in tiles:
        tile = tile._replace(m=min(tile.m, 128), n=min(tile.n, 64))  # the interpreter's largest tensor is small
        product = functools.partial(triton_linear.exact_linear, weight=weight, bias=bias, tile=tile)
        whole = product(x)
        for part in (slice(0, 1), slice(69, 70), slice(3, 20)):
            assert torch.equal(product(x[part]), whole[part])
        apart = torch.full((70, 103), float("nan"), dtype=dtype)
        apart[:, 2:-1] = x
        assert torch.equal(product(apart[:, 2:-1]), whole)
        found.append(whole)
    assert all(torch.equal(found[0], other) for other in found[1:])


def parts_of_the_inputs_are_added_up_in_one_order(dtype: torch.dtype) -> None:
    """By programs of their own or by one; with a last part cut short; and counters are zeros again."""
    for outputs, inputs in ((40, 1536), (33, 1700)):
        assert num_chains(outputs, inputs) > 1
        x, weight, bias = arguments(18, outputs, inputs, dtype, True)
        counters = torch.zeros(num_counters(outputs, inputs), dtype=torch.int32)
        whole = triton_linear.exact_linear(x, weight, bias)
        torch.testing.assert_close(whole, reference(x, weight, bias), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for tile in (LinearTile(32, 16, 64, 4, 4), LinearTile(32, 64, 256, 4, 2)):
            for rows, given in ((1, counters), (18, counters), (18, None)):
                got = triton_linear.exact_linear(x[:rows], weight, bias, given, tile=tile)
                assert torch.equal(got, whole[:rows])
                assert not counters.any()
        if dtype == torch.float32:
            continue
        got = triton_linear.exact_linear(x[:3], weight, bias, counters, "", torch.ones(3, outputs).to(dtype))
        assert torch.equal(got, (whole[:3].float() + 1).to(dtype))
        if outputs % 2 == 0:
            apart = triton_linear.exact_linear(x[:3], weight, bias, None, "silu")
            assert torch.equal(triton_linear.exact_linear(x[:3], weight, bias, counters, "silu"), apart)
        assert not counters.any()


MEASURED = {
    choice.tile: product
    for path in product_choices.FOLDER.glob("*.json")
    for product, choices in product_choices.load(path).items()
    for choice in choices
    if choice.tile is not None
}
TILES = {"FLOAT32": triton_linear.FLOAT32, "MMA": triton_linear.MMA, "WGMMA": triton_linear.WGMMA}
TILES["measured"] = (triton_linear.WGMMA[0], *MEASURED)

INTERPRETED = {
    **{f"reference-{str(dtype)[6:]}": functools.partial(agrees_with_the_reference, dtype) for dtype in DTYPES},
    **{
        f"tiles-{str(dtype)[6:]}-{tiles}": functools.partial(a_row_has_the_same_bits_in_every_tile, dtype, TILES[tiles])
        for dtype, tiles in (
            (torch.float32, "FLOAT32"), (torch.bfloat16, "MMA"), (torch.bfloat16, "WGMMA"),
            (torch.bfloat16, "measured"), (torch.float16, "MMA"),
        )
    },
    **{
        f"parts-{str(dtype)[6:]}": functools.partial(parts_of_the_inputs_are_added_up_in_one_order, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    },
}  # fmt: skip


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launch(
    capability: tuple[int, int], dtype: torch.dtype, rows: int, around: Surroundings = NOTHING,
    tile: LinearTile | None = None, shape: tuple[int, int] = (6144, 4096),
) -> ahead_of_time.Launch:  # fmt: skip
    """What so many rows launch on a GPU of that capability."""
    x, weight, bias = (empty(*sizes, dtype=dtype) for sizes in ((rows, shape[1]), shape, shape[:1]))
    count = num_counters(*shape)
    counters = empty(count, dtype=torch.int32) if count else None
    with ahead_of_time.recorded(capability, triton_linear) as recorded:
        triton_linear.exact_linear(x, weight, bias, counters, *around.following, tile=tile)
    return recorded[0]


def products(ptx: str, dtype: torch.dtype) -> set[str]:
    """The instructions that add products up, but for how many outputs they have."""
    if dtype == torch.float32:
        return set(re.findall(r"fma\.\w+\.f32|mul\.f32|wgmma|mma\.sync", ptx))
    return {re.sub(r"m\d+n\d+", "", name) for name in re.findall(r"(?:wgmma\.mma_async|\bmma\.sync)\S+", ptx)}


WGMMA = "wgmma.mma_async.sync.aligned.k16.f32.bf16.bf16"
MMA = "mma.sync.aligned.k16.row.col.f32.bf16.bf16.f32"


ALL_ROWS = (1, 16, 32, 64, 100, 2048)


@pytest.mark.parametrize(
    ("capability", "dtype", "instruction", "rows"),
    [
        ((9, 0), torch.bfloat16, WGMMA, (1, 2048)),
        ((8, 0), torch.float32, "fma.rn.f32", (1, 2048)),
        pytest.param((9, 0), torch.bfloat16, WGMMA, ALL_ROWS, marks=pytest.mark.battery),
        pytest.param((8, 0), torch.bfloat16, MMA, ALL_ROWS, marks=pytest.mark.battery),
        pytest.param((9, 0), torch.float16, WGMMA.replace("bf16", "f16"), ALL_ROWS, marks=pytest.mark.battery),
        pytest.param((8, 0), torch.float32, "fma.rn.f32", ALL_ROWS, marks=pytest.mark.battery),
    ],
    ids=str,
)
def test_every_tile_adds_up_by_the_same_instruction(
    capability: tuple[int, int], dtype: torch.dtype, instruction: str, rows: tuple[int, ...]
) -> None:
    made = {tuple(each[2].items()): each for each in (launch(capability, dtype, count) for count in rows)}
    tiles = triton_linear.tiles_of(dtype.itemsize, capability)
    assert rows != ALL_ROWS or len(made) == len(tiles), "a tile that no number of rows takes"
    for each in made.values():
        binary, _ = ahead_of_time.without_spills(each, capability)
        assert binary.metadata.shared <= PROGRAM_MEMORY[capability]
        assert products(binary.asm["ptx"], dtype) == {instruction}


@pytest.mark.parametrize("capability", [(9, 0), pytest.param((8, 0), marks=pytest.mark.battery)])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.battery), 32, 2048])
def test_parts_of_the_inputs_compile_without_spills(rows: int, capability: tuple[int, int]) -> None:
    """Of few rows each part has a program; the last one has all their sums in registers."""
    made = launch(capability, torch.bfloat16, rows, shape=(1024, 3072))
    assert made[2]["CHAINS"] == 4
    counters = made[1][made[0].arg_names.index("counters")]
    assert (counters is None) == (rows > 32)
    binary, _ = ahead_of_time.without_spills(made, capability)
    assert products(binary.asm["ptx"], torch.bfloat16) == {WGMMA if capability == (9, 0) else MMA}


MEASURED_TILES = {str(tuple(tile)): tile for tile in MEASURED}


@pytest.mark.parametrize("name", marked(MEASURED_TILES, [*MEASURED_TILES][:1]))
def test_measured_tiles_add_up_likewise(name: str) -> None:
    """Of the files of measured products, which are those of Hopper GPUs: ``MMA`` gives the same bits there."""
    tile = MEASURED_TILES[name]
    product = MEASURED[tile]
    around = Surroundings(activation="silu" if product.around == "gate" else "")
    shape = product.out_features, product.in_features
    binary, _ = ahead_of_time.without_spills(launch((9, 0), torch.bfloat16, tile.m, around, tile, shape), (9, 0))
    assert binary.metadata.shared <= PROGRAM_MEMORY[9, 0]
    assert products(binary.asm["ptx"], torch.bfloat16) == {WGMMA if tile.n >= 64 else MMA}


def test_weights_are_asked_for_before_anything_is_waited_for() -> None:
    """Before the launch before has ended; nothing else is read before that."""
    with programmatic_launches():
        made = launch((9, 0), torch.bfloat16, 1)
    ptx = ahead_of_time.compiled(made, (9, 0)).asm["ptx"]
    places = [ptx.index(name) for name in ("prefetch.global.L2", "griddepcontrol.wait", "cp.async", "wgmma.mma_async")]
    assert places == sorted(places)
    assert "ld.global" not in ptx[: places[1]]


# ---- registered, refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_op_is_registered_as_torch_expects(dtype: torch.dtype) -> None:
    for bias in (False, True):
        given = arguments(3, 5, 8, dtype, bias)
        torch.library.opcheck(
            torch.ops.compiled_llm.exact_linear,
            (*given, None, *NOTHING.following),
            test_utils=("test_schema", "test_faketensor"),
        )
        torch.testing.assert_close(exact_linear(*given), torch.nn.functional.linear(*given), atol=0.02, rtol=0.02)


X, W, B = arguments(2, 4, 8, torch.float32, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((X[0], W, B), r"x must be \[T, K\]"),
        ((X.double(), W.double(), None), "of float32, bfloat16 or float16"),
        ((X.t(), W, B), "last stride 1"),
        ((X, W[:, :4], B), r"weight must be a contiguous \[N, 8\]"),
        ((X, W.t().contiguous().t(), B), "weight must be a contiguous"),
        ((X, W.half(), B), r"weight must be a contiguous \[4, 8\] of torch.float32 on cpu, got .* of torch.float16"),
        ((X, W, X[0]), r"bias must be a contiguous \[4\]"),
    ],
)
def test_refuses_by_name(given: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_linear.exact_linear(*given)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_tiles_of_all_sizes_have_one_instruction(capability: tuple[int, int]) -> None:
    """Of fewer than 16 rows Triton 3.6 and 3.7 make ``mma.sync``: with such a tile a row's bits follow its company."""
    of_outputs = [(tile.n, tile.m, tile.warps) for tile in triton_linear.tiles_of(2, capability)]
    of_rows = [(tile.m, tile.n, tile.warps) for tile in triton_linear.row_tiles_of(2, capability)]
    for first, second, warps in of_outputs + of_rows:
        assert first >= 64
        assert second >= 16
        assert warps % 4 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    agrees_with_the_reference(dtype, "cuda")
    for outputs, inputs in ((4096, 4096), (1000, 1234), (1024, 3072), (1000, 1700)):
        x, weight, bias = arguments(3000, outputs, inputs, dtype, True, "cuda")
        counters = torch.zeros(num_counters(outputs, inputs), dtype=torch.int32, device="cuda")
        given = counters if len(counters) else None
        whole = exact_linear(x, weight, bias)
        torch.testing.assert_close(whole, reference(x, weight, bias), atol=0.03, rtol=0.03)
        for first, rows in itertools.product((0, 1, 777), (1, 2, 8, 16, 17, 64, 65, 200, 1024)):
            part = slice(first, first + rows)
            assert torch.equal(exact_linear(x[part], weight, bias, counters=given), whole[part])
        assert not counters.any()


@pytest.mark.gpu
def test_on_a_gpu_all_its_tiles_give_the_same_bits() -> None:
    capability = torch.cuda.get_device_capability()
    tiles = [*triton_linear.tiles_of(2, capability), *(MEASURED if capability == (9, 0) else ())]
    x, weight, bias = arguments(300, 4096, 2048, torch.bfloat16, True, "cuda")
    first, *others = (triton_linear.exact_linear(x, weight, bias, tile=tile) for tile in tiles)
    assert all(torch.equal(first, other) for other in others)


ORDINARY = ["reference-bfloat16", "tiles-float32-FLOAT32", "tiles-bfloat16-WGMMA"]
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
