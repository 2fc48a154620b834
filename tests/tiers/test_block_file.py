"""Files of blocks: what is written comes back, and nothing else counts."""

import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.tiers.block_file import (
    HEADER_BYTES,
    SUFFIX,
    BadFileError,
    digest_of,
    name_of,
    read_file,
    remove_partial,
    write_file,
)

KEY, DIGEST, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
OWN, WINDOW = random.Random(0).randbytes(1000), random.Random(1).randbytes(300)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read(folder: int, key: bytes = KEY, digest: bytes = DIGEST, windows: int = 2) -> tuple[tuple[int, ...], bytes]:
    own, others = bytearray(1000), [bytearray(300) for _ in range(windows)]
    found = read_file(folder, key, digest, memoryview(own), [memoryview(other) for other in others])
    return found, bytes(own) + b"".join(bytes(others[number]) for number in found)


def test_what_is_written_is_read(folder: int, tmp_path: Path) -> None:
    assert write_file(folder, KEY, DIGEST, [memoryview(OWN)]) == HEADER_BYTES + 1000
    assert read(folder) == ((), OWN)
    write_file(folder, KEY, DIGEST, [memoryview(OWN), memoryview(WINDOW)], windows=[1])
    assert read(folder) == ((1,), OWN + WINDOW)
    (path,) = tmp_path.iterdir()
    assert path.name == name_of(DIGEST)
    assert digest_of(path.name) == DIGEST
    assert path.stat().st_mode & 0o777 == 0o600
    assert digest_of(path.name.upper()) is digest_of("x" + SUFFIX) is None


def test_every_flipped_bit_of_the_header_and_any_of_the_content_is_noticed(folder: int, tmp_path: Path) -> None:
    write_file(folder, KEY, DIGEST, [memoryview(OWN)])
    path, rng = tmp_path / name_of(DIGEST), random.Random(2)
    content = path.read_bytes()
    places = [*range(8 * HEADER_BYTES), *(rng.randrange(8 * len(content)) for _ in range(200))]
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(BadFileError):
            read(folder)
    path.write_bytes(content)
    assert read(folder) == ((), OWN)


def test_other_files_are_refused(folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(folder, KEY, DIGEST, [memoryview(OWN)], windows=[])
    path = tmp_path / name_of(DIGEST)
    content = path.read_bytes()
    with pytest.raises(BadFileError, match="something else"):
        read(folder, key=OTHER)
    for size in (0, HEADER_BYTES - 1, HEADER_BYTES, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(BadFileError):
            read(folder)
    path.write_bytes(content + b"x")
    with pytest.raises(BadFileError, match="size"):
        read(folder)
    path.write_bytes(content)
    path.rename(tmp_path / name_of(OTHER))
    with pytest.raises(BadFileError, match="something else"):
        read(folder, digest=OTHER)
    path.symlink_to(name_of(OTHER))
    with pytest.raises(OSError, match="symbolic"):
        read(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadFileError, match="no file"):
        read(folder)
    path.unlink()
    write_file(folder, KEY, DIGEST, [memoryview(OWN)])
    path.chmod(0o620)
    with pytest.raises(BadFileError, match="others may write"):
        read(folder)
    path.chmod(0o600)
    write_file(folder, KEY, DIGEST, [memoryview(OWN), memoryview(WINDOW)], windows=[1])
    with pytest.raises(BadFileError, match="something else"):
        read(folder, windows=1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BadFileError, match="another user") as error:
        read(folder)
    assert not error.value.is_own


def test_what_a_dead_writer_leaves_is_removed_and_what_a_live_one_has_begun_is_not(folder: int, tmp_path: Path) -> None:
    alive, dead, other = (tmp_path / name for name in (".a.partial", ".b.partial", "c"))
    for path in (alive, dead, other):
        path.write_bytes(b"x")
    descriptor = os.open(alive, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert [remove_partial(folder, path.name) for path in (alive, dead, other)] == [True, True, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.partial", "c"]
    os.close(descriptor)
