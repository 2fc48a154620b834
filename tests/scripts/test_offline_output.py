"""offline_output: one writer, whole rows only, and nothing that is not a run's own rows is resumed."""

import contextlib
import errno
import importlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm import CompletionOutput, RequestMetrics, RequestOutput

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUM_ROWS = 4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("offline_output")


@pytest.fixture
def open_file(module: ModuleType, tmp_path: Path) -> Any:
    """Opens ``out.jsonl`` as the output for four rows with the prompts "0" to "3"; the last cannot be read."""

    def open_file(*, resume: bool = True, path: Path = tmp_path / "out.jsonl") -> Any:
        rows = [module.InputRow(i, f"row {i}", {"prompt": str(i)}) for i in range(NUM_ROWS - 1)]
        return module.OutputFile(path, [*rows, module.InputRow(3, "row 3", {}, error="bad")], resume=resume)

    return open_file


def output_of(index: int, *finish_reasons: str, text: str = "text") -> RequestOutput:
    completions = [
        CompletionOutput(i, text, [7], finish_reason=reason, stop_reason="why" if reason == "error" else None)
        for i, reason in enumerate(finish_reasons or ["stop"])
    ]
    return RequestOutput(str(index), str(index), [5], completions, True, RequestMetrics(0.0))


def line_of(index: Any, **fields: Any) -> str:
    return json.dumps({"index": index, "prompt": str(index), "finish_reason": "stop"} | fields) + "\n"


@contextlib.contextmanager
def limited_file_size() -> Iterator[None]:
    """As a full disk: no file grows beyond 1,000 bytes. Within a test alone, since pytest may write to a file, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failures_are_whatever_did_not_come_to_its_end(module: ModuleType) -> None:
    assert module.failure_of(output_of(0, "stop", "length")) is None
    assert module.failure_of(output_of(0, "stop", "error")) == "why"
    assert module.failure_of(output_of(0, "abort")) == "abort"


def test_rows_are_there_as_soon_as_they_are_written(open_file: Any, tmp_path: Path) -> None:
    with open_file(resume=False) as file:
        for index in (2, 0):
            file.write(index, output_of(index))
            lines = (tmp_path / "out.jsonl").read_text().splitlines()
            assert json.loads(lines[-1])["index"] == index
    with open_file() as file:
        assert file.done == {0, 2}


def test_an_existing_file_is_no_new_output(open_file: Any, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"exists: give --resume"):
        open_file(resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_cannot_write_to_one_file(open_file: Any, resume: bool) -> None:
    with open_file(), pytest.raises(ValueError, match=r"is being written by .*process") as error:
        open_file(resume=resume)
    if os.path.exists("/proc/locks"):
        assert f"process {os.getpid()}" in str(error.value)
    open_file().close()  # the lock is free again


def test_a_file_that_was_removed_while_another_run_held_it_is_not_written_to(
    open_file: Any, monkeypatch: pytest.MonkeyPatch, module: ModuleType, tmp_path: Path
) -> None:
    lock = module.fcntl.flock

    def lock_and_remove(*arguments: Any) -> None:
        lock(*arguments)
        (tmp_path / "out.jsonl").unlink()

    monkeypatch.setattr(module.fcntl, "flock", lock_and_remove)
    with pytest.raises(ValueError, match="removed or replaced"):
        open_file()


def test_a_new_file_without_a_row_goes_when_the_run_cannot_start(
    open_file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), open_file():
        raise KeyboardInterrupt
    assert not path.exists()
    with open_file():
        pass
    assert path.exists(), "a run without rows has an output without rows"
    with pytest.raises(KeyboardInterrupt), open_file():
        raise KeyboardInterrupt
    assert path.exists(), "it was there before"
    file = open_file()
    file.write(1, output_of(1))
    with pytest.raises(KeyboardInterrupt), file:
        raise KeyboardInterrupt
    assert "holds 1 rows; --resume serves the others" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_row(open_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with limited_file_size(), open_file() as file:
        file.write(0, output_of(0, text="x" * 600))
        before = path.read_bytes()
        with pytest.raises(OSError, match=rf"--output .*out\.jsonl: {os.strerror(errno.EFBIG)}"):
            file.write(1, output_of(1, text="x" * 600))
    assert path.read_bytes() == before
    with open_file() as file:
        assert file.done == {0}


def test_an_error_at_the_end_is_not_lost(open_file: Any, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = open_file()
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match=r"--output .*out\.jsonl: Disk quota"):
        file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._descriptor)


@pytest.mark.parametrize("keep", range(1, 20))
def test_a_last_line_that_was_cut_off_is_removed(open_file: Any, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(line_of(2) + line_of(0)[:keep])
    with open_file() as file:
        assert file.done == {2}
        assert path.read_text() == line_of(2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]\n", "must be a JSON object"),
        ("1\n", "must be a JSON object"),
        ("NaN\n", "must be a JSON object"),
        ("null\n", "must be a JSON object"),
        ('"index"\n', "must be a JSON object"),
        ("\n", "not JSON"),
        ("{\n", "not JSON"),
        ("[" * 100_000 + "\n", "not JSON"),
        ("\ufeff" + line_of(0), "not JSON|must be a JSON object"),
        ('{"mine": 1}\n', "index must be .*given None"),
        (line_of(0.9), "index must be .*given 0.9"),
        (line_of(1.0), "index must be .*given 1.0"),
        (line_of(True), "index must be .*given True"),
        (line_of("0"), "index must be .*given '0'"),
        (line_of(-5), "index must be .*given -5"),
        (line_of(NUM_ROWS), "one of the 4 rows of --input, given 4"),
        (line_of(float("nan")), "index must be .*given nan"),
        (line_of([0]), r"index must be .*given \[0\]"),
        (line_of(10**5), "index must be .*given 100000"),
        (line_of(2), "index 2 was there in an earlier line"),
        (line_of(0, prompt="another"), "not the one of row 0"),
        (line_of(0, prompt=None), "not the one of row 0"),
        (line_of(3, prompt=None), "not the one of row 3"),
        (line_of(0, finish_reason="error"), "remove the line"),
        ("unfinished", "not JSON"),
        ("x", "not JSON"),
    ],
)
def test_what_no_run_wrote_is_refused_by_its_line_and_left_as_it_is(
    open_file: Any, tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "out.jsonl"
    content = (line_of(2) + line).encode()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"out\.jsonl, line 2: .*({words}).* is left as it is"):
        open_file()
    assert path.read_bytes() == content


def test_a_text_of_one_line_is_not_taken_for_a_row_that_was_cut_off(open_file: Any, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my notes")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        open_file()
    assert (tmp_path / "out.jsonl").read_text() == "my notes"


def test_only_regular_files_are_resumed(open_file: Any, tmp_path: Path) -> None:
    """Not a FIFO, which waits for a writer, nor a device, which may never end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/full")
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/full"), Path("/dev/zero")):
        with pytest.raises(ValueError, match="must be a regular file"):
            open_file(path=path)


@pytest.mark.parametrize("resume", [False, True])
def test_names_that_cannot_be_created_are_named(open_file: Any, tmp_path: Path, resume: bool) -> None:
    (tmp_path / "dangling").symlink_to("/nowhere/out.jsonl")
    for name in ("dangling", "x" * 300, "missing/out.jsonl", "."):
        with pytest.raises(OSError, match=r"^--output .*: (No such file|File name too long|Is a directory)"):
            open_file(path=tmp_path / name, resume=resume)
