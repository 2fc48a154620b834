"""Files of rows, read as a stream: .jsonl, .txt and .parquet, each of the first two also as .gz and .zst.

A compressed file that is cut off or damaged is an ``OSError``, never a shorter file. At most one line, or one batch of
a Parquet file, is in memory at once, whatever the files hold.
"""

import codecs
import contextlib
import dataclasses
import gzip
import importlib
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from compiled_llm.offline.files import naming
from compiled_llm.offline.formats import row_of_object, row_of_text
from compiled_llm.offline.rows import Row

MOST_LINE_BYTES = 2**26
_BUFFER_BYTES = 2**20
_PARQUET_ROWS = 256  # of a batch
_KINDS = (".jsonl", ".txt", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
STDIN = "-"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """One file of the input, which can be read as far as a look at it tells.

    Attributes:
        name: as it was given; "-" is standard input, with lines of JSON.
        kind: ".jsonl", ".txt" or ".parquet".
        compression: ".gz", ".zst" or "".
        num_bytes: of the file as it lies there; 0 for standard input.
        modified: its time of modification, in ns.
    """

    name: str
    kind: str = ".jsonl"
    compression: str = ""
    num_bytes: int = 0
    modified: int = 0

    @classmethod
    def of(cls, name: str) -> "InputFile":
        """
        Raises:
            ValueError: the name has another suffix, a library for it is missing, or it is not a regular file: others
                may never end.
            OSError: it cannot be read.
        """
        if name == STDIN:
            return cls(name)
        path = Path(name)
        compression = path.suffix if path.suffix in _COMPRESSIONS else ""
        kind = path.with_suffix("").suffix if compression else path.suffix
        if kind not in _KINDS or (kind == ".parquet" and compression):
            raise ValueError(
                f"--input must end in .jsonl or .txt, each also with .gz or .zst, or in .parquet, or be -, given {name}"
            )
        if compression == ".zst":
            _library("zstandard", "zstd", name)
        if kind == ".parquet":
            _library("pyarrow.parquet", "parquet", name)
        with naming(f"--input {name}"):
            status = path.stat()
            if not path.is_file():
                raise ValueError(f"--input must be a regular file, given {name}")
            with open(path, "rb"):
                pass
        if status.st_size == 0 and (compression or kind == ".parquet"):
            raise ValueError(
                f"--input {name} has 0 bytes, and no {compression or kind} file has, also one without rows: it was not "
                "written to its end, so make it again"
            )
        return cls(name, kind, compression, status.st_size, status.st_mtime_ns)

    def has_changed(self) -> bool:
        """Whether it is another file than it was."""
        if self.name == STDIN:
            return False
        try:
            status = os.stat(self.name)
        except OSError:
            return True
        return (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.modified)


def _library(module: str, extra: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--input {name} needs the extra {extra!r}: pip install 'compiled-llm[{extra}]'") from error


class RowReader:
    """The rows of files, one after the other; it can be iterated over once.

    Iterating raises ``OSError`` where a file cannot be read any further, such as a compressed one that is cut off.

    Args:
        inputs: names of files, or "-".

    Attributes:
        files: all of them.
        num_rows: rows read so far.
    """

    def __init__(self, inputs: Sequence[str]) -> None:
        self.files = [InputFile.of(name) for name in inputs]
        if list(inputs).count(STDIN) > 1:
            raise ValueError("--input - may be given once")
        self.num_rows = 0
        self._bytes_before = 0  # of the files that were read whole
        self._open_file: BinaryIO | None = None
        self._is_read = False

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            rows = self._parquet_rows(file) if file.kind == ".parquet" else self._line_rows(file)
            for row in rows:
                self.num_rows += 1
                yield row
            self._bytes_before += file.num_bytes
        self._is_read = True

    def total_rows(self) -> tuple[int | None, bool]:
        """Rows of all files, and whether that is an estimate: from the share of the bytes that was read so far."""
        if self._is_read:
            return self.num_rows, False
        num_bytes = sum(file.num_bytes for file in self.files)
        read = self._bytes_before
        if self._open_file is not None:
            read += self._open_file.tell()
        if not read or not self.num_rows or any(file.name == STDIN for file in self.files):
            return None, True
        return max(self.num_rows, round(self.num_rows * num_bytes / read)), True

    def has_row(self, index: int) -> bool:
        """Whether there is a row of this number. Reads the files from their start, so far as that takes.

        ``OSError`` where a file cannot be read.
        """
        left = index + 1
        for file in self.files:
            if file.kind == ".parquet":
                left -= _num_table_rows(file)
                continue
            for _, line in self._lines(file):
                left -= _is_row(line)
                if left <= 0:
                    return True
        return left <= 0

    def check_unchanged(self) -> None:
        """``OSError`` if a file was changed since it was opened."""
        for file in self.files:
            if file.has_changed():
                raise OSError(f"--input {file.name} was changed while it was read: the results are of neither version")

    # -- Lines

    def _line_rows(self, file: InputFile) -> Iterator[Row]:
        short_name = "standard input" if file.name == STDIN else Path(file.name).name
        for number, line in self._lines(file):
            name = f"row {self.num_rows} ({short_name}, line {number})"
            row = _row_of_line(self.num_rows, name, line, file.kind)
            if row is not None:
                yield row

    def _lines(self, file: InputFile) -> Iterator[tuple[int, bytes | None]]:
        """Number and bytes of each line, without its newline; None: it is too long, and was passed over."""
        raw: BinaryIO = sys.stdin.buffer if file.name == STDIN else open(file.name, "rb", _BUFFER_BYTES)  # noqa: SIM115
        self._open_file = None if file.name == STDIN else raw
        try:
            stream = _decompressed(raw, file.compression)
            number = 0
            while line := stream.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):
                    _skip_line(stream)
                    yield number, None
                    continue
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield number, line.removesuffix(b"\n")
        except OSError as error:
            raise OSError(f"--input {file.name}: {error.strerror or error}") from error
        except (EOFError, zlib.error) as error:  # of gzip
            raise OSError(f"--input {file.name}: it cannot be decompressed: {error}") from error
        finally:
            self._open_file = None
            if file.name != STDIN:
                raw.close()

    # -- Parquet

    def _parquet_rows(self, file: InputFile) -> Iterator[Row]:
        short_name, number = Path(file.name).name, 0
        with _open_table(file) as content:
            for batch in content.iter_batches(batch_size=_PARQUET_ROWS):
                for values in table_rows(batch):
                    number += 1
                    name = f"row {self.num_rows} ({short_name}, row {number})"
                    if isinstance(values, ValueError):
                        yield Row(self.num_rows, name, error=str(values))
                    else:
                        yield row_of_object(self.num_rows, name, values)


def _is_row(line: bytes | None) -> bool:
    """Whether ``_row_of_line`` makes a row of it."""
    try:
        text = "too long" if line is None else line.decode()
    except UnicodeDecodeError:
        return True
    return bool(text) and not text.isspace()


def _row_of_line(index: int, name: str, line: bytes | None, kind: str) -> Row | None:
    """None: a blank line is no row."""
    if line is None:
        return Row(index, name, error=f"the line has more than {MOST_LINE_BYTES} bytes")
    line = line.removesuffix(b"\r")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        reason = f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        return Row(index, name, error=reason)
    if not text or text.isspace():
        return None
    return Row(index, name, {"prompt": text}) if kind == ".txt" else row_of_text(index, name, text)


def _skip_line(stream: BinaryIO) -> None:
    """Pass over the rest of a line."""
    while (rest := stream.readline(_BUFFER_BYTES)) and not rest.endswith(b"\n"):
        pass


# -- Compressed files


def _decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """The content of a compressed file, as a stream; ``raw`` itself where ``compression`` is ""."""
    if compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(_ZstdStream(raw), _BUFFER_BYTES) if compression == ".zst" else raw


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


# -- Tables


@contextlib.contextmanager
def _open_table(file: InputFile) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``. ``OSError`` if it cannot be read, also later."""
    parquet, pyarrow = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow")
    try:
        with parquet.ParquetFile(file.name) as content:
            yield content
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:  # the last one: a name of a column
        raise OSError(f"--input {file.name}: {error}") from error


def _num_table_rows(file: InputFile) -> int:
    with _open_table(file) as content:
        return content.metadata.num_rows


def table_rows(table: Any) -> Iterator[dict[str, Any] | ValueError]:
    """For each row its values by the names of the columns, without nulls; or why it cannot be read.

    Args:
        table: a ``pyarrow.Table`` or a ``RecordBatch`` of one.
    """
    try:
        rows = [_without_nulls(values) for values in table.to_pylist()]
    except Exception:  # whatever one cell raises: a date that Python has not, text that is not UTF-8
        yield from (_row_by_cells(table, index) for index in range(table.num_rows))
    else:
        yield from rows


def _without_nulls(value: Any) -> Any:
    """Objects without the keys whose value is null: columns that a row has no value of."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _row_by_cells(table: Any, index: int) -> dict[str, Any] | ValueError:
    values = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        try:
            values[name] = _without_nulls(column[index].as_py())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return ValueError(
                f"{name:.100} must be a value of JSON, and its {column.type} cannot be read as one: {reason:.200}"
            )
    return _without_nulls(values)
