"""What the engine hands to its user: outputs, metrics, statistics. All frozen."""

import dataclasses
import functools
import operator
from typing import Any

from compiled_llm.api.readable import readable_repr, table


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds on the monotonic clock; None for what has not happened.

    Attributes:
        num_preemptions: how often it gave its KV blocks up to requests before it.
        num_recomputed_tokens: tokens that were computed again after that.
        num_swapped_tokens: tokens whose keys and values were copied to the host instead.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_tokens: int = 0

    __repr__ = readable_repr


@dataclasses.dataclass(frozen=True)
class Logprob:
    """How likely the model took a token to be.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token; 1 more for each that is more likely.
        decoded_token: its text by itself; None without a tokenizer, and with ``detokenize=False``.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: which of the ``n``.
        cumulative_logprob: the sum over its tokens; None unless ``logprobs`` were asked for.
        logprobs: for each token, by token id: its own ``Logprob`` and those of the most likely tokens; None unless
            they were asked for.
        text: decoded output so far, without the stop string unless asked for.
        token_ids: generated tokens, an ending token included.
        finish_reason: "stop" (end-of-text, a stop string or id), "length", "abort", "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; for "error", what was wrong.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    __repr__ = readable_repr


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request's state after a step, or at its end.

    Attributes:
        prompt: None when token ids were given.
        prompt_logprobs: as ``CompletionOutput.logprobs``, for the tokens of the prompt; None for the first one, which
            follows nothing. None as a whole unless asked for, or until all of it is computed.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        kv_transfer_params: of the last output, where its KV blocks are to be taken: what another engine needs for that.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    __repr__ = readable_repr


@dataclasses.dataclass(frozen=True)
class ScoreOutput:
    """How likely the given tokens from ``start`` on are, each after all tokens before it.

    Attributes:
        prompt: the text with its continuation; None when token ids were given.
        token_ids: all tokens, scored or not.
        start: index of the first token that is scored; at least 1, since the first token of all follows nothing.
        logprobs: for each scored token the natural logarithm of its probability. They are the model's own: of its
            logits, without temperature and whatever else changes them for sampling.
        ranks: for each scored token 1 if it is the most likely one, and 1 more for each that is more likely.
        top_logprobs: for each scored token, by token id: its own ``Logprob`` and those of the most likely tokens; None
            unless asked for.
        metrics: times of the request.
        num_cached_tokens: tokens whose keys and values were found in the prefix cache.
        error: why nothing could be scored: the lists may be empty then, and ``start`` 0. None: it could.
    """

    prompt: str | None
    token_ids: list[int]
    start: int
    logprobs: list[float]
    ranks: list[int]
    metrics: RequestMetrics
    top_logprobs: list[dict[int, Logprob]] | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    __repr__ = readable_repr

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of ``logprobs``, one after the other, as that of a ``CompletionOutput``; None after an error."""
        return None if self.error is not None else functools.reduce(operator.add, self.logprobs, 0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether no token is more likely than the given one, at any place. (Of equally likely tokens, each counts.)"""
        return self.error is None and all(rank == 1 for rank in self.ranks)


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and its state now. Times in seconds. ``str()`` of it is a table.

    Attributes:
        num_padding_tokens: rows of steps that held no token, over all steps.
        num_preemptions: preemptions that threw blocks away (recompute) or copied them to the host (swap).
        num_recomputed_tokens: tokens computed again after a preemption.
        num_swapped_out_tokens, num_swapped_in_tokens: tokens whose keys and values went to the host, and came back.
        num_drafts: times that a step verified drafts of a request.
        num_draft_tokens, num_accepted_draft_tokens: tokens of a drafter that steps computed, and how many of them the
            requests got.
        num_accepted_by_position: of these, how many were the first draft of a request and step, the second...; as many
            as there may be.
        draft_seconds: time in drafting: of the host, as a part of ``schedule_seconds``, or of a network on the device.
        draft_gain_seconds: time that drafts have saved, by what steps without them take; below 0: that they have cost.
            0 where that is not measured.
        prefix_queried_tokens, prefix_hit_tokens: tokens of requests when they were first admitted, and how many of them
            the prefix cache held or another request was about to compute.
        num_not_finite_failures, num_out_of_memory_failures, num_exception_failures: continuations that ended with an
            error because their logits were not finite, or because a step ran out of memory or raised another exception
            and they were found to be the cause.
        num_unexplained_faults: steps that failed, after which no request was found to be the cause.
        num_evictions: cached blocks whose memory was needed.
        used_blocks, cached_blocks: of ``num_kv_blocks``, blocks in use, and free blocks that can still be found.
        peak_used_blocks: most KV blocks in use at once.
        used_swap_blocks: of ``num_swap_blocks`` in host memory.
        used_slots, cached_slots: of ``num_state_slots``, slots in use, and slots that hold snapshots alone.
        num_snapshot_evictions: snapshots whose slot was needed.
        host_hit_tokens, disk_hit_tokens: tokens that were copied back from host memory (``kv_host_bytes``) and read
            from files (``kv_disk_path``) instead of being computed; the prefix cache's hits count them.
        host_stored_bytes, host_loaded_bytes: copied to host memory and back.
        disk_written_bytes, disk_read_bytes: of blocks in files.
        num_host_evictions, num_disk_evictions: blocks in host memory, and files, that made room for others.
        num_stores_without_room: blocks that were dropped because each row of host memory was in use.
        num_disk_failures: files that could not be written or used: gone, damaged, of others.
        num_fetches_dearer, num_fetches_late: blocks that were computed because fetching them was estimated to take
            longer, and requests that waited too long for files.
        peer_hit_tokens: tokens whose blocks came from another engine. peer_taken_bytes: of blocks that did, and
            peer_given_bytes of those laid ready for others. num_takes_failed: blocks that another engine did not have,
            or not whole, or that it did not send in time.
        tier_copy_seconds: time of steps in copying blocks between host and device, on a CPU.
        tier_file_seconds: time of the thread that reads and writes files, beside steps.
        tier_idle_seconds: time in which nothing ran because all requests waited for files: the part that is not hidden.
        tier_wait_seconds: time that requests waited for files, most of it while others ran.
        used_tier_blocks: of ``num_tier_blocks`` in host memory; num_disk_blocks: blocks that are known to have a file.
        schedule_seconds, prepare_seconds, output_seconds: host time in the scheduler (waiting for the masks of grammars
            included), in filling the steps' buffers, and in detokenising. With ``async_scheduling`` the device works
            meanwhile.
        execute_seconds: launching steps and waiting for their tokens; ``launch_seconds`` of it is launching, which is 0
            on a CPU, where host and device are one.
        disk_bytes: of mapped weights that do not fit into memory: read from disk for steps. disk_bytes_per_second: what
            the disk gave as many readers at the start; 0 where all weights fit, or where it is unknown.
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
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_recomputed_tokens: int
    num_swapped_out_tokens: int
    num_swapped_in_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_accepted_by_position: tuple[int, ...]
    draft_seconds: float
    draft_gain_seconds: float
    num_not_finite_failures: int
    num_out_of_memory_failures: int
    num_exception_failures: int
    num_unexplained_faults: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_evictions: int
    num_kv_blocks: int
    used_blocks: int
    cached_blocks: int
    peak_used_blocks: int
    num_swap_blocks: int
    used_swap_blocks: int
    num_state_slots: int
    used_slots: int
    cached_slots: int
    num_snapshot_evictions: int
    host_hit_tokens: int
    disk_hit_tokens: int
    host_stored_bytes: int
    host_loaded_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    num_host_evictions: int
    num_disk_evictions: int
    num_stores_without_room: int
    num_disk_failures: int
    num_fetches_dearer: int
    num_fetches_late: int
    peer_hit_tokens: int
    peer_taken_bytes: int
    peer_given_bytes: int
    num_takes_failed: int
    tier_copy_seconds: float
    tier_file_seconds: float
    tier_idle_seconds: float
    tier_wait_seconds: float
    num_tier_blocks: int
    used_tier_blocks: int
    num_disk_blocks: int
    schedule_seconds: float
    prepare_seconds: float
    launch_seconds: float
    execute_seconds: float
    output_seconds: float
    disk_bytes: int
    disk_bytes_per_second: float

    def __repr__(self) -> str:
        return table("EngineStats", self.rows())

    def rows(self) -> dict[str, str]:
        """What is worth a look, by name. Counts that are 0 in most runs are there only if they are not."""
        padding = self.num_padding_tokens / max(1, self.num_padding_tokens + self.num_computed_tokens)
        failed = ", ".join(f"{count} {kind}" for kind, count in self.failures.items() if count)
        rows = {
            "requests": f"{self.num_requests:,}: {self.num_finished:,} finished, {self.num_running:,} running, "
            f"{self.num_waiting:,} waiting",
            "tokens": f"{self.num_prompt_tokens:,} of prompts, {self.num_output_tokens:,} generated",
            "steps": f"{self.num_steps:,}, {padding:.1%} of their rows padding",
            "prefix cache": f"{self.prefix_hit_tokens:,} of {self.prefix_queried_tokens:,} tokens found, "
            f"{self.num_evictions:,} blocks evicted",
            "KV blocks": f"{self.used_blocks:,} of {self.num_kv_blocks:,} in use, at most {self.peak_used_blocks:,} so "
            f"far; {self.cached_blocks:,} free ones cached",
            "seconds": f"{self.execute_seconds:.2f} in steps, {self.host_seconds:.2f} on the host around them",
        }
        if self.num_tier_blocks:
            rows["KV tiers"] = (
                f"{self.host_hit_tokens:,} tokens from host memory, {self.disk_hit_tokens:,} from files; "
                f"{self.used_tier_blocks:,} of {self.num_tier_blocks:,} blocks in host memory, "
                f"{self.num_disk_blocks:,} on disk; {self.num_stores_without_room:,} dropped for want of room, "
                f"{self.num_disk_failures:,} files failed, {self.num_fetches_dearer:,} blocks dearer to fetch, "
                f"{self.num_fetches_late:,} requests late; "
                f"{self.tier_copy_seconds:.2f} s copying, {self.tier_file_seconds:.2f} s on files, "
                f"{self.tier_idle_seconds:.2f} s of it not hidden"
            )
        if self.peer_taken_bytes or self.peer_given_bytes or self.num_takes_failed:
            rows["other engines"] = (
                f"{self.peer_hit_tokens:,} tokens from them; {self.peer_taken_bytes:,} bytes taken, "
                f"{self.peer_given_bytes:,} laid ready for them, {self.num_takes_failed:,} blocks not got"
            )
        if self.num_preemptions:
            rows["preemptions"] = (
                f"{self.num_preemptions:,}: {self.num_recomputed_tokens:,} tokens computed again, "
                f"{self.num_swapped_in_tokens:,} copied back"
            )
        if self.num_draft_tokens:
            rows["drafts"] = (
                f"{self.num_accepted_draft_tokens:,} of {self.num_draft_tokens:,} tokens accepted, "
                f"{self.mean_accepted_length:.2f} tokens a request and step with drafts; {self.draft_seconds:.2f} s to "
                f"find them, about {self.draft_gain_seconds:.2f} s saved"
            )
        if self.num_state_slots:
            rows["state slots"] = (
                f"{self.used_slots:,} of {self.num_state_slots:,} in use, {self.cached_slots:,} cached"
            )
        if self.disk_bytes:
            rows["from disk"] = self.from_disk
        if failed or self.num_unexplained_faults:
            rows["failures"] = f"{failed or 'none'}; {self.num_unexplained_faults} faults without a known cause"
        return rows

    def since(self, earlier: "EngineStats") -> "EngineStats":
        """Counts and times since ``earlier``; what is a state, or a peak, stays that of now."""
        now, then = dataclasses.asdict(self), dataclasses.asdict(earlier)
        states = {"num_waiting", "num_running", "disk_bytes_per_second"}
        states |= {name for name in now if name.endswith(("_blocks", "_slots"))}
        return EngineStats(**{name: now[name] if name in states else _less(now[name], then[name]) for name in now})

    @property
    def from_disk(self) -> str:
        """How many weights were read from disk for steps, at which rate, and what the disk gives."""
        rate = self.disk_bytes / max(self.execute_seconds, 1e-9)
        share = f", {rate / self.disk_bytes_per_second:.0%} of what it gives" if self.disk_bytes_per_second else ""
        return f"{self.disk_bytes / 1e9:.2f} GB of weights, {rate / 1e6:,.0f} MB/s{share}"

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a request got of a step that verified drafts of it, on average: 1, and the accepted drafts."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_drafts)

    @property
    def failures(self) -> dict[str, int]:
        """How many continuations ended because of each kind of fault."""
        return {
            "not finite": self.num_not_finite_failures,
            "out of memory": self.num_out_of_memory_failures,
            "exception": self.num_exception_failures,
        }

    @property
    def host_seconds(self) -> float:
        """Time in which the host works for a step and not the device."""
        return self.schedule_seconds + self.prepare_seconds + self.launch_seconds + self.output_seconds


def _less(now: Any, then: Any) -> Any:
    """The difference of two numbers, or of two tuples item by item."""
    return tuple(a - b for a, b in zip(now, then, strict=True)) if isinstance(now, tuple) else now - then
