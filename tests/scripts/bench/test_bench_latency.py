"""bench_latency: vLLM's keys from a run of a tiny model, and what is refused."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
TINY = ["--shape", "tiny", "--enforce-eager", "--bucket-sizes", "1,4"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("bench_latency")

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_latency.py", *arguments])
        try:
            return module.main()
        except SystemExit as bad_arguments:
            return int(bad_arguments.code or 0)

    return main


def test_keys_of_vllm_and_ours(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    words = [
        "--batch-size",
        "3",
        "--input-len",
        "9",
        "--output-len",
        "4",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    ]
    assert run(*TINY, *words, "--output-json", str(path)) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    result = json.loads(line)
    assert path.read_text() == line + "\n"
    assert len(result["latencies"]) == len(result["ttfts"]) == len(result["tpots"]) == 2
    low, high = sorted(result["latencies"])
    assert result["avg_latency"] == pytest.approx((low + high) / 2)
    assert result["std_latency"] == pytest.approx((high - low) / 2)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["90"] == pytest.approx(low + 0.9 * (high - low))
    for latency, ttft, tpot in zip(result["latencies"], result["ttfts"], result["tpots"], strict=True):
        assert 0 < ttft + 3 * tpot <= latency
    assert result["steps"]["num_steps"] == 2 * 4
    assert result["steps"]["prefix_hit_tokens"] == 0
    assert result["engine"]["enforce_eager"]
    assert result["engine"]["dtype"] == "bfloat16"
    assert "--batch-size 3" in result["machine"]["command"]


def test_one_token_has_no_time_between_tokens(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "1", "--output-len", "1", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert run(*TINY, *words) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["tpots"] == [None]
    assert result["median_tpot_ms"] is None


def test_prefix_caching_is_used_where_it_is_asked_for(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--batch-size",
        "1",
        "--input-len",
        "40",
        "--output-len",
        "1",
        "--num-iters",
        "2",
        "--enable-prefix-caching",
    ]
    assert run(*TINY, *words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]["prefix_hit_tokens"] == 2 * 32


def test_the_report_covers_what_counts(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: limits)
    words = ["--batch-size", "2", "--input-len", "9", "--output-len", "3", "--num-iters", "2"]
    assert run(*TINY, *words, "--report", str(tmp_path / "report")) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert sum(phase["num_tokens"] for phase in report["phases"]) == 2 * 2 * (9 + 2), "no warm-up"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", __file__], "is a file: give a directory"),
        (["--top-p", "2"], "top_p"),
        (["--n", "2"], "--n must be 1, given 2"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--num-iters", "0"], "--num-iters"),
        (["--num-iters-warmup", "-1"], "--num-iters-warmup"),
        (["--output-json", "/no/such/directory/out.json"], "/no/such/directory"),
        (["--shape", "tiny", "--input-len", "2000", "--max-model-len", "1024"], "must fit in 1024 tokens"),
        (["--shape", "tiny", "--load-format", "safetensors"], "--load-format"),
        (["--shape", "tiny", "--model", "DIR"], "not allowed with"),
        (["--shape", "tiny", "--bucket-sizes", "8,8"], "duplicates"),
        (["--model", "/no/such/directory"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run("--enforce-eager", *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_transformers_generates_the_same_requests(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch-size", "2", "--input-len", "9", "--output-len", "4", "--num-iters", "2", "--backend", "hf"]
    assert run("--shape", "tiny", *words) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["backend"], result["engine"]["dtype"]) == ("hf", "bfloat16")
    for latency, ttft, tpot in zip(result["latencies"], result["ttfts"], result["tpots"], strict=True):
        assert ttft + 3 * tpot == pytest.approx(latency)
    assert run("--shape", "tiny", "--backend", "hf", "--bucket-sizes", "1") == 2
    assert "--bucket-sizes has no meaning" in capsys.readouterr().err
