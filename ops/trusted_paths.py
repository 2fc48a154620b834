"""Checks that nobody but this user and root can have put the code in a place that it is loaded from.

Whoever can write to a directory, or owns one of those above it, decides what is in it. So all directories of the path
are checked, from the root on, and everything below the path. Links are followed one by one, on opened directories, and
their targets are checked. Once a place is found to be trusted, others can no longer exchange any part of its path.
"""

import contextlib
import os
import stat
from pathlib import Path

_MAX_LINKS = 40  # as Linux
# Opens also a directory that this user may pass but not list; without O_PATH it must be listable.
_OPEN = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE, _OTHERS_ENTER = stat.S_IWGRP | stat.S_IWOTH, stat.S_IXGRP | stat.S_IXOTH


def make_directory(path: Path) -> None:
    """Create ``path`` and what is missing above it, with mode 0700."""
    for directory in (*reversed(path.parents), path):
        if not directory.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)


def check_trusted(
    path: Path, variable: str = "COMPILED_LLM_CACHE", refusal: str = "code is not loaded", below: bool = True
) -> None:
    """Refuse a file or directory if others could have put code there, which this process would run.

    Each directory on the way must belong to this user, to root or to the owner of ``/``, and nobody else may write to
    it unless it is sticky, as ``/tmp`` is. ``path`` and everything below it must be so too, but may not be
    sticky. In a directory that nobody else may enter only the owners are checked: a umask may let groups
    write to what torch makes there.

    Args:
        path: exists.
        variable: the environment variable or argument that names another place, for the message.
        refusal: how the message begins: what is not done with the place.
        below: also what is in a directory. A file that is read alone is checked by its own path, however many lie
            beside it.

    Raises:
        ValueError: others could have. The message names the place, what is wrong, and the remedy.
        OSError: ``path`` cannot be looked at.
    """
    _Check(path, variable, refusal, below).run()


def check_trusted_directory(path: Path, what: str, name: str) -> None:
    """``check_trusted`` of a directory and all above it, whatever is in it, which only this user may own.

    Args:
        what: is read from there; ``name``: the argument that names another place: both for the message.
    """
    _Check(path, name, f"{what} is not loaded").run_alone()


class _Check:
    def __init__(self, path: Path, variable: str, refusal: str, below: bool = False) -> None:
        self._path, self._variable, self._refusal, self._below = path, variable, refusal, below
        self._owners = {os.geteuid(), 0, os.stat("/").st_uid}  # in a user namespace root's number is another one
        self._seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        self._check(Path.cwd() / self._path)

    def run_alone(self) -> None:
        descriptor, place = self._open(Path.cwd() / self._path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISDIR(status.st_mode):
                self._refuse(f"{place} is no directory")
            if status.st_uid != os.geteuid():
                self._refuse(f"{place} belongs to user {status.st_uid}, not to you (user {os.geteuid()})")
            self._check_mode(status, place, f"chmod go-w {place}")
        finally:
            os.close(descriptor)

    def _check(self, path: Path) -> None:
        """``path``: absolute."""
        descriptor, place = self._open(path)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) in self._seen:
                return
            self._seen.add((status.st_dev, status.st_ino))
            if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
                self._refuse(f"{place} is neither a file nor a directory")
            self._check_mode(status, place, f"chmod -R go-w {place}")
            if self._below and stat.S_ISDIR(status.st_mode):
                self._check_below(descriptor, place)
        finally:
            os.close(descriptor)

    def _open(self, path: Path) -> tuple[int, Path]:
        """A descriptor of ``path``, and its place without links. Checks the owners, and the modes on the way."""
        names = list(reversed(path.parts[1:]))
        place, num_links = Path("/"), 0
        descriptor = os.open("/", _OPEN)
        try:
            while names:
                name = names.pop()
                status = os.fstat(descriptor)
                if not status.st_mode & stat.S_ISVTX:
                    self._check_mode(status, place, f"chmod go-w {place}")
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                self._check_owner(status, place / name)
                if not stat.S_ISLNK(status.st_mode):
                    above, descriptor = descriptor, os.open(name, _OPEN, dir_fd=descriptor)
                    os.close(above)
                    place = place.parent if name == ".." else place / name
                    self._check_owner(os.fstat(descriptor), place)
                    continue
                num_links += 1
                if num_links > _MAX_LINKS:
                    self._refuse(f"{place / name} is one of more than {_MAX_LINKS} links")
                target = Path(os.readlink(name, dir_fd=descriptor))
                if target.is_absolute():
                    os.close(descriptor)
                    descriptor, place = os.open("/", _OPEN), Path("/")
                names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, place

    def _check_below(self, descriptor: int, place: Path) -> None:
        private: dict[str, bool] = {}  # whether others cannot get into a directory
        for directory, directories, files, opened in os.fwalk(".", dir_fd=descriptor):
            from_above = private.get(os.path.dirname(directory), False)
            private[directory] = from_above or not os.fstat(opened).st_mode & _OTHERS_ENTER
            for name in (*directories, *files):
                with contextlib.suppress(FileNotFoundError):  # others of this user's processes come and go
                    status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                    is_safe = private[directory] or not status.st_mode & _OTHERS_WRITE
                    if is_safe and status.st_uid in self._owners and not stat.S_ISLNK(status.st_mode):
                        continue  # as thousands are: without the time that it takes to write out where this one lies
                    here = place / directory / name
                    self._check_owner(status, here)
                    if stat.S_ISLNK(status.st_mode):
                        self._check(here)
                    elif not private[directory]:
                        self._check_mode(status, here, f"chmod -R go-w {place}")

    def _check_owner(self, status: os.stat_result, place: Path) -> None:
        if status.st_uid not in self._owners:
            self._refuse(
                f"{place} belongs to user {status.st_uid}, not to you (user {os.geteuid()}) or root. Delete it if it "
                "should not be there"
            )

    def _check_mode(self, status: os.stat_result, place: Path, remedy: str) -> None:
        if status.st_mode & _OTHERS_WRITE:
            self._refuse(
                f"others than its owner may write to {place} (mode {stat.S_IMODE(status.st_mode):o}). If nobody did, "
                f"{remedy}"
            )

    def _refuse(self, reason: str) -> None:
        raise ValueError(
            f"{self._refusal} from {self._path}: {reason}, or set {self._variable} to a directory of your own"
        )
