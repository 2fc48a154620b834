"""StepLog: rows by shape, bounded tables, latencies without the pauses for profiling."""

import itertools
import statistics

import pytest

from compiled_llm.report import step_log
from compiled_llm.report.roofline import StepWork
from compiled_llm.report.step_log import Point, Sample, Series, StepLog, overlap
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.fake_engine import make_request

DECODE, TOKENS = Bucket("decode", 8, 8), Bucket("tokens", 64, 8)


def step(requests: list[tuple[int, int]], samples: list[bool] | None = None) -> SchedulerOutput:
    """A step of (computed, count) for each request."""
    computed, counts = zip(*requests, strict=True)
    return SchedulerOutput(
        request_ids=tuple(map(str, range(len(requests)))),
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        num_samples=tuple(map(int, samples or [True] * len(requests))),
        feedback=(-1,) * len(requests),
        token_ids=(0,) * sum(counts),
    )


def test_steps_of_a_shape_share_a_row_and_their_work_adds_up() -> None:
    log = StepLog()
    log.record_step(DECODE, step([(9, 1), (19, 1)]), 0.25)
    log.record_step(DECODE, step([(10, 1), (20, 1)]), 0.75)
    log.record_step(TOKENS, step([(11, 1), (0, 30)], [True, False]), 1.0)
    log.record_step(TOKENS, step([(30, 30)], [False]), 2.0)
    assert log.trace_rows() == [
        {"kind": "decode", "num_requests": 2, "num_tokens": 2, "count": 2, "seconds": 1.0},
        {"kind": "tokens", "num_requests": 1, "num_tokens": 30, "count": 1, "seconds": 2.0},
        {"kind": "tokens", "num_requests": 2, "num_tokens": 31, "count": 1, "seconds": 1.0},
    ]
    assert log.step_seconds() == {"decode_8": 0.5, "tokens_64": 1.5}
    decode, chunk, mixed = (row.work() for row in log.rows())
    assert decode == StepWork(2, 2, 4, 4, num_keys=10 + 20 + 11 + 21, num_pairs=10 + 20 + 11 + 21, num_states=8)
    assert chunk == StepWork(1, 0, 30, 0, num_keys=60, num_pairs=30 * 30 + 465, num_states=2)
    assert mixed == StepWork(1, 1, 31, 1, num_keys=12 + 30, num_pairs=12 + 465, num_states=3)


def test_where_steps_have_their_own_sizes_those_with_drafts_alone_have_padding() -> None:
    own, padded = StepLog(computes_padding=False), StepLog()
    with_drafts = step([(9, 4), (3, 4), (5, 1)])._replace(num_samples=(4, 4, 1))
    for log in (own, padded):
        log.record_step(DECODE, step([(9, 1), (19, 1)]), 0.25)
        log.record_step(Bucket("decode", 32, 8, query_len=4), with_drafts, 0.25)
        log.record_step(TOKENS, step([(0, 29)]), 0.25)
    assert [row.total_padding for row in own.rows()] == [0, 1, 0]
    assert [row.total_padding for row in padded.rows()] == [6, 23, 35]


def test_the_work_in_each_window_adds_up() -> None:
    log, steps = StepLog(windows=(4, 16)), [[(9, 1), (2, 1)], [(10, 1), (3, 1)]]
    for requests in steps:
        log.record_step(DECODE, step(requests), 0.25)
    (row,) = log.rows()
    each = [StepWork.of(requests, windows=(4, 16)).in_windows for requests in steps]
    assert each == [((7, 7), (13, 13)), ((8, 8), (15, 15))]
    assert row.work().in_windows == ((15, 15), (28, 28))


def test_a_full_table_rounds_to_buckets_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "_MOST_ROWS", 3)
    log = StepLog()
    for length in range(2, 12):
        log.record_step(TOKENS, step([(0, length)]), 1.0)
    rows = log.trace_rows()
    assert len(rows) == 4
    assert rows[-1] == {"kind": "tokens", "num_requests": 8, "num_tokens": 64, "count": 7, "seconds": 7.0}
    assert log.rounded_steps == 7
    assert sum(row.total_tokens for row in log.rows()) == sum(range(2, 12))


def test_a_sample_is_exact_in_count_and_mean_and_bounded_in_size() -> None:
    sample = Sample(size=500)
    assert sample.summary() is None
    for value in range(20_000):
        sample.add(value)
    summary = sample.summary()
    assert summary is not None
    assert len(sample.values) == 500
    assert (summary["count"], summary["mean"]) == (20_000, statistics.mean(range(20_000)))
    assert summary["p50"] == pytest.approx(10_000, rel=0.15)
    assert summary["p50"] < summary["p90"] < summary["p99"]


def test_a_series_is_thinned_evenly() -> None:
    series = Series(size=8)
    for number in range(1000):
        if series.is_due():
            series.add(Point(number, 0, 0, 0, 0))
    times = [point.seconds for point in series.points]
    assert 4 <= len(times) <= 8
    assert times[0] == 0
    assert len({later - earlier for earlier, later in itertools.pairwise(times)}) == 1
    assert times[-1] > 700


def test_latencies_leave_pauses_out() -> None:
    log = StepLog(pauses=[(12.0, 13.0), (15.0, 15.5)])
    request = make_request("a", 4, 8)
    request.arrival_time, request.first_scheduled_time, request.first_token_time = 10.0, 11.0, 14.0
    request.finished_time, request.finish_reason, request.output_token_ids = 16.0, "length", [1, 2, 3]
    log.record_request(request)
    values = {name: list(getattr(log, name).values) for name in ("queue", "ttft", "e2e", "tpot")}
    assert values == {"queue": [1.0], "ttft": [3.0], "e2e": [4.5], "tpot": [0.75]}
    request.finish_reason = "error"
    log.record_request(request)
    assert (log.num_finished, log.e2e.count) == (2, 1)


def test_pauses_are_in_no_gap_between_tokens() -> None:
    log = StepLog(pauses=[])
    times = [log.token_time(100.0), log.token_time(100.5)]
    log.pauses.append((7.0, 9.0))
    times.append(log.token_time(103.0))
    assert [times[1] - times[0], times[2] - times[1]] == [0.5, 0.5]


def test_a_sample_is_as_likely_to_keep_any_number() -> None:
    kept = [0] * 10
    for seed in range(60):
        sample = Sample(size=50, seed=seed)
        for start in range(0, 1000, 25):
            sample.extend([float(value) for value in range(start, start + 25)])
        for value in sample.values:
            kept[int(value) // 100] += 1
    assert sum(kept) == 60 * 50
    assert all(abs(count - 300) < 5 * 300**0.5 for count in kept), kept


def test_many_values_at_once_are_one_after_the_other() -> None:
    single, many = Sample(size=5), Sample(size=5)
    for values in ([1.0, 2.0], [], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0]):
        for value in values:
            single.add(value)
        many.extend(values)
    assert (many.count, many.sum, many.values) == (single.count, single.sum, single.values)
    assert many.count == 9


def test_overlap() -> None:
    assert overlap([(1, 2), (3, 6)], 1.5, 4) == 1.5
    assert overlap([(1, 2)], 2, 3) == overlap([], 0, 9) == 0


def test_waiting_is_time_outside_with_nothing_launched() -> None:
    log = StepLog()
    log.enter(device_is_busy=False)  # before anything arrived
    log.leave()
    assert (log.waiting_seconds, log.wall_seconds) == (0, 0)
    log.arrive()
    log.enter(device_is_busy=True)
    assert log.waiting_seconds == 0
    log.leave()
    log.enter(device_is_busy=False)
    assert 0 < log.waiting_seconds <= log.wall_seconds + 1


def test_what_a_step_took_before_the_log_began_is_cut_off_and_no_time_is_negative() -> None:
    pauses: list[tuple[float, float]] = []
    log = StepLog(pauses)
    log.arrive()
    log.record_step(DECODE, step([(9, 1)]), seconds=0.0)
    assert not log.is_cut
    log.record_step(DECODE, step([(9, 1)]), seconds=1000.0)
    log.leave()
    (row,) = log.rows()
    assert log.is_cut
    assert 0 < row.seconds <= log.wall_seconds
    log.record_step(DECODE, step([(9, 1)]), seconds=1000.0)  # ran while the first was recorded
    log.leave()
    assert sum(row.seconds for row in log.rows()) <= log.wall_seconds
    pauses.append((0.0, 5.0))  # of a step that then failed: nothing came after it
    assert log.wall_seconds == 0
