"""EngineCounts: what an engine counts while it serves, and the statistics that it hands out."""

import dataclasses
from typing import TYPE_CHECKING

from compiled_llm.api.outputs import EngineStats
from compiled_llm.scheduling.host_blocks import TierCounts
from compiled_llm.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from compiled_llm.worker.times import RunnerTimes


@dataclasses.dataclass
class EngineCounts:
    """The engine's own counts since it was made. Scheduler and runner have more; all have names of ``EngineStats``."""

    num_requests: int = 0
    num_finished: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_out_of_memory_failures: int = 0
    num_exception_failures: int = 0
    schedule_seconds: float = 0.0
    output_seconds: float = 0.0

    def stats(self, scheduler: Scheduler, times: "RunnerTimes") -> EngineStats:
        """All counts together, and the state now."""
        tiers = scheduler.tiers
        moved = dataclasses.asdict(TierCounts() if tiers is None else tiers.counts)
        pool, prefix_cache, counts = scheduler.pool, scheduler.prefix_cache, scheduler.counts
        own = dataclasses.asdict(self) | dataclasses.asdict(counts) | dataclasses.asdict(times)
        own["num_output_tokens"] += counts.num_accepted_draft_tokens  # beyond one for each request and step
        return EngineStats(
            **own,
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=prefix_cache.num_queried_tokens,
            prefix_hit_tokens=prefix_cache.num_hit_tokens,
            num_evictions=pool.num_evictions,
            num_kv_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            peak_used_blocks=pool.peak_used,
            num_swap_blocks=scheduler.swap_pool.num_blocks,
            used_swap_blocks=scheduler.swap_pool.num_used,
            num_state_slots=pool.states.num_slots,
            used_slots=pool.states.num_used,
            cached_slots=pool.states.num_free - len(pool.states.empty_slots()),
            num_snapshot_evictions=pool.states.num_evictions,
            **moved,
            num_tier_blocks=0 if tiers is None else tiers.num_rows,
            used_tier_blocks=0 if tiers is None else tiers.num_used,
            num_disk_blocks=0 if tiers is None else len(tiers.on_disk),
        )
