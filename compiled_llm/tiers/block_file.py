"""A file of one KV block: a strict header, then the block's bytes as they are in memory.

    bytes        field
    8            magic and version: b"CLLMKV\\0" and 1
    32           key of the folder: model, layout, kernels and all else that bytes depend on besides tokens
    32           digest of the block: the adapter, all tokens before it and its own
    4            bit n: the keys of window n are there too (little endian, as all numbers)
    8            bytes of the block
    32           SHA-256 of the block's bytes
    32           SHA-256 of all fields before

A file counts if every field is what the reader expects, if it has not a byte more or less, and if both digests are
right. Files are written under another name, synchronised and renamed, so under its own name a file is whole. Whoever
can write to the folder could write another block: see ``folder.py``.
"""

import fcntl
import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress

_MAGIC = b"CLLMKV\0\1"
_FIELDS = struct.Struct("<8s32s32sIQ32s")
HEADER_BYTES = _FIELDS.size + hashlib.sha256().digest_size
SUFFIX, _PARTIAL = ".kv", ".partial"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BadFileError(Exception):
    """A file that cannot be used. ``is_own``: it belongs to this user, who may remove it."""

    def __init__(self, reason: str, *, is_own: bool = True) -> None:
        super().__init__(reason)
        self.is_own = is_own


def write_file(folder: int, key: bytes, digest: bytes, parts: Sequence[memoryview], windows: Sequence[int] = ()) -> int:
    """Write a block's ``parts``, one after the other. Returns the file's bytes.

    Args:
        folder: its descriptor.
        windows: numbers of those whose keys are among the parts.

    Raises:
        OSError: it cannot be written. No file is left then, or one that ``remove_partial`` removes.
    """
    content = hashlib.sha256()
    for piece in parts:
        content.update(piece)
    size = sum(map(len, parts))
    fields = _FIELDS.pack(_MAGIC, key, digest, sum(1 << number for number in windows), size, content.digest())
    partial = f".{digest.hex()}.{secrets.token_hex(8)}{_PARTIAL}"
    descriptor = os.open(partial, _WRITE, 0o600, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who could lock it would take its writer for dead
        for part in (memoryview(fields + hashlib.sha256(fields).digest()), *parts):
            _write_all(descriptor, part)
        os.fsync(descriptor)
        os.rename(partial, name_of(digest), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    return HEADER_BYTES + size


def read_file(
    folder: int, key: bytes, digest: bytes, own: memoryview, of_windows: Sequence[memoryview] = ()
) -> tuple[int, ...]:
    """Read a block: what layers without a window keep into ``own``, and what others do into those of its windows.

    Returns the numbers of these. The memory of a file that turns out to be bad holds anything.

    Raises:
        BadFileError: it is not what it should be.
        OSError: there is none, or it cannot be read.
    """
    descriptor = os.open(name_of(digest), _READ, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise BadFileError("it belongs to another user, or is no file", is_own=False)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadFileError("others may write to it")
        header = os.read(descriptor, HEADER_BYTES)
        if len(header) != HEADER_BYTES or hashlib.sha256(header[: _FIELDS.size]).digest() != header[_FIELDS.size :]:
            raise BadFileError("its header is damaged")
        magic, own_key, own_digest, mask, size, checksum = _FIELDS.unpack(header[: _FIELDS.size])
        windows = tuple(number for number in range(32) if mask >> number & 1)
        if (magic, own_key, own_digest) != (_MAGIC, key, digest) or mask >> len(of_windows):
            raise BadFileError("it is a file of something else")
        parts = [own, *(of_windows[number] for number in windows)]
        if size != sum(map(len, parts)) or status.st_size != HEADER_BYTES + size:
            raise BadFileError("it has another size")
        content = hashlib.sha256()
        for part in parts:
            _read_all(descriptor, part)
            content.update(part)
        if content.digest() != checksum:
            raise BadFileError("its content is damaged")
        return windows
    finally:
        os.close(descriptor)


def name_of(digest: bytes) -> str:
    return digest.hex() + SUFFIX


def digest_of(name: str) -> bytes | None:
    """Of the block whose file has this name; None: it is no name of one."""
    with suppress(ValueError):
        digest = bytes.fromhex(name.removesuffix(SUFFIX))
        return digest if name == name_of(digest) and len(digest) == 32 else None
    return None


def remove_partial(folder: int, name: str) -> bool:
    """Remove the file ``name`` if it was begun and its writer is gone. False: it is something else."""
    if not (name.startswith(".") and name.endswith(_PARTIAL)):
        return False
    with suppress(OSError):
        descriptor = os.open(name, _READ, dir_fd=folder)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
        finally:
            os.close(descriptor)
    return True


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, part: memoryview) -> None:
    while part:
        count = os.readv(descriptor, [part])
        if not count:
            raise BadFileError("it ends too early")
        part = part[count:]
