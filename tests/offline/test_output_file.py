"""The output: one writer, whole lines only, and nothing that is not a run's own lines is resumed."""

import contextlib
import errno
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm.offline import output_file
from compiled_llm.offline.output_file import OutputFile
from compiled_llm.offline.row_set import RowSet

NUM_ROWS = 4


def line_of(index: Any, **fields: Any) -> bytes:
    return (json.dumps({"index": index, "prompt": str(index), "finish_reason": "stop"} | fields) + "\n").encode()


def error_of(index: int) -> bytes:
    return (json.dumps({"index": index, "error": {"message": "why", "type": "server_error"}}) + "\n").encode()


def batch_line(index: int, status: int = 200) -> bytes:
    body = {} if status == 200 else {"error": {"message": "why", "type": "server_error"}}
    values = {"id": f"batch_req_{index}", "custom_id": "a", "response": {"status_code": status, "body": body}}
    return (json.dumps({**values, "error": None}) + "\n").encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def rows_of(file: OutputFile) -> set[int]:
    return {index for index in range(1000) if index in file.done}


@contextlib.contextmanager
def limited_file_size() -> Iterator[None]:
    """As a full disk: no file grows beyond 1,000 bytes. Within a test alone, since pytest may write to a file, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_there_as_soon_as_they_are_written(path: Path) -> None:
    with OutputFile(path, resume=False) as file:
        for index in (2, 0):
            file.write(index, line_of(index), failed=False)
            assert json.loads(path.read_bytes().splitlines()[-1])["index"] == index
    with OutputFile(path, resume=True) as file:
        assert rows_of(file) == {0, 2}
        with pytest.raises(AssertionError, match="row 2 ends twice"):
            file.write(2, line_of(2), failed=False)


def test_an_existing_file_is_no_new_output(path: Path) -> None:
    path.write_text("")
    with pytest.raises(ValueError, match=r"exists: give --resume"):
        OutputFile(path, resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_cannot_write_to_one_file(path: Path, resume: bool) -> None:
    with (
        OutputFile(path, resume=False),
        pytest.raises(ValueError, match=r"is being written by .*process") as error,
    ):
        OutputFile(path, resume=resume)
    if os.path.exists("/proc/locks"):
        assert f"process {os.getpid()}" in str(error.value)
    OutputFile(path, resume=True).close()  # the lock is free again


def test_a_file_that_was_removed_while_another_run_held_it_is_not_written_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = output_file.fcntl.flock

    def lock_and_remove(*arguments: Any) -> None:
        lock(*arguments)
        path.unlink()

    monkeypatch.setattr(output_file.fcntl, "flock", lock_and_remove)
    with pytest.raises(ValueError, match="removed or replaced"):
        OutputFile(path, resume=True)


def test_a_new_file_without_a_row_goes_when_the_run_cannot_start(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), OutputFile(path, resume=True):
        raise KeyboardInterrupt
    assert not path.exists()
    with OutputFile(path, resume=True):
        pass
    assert path.exists(), "a run without rows has an output without rows"
    with pytest.raises(KeyboardInterrupt), OutputFile(path, resume=True):
        raise KeyboardInterrupt
    assert path.exists(), "it was there before"
    file = OutputFile(path, resume=True)
    file.write(1, line_of(1), failed=False)
    with pytest.raises(KeyboardInterrupt), file:
        raise KeyboardInterrupt
    assert "holds 1 rows; --resume serves the others" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_line(path: Path) -> None:
    with limited_file_size(), OutputFile(path, resume=False) as file:
        file.write(0, line_of(0, text="x" * 600), failed=False)
        before = path.read_bytes()
        with pytest.raises(OSError, match=rf"--output .*out\.jsonl: {os.strerror(errno.EFBIG)}"):
            file.write(1, line_of(1, text="x" * 600), failed=False)
    assert path.read_bytes() == before
    with OutputFile(path, resume=True) as file:
        assert rows_of(file) == {0}


def test_an_error_at_the_end_is_not_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = OutputFile(path, resume=False)
    monkeypatch.setattr(output_file.os, "fsync", full)
    with pytest.raises(OSError, match=r"--output .*out\.jsonl: Disk quota"):
        file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._descriptor)


def test_what_is_written_reaches_the_disk_now_and_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that cannot be set back."""
    now, synced = 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(output_file.os, "fsync", lambda descriptor: synced.append(now))
    with OutputFile(path, resume=False) as file:
        for index in range(30):
            file.write(index, line_of(index), failed=False)
            now += 1.0
    assert synced == [1005.0, 1010.0, 1015.0, 1020.0, 1025.0, 1030.0]


@pytest.mark.parametrize("last", [line_of(0), batch_line(0)])
@pytest.mark.parametrize("keep", [*range(1, 21), 40])
def test_a_last_line_that_was_cut_off_is_removed(path: Path, last: bytes, keep: int) -> None:
    path.write_bytes(line_of(2) + last[:keep])
    with OutputFile(path, resume=True) as file:
        assert rows_of(file) == {2}
        assert path.read_bytes() == line_of(2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[]\n", "must begin with the number"),
        (b"1\n", "must begin with the number"),
        (b"\n", "must begin with the number"),
        (b"{\n", "must begin with the number"),
        (b'\xef\xbb\xbf{"index": 0}\n', "must begin with the number"),
        (b'{"mine": 1}\n', "must begin with the number"),
        (line_of(0.9), "must begin with the number"),
        (line_of(True), "must begin with the number"),
        (line_of("0"), "must begin with the number"),
        (line_of(-5), "must begin with the number"),
        (line_of(2), "row 2 was there in an earlier line"),
        (b'{"index": 0, "text": "a\n', "does not end as a JSON object"),
        (b"unfinished", "must begin with the number"),
    ],
)
def test_what_no_run_wrote_is_refused_by_its_line_and_left_as_it_is(path: Path, line: bytes, words: str) -> None:
    path.write_bytes(line_of(2) + line)
    with pytest.raises(ValueError, match=rf"out\.jsonl, line 2: .*({words}).* is left as it is"):
        OutputFile(path, resume=True)
    assert path.read_bytes() == line_of(2) + line


def test_a_text_of_one_line_is_not_taken_for_a_row_that_was_cut_off(path: Path) -> None:
    path.write_text("my notes")
    with pytest.raises(ValueError, match="line 1: a line must begin"):
        OutputFile(path, resume=True)
    assert path.read_text() == "my notes"


def test_only_regular_files_are_resumed(tmp_path: Path) -> None:
    """Not a FIFO, which waits for a writer, nor a device, which may never end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/full")
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/full"), Path("/dev/zero")):
        with pytest.raises(ValueError, match="must be a regular file"):
            OutputFile(path, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_names_that_cannot_be_created_are_named(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "dangling").symlink_to("/nowhere/out.jsonl")
    for name in ("dangling", "x" * 300, "missing/out.jsonl", "."):
        with pytest.raises(OSError, match=r"^--output .*: (No such file|File name too long|Is a directory)"):
            OutputFile(tmp_path / name, resume=resume)


# -- Errors that are tried again


def test_errors_count_as_done_until_they_are_tried_again(path: Path) -> None:
    kept = [line_of(4), batch_line(1)]
    path.write_bytes(b"".join([error_of(3), kept[0], batch_line(0, 500), kept[1], error_of(2), line_of(9)[:11]]))
    path.chmod(0o640)
    with OutputFile(path, resume=True) as file:
        assert (rows_of(file), file.num_failed) == ({0, 1, 2, 3, 4}, 3)
    with OutputFile(path, resume=True, retry_errors=True) as file:
        assert (rows_of(file), file.num_failed) == ({1, 4}, 0)
        assert path.read_bytes() == b"".join(kept)
        file.write(2, line_of(2), failed=False)
        with pytest.raises(ValueError, match="is being written by"):
            OutputFile(path, resume=True)
    assert path.read_bytes() == b"".join([*kept, line_of(2)])
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["out.jsonl"]


@pytest.mark.parametrize("function", ["replace", "fsync", "fchmod"])
def test_a_crash_while_errors_are_removed_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    content = error_of(3) + line_of(1)
    path.write_bytes(content)

    def crash(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as crashing:
        crashing.setattr(output_file.os, function, crash)
        with pytest.raises(OSError, match="Input/output error"):
            OutputFile(path, resume=True, retry_errors=True)
    assert path.read_bytes() == content
    with OutputFile(path, resume=True, retry_errors=True) as file:
        assert rows_of(file) == {1}


# -- Any history


@settings(max_examples=200, deadline=None)
@given(history=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 60)), max_size=8))
def test_no_history_of_writes_and_cuts_loses_a_whole_line_or_has_one_twice(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int]]
) -> None:
    """Each run writes some rows, and then loses up to so many bytes of its last line, as when a machine goes down."""
    path, wanted = tmp_path_factory.mktemp("runs") / "out.jsonl", RowSet()
    for num_rows, num_lost in history:
        with OutputFile(path, resume=True) as file:
            assert all(index in wanted for index in rows_of(file))
            assert len(file.done) == len(wanted)
            todo = [index for index in range(100) if index not in file.done][:num_rows]
            for index in todo:
                file.write(index, line_of(index), failed=False)
        lost = min(num_lost, len(line_of(todo[-1])) - 1)
        os.truncate(path, path.stat().st_size - lost)
        for index in todo if lost == 0 else todo[:-1]:
            wanted.add(index)
