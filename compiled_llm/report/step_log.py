"""StepLog: what an engine's steps met, how long they took, and what its requests saw. Always on; plain Python.

Entering a step costs some microseconds, and memory is bounded however long the engine runs: steps of the same shape
share a row, times beyond some number are sampled at random, and a series over time is thinned out.
"""

import dataclasses
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from compiled_llm.report.roofline import StepWork, num_pairs
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput

_MOST_ROWS = 8192  # shapes of steps
_MOST_VALUES = 1 << 16  # of a sample
_MOST_POINTS = 2048  # of a series over time
_RECENT_STEPS = 1024  # of each bucket, for the median


class BucketSize(Protocol):
    """What this file reads of a ``batch.Bucket``, which needs torch."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_requests(self) -> int: ...


class Sample:
    """Numbers, of which a random sample of bounded size is kept. Count and sum are exact."""

    def __init__(self, size: int = _MOST_VALUES) -> None:
        self.count = 0
        self.sum = 0.0
        self.values = array("d")
        self._size = size
        self._random = random.Random(0).random

    def add(self, value: float) -> None:
        self.count += 1
        self.sum += value
        if len(self.values) < self._size:
            self.values.append(value)
        else:
            place = int(self._random() * self.count)
            if place < self._size:
                self.values[place] = value

    def summary(self) -> dict[str, float] | None:
        """Count, mean, p50, p90, p99; None of nothing."""
        if not self.count:
            return None
        ordered = sorted(self.values)
        at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 90, 99)}
        return {"count": self.count, "mean": self.sum / self.count, **at}


class Point(NamedTuple):
    """The engine's state after a step. Seconds since the log began; blocks of the KV pool; numbers of requests."""

    seconds: float
    used_blocks: int
    cached_blocks: int
    num_running: int
    num_waiting: int


class Series:
    """Points over time. When there are too many, every second one goes, and from then on half as many are asked for."""

    def __init__(self, size: int = _MOST_POINTS) -> None:
        self.points: list[Point] = []
        self._size = size
        self._stride = 1
        self._asked = 0

    def is_due(self) -> bool:
        """To be asked once a step: whether this step's point is wanted."""
        self._asked += 1
        return (self._asked - 1) % self._stride == 0

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) >= self._size:
            del self.points[1::2]
            self._stride *= 2


@dataclasses.dataclass(slots=True, eq=False)
class StepRow:
    """All steps of one shape. ``recent`` are seconds of the latest steps in its bucket, shared with its other rows."""

    bucket: BucketSize
    num_requests: int
    num_tokens: int
    recent: deque[float]
    count: int = 0
    seconds: float = 0.0
    total_requests: int = 0
    total_tokens: int = 0
    num_head_steps: int = 0
    num_logits: int = 0
    num_keys: int = 0
    num_pairs: int = 0

    def work(self) -> StepWork:
        return StepWork(
            self.count, self.num_head_steps, self.total_tokens, self.num_logits, self.num_keys, self.num_pairs
        )


class StepLog:
    """What one engine did since the log was made.

    ``pauses``: see below; a list that grows while the log is kept.

    Attributes:
        rounded_steps: steps that came when the table of shapes was full, and stand there with their bucket's size.
        is_cut: whether some step's time lies in part before the log began, so that rates of its steps look too high.
        waiting_seconds: between steps, nothing launched: the engine had nothing to do, or its caller was busy.
        made: when the log was, on ``time.perf_counter``.
        began, ended: of the first arrival and the last step, on ``time.perf_counter``; None before.
        gaps: seconds between two tokens of a request, as they are handed out.
        ttft, tpot, e2e, queue: of finished requests, in seconds: to the first token, between tokens on average, in all,
            and until the request was first scheduled. All count from its arrival.
        pauses: (begin, end) of what the engine did for the report alone, on ``time.monotonic``; no latency counts it.
    """

    def __init__(self, pauses: list[tuple[float, float]] | None = None) -> None:
        self.rounded_steps = 0
        self.is_cut = False
        self.waiting_seconds = 0.0
        self.began: float | None = None
        self.ended: float | None = None
        self.gaps, self.ttft, self.tpot, self.e2e, self.queue = (Sample() for _ in range(5))
        self.num_finished = 0
        self.pauses = [] if pauses is None else pauses
        self.series = Series()
        self._rows: dict[tuple[str, int, int], StepRow] = {}
        self._recent: dict[str, deque[float]] = {}
        self._left: float | None = None
        self._device_seconds = 0.0
        self.made = time.perf_counter()

    # -- Time that passes

    def arrive(self) -> None:
        """A request has come."""
        if self.began is None:
            self.began = self._left = time.perf_counter()

    def enter(self, device_is_busy: bool) -> None:
        """The engine begins to work on a step."""
        if self._left is not None and not device_is_busy:
            self.waiting_seconds += time.perf_counter() - self._left

    def leave(self) -> None:
        """The engine gives control back to its caller."""
        self._left = self.ended = time.perf_counter()

    @property
    def paused_seconds(self) -> float:
        return sum(end - begin for begin, end in self.pauses)

    @property
    def wall_seconds(self) -> float:
        """From the first arrival to the end of the last step, without pauses."""
        if self.began is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.began - self.paused_seconds)  # a step that fails has a pause and no end

    # -- Steps

    def record_step(self, bucket: BucketSize, output: SchedulerOutput, seconds: float) -> None:
        """A step ran in ``bucket`` and took the device ``seconds``. What lies before the log began is cut off."""
        if self.began is not None:
            # Steps follow one another on the device. With overlap, one is recorded while the next one runs already.
            room = max(0.0, time.perf_counter() - self.began - self._device_seconds)
            if seconds > room:
                seconds, self.is_cut = room, True
        self._device_seconds += seconds
        requests, tokens = len(output.request_ids), len(output.token_ids)
        row = self._rows.get((bucket.kind, requests, tokens)) or self._new_row(bucket, requests, tokens)
        row.count += 1
        row.seconds += seconds
        row.recent.append(seconds)
        row.total_requests += requests
        row.total_tokens += tokens
        logits = sum(output.num_samples)
        row.num_logits += logits
        row.num_head_steps += logits > 0
        computed = sum(output.num_computed_tokens)
        row.num_keys += computed + tokens
        if tokens == requests:
            row.num_pairs += computed + tokens
        else:
            row.num_pairs += sum(map(num_pairs, output.num_computed_tokens, output.num_scheduled_tokens))

    def record_state(self, used_blocks: int, cached_blocks: int, num_running: int, num_waiting: int) -> None:
        """A point of the series; to be called when ``series.is_due()``."""
        seconds = time.perf_counter() - (self.began or self.made) - self.paused_seconds
        self.series.add(Point(seconds, used_blocks, cached_blocks, num_running, num_waiting))

    def _new_row(self, bucket: BucketSize, requests: int, tokens: int) -> StepRow:
        if len(self._rows) >= _MOST_ROWS:
            self.rounded_steps += 1
            requests, tokens = bucket.num_requests, bucket.num_tokens
            if (bucket.kind, requests, tokens) in self._rows:
                return self._rows[bucket.kind, requests, tokens]
        recent = self._recent.setdefault(bucket.name, deque(maxlen=_RECENT_STEPS))
        row = self._rows[bucket.kind, requests, tokens] = StepRow(bucket, requests, tokens, recent)
        return row

    def rows(self) -> list[StepRow]:
        """A row for each shape, in order: decodes first, small ones first."""
        return [self._rows[key] for key in sorted(self._rows)]

    def step_seconds(self) -> dict[str, float]:
        """Median seconds of the latest steps in each bucket that ran."""
        return {name: statistics.median(recent) for name, recent in self._recent.items() if recent}

    def trace_rows(self) -> list[dict[str, Any]]:
        """The rows as ``scripts/tune_buckets.py`` reads them."""
        return [
            {
                "kind": row.bucket.kind,
                "num_requests": row.num_requests,
                "num_tokens": row.num_tokens,
                "count": row.count,
                "seconds": row.seconds,
            }
            for row in self.rows()
        ]

    # -- Requests

    def record_token(self, now: float, last: float | None) -> float:
        """A request hands a token out at ``now`` (``time.perf_counter``). Gives the ``last`` of its next one."""
        if self.pauses:
            now -= self.paused_seconds
        if last is not None:
            self.gaps.add(now - last)
        return now

    def record_request(self, request: Request) -> None:
        """A request has ended. One that got no token, or ended with an error, counts in no latency."""
        self.num_finished += 1
        arrived, first, finished = request.arrival_time, request.first_token_time, request.finished_time
        if first is None or finished is None or request.finish_reason in ("abort", "error"):
            return
        count = len(request.output_token_ids)
        whole = self._without_pauses(arrived, finished)
        to_first = self._without_pauses(arrived, first)
        self.e2e.add(whole)
        self.ttft.add(to_first)
        if count > 1:
            self.tpot.add((whole - to_first) / (count - 1))
        if request.first_scheduled_time is not None:
            self.queue.add(self._without_pauses(arrived, request.first_scheduled_time))

    def _without_pauses(self, begin: float, end: float) -> float:
        return end - begin - overlap(self.pauses, begin, end)


def overlap(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Seconds from ``begin`` to ``end`` that lie in one of ``intervals``, which do not overlap one another."""
    return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in intervals)
