"""The output: one writer, whole lines only, and nothing that is not a run's own lines is resumed."""

import contextlib
import errno
import functools
import itertools
import json
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm.offline import files, output_file
from compiled_llm.offline.output_file import OutputFile, RowSet


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
    return {index for index in range(100) if index in file.done}


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
    with OutputFile(path, resume=False), pytest.raises(ValueError, match=r"is being written by .*process") as error:
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


@pytest.mark.parametrize("num_zeros", [0, 5000])
@pytest.mark.parametrize("last", [line_of(0), batch_line(0)])
@pytest.mark.parametrize("keep", [0, 1, 11, 18, 40])
def test_a_last_line_that_was_cut_off_is_removed(path: Path, last: bytes, keep: int, num_zeros: int) -> None:
    """A machine that goes down may leave the size of a file without the content, as zeros."""
    path.write_bytes(line_of(2) + last[:keep] + bytes(num_zeros))
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
    with OutputFile(path, resume=True) as file:
        file.remove_errors()
        assert (rows_of(file), file.num_failed) == ({1, 4}, 0)
        assert path.read_bytes() == b"".join(kept)
        file.write(2, line_of(2), failed=False)
        with pytest.raises(ValueError, match="is being written by"):
            OutputFile(path, resume=True)
    assert path.read_bytes() == b"".join([*kept, line_of(2)])
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(path.parent) == ["out.jsonl"]


def test_errors_are_removed_from_the_file_that_a_link_names(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "out.jsonl", tmp_path / "out.jsonl"
    target.parent.mkdir()
    target.write_bytes(error_of(3) + line_of(1))
    link.symlink_to(target)
    with OutputFile(link, resume=True) as file:
        file.remove_errors()
        file.write(3, line_of(3), failed=False)
    assert link.is_symlink()
    assert target.read_bytes() == line_of(1) + line_of(3)


def test_files_beside_the_output_are_left_alone_but_for_those_of_killed_runs(path: Path) -> None:
    """A copy of an output, say, that somebody called NAME.kept."""
    path.write_bytes(error_of(3) + line_of(1))
    copy, left = path.with_name("out.jsonl.kept"), path.with_name("out.jsonl.0123456789abcdef.kept")
    for other in (copy, left):
        other.write_bytes(line_of(1))
    with OutputFile(path, resume=True) as file:
        file.remove_errors()
    assert path.read_bytes() == line_of(1)
    assert sorted(os.listdir(path.parent)) == ["out.jsonl", "out.jsonl.kept"]
    assert copy.read_bytes() == line_of(1)


def test_a_file_that_took_the_place_of_a_new_output_is_not_removed_with_it(path: Path) -> None:
    file = OutputFile(path, resume=False)
    path.unlink()
    path.write_text("of somebody else")
    with pytest.raises(KeyboardInterrupt), file:
        raise KeyboardInterrupt
    assert path.read_text() == "of somebody else"


@pytest.mark.parametrize("function", ["replace", "fsync", "fchmod", "write"])
def test_errors_that_cannot_be_removed_stay(path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    content = error_of(3) + line_of(1)
    path.write_bytes(content)

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with OutputFile(path, resume=True) as file, monkeypatch.context() as failing:
        failing.setattr(output_file.os, function, fail)
        with pytest.raises(OSError, match=r"--output .*out\.jsonl: Input/output error"):
            file.remove_errors()
        failing.undo()
        assert (rows_of(file), file.num_failed) == ({1, 3}, 1)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["out.jsonl"]


# -- A file that others touch


@pytest.mark.parametrize("change", ["unlink", "replace", "append", "truncate"])
@pytest.mark.parametrize("when", ["write", "close"])
def test_a_file_that_another_program_touches_ends_the_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: str, when: str
) -> None:
    """Rows are not written for hours to a file that nobody will find."""
    file = OutputFile(path, resume=False)
    file.write(0, line_of(0), failed=False)
    if change == "unlink":
        path.unlink()
    elif change == "replace":
        (path.parent / "other").write_text("")
        os.replace(path.parent / "other", path)
    else:
        os.truncate(path, 100 if change == "append" else 5)
    words = "removed or replaced" if change in ("unlink", "replace") else "another program changed it"
    if when == "write":
        monkeypatch.setattr(output_file, "SYNC_SECONDS", 0.0)
        with pytest.raises(OSError, match=rf"--output .*out\.jsonl: .*{words}"):
            file.write(1, line_of(1), failed=False)
    with pytest.raises(OSError, match=rf"--output .*out\.jsonl: .*{words}"):
        file.close()


def test_rows_are_on_the_disk_some_seconds_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no row follows for a long time, and by a clock that cannot be set back."""
    now, synced = [100.0], list[float]()
    monkeypatch.setattr(output_file.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(output_file.os, "fsync", lambda descriptor: synced.append(now[0]))
    with OutputFile(path, resume=False) as file:
        synced.clear()  # that of the directory
        file.write(0, line_of(0), failed=False)
        for now[0] in (104.0, 105.0, 106.0, 120.0):
            file.sync_if_due()
        assert synced == [105.0], "once, for nothing followed"
        now[0] = 121.0
        file.write(1, line_of(1), failed=False)
        assert synced == [105.0, 121.0]
        now[0] = 122.0
        file.write(2, line_of(2), failed=False)
    assert synced == [105.0, 121.0, 122.0], "and at the end"


def test_a_directory_that_nothing_can_be_written_to_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, for whom every directory can be written to."""
    real = os.open

    def read_only(name: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, *arguments)

    monkeypatch.setattr(output_file.os, "open", read_only)
    for resume_it in (False, True):
        with pytest.raises(OSError, match=r"--output .*out\.jsonl: Read-only file system"):
            OutputFile(path, resume=resume_it)
    assert os.listdir(path.parent) == []


def test_a_directory_that_cannot_be_synchronised_is_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def only_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(output_file.os, "fsync", only_files)
    with OutputFile(path, resume=False) as file:
        file.write(0, line_of(0), failed=False)


# -- Lines that a crash cut off


class Killed(BaseException):
    """The process ends, and runs no ``finally``."""


class KilledProcess:
    """``os``, whose calls that change the disk are counted; the process is killed within one of them.

    From then on no call changes anything: what still runs of the code would not run in a killed process.

    Args:
        call: the number of the call, from 0.
        share: how much of a write is done: 0 nothing, 1 all of it, as if it was killed right after the call.
    """

    CHANGING = ("write", "ftruncate", "fsync", "replace", "unlink", "open", "fchmod")

    def __init__(self, call: int, share: float) -> None:
        self.calls, self._call, self._share = 0, call, share
        for name in self.CHANGING:
            setattr(self, name, functools.partial(self._counted, getattr(os, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _counted(self, function: Any, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls <= self._call:
            return function(*arguments)
        if self.calls == self._call + 1 and self._share > 0:
            if function is os.write:
                descriptor, content = arguments
                os.write(descriptor, content[: int(len(content) * self._share)])
            elif function is not os.open:  # which would leave a descriptor that nobody closes
                function(*arguments)
        raise Killed


@pytest.mark.parametrize(
    "share", [0.0, 0.5, 1.0, *(pytest.param(share, marks=pytest.mark.battery) for share in (0.02, 0.99))]
)
def test_a_kill_within_any_system_call_loses_no_whole_row(
    path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A run goes on with five rows, two of them errors, and a torn one; serves the others, and puts them in order."""
    results = [line_of(4), line_of(0), line_of(5)]
    before = b"".join([results[0], error_of(3), results[1], error_of(2), results[2], line_of(6)[:-4]])
    for call in itertools.count():
        path.write_bytes(before)
        process = KilledProcess(call, share)
        written: list[int] = []
        with monkeypatch.context() as killing, contextlib.suppress(Killed):
            killing.setattr(output_file, "os", process)
            killing.setattr(files, "os", process)
            killing.setattr(output_file, "SYNC_SECONDS", 0.0)
            with OutputFile(path, resume=True) as file:
                file.remove_errors()
                for index in (2, 6, 3):
                    file.write(index, line_of(index), failed=False)
                    written.append(index)
                file.write(1, line_of(1), failed=False)
                file.put_in_order()
        with OutputFile(path, resume=True) as file:
            assert rows_of(file) >= {0, 4, 5, *written}, call
            assert file.num_failed in (0, 2)
            file.remove_errors()
            for index in range(7):
                if index not in file.done:
                    file.write(index, line_of(index), failed=False)
            file.put_in_order()
        assert path.read_bytes() == b"".join(line_of(index) for index in range(7))
        assert os.listdir(path.parent) == ["out.jsonl"], "no file is left over"
        if process.calls <= call:
            break
    assert call >= 20, "calls that were counted"


# -- Any history


@settings(max_examples=40, deadline=None)
@given(history=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 60), st.sets(st.integers(0, 30))), max_size=8))
def test_no_history_of_writes_and_cuts_loses_a_whole_line_or_has_one_twice(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int, set[int]]]
) -> None:
    """Each run removes errors, writes rows, some of them errors, and loses up to so many bytes of its last line."""
    path = tmp_path_factory.mktemp("runs") / "out.jsonl"
    results: set[int] = set()
    errors: set[int] = set()
    for num_rows, num_lost, failing in history:
        with OutputFile(path, resume=True) as file:
            assert rows_of(file) == results | errors
            assert file.num_failed == len(errors)
            if num_rows % 2:
                file.remove_errors()
                errors = set()
            todo = [index for index in range(100) if index not in file.done][:num_rows]
            lines = {index: error_of(index) if index in failing else line_of(index) for index in todo}
            for index, line in lines.items():
                file.write(index, line, failed=index in failing)
        lost = min(num_lost, len(lines[todo[-1]]) - 1)
        os.truncate(path, path.stat().st_size - lost)
        for index in todo if lost == 0 else todo[:-1]:
            (errors if index in failing else results).add(index)


# -- The order of the input


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(12)), num_before=st.integers(0, 12))
def test_lines_are_put_in_order(tmp_path_factory: pytest.TempPathFactory, order: list[int], num_before: int) -> None:
    """Some were written by an earlier run."""
    path = tmp_path_factory.mktemp("run") / "out.jsonl"
    for indices in (order[:num_before], order[num_before:]):
        with OutputFile(path, resume=True) as file:
            for index in indices:
                file.write(index, line_of(index), failed=index % 3 == 0)
    with OutputFile(path, resume=True) as file:
        file.put_in_order()
        assert len(file.done) == 12
        file.write(12, line_of(12), failed=False)
    assert path.read_bytes() == b"".join(map(line_of, range(13)))


def test_a_file_in_order_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with OutputFile(path, resume=False) as file:
        for index in range(3):
            file.write(index, line_of(index), failed=False)
        before = os.stat(path)
        file.put_in_order()
    assert os.path.samestat(before, os.stat(path))


def test_rows_that_are_missing_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of(2) + line_of(0))
    with OutputFile(path, resume=True) as file, pytest.raises(ValueError, match="row 2 is in the file, and one of"):
        file.put_in_order()
    assert path.read_bytes() == line_of(2) + line_of(0)
    assert os.listdir(tmp_path) == ["out.jsonl"]


# -- Sets of rows


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 500) | st.integers(2040, 2055)))
def test_it_is_a_set(indices: list[int]) -> None:
    rows, expected = RowSet(), set()
    for index in indices:
        assert rows.add(index) == (index not in expected)
        expected.add(index)
        assert len(rows) == len(expected)
        assert rows.highest == max(expected)
    assert {index for index in (*range(600), *range(2000, 2100)) if index in rows} == expected


@pytest.mark.parametrize(
    ("indices", "most_bytes"), [(range(0, 10**7, 1000), 1_800_000), ((0, 10**12, 10**17), 2000), ((), 100)]
)
def test_it_takes_little_memory_however_many_and_large_the_numbers_are(indices: Sequence[int], most_bytes: int) -> None:
    rows = RowSet()
    assert all(rows.add(index) for index in indices)
    assert rows.highest == max(indices, default=None)
    assert sys.getsizeof(rows._chunks) + sum(map(sys.getsizeof, rows._chunks.values())) < most_bytes
