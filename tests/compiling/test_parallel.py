"""Compiling in other processes: the same result as here, one message for what fails, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm.compiling import build_worker, parallel
from compiled_llm.compiling.build_processes import BuildProcesses, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.keys import code_settings
from compiled_llm.compiling.parallel import build_missing, useful_workers
from compiled_llm.system.progress import StartProgress


def scaled_sine(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin() * 3)


def make_scaled_sine() -> Callable:
    return scaled_sine


def job(name: str, *args: Tensor) -> Job:
    return Job(name, make_scaled_sine, args, torch.get_num_threads(), weight=3.0, depends={})


def test_another_process_compiles_what_this_one_then_finds(tmp_path: Path) -> None:
    """What fails there is warned about and left to this process."""
    built, fails = job("sine", torch.rand(2), torch.zeros(2)), job("fails", torch.ones(1))
    cache = CompileCache(tmp_path, {})
    with pytest.warns(UserWarning, match="fails could not be compiled beside others"):
        build_missing(cache, [fails, built], num_workers=1, progress=StartProgress())
    assert cache.built.keys() == {"sine"}
    assert isinstance(cache.find(cache.key_of("fails", scaled_sine, fails.args, {})), str)
    function = CompiledFunction(scaled_sine, "sine", torch.device("cpu"), enforce_eager=False, cache=cache)
    function.warm_up(lambda: built.args)
    report = function.report()
    assert (report.cache, report.reason, report.graphs) == ("miss", "nothing of that name is stored", 1)
    assert report.compile_seconds > cache.built["sine"][1]
    x, out = built.args
    function(x, out)
    torch.testing.assert_close(out, x.sin() * 3)

    again = CompileCache(tmp_path, {})
    build_missing(again, [built], num_workers=1, progress=StartProgress())
    assert not again.built, "what is there is not compiled again"


def test_another_process_compiles_nothing_for_other_settings() -> None:
    torch.set_default_dtype(torch.float64)
    asked = code_settings()
    torch.set_default_dtype(torch.float32)
    built = build_worker._compile(job("sine", torch.rand(2), torch.zeros(2)), asked, None)
    assert built.error.startswith("torch is set up otherwise here: the default dtype is 'torch.float32'")
    assert not built.payload


def test_a_process_that_compiles_ends_with_the_one_that_asked() -> None:
    """Also while it compiles, and if that one was killed."""
    worker = (
        "import os; parent = os.getppid(); print(flush=True); "
        "from compiled_llm.compiling.build_worker import _end_with; _end_with(parent)"
    )
    killed = (
        "import os, subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE).stdout.readline(); "
        "os._exit(0)"
    )
    # Returns when both have closed stderr.
    subprocess.run([sys.executable, "-c", killed], stderr=subprocess.PIPE, check=True, timeout=200)


def test_processes_are_started_for_several_graphs_on_several_cores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, [0, 0, 0]), (2, [0, 0, 2]), (16, [0, 0, 5])):
        monkeypatch.setattr(parallel, "granted_cores", lambda cores=cores: cores)
        assert [useful_workers(jobs) for jobs in (0, 1, 5)] == expected


def test_a_fork_and_a_terminal_leave_the_processes_alone() -> None:
    """And does not wait for them."""
    processes = BuildProcesses(niceness=10)
    processes.start(1)
    (process,) = processes._all
    pid = process._process.pid
    assert os.getpgid(pid) == pid, "Ctrl-C on a terminal ends it"
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        processes.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it waits"
    assert not process.has_ended
    processes.close()
    assert process.has_ended
