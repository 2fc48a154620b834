"""EngineCounts: the engine's own counts and those of scheduler and runner become one EngineStats."""

import dataclasses

from compiled_llm.engine.stats import EngineCounts
from compiled_llm.worker.times import RunnerTimes
from tests.fake_engine import FakeEngine, add, make_request, make_scheduler


def test_stats_are_taken_from_where_they_are_counted() -> None:
    engine = FakeEngine(make_scheduler(8))
    add(engine.scheduler, make_request("a", 5, 3))
    engine.step()
    add(engine.scheduler, make_request("b", 5, 3))
    counts = EngineCounts(1, 2, 3, 4, 5, 6, 7.5, 8.5)
    times = RunnerTimes(9.5, 10.5, 11.5, 12)
    stats = counts.stats(engine.scheduler, times)
    given = {**dataclasses.asdict(counts), **dataclasses.asdict(times)}
    assert {name: getattr(stats, name) for name in given} == given
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert stats.num_kv_blocks == engine.scheduler.pool.num_blocks
    assert stats.used_blocks == engine.scheduler.pool.num_used > 0
