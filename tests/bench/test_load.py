"""Requests that arrive over time: times that no step of the engine delays, vLLM's metrics, the search for a rate."""

import math
import statistics
from typing import Any

import pytest

from compiled_llm import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from compiled_llm.bench import arrivals, load
from compiled_llm.bench.workloads import WorkloadRequest


class EngineOfSeconds:
    """Every step takes a second and gives each request a token. A request of token 13 is refused, one of 14 fails."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0
        self.requests: dict[str, tuple[list[int], list[int], int]] = {}
        self.order: list[str] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def add_request(self, request_id: str, prompt: list[int], sampling_params: SamplingParams) -> None:
        if prompt == [13]:
            raise ValueError("unlucky")
        assert sampling_params.max_tokens is not None
        self.requests[request_id] = (prompt, [], sampling_params.max_tokens)
        self.order.append(request_id)

    def step(self) -> list[RequestOutput]:
        assert self.requests, "a step with nothing to do"
        self.now += 1
        outputs = []
        for request_id, (prompt, tokens, most) in list(self.requests.items()):
            fails = prompt == [14]
            if not fails:
                tokens.append(0)
            finished = fails or len(tokens) == most
            completion = CompletionOutput(
                index=0,
                text="text",
                token_ids=list(tokens),
                finish_reason=("error" if fails else "length") if finished else None,
                stop_reason="broken" if fails else None,
            )
            outputs.append(RequestOutput(request_id, None, prompt, [completion], finished, RequestMetrics(0.0)))
            if finished:
                del self.requests[request_id]
        return outputs


def drive(times: list[float], lengths: list[int], prompts: Any = None, **options: Any) -> Any:
    engine = EngineOfSeconds()
    prompts = prompts or [[1]] * len(lengths)
    requests = [WorkloadRequest(p, n) for p, n in zip(prompts, lengths, strict=True)]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    served, duration = arrivals.drive(
        engine, requests, params, times, clock=engine.clock, sleep=engine.sleep, **options
    )
    return engine, served, duration


def test_times_count_from_the_arrival_and_not_from_the_step_after_it() -> None:
    engine, served, duration = drive([0.5, 0.75, 7.0], [3, 2, 1])
    first, second, third = served
    assert (first.sent, first.added, first.token_times) == (100.5, 100.5, [101.5, 102.5, 103.5])
    assert (second.sent, second.added) == (100.75, 101.5), "it is added when the step is over"
    assert (second.ttft, second.e2el, second.itls, second.tpot) == (1.75, 2.75, [1.0], 1.0)
    assert (third.ttft, third.e2el, third.itls, third.tpot) == (1.0, 1.0, [], 0.0)
    assert engine.slept == pytest.approx(0.5 + (7 - 3.5)), "it sleeps only when there is nothing to do"
    assert duration == 8.0


def test_requests_wait_for_a_seat_outside_of_their_latency() -> None:
    _, served, _ = drive([0.0, 0.0, 0.25, 9.0], [2, 1, 1, 1], max_concurrency=1)
    assert [request.sent - 100 for request in served] == [0, 2, 3, 9]
    assert [request.added - 100 for request in served] == [0, 2, 3, 9]
    assert [request.queue_time for request in served] == [0, 2, 2.75, 0]
    assert [request.e2el for request in served] == [2, 1, 1, 1]
    _, served, _ = drive([0.0, 0.0, 0.25], [2, 1, 1], max_concurrency=2)
    assert [request.queue_time for request in served] == [0, 0, 0.75]


def test_requests_are_added_in_the_order_of_arrival() -> None:
    engine, served, _ = drive([4.0, 0.0, 2.0], [1, 1, 1])
    assert engine.order == ["1", "2", "0"]
    assert [request.ttft for request in served] == [1, 1, 1]


def test_failed_requests_are_counted_and_leave_their_seat() -> None:
    ended: list[None] = []
    _, served, duration = drive(
        [0.0] * 4, [2, 5, 5, 2], [[1], [13], [14], [1]], max_concurrency=1, progress=lambda: ended.append(None)
    )
    assert len(ended) == 4
    assert [request.error for request in served] == ["", "unlucky", "broken", ""]
    metrics = load.metrics_of(served, duration, {"e2el": 1e9}, ["ttft"], [99.0])
    assert (metrics["completed"], metrics["failed"], metrics["goodput_share"]) == (2, 2, 0.5)
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (2, 4)
    details = load.details_of(served)
    assert details["output_lens"] == [2, 0, 0, 2]
    assert details["itls"] == [[1.0], [], [], [1.0]]
    assert details["errors"] == ["", "unlucky", "broken", ""]


def test_metrics() -> None:
    _, served, duration = drive([0.0, 0.5, 0.5], [3, 2, 1])
    metrics = load.metrics_of(served, duration, {"ttft": 1000, "tpot": 1000}, load.METRICS, [50.0, 99.9])
    assert (metrics["duration"], metrics["request_throughput"], metrics["output_throughput"]) == (3, 1, 2)
    assert metrics["total_token_throughput"] == 3
    assert (metrics["request_goodput"], metrics["goodput_share"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert metrics["mean_ttft_ms"] == pytest.approx((1000 + 1500 + 1500) / 3)
    assert metrics["median_ttft_ms"] == metrics["p50_ttft_ms"] == 1500
    assert metrics["std_ttft_ms"] == pytest.approx(statistics.pstdev([1000, 1500, 1500]))
    assert metrics["p99.9_e2el_ms"] == pytest.approx(3000, rel=1e-3)
    assert metrics["mean_tpot_ms"] == metrics["mean_itl_ms"] == 1000, "a request of one token has none"
    assert (metrics["mean_submit_delay_ms"], metrics["max_submit_delay_ms"]) == (pytest.approx(1000 / 3), 500)
    assert (metrics["max_concurrent_requests"], metrics["max_output_tokens_per_s"]) == (3, 3)
    assert load.metrics_of(served, duration, {}, [], [])["request_goodput"] is None


def test_nothing_completed_is_no_error() -> None:
    _, served, _ = drive([0.0], [1], [[13]])
    metrics = load.metrics_of(served, 1.0, {"ttft": 1.0}, load.METRICS, [99.0])
    assert (metrics["completed"], metrics["p99_itl_ms"], metrics["goodput_share"]) == (0, 0, 0)
    assert (metrics["max_concurrent_requests"], metrics["max_output_tokens_per_s"]) == (0, 0)


def test_arrivals() -> None:
    assert load.arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert load.arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1, 1.5, 2])
    assert load.arrival_times(3, 1.0, 1e-9, 0) == [3, 3, 3], "a burst of all"
    spread = {}
    for burstiness in (0.25, 1.0, 4.0):
        times = load.arrival_times(5000, 10.0, burstiness, 1)
        assert times[-1] == pytest.approx(500)
        intervals = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        assert min(intervals) >= 0
        spread[burstiness] = statistics.pstdev(intervals) / statistics.mean(intervals)
    # The coefficient of variation of a gamma distribution: 1 / sqrt(shape).
    assert spread == {0.25: pytest.approx(2, rel=0.1), 1.0: pytest.approx(1, rel=0.1), 4.0: pytest.approx(0.5, rel=0.1)}
    times = load.arrival_times(5, 1.0, 1.0, 1)
    assert load.arrival_times(5, 4.0, 1.0, 1) == pytest.approx([t / 4 for t in times])
    assert load.arrival_times(5, 1.0, 1.0, 2) != times


@pytest.mark.parametrize(("start", "limit"), [(1.0, 5.3), (8.0, 5.3), (5.0, 5.0), (80.0, 5.3)])
def test_the_highest_rate_is_found(start: float, limit: float) -> None:
    tried: list[float] = []
    best = load.highest_rate(lambda rate: tried.append(rate) or rate <= limit, start, 10)
    assert best <= limit
    assert best == pytest.approx(limit, rel=1e-2)
    assert len(tried) == len(set(tried)) <= 16


def test_the_search_for_a_rate_ends() -> None:
    tried: list[float] = []
    assert load.highest_rate(lambda rate: tried.append(rate) or False, 1.0, 3) is None
    assert tried == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert load.highest_rate(lambda rate: True, 1.0, 3) == 16
    assert load.highest_rate(lambda rate: rate < 3, 2.0, 0) == 2
