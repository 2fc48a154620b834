"""Files of a model directory: regular ones of bounded size alone are read, and nothing hangs."""

import os
from pathlib import Path

import pytest

from compiled_llm.models.files import open_file, read_json, read_optional_json


def test_reads_through_links_as_the_hubs_cache_has_them(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(tmp_path / "config.json") == {"a": 1}
    assert read_optional_json(tmp_path / "config.json") == {"a": 1}
    assert read_optional_json(tmp_path / "missing.json") == {}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "must be a regular file, found a FIFO"),
        (os.mkdir, "must be a regular file, found a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "must be a regular file, found a device"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: path.symlink_to(path.name), "cannot be opened"),
        (lambda path: path.touch() or os.truncate(path, 1 << 40), "must have at most 1048576 bytes"),
    ],
    ids=["FIFO", "directory", "device", "link to nothing", "link to itself", "a terabyte"],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, make, words: str) -> None:
    path = tmp_path / "config.json"
    make(path)
    for read in (read_json, read_optional_json):
        with pytest.raises(ValueError, match=rf"config\.json: {words}"):
            read(path)


def test_a_file_that_says_it_is_empty_is_bounded_too() -> None:
    with pytest.raises(ValueError, match=r"/proc/self/maps: must have at most 100 bytes, found more"):
        read_json(Path("/proc/self/maps"), 100)


def test_names_that_no_file_can_have() -> None:
    for name in ("a\0b", "\ud800", "x" * 300):
        with pytest.raises(ValueError, match="cannot be opened"):
            open_file(Path(name))


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ValueError, match="regular file"):
            open_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
