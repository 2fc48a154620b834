"""StepResult: what the worker found in a step, as frozen plain data that can be pickled."""

import dataclasses
from typing import NamedTuple

from compiled_llm.scheduling.bucket import Bucket

# Of one token: its log-probability and rank; the log-probabilities and ids of the most likely tokens.
LogprobRow = tuple[float, int, tuple[float, ...], tuple[int, ...]]


class LogprobColumns(NamedTuple):
    """Log-probabilities (natural) of tokens: an entry of each column for each token."""

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 for the most likely token
    top_logprobs: tuple[tuple[float, ...], ...]  # of the most likely tokens, falling
    top_ids: tuple[tuple[int, ...], ...]

    def row(self, index: int) -> LogprobRow:
        return self.logprobs[index], self.ranks[index], self.top_logprobs[index], self.top_ids[index]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. For its logits rows see ``SchedulerOutput``.

    Attributes:
        bucket: in which the step ran.
        sampled_token_ids: one for each logits row; -1 where no token could be chosen. Without meaning where the request
            has no token to sample.
        logprobs: of the sampled tokens, one for each logits row; None where no request asks for them.
        prompt_logprobs: of the step's ``prompt_targets``, one target after another; None where there are none.
        seconds: that the device took.
        num_experts: experts that some token used, over all layers; 0 in a model without.
    """

    bucket: Bucket
    sampled_token_ids: tuple[int, ...]
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    seconds: float = 0.0
    num_experts: int = 0
