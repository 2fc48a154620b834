"""A step between its launch and its result."""

import dataclasses
from collections import deque

import torch
from torch import Tensor

from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.step.logprobs import LogprobRows

_MOST_IN_FLIGHT = 2


@dataclasses.dataclass
class HostSlot:
    """Where a step on a GPU leaves its tokens, and when: used again once its results are read."""

    tokens: Tensor  # as in ``LaunchedStep``, in pinned memory
    started: torch.cuda.Event
    ended: torch.cuda.Event

    @classmethod
    def in_turns(cls, last_tokens: Tensor) -> "deque[HostSlot]":
        """For the steps that may be in flight at once. ``last_tokens``: what the tokens are copied from."""

        def slot() -> HostSlot:
            tokens = torch.zeros(last_tokens.shape, dtype=last_tokens.dtype, pin_memory=True)
            return cls(tokens, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

        return deque(slot() for _ in range(_MOST_IN_FLIGHT))


@dataclasses.dataclass
class LaunchedStep:
    """A step that the device works on.

    Attributes:
        num_rows: logits rows that belong to requests; the others are padding.
        tokens: ``[R]`` int64 on the host, complete once ``slot.ended`` has happened.
        logprobs: of these tokens, likewise; None where no request needs them.
        prompt_logprobs: of the step's ``prompt_targets``, on the host.
        seconds: what the device took; on a GPU known once the step is collected.
        slot: on a GPU, of the tokens.
        num_experts: ``[1]`` as ``tokens``: experts that some token used, over all layers; None without experts.
    """

    bucket: Bucket
    num_rows: int
    tokens: Tensor
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    seconds: float = 0.0
    slot: HostSlot | None = None
    num_experts: Tensor | None = None
