"""serve_offline: rows written as they finish, resumed after a cut, exit statuses, messages for bad arguments."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from compiled_llm import machine_limits
from compiled_llm.machine_limits import MachineLimits

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_offline.py"
FAST = ["--enforce-eager", "--bucket-sizes", "1,4", "--max-tokens", "6", "--temperature", "0"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("serve_offline", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["serve_offline.py", *arguments])
    try:
        return module.main()
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)


def rows(path: Path) -> dict[int, dict]:
    parsed = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert len({row["index"] for row in parsed}) == len(parsed), "a row stands twice"
    return {row["index"]: row for row in parsed}


def test_bundled_prompts_and_the_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *FAST) == 0
    out = capsys.readouterr().out
    for word in (
        "requests",
        "TTFT",
        "TPOT",
        "p99",
        "of the limit",
        "KV use",
        "preemptions",
        "graph breaks",
        "recompiles",
        "peak memory",
    ):
        assert word in out
    assert "def " in out


def test_the_summary_says_what_the_kv_cache_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo model: 4 layers of 2 KV heads of 64. 17 blocks of 16 tokens and the sink."""
    pool = ["--dtype", "bfloat16", "--num-kv-blocks", "17", "--max-model-len", "256", "--quiet"]
    summaries = {
        (): "bfloat16, 2048 bytes a token; a pool of 0.6 MiB",
        ("--kv-cache-dtype", "int8"): "int8, 1088 bytes a token, 53.1% of bfloat16's 2048; a pool of 0.3 MiB",
        ("--kv-cache-dtype", "fp8", "--kv-cache-skip-layers", "0,3"): (
            "fp8 (bfloat16 in layers 0,3), 1568 bytes a token, 76.6% of bfloat16's 2048; a pool of 0.4 MiB"
        ),
    }
    for arguments, summary in summaries.items():
        assert run(monkeypatch, *FAST, *pool, *arguments) == 0
        assert summary in capsys.readouterr().out


LIMITS = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")


def test_a_report_and_a_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: LIMITS)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: LIMITS)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    report, trace = tmp_path / "report", tmp_path / "trace.json"
    assert run(monkeypatch, *FAST, "--quiet", "--report", str(report), "--trace", str(trace)) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.split("\n") if "of the limit" in line]
    assert "decode" in line
    assert "prefill" in line
    assert "10.0 GB/s" in line
    content = json.loads((report / "report.json").read_text())
    assert content["stats"]["num_finished"] == content["num_finished"] == 32
    assert content["device_shares"]["linears"] > 0, "--report profiles some steps"
    assert content["trace"] == json.loads(trace.read_text()) == json.loads((report / "trace.json").read_text())
    assert (report / "report.html").stat().st_size > 10_000


def test_limits_are_measured_anew_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: None)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: asked.append(remeasure))
    assert run(monkeypatch, *FAST, "--quiet", "--remeasure-limits") == 0
    assert asked == [True]
    assert run(monkeypatch, *FAST, "--quiet") == 0
    assert asked == [True]
    assert "not measured on this machine yet" in capsys.readouterr().out


def test_rows_survive_a_cut_and_resume_serves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [5, 6, n + 7]}) for n in range(9)))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(whole)) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(cut)) == 2, "an existing file is no target"
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(cut), "--resume") == 0
    assert rows(cut) == rows(whole)
    assert len(rows(cut)) == 9


def test_bad_rows_are_named_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    good, bad = {"prompt": "import os"}, [{"prompt": ""}, {"text": "x"}, {"prompt_token_ids": [10**6]}]
    prompts.write_text("\n".join([json.dumps(good), *map(json.dumps, bad), "{", json.dumps(good)]))
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(output)) == 1
    err = capsys.readouterr().err
    for number in (1, 2, 3, 4):
        assert f"row {number} failed" in err
    assert sorted(rows(output)) == [0, 5]


def test_a_row_may_hold_any_line_separator_but_a_newline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(output)) == 0
    assert rows(output)[0]["prompt"] == "a\u2028b\x85c"


def test_a_file_that_is_not_ours_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    precious = tmp_path / "precious.jsonl"
    precious.write_text('{"mine": 1}\nunfinished')
    assert run(monkeypatch, *FAST, "--output", str(precious), "--resume") == 2
    assert precious.read_text() == '{"mine": 1}\nunfinished'


def test_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("import os\n\ndef f(x):\n")
    assert run(monkeypatch, *FAST, "--input", str(prompts), "--output", str(output)) == 0
    assert [rows(output)[n]["prompt"] for n in (0, 1)] == ["import os", "def f(x):"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bucket-sizes", "0,8"], "bucket_sizes"),
        (["--bucket-sizes=-1"], "bucket_sizes"),
        (["--bucket-sizes", "8,8"], "duplicates"),
        (["--bucket-sizes", "one"], "bucket-sizes"),
        (["--bucket-sizes", ""], "bucket-sizes"),
        (["--no-such-flag"], "no-such-flag"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--n", "0"], "n must be"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype"),
        (["--kv-cache-dtype", "int8", "--kv-cache-skip-layers", "4"], "kv_cache_skip_layers"),
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--input", "prompts.csv"], ".jsonl or .txt"),
        (["--input", "no-such-file.txt"], "no-such-file.txt"),
        (["--resume"], "--output"),
        (["--device", "tpu"], "device"),
        (["--output", "/no/such/directory/out.jsonl"], "/no/such/directory"),
        (["--trace", "/no/such/directory/trace.json"], "/no/such/directory"),
        (["--report", __file__], "is a file"),
        (["--report-profile-steps", "2"], "needs --report"),
        (["--report", "report", "--report-profile-steps=-1"], "0 to 1000"),
    ],
)
def test_bad_arguments_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert words in capsys.readouterr().err


def test_rows_may_bring_a_salt_and_a_priority_and_nothing_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompt = {"prompt": "import os\n" * 20}
    items = [{**prompt, "priority": 2}, {**prompt, "priority": 1, "cache_salt": "x"}, {**prompt, "colour": "red"}]
    prompts.write_text("\n".join(map(json.dumps, items)))
    arguments = [*FAST, "--bucket-sizes", "1", "--input", str(prompts), "--output", str(output)]
    assert run(monkeypatch, *arguments, "--scheduling-policy", "priority") == 1
    captured = capsys.readouterr()
    assert "row 2 failed: a row has an unknown key: colour" in captured.err
    assert "prefix cache 0 of" in captured.out, "another salt finds nothing"
    assert list(rows(output)) == [1, 0], "the more urgent one first"
    assert rows(output)[0]["token_ids"] != []
