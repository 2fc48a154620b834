"""KVTiers by itself: what is in flight when host memory is forgotten."""

import pytest

from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import BlockSource
from compiled_llm.scheduling.scheduler_output import FileOutput
from compiled_llm.scheduling.state_pool import StatePool
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.scheduling.worker import FileResult

DIGEST, SOURCE = bytes(32), BlockSource("unix:a", bytes(32))


class _Request:
    source: BlockSource | None = SOURCE


def sent(tiers: KVTiers) -> FileOutput:
    output = SchedulerOutputBuilder(0)
    tiers.send(output)
    return output.files


def ended(tiers: KVTiers, result: FileResult) -> None:
    tiers.end_step(result, 0, 0.0, 0)
    tiers.check_invariants()


@pytest.mark.parametrize("windows", [None, ()])
def test_a_block_that_is_read_while_all_is_forgotten(windows: tuple[int, ...] | None) -> None:
    """Its request was aborted. Another one wants the block before it has come: it waits for what is on its way."""
    tiers = KVTiers(BlockPool(4, states=StatePool(0)), range(1, 5), 16, StepCosts({}, 0.0), ())
    first, second = _Request(), _Request()
    assert tiers.find(first, [DIGEST]) is None  # type: ignore[arg-type]
    assert len(sent(tiers).reads) == 1
    ended(tiers, FileResult())
    tiers.forget(first)  # type: ignore[arg-type]
    tiers.forget_host()
    tiers.check_invariants()
    assert tiers.find(second, [DIGEST]) is None  # type: ignore[arg-type]
    tiers.check_invariants()
    assert not sent(tiers).reads
    ended(tiers, FileResult(read=((DIGEST, windows, 0.1),)))
    assert tiers.take_ready() == [second]
    found = tiers.find(second, [DIGEST])  # type: ignore[arg-type]
    assert found is not None
    assert [held.digest for held in found] == [DIGEST] * (windows is not None)
    tiers.forget(second)  # type: ignore[arg-type]
    tiers.check_invariants()
    assert tiers.num_used == (windows is not None)


@pytest.mark.parametrize("has_left", [True, False])
def test_a_take_that_fails_is_asked_of_the_engine_of_another_request(has_left: bool) -> None:
    """Each engine is asked once, whether the request whose engine does not have the block still waits or not."""
    tiers = KVTiers(BlockPool(4, states=StatePool(0)), range(1, 5), 16, StepCosts({}, 0.0), ())
    first, second, third = _Request(), _Request(), _Request()
    second.source, third.source = BlockSource("unix:a", bytes([1] * 32)), None
    wanted = second.source
    requests = (first, second, third)
    for request in requests:
        assert tiers.find(request, [DIGEST]) is None  # type: ignore[arg-type]
    assert sent(tiers).reads == ((DIGEST, 1, SOURCE),)
    if has_left:
        tiers.forget(first)  # type: ignore[arg-type]
    ended(tiers, FileResult(read=((DIGEST, None, 0.1),)))
    assert tiers.take_ready() == []
    assert sent(tiers).reads == ((DIGEST, 1, wanted),)
    ended(tiers, FileResult(read=((DIGEST, None, 0.1),)))
    assert tiers.take_ready() == [*requests[has_left:]]
    assert sent(tiers).reads == ()
    assert tiers.counts.num_takes_failed == 1, "a block that nobody gave"
    for request in requests:
        tiers.forget(request)  # type: ignore[arg-type]
    assert tiers.num_used == 0


def test_a_block_that_is_written_while_all_is_forgotten() -> None:
    pool = BlockPool(4, states=StatePool(0))
    tiers = KVTiers(pool, range(1, 5), 16, StepCosts({}, 0.0), ())

    def stored() -> FileOutput:
        tiers._store(1, DIGEST, makes_room=True)
        sent(tiers)
        ended(tiers, FileResult())
        return sent(tiers)

    is_written = FileResult(written=((DIGEST, True),))
    assert len(stored().writes) == 1
    ended(tiers, FileResult())
    tiers.forget_host()
    assert not stored().writes, "it is computed again, while the first is still written"
    ended(tiers, is_written)
    assert len(sent(tiers).writes) == 1
    ended(tiers, is_written)
    assert DIGEST in tiers.on_disk


def test_a_snapshot_that_is_gone_before_it_is_copied() -> None:
    """Its slot may have another state by then. One that is evicted is copied first."""
    pool = BlockPool(4, states=StatePool(1))
    tiers = KVTiers(pool, range(1, 5), 16, StepCosts({}, 0.0), (), slots=range(1, 9))
    for ends in ("stays", "evicted", "forgotten"):
        slot = pool.states.allocate()
        assert slot == 1
        digest = ends.encode().ljust(32)
        pool.states.publish(slot, digest)
        tiers.publish_state(slot, digest, is_last=True)
        pool.states.free(slot)
        if ends == "evicted":
            pool.states.free(pool.states.allocate())  # type: ignore[arg-type]
        elif ends == "forgotten":
            pool.states.forget(digest)
        output = SchedulerOutputBuilder(0)
        tiers.send(output)
        assert len(output.states.swapped_out) == (ends != "forgotten")
        tiers.end_step(FileResult(), 0, 0.0, 0)
        tiers.check_invariants()
        pool.clear_cache()
