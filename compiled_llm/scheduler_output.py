"""What the scheduler says: a step's work for the runner, and counts for the reports. Plain Python, picklable."""

import dataclasses

from compiled_llm.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A step's work, in columns: entry i of each of the first five lists belongs to request ``request_ids[i]``.

    Attributes:
        num_scheduled_tokens, num_computed_tokens: the tokens to run, and those before them.
        samples: whether these are its last known tokens, so that the step samples the next one.
        feedback: where its last token is one that the step before samples, its place in that step; else -1.
        token_ids: the tokens to run, all requests' one after another; 0 where ``feedback`` says where the token is.
        admissions: (request id, sampling parameters, seed) where the runner meets a request, or meets it again.
        table_updates: (request id, index, block ids): entries of its block table from that index on.
        released_request_ids: finished, aborted or preempted since the step before.
        swapped_out, swapped_in: (device block, host block) pairs to copy before the step, in this order.
    """

    request_ids: list[str]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    samples: list[bool]
    feedback: list[int]
    token_ids: list[int]
    admissions: list[tuple[str, SamplingParams, int]]
    table_updates: list[tuple[str, int, list[int]]]
    released_request_ids: list[str]
    swapped_out: list[tuple[int, int]]
    swapped_in: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_query_len(self) -> int:
        return max(self.num_scheduled_tokens, default=0)


@dataclasses.dataclass
class SchedulerCounts:
    """What happened since the engine was made."""

    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_tokens: int = 0
    num_swapped_in_tokens: int = 0
