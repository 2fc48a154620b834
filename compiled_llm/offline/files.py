"""The files that an offline run writes: checked before anything starts, written whole, named in errors."""

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_REPORT_FILES = ("report.html", "report.json", "trace.json")


def manifest_path(output: Path) -> Path:
    """The file beside an output that says what decides its rows (manifest.py)."""
    return output.with_name(f"{output.name}.manifest.json")


def check_files(inputs: Sequence[str], written: Mapping[str, Path | None], report: Path | None) -> None:
    """Creates the directory of ``report``.

    Args:
        inputs: of ``--input``; "-" is no file.
        written: flag -> the file that it names, or None.

    Raises:
        ValueError: two names are of one file, or what is to be written is no regular file, or ``report`` no directory.
        OSError: a file cannot be written.
    """
    given = [("--input", Path(name)) for name in inputs if name != "-"]
    reports = {} if report is None else {f"{name} of --report": report / name for name in _REPORT_FILES}
    targets = [(flag, path) for flag, path in {**written, "--report": report, **reports}.items() if path is not None]
    pairs = itertools.chain(itertools.product(given, targets), itertools.combinations(targets, 2))
    for (flag, path), (other_flag, other_path) in pairs:
        if is_same_file(path, other_path):
            raise ValueError(f"{flag} and {other_flag} must be different files, given {path} and {other_path}")
    if report is not None:
        with naming(f"--report {report}"):
            try:
                report.mkdir(parents=True, exist_ok=True)
            except FileExistsError:
                raise ValueError(f"--report must be a directory, given {report}") from None
    for flag, path in reports.items():
        check_writable(flag, path)


def is_same_file(path: Path, other: Path) -> bool:
    """Whether two names, links followed, are of one file; it need not be there."""
    both_exist = os.path.exists(path) and os.path.exists(other)
    return os.path.samefile(path, other) if both_exist else os.path.realpath(path) == os.path.realpath(other)


def check_writable(flag: str, path: Path) -> None:
    """``ValueError`` or ``OSError`` unless a regular file can be written there. A file that is there is kept."""
    target = os.path.realpath(path)
    with naming(f"{flag} {path}"):
        try:
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.unlink(target)
        except FileExistsError:
            descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
            is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            os.close(descriptor)
            if not is_regular:
                raise ValueError(f"{flag} must be a regular file, given {path}") from None


@contextlib.contextmanager
def naming(file: str) -> Iterator[None]:
    """An ``OSError`` in it gets a message that names ``file``."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{file}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(target: Path, suffix: str, mode: int) -> Iterator[int]:
    """A new file, which takes the place of ``target`` when the block has ended and all of it is on the disk.

    So at any moment one of the two has the name, and for a while the disk holds both. The new one is called
    NAME.0123456789abcdef.SUFFIX first, with other digits each time: a file that somebody else put beside an output is
    never overwritten, nor taken for what a killed run left, which is removed.

    Args:
        target: no other process is about to replace it: the run has the lock of its output.
        suffix: says what the file is for.
        mode: its permissions, from which the process's mask takes some away.

    Returns:
        The descriptor of the new file, which stays open. After an error in the block it is closed, and the file gone.

    Raises:
        OSError: it cannot be created, written or renamed.
    """
    left = re.compile(rf"{re.escape(target.name)}\.[0-9a-f]{{16}}\.{re.escape(suffix)}")
    for name in os.listdir(target.parent):
        if left.fullmatch(name):
            with contextlib.suppress(OSError):  # it costs room on the disk, and nothing else
                os.unlink(target.parent / name)
    new = target.with_name(f"{target.name}.{secrets.token_hex(8)}.{suffix}")
    descriptor = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, mode)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(new, target)
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        raise


def sync_directory(directory: Path) -> None:
    """Let the names of files in a directory survive that the machine goes down."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot: they keep names by themselves
            raise
    finally:
        os.close(descriptor)
