"""Sums and joins over ranks: every instruction set and the reference, whatever the pieces; errors; registration."""

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import RankGroup, all_gather, all_reduce, join_parts, native
from compiled_llm.ops.parallel import reductions
from compiled_llm.ops.parallel.rank_group import abort, bytes_for, meetings
from tests.ops.instruction_sets import by_set, skip_without
from tests.ops.parallel.ranks import run_ranks

OP = "parallel_cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 37), (5, 64), (0, 8)]
LARGE = (9, 1001)  # of whose sum each rank adds up a section
PIECES = [128, 1 << 16]  # bytes at once: many pieces, which begin within rows, and one


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]


def assert_all_equal(results: list[Tensor], expected: Tensor) -> None:
    for result in results:
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("isa", [*by_set(OP), "reference"])
def test_sums_are_in_the_order_of_ranks(isa: str, size: int, dtype: torch.dtype) -> None:
    if isa != "reference":
        skip_without(native.load(OP), isa)
    for shape in [*SHAPES, LARGE]:
        xs = inputs(size, shape, dtype)
        total = xs[0].float()
        for x in xs[1:]:
            total = total + x.float()

        def run(rank: int, group: RankGroup, xs: list[Tensor] = xs) -> Tensor:
            if isa == "reference":
                return reductions.all_reduce_reference(xs[rank], *group)
            return native.load(OP).run("all_reduce", xs[rank], *group, isa=isa)

        for piece in PIECES if shape != LARGE else PIECES[1:]:
            assert_all_equal(run_ranks(size, run, piece), total.to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("function", [torch.ops.compiled_llm.all_gather, reductions.all_gather_reference])
def test_columns_are_gathered_rank_after_rank(function: object, size: int, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        xs = inputs(size, shape, dtype)
        for piece in PIECES:
            results = run_ranks(size, lambda rank, group, xs=xs: function(xs[rank], *group, size), piece)
            assert_all_equal(results, torch.cat(xs, dim=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("isa", [*by_set(OP), "reference"])
def test_parts_are_joined_to_the_same_bits_by_any_number_of_ranks(isa: str, dtype: torch.dtype) -> None:
    if isa != "reference":
        skip_without(native.load(OP), isa)
    parts = torch.randn(8, 3, 37, generator=torch.Generator().manual_seed(0))
    pairs = [parts[i] + parts[i + 1] for i in range(0, 8, 2)]
    expected = ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])).to(dtype)
    for size in (1, 2, 4, 8):
        own = parts.chunk(size)

        def run(rank: int, group: RankGroup, own: tuple[Tensor, ...] = own) -> Tensor:
            arguments = own[rank].contiguous(), *group, len(own), str(dtype).removeprefix("torch.")
            if isa == "reference":
                return reductions.join_parts_reference(*arguments)
            return native.load(OP).run("join_parts", *arguments, isa=isa)

        for piece in PIECES if size < 8 else PIECES[1:]:
            assert_all_equal(run_ranks(size, run, piece), expected)


def test_ops_follow_each_other_in_the_same_memory() -> None:
    """Also where one rank is always late, and where pieces are of different sizes."""

    def run(rank: int, group: RankGroup) -> list[Tensor]:
        results = []
        for i in range(50):
            x = torch.full((1 + i % 3, 40), float(rank + i))
            if rank == i % 2:
                torch.randn(200, 200) @ torch.randn(200, 200)
            results += [all_reduce(x, group), all_gather(x[:1], group, 2)]
            if i % 5 == 0:
                all_reduce(torch.ones(9, 1001), group)
            results.append(join_parts(x.expand(4, -1, -1).contiguous(), group, 2, torch.float32))
        return results

    first, second = run_ranks(2, run, 1 << 16)
    assert all(map(torch.equal, first, second))
    for i in range(50):
        assert first[3 * i].eq(2 * i + 1).all()
        assert first[3 * i + 1].tolist() == [[float(i)] * 40 + [float(i + 1)] * 40]
        assert first[3 * i + 2].eq(4 * (2 * i + 1)).all()


@pytest.mark.parametrize("function", [torch.ops.compiled_llm.all_reduce, reductions.all_reduce_reference])
def test_who_waits_for_a_failed_rank_gets_an_error(function: object) -> None:
    x = torch.ones(2, 8)

    def run(rank: int, group: RankGroup) -> list[int]:
        if rank == 1:
            while meetings(group.memory, 2) == [0, 0]:
                pass
            behind = meetings(group.memory, 2)
            abort(group.memory, 1)
            return behind
        with pytest.raises(RuntimeError, match="rank 1 has failed"):
            function(x, *group)
        with pytest.raises(RuntimeError, match="rank 1 has failed"):  # and it stays so
            function(x, *group)
        return []

    assert run_ranks(2, run)[1] == [1, 0]


def test_refusals() -> None:
    x, two = torch.ones(2, 8), RankGroup.of(0, 2, torch.zeros(bytes_for(2, 128), dtype=torch.uint8))
    alone = RankGroup.alone()
    with pytest.raises(ValueError, match=r"contiguous, of 2 dimensions, on the CPU, got \[2\]"):
        all_reduce(torch.ones(2), alone)
    with pytest.raises(ValueError, match="contiguous"):
        all_gather(x.t(), alone, 1)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16, got int64"):
        all_reduce(x.long(), alone)
    with pytest.raises(ValueError, match="size must be that of the group, 1, got 2"):
        all_gather(x, alone, 2)
    with pytest.raises(ValueError, match="parts of all ranks must be 8, got 4 for 1 ranks"):
        join_parts(torch.ones(4, 2, 2), alone, 1, torch.float32)
    with pytest.raises(ValueError, match="place must be a rank and a size of 1 to 64, got 2 and 2"):
        all_reduce(x, RankGroup.of(2, 2, two.memory))
    with pytest.raises(ValueError, match="memory for 2 ranks must have more than 16896 bytes, got 16384"):
        all_reduce(x, RankGroup.of(0, 2, two.memory[:16384]))
    assert meetings(two.memory, 2) == [0, 0]


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("all_reduce", (torch.ones(2, 8), *RankGroup.alone())),
        ("all_gather", (torch.ones(2, 8), *RankGroup.alone(), 1)),
        ("join_parts", (torch.ones(8, 2, 8), *RankGroup.alone(), 1, "bfloat16")),
    ],
)
def test_registration(op: str, arguments: tuple) -> None:
    torch.library.opcheck(getattr(torch.ops.compiled_llm, op), arguments)
