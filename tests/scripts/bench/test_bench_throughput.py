"""bench_throughput: vLLM's keys from both backends, the requests that the flags mean, and what is refused."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
EAGER = ["--enforce-eager", "--bucket-sizes", "1,4"]
TINY = ["--shape", "tiny", *EAGER]
RANDOM = ["--random-input-len", "20", "--random-output-len", "4", "--random-range-ratio", "0.5", "--num-prompts", "5"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_throughput")


@pytest.fixture
def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *arguments])
        try:
            return bench.main()
        except SystemExit as bad_arguments:
            return int(bad_arguments.code or 0)

    return main


@pytest.fixture
def requests(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Requests that the flags mean for the tiny shape, or for the demo model."""

    def parse(*arguments: str, model: tuple[str, ...] = ("--shape", "tiny")) -> Any:
        arguments_module = importlib.import_module("bench_arguments")
        monkeypatch.setattr(sys, "argv", ["bench_throughput.py", *model, *arguments])
        args: argparse.Namespace = bench.parse_arguments()
        with arguments_module.described_model(args) as described:
            return arguments_module.requests_of(args, described)

    return parse


def lengths(requests: Any) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.output_len) for request in requests]


def test_keys_of_vllm_and_ours(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    assert run(*TINY, *RANDOM, "--repeats", "3", "--output-json", str(path)) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert path.read_text() == line + "\n"
    result = json.loads(line)
    assert result["num_requests"] == 5
    assert result["elapsed_time"] == sorted(result["elapsed_times"])[1]
    assert result["total_num_tokens"] == result["total_prompt_tokens"] + result["total_output_tokens"]
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(result["total_output_tokens"] / result["elapsed_time"])
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"] < result["elapsed_times"][-1] * 1e3
    assert (result["engine"]["graph_breaks"], result["engine"]["recompiles"]) == (0, 0)
    assert result["engine"]["bucket_sizes"] == [1, 4]


def test_a_workload_is_computed_again_in_each_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """W3: 512 tokens that 16 requests share. Those of the last run were not found in what an earlier one left."""
    assert run(*TINY, "--workload", "W3", "--repeats", "2", "--token-bucket-sizes", "512") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["num_requests"], result["workload"]) == (16, "W3")
    assert result["steps"]["prefix_hit_tokens"] == 15 * 512


def test_transformers_takes_the_same_requests(
    bench: ModuleType, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[tuple[int, int]]] = []
    run_batch = bench.bench_hf.generate
    monkeypatch.setattr(
        bench.bench_hf, "generate", lambda model, batch: (batches.append(lengths(batch)), run_batch(model, batch))
    )
    words = ["--shape", "tiny", *RANDOM, "--repeats", "1", "--backend", "hf", "--hf-max-batch-size", "3"]
    assert run(*words) == 0
    theirs = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [len(batch) for batch in batches] == [1, 3, 2], "one to warm up, then five, three at a time"
    assert sum(i + o for batch in batches[1:] for i, o in batch) == theirs["total_num_tokens"]
    assert theirs["tokens_per_second"] == pytest.approx(theirs["total_num_tokens"] / theirs["elapsed_time"])
    assert theirs["engine"]["dtype"] == "bfloat16"


def test_transformers_continues_a_padded_prompt_as_if_alone(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask and the padding are right: the demo model's greedy tokens are those of each prompt by itself."""
    hf = bench.bench_hf.load(DEMO_MODEL, "float32", bench.resolve_device("cpu"), 0, random_weights=False)
    outputs = []
    generate = hf.generate
    monkeypatch.setattr(hf, "generate", lambda *a, **k: outputs.append(generate(*a, **k)) or outputs[-1])
    request = importlib.import_module("workloads").WorkloadRequest
    batch = [request(list(range(50, 57)), 6), request(list(range(90, 110)), 6)]
    bench.bench_hf.run(hf, batch, 2)
    bench.bench_hf.run(hf, batch, 1)
    assert outputs[0][:, -6:].tolist() == [alone[0, -6:].tolist() for alone in outputs[1:]]


def test_random_requests(requests: Any) -> None:
    some = requests("--num-prompts", "50", "--input-len", "20", "--output-len", "4", "--random-range-ratio", "0.5")
    assert len(some) == 50
    assert {i for i, _ in lengths(some)} <= set(range(10, 31))
    assert {o for _, o in lengths(some)} <= set(range(2, 7))
    assert len(set(lengths(some))) > 10
    exact = requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "1")
    assert lengths(exact) == [(12, 128)] * 3
    assert len({tuple(request.prompt_token_ids[:7]) for request in exact}) == 1
    assert len({tuple(request.prompt_token_ids[7:]) for request in exact}) == 3
    assert exact == requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "1")
    assert exact != requests("--num-prompts", "3", "--random-input-len", "5", "--random-prefix-len", "7", "--seed", "2")


def test_requests_of_a_file(requests: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [{"prompt_token_ids": [1, 2, 3], "output_len": 4}, {"prompt": "import os", "output_len": 2}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    demo = ("--model", str(DEMO_MODEL))
    first, second = requests("--dataset-path", str(path), model=demo)
    assert first == ([1, 2, 3], 4)
    assert (len(second.prompt_token_ids) > 0, second.output_len) == (True, 2)
    assert requests("--dataset-path", str(path), "--num-prompts", "1", "--output-len", "9", model=demo) == [
        ([1, 2, 3], 9)
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ('{"output_len": 1}', "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1], "prompt": "a", "output_len": 1}', "either 'prompt' or 'prompt_token_ids'"),
        ('{"prompt_token_ids": [1], "output_len": 1, "colour": "red"}', "unknown key: colour"),
        ('{"prompt_token_ids": [1]}', "output_len must be an integer of at least 1, given None"),
        ('{"prompt_token_ids": [1], "output_len": 0}', "given 0"),
        (
            '{"prompt_token_ids": [1000], "output_len": 1}',
            "prompt_token_ids must be integers from 0 to 999, given 1000",
        ),
        ('{"prompt_token_ids": [], "output_len": 1}', "must not be empty"),
        ('{"prompt": "a", "output_len": 1}', "no tokenizer"),
    ],
)
def test_a_bad_row_is_named(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt_token_ids": [1], "output_len": 1}\n' + row)
    assert run(*TINY, "--dataset-path", str(path)) == 2
    err = capsys.readouterr().err
    assert "line 2" in err
    assert words in err


def test_the_report_covers_what_counts(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: limits)
    words = ["--input-len", "9", "--output-len", "3", "--num-prompts", "2", "--repeats", "3"]
    assert run(*TINY, *words, "--report", str(tmp_path / "report")) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert sum(phase["num_tokens"] for phase in report["phases"]) == 2 * (9 + 2), "no warm-up"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", __file__], "is a file: give a directory"),
        (["--workload", "W9"], "W9"),
        (["--workload", "W1", "--num-prompts", "3"], "--num-prompts cannot be given with --workload"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "random", "--dataset-path", "x.jsonl"], "must be custom"),
        (["--dataset-path", "x.jsonl", "--input-len", "3"], "--input-len cannot be given with --dataset-path"),
        (["--dataset-path", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["--input-len", "3", "--random-input-len", "3"], "--random-input-len cannot be given with --input-len"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be at least 0 and below 1"),
        (["--random-prefix-len", "-1"], "--random-prefix-len"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--input-len", "50000"], "must fit in 40960 tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--backend", "vllm"], "vllm"),
        (["--backend", "hf"], "needs --hf-max-batch-size"),
        (["--hf-max-batch-size", "8"], "needs --backend hf"),
        (["--backend", "hf", "--hf-max-batch-size", "8", "--bucket-sizes", "1"], "--bucket-sizes has no meaning"),
        (["--backend", "hf", "--hf-max-batch-size", "8", "--report", "x"], "--report has no meaning"),
        (["--backend", "hf", "--hf-max-batch-size", "8", "--temperature", "1"], "--temperature has no meaning"),
        (["--output-json", "/no/such/directory/out.json"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    eager = [] if "hf" in arguments else EAGER
    assert run("--shape", "tiny", *eager, *arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
