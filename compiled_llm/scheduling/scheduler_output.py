"""What the scheduler says: a step's work for the runner, and counts for the reports. Plain Python, picklable."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from compiled_llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np


class Admission(NamedTuple):
    """A request that the runner meets, or meets again after a preemption: all that it has to know of it."""

    request_id: str
    sampling_params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A step's work, in columns: entry i of each of the first five lists belongs to request ``request_ids[i]``.

    Attributes:
        num_scheduled_tokens, num_computed_tokens: the tokens to run, and those before them.
        samples: whether these are its last known tokens, so that the step samples the next one.
        feedback: where its last token is one that the step before samples, its place in that step; else -1.
        token_ids: the tokens to run, all requests' one after another; 0 where ``feedback`` says where the token is.
        admissions: where the runner meets a request, or meets it again.
        table_updates: (request id, index, block ids): entries of its block table from that index on.
        released_request_ids: finished, aborted or preempted since the step before.
        swapped_out, swapped_in: (device block, host block) pairs to copy before the step, in this order.
        copies: (block, block to copy it to) before the step and after the swaps, in any order.
        masks: (i, words): of the request's next token, the ones allowed, bit v % 32 of int32 word v // 32 for token v.
            The engine fills this in, and the next.
        prompt_targets: (i, token ids): log-probabilities are wanted of these tokens, the first of which follows the
            first token that the request runs, and so on.
    """

    request_ids: list[str] = dataclasses.field(default_factory=list)
    num_scheduled_tokens: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    samples: list[bool] = dataclasses.field(default_factory=list)
    feedback: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    admissions: list[Admission] = dataclasses.field(default_factory=list)
    table_updates: list[tuple[str, int, list[int]]] = dataclasses.field(default_factory=list)
    released_request_ids: list[str] = dataclasses.field(default_factory=list)
    swapped_out: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    swapped_in: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    masks: list[tuple[int, "np.ndarray"]] = dataclasses.field(default_factory=list)
    prompt_targets: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

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
