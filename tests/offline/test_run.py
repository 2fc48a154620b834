"""The command: rows written as they end, resumed after a cut, exit statuses, what it prints."""

import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, EngineConfig, RequestOutput
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.offline.files import manifest_path
from compiled_llm.report import machine_limits
from compiled_llm.report.machine_limits import MachineLimits
from compiled_llm.system import clock
from tests.families import checkpoint
from tests.offline.runs import FAST, rows, run

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_offline.py"
GREEDY = [*FAST, "--temperature", "0"]
NINE = [{"prompt": f"n = {n}"} for n in range(9)]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Nine rows."""
    return write(tmp_path / "prompts.jsonl", NINE)


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's start, which may take minutes, is not reached."""

    def start(config: EngineConfig) -> CompiledEngine:
        raise AssertionError("the engine is started")

    monkeypatch.setattr(CompiledEngine, "from_config", start)


def write(path: Path, items: list[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def served(prompts: Path, output: Path, *flags: str) -> int:
    return run(*GREEDY, "--input", str(prompts), "--output", str(output), *flags)


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[RequestOutput], RequestOutput]) -> None:
    """``change`` is applied to each finished output of a step."""
    step = CompiledEngine.step

    def changed(engine: CompiledEngine) -> list[RequestOutput]:
        return [change(output) if output.finished else output for output in step(engine)]

    monkeypatch.setattr(CompiledEngine, "step", changed)


# -- What it prints, and what it measures


def test_a_start_counts_from_the_import_of_the_package(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Not from the start of the process, which may have been a shell's before."""
    monkeypatch.setattr(clock, "PACKAGE_IMPORTED", time.perf_counter() - 5000)
    assert run(*GREEDY) == 0
    (seconds,) = re.findall(r"start +(\d+)\.\d s, of which", capsys.readouterr().out)
    assert 5000 <= int(seconds) < 5100


@pytest.mark.parametrize("agrees", [True, False])
def test_a_check_is_of_the_first_prompts_and_decides_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path, agrees: bool
) -> None:
    class Report:
        """As ``CompiledEngine.check`` returns it (tests/engine/test_check.py)."""

        def __init__(self, engine: CompiledEngine, prompts: list[Any]) -> None:
            self.agrees, self.prompts = agrees, prompts

        def __str__(self) -> str:
            return f"table of {self.prompts}"

    monkeypatch.setattr(CompiledEngine, "check", lambda engine, prompts: Report(engine, prompts))
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt_token_ids": [n]} for n in range(6)])
    engine = [flag for flag in FAST if flag not in ("--max-tokens", "6")]
    assert run(*engine, "--check", "--input", str(prompts)) == (0 if agrees else 1)
    first = [{"prompt_token_ids": [n]} for n in range(4)]
    assert capsys.readouterr().out == f"table of {first}\n"


def test_a_report_and_a_trace(monkeypatch: pytest.MonkeyPatch, prompts: Path, tmp_path: Path, capsys: Capture) -> None:
    """With the long summary of ``--details``."""
    limits = MachineLimits("cpu", "bfloat16", 1e10, 1e11, "made up", "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: limits)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: limits)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    report, trace = tmp_path / "report", tmp_path / "trace.json"
    flags = ["--input", str(prompts), "--details", "--report", str(report), "--trace", str(trace)]
    assert run(*GREEDY, *flags) == 0
    out = capsys.readouterr().out
    for word in ("first token", "next tokens", "p99", "KV blocks", "preemptions", "recompiles", "row 8: prompt"):
        assert word in out
    (line,) = [line for line in out.split("\n") if "efficiency" in line]
    assert "decode" in line
    assert "prefill" in line
    content = json.loads((report / "report.json").read_text())
    assert content["stats"]["num_finished"] == content["num_finished"] == 9
    assert content["device_shares"]["linears"] > 0, "--report profiles some steps"
    assert content["trace"] == json.loads(trace.read_text()) == json.loads((report / "trace.json").read_text())
    assert (report / "report.html").stat().st_size > 10_000


def test_limits_are_measured_again_when_asked(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path, capsys: Capture
) -> None:
    asked = []
    monkeypatch.setattr(machine_limits, "cached", lambda device, dtype: None)
    monkeypatch.setattr(machine_limits, "measured", lambda device, dtype, remeasure: asked.append(remeasure))
    assert served(prompts, output, "--remeasure-limits") == 0
    assert asked == [True]
    assert run(*GREEDY, "--input", str(prompts), "--quiet") == 0
    assert asked == [True]
    assert "efficiency" not in capsys.readouterr().out


# -- Files that a run goes on with


def test_rows_survive_a_cut_and_resume_serves_the_rest(prompts: Path, output: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    assert served(prompts, output) == 0
    lines = output.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    shutil.copy(manifest_path(output), manifest_path(cut))
    assert served(prompts, cut) == 2, "an existing file is no target"
    assert served(prompts, cut, "--resume") == 0
    assert rows(cut) == rows(output)
    assert len(rows(cut)) == 9


def test_a_resume_that_is_refused_leaves_the_files_as_they_are(prompts: Path, output: Path, capsys: Capture) -> None:
    """Also where all rows are errors, which are served again."""
    write(prompts, [{"prompt": ""}] * 2)
    again = ["--resume", "--retry-errors"]
    assert served(prompts, output) == 1
    written, manifest = output.read_bytes(), manifest_path(output).read_bytes()
    capsys.readouterr()
    assert served(prompts, output, *again, "--kv-cache-dtype", "int8") == 2
    assert "--kv-cache-dtype is 'int8' and was 'auto'" in capsys.readouterr().err
    write(prompts, [{"prompt": "a"}])
    assert served(prompts, output, *again) == 2
    assert "--input 'prompts.jsonl' has another content than it had" in capsys.readouterr().err
    assert served(prompts, output.with_name("other.jsonl"), "--resume") == 0, "nothing to go on with: a new run"
    manifest_path(output).unlink()
    assert served(prompts, output, *again) == 2
    assert "the manifest" in capsys.readouterr().err
    assert output.read_bytes() == written
    manifest_path(output).write_bytes(manifest)
    write(prompts, [{"prompt": ""}] * 2)
    output.write_bytes(beyond := written.replace(b'{"index": 1,', b'{"index": 2,'))
    assert served(prompts, output, *again) == 2
    assert "out.jsonl has a line of row 2, and the input has no such row" in capsys.readouterr().err
    assert output.read_bytes() == beyond
    output.write_bytes(written)
    assert served(prompts, output, *again, "--bucket-sizes", "1,2") == 1, "sizes of buckets change no token"
    assert output.read_bytes() == written
    assert manifest_path(output).read_bytes() == manifest, "of the first run"


@pytest.mark.usefixtures("no_start")
def test_a_manifest_of_somebody_else_is_refused_before_the_start(prompts: Path, output: Path, capsys: Capture) -> None:
    manifest_path(output).write_text("{}")
    assert served(prompts, output) == 2
    assert "move it away, or give another --output" in capsys.readouterr().err
    assert manifest_path(output).read_text() == "{}"
    assert not output.exists()


def test_a_manifest_without_its_output_is_replaced(prompts: Path, output: Path) -> None:
    for options in ([], ["--resume"]):
        manifest_path(output).write_text('{"format": 0, "inputs": [], "engine": {}, "sampling": {}}')
        output.unlink(missing_ok=True)
        assert served(prompts, output, *options) == 0
        assert served(prompts, output, "--resume") == 0, "no row is left"


def test_a_run_that_was_killed_before_its_manifest_was_written_goes_on(prompts: Path, output: Path) -> None:
    output.write_bytes(b"")
    manifest_path(output).with_name(f"{manifest_path(output).name}.{'0f' * 8}.new").write_text("{")
    assert served(prompts, output) == 2, "an existing file is no target"
    assert served(prompts, output, "--resume") == 0
    assert len(rows(output)) == 9
    assert sorted(os.listdir(output.parent)) == ["out.jsonl", "out.jsonl.manifest.json", "prompts.jsonl"]


def test_rows_in_the_order_of_the_input(prompts: Path, output: Path) -> None:
    write(prompts, [{"prompt": f"n = {n}", "sampling_params": {"max_tokens": 1 + 5 * n % 7}} for n in range(12)])
    assert served(prompts, output) == 0
    assert list(rows(output)) != list(range(12)), "as they end"
    assert served(prompts, output, "--resume", "--ordered") == 0, "no row is left"
    whole = output.read_bytes()
    assert list(rows(output)) == list(range(12))
    lines = whole.splitlines(keepends=True)
    for kept in ([], lines[:5], lines[7:3:-1]):
        output.write_bytes(b"".join(kept))
        assert served(prompts, output, "--resume", "--ordered") == 0
        assert output.read_bytes() == whole


def test_the_output_is_created_and_locked_before_the_start(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path, capsys: Capture
) -> None:
    statuses = []

    def start(config: EngineConfig) -> CompiledEngine:
        assert output.exists()
        statuses.extend([served(prompts, output), served(prompts, output, "--resume")])
        raise ValueError("cannot start")

    monkeypatch.setattr(CompiledEngine, "from_config", start)
    assert served(prompts, output) == 2
    assert statuses == [2, 2], "the second run is refused"
    assert capsys.readouterr().err.count(f"--output {output} is being written by") == 2
    assert not output.exists(), "it holds nothing"


def test_the_engine_does_not_start_for_nothing(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path, capsys: Capture
) -> None:
    prompts.write_text('{"prompt": "a"}\n{"prompt":\n')
    assert served(prompts, output) == 1
    monkeypatch.setattr(CompiledEngine, "from_config", None)
    assert served(prompts, output, "--resume") == 1, "a row has an error"
    assert "No row is left to serve" in capsys.readouterr().out
    assert served(write(prompts, []), output.with_name("other.jsonl")) == 0


# -- Rows


def test_bad_rows_are_named_and_the_others_served(prompts: Path, output: Path, capsys: Capture) -> None:
    good = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)  # any end of a line but a newline
    bad = ['{"prompt": ""}', '{"text": "x"}', '{"prompt_token_ids": [1000000]}', "{", '{"prompt": "a", "colour": 1}']
    prompts.write_text("\n".join([good, *bad, good]))
    assert served(prompts, output) == 1
    err = capsys.readouterr().err
    for number in range(1, 6):
        assert f"row {number} (prompts.jsonl, line {number + 1}) failed" in err
    assert "row 5 (prompts.jsonl, line 6) failed: unknown key: colour;" in err
    found = rows(output)
    assert {index for index, row in found.items() if "error" in row} == {1, 2, 3, 4, 5}
    assert found[4]["error"]["type"] == "invalid_request_error"
    assert found[0]["prompt"] == found[6]["prompt"] == "a\u2028b\x85c"
    assert found[0]["token_ids"] == found[6]["token_ids"] != []


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_rows_that_fail_while_running_are_named_and_served_on_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prompts: Path, output: Path, capsys: Capture, reason: str
) -> None:
    whole, sampled = tmp_path / "whole.jsonl", ["--temperature", "1", "--n", "2"]
    assert served(prompts, whole, *sampled) == 0

    def fail(output: RequestOutput) -> RequestOutput:
        if output.request_id not in ("2", "5"):
            return output
        first, second = output.outputs
        second = dataclasses.replace(second, finish_reason=reason, stop_reason="the device is on fire")
        return dataclasses.replace(output, outputs=[first, second])

    with monkeypatch.context() as failing:
        change_steps(failing, fail)
        capsys.readouterr()
        assert served(prompts, output, *sampled) == 1
    err = capsys.readouterr().err
    assert "row 2 (prompts.jsonl, line 3) failed: the device is on fire" in err
    assert "row 5 (prompts.jsonl, line 6) failed: the device is on fire" in err
    assert "2 of 9 rows failed; --resume --retry-errors serves them again" in err
    error = {"message": "the device is on fire", "type": "server_error"}
    assert {index: row["error"] for index, row in rows(output).items() if "error" in row} == {2: error, 5: error}
    assert served(prompts, output, *sampled, "--resume") == 1, "they are there"
    assert served(prompts, output, *sampled, "--resume", "--retry-errors") == 0
    assert rows(output) == rows(whole), "sampled tokens too"


def test_rows_wait_in_the_file_not_in_the_engine(monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path) -> None:
    """A file may have more rows than an engine should hold; its order is the engine's, more urgent rows first."""
    write(prompts, [{"prompt": f"n = {n}", "priority": -n} for n in range(30)])
    unfinished, step = [], CompiledEngine.step

    def counted(engine: CompiledEngine) -> list[RequestOutput]:
        unfinished.append(engine.stats().num_waiting + engine.stats().num_running)
        return step(engine)

    monkeypatch.setattr(CompiledEngine, "step", counted)
    monkeypatch.setattr("compiled_llm.offline.serving.QUEUED_ROWS", 1)
    assert served(prompts, output, "--scheduling-policy", "priority") == 0
    assert max(unfinished) == 8, "twice as many as can run"
    assert len(rows(output)) == 30
    assert min(list(rows(output))[:4]) > 20


# -- Runs that end before their time


def test_an_interrupted_start_leaves_no_output(monkeypatch: pytest.MonkeyPatch, output: Path, capsys: Capture) -> None:
    monkeypatch.setattr(CompiledEngine, "from_config", lambda config: signal.raise_signal(signal.SIGINT))
    assert run(*GREEDY, "--output", str(output)) == 130
    assert capsys.readouterr().err == "serve_offline: stopped by SIGINT\n"
    assert os.listdir(output.parent) == []


# -- What the model brings, and lacks


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("row", [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}])
def test_text_for_a_model_without_a_tokenizer_is_refused_before_the_start(
    prompts: Path, output: Path, capsys: Capture, row: dict
) -> None:
    assert served(write(prompts, [row]), output, "--model", str(checkpoint("llama"))) == 2
    err = capsys.readouterr().err
    assert "row 0 (prompts.jsonl, line 1) is text" in err
    assert "--tokenizer" in err
    assert not output.exists()


def test_token_ids_for_a_model_without_a_tokenizer_are_served(prompts: Path, output: Path) -> None:
    write(prompts, [{"prompt_token_ids": [5]}])
    assert served(prompts, output, "--model", str(checkpoint("llama"))) == 0
    assert len(rows(output)[0]["token_ids"]) == 6


def test_the_checkpoints_suggestions_hold_unless_flags_are_given_and_are_shown(
    prompts: Path, tmp_path: Path, capsys: Capture
) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    suggested = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 3, "eos_token_id": 0}
    (model / "generation_config.json").write_text(json.dumps(suggested))
    write(prompts, [{"prompt": "import os"}])
    engine = ["--enforce-eager", "--bucket-sizes", "1", "--input", str(prompts), "--quiet"]
    by_hand = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    no_limit = ["--max-tokens", "none", "--max-model-len", "8", "--ignore-eos"]
    for arguments, length, shown in (
        (
            ["--model", str(model), *by_hand],
            5,
            "max_tokens=5, temperature=0.0, ignore_eos=True; by generation_config.json: top_k=20",
        ),
        (no_limit, 6, "max_tokens=None, temperature=0.7, ignore_eos"),
    ):
        output = tmp_path / f"out{length}.jsonl"
        assert run(*engine, *arguments, "--output", str(output)) == 0
        assert len(rows(output)[0]["token_ids"]) == length
        (line,) = [line for line in capsys.readouterr().out.split("\n") if line.startswith("  sampling ")]
        assert shown in line


@pytest.mark.usefixtures("no_start")
def test_a_bad_suggestion_is_named_before_the_start(tmp_path: Path, capsys: Capture) -> None:
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": "hot", "eos_token_id": 0}')
    assert run("--model", str(model)) == 2
    assert "generation_config.json: temperature must be a number" in capsys.readouterr().err


# -- Streams


@pytest.mark.parametrize(("has_output", "status"), [(False, 141), (True, 0)])
def test_a_closed_stdout_ends_only_what_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path, capsys: Capture, has_output: bool, status: int
) -> None:
    """As with ``| head -1``."""
    trace = output.with_name("trace.json")
    arguments = [*GREEDY, "--input", str(prompts), *(["--output", str(output)] * has_output), "--trace", str(trace)]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(*arguments) == status
    assert "error" not in capsys.readouterr().err
    assert trace.exists() == output.exists() == has_output


def test_a_full_stdout_is_an_error_but_costs_no_row(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, output: Path, capsys: Capture
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert served(prompts, output) == 1
    assert "serve_offline: error: stdout: No space left on device\n" in capsys.readouterr().err
    assert len(rows(output)) == 9


def test_a_terminal_without_utf_8_gets_escapes(monkeypatch: pytest.MonkeyPatch, prompts: Path) -> None:
    write(prompts, [{"prompt": "é = 語"}])
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii"))
    assert run(*GREEDY, "--input", str(prompts)) == 0
    assert rb"\xe9 = \u8a9e" in content.getvalue()


def test_help_and_bad_arguments_need_neither_docstrings_nor_torch() -> None:
    """With -OO docstrings are None; and torch takes seconds to load, and bad arguments are refused without that."""
    command = [sys.executable, "-OO", "-X", "importtime", str(SCRIPT)]
    for argument, status, words in (
        ("--help=all", 0, "--bucket-sizes INT[,INT...]"),
        ("--resume", 2, "needs --output"),
    ):
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
