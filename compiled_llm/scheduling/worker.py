"""The worker as the scheduler sees it: what it measured at its start, and how it runs steps.

Nothing else passes between the two: ``WorkerFacts`` at the start, and for each step a ``SchedulerOutput`` to the worker
and a ``StepResult`` back. All are frozen plain data, so the worker may be another process.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

# Of one token: its log-probability and rank; the log-probabilities and ids of the most likely tokens.
LogprobRow = tuple[float, int, tuple[float, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The sizes and costs of a worker, once it has started.

    Attributes:
        device_type: "cpu" or "cuda".
        num_blocks: blocks of the KV pool, numbered from 1.
        window_places: (window, places of its pool, numbered from 1) for layers that see a window of keys.
        num_swap_blocks: blocks in host memory, numbered from 1.
        num_tier_blocks: further blocks in host memory, numbered on from these, for what leaves the prefix cache.
        num_tier_slots: further slots in host memory, numbered on from ``num_swap_slots``, for snapshots of states.
        host_block_bytes, host_slot_bytes: of a block and of a slot in host memory.
        blocks_on_disk: digests of the blocks that have a file; None: there is no disk.
        num_state_slots: slots of layers with a state, numbered from 1; 0: there is no such layer.
        num_swap_slots: slots in host memory, numbered from 1.
        block_contents: what the content of a KV block depends on besides its tokens.
        bucket_seconds: (tokens, seconds) of a step in token buckets; empty where they were not measured.
        decode_seconds: ((requests, tokens), seconds) of a greedy step in decode buckets; empty where the scheduler has
            no use for it.
        sampling_seconds: as ``decode_seconds``, that sampling a token in each row takes besides.
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
    num_tier_blocks: int = 0
    num_tier_slots: int = 0
    host_block_bytes: int = 0
    host_slot_bytes: int = 0
    blocks_on_disk: tuple[bytes, ...] | None = None
    decode_seconds: tuple[tuple[tuple[int, int], float], ...] = ()
    sampling_seconds: tuple[tuple[tuple[int, int], float], ...] = ()


class LogprobColumns(NamedTuple):
    """Log-probabilities (natural) of tokens: an entry of each column for each token."""

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 for the most likely token
    top_logprobs: tuple[tuple[float, ...], ...]  # of the most likely tokens, falling
    top_ids: tuple[tuple[int, ...], ...]

    def row(self, index: int) -> LogprobRow:
        return self.logprobs[index], self.ranks[index], self.top_logprobs[index], self.top_ids[index]


class FileResult(NamedTuple):
    """What became of files of blocks since the result before, and how long a step's copies took.

    Attributes:
        read: (digest, windows, seconds): a file was read into its row, with the keys of these windows; None: there is
            none that can be used.
        written: (digest, whether there is a file of it now).
        found, lost: digests of files that others have written, and of files that are gone.
        num_evicted: of these, files that made room for others.
        file_seconds: time in reading and writing, beside steps.
        is_coming: whether another engine still computes a block that is read.
        copy_seconds: of the step's copies between host and device; 0 on a GPU, where the host does not wait for them.
    """

    read: tuple[tuple[bytes, tuple[int, ...] | None, float], ...] = ()
    written: tuple[tuple[bytes, bool], ...] = ()
    found: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()
    num_evicted: int = 0
    file_seconds: float = 0.0
    copy_seconds: float = 0.0
    is_coming: bool = False


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
        draft_token_ids: of each request, the tokens that a network guesses to follow those that it has then; None where
            none drafted.
        draft_seconds: of ``seconds``, those of that network.
        files: of blocks; None where host memory keeps none.
    """

    bucket: Bucket
    sampled_token_ids: tuple[int, ...]
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    seconds: float = 0.0
    num_experts: int = 0
    draft_token_ids: tuple[tuple[int, ...], ...] | None = None
    draft_seconds: float = 0.0
    files: FileResult | None = None


# Between two looks for code that was compiled meanwhile, while nothing is to do and ``Worker.is_changing``.
LOOK_SECONDS = 1.0


class WorkerFailedError(RuntimeError):
    """The worker can run no step any more, whatever the requests: ``launch`` or ``collect`` raises it each time."""


class Worker(Protocol):
    """Runs the steps that a scheduler chooses."""

    facts: WorkerFacts

    def launch(self, output: SchedulerOutput) -> Any:
        """Start a step, and return what ``collect`` takes. Its inputs may be tokens that the step before samples."""

    def collect(self, step: Any) -> StepResult:
        """Wait for a step. Steps are collected in the order of their launch; one may be left out after an error."""

    def ask_for_memory(self) -> bool:
        """While no step runs: see to memory for blocks that come next, for some milliseconds. Whether more is to do."""
        return False

    @property
    def is_changing(self) -> bool:
        """Whether code that is compiled beside has still to take over, which ``ask_for_memory`` lets it."""
        return False

    def close(self) -> None:
        """Free all that it holds. It runs no more steps."""
