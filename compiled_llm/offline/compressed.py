"""Compressed files as streams of bytes. One that is cut off, or damaged, is an ``OSError``, never a shorter file."""

import gzip
import importlib
import io
import zlib
from typing import Any, BinaryIO

COMPRESSIONS = (".gz", ".zst")
_BUFFER_BYTES = 2**20


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """``raw`` itself where ``compression`` is ""; ".zst" needs the library zstandard."""
    if compression == ".gz":
        return io.BufferedReader(_GzipStream(raw), _BUFFER_BYTES)
    if compression == ".zst":
        return io.BufferedReader(_ZstdStream(raw), _BUFFER_BYTES)
    return raw


class _GzipStream(io.RawIOBase):
    def __init__(self, raw: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._file.readinto(buffer)
        except (EOFError, zlib.error) as error:
            raise OSError(f"it cannot be decompressed: {error}") from error


class _ZstdStream(io.RawIOBase):
    """Frame after frame. The library's own stream takes a frame that is cut off for the end of the file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._library = importlib.import_module("zstandard")
        self._raw = raw
        self._frame: Any = None  # that is being read
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(_BUFFER_BYTES // 8)
            if not self._compressed:
                if self._frame is not None:
                    raise OSError("it cannot be decompressed: it is cut off")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._content = memoryview(self._frame.decompress(self._compressed))
            except self._library.ZstdError as error:
                raise OSError(f"it cannot be decompressed: {error}") from error
            self._compressed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count
