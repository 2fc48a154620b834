"""The results of an offline run: a file of JSON rows that one process at a time writes and a later one resumes.

A row is written as soon as it is finished, with one write, so it survives the end of the process. Rows that failed are
not written: a resumed run serves them again.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offline_input import InputRow
from offline_process import naming

from compiled_llm.outputs import CompletionOutput, Logprob, RequestOutput

_ROW_START = b'{"index": '


def failure_of(output: RequestOutput) -> str | None:
    """Why a finished request has no result; None if every continuation came to its end."""
    for completion in output.outputs:
        if completion.finish_reason not in ("stop", "length"):
            return str(completion.stop_reason or completion.finish_reason)
    return None


def row_of(index: int, output: RequestOutput) -> dict[str, Any]:
    """The row of the output file for row ``index`` of the input."""
    row = {"index": index, "prompt": output.prompt, **_fields_of(output.outputs[0])}
    if len(output.outputs) > 1:
        row["outputs"] = [_fields_of(completion) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [logprobs and _readable(logprobs) for logprobs in output.prompt_logprobs]
    return row


def _fields_of(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_readable(logprobs) for logprobs in completion.logprobs]
    return fields


def _readable(logprobs: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
    return {token_id: dataclasses.asdict(logprob) for token_id, logprob in logprobs.items()}


class OutputFile:
    """The file of results, locked from the moment it is opened until it is closed.

    As a context manager: if an exception ends the run, it prints the number of rows, or removes a new, empty file.

    Args:
        path: a new file; with ``resume`` also one that an earlier run wrote. Its last line, if a crash cut it off, is
            removed.
        rows: of the input.

    Attributes:
        done: indices of the rows that it holds.

    Raises:
        ValueError: the file exists and ``resume`` is False, another process writes to it, or it is not the output for
            these rows. It is left as it is.
        OSError: it cannot be created, read or written.
    """

    def __init__(self, path: Path, rows: Sequence[InputRow], *, resume: bool) -> None:
        self._path = path
        self.done: set[int] = set()
        with naming(f"--output {path}"):
            self._descriptor, self._is_new = _open(path)
        try:
            self._lock()
            if not self._is_new and not resume:
                raise ValueError(f"--output {path} exists: give --resume to go on with it, or another name")
            self._size = self._read(rows)
            os.ftruncate(self._descriptor, self._size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and self.done:
            print(f"{self._path} holds {len(self.done)} rows; --resume serves the others", file=sys.stderr)
        elif kind is not None and self._is_new:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.close()

    def write(self, index: int, output: RequestOutput) -> None:
        """Append a row. ``OSError`` if it cannot be; then no part of it is left in the file."""
        line = (json.dumps(row_of(index, output), ensure_ascii=False) + "\n").encode()
        written = 0
        with naming(f"--output {self._path}"):
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except BaseException:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(line)
        self.done.add(index)

    def close(self) -> None:
        """Close it and give up the lock. ``OSError`` if the file system could not keep what was written."""
        try:
            with naming(f"--output {self._path}"):
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _lock(self) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"--output must be a regular file, given {self._path}")
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--output {self._path} is being written by {_lock_holder(status)}: wait for it, or give another name"
            ) from None
        except OSError as error:
            raise OSError(f"--output {self._path} cannot be locked: {error.strerror}") from error
        if not os.path.exists(self._path) or not os.path.samestat(status, os.stat(self._path)):
            raise ValueError(f"--output {self._path} was removed or replaced by another process: run again")

    def _read(self, rows: Sequence[InputRow]) -> int:
        """Note the rows that the file holds; returns its size without a last line that was cut off."""
        size = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                is_cut = not line.endswith(b"\n")
                if is_cut and (line.startswith(_ROW_START) or _ROW_START.startswith(line)):
                    break
                try:
                    self.done.add(self._index(line, rows))
                except ValueError as error:
                    raise ValueError(
                        f"--output {self._path}, line {number}: {error}. The file is left as it is"
                    ) from error
                size += len(line)
        return size

    def _index(self, line: bytes, rows: Sequence[InputRow]) -> int:
        """The index of a row that an earlier run wrote. ``ValueError`` if no run for ``rows`` can have written it."""
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError("must be a JSON object")
        index = row.get("index")
        if type(index) is not int or not 0 <= index < len(rows):
            raise ValueError(f"index must be that of one of the {len(rows)} rows of --input, given {index!r:.100}")
        if index in self.done:
            raise ValueError(f"index {index} was there in an earlier line")
        if rows[index].error is not None or row.get("prompt") != rows[index].prompt.get("prompt"):
            raise ValueError(f"its prompt is not the one of {rows[index].name}: this is the output of another --input")
        if row.get("finish_reason") not in ("stop", "length"):
            raise ValueError("finish_reason must be 'stop' or 'length': remove the line, and the row is served again")
        return index


def _open(path: Path) -> tuple[int, bool]:
    """(file descriptor, whether the file is new). Opening never waits, whatever ``path`` is."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags), False


def _lock_holder(status: os.stat_result) -> str:
    """The process that holds the lock on a file, if Linux shows it."""
    device = status.st_dev
    key = f"{os.major(device):02x}:{os.minor(device):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():  # "1: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF"
            _, kind, *_, process, file, _, _ = line.split()
            if kind == "FLOCK" and file == key and int(process) > 0:
                return f"process {process}"
    return "another process"
