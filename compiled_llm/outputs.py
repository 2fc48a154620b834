"""What the engine hands to its user: outputs, metrics, statistics. All frozen."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds on the monotonic clock; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        text: decoded output so far, without the stop string unless asked for.
        token_ids: generated tokens, an ending token included.
        finish_reason: "stop" (end-of-text, a stop string or id), "length", "abort", "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; for "error", what was wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's state after a step, or at its end. ``prompt`` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[Any] | None = None
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and its state now. Times in seconds.

    Attributes:
        num_padding_tokens: rows of the buckets that held no token, over all steps.
        peak_used_blocks: most KV blocks in use at once, of ``num_kv_blocks``.
        schedule_seconds, prepare_seconds, execute_seconds, output_seconds: host time in the scheduler, in filling the
            step's buffers, in the compiled step (until its tokens are on the host), and in detokenising.
    """

    num_steps: int
    num_requests: int
    num_finished: int
    num_waiting: int
    num_running: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    num_kv_blocks: int
    used_blocks: int
    peak_used_blocks: int
    schedule_seconds: float
    prepare_seconds: float
    execute_seconds: float
    output_seconds: float
