"""The worker as the scheduler sees it: what it measured at its start, and how it runs steps.

Nothing else passes between the two: ``WorkerFacts`` at the start, and for each step a ``SchedulerOutput`` to the worker
and a ``StepResult`` back. All are frozen plain data, so the worker may be another process.
"""

import dataclasses
from typing import Any, Protocol

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.step_result import StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The sizes and costs of a worker, once it has started.

    Attributes:
        device_type: "cpu" or "cuda".
        num_blocks: blocks of the KV pool, numbered from 1.
        window_places: (window, places of its pool, numbered from 1) for layers that see a window of keys.
        num_swap_blocks: blocks in host memory, numbered from 1.
        num_state_slots: slots of layers with a state, numbered from 1; 0: there is no such layer.
        num_swap_slots: slots in host memory, numbered from 1.
        block_contents: what the content of a KV block depends on besides its tokens.
        bucket_seconds: (tokens, seconds) of a step in each token bucket; empty where the scheduler has no use for it.
        swap_seconds: of copying one block to the host or back; 0 where not measured.
    """

    device_type: str
    limits: EngineLimits
    num_blocks: int
    num_swap_blocks: int
    block_contents: tuple[str, ...]
    bucket_seconds: tuple[tuple[int, float], ...] = ()
    swap_seconds: float = 0.0
    window_places: tuple[tuple[int, int], ...] = ()
    num_state_slots: int = 0
    num_swap_slots: int = 0


class Worker(Protocol):
    """Runs the steps that a scheduler chooses."""

    facts: WorkerFacts

    def launch(self, output: SchedulerOutput) -> Any:
        """Start a step, and return what ``collect`` takes. Its inputs may be tokens that the step before samples."""

    def collect(self, step: Any) -> StepResult:
        """Wait for a step. Steps are collected in the order of their launch; one may be left out after an error."""

    def close(self) -> None:
        """Free all that it holds. It runs no more steps."""
