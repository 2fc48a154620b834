"""Sums and joins over ranks on GPUs: the kernels of ranks that run at once, interpreted; refusals; compiled ahead.

Interpreted ranks are processes, whose programs run one after the other, each as one thread. That shows what they
compute, and that they wait for each other whoever is late; ``test_protocol.py`` has orders within a program. That a GPU
keeps the order which ``test_what_orders_memory`` finds in the code, and how fast any of it is, no test shows.
"""

import functools
import random
import re

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import RankGroup
from compiled_llm.ops.parallel import reductions, triton_kernels, triton_reductions
from compiled_llm.ops.parallel.rank_group import bytes_for
from compiled_llm.ops.parallel.triton_exchange import CHANNELS
from compiled_llm.ops.programmatic_launch import programmatic_launches
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats
from tests.ops.parallel import ranks as on_cpu
from tests.ops.parallel.gpu_ranks import be_late, run_ranks

# The kernels are the same text for each, with the same instructions for memory.
CAPABILITIES = [(9, 0), *(pytest.param(other, marks=pytest.mark.battery) for other in ((8, 0), (10, 0)))]
SIZES = [2, 4, 8]
ROUNDS = [(1, 1), (3, 37), (0, 8), (2, 1024), (5, 1003)]  # shapes; the last in many pieces, of several programs


def some(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return (numbers * 1000).to(dtype)


def every_op(rank: int, size: int, number: int, ops: object, group: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What the ops of ``ops`` give in one round."""
    shape, dtype = ROUNDS[number % len(ROUNDS)], (torch.float32, torch.float16)[number % 2]
    found = [ops.all_reduce(some(rank + number, *shape, dtype=dtype), *group)]
    if 8 % size == 0:
        parts = some(rank, 8 // size, *shape)
        found.append(ops.join_parts(parts, *group, size, str(dtype).removeprefix("torch.")))
    found.append(ops.all_gather(some(rank, *shape, dtype=(torch.float64, torch.int8)[number % 2]), *group, size))
    return found


class References:
    all_reduce = staticmethod(reductions.all_reduce_reference)
    join_parts = staticmethod(reductions.join_parts_reference)
    all_gather = staticmethod(reductions.all_gather_reference)


def ops_follow_each_other(size: int, two_shot: bool | None) -> None:
    """Of any shapes, one-shot and two-shot (None: in turns), whoever is late: the bits of the CPU's ops."""
    count = len(ROUNDS) * (2 if size < 8 else 1)

    def of_cpu(rank: int, group: RankGroup) -> list[list[Tensor]]:
        return [every_op(rank, size, number, References, group) for number in range(count)]

    expected = on_cpu.run_ranks(size, of_cpu)

    def run(rank: int, place: Tensor, memory: Tensor) -> None:
        rng = random.Random(rank)
        for number in range(count):
            is_two_shot = number % 3 == 1 if two_shot is None else two_shot
            triton_reductions._ONE_SHOT_BYTES = 0 if is_two_shot else 1 << 40
            be_late(rng)
            found = every_op(rank, size, number, triton_reductions, (place, memory))
            for one, right in zip(found, expected[rank][number], strict=True):
                assert one.dtype == right.dtype
                assert torch.equal(one, right), (number, one, right)

    wrong = run_ranks(size, run)
    assert not wrong, wrong


def a_sum_in_the_order_of_ranks() -> None:
    """Which float32 shows: 2 ** 24 + 1 - 2 ** 24 is 0 in that order, and 1 in others."""
    numbers = [2.0**24, 1.0, -(2.0**24)]

    def run(rank: int, place: Tensor, memory: Tensor) -> None:
        for _ in range(3):
            assert not triton_reductions.all_reduce(torch.full((2, 5), numbers[rank]), place, memory).any()

    wrong = run_ranks(3, run)
    assert not wrong, wrong


def ranks_that_wait_too_little_are_seen() -> None:
    """These tests would see it: slots have NaN in them at the start."""

    def run(rank: int, place: Tensor, memory: Tensor) -> None:
        triton_kernels.come_to = lambda *args: None
        for number in range(4):
            if rank == number % 2:
                be_late(random.Random(1))
            assert triton_reductions.all_reduce(torch.ones(3, 40), place, memory).eq(2).all()

    assert "AssertionError" in run_ranks(2, run)


INTERPRETED = {
    **{
        f"{size} ranks, {name}": functools.partial(ops_follow_each_other, size, two_shot)
        for size in (2, 3, 4, 8)
        for name, two_shot in (("one-shot", False), ("two-shot", True), ("both", None))
    },
    "the order of ranks": a_sum_in_the_order_of_ranks,
    "waiting too little": ranks_that_wait_too_little_are_seen,
}
ORDINARY = ("2 ranks, one-shot", "3 ranks, both", "4 ranks, both", "the order of ranks", "waiting too little")
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)


def group_of(size: int, slot: int = 1 << 16) -> tuple[Tensor, Tensor]:
    """Without data."""
    memory = triton_reductions.bytes_on_gpu(slot)
    return empty(1 + size, dtype=torch.int64), empty(memory, dtype=torch.uint8)


def launches(capability: tuple[int, int], size: int) -> list[ahead_of_time.Launch]:
    """Of a decode of 8 rows and a chunk of 2,048, 4,096 columns wide."""
    group = group_of(size)
    with ahead_of_time.recorded(capability, triton_kernels, triton_reductions) as recorded:
        for rows in (8, 2048):
            for dtype in (torch.bfloat16, torch.float32):
                triton_reductions.all_reduce(empty(rows, 4096, dtype=dtype), *group)
            triton_reductions.join_parts(floats(8 // size, rows, 4096), *group, size, "bfloat16")
            triton_reductions.all_gather(empty(rows, 18992), *group, size)
        triton_reductions.all_gather(empty(8, 2, dtype=torch.float64), *group, size)
    return recorded


@pytest.mark.parametrize("size", marked(map(str, SIZES), ["4"]))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_compiles_without_spills(capability: tuple[int, int], size: str) -> None:
    recorded = launches(capability, int(size))
    assert len(recorded) == 9
    kinds = {(kernel.__name__, named.get("TWO_SHOT"), named.get("TREE")) for kernel, _, named in recorded}
    assert len(kinds) == (3 if size == "2" else 5)
    for launch in recorded:
        binary, _ = ahead_of_time.without_spills(launch, capability, programs=2)  # so that 64 fit on 32 SMs
        assert ".v4.b32" in binary.asm["ptx"] or ".v2.b64" in binary.asm["ptx"], "16 bytes of a thread at once"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_what_orders_memory(capability: tuple[int, int]) -> None:
    """Each meeting: all threads have stored; a flag is written with release, read with acquire; all threads know it."""
    memory = re.compile(r"\b(bar\.sync|ld\.global|st\.global|atom\.global\S+)")
    for launch in launches(capability, 4):
        binary = ahead_of_time.compiled(launch, capability)
        kinds = [re.sub(r"\.global$", "", found) for found in memory.findall(binary.asm["ptx"])]
        flags = [number for number, kind in enumerate(kinds) if kind.startswith("atom")]
        meetings = 2 if launch[2].get("TWO_SHOT") else 1
        exchange, add = "atom.global.sys.release.exch.b64", "atom.global.sys.acquire.add.u64"
        assert [kinds[number] for number in flags] == [exchange, add] * meetings
        for told, heard in zip(flags[::2], flags[1::2], strict=True):
            assert "st" in kinds[:told]
            stored = max(number for number in range(told) if kinds[number] == "st")
            assert "bar.sync" in kinds[stored:told]
            assert "st" not in kinds[told:heard]
            read = next(number for number in range(heard, len(kinds)) if kinds[number] == "ld")
            assert "bar.sync" in kinds[heard:read]
        if launch[1][1].dtype == torch.bfloat16 and launch[0].__name__ == "rank_sum_kernel":
            assert "cvt.rn.bf16" in binary.asm["ptx"], "rounded to the nearest; the interpreter does otherwise"


@pytest.mark.parametrize("capability", [(9, 0), pytest.param((10, 0), marks=pytest.mark.battery)], ids=str)
def test_a_programmatic_launch_waits_first(capability: tuple[int, int]) -> None:
    """For the launches before it on its own GPU, before it touches memory that they or other ranks may use."""
    memory = re.compile(r"griddepcontrol\.wait|ld\.global|st\.global|atom\.global")
    with programmatic_launches():
        recorded = [launch for launch in launches(capability, 2) if launch[2]["PROGRAMMATIC"]]
    assert {launch[0].__name__ for launch in recorded} == {"rank_sum_kernel", "rank_gather_kernel"}
    for launch in recorded:
        found = memory.findall(ahead_of_time.compiled(launch, capability).asm["ptx"])
        assert found[0] == "griddepcontrol.wait"
        assert len(found) > 1


def test_all_programs_fit_at_once() -> None:
    """On a GPU of 32 SMs or more, two on each, as ``test_compiles_without_spills`` has it; each has some elements."""
    for size in (1, 2047, 2048, 2049, 10**6, 2**30):
        programs, run = triton_reductions._shares(size, 2048, "all_reduce")
        assert 1 <= programs <= CHANNELS.value
        assert (programs - 1) * run < size <= programs * run


@pytest.mark.parametrize("block", [512, 1024, 2048, 4096])
def test_places_fit_into_int32(block: int) -> None:
    """Where a program's elements would end if it had all of its run, and where a piece more would begin."""
    for size in range(2**30 - 3, 2**31, 12345678):
        try:
            programs, run = triton_reductions._shares(size, block, "all_reduce")
        except ValueError:
            assert size > 2**30
        else:
            assert programs * run + 2**28 < 2**31, size


def test_one_rank_needs_no_memory() -> None:
    place, none = torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
    x, parts = torch.randn(3, 5), torch.randn(8, 3, 5)
    assert torch.equal(triton_reductions.all_reduce(x, place, none), x)
    assert torch.equal(triton_reductions.all_gather(x, place, none, 1), x)
    joined = triton_reductions.join_parts(parts, place, none, 1, "float16")
    assert torch.equal(joined, reductions.join_parts_reference(parts, place, none, 1, "float16"))


def test_refusals() -> None:
    x, (place, memory) = torch.ones(2, 8), (torch.zeros(3, dtype=torch.int64), torch.zeros(1 << 20, dtype=torch.uint8))
    reduce, gather, join = (getattr(triton_reductions, name) for name in ("all_reduce", "all_gather", "join_parts"))
    with pytest.raises(ValueError, match=r"x must be a contiguous \[T, D\] of float32, bfloat16 or float16"):
        reduce(x.long(), place, memory)
    with pytest.raises(ValueError, match="x must be a contiguous"):
        gather(x.t(), place, memory, 2)
    with pytest.raises(ValueError, match=r"elements of 1, 2, 4 or 8 bytes, got \[2, 8\] of torch.complex128"):
        gather(x.to(torch.complex128), place, memory, 2)
    with pytest.raises(ValueError, match="size must be that of the group, 2, got 4"):
        gather(x, place, memory, 4)
    with pytest.raises(ValueError, match=r"parts must be a contiguous \[P, T, D\] of float32"):
        join(x, place, memory, 2, "float32")
    with pytest.raises(ValueError, match="parts of all ranks must be 8, got 2 for 2 ranks"):
        join(torch.ones(2, 2, 8), place, memory, 2, "float32")
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got int8"):
        join(torch.ones(4, 2, 8), place, memory, 2, "int8")
    with pytest.raises(ValueError, match="place must be a contiguous"):
        reduce(x, place.int(), memory)
    with pytest.raises(ValueError, match="addresses of 1 to 64 ranks, got 0"):
        reduce(x, place[:1], memory)
    with pytest.raises(ValueError, match="memory must be a contiguous"):
        reduce(x, place, memory.float())
    with pytest.raises(ValueError, match=r"memory must have at least \d+ bytes, or none where NCCL carries, got 16896"):
        reduce(x, place, torch.zeros(bytes_for(2, 128), dtype=torch.uint8))
    with pytest.raises(ValueError, match="at most 1073741824 elements, got 1073741825"):
        triton_reductions._shares((1 << 30) + 1, 2048, "all_reduce")
