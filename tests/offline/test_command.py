"""The command: rows written as they end, resumed after a cut, exit statuses, messages for bad arguments."""

import dataclasses
import errno
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from compiled_llm import CompiledEngine, EngineConfig, RequestOutput
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.offline.manifest import manifest_path
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits
from tests.families import checkpoint
from tests.offline.runs import rows, run

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_offline.py"
FAST = ["--enforce-eager", "--bucket-sizes", "1,4", "--token-bucket-sizes", "32", "--num-kv-blocks", "300"]
FAST += ["--max-tokens", "6", "--temperature", "0"]


def test_bundled_prompts_and_the_summary(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*FAST, "--details") == 0
    out = capsys.readouterr().out
    for word in (
        "rows",
        "TTFT",
        "TPOT",
        "p99",
        "efficiency",
        "KV use",
        "preemptions",
        "graph breaks",
        "recompiles",
        "peak memory",
    ):
        assert word in out
    assert "def " in out


def test_a_check_prints_one_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fast = ["--enforce-eager", "--bucket-sizes", "4", "--num-kv-blocks", "100", "--check"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"import number{n}\n" for n in range(6)))
    assert run(*fast, "--input", str(prompts)) == 0
    out = capsys.readouterr().out
    assert out.count("agrees") == out.count("import number") == 4
    monkeypatch.setattr("compiled_llm.engine.check._TOLERANCES", {torch.bfloat16: 1e-6})
    assert run(*fast, "--input", str(prompts)) == 1
    assert capsys.readouterr().out.count("DIFFERS") == 4


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
        assert run(*FAST, *pool, *arguments) == 0
        assert summary in capsys.readouterr().out


LIMITS = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")


def test_a_report_and_a_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: LIMITS)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: LIMITS)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    report, trace = tmp_path / "report", tmp_path / "trace.json"
    assert run(*FAST, "--quiet", "--report", str(report), "--trace", str(trace)) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.split("\n") if "efficiency" in line]
    assert "decode" in line
    assert "prefill" in line
    content = json.loads((report / "report.json").read_text())
    assert content["stats"]["num_finished"] == content["num_finished"] == 32
    assert content["device_shares"]["linears"] > 0, "--report profiles some steps"
    assert content["trace"] == json.loads(trace.read_text()) == json.loads((report / "trace.json").read_text())
    assert (report / "report.html").stat().st_size > 10_000


def test_limits_are_measured_again_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: None)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: asked.append(remeasure))
    assert run(*FAST, "--quiet", "--remeasure-limits") == 0
    assert asked == [True]
    assert run(*FAST, "--quiet") == 0
    assert asked == [True]
    assert "efficiency" not in capsys.readouterr().out


def test_rows_survive_a_cut_and_resume_serves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt_token_ids": [5, 6, n + 7]}) for n in range(9)))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(*FAST, "--input", str(prompts), "--output", str(whole)) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    shutil.copy(manifest_path(whole), manifest_path(cut))
    assert run(*FAST, "--input", str(prompts), "--output", str(cut)) == 2, "an existing file is no target"
    assert run(*FAST, "--input", str(prompts), "--output", str(cut), "--resume") == 0
    assert rows(cut) == rows(whole)
    assert len(rows(cut)) == 9


def test_a_resume_that_is_refused_leaves_the_files_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where all rows are errors, which are served again."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": ""}\n{"prompt": ""}\n')
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]
    again = [*arguments, "--resume", "--retry-errors"]
    assert run(*arguments) == 1
    written, manifest = output.read_bytes(), manifest_path(output).read_bytes()
    capsys.readouterr()
    assert run(*again, "--kv-cache-dtype", "int8") == 2
    assert "--kv-cache-dtype is 'int8' and was 'auto'" in capsys.readouterr().err
    prompts.write_text('{"prompt": "a"}\n')
    assert run(*again) == 2
    assert "--input 'prompts.jsonl' has another content than it had" in capsys.readouterr().err
    assert run(*arguments[:-1], str(tmp_path / "other.jsonl"), "--resume") == 0, "nothing to go on with: a new run"
    manifest_path(output).unlink()
    assert run(*again) == 2
    assert "the manifest" in capsys.readouterr().err
    assert output.read_bytes() == written
    manifest_path(output).write_bytes(manifest)
    prompts.write_text('{"prompt": ""}\n{"prompt": ""}\n')
    output.write_bytes(beyond := written.replace(b'{"index": 1,', b'{"index": 2,'))
    assert run(*again) == 2
    assert "out.jsonl has a line of row 2, and the input has no such row" in capsys.readouterr().err
    assert output.read_bytes() == beyond
    output.write_bytes(written)
    assert run(*again, "--bucket-sizes", "1,2") == 1, "sizes of buckets change no token"
    assert output.read_bytes() == written
    assert manifest_path(output).read_bytes() == manifest, "of the first run"


@pytest.mark.usefixtures("no_start")
def test_a_manifest_of_somebody_else_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    manifest_path(output).write_text("{}")
    assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 2
    assert "move it away, or give another --output" in capsys.readouterr().err
    assert manifest_path(output).read_text() == "{}"
    assert not output.exists()


def test_a_manifest_without_its_output_is_replaced(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]
    for options in ([], ["--resume"]):
        manifest_path(output).write_text('{"format": 0, "inputs": [], "engine": {}, "sampling": {}}')
        output.unlink(missing_ok=True)
        assert run(*arguments, *options) == 0
        assert run(*arguments, "--resume") == 0, "no row is left"


def test_a_run_that_was_killed_before_its_manifest_was_written_goes_on(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    output.write_bytes(b"")
    manifest_path(output).with_name(f"{manifest_path(output).name}.{'0f' * 8}.new").write_text("{")
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]
    assert run(*arguments) == 2, "an existing file is no target"
    assert run(*arguments, "--resume") == 0
    assert len(rows(output)) == 1
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.manifest.json", "prompts.jsonl"]


def test_rows_in_the_order_of_the_input(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    items = [{"prompt": f"n = {n}", "sampling_params": {"max_tokens": 1 + 5 * n % 7}} for n in range(12)]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in items))
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]
    assert run(*arguments) == 0
    assert list(rows(output)) != list(range(12)), "as they end"
    assert run(*arguments, "--resume", "--ordered") == 0, "no row is left"
    whole = output.read_bytes()
    assert list(rows(output)) == list(range(12))
    lines = whole.splitlines(keepends=True)
    for kept in ([], lines[:5], lines[7:3:-1]):
        output.write_bytes(b"".join(kept))
        assert run(*arguments, "--resume", "--ordered") == 0
        assert output.read_bytes() == whole


def test_bad_rows_are_named_and_the_others_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    good, bad = {"prompt": "import os"}, [{"prompt": ""}, {"text": "x"}, {"prompt_token_ids": [10**6]}]
    prompts.write_text("\n".join([json.dumps(good), *map(json.dumps, bad), "{", json.dumps(good)]))
    assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 1
    err = capsys.readouterr().err
    for number in (1, 2, 3, 4):
        assert f"row {number} (prompts.jsonl, line {number + 1}) failed" in err
    assert {index for index, row in rows(output).items() if "error" in row} == {1, 2, 3, 4}
    assert len(rows(output)) == 6
    assert rows(output)[4]["error"]["type"] == "invalid_request_error"


def test_a_row_may_hold_any_line_separator_but_a_newline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 0
    assert rows(output)[0]["prompt"] == "a\u2028b\x85c"


def test_a_file_that_is_not_ours_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    precious = tmp_path / "precious.jsonl"
    precious.write_text('{"mine": 1}\nunfinished')
    assert run(*FAST, "--output", str(precious), "--resume") == 2
    assert precious.read_text() == '{"mine": 1}\nunfinished'


def test_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("import os\n\ndef f(x):\n")
    assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 0
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
        (["--output", "out.jsonl", "--retry-errors"], "--retry-errors needs --resume"),
        (["--output", "out.jsonl", "--resume", "--input", "-"], "save it to a file"),
        (["--device", "tpu"], "device"),
        (["--output", "/no/such/directory/out.jsonl"], "/no/such/directory"),
        (["--trace", "/no/such/directory/trace.json"], "/no/such/directory"),
        (["--report", __file__], "must be a directory"),
        (["--report-profile-steps", "2"], "needs --report"),
        (["--check", "--output", "out.jsonl"], "--check serves no file: leave out --output"),
        (["--check", "--temperature", "1"], "--check serves no file: leave out the sampling parameters"),
        (["--report", "report", "--report-profile-steps=-1"], "0 to 1000"),
    ],
)
def test_bad_arguments_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_rows_may_bring_a_salt_and_a_priority_and_nothing_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompt = {"prompt": "import os\n" * 20}
    items = [{**prompt, "priority": 2}, {**prompt, "priority": 1, "cache_salt": "x"}, {**prompt, "colour": "red"}]
    prompts.write_text("\n".join(map(json.dumps, items)))
    arguments = [*FAST, "--bucket-sizes", "1", "--input", str(prompts), "--output", str(output)]
    assert run(*arguments, "--scheduling-policy", "priority") == 1
    captured = capsys.readouterr()
    assert "row 2 (prompts.jsonl, line 3) failed: unknown key: colour;" in captured.err
    assert " 0 of them found in the prefix cache" in captured.out, "another salt finds nothing"
    assert [index for index, row in rows(output).items() if "error" not in row] == [1, 0], "the more urgent one first"
    assert rows(output)[0]["token_ids"] != []


# -- Rows that fail, and runs that end before their time


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Nine rows."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"n = {n}"}) + "\n" for n in range(9)))
    return path


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's start, which may take minutes, is not reached."""

    def start(config: EngineConfig) -> CompiledEngine:
        raise AssertionError("the engine is started")

    monkeypatch.setattr(CompiledEngine, "from_config", start)


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[RequestOutput], RequestOutput]) -> None:
    """``change`` is applied to each finished output of a step."""
    step = CompiledEngine.step

    def changed(engine: CompiledEngine) -> list[RequestOutput]:
        return [change(output) if output.finished else output for output in step(engine)]

    monkeypatch.setattr(CompiledEngine, "step", changed)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_rows_that_fail_while_running_are_named_and_served_on_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    sampled = [*FAST, "--temperature", "1", "--n", "2", "--input", str(prompts)]
    assert run(*sampled, "--output", str(whole)) == 0

    def fail(output: RequestOutput) -> RequestOutput:
        if output.request_id not in ("2", "5"):
            return output
        first, second = output.outputs
        second = dataclasses.replace(second, finish_reason=reason, stop_reason="the device is on fire")
        return dataclasses.replace(output, outputs=[first, second])

    with monkeypatch.context() as failing:
        change_steps(failing, fail)
        capsys.readouterr()
        assert run(*sampled, "--output", str(output)) == 1
    err = capsys.readouterr().err
    assert "row 2 (prompts.jsonl, line 3) failed: the device is on fire" in err
    assert "row 5 (prompts.jsonl, line 6) failed: the device is on fire" in err
    assert "2 of 9 rows failed; --resume --retry-errors serves them again" in err
    error = {"message": "the device is on fire", "type": "server_error"}
    assert {index: row.get("error") for index, row in rows(output).items() if "error" in row} == {2: error, 5: error}
    assert run(*sampled, "--output", str(output), "--resume") == 1, "they are there"
    assert run(*sampled, "--output", str(output), "--resume", "--retry-errors") == 0
    assert rows(output) == rows(whole), "sampled tokens too"


def test_rows_wait_in_the_file_not_in_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may have more rows than an engine should hold; its order is the engine's, more urgent rows first."""
    prompts, output, unfinished = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", []
    items = [{"prompt": f"n = {n}", "priority": -n} for n in range(30)]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in [*items, {"prompt": ""}]))
    step = CompiledEngine.step

    def counted(engine: CompiledEngine) -> list[RequestOutput]:
        unfinished.append(engine.stats().num_waiting + engine.stats().num_running)
        return step(engine)

    monkeypatch.setattr(CompiledEngine, "step", counted)
    monkeypatch.setattr("compiled_llm.offline.serving.QUEUED_ROWS", 1)
    arguments = [*FAST, "--scheduling-policy", "priority", "--input", str(prompts), "--output", str(output)]
    assert run(*arguments) == 1
    assert "row 30 (prompts.jsonl, line 31) failed: prompt must not be empty" in capsys.readouterr().err
    assert max(unfinished) == 8, "twice as many as can run"
    assert len(rows(output)) == 31
    assert min(list(rows(output))[:4]) > 20


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_what_is_finished(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    status: int,
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(*FAST, "--input", str(prompts), "--output", str(whole)) == 0

    def interrupt(output: RequestOutput) -> RequestOutput:
        if output.request_id == "7":
            signal.raise_signal(number)
        return output

    with monkeypatch.context() as interrupted:
        change_steps(interrupted, interrupt)
        capsys.readouterr()
        assert run(*FAST, "--input", str(prompts), "--output", str(output)) == status
    err = capsys.readouterr().err
    assert err.endswith(f"rows; --resume serves the others\nserve_offline: stopped by {number.name}\n")
    assert 0 < len(rows(output)) < 9
    assert run(*FAST, "--input", str(prompts), "--output", str(output), "--resume") == 0
    assert rows(output) == rows(whole)


def test_a_disk_that_fills_up_ends_the_run_with_whole_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, write, num_writes = tmp_path / "out.jsonl", os.write, itertools.count()

    def fill(descriptor: int, data: bytes) -> int:
        if next(num_writes) < 4:
            return write(descriptor, data)
        write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", fill)
        assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 1
    err = capsys.readouterr().err
    assert f"error: --output {output}: No space left on device" in err
    assert "Traceback" not in err
    assert len(rows(output)) == 4
    assert run(*FAST, "--input", str(prompts), "--output", str(output), "--resume") == 0
    assert sorted(rows(output)) == list(range(9))


def test_the_output_is_created_and_locked_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, statuses = tmp_path / "out.jsonl", []
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]

    def start(config: EngineConfig) -> CompiledEngine:
        assert output.exists()
        statuses.extend([run(*arguments), run(*arguments, "--resume")])
        raise ValueError("cannot start")

    with monkeypatch.context() as starting:
        starting.setattr(CompiledEngine, "from_config", start)
        assert run(*arguments) == 2
    assert statuses == [2, 2], "the second run is refused"
    assert capsys.readouterr().err.count(f"--output {output} is being written by") == 2
    assert not output.exists(), "it holds nothing"


def test_an_interrupted_start_leaves_no_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CompiledEngine, "from_config", lambda config: signal.raise_signal(signal.SIGINT))
    assert run(*FAST, "--output", str(tmp_path / "out.jsonl")) == 130
    assert capsys.readouterr().err == "serve_offline: stopped by SIGINT\n"
    assert os.listdir(tmp_path) == []


def test_the_engine_does_not_start_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    arguments = [*FAST, "--input", str(prompts), "--output", str(output)]
    prompts.write_text('{"prompt": "a"}\n{"prompt":\n')
    assert run(*arguments) == 1
    monkeypatch.setattr(CompiledEngine, "from_config", None)
    assert run(*arguments, "--resume") == 1, "a row has an error"
    assert "No row is left to serve" in capsys.readouterr().out
    prompts.write_text("")
    assert run(*arguments[:-1], str(tmp_path / "other.jsonl")) == 0


# -- What the model brings, and lacks


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("row", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_text_for_a_model_without_a_tokenizer_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict
) -> None:
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps(row))
    assert run("--model", str(checkpoint("llama")), "--input", str(path), "--output", str(output)) == 2
    err = capsys.readouterr().err
    assert "row 0 (prompts.jsonl, line 1) is text" in err
    assert "--tokenizer" in err
    assert not output.exists()


def test_token_ids_for_a_model_without_a_tokenizer_are_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [5]}\n')
    arguments = ["--model", str(checkpoint("llama")), "--input", str(prompts), "--output", str(output)]
    assert run(*FAST, *arguments) == 0
    assert len(rows(output)[0]["token_ids"]) == 6


def test_the_checkpoints_suggestions_hold_unless_flags_are_given_and_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    suggested = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "eos_token_id": 0}
    (model / "generation_config.json").write_text(json.dumps(suggested))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n")
    engine = ["--enforce-eager", "--bucket-sizes", "1", "--input", str(prompts), "--quiet"]
    for arguments, length, shown in (
        (["--model", str(model)], 3, "by generation_config.json: temperature=0.6, top_k=20, max_tokens=3"),
        (
            ["--model", str(model), "--temperature", "0", "--max-tokens", "5", "--ignore-eos"],
            5,
            "max_tokens=5, temperature=0.0, ignore_eos=True; by generation_config.json: top_k=20",
        ),
        (
            ["--max-tokens", "none", "--max-model-len", "8", "--ignore-eos"],
            6,
            "max_tokens=None, temperature=0.7, ignore_eos",
        ),
    ):
        output = tmp_path / f"out{length}.jsonl"
        assert run(*engine, *arguments, "--output", str(output)) == 0
        assert len(rows(output)[0]["token_ids"]) == length
        (line,) = [line for line in capsys.readouterr().out.split("\n") if line.startswith("  sampling ")]
        assert shown in line


@pytest.mark.usefixtures("no_start")
def test_a_bad_suggestion_is_named_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": "hot", "eos_token_id": 0}')
    assert run("--model", str(model)) == 2
    assert "generation_config.json: temperature must be a number" in capsys.readouterr().err


def test_long_prompts_are_cut_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7, 8]}\n{"prompt_token_ids": [7, 8]}\n')
    cut = ["--truncate-prompt-tokens", "2", "--input", str(prompts), "--output", str(output)]
    assert run(*FAST, *cut) == 0
    assert rows(output)[0]["token_ids"] == rows(output)[1]["token_ids"]


# -- Files that must not be written, or cannot be


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "new", "--trace", "new"], "--output and --trace"),
        (["--output", "new", "--trace", "folder/../new"], "--output and --trace"),
        (["--output", "new", "--trace", "link_to_new"], "--output and --trace"),
        (["--trace", "prompts.jsonl"], "--input and --trace"),
        (["--trace", "link"], "--input and --trace"),
        (["--trace", "hard_link"], "--input and --trace"),
        (["--output", "prompts.jsonl", "--resume"], "--input and --output"),
        (["--output", "hard_link", "--resume"], "--input and --output"),
        (["--output", "report/report.json", "--report", "report"], "--output and report.json of --report"),
        (["--trace", "folder/report.html", "--report", "folder"], "--trace and report.html of --report"),
        (["--output", "new", "--report", "new"], "--output and --report"),
        (["--output", "new", "--trace", "new.manifest.json"], "the manifest of --output and --trace"),
    ],
)
def test_files_that_would_destroy_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    os.link(prompts, "hard_link")
    os.symlink(prompts, "link")
    os.symlink("new", "link_to_new")
    before = prompts.read_bytes()
    assert run("--input", str(prompts), *arguments) == 2
    assert f"{words} must be different files" in capsys.readouterr().err
    assert prompts.read_bytes() == before
    assert not os.path.exists("new")


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "/proc/report"], "No such file or directory"),
        (["--report", "/dev/full"], "must be a directory"),
        (["--report", "x" * 300], "File name too long"),
        (["--report", "taken"], "Is a directory"),
        (["--trace", "dangling"], "No such file or directory"),
        (["--trace", "x" * 300], "File name too long"),
        (["--trace", "taken"], "Is a directory"),
        (["--trace", "fifo"], "No such device"),
        (["--trace", "/dev/full"], "must be a regular file"),
        (["--output", "dangling"], "No such file or directory"),
        (["--output", "x" * 300], "File name too long"),
        (["--output", "x" * 250], "File name too long"),  # of the manifest
        (["--output", "made"], "Is a directory"),
        (["--output", "/dev/full", "--resume"], "must be a regular file"),
    ],
)
def test_files_that_cannot_be_written_are_found_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("taken/report.html")
    os.mkdir("made.manifest.json")
    os.mkfifo("fifo")
    os.symlink("/nowhere/x", "dangling")
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert arguments[0] in err
    assert err.count("\n") == 1, "one line"


def test_a_trace_that_is_there_is_kept_until_it_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("of an earlier run")
    trace.chmod(0o600)

    def start(config: EngineConfig) -> CompiledEngine:
        assert os.listdir(tmp_path / "report") == [], "nothing is left of the check"
        raise ValueError("cannot start")

    monkeypatch.setattr(CompiledEngine, "from_config", start)
    assert run("--trace", str(trace), "--report", str(tmp_path / "report")) == 2
    assert trace.read_text() == "of an earlier run"


def test_a_trace_that_fails_at_the_end_costs_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "out.jsonl"

    def replace(output: RequestOutput) -> RequestOutput:
        trace.mkdir(exist_ok=True)
        return output

    change_steps(monkeypatch, replace)
    arguments = [*FAST, "--input", str(prompts), "--output", str(output), "--trace", str(trace)]
    assert run(*arguments) == 1
    assert f"error: --trace {trace}: " in capsys.readouterr().err
    assert len(rows(output)) == 9


# -- Streams


@pytest.mark.parametrize(("has_output", "status"), [(False, 141), (True, 0)])
def test_a_closed_stdout_ends_only_what_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    has_output: bool,
    status: int,
) -> None:
    """As with ``| head -1``."""
    output, trace = tmp_path / "out.jsonl", tmp_path / "trace.json"
    arguments = [*FAST, "--input", str(prompts), *(["--output", str(output)] * has_output), "--trace", str(trace)]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(*arguments) == status
    assert "error" not in capsys.readouterr().err
    assert trace.exists() == output.exists() == has_output


def test_a_full_stdout_is_an_error_but_costs_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(*FAST, "--input", str(prompts), "--output", str(output)) == 1
    assert "serve_offline: error: stdout: No space left on device\n" in capsys.readouterr().err
    assert len(rows(output)) == 9


def test_a_terminal_without_utf_8_gets_escapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts, content = tmp_path / "prompts.txt", io.BytesIO()
    prompts.write_text("é = 語")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    assert run(*FAST, "--input", str(prompts)) == 0
    assert rb"\xe9 = \u8a9e" in content.getvalue()


def test_help_and_bad_arguments_need_neither_docstrings_nor_torch() -> None:
    """With -OO docstrings are None; and torch takes seconds to load, and bad arguments are refused without that."""
    command = [sys.executable, "-OO", "-X", "importtime", str(SCRIPT)]
    for argument, status, words in (("--help", 0, "--output FILE.jsonl"), ("--resume", 2, "needs --output")):
        done = subprocess.run([*command, argument], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "compiled_llm.api.command_line" in done.stderr
        assert " torch\n" not in done.stderr


def test_help_into_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
