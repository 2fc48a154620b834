"""The files of a run, and its flags: what contradicts itself or cannot be written ends the command before it starts."""

import os
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine, EngineConfig, RequestOutput
from tests.offline.runs import FAST, rows, run, write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 2)


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledEngine, "from_config", None)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--bucket-sizes 0,8", "bucket_sizes"),
        ("--bucket-sizes one", "bucket-sizes"),
        ("--no-such-flag", "no-such-flag"),
        ("--max-tokens 0", "max_tokens"),
        ("--model /no/such/directory", "/no/such/directory"),
        ("--input prompts.csv", ".jsonl or .txt"),
        ("--input no-such-file.txt", "no-such-file.txt"),
        ("--resume", "--output"),
        ("--output out.jsonl --retry-errors", "--retry-errors needs --resume"),
        ("--output out.jsonl --resume --input -", "save it to a file"),
        ("--report-profile-steps 2", "needs --report"),
        ("--check --output out.jsonl", "--check serves no file: leave out --output"),
        ("--check --temperature 1", "--check serves no file: leave out the sampling parameters"),
        ("--report report --report-profile-steps=-1", "0 to 1000"),
    ],
)
def test_bad_arguments_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*flags.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--output new --trace new", "--output and --trace"),
        ("--output new --trace folder/../new", "--output and --trace"),
        ("--output new --trace link_to_new", "--output and --trace"),
        ("--trace prompts.jsonl", "--input and --trace"),
        ("--trace link", "--input and --trace"),
        ("--trace hard_link", "--input and --trace"),
        ("--output prompts.jsonl --resume", "--input and --output"),
        ("--output hard_link --resume", "--input and --output"),
        ("--output report/report.json --report report", "--output and report.json of --report"),
        ("--trace folder/report.html --report folder", "--trace and report.html of --report"),
        ("--output new --report new", "--output and --report"),
        ("--output new --trace new.manifest.json", "the manifest of --output and --trace"),
    ],
)
def test_files_that_would_destroy_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, prompts: Path, capsys: pytest.CaptureFixture[str], flags: str, words: str
) -> None:
    monkeypatch.chdir(prompts.parent)
    os.mkdir("folder")
    os.link(prompts, "hard_link")
    os.symlink(prompts, "link")
    os.symlink("new", "link_to_new")
    before = prompts.read_bytes()
    assert run("--input", str(prompts), *flags.split()) == 2
    assert f"{words} must be different files" in capsys.readouterr().err
    assert prompts.read_bytes() == before
    assert not os.path.exists("new")


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("flag", "path", "words"),
    [
        ("--report", "/proc/report", "No such file or directory"),
        ("--report", "/dev/full", "must be a directory"),
        ("--report", __file__, "must be a directory"),
        ("--report", "x" * 300, "File name too long"),
        ("--report", "taken", "Is a directory"),
        ("--trace", "dangling", "No such file or directory"),
        ("--trace", "/no/such/directory/trace.json", "No such file or directory"),
        ("--trace", "x" * 300, "File name too long"),
        ("--trace", "taken", "Is a directory"),
        ("--trace", "fifo", "No such device"),
        ("--trace", "/dev/full", "must be a regular file"),
        ("--output", "dangling", "No such file or directory"),
        ("--output", "/no/such/directory/out.jsonl", "No such file or directory"),
        ("--output", "x" * 300, "File name too long"),
        ("--output", "x" * 250, "File name too long"),  # of the manifest
        ("--output", "made", "Is a directory"),
    ],
)
def test_files_that_cannot_be_written_are_found_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    path: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.makedirs("taken/report.html")
    os.mkdir("made.manifest.json")
    os.mkfifo("fifo")
    os.symlink("/nowhere/x", "dangling")
    assert run(flag, path) == 2
    err = capsys.readouterr().err
    assert words in err
    assert flag in err
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
    trace, output, step = tmp_path / "trace.json", tmp_path / "out.jsonl", CompiledEngine.step

    def replace(engine: CompiledEngine) -> list[RequestOutput]:
        trace.mkdir(exist_ok=True)
        return step(engine)

    monkeypatch.setattr(CompiledEngine, "step", replace)
    assert run(*FAST, "--input", str(prompts), "--output", str(output), "--trace", str(trace)) == 1
    assert f"error: --trace {trace}: " in capsys.readouterr().err
    assert len(rows(output)) == 2
