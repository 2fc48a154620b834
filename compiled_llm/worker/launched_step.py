"""LaunchedStep: a step that the device works on, and how its results come to the host."""

import dataclasses
from collections import deque

import numpy as np
import torch
from torch import Tensor

from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.worker import LogprobColumns, StepResult
from compiled_llm.step.logprobs import LogprobRows
from compiled_llm.worker.draft_stage import Drafts, token_ids_of

MOST_IN_FLIGHT = 2


@dataclasses.dataclass
class HostSlot:
    """Where a step on a GPU leaves its tokens, and when: used again once its results are read."""

    tokens: Tensor  # as in ``LaunchedStep``, in pinned memory
    started: torch.cuda.Event
    ended: torch.cuda.Event
    drafts: Tensor | None  # those of ``Drafts``, in pinned memory; None where no network drafts
    sampled: torch.cuda.Event  # before that network began

    @classmethod
    def in_turns(cls, last_tokens: Tensor, drafts: Tensor | None, device: torch.device) -> "deque[HostSlot]":
        """For the steps that may be in flight at once; none for a CPU. ``last_tokens``, ``drafts``: what is copied."""

        def pinned(like: Tensor) -> Tensor:
            return torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)

        def slot() -> HostSlot:
            started, ended, sampled = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            return cls(pinned(last_tokens), started, ended, None if drafts is None else pinned(drafts), sampled)

        return deque(slot() for _ in range(MOST_IN_FLIGHT if device.type == "cuda" else 0))


@dataclasses.dataclass
class LaunchedStep:
    """A step that the device works on.

    Attributes:
        num_rows: logits rows that belong to requests; the others are padding.
        tokens: ``[R]`` int64 on the host, complete once ``slot.ended`` has happened; an array on a CPU.
        logprobs: of these tokens, complete when they are; None where no request needs them.
        prompt_logprobs: of the step's ``prompt_targets``, on the host.
        seconds: what the device took; on a GPU known once the step is collected.
        slot: on a GPU, of the tokens.
        num_experts: ``[1]`` as ``tokens``: experts that some token used, over all layers; None without experts.
        num_requests: in the step.
        drafts: what a network drafted, on the host; complete when ``tokens`` are.
        draft_seconds: of ``seconds``, what that took.
        token_ids: ``tokens``, once the step is collected.
        copy_seconds: that copies of blocks took, where the host waited for them.
        wait_seconds: how long ``collect`` waits for files of blocks.
    """

    bucket: Bucket
    num_rows: int
    tokens: Tensor | np.ndarray
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    seconds: float = 0.0
    slot: HostSlot | None = None
    num_experts: Tensor | None = None
    num_requests: int = 0
    drafts: Drafts | None = None
    draft_seconds: float = 0.0
    token_ids: tuple[int, ...] = ()
    copy_seconds: float = 0.0
    wait_seconds: float = 0.0

    def wait(self) -> None:
        """Until the device is done; ``token_ids`` are there then."""
        if self.slot is not None:
            self.slot.ended.synchronize()
            self.seconds = self.slot.started.elapsed_time(self.slot.ended) / 1e3
            if self.slot.drafts is not None:
                self.draft_seconds = self.slot.sampled.elapsed_time(self.slot.ended) / 1e3
        self.token_ids = tuple(self.tokens[: self.num_rows].tolist())

    def result(self) -> StepResult:
        """What the step gave, as plain data. ``wait`` comes before."""
        prompt_logprobs = self.prompt_logprobs
        return StepResult(
            self.bucket,
            self.token_ids,
            None if self.logprobs is None else _columns(self.logprobs, self.num_rows),
            None if prompt_logprobs is None else _columns(prompt_logprobs, len(prompt_logprobs.rank)),
            self.seconds,
            0 if self.num_experts is None else int(self.num_experts),
            None if self.drafts is None else token_ids_of(self.drafts, self.num_requests),
            self.draft_seconds,
        )


def _columns(rows: LogprobRows, count: int) -> LogprobColumns:
    """The first ``count`` of them, as plain data."""
    logprobs, ranks, top_logprobs, top_ids = (column[:count].tolist() for column in rows)
    return LogprobColumns(tuple(logprobs), tuple(ranks), tuple(map(tuple, top_logprobs)), tuple(map(tuple, top_ids)))
