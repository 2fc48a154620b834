"""StepLog: sizes and times of an engine's steps, and latencies of its requests. Always on; plain Python.

To record a step takes some microseconds. Memory is bounded however long the engine runs: steps of the same shape share
a row, of many times a random sample is kept, and of a long series every second, fourth, ... point.
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from compiled_llm.report.adapter_use import AdapterUse
from compiled_llm.report.roofline import StepWork, num_pairs, work_in_window
from compiled_llm.report.sample import Sample
from compiled_llm.scheduling.bucket import Bucket, own_sizes
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

_MOST_ROWS = 8192  # shapes of steps
_MOST_POINTS = 2048  # of a series over time
_RECENT_STEPS = 1024  # of each bucket, for the median


class Point(NamedTuple):
    """The engine's state after a step: seconds since the log's start, blocks of the KV pool, numbers of requests."""

    seconds: float
    used_blocks: int
    cached_blocks: int
    num_running: int
    num_waiting: int


class Series:
    """Points over time. If there are too many, every second one is dropped, and from then on half as many are due."""

    def __init__(self, size: int = _MOST_POINTS) -> None:
        self.points: list[Point] = []
        self._size = size
        self._stride = 1
        self._asked = 0

    def is_due(self) -> bool:
        """Whether a point is due for this step. Call it once a step."""
        self._asked += 1
        return (self._asked - 1) % self._stride == 0

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) >= self._size:
            del self.points[1::2]
            self._stride *= 2


@dataclasses.dataclass(slots=True, eq=False)
class StepRow:
    """All steps of one shape.

    Attributes:
        num_requests, num_tokens: of each step.
        recent: seconds of the latest steps in the bucket; all rows of the bucket share it.
        count, seconds: number of steps, and their time on the device.
        total_padding: tokens that held none, over the steps.
        total_requests, total_tokens, num_logits, num_keys, num_pairs, num_experts, num_states: sums over the steps;
            see ``StepWork``.
    """

    bucket: Bucket
    num_requests: int
    num_tokens: int
    recent: deque[float]
    count: int = 0
    seconds: float = 0.0
    total_requests: int = 0
    total_tokens: int = 0
    total_padding: int = 0
    num_head_steps: int = 0
    num_logits: int = 0
    num_keys: int = 0
    num_pairs: int = 0
    num_experts: int = 0
    in_windows: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    num_states: int = 0

    def work(self) -> StepWork:
        heads = self.num_head_steps, self.total_tokens, self.num_logits
        keys, windows = (self.num_keys, self.num_pairs, self.num_experts), tuple(self.in_windows)
        return StepWork(self.count, *heads, *keys, windows, self.num_states)


class StepLog:
    """What one engine did since the log was created.

    Args:
        pauses: the list of ``pauses`` below.
        windows: the sliding windows of the model's layers, see ``windows_of``.
        serves_adapters: whether to count by adapter too.
        computes_padding: whether a step computes all tokens of its bucket; else those of ``own_sizes``.

    Attributes:
        by_adapter: None: adapters are not counted.
        rounded_steps: steps recorded with the size of their bucket, because the table of shapes was full.
        is_cut: whether a step started before the log did, so that the rates of its steps look too high.
        waiting_seconds: time between steps with nothing launched: there was no request, or the caller was busy.
        created: when the log was created, on ``time.perf_counter``.
        started, ended: times of the first arrival and of the end of the last step, on ``time.perf_counter``, or None.
        gaps: seconds between two tokens of a request, as its caller gets them.
        ttft, tpot, e2e, queue: of finished requests, in seconds: until the first token, mean gap between tokens, until
            the end, and until the request was first scheduled. All are counted from its arrival.
        pauses: (start, end) of work that was done only for the report, on ``time.monotonic``; not part of any latency.
            The caller appends to the list while the log is in use.
    """

    def __init__(
        self,
        pauses: list[tuple[float, float]] | None = None,
        windows: Sequence[int] = (),
        serves_adapters: bool = False,
        computes_padding: bool = True,
    ) -> None:
        self._computes_padding = computes_padding
        self.by_adapter = AdapterUse() if serves_adapters else None
        self.rounded_steps = 0
        self.is_cut = False
        self.waiting_seconds = 0.0
        self.started: float | None = None
        self.ended: float | None = None
        self.gaps, self.ttft, self.tpot, self.e2e, self.queue = (Sample() for _ in range(5))
        self.num_finished = 0
        self.pauses = [] if pauses is None else pauses
        self.series = Series()
        self._windows = windows
        self._rows: dict[tuple[str, int, int], StepRow] = {}
        self._recent: dict[str, deque[float]] = {}
        self._left: float | None = None
        self._device_seconds = 0.0
        self.created = time.perf_counter()

    # -- Time that passes

    def arrive(self) -> None:
        """A request has come."""
        if self.started is None:
            self.started = self._left = time.perf_counter()

    def enter(self, device_is_busy: bool) -> None:
        """The engine starts to work on a step."""
        if self._left is not None and not device_is_busy:
            self.waiting_seconds += time.perf_counter() - self._left

    def leave(self) -> None:
        """The engine returns to its caller."""
        self._left = self.ended = time.perf_counter()

    @property
    def paused_seconds(self) -> float:
        return sum(end - start for start, end in self.pauses)

    @property
    def wall_seconds(self) -> float:
        """From the first arrival to the end of the last step, without pauses."""
        if self.started is None or self.ended is None:
            return 0.0
        # If a step fails, its pause may have no end yet.
        return max(0.0, self.ended - self.started - self.paused_seconds)

    # -- Steps

    def record_step(
        self,
        bucket: Bucket,
        output: SchedulerOutput,
        seconds: float,
        num_experts: int = 0,
        of_requests: Sequence[Request] = (),
    ) -> None:
        """A step ran in ``bucket`` and took ``seconds`` on the device. Time before the log's start is left out.

        ``num_experts``: see ``StepWork``. ``of_requests``: those of ``output``; needed where adapters are served.
        """
        if self.started is not None:
            # Steps run on the device one after the other. With overlap, one is recorded when the next one runs already.
            room = max(0.0, time.perf_counter() - self.started - self._device_seconds)
            if seconds > room:
                seconds, self.is_cut = room, True
        self._device_seconds += seconds
        if self.by_adapter is not None:
            self.by_adapter.add_step(of_requests, output.num_scheduled_tokens, seconds)
        requests, tokens = len(output.request_ids), len(output.token_ids)
        row = self._rows.get((bucket.kind, requests, tokens)) or self._new_row(bucket, requests, tokens)
        row.count += 1
        row.seconds += seconds
        row.recent.append(seconds)
        row.total_requests += requests
        row.total_tokens += tokens
        row.total_padding += self._num_computed(bucket, output) - tokens
        row.num_experts += num_experts
        row.num_states += 2 * requests - output.num_computed_tokens.count(0)
        row.num_logits += sum(output.num_samples)
        row.num_head_steps += any(output.num_samples)
        computed = sum(output.num_computed_tokens)
        row.num_keys += computed + tokens
        if tokens == requests:
            row.num_pairs += computed + tokens
        else:
            row.num_pairs += sum(map(num_pairs, output.num_computed_tokens, output.num_scheduled_tokens))
        for n, window in enumerate(self._windows):
            scheduled = zip(output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
            keys, pairs = work_in_window(window, scheduled)
            row.in_windows[n] = row.in_windows[n][0] + keys, row.in_windows[n][1] + pairs

    def _num_computed(self, bucket: Bucket, output: SchedulerOutput) -> int:
        """Tokens that the step computed, padding among them."""
        if self._computes_padding:
            return bucket.num_tokens
        return own_sizes(bucket, output.num_tokens, len(output.request_ids), output.num_rows)[0]

    def record_state(self, used_blocks: int, cached_blocks: int, num_running: int, num_waiting: int) -> None:
        """Add a point to the series. Call it if ``series.is_due()``."""
        seconds = time.perf_counter() - (self.started or self.created) - self.paused_seconds
        self.series.add(Point(seconds, used_blocks, cached_blocks, num_running, num_waiting))

    def _new_row(self, bucket: Bucket, requests: int, tokens: int) -> StepRow:
        if len(self._rows) >= _MOST_ROWS:
            self.rounded_steps += 1
            requests, tokens = bucket.num_requests, bucket.num_tokens
            if (bucket.kind, requests, tokens) in self._rows:
                return self._rows[bucket.kind, requests, tokens]
        recent = self._recent.setdefault(bucket.name, deque(maxlen=_RECENT_STEPS))
        row = self._rows[bucket.kind, requests, tokens] = StepRow(bucket, requests, tokens, recent)
        row.in_windows = [(0, 0)] * len(self._windows)
        return row

    def rows(self) -> list[StepRow]:
        """A row for each shape, decodes first, in order of their size."""
        return [self._rows[key] for key in sorted(self._rows)]

    def step_seconds(self) -> dict[str, float]:
        """Median seconds of the latest steps in each bucket that ran."""
        return {name: statistics.median(recent) for name, recent in self._recent.items() if recent}

    def trace_rows(self) -> list[dict[str, Any]]:
        """The rows as ``compiled-llm tune buckets`` reads them."""
        names = ("num_requests", "num_tokens", "count", "seconds")
        return [{"kind": row.bucket.kind} | {name: getattr(row, name) for name in names} for row in self.rows()]

    # -- Requests

    def token_time(self, now: float) -> float:
        """``now``, on ``time.perf_counter``, without pauses: two such times differ by what belongs into ``gaps``."""
        return now - self.paused_seconds if self.pauses else now

    def record_request(self, request: Request) -> None:
        """A request has ended. If it has no token, failed or was aborted, it is in no latency."""
        self.num_finished += 1
        arrived, first, finished = request.arrival_time, request.first_token_time, request.finished_time
        if first is None or finished is None or request.finish_reason in ("abort", "error"):
            if self.by_adapter is not None:
                self.by_adapter.add_request(request, None, None)
            return
        count = len(request.output_token_ids)
        whole, to_first = self._without_pauses(arrived, finished), self._without_pauses(arrived, first)
        after_first = (whole - to_first) / (count - 1) if count > 1 else None
        self.e2e.add(whole)
        self.ttft.add(to_first)
        if after_first is not None:
            self.tpot.add(after_first)
        if self.by_adapter is not None:
            self.by_adapter.add_request(request, to_first, after_first)
        if request.first_scheduled_time is not None:
            self.queue.add(self._without_pauses(arrived, request.first_scheduled_time))

    def latencies(self) -> dict[str, dict[str, float] | None]:
        """Each latency's count, mean, p50, p90 and p99, in seconds; None if there is no value."""
        samples = {"ttft": self.ttft, "tpot": self.tpot, "itl": self.gaps, "e2e": self.e2e, "queue": self.queue}
        return {name: sample.summary() for name, sample in samples.items()}

    def _without_pauses(self, start: float, end: float) -> float:
        return end - start - overlap(self.pauses, start, end)


def overlap(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds from ``start`` to ``end`` that lie in one of ``intervals``, which do not overlap one another."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in intervals)
