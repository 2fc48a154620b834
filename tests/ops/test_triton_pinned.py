"""What graphs take from the host and give to it: interpreted, in any order of host and device; compiled ahead."""

import functools
import random
from collections import deque

import pytest
import torch

from compiled_llm.ops import triton_pinned
from compiled_llm.worker.field_buffers import FieldBuffers, Fields
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, integers

CPU = torch.device("cpu")
ROOM = 5
FIELDS: Fields = {
    "header": ((3,), torch.int32),
    "changed_places": ((ROOM,), torch.int64),
    "changed_entries": ((ROOM,), torch.int32),
    "numbers": ((300,), torch.int32),
    "shares": ((7,), torch.float32),
}
# Of a step: a number in all its fields, its slot, and (place, entry) of changes.
Step = tuple[int, int, list[tuple[int, int]]]


def steps_arrive(at_once: int) -> None:
    """Each graph gets its own step, whatever the host has written meanwhile, and however often it runs."""
    triton_pinned._WORDS_AT_ONCE = at_once
    buffers, rng = FieldBuffers(FIELDS, CPU, is_apart=True), random.Random(at_once)
    tables, chosen = torch.zeros(40, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    expected_tables, under_way, last = tables.clone(), deque[Step](), None

    def fill(number: int) -> Step:
        changes = [(place, rng.randrange(1, 99)) for place in rng.sample(range(40), rng.randint(0, ROOM))]
        arrays = buffers.next_arrays()
        arrays["numbers"][:], arrays["shares"][:] = number, number / 2
        arrays["header"][1:] = number % 2, len(changes)
        for index, (place, entry) in enumerate(changes):
            arrays["changed_places"][index], arrays["changed_entries"][index] = place, entry
        buffers.copy()
        return number, number % 2, changes

    def run_oldest() -> Step:
        number, slot, changes = step = under_way.popleft()
        buffers.begin_graph(chosen, tables)
        assert (buffers.tensors["numbers"] == number).all()
        assert (buffers.tensors["shares"] == number / 2).all()
        assert chosen.item() == slot
        for place, entry in changes:
            expected_tables[place] = entry
        assert torch.equal(tables, expected_tables)
        return step

    buffers.begin_graph(chosen, tables)
    assert not buffers.tensors["numbers"].any(), "nothing was filled"
    for number in range(1, 60):
        while len(under_way) == 2 or (under_way and rng.random() < 0.4):
            last = run_oldest()
        if last is not None and not under_way and rng.random() < 0.3:  # for a profile
            buffers.begin_graph(chosen, tables)
            assert (buffers.tensors["numbers"] == last[0]).all()
        if rng.random() < 0.2:
            fill(1000 + number)  # its graph was not started
        under_way.append(fill(number))
        buffers.start_graph()
    while under_way:
        run_oldest()


def tokens_arrive() -> None:
    tokens = torch.arange(9, dtype=torch.int64) + 2**40
    slots = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    for number in range(4):
        triton_pinned.give(tokens + number, slots, torch.tensor([number % 2], dtype=torch.int32))
        assert torch.equal(slots[number % 2], tokens + number)
        assert number == 0 or torch.equal(slots[1 - number % 2], tokens + number - 1)


INTERPRETED = {
    "steps in a piece": functools.partial(steps_arrive, 8192),
    "steps in pieces": functools.partial(steps_arrive, 64),
    "tokens": tokens_arrive,
}
test_interpreted = interpreted.each_of(INTERPRETED)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_compiles_without_spills(capability: tuple[int, int]) -> None:
    memory, number, tokens = empty(1 << 15, dtype=torch.uint8), integers(1), empty(256, dtype=torch.int64)
    with ahead_of_time.recorded(capability, triton_pinned) as recorded:
        triton_pinned.take((memory, memory), memory, number, integers(1 << 20), 64, 4096)
        triton_pinned.give(tokens, (tokens, tokens), number)
    assert len(recorded) == 2
    for launch in recorded:
        ahead_of_time.without_spills(launch, capability)
