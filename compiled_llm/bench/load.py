"""The load of ``bench arrivals`` and ``bench serve``: arrival times, the times of each request, and their metrics."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compiled_llm.bench.serving import summary

METRICS = ("ttft", "tpot", "itl", "e2el")
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")  # with --max-concurrency
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass
class Served:
    """The times of a request, in seconds on the loop's clock.

    Attributes:
        arrival: when it was due.
        sent: its arrival, or when ``max_concurrency`` allowed it, if later. Its latencies count from here.
        added: when it was added to the engine, after the step that ran when it was sent; or sent to the server.
        output_len: tokens that it was answered with.
        token_times: when each token was returned; from a server, when each event with text came.
        error: why it failed, or "".
    """

    input_len: int
    arrival: float
    sent: float = math.nan
    added: float = math.nan
    output_len: int = 0
    token_times: list[float] = dataclasses.field(default_factory=list)
    finished: float = math.nan
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end."""
        return self.finished - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 if there is no other."""
        count = self.output_len
        return (self.finished - self.token_times[0]) / (count - 1) if count > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between each token, or event, and the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times)]

    @property
    def queue_time(self) -> float:
        """Seconds that ``max_concurrency`` held it back."""
        return self.sent - self.arrival


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests arrive, ``rate`` a second, the last after ``count / rate``.

    The intervals have a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less than 1 gives bursts,
    infinity even intervals. The same seed gives the same pattern at any rate. At an infinite rate, all arrive at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    even = math.isinf(burstiness)
    times = np.cumsum(np.ones(count) if even else np.random.default_rng(seed).gamma(shape=burstiness, size=count))
    # With a very small shape all intervals can be zero: then all arrive at once, at the end.
    return (times * (count / rate / times[-1])).tolist() if times[-1] > 0 else [count / rate] * count


def metrics_of(
    served: Sequence[Served],
    duration: float,
    targets_ms: Mapping[str, float],
    metrics: Sequence[str],
    shown_percentiles: Sequence[float],
) -> dict[str, Any]:
    """The keys of ``vllm bench serve``; requests that failed count in ``failed`` alone."""
    done = [request for request in served if not request.error]
    good = sum(all(getattr(request, name) * 1e3 <= most for name, most in targets_ms.items()) for request in done)
    prompt_tokens = sum(request.input_len for request in done)
    output_tokens = sum(request.output_len for request in done)
    delays = [request.added - request.sent for request in done]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(served) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if targets_ms else None,
        "goodput_share": good / len(served) if targets_ms else None,
        "output_throughput": output_tokens / duration,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration,
        "max_output_tokens_per_s": _most_tokens_a_second(done),
        "max_concurrent_requests": _most_at_once(done),
        # Part of these latencies, not of the engine's or server's own: time until it was added or sent.
        "mean_submit_delay_ms": float(np.mean(delays or [0.0])) * 1e3,
        "max_submit_delay_ms": max(delays, default=0.0) * 1e3,
    }
    values: dict[str, list[float]] = {
        "ttft": [request.ttft for request in done],
        "tpot": [request.tpot for request in done if request.output_len > 1],
        "itl": [itl for request in done for itl in request.itls],
        "e2el": [request.e2el for request in done],
        "client_queue_time": [request.queue_time for request in done],
        "e2el_including_client_queue": [request.finished - request.arrival for request in done],
    }
    for metric in metrics:
        result |= summary(metric, values[metric], shown_percentiles)
    return result


def details_of(served: Sequence[Served]) -> dict[str, list[Any]]:
    """vLLM's keys that have an entry for each request; times in seconds."""
    return {
        "input_lens": [request.input_len for request in served],
        "output_lens": [0 if request.error else request.output_len for request in served],
        "ttfts": [0.0 if request.error else request.ttft for request in served],
        "itls": [[] if request.error else request.itls for request in served],
        "latencies": [0.0 if request.error else request.e2el for request in served],
        "start_times": [request.sent for request in served],
        "queue_times": [request.queue_time for request in served],
        "generated_texts": [request.text for request in served],
        "errors": [request.error for request in served],
    }


def highest_rate(passes: Callable[[float], bool], start: float, steps: int) -> float | None:
    """The highest rate that ``passes``, found by doubling or halving ``start``, then by ``steps`` bisections.

    At most 16 times ``start``. None if not even 1/16 of ``start`` passes; lower rates would take very long.
    """
    low, high, rate = None, None, start
    while (low is None or high is None) and start / 16 <= rate <= start * 16:
        if passes(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
    if low is None or high is None:
        return low
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _most_tokens_a_second(done: Sequence[Served]) -> float:
    first = min((request.sent for request in done), default=0.0)
    seconds: dict[int, float] = defaultdict(float)
    for request in done:
        for t in request.token_times:  # an event may have brought several tokens
            seconds[int(t - first)] += request.output_len / len(request.token_times)
    return float(max(seconds.values(), default=0))


def _most_at_once(done: Sequence[Served]) -> int:
    # Of requests that end and start at the same moment, those that end come first.
    changes = sorted([(request.sent, 1) for request in done] + [(request.finished, -1) for request in done])
    return max(itertools.accumulate(change for _, change in changes), default=0)
