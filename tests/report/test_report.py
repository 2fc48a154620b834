"""The report of a run: what it covers, that its parts add up, and the files that it writes."""

import dataclasses
import datetime
import html.parser
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine, RequestsFailedWarning, SamplingParams
from compiled_llm.report import machine_limits
from compiled_llm.report.limit_seconds import LimitSeconds
from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.report.report import RunReport

LIMITS = MachineLimits("cpu", "float32", 1e12, 1e13, "made up", "2026-01-01T00:00:00+00:00")
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
PROMPTS = [[n + 5] * (8 * n + 3) for n in range(6)]


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(
        enforce_eager=True, dtype="float32", bucket_sizes=(1, 4), token_bucket_sizes=(64,), max_model_len=128
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: LIMITS)


def serve(engine: CompiledEngine) -> None:
    engine.reset_prefix_cache()
    engine.generate(PROMPTS, PARAMS, use_tqdm=False)


def test_the_parts_add_up(engine: CompiledEngine) -> None:
    engine.reset_report()
    serve(engine)
    report = engine.report()
    assert sum(report.time.values()) == pytest.approx(report.seconds)
    assert sum(bucket.seconds for bucket in report.buckets) == pytest.approx(
        report.time["device"] + report.time["padding"]
    )
    assert [phase.name for phase in report.phases] == ["decode", "prefill"]
    for key in ("num_steps", "seconds", "num_tokens", "num_requests", "bytes", "flops", "limit_seconds"):
        whole = sum(getattr(phase, key) for phase in report.phases)
        assert sum(getattr(bucket, key) for bucket in report.buckets) == pytest.approx(whole)
    assert sum(step["seconds"] for step in report.trace["steps"]) == pytest.approx(
        sum(phase.seconds for phase in report.phases)
    )
    stats = report.stats
    assert sum(phase.num_tokens for phase in report.phases) == stats.num_computed_tokens
    computed = sum(map(len, PROMPTS)) + len(PROMPTS) * (PARAMS.max_tokens - 1)
    assert stats.num_computed_tokens == computed - stats.prefix_hit_tokens
    rows = stats.num_padding_tokens + stats.num_computed_tokens
    padded = sum(bucket.padding_share * int(bucket.name.split("_")[1]) * bucket.num_steps for bucket in report.buckets)
    assert padded == pytest.approx(stats.num_padding_tokens)
    assert padded < rows
    counts = {name: summary["count"] for name, summary in report.latencies.items() if summary}
    assert counts == {"ttft": 6, "tpot": 6, "e2e": 6, "queue": 6, "itl": 6 * 8}
    assert report.num_finished == 6
    assert report.device_shares is None, "nothing was profiled"


def test_padding_beside_drafts_is_what_the_worker_counts() -> None:
    """On a CPU: 15 tokens are computed as 16."""
    with CompiledEngine(
        enforce_eager=True, dtype="float32", bucket_sizes=(1, 4), token_bucket_sizes=(64,), max_model_len=128,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}, progress="off",
    ) as engine:  # fmt: skip
        engine.generate([[7, 8, 9] * count for count in (7, 8, 9)], PARAMS, use_tqdm=False)
        padding = sum(row.total_padding for row in engine._core.log.rows())
        assert padding == engine.stats().num_padding_tokens > 0
        assert engine.report().time["padding"] > 0.0


def test_shares_are_of_the_limits(engine: CompiledEngine) -> None:
    engine.reset_report()
    serve(engine)
    for steps in engine.report().buckets:
        assert steps.limit_seconds is not None
        assert steps.bandwidth_share == pytest.approx(steps.bytes_per_second / 1e12)
        assert steps.peak_share == pytest.approx(steps.flops_per_second / 1e13)
        longest = max(steps.bytes / 1e12, steps.flops / 1e13)
        assert longest <= steps.limit_seconds * (1 + 1e-9)
        assert steps.limit_seconds <= steps.bytes / 1e12 + steps.flops / 1e13


def test_seconds_at_the_limits_can_be_asked_for_again_and_again(engine: CompiledEngine) -> None:
    asked = LimitSeconds(engine._work, LIMITS)
    engine.reset_report()
    assert asked.total(engine._core.log) == (0, 0)
    for _ in range(2):  # the second time finds the shapes of the first one
        serve(engine)
        phases = engine.report().phases
        expected = sum(phase.limit_seconds or 0 for phase in phases), sum(phase.seconds for phase in phases)
        assert asked.total(engine._core.log) == pytest.approx(expected)
        assert asked.total(engine._core.log) == pytest.approx(expected)


def test_it_covers_what_came_since_the_reset(engine: CompiledEngine) -> None:
    serve(engine)
    engine.reset_report()
    empty = engine.report()
    assert (empty.seconds, empty.num_finished, empty.phases, empty.trace["steps"]) == (0, 0, (), [])
    assert empty.stats.num_steps == empty.stats.num_output_tokens == 0
    empty.page()
    serve(engine)
    first = engine.report()
    time.sleep(0.2)  # after the last step: no part of the run
    assert engine.report().seconds == first.seconds
    engine.reset_report()
    serve(engine)
    assert engine.report().stats.num_output_tokens == first.stats.num_output_tokens == 6 * 9


def test_a_reset_in_the_middle_of_a_run(engine: CompiledEngine) -> None:
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    engine.reset_report()
    assert len(list(stream)) == 8
    report = engine.report()
    assert sum(report.time.values()) == pytest.approx(report.seconds)
    assert report.stats.num_output_tokens == 8
    assert report.latencies["itl"] is not None
    assert report.latencies["itl"]["count"] == 7, "the gap that the reset fell into is in no report"


def plausible(report: RunReport) -> None:
    """No share below 0, no part above the whole, and JSON that every reader takes."""
    assert sum(report.time.values()) == pytest.approx(report.seconds)
    assert min(*report.time.values(), *report.host_parts.values()) >= 0
    for steps in (*report.phases, *report.buckets):
        assert 0 <= steps.padding_share < 1
        assert 0 <= steps.seconds <= report.seconds
    json.dumps(report.to_dict(), allow_nan=False)
    report.page()


def test_reports_in_the_middle_of_a_run_with_overlap_and_after_close() -> None:
    sizes = {"bucket_sizes": (1, 4), "token_bucket_sizes": (64,), "max_model_len": 128}
    with CompiledEngine(enforce_eager=True, dtype="float32", async_scheduling=True, **sizes) as engine:
        plausible(engine.report())
        stream = engine.stream(PROMPTS[0], PARAMS)
        for _ in range(3):
            next(stream)
            plausible(engine.report())
            engine.reset_report()  # the next step is launched already, so some of its time lies before
        assert engine._core.launched
        next(stream)
        report = engine.report()
        plausible(report)
        assert report.stats.num_steps == 1
        stream.close()  # aborts its request, whose step is in flight
        engine.reset_report()
        plausible(engine.report())
        serve(engine)
        before = engine.report()
        plausible(before)
    after = engine.report()
    plausible(after)
    assert (after.seconds, after.compile_report) == (before.seconds, before.compile_report)
    assert after.compile_report.reports


def test_a_run_of_errors_and_aborts_alone(monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine) -> None:
    engine.reset_report()
    with pytest.warns(RequestsFailedWarning, match="prompt_token_ids must be"):
        assert engine.generate([[10**9]], use_tqdm=False)[0].outputs[0].finish_reason == "error"
    engine.add_request("aborted", PROMPTS[0])
    engine.abort("aborted")
    plausible(engine.report())

    def broken(output: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(engine.runner, "launch", broken)
    with pytest.warns(RequestsFailedWarning, match="no device"):
        outputs = engine.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].finish_reason == "error"
    report = engine.report()
    plausible(report)
    assert report.seconds > 0
    assert (report.phases, set(report.latencies.values())) == ((), {None})


def test_time_without_requests_is_waiting(engine: CompiledEngine) -> None:
    engine.reset_report()
    serve(engine)
    time.sleep(0.3)
    serve(engine)
    report = engine.report()
    assert 0.3 <= report.time["waiting"] <= report.seconds


def test_the_trace_is_what_tune_buckets_reads(engine: CompiledEngine) -> None:
    engine.reset_report()
    serve(engine)
    trace = json.loads(json.dumps(engine.trace()))
    assert trace["format"] == 1
    assert trace["buckets"] == {"decode": [1, 4], "tokens": [64]}
    assert (trace["max_num_seqs"], trace["max_num_batched_tokens"]) == (4, 64)
    assert trace["compile_seconds"] == {}, "on a CPU another bucket takes no compiling"
    assert set(trace["step_seconds"]) <= {"decode_1", "decode_4", "tokens_64"}
    assert sum(step["count"] for step in trace["steps"]) == engine.report().stats.num_steps
    for step in trace["steps"]:
        assert set(step) == {"kind", "num_requests", "num_tokens", "count", "seconds"}
        assert step["kind"] in ("decode", "tokens")
        assert step["num_tokens"] <= (4 if step["kind"] == "decode" else 64)


def test_limits_are_measured_only_where_they_may_be(monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine) -> None:
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: None)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype: LIMITS)
    serve(engine)
    report = engine.report(measure_limits=False)
    assert report.limits is None
    assert {phase.limit_share for phase in report.phases} == {None}
    assert "were not measured" in report.page()
    assert engine.report().limits == LIMITS


SLOW = dataclasses.replace(LIMITS, read_bytes_per_second=1e3, flops_per_second=1e3)  # as of a busy machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[MachineLimits]:
    """What measuring again will find, and before that the limits that are kept: the last one each time."""
    found = [LIMITS, SLOW]

    def measured(device: object, dtype: object, *, remeasure: bool = False) -> MachineLimits:
        assert remeasure
        found.pop()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        found[-1] = dataclasses.replace(found[-1], measured_at=now)
        return found[-1]

    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: found[-1])
    monkeypatch.setattr(machine_limits, "measured", measured)
    return found


def test_limits_that_a_run_surpasses_are_measured_again(engine: CompiledEngine, machine: list[MachineLimits]) -> None:
    engine.reset_report()
    serve(engine)
    report = engine.report()
    assert report.limits is not None
    assert report.limits.flops_per_second == LIMITS.flops_per_second
    assert all(step.limit_share is not None and step.limit_share < 1.1 for step in (*report.phases, *report.buckets))
    said = rf"measured again, because with those of {re.escape(SLOW.measured_at)} \w+ came to \d+% of the limit$"
    assert re.match(said, report.limits_note)
    assert report.limits_note in report.page()
    assert report.limits.measured_at in report.page()
    assert report.to_dict()["limits_note"] == report.limits_note
    assert engine.report().limits_note == "", "nothing is wrong with these"


def test_limits_are_measured_again_but_once_for_a_run(engine: CompiledEngine, machine: list[MachineLimits]) -> None:
    machine[0] = SLOW
    engine.reset_report()
    serve(engine)
    assert "With these, " in engine.report().limits_note
    note = engine.report().limits_note  # does not measure a third time, which the list would not have
    assert "of the limit: these limits are too low, or a cache of the processor holds" in note


def test_limits_are_not_measured_again_where_they_may_not_or_cannot_be(
    monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine, machine: list[MachineLimits]
) -> None:
    def no_memory(device: object, dtype: object, *, remeasure: bool = False) -> MachineLimits:
        raise RuntimeError("no memory is free")

    engine.reset_report()
    serve(engine)
    report = engine.report(measure_limits=False)
    assert (report.limits, "these limits are too low" in report.limits_note) == (SLOW, True)
    monkeypatch.setattr(machine_limits, "measured", no_memory)
    report = engine.report()
    assert (report.limits, report.limits_note.endswith("too low, and no memory is free")) == (SLOW, True)


def test_a_step_that_the_log_saw_in_part_says_nothing_of_the_limits(
    engine: CompiledEngine, machine: list[MachineLimits]
) -> None:
    engine.reset_report()
    serve(engine)
    engine._core.log.is_cut = True
    report = engine.report()
    assert (report.limits, report.limits_note) == (SLOW, "")


@pytest.mark.parametrize("doubt", ["", "the machine is busy"])
def test_the_page_says_how_much_when_and_how_steady(
    monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine, doubt: str
) -> None:
    limits = dataclasses.replace(LIMITS, flops_per_second=4.2e9, read_spread=0.034, doubt=doubt)
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: limits)
    engine.reset_report()
    text = engine.report().page()
    assert "0.00420 TFLOP/s in float32" in text
    assert LIMITS.measured_at in text
    assert ("NOT STEADY (the machine is busy)" if doubt else "steady: tries within 3% and 0%") in text


class Tags(html.parser.HTMLParser):
    """Every tag that was opened and not closed, and every address that the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_files(engine: CompiledEngine, tmp_path: Path) -> None:
    engine.reset_report(profile_steps=1)
    serve(engine)
    report = engine.report()
    report.write(tmp_path / "new" / "directory")
    folder = tmp_path / "new" / "directory"
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json", "trace.json"}
    content = json.loads((folder / "report.json").read_text())
    assert content == json.loads(json.dumps(report.to_dict()))
    assert content["limits"]["read_bytes_per_second"] == 1e12
    assert content["phases"][0]["limit_share"] == report.phases[0].limit_share
    assert len(content["series"]["used_blocks"]) == len(report.series)
    assert json.loads((folder / "trace.json").read_text()) == json.loads(json.dumps(report.trace))
    text = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert len(tags.addresses) == 4
    assert all(address.startswith("data:image/png;base64,") for address in tags.addresses), "one file, no network"
    for word in ("attention", "TTFT", "decode_4", "tokens_64", "made up", "padding"):
        assert word in text


def test_without_matplotlib_the_page_has_tables_and_says_so(
    monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine
) -> None:
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "compiled_llm.report.pictures", raising=False)
    monkeypatch.delattr("compiled_llm.report.pictures", raising=False)
    serve(engine)
    text = engine.report().page()
    assert "matplotlib is not installed" in text
    assert "<img" not in text
    assert len(re.findall("<table>", text)) >= 5


def test_a_models_name_is_text(monkeypatch: pytest.MonkeyPatch, engine: CompiledEngine) -> None:
    monkeypatch.setattr("compiled_llm.report.pictures.draw", lambda report: {})
    report = dataclasses.replace(engine.report(), model="<b>&")
    assert "&lt;b&gt;&amp;" in report.page()
    assert "<b>" not in report.page()


def test_profile_steps_must_be_a_number_of_steps(engine: CompiledEngine) -> None:
    with pytest.raises(ValueError, match="profile_steps"):
        engine.reset_report(profile_steps=-1)
