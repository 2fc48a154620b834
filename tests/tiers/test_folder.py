"""Folders of blocks: bounded, shared, kept over kills; others' folders are refused."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from compiled_llm.tiers.block_file import HEADER_BYTES, name_of
from compiled_llm.tiers.folder import BlockFolder
from compiled_llm.tiers.unused_folders import remove_unused

KEY = bytes(32)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, size: int = 5000) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def read(folder: BlockFolder, number: int, size: int = 5000) -> bytes | None:
    own = bytearray(size)
    return None if folder.read(digest(number), memoryview(own), ()) is None else bytes(own)


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    size = 1000 + HEADER_BYTES
    folder = BlockFolder(tmp_path, KEY, 10 * size)
    for number in range(10):
        assert folder.write(digest(number), [content(number, 1000)], ()) == (True, [])
        os.utime(folder.path / name_of(digest(number)), (number, number))
    folder.scan()
    assert read(folder, 0, 1000) == content(0, 1000)  # is used
    is_written, gone = folder.write(digest(10), [content(10, 1000)], ())
    assert is_written
    assert sorted(gone) == [digest(1), digest(2)]
    assert sum(path.stat().st_size for path in folder.path.iterdir()) <= 10 * size
    assert [read(folder, number, 1000) is not None for number in range(11)] == [True, False, False, *[True] * 8]


def test_engines_share_a_folder(tmp_path: Path) -> None:
    one, other = (BlockFolder(tmp_path, KEY, 10**6) for _ in range(2))
    one.write(digest(1), [content(1)], ())
    assert read(other, 1) == content(1), "although it has not looked"
    assert (other.scan(), one.scan()) == ((set(), set()), (set(), set()))
    one.write(digest(2), [content(2)], ())
    assert other.scan() == ({digest(2)}, set())
    (other.path / name_of(digest(1))).unlink()
    assert read(one, 1) is None
    assert other.scan() == (set(), {digest(1)})


def test_a_bad_file_is_removed_and_that_of_another_key_is_not_seen(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, KEY, 10**6)
    folder.write(digest(1), [content(1)], ())
    path = folder.path / name_of(digest(1))
    path.write_bytes(path.read_bytes()[:-1])
    assert read(folder, 1) is None
    assert not path.exists()
    folder.write(digest(1), [content(1)], ())
    assert read(BlockFolder(tmp_path, bytes([1]) * 32, 10**6), 1) is None
    assert path.exists()


def test_a_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ValueError, match=r"KV blocks is not loaded from .*others than its owner may write"):
        BlockFolder(open_to_all, KEY, 10**6)
    BlockFolder(tmp_path / "own", KEY, 10**6).close()
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="kv_disk_path"):
        BlockFolder(tmp_path / "own", KEY, 10**6)


@pytest.mark.parametrize(
    "num_kills", [pytest.param(10, id="small"), pytest.param(300, id="full", marks=pytest.mark.battery)]
)
def test_a_writer_killed_at_any_moment_leaves_no_bad_file(num_kills: int, tmp_path: Path) -> None:
    rng = random.Random(num_kills)
    seen: set[int] = set()
    for kill in range(num_kills):
        begun, begins = os.pipe()
        child = os.fork()
        if not child:
            try:
                folder = BlockFolder(tmp_path, KEY, 5 * 10**5)
                folder.scan()
                os.write(begins, b"x")
                while True:
                    number = rng.randrange(50) + kill
                    folder.write(digest(number), [content(number, 20_000)], ())
            finally:
                os._exit(1)
        os.read(begun, 1)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        folder = BlockFolder(tmp_path, KEY, 5 * 10**5)
        folder.scan()
        assert not [path for path in folder.path.iterdir() if path.suffix != ".kv"], "what was begun stays"
        found = {int.from_bytes(one, "big") for one in folder.known}
        for number in found - seen if kill % 5 else found:
            assert read(folder, number, 20_000) == content(number, 20_000)
        assert sum(path.stat().st_size for path in folder.path.iterdir()) <= 5 * 10**5
        seen = found
        folder.close()
        os.close(begun)
        os.close(begins)
    assert seen


def test_folders_that_nobody_uses_go_by_age_and_by_bytes(tmp_path: Path) -> None:
    """Not those that an engine holds, nor what is no file of a block."""
    size, now = 1000 + HEADER_BYTES, time.time()
    folders = {name: BlockFolder(tmp_path, bytes([name]) * 32, 10**6) for name in range(1, 7)}
    for name, days in ((1, 5), (2, 40), (3, 4), (4, 50), (5, 60), (6, 3)):
        folders[name].write(digest(1), [content(1, 1000)], ())
        if name == 5:
            (folders[name].path / "notes").write_text("")
        for path in (*folders[name].path.iterdir(), folders[name].path):
            os.utime(path, (now - days * 86400, now - days * 86400))
    (tmp_path / "other").mkdir()
    (tmp_path / ("ab" * 32)).symlink_to(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in (1, 2, 3, 5, 6):
        folders[name].close()
    assert remove_unused(tmp_path / "link", 2 * size) == 3
    left = {name for name, folder in folders.items() if folder.path.exists()}
    assert left == {3, 4, 5, 6}, "the 2nd and 5th are old, the 1st is the oldest of the others; the 4th is in use"
    assert [path.name for path in folders[5].path.iterdir()] == ["notes"]
    assert read(folders[4], 1, 1000) == content(1, 1000)


def test_an_engine_that_starts_while_its_folder_is_removed_has_one(tmp_path: Path) -> None:
    key = bytes(31) + b"\1"
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            remove_unused(tmp_path, -1)
            time.sleep(1e-4)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(30):
            folder = BlockFolder(tmp_path, key, 10**6)
            assert folder.write(digest(number), [content(1, 100)], ())[0]
            assert read(folder, number, 100) == content(1, 100)
            folder.close()
    finally:
        stop.set()
        remover.join()
