"""Cores and memory as control groups grant them: trees of files as Linux shows them, of both versions."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from compiled_llm.system.resources import (
    core_parts,
    free_memory,
    granted_cores,
    on_cores,
    release_freed_memory,
    threads_of,
    total_memory,
)

CORES = len(os.sched_getaffinity(0))
V2 = ("cgroup2", "rw")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine(root: Path, groups: list[str], mounts: list[tuple[str, str, str, str]]) -> Path:
    """A tree with the groups of /proc/self/cgroup and mounts of (top, where, kind of file system, its options)."""
    write(root / "proc/self/cgroup", "\n".join(groups))
    lines = [f"31 23 0:2{i} {top} {where} rw,nosuid shared:9 - {kind} name {options}"
             for i, (top, where, kind, options) in enumerate(mounts)]  # fmt: skip
    write(root / "proc/self/mountinfo", "\n".join(["21 20 0:1 / / rw - ext4 /dev/vda rw", *lines]))
    for _, where, _, _ in mounts:
        (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return root


def use(group: Path, limit: str, used: int, droppable: int) -> None:
    write(group / "memory.max", limit)
    write(group / "memory.current", str(used))
    write(group / "memory.stat", f"anon 5\nactive_file 5\ninactive_file {droppable}")


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert granted_cores(tmp_path) == CORES
    assert total_memory(tmp_path) == psutil.virtual_memory().total
    assert 0 < free_memory(tmp_path) <= total_memory(tmp_path)


def test_this_machines_own_files_are_understood() -> None:
    assert 1 <= granted_cores() <= CORES
    assert 0 < free_memory() <= total_memory() <= psutil.virtual_memory().total


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


@pytest.mark.usefixtures("many_cores")
def test_the_least_quota_of_a_group_and_those_above_it_counts_rounded_up(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0::/pods/one/box"], [("/", "/sys/fs/cgroup", *V2)])
    top = root / "sys/fs/cgroup"
    write(top / "pods/one/box/cpu.max", "max 100000")
    assert granted_cores(root) == 64
    write(top / "pods/one/cpu.max", "250000 100000")
    assert granted_cores(root) == 3
    write(top / "pods/cpu.max", "50000 100000")
    assert granted_cores(root) == 1
    write(top / "other/cpu.max", "1000 100000")
    write(top / "pods/cpu.max", "6400000 100000")
    assert granted_cores(root) == 3, "groups beside do not count"


def test_affinity_counts_below_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, ["0::/"], [("/", "/sys/fs/cgroup", *V2)])
    write(root / "sys/fs/cgroup/cpu.max", "800000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert granted_cores(root) == 2


@pytest.mark.usefixtures("many_cores")
def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    mounts = [("/", "/cg/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct"), ("/", "/cg/memory", "cgroup", "rw,memory")]
    root = machine(tmp_path, ["7:memory:/a/b", "4:cpu,cpuacct:/a", "1:name=systemd:/x", "0::/"], mounts)
    for group, quota in (("a", "350000"), ("", "-1")):
        write(root / "cg/cpu,cpuacct" / group / "cpu.cfs_quota_us", quota)
        write(root / "cg/cpu,cpuacct" / group / "cpu.cfs_period_us", "100000")
    assert granted_cores(root) == 4
    for group, limit, used in (("a/b", 2**63 - 4096, 100), ("a", 1000, 700)):
        write(root / "cg/memory" / group / "memory.limit_in_bytes", str(limit))
        write(root / "cg/memory" / group / "memory.usage_in_bytes", str(used))
        write(root / "cg/memory" / group / "memory.stat", "inactive_file 1\ntotal_inactive_file 50")
    assert (total_memory(root), free_memory(root)) == (1000, 350)


def test_of_nested_limits_of_memory_the_tightest_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0::/outer/inner"], [("/", "/sys/fs/cgroup", *V2)])
    outer = root / "sys/fs/cgroup/outer"
    use(outer / "inner", "max", 70, 0)
    assert total_memory(root) == psutil.virtual_memory().total
    use(outer / "inner", "500", 100, 30)
    assert (total_memory(root), free_memory(root)) == (500, 430)
    use(outer, "600", 580, 10)  # processes beside take most of it
    assert (total_memory(root), free_memory(root)) == (500, 30)
    use(outer, "600", 700, 0)
    assert free_memory(root) == 0


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("name", ["/docker/abc", "/", "/../elsewhere", "/docker/abcdef"])
def test_a_container_that_sees_its_own_group_as_the_top(tmp_path: Path, name: str) -> None:
    """The mount is of one group, which the process is in, as the host or as the container calls it."""
    root = machine(tmp_path, [f"0::{name}"], [("/docker/abc", "/sys/fs/cgroup", *V2)])
    write(root / "sys/fs/cgroup/cpu.max", "150000 100000")
    use(root / "sys/fs/cgroup", "4096", 96, 0)
    assert (granted_cores(root), total_memory(root), free_memory(root)) == (2, 4096, 4000)


@pytest.mark.usefixtures("many_cores")
def test_a_group_below_the_one_that_is_mounted(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0::/docker/abc/child"], [("/docker/abc", "/sys/fs/c\\040g", *V2)])
    (root / "sys/fs/c g").mkdir(parents=True)
    write(root / "sys/fs/c g/child/cpu.max", "700000 100000")
    assert granted_cores(root) == 7


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("text", ["", "max", "abc 100000", "100000 0", "-1 100000"])
def test_a_file_that_says_nothing_limits_nothing(tmp_path: Path, text: str) -> None:
    root = machine(tmp_path, ["0::/"], [("/", "/sys/fs/cgroup", *V2)])
    write(root / "sys/fs/cgroup/cpu.max", text)
    assert granted_cores(root) == 64


def test_parts_of_the_cores_split_neither_a_core_nor_a_package_that_need_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert core_parts(3, tmp_path) == [[0, 1], [2, 3, 4], [5, 6, 7]], "nothing is known of them"
    for core in range(8):  # two packages of two cores with two threads each, as Linux numbers them
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        write(topology / "physical_package_id", str(core // 2 % 2))
        write(topology / "core_id", str(core % 2))
    assert core_parts(2, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert core_parts(4, tmp_path) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_processes_start_on_cores_and_this_one_keeps_its_own() -> None:
    before = os.sched_getaffinity(0)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    with on_cores([max(before)]):
        found = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"[{max(before)}]"
    with on_cores([]):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        *[("2", 2), (" 3 ", 3), ("8", 4), ("1,1", 1), ("2, 1", 2), ("8,2,1", 4)],
        *[(other, 4) for other in ("", "0", "-1", "x", ",", "2,", "2,x", "2.5", "\u00b2")],
    ],
)
def test_threads_are_those_that_openmp_reads(given: str, threads: int) -> None:
    assert threads_of(given, 4) == threads


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library is asked")
def test_freed_memory_goes_back() -> None:
    """Also what lies below something that is in use, which glibc keeps by itself."""
    many = [bytes(2000) for _ in range(20_000)]
    in_use = bytes(2000)
    before = psutil.Process().memory_info().rss
    del many
    freed = before - psutil.Process().memory_info().rss
    release_freed_memory()
    released = before - psutil.Process().memory_info().rss
    assert len(in_use) == 2000
    assert released > 30e6 > freed
