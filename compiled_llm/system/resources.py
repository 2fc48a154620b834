"""Cores and memory that this process may use: the machine's, or what a container and its control groups grant of them.

Neither Python nor psutil knows control groups, of which Linux has two versions, even side by side: cgroups(7). A
process is in one group of each hierarchy, and the limits of all groups above it hold as well. Every function takes the
directory that stands for ``/``, for tests.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")


def granted_cores(root: Path = _ROOT) -> int:
    """Cores that this process may keep busy: as its affinity says, or its groups' quota of time, rounded up."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))]))


def core_parts(number_of: int, root: Path = _ROOT) -> list[list[int]]:
    """The cores of this process's affinity in so many parts, none more than one larger than another.

    Neighbours are together: threads of one core first, then cores of one package.
    """

    def place(core: int) -> tuple[int, ...]:
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        return *(int(_read(topology / name) or 0) for name in ("physical_package_id", "core_id")), core

    cores = sorted(os.sched_getaffinity(0), key=place)
    ends = [len(cores) * number // number_of for number in range(number_of + 1)]
    return [cores[start:end] for start, end in itertools.pairwise(ends)]


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that this thread starts within it use these cores alone; any that it may use, if none are given."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def threads_of(given: str, most: int) -> int:
    """Threads for a process that is to have ``most`` at most.

    Args:
        given: OMP_NUM_THREADS: a number, or a list with a number for each level of nested parallel regions. Anything
            else is as if it were not set, as OpenMP takes it.
    """
    levels = given.split(",")
    is_valid = all(level.strip().isascii() and level.strip().isdigit() and int(level) > 0 for level in levels)
    return min(most, int(levels[0])) if is_valid else most


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may use, together with others: the machine's or its groups'."""
    return min([psutil.virtual_memory().total, *(limit.bytes for limit in _memory_limits(root))])


def free_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may still take: of the machine's and of what is left of its groups' limits."""
    left = (limit.bytes - limit.used for limit in _memory_limits(root))
    return max(0, min([psutil.virtual_memory().available, *left]))


def release_freed_memory() -> None:
    """Give the system back what this process has freed, where the C library (glibc) can: it keeps most of it else.

    Takes some 0.1 ms for each MiB that goes back.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@dataclasses.dataclass(frozen=True)
class _MemoryLimit:
    """The limit of one group. ``used``: bytes, without the pages of files that Linux drops when it needs memory."""

    bytes: int
    used: int


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time, of each group that limits it."""
    for group in _groups(root, "cpu"):
        found = _read(group / "cpu.max") or _read(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        if found and (match := re.fullmatch(r"(\d+)\s+([1-9]\d*)", found)):  # not "max", nor -1
            yield int(match[1]) / int(match[2])


def _memory_limits(root: Path) -> Iterator[_MemoryLimit]:
    for group in _groups(root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            found = re.fullmatch(r"(\d+)\s+(\d+)", _read(group / limit, group / usage) or "")
            if found:
                statistics = _read(group / "memory.stat") or ""
                # Version 1 counts the groups below a group in fields of their own.
                files = re.findall(r"^(total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
                droppable = max((int(count) for _, count in files), default=0)
                yield _MemoryLimit(int(found[1]), int(found[2]) - droppable)


def memory_groups(root: Path = _ROOT) -> list[Path]:
    """Directories of the control groups that count this process's memory, from its own upwards."""
    return list(_groups(root, "memory"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the groups that ``controller`` counts this process in, from its own upwards, of both versions."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        # 36 35 98:0 /the/top /where/it/is rw,noatime master:1 - cgroup device rw,memory
        fields, _, kind = line.partition(" - ")
        file_system, _, options = (*kind.split(), "", "", "")[:3]
        is_v2 = file_system == "cgroup2"
        if not is_v2 and (file_system != "cgroup" or controller not in options.split(",")):
            continue
        top, mount = (_unescaped(field) for field in fields.split()[3:5])
        name, directory = PurePosixPath(_group_name(root, "" if is_v2 else controller)), root / mount.lstrip("/")
        below = name.relative_to(top) if name.is_relative_to(top) else PurePosixPath()
        if ".." in below.parts or not (directory / below).is_dir():
            below = PurePosixPath()  # the name is as another namespace sees it: what is mounted is all there is
        yield from (directory / path for path in (below, *below.parents))


def _group_name(root: Path, controller: str) -> str:
    """This process's group in the hierarchy of a controller of version 1, or, for "", in that of version 2."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, name = line.split(":", 2)  # 4:cpu,cpuacct:/the/group
        if controller in controllers.split(",") and bool(controller) == bool(controllers):
            return name
    return "/"


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _read(*paths: Path) -> str | None:
    """The texts of the files, with a blank between them; None if one is not there."""
    try:
        return " ".join(path.read_text().strip() for path in paths)
    except (OSError, UnicodeDecodeError):
        return None
