"""Compiling while the engine serves: what is on disk is loaded, the rest compiled, and a close ends it."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.compiling import build_processes
from compiled_llm.compiling.background import BackgroundBuilds, Finished
from compiled_llm.compiling.build_processes import BuildProcesses, Built, Job
from compiled_llm.compiling.build_worker import _compile
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from tests.compiling.test_parallel import job, scaled_sine


class SameProcess:
    """Compiles as another process would, in this one. A job called "long" takes until it is ended."""

    all: list["SameProcess"]

    def __init__(self, target: None, niceness: int) -> None:
        self.niceness, self.started, self._ended = niceness, 0.0, threading.Event()
        self.all.append(self)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def build(self, job: Job, settings: dict[str, Any]) -> Built:
        if job.name == "long":
            self._ended.wait(30)
            return Built(b"", {}, "ended")
        return _compile(job, settings, None)

    def end(self) -> None:
        self._ended.set()


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SameProcess, "all", [], raising=False)
    monkeypatch.setattr(build_processes, "BuildProcess", SameProcess)


def finished(cache: CompileCache, jobs: list[Job]) -> list[Finished]:
    builds = BackgroundBuilds(cache, jobs, 1, BuildProcesses(niceness=7))
    end = time.monotonic() + 60
    while len(builds.finished) < len(jobs) and time.monotonic() < end:
        time.sleep(0.01)
    return list(builds.finished)


def test_nothing_is_loaded_before_the_head_start_has_ended(tmp_path: Path) -> None:
    sine, cache = job("sine", torch.rand(2), torch.zeros(2)), CompileCache(tmp_path, {})
    finished(cache, [sine])
    builds = BackgroundBuilds(cache, [sine], 1, BuildProcesses(), head_start=60.0)
    time.sleep(0.2)
    assert not builds.finished
    builds.begin()
    end = time.monotonic() + 30
    while not builds.finished and time.monotonic() < end:
        time.sleep(0.01)
    assert [one.cache for one in builds.finished] == ["hit"]

    builds, started = BackgroundBuilds(cache, [sine], 1, BuildProcesses(), head_start=60.0), time.monotonic()
    builds.close()
    assert time.monotonic() - started < 30
    assert not builds.finished


def test_what_is_on_disk_is_loaded_and_the_rest_compiled_first_come_first_served(tmp_path: Path) -> None:
    sine, other = job("sine", torch.rand(2), torch.zeros(2)), job("other", torch.rand(4), torch.zeros(4))
    cache = CompileCache(tmp_path, {})
    (first,) = finished(cache, [sine])
    assert (first.cache, first.reason, first.error) == ("miss", "nothing of that name is stored", "")
    assert [process.niceness for process in SameProcess.all] == [7]

    found = finished(cache, [other, sine])
    assert [(one.job.name, one.cache) for one in found] == [("sine", "hit"), ("other", "miss")]
    function = CompiledFunction(scaled_sine, "sine", torch.device("cpu"), enforce_eager=False, is_awaited=False)
    function.warm_up(lambda: sine.args)
    assert function.is_pending
    assert function.report().cache == "pending"
    x, out = torch.rand(2), torch.zeros(2)
    function(x, out)
    torch.testing.assert_close(out, x.sin() * 3)
    function.take_over(found[0], 1.5)
    assert not function.is_pending
    report = function.report()
    assert (report.cache, report.graphs, report.recompiles, report.took_over) == ("hit", 1, 0, 1.5)
    function(x, out.zero_())
    torch.testing.assert_close(out, x.sin() * 3)
    with pytest.raises(RuntimeError, match="sine would have to be compiled again"):
        function(torch.rand(3), torch.zeros(3))


def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    (failed,) = finished(CompileCache(tmp_path, {}), [job("fails", torch.ones(1))])
    assert failed.call is None
    assert "scaled_sine" in failed.error or "missing" in failed.error


@pytest.mark.parametrize("is_dropped", [False, True])
def test_closing_ends_the_job_at_work_and_starts_no_other(tmp_path: Path, is_dropped: bool) -> None:
    jobs = [job("long", torch.rand(2), torch.zeros(2)), job("sine", torch.rand(2), torch.zeros(2))]
    builds = BackgroundBuilds(CompileCache(tmp_path, {}), jobs, 1, BuildProcesses())
    end = time.monotonic() + 60
    while not SameProcess.all and time.monotonic() < end:
        time.sleep(0.01)
    queue = builds.finished
    if is_dropped:
        del builds
    else:
        builds.close()
    while not queue and time.monotonic() < end:
        time.sleep(0.01)
    assert [(one.job.name, one.error) for one in queue] == [("long", "ended")]
    assert len(SameProcess.all) == 1
    assert SameProcess.all[0].has_ended
    assert not list(tmp_path.glob("*.graph"))


def test_of_two_engines_one_compiles_and_the_other_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, go_on, num_builds = SameProcess.build, threading.Event(), 0

    def slowly(self: SameProcess, job: Job, settings: dict[str, Any]) -> Built:
        nonlocal num_builds
        num_builds += 1
        go_on.wait(30)
        return build(self, job, settings)

    monkeypatch.setattr(SameProcess, "build", slowly)
    jobs = [job("sine", torch.rand(2), torch.zeros(2))]
    first, end = BackgroundBuilds(CompileCache(tmp_path, {}), jobs, 1, BuildProcesses()), time.monotonic() + 60
    while num_builds < 1 and time.monotonic() < end:
        time.sleep(0.01)
    second, third = (BackgroundBuilds(CompileCache(tmp_path, {}), jobs, 1, BuildProcesses()) for _ in range(2))
    time.sleep(0.2)
    third.close()  # which does not wait for what another one compiles
    assert not go_on.is_set()
    go_on.set()
    while not (first.finished and second.finished) and time.monotonic() < end:
        time.sleep(0.01)
    found = sorted([*first.finished, *second.finished], key=lambda one: one.cache)
    assert [(one.cache, one.reason, one.error) for one in found] == [
        ("hit", "", ""),
        ("miss", "nothing of that name is stored", ""),
    ]
    assert num_builds == 1


def test_a_close_waits_for_a_thread_that_is_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is within torch when the interpreter ends would end the process by a signal."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def find(self: CompileCache, key: Any) -> str:
        begun.set()
        go_on.wait(30)
        ended.set()
        return "nothing of that name is stored"

    monkeypatch.setattr(CompileCache, "find", find)
    builds = BackgroundBuilds(
        CompileCache(tmp_path, {}), [job("sine", torch.rand(2), torch.zeros(2))], 1, BuildProcesses()
    )
    assert begun.wait(30)
    threading.Timer(0.1, go_on.set).start()
    builds.close()
    assert ended.is_set()
