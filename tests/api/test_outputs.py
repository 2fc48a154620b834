"""EngineStats: counts since a moment, states as of now."""

import dataclasses

from compiled_llm.api.outputs import EngineStats

STATES = {
    "num_waiting", "num_running", "num_kv_blocks", "used_blocks", "cached_blocks", "peak_used_blocks",
    "num_swap_blocks", "used_swap_blocks", "num_state_slots", "used_slots", "cached_slots", "num_tier_blocks",
    "used_tier_blocks", "num_disk_blocks", "disk_bytes_per_second",
}  # fmt: skip


def test_since_subtracts_counts_and_keeps_states() -> None:
    names = [field.name for field in dataclasses.fields(EngineStats)]
    earlier = EngineStats(**{name: 10 + place for place, name in enumerate(names)})
    later = EngineStats(**{name: 100 + 3 * place for place, name in enumerate(names)})
    since = dataclasses.asdict(later.since(earlier))
    for place, name in enumerate(names):
        assert since[name] == (100 + 3 * place if name in STATES else 90 + 2 * place)


def test_failures_by_kind() -> None:
    stats = EngineStats(**{field.name: place for place, field in enumerate(dataclasses.fields(EngineStats))})
    assert stats.failures == {
        "not finite": stats.num_not_finite_failures,
        "out of memory": stats.num_out_of_memory_failures,
        "exception": stats.num_exception_failures,
    }
    assert len(set(stats.failures.values())) == 3
