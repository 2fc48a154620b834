"""bench_serve: arrivals, times that no step of the engine delays, vLLM's keys, goodput, and what is refused."""

import importlib
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
TINY = ["--shape", "tiny", "--enforce-eager", "--bucket-sizes", "1,4"]
RANDOM = ["--random-input-len", "20", "--random-output-len", "4", "--num-prompts", "6"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_serve_load")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("bench_serve")

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_serve.py", *arguments])
        try:
            return module.main()
        except SystemExit as bad_arguments:
            return int(bad_arguments.code or 0)

    return main


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


def drive(load: ModuleType, arrivals: list[float], lengths: list[int], prompts: Any = None, **options: Any) -> Any:
    workloads = importlib.import_module("workloads")
    engine = EngineOfSeconds()
    prompts = prompts or [[1]] * len(lengths)
    requests = [workloads.WorkloadRequest(p, n) for p, n in zip(prompts, lengths, strict=True)]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    served, duration = load.drive(engine, requests, params, arrivals, clock=engine.clock, sleep=engine.sleep, **options)
    return engine, served, duration


def test_times_count_from_the_arrival_and_not_from_the_step_after_it(load: ModuleType) -> None:
    engine, served, duration = drive(load, [0.5, 0.75, 7.0], [3, 2, 1])
    first, second, third = served
    assert (first.sent, first.added, first.token_times) == (100.5, 100.5, [101.5, 102.5, 103.5])
    assert (second.sent, second.added) == (100.75, 101.5), "it is added when the step is over"
    assert (second.ttft, second.e2el, second.itls, second.tpot) == (1.75, 2.75, [1.0], 1.0)
    assert (third.ttft, third.e2el, third.itls, third.tpot) == (1.0, 1.0, [], 0.0)
    assert engine.slept == pytest.approx(0.5 + (7 - 3.5)), "it sleeps only when there is nothing to do"
    assert duration == 8.0


def test_requests_wait_for_a_seat_outside_of_their_latency(load: ModuleType) -> None:
    _, served, _ = drive(load, [0.0, 0.0, 0.25, 9.0], [2, 1, 1, 1], max_concurrency=1)
    assert [request.sent - 100 for request in served] == [0, 2, 3, 9]
    assert [request.added - 100 for request in served] == [0, 2, 3, 9]
    assert [request.queue_time for request in served] == [0, 2, 2.75, 0]
    assert [request.e2el for request in served] == [2, 1, 1, 1]
    _, served, _ = drive(load, [0.0, 0.0, 0.25], [2, 1, 1], max_concurrency=2)
    assert [request.queue_time for request in served] == [0, 0, 0.75]


def test_requests_are_added_in_the_order_of_arrival(load: ModuleType) -> None:
    engine, served, _ = drive(load, [4.0, 0.0, 2.0], [1, 1, 1])
    assert engine.order == ["1", "2", "0"]
    assert [request.ttft for request in served] == [1, 1, 1]


def test_failed_requests_are_counted_and_leave_their_seat(load: ModuleType) -> None:
    ended: list[None] = []
    _, served, duration = drive(
        load, [0.0] * 4, [2, 5, 5, 2], [[1], [13], [14], [1]], max_concurrency=1, progress=lambda: ended.append(None)
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


def test_metrics(load: ModuleType) -> None:
    _, served, duration = drive(load, [0.0, 0.5, 0.5], [3, 2, 1])
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


def test_nothing_completed_is_no_error(load: ModuleType) -> None:
    _, served, _ = drive(load, [0.0], [1], [[13]])
    metrics = load.metrics_of(served, 1.0, {"ttft": 1.0}, load.METRICS, [99.0])
    assert (metrics["completed"], metrics["p99_itl_ms"], metrics["goodput_share"]) == (0, 0, 0)
    assert (metrics["max_concurrent_requests"], metrics["max_output_tokens_per_s"]) == (0, 0)


def test_arrivals(load: ModuleType) -> None:
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
def test_the_highest_rate_is_found(load: ModuleType, start: float, limit: float) -> None:
    tried: list[float] = []
    best = load.highest_rate(lambda rate: tried.append(rate) or rate <= limit, start, 10)
    assert best <= limit
    assert best == pytest.approx(limit, rel=1e-2)
    assert len(tried) == len(set(tried)) <= 16


def test_the_search_for_a_rate_ends(load: ModuleType) -> None:
    tried: list[float] = []
    assert load.highest_rate(lambda rate: tried.append(rate) or False, 1.0, 3) is None
    assert tried == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert load.highest_rate(lambda rate: True, 1.0, 3) == 16
    assert load.highest_rate(lambda rate: rate < 3, 2.0, 0) == 2


def test_a_run_with_vllms_keys(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--request-rate", "200", "--goodput", "ttft:1e9", "tpot:1e9", "--metric-percentiles", "90,99"]
    assert run(*TINY, *RANDOM, *words, "--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new")) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    (path,) = (tmp_path / "new").iterdir()
    assert path.name.startswith("compiled-llm-200qps-tiny-")
    saved = json.loads(path.read_text())
    assert {key: saved[key] for key in line} == line
    assert "itls" not in line
    assert (saved["completed"], saved["failed"], saved["num_prompts"]) == (6, 0, 6)
    assert (saved["request_rate"], saved["burstiness"], saved["max_concurrency"]) == (200, 1, None)
    assert (saved["total_input_tokens"], saved["total_output_tokens"]) == (120, 24)
    assert saved["request_goodput"] == saved["request_throughput"] == pytest.approx(6 / saved["duration"])
    assert (saved["input_lens"], saved["output_lens"], saved["errors"]) == ([20] * 6, [4] * 6, [""] * 6)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert saved[f"median_{metric}_ms"] > 0
        assert saved[f"p90_{metric}_ms"] <= saved[f"p99_{metric}_ms"]
    assert statistics.mean(saved["ttfts"]) * 1e3 == pytest.approx(saved["mean_ttft_ms"])
    for ttft, itls, latency in zip(saved["ttfts"], saved["itls"], saved["latencies"], strict=True):
        assert ttft + sum(itls) == pytest.approx(latency)


def test_the_search_reports_its_best_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY, *RANDOM, "--goodput", "e2el:1e9", "--find-goodput") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["request_rate"] == result["goodput_search"]["max_request_rate"] == "inf"
    words = ["--goodput", "e2el:0", "--find-goodput", "--num-warmups", "0", "--num-prompts", "2"]
    assert run(*TINY, *RANDOM, *words) == 1, "no rate is slow enough for that"
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "no rate with 90% of the requests" in out
    assert result["goodput_search"]["max_request_rate"] is None
    trials = result["goodput_search"]["trials"]
    assert [trial["goodput_share"] for trial in trials] == [0] * 6
    assert result["request_rate"] == trials[-1]["request_rate"] == pytest.approx(trials[1]["request_rate"] / 16)


def test_the_queue_of_the_client(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-concurrency", "1", "--percentile-metrics", "client_queue_time,e2el_including_client_queue,e2el"]
    assert run(*TINY, *RANDOM, *words) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["max_concurrent_requests"], result["request_rate"]) == (1, "inf")
    together = result["mean_client_queue_time_ms"] + result["mean_e2el_ms"]
    assert result["mean_e2el_including_client_queue_ms"] == pytest.approx(together)
    assert "mean_ttft_ms" not in result


def test_the_report_covers_what_counts(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: limits)
    words = ["--input-len", "9", "--output-len", "3", "--num-prompts", "2"]
    assert run(*TINY, *words, "--report", str(tmp_path / "report")) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert sum(phase["num_tokens"] for phase in report["phases"]) == 2 * (9 + 2), "no warm-up"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", __file__], "is a file: give a directory"),
        (["--top-p", "2"], "top_p"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--burstiness", "-1"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--num-warmups", "-1"], "--num-warmups must be at least 0"),
        (["--percentile-metrics", "ttft,latency"], "given 'latency'"),
        (["--percentile-metrics", "client_queue_time"], "with --max-concurrency also"),
        (["--metric-percentiles", "101"], "from 0 to 100, given '101'"),
        (["--metric-percentiles", "50,"], "--metric-percentiles"),
        (["--goodput", "itl:5"], "given 'itl:5'"),
        (["--goodput", "ttft:5", "ttft:6"], "once; given 'ttft:6'"),
        (["--goodput", "ttft:fast"], "given 'fast'"),
        (["--goodput", "ttft:-1"], "given '-1'"),
        (["--find-goodput"], "--find-goodput needs --goodput"),
        (["--find-goodput", "--goodput", "ttft:5", "--request-rate", "1"], "--request-rate must be left out"),
        (["--find-goodput", "--goodput", "ttft:5", "--max-concurrency", "1"], "--max-concurrency must be left out"),
        (["--find-goodput", "--goodput", "ttft:5", "--goodput-share", "0"], "--goodput-share"),
        (["--find-goodput", "--goodput", "ttft:5", "--report", "x"], "--report must be left out"),
        (["--save-detailed"], "needs --save-result"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--bucket-sizes", "8,8"], "duplicates"),
    ],
)
def test_bad_arguments_exit_with_2(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(*TINY, *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
