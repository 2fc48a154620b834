"""Request: one generation on its way through the engine. Owned and changed by the scheduler alone."""

import dataclasses
import enum

from compiled_llm.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"  # no blocks; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Request:
    """Tokens known and tokens computed; the scheduler lets the second catch up with the first.

    Attributes:
        seed: the random numbers of this request follow from it and the position alone.
        stop_token_ids: all ids that end it, the model's end-of-text ids included.
        max_num_tokens: prompt and output together never exceed this.
        num_computed_tokens: tokens whose keys and values are in the cache.
        block_ids: KV blocks in the order of the positions they hold.
        num_sent_blocks: how many of them the runner was told of.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_num_tokens: int
    arrival_time: float

    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_sent_blocks: int = 0
    status: Status = Status.WAITING
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known tokens at positions ``start..end - 1``."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : end - prompt_len]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - prompt_len)]
