"""bench_phases: what each part measures and derives, on a tiny model; pictures, JSON, arguments."""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm.report.machine_limits import MachineLimits

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
PARTS = ["phases", "steps", "batch", "batching", "intensity", "memory"]
TINY = [
    *("--shape", "tiny", "--device", "cpu", "--enforce-eager", "--bucket-sizes", "1,2,4", "--token-bucket-sizes", "32"),
    *(
        "--prompt-lens",
        "8,40",
        "--batch-sizes",
        "1,3",
        "--prompt-len",
        "24",
        "--output-len",
        "8",
        "--decode-steps",
        "3",
    ),
    *("--num-requests", "4", "--seats", "2", "--kv-memory", "0.125", "--request-lens", "100,1000", "--repeats", "2"),
]
LIMITS = MachineLimits("cpu", "bfloat16", 1e10, 1e12, "made up", "2026-01-01T00:00:00+00:00")
KV_BYTES = 2 * 2 * 8 * 128 * 2  # keys and values, layers, KV heads, head_dim, bytes

Row = dict[str, Any]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        module = importlib.import_module("bench_phases")
        patch.setattr(module.machine_limits, "measured", lambda device, dtype, remeasure: LIMITS)
        yield module


@pytest.fixture(scope="module")
def results(script: ModuleType) -> Row:
    """Every part's result."""
    args = script.make_parser().parse_args(TINY)
    with script.workloads.model_of(args) as engine_arguments:
        study = script.start(args, engine_arguments)
        for part in PARTS:
            study.results[part] = script.PARTS[part](study)
    return study.results


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_phases.py", *TINY, *arguments])
    try:
        return script.main()
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)


def test_phases_splits_a_request_into_prefill_and_decode(results: Row) -> None:
    rows = results["phases"]["rows"]
    assert [(row["prompt_len"], row["side"]) for row in rows] == [
        (length, side) for length in (8, 40) for side in ("engine", "transformers")
    ]
    for row in rows:
        decode_ms = 7 * row["token_ms"]  # the first of 8 tokens comes with the prefill
        assert row["prefill_share"] == pytest.approx(row["ttft_ms"] / (row["ttft_ms"] + decode_ms))
        assert row["prefill_tokens_per_s"] == pytest.approx(row["prompt_len"] / row["ttft_ms"] * 1e3)
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        assert ours["ttft_ratio"] == theirs["ttft_ms"] / ours["ttft_ms"]
        assert theirs["token_ratio"] == 1


def test_steps_has_a_time_for_every_token_after_the_first(script: ModuleType, results: Row) -> None:
    for row in results["steps"]["rows"]:
        series = results["steps"]["series"][row["side"]]
        assert len(series["ms"]) == 7
        assert len(series["first_ever_ms"]) == script.WARM_UP_LEN - 1
        assert min(series["ms"]) > 0
        assert (row["first_ms"], row["max_ms"]) == (series["ms"][0], max(series["ms"]))
        assert row["first_ever_ms"] == series["first_ever_ms"][0]


def test_a_time_that_grows_with_the_context_is_seen(script: ModuleType) -> None:
    """Both sides stand still but for a step of 10 ms and 20 us more with each token."""
    ends = [1 + 0.01 * n + 20e-6 * n * (n - 1) / 2 for n in range(12)]
    served = script.Served([0.0], [ends], 12)
    study = argparse.Namespace(
        args=argparse.Namespace(prompt_len=24, output_len=12),
        warm_up={"engine": served},
        requests=lambda *sizes: sizes,
        in_turns=lambda requests: {"engine": [served]},
    )
    [row] = script.steps(study)["rows"]
    assert row["us_per_context_token"] == pytest.approx(20)
    assert row["first_ms"] == pytest.approx(10)


def test_batch_counts_all_requests_tokens(results: Row) -> None:
    rows = results["batch"]["rows"]
    assert [(row["batch"], row["side"]) for row in rows] == [
        (size, side) for size in (1, 3) for side in ("engine", "transformers")
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["token_ms"])
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["tokens_per_s_each"])


def test_batching_takes_the_same_requests_three_ways(script: ModuleType, results: Row) -> None:
    result = results["batching"]
    requests = script.workloads.mixed(1000, 0, num_requests=4)
    first, second, third, fourth = (request.output_len for request in requests)
    wanted, longest = first + second + third + fourth, max(first, second) + max(third, fourth)
    by_way = {row["way"]: row for row in result["rows"]}
    static, continuous = by_way["engine, static"], by_way["engine, continuous"]
    assert by_way["transformers, static"]["row_steps"] == 2 * longest
    # A prompt in chunks takes the engine steps of its own.
    assert static["row_steps"] > 2 * longest
    assert wanted < continuous["row_steps"] < static["row_steps"]
    for way, row in by_way.items():
        assert row["useful_rows"] == pytest.approx(wanted / row["row_steps"])
        assert row["tokens_per_s"] == pytest.approx(wanted / row["seconds"])
        spans = result["timelines_s"][way]
        assert all(s["start"] < s["first"] < s["wanted"] <= s["end"] for s in spans)
        # Two seats: the third request gets one at the end of the first batch, or of a request.
        earlier = [span["end"] for span in spans[:2]]
        free = min(earlier) if way == "engine, continuous" else max(earlier)
        assert spans[2]["start"] >= free
    assert all(span["wanted"] == span["end"] for span in result["timelines_s"]["engine, continuous"])


def test_intensity_counts_by_hand(results: Row) -> None:
    """The tiny shape: D=128, 8 heads and KV heads of 128, intermediate 256, 2 layers, vocabulary 1000."""
    result = results["intensity"]
    assert result["ridge_flop_per_byte"] == 100
    linears = 2 * (128 * 3 * 1024 + 1024 * 128 + 3 * 128 * 256)  # qkv, o; gate, up, down
    rows = {(row["phase"], row["size"], row["side"]): row for row in result["rows"]}
    context = 24 + 3 // 2
    for (phase, size, _), row in rows.items():
        tokens, keys, pairs, sampled = size, size * (context + 1), size * (context + 1), size
        if phase == "prefill":
            keys, pairs, sampled = size, size * (size + 1) // 2, 1
        flops = 2 * (tokens * linears + sampled * 1000 * 128) + pairs * 2 * 4 * 8 * 128
        assert row["gflop"] == pytest.approx(flops / 1e9)
        norms = 2 * (2 * 128 + 2 * 128) + 128  # two of the layer, those of queries and keys; the last one
        size_bytes = 2 * (linears + norms + 1000 * 128 + tokens * 128) + (keys + tokens) * KV_BYTES
        assert row["mb"] == pytest.approx(size_bytes / 1e6)
        assert row["of_limit"] == pytest.approx(max(size_bytes / 1e10, flops / 1e12) / row["ms"] * 1e3)
        assert row["gflop_per_s"] / row["gb_per_s"] == pytest.approx(row["flop_per_byte"])
    assert rows["prefill", 40, "engine"]["ms"] == results["phases"]["rows"][2]["ttft_ms"]
    assert rows["decode", 3, "transformers"]["ms"] == results["batch"]["rows"][3]["token_ms"]


def test_memory_is_what_an_engine_admits_and_transformers_holds(results: Row) -> None:
    result = results["memory"]
    rows = {row["kv_cache"]: row for row in result["rows"]}
    assert rows["bfloat16"]["bytes_per_token"] == rows["transformers"]["bytes_per_token"] == KV_BYTES
    assert rows["int8"]["bytes_per_token"] == rows["fp8"]["bytes_per_token"] == 2 * 2 * 8 * (128 + 4)
    assert rows["bfloat16"]["fit_100"] == 2**27 // (112 * KV_BYTES), "whole blocks of 16"
    assert rows["transformers"]["fit_100"] == 2**27 // (100 * KV_BYTES)
    assert [check["computed"] for check in result["checks"]] == [4, 7]
    for check in result["checks"]:
        assert check["peak_running"] == check["computed"]
        assert check["num_finished"] == check["computed"] + 2
        assert check["num_preemptions"] == 0


def test_a_run_writes_tables_pictures_and_json(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "study"
    assert run(script, monkeypatch, "--part", "steps", "intensity", "--repeats", "1", "--output", str(directory)) == 0
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads((directory / "phases.json").read_text())
    assert record["model"] == "tiny"
    assert "limits: 10.0 GB/s, 1.00 TFLOP/s in bfloat16 (made up)" in out
    assert "torch" in record["machine"]
    assert list(record["parts"]) == ["phases", "steps", "batch", "intensity"], "what intensity needs ran too"
    for part in record["parts"]:
        assert f"\n{part}\n" in out
        assert (directory / f"{part}.png").read_bytes().startswith(b"\x89PNG")


def test_every_part_has_a_picture(script: ModuleType, results: Row, tmp_path: Path) -> None:
    assert list(script.PARTS) == PARTS
    record = {"model": "somewhere/tiny", "dtype": "bfloat16", "parts": results}
    for part in PARTS:
        script.bench_phases_plots.draw(part, record, tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(PARTS)


def test_no_text_of_the_roofline_is_printed_over_another_or_over_the_limit(script: ModuleType) -> None:
    record = json.loads((SCRIPTS.parents[1] / "docs" / "results" / "cpu" / "study-amx.json").read_text())
    figure = script.bench_phases_plots.figure_of("intensity", record["parts"]["intensity"], "a model")
    figure.canvas.draw()
    (axes,) = figure.axes
    texts = [text for text in axes.texts if text.get_text()]
    assert {"1", "32", "2048"} <= {text.get_text() for text in texts}
    boxes = [text.get_window_extent() for text in texts]
    for one, other in itertools.combinations(range(len(texts)), 2):
        assert not boxes[one].overlaps(boxes[other]), (texts[one], texts[other])
    limit = axes.transData.transform_path(axes.lines[0].get_path())
    for text, box in zip(texts, boxes, strict=True):
        assert not limit.intersects_bbox(box, filled=False), text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-sizes", "1,8"], "--batch-sizes must be at most 4"),
        (["--seats", "5"], "--seats must be at most 4"),
        (["--seats", "0"], "--seats must be at least 1"),
        (["--decode-steps", "1"], "--decode-steps must be at least 2"),
        (["--prompt-lens", "0,8"], "--prompt-lens must be at least 1"),
        (["--prompt-lens", "8,60000"], "40960"),
        (["--kv-memory", "0"], "--kv-memory"),
        (["--part", "nothing"], "nothing"),
        (["--device", "tpu"], "device"),
        (["--bucket-sizes", "4,4"], "duplicates"),
    ],
)
def test_bad_arguments_exit_with_2(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert run(script, monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


def test_pictures_need_matplotlib(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert run(script, monkeypatch, "--output", str(tmp_path / "study")) == 2
    assert "compiled-llm[plot]" in capsys.readouterr().err


def test_lengths_are_those_that_the_model_allows(script: ModuleType) -> None:
    args = script.make_parser().parse_args(["--part", "phases"])
    config = argparse.Namespace(max_position_embeddings=300)
    script.check(args, config)
    assert args.prompt_lens == (32, 128)
    assert args.request_lens == (256,)
