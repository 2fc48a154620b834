"""Reading files of a model directory: regular files alone, and no more bytes than allowed.

A model directory is data from anywhere. A FIFO would be waited for without end, a device read without end, and a large
file would fill the memory. So every file of a model is opened here.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_CONFIG_BYTES = 1 << 20  # config.json and generation_config.json
MAX_JSON_BYTES = 16 << 20  # other JSON files, such as an index of 100,000 tensors
MAX_TOKENIZER_BYTES = 48 << 20  # the largest that are published have 34 MB


def open_file(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a file of a model directory for reading. Symbolic links are followed, as the hub's cache has them.

    Raises:
        ValueError: it is missing, cannot be read, is no regular file, or is larger than ``max_bytes``.
    """
    try:
        # Without O_NONBLOCK, to open a FIFO would be to wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model directory holds config.json and *.safetensors") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ValueError(f"{path}: cannot be opened: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: must be a regular file, found {_kind(status.st_mode)}")
        if max_bytes is not None and status.st_size > max_bytes:
            raise ValueError(f"{path}: must have at most {max_bytes} bytes, found {status.st_size}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _plain(parsed: dict[str, Any]) -> Any:
    """A number that JSON lacks, as transformers writes it: ``{"__float__": "Infinity"}``."""
    return float(str(parsed["__float__"])) if parsed.keys() == {"__float__"} else parsed


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Parse a JSON object; ``ValueError`` names the file if it is missing, unreadable, too large or something else."""
    try:
        with open_file(path, max_bytes) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: not readable: {error}") from error
    if len(content) > max_bytes:  # files that say they are empty, as those of /proc do
        raise ValueError(f"{path}: must have at most {max_bytes} bytes, found more")
    try:
        parsed = json.loads(content.decode(), object_hook=_plain)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: must hold a JSON object, found {type(parsed).__name__}")
    return parsed


def read_optional_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The same, ``{}`` where there is no such name; a link into nowhere is an error."""
    return read_json(path, max_bytes) if os.path.lexists(path) else {}


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
