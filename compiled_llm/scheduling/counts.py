"""SchedulerCounts: what a scheduler counts; ``EngineStats`` says what each of them is."""

import dataclasses


@dataclasses.dataclass
class SchedulerCounts:
    """What happened since the engine was made."""

    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_not_finite_failures: int = 0
    num_unexplained_faults: int = 0
