"""A file whose rows were written as they ended is put in the order of the input."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm.offline import output_file
from compiled_llm.offline.output_file import OutputFile


def line_of(index: int) -> bytes:
    return f"{json.dumps({'index': index, 'text': 'é' * (index * 37 % 50)})}\n".encode()


@settings(deadline=None)
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


def test_a_disk_without_room_for_both_files_keeps_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "out.jsonl", line_of(1) + line_of(0)
    path.write_bytes(content)
    with OutputFile(path, resume=True) as file, monkeypatch.context() as full:

        def fill(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(output_file.os, "write", fill)
        with pytest.raises(OSError, match=r"--output .*out\.jsonl: No space left"):
            file.put_in_order()
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["out.jsonl"]
