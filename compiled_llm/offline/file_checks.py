"""The files of an offline run, looked at before anything starts: no two are the same, and those written can be."""

import itertools
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from compiled_llm.offline.process import naming

REPORT_FILES = ("report.html", "report.json", "trace.json")


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
    reports = {} if report is None else {f"{name} of --report": report / name for name in REPORT_FILES}
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
