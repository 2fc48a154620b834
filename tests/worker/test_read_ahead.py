"""What stays and what passes, and a thread that follows steps by the page table alone."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_llm.checkpoint.kept_weights import KeptWeights, Layer, kept_weights
from compiled_llm.worker import read_ahead
from compiled_llm.worker.read_ahead import Plan, ReadAhead

BLOCK = 2 << 20  # a huge page: the page table may have no smaller part of the file
LAYERS, BLOCKS = 12, 2


def layers(sizes: list[int], role: str = "layer") -> list[Layer]:
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return [Layer(str(at), role, at, size, "", ()) for at, size in zip(offsets, sizes, strict=True)]


@pytest.mark.parametrize("budget", [30, 60, 99])
def test_what_passes_is_spread_evenly(budget: int) -> None:
    plan = Plan.of(layers([10] * 10), budget, block=1)
    assert plan.bytes_of(passes=False) + plan.ahead_bytes == budget
    assert 0 < plan.ahead_bytes <= budget // 4
    flags = [piece.passes for piece in plan.pieces]
    share = sum(flags) / len(flags)
    assert all(abs(sum(flags[:end]) - share * end) <= 1 for end in range(len(flags)))
    assert [piece.offset for piece in plan.pieces] == [*range(100)]


def test_all_stay_where_there_is_room() -> None:
    plan = Plan.of(layers([10] * 10), 100, block=1)
    assert plan.ahead_bytes == 0
    assert not any(piece.passes for piece in plan.pieces)


def test_the_head_is_read_last_and_parts_of_blocks_stay() -> None:
    tied = Layer("embed", "head", 0, 6, "", ())
    plan = Plan.of([tied, *layers([4] * 5)[2:]], 1, block=4)
    assert [(piece.layer, piece.offset) for piece in plan.pieces] == [(0, 8), (1, 12), (2, 16), (3, 0), (3, 4)]
    assert [piece.passes for piece in plan.pieces] == [True] * 4 + [False]


def test_the_head_has_room_for_what_is_used_of_it() -> None:
    """One that is large beside the layers: four of its parts are in use, and others are read meanwhile."""
    head = Layer("head", "head", 40 * BLOCK * 10, 400 * BLOCK, "", ())
    plan = Plan.of([*layers([10 * BLOCK] * 40), head], 500 * BLOCK)
    of_head = [piece for piece in plan.pieces if piece.layer == 40]
    first = of_head[0].part
    for begin in range(first, first + 13):
        passing = [piece.nbytes for piece in of_head if piece.passes and begin <= piece.part < begin + 4]
        assert sum(passing) + BLOCK < plan.ahead_bytes <= 500 * BLOCK // 4


def test_experts_and_tables_are_read_as_they_are_used() -> None:
    of_experts = layers([100] * 4, "experts")
    plan = Plan.of([*of_experts, Layer("0", "layer", 400, 50, "", ()), Layer("t", "table", 450, 50, "", ())], 110, 1)
    assert {piece.offset for piece in plan.pieces} == {*range(400, 450)}
    assert plan.bytes_of(passes=True) == 0  # they have half of the room, which is enough
    assert Plan.of([*of_experts, Layer("0", "layer", 400, 50, "", ())], 60, 1).bytes_of(passes=True) > 0


@pytest.fixture
def weights(tmp_path: Path) -> KeptWeights:
    def write(writer) -> None:
        for number in range(LAYERS):
            content = torch.full((BLOCKS * BLOCK // 8,), number, dtype=torch.int64)
            writer.layer(str(number), "layer", (content,))

    return kept_weights(tmp_path / "kept", None, {}, 1, write)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def wait_until_still(number: Callable[[], int]) -> None:
    """Until it stays the same for a while."""

    def is_still() -> bool:
        before = number()
        time.sleep(0.05)
        return number() == before

    wait_for(is_still)


def resident(weights: KeptWeights, piece: read_ahead.Piece) -> bool:
    return read_ahead._resident(weights.address + piece.offset, 4096) > 0


def test_a_thread_reads_ahead_of_steps_and_drops_behind(weights: KeptWeights) -> None:
    reader = ReadAhead(weights, LAYERS * BLOCKS * BLOCK // 2)
    passing = [piece for piece in reader.plan.pieces if piece.passes]
    assert len(passing) > LAYERS  # so that steps could not be served from what is there
    try:
        for turn in range(3):
            with reader.step():
                for layer in weights.layers:
                    start, end = layer.offset, layer.offset + layer.nbytes
                    read = memoryview(weights.memory)[start:end].cast("q")
                    assert read[0] == read[-1] == read[len(read) // 2] == int(layer.name), turn
                    for piece in passing:
                        if start <= piece.offset < end:
                            assert weights.memory[piece.offset + piece.nbytes // 2] == int(layer.name)
                    time.sleep(0.004)
            wait_for(lambda: any(not resident(weights, piece) for piece in passing))
        most = 2 * reader.plan.ahead_bytes
        wait_for(lambda: sum(piece.nbytes for piece in passing if resident(weights, piece)) <= most)
    finally:
        reader.close()


def test_what_a_step_has_read_for_itself_is_no_place_of_the_next(weights: KeptWeights) -> None:
    """Pieces that come back after they were dropped, as where a thread of a step is late."""
    reader = ReadAhead(weights, LAYERS * BLOCKS * BLOCK // 2)
    passing = [piece for piece in reader.plan.pieces if piece.passes]

    def touch(*layers: int) -> None:
        for piece in passing:
            if piece.layer in layers:
                assert weights.memory[piece.offset + piece.nbytes // 2] == piece.layer

    def place() -> int:
        return reader._at % LAYERS

    try:
        with reader.step():
            for layer in range(LAYERS):
                touch(layer)
                wait_for(lambda layer=layer: place() == layer)
            wait_for(lambda: reader._first >= LAYERS * BLOCKS - 2)
            touch(9, 10)
        with reader.step():
            for layer in range(6):
                touch(layer)
                wait_for(lambda layer=layer: place() == layer)
            time.sleep(0.05)
            assert place() == 5, "the second step has not come to what the first one left"
    finally:
        reader.close()


def test_a_step_without_the_head(tmp_path: Path) -> None:
    """Its pieces are many, and none of a prompt's first chunks comes to them."""

    def write(writer) -> None:
        for name, role, blocks in (("0", "layer", 2), ("1", "layer", 2), ("head", "head", 40)):
            writer.layer(name, role, (torch.zeros(blocks * BLOCK, dtype=torch.uint8),))

    weights = kept_weights(tmp_path / "kept", None, {}, 1, write)
    reader = ReadAhead(weights, 8 * BLOCK)
    passing = [piece for piece in reader.plan.pieces if piece.passes]
    assert reader._num_head_parts == 16
    try:
        for turn in range(3):
            with reader.step():
                for layer in (0, 1):
                    for piece in passing:
                        if piece.layer == layer:
                            weights.memory[piece.offset + piece.nbytes // 2]
                    at = turn * len(reader._parts) + layer
                    wait_for(lambda at=at: reader._at == at)
                    time.sleep(0.02)  # other layers follow, and what is behind is dropped meanwhile
                    assert reader._at == at, "a part in use is none of the next step"
    finally:
        reader.close()


def test_what_the_kernel_has_dropped_in_part_is_dropped(weights: KeptWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is taken for a place of each step that follows."""
    resident = read_ahead._resident

    def without_first_pages(address: int, size: int) -> int:
        return resident(address, size) if (address - weights.address) % BLOCK else 0

    monkeypatch.setattr(read_ahead, "_resident", without_first_pages)
    reader = ReadAhead(weights, LAYERS * BLOCKS * BLOCK // 2)
    try:
        with reader.step():
            for layer, places in enumerate(reader._parts):
                for place in places:
                    weights.memory[reader.plan.pieces[place].offset + BLOCK // 2]
                wait_for(lambda layer=layer: reader._at == layer)
            time.sleep(0.05)
            assert reader._at == LAYERS - 1
    finally:
        reader.close()


def test_what_the_disk_gives_does_not_depend_on_the_size(weights: KeptWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that the time does not suffice for cost none."""
    monkeypatch.setattr(read_ahead, "_MEASURED", 0.05)
    monkeypatch.setattr(read_ahead, "_resident", lambda *_: 0)
    monkeypatch.setattr(ReadAhead, "_read", lambda *_: time.sleep(0.01))
    reader = ReadAhead(weights, weights.nbytes)
    reader.close()
    reader.weights.nbytes = 2**17 * BLOCK
    assert max(reader._disk_rate() for _ in range(3)) > BLOCK / 0.01, "once at least, however busy the machine is"


def test_readers_without_room_wait(weights: KeptWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not ask again and again while a step computes."""
    has_room, num_asked = ReadAhead._has_room, [0]

    def asked(self: ReadAhead, piece: read_ahead.Piece) -> bool:
        num_asked[0] += 1
        return has_room(self, piece)

    monkeypatch.setattr(ReadAhead, "_has_room", asked)
    reader = ReadAhead(weights, LAYERS * BLOCKS * BLOCK // 2)
    try:
        with reader.step():
            wait_for(lambda: reader._next > 0)
            wait_until_still(lambda: num_asked[0])
    finally:
        reader.close()


def test_without_a_step_it_waits(weights: KeptWeights) -> None:
    reader = ReadAhead(weights, LAYERS * BLOCKS * BLOCK // 2)
    try:
        with reader.step():
            pass
        wait_for(lambda: reader._next > 0)
        wait_until_still(lambda: reader._next)
        assert reader._next < len(reader.plan.pieces)
    finally:
        reader.close()


def test_an_older_kernel(weights: KeptWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "madvise", lambda *args: -1)
    reader = ReadAhead(weights, weights.nbytes)
    wait_for(lambda: reader._next == len(reader.plan.pieces))
    assert reader.resident_bytes == weights.nbytes
    assert reader.disk_bytes_per_second == 0
    reader.close()
