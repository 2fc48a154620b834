"""A step between its launch and its result."""

import dataclasses

import torch
from torch import Tensor

from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.step.logprobs import LogprobRows


@dataclasses.dataclass
class LaunchedStep:
    """A step that the device works on.

    Attributes:
        num_rows: logits rows that belong to requests; the others are padding.
        tokens: ``[R]`` int64 on the host, complete once the event ``ended`` has happened.
        logprobs: of these tokens, likewise; None where no request needs them.
        prompt_logprobs: of the step's ``prompt_targets``, on the host.
        seconds: what the device took; on a GPU known once the step is collected.
        started, ended: on a GPU, events before and after the step.
        num_experts: ``[1]`` as ``tokens``: experts that some token used, over all layers; None without experts.
    """

    bucket: Bucket
    num_rows: int
    tokens: Tensor
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    seconds: float = 0.0
    started: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    num_experts: Tensor | None = None
