"""Compiling in other processes: the same result as here, one message for what fails, and nothing left behind."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.compiling import parallel
from compiled_llm.compiling.build_processes import BuildProcesses, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.parallel import build_missing, useful_workers
from compiled_llm.step.parameters import SAMPLING
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.step.step import sampler_function
from compiled_llm.system.progress import StartProgress


def make_sampler():
    return sampler_function


def job(name: str) -> Job:
    padding = {str(line.name): torch.full((2,), line.padding, dtype=line.dtype) for line in SAMPLING}
    padding |= {"temperature": torch.ones(2), "top_k": torch.full((2,), 5, dtype=torch.int32), "seed": torch.arange(2)}
    params = SamplingInput(**padding, position=torch.zeros(2).int())
    args = torch.rand(2, 5), params, torch.zeros(2, dtype=torch.int64)
    return Job(name, make_sampler, args, torch.get_num_threads(), weight=3.0, depends={})


def test_another_process_compiles_what_this_one_then_finds(tmp_path: Path) -> None:
    built = job("sample_2")
    cache = CompileCache(tmp_path, {})
    build_missing(cache, [built], num_workers=1, progress=StartProgress())
    assert cache.built.keys() == {"sample_2"}
    function = CompiledFunction(sampler_function, "sample_2", torch.device("cpu"), enforce_eager=False, cache=cache)
    function.warm_up(lambda: built.args)
    report = function.report()
    assert (report.cache, report.reason, report.graphs) == ("miss", "nothing of that name is stored", 1)
    assert report.compile_seconds > cache.built["sample_2"][1]
    logits, params, tokens = built.args
    function(logits, params, tokens)
    expected = torch.zeros(2, dtype=torch.int64)
    sampler_function(logits, params, expected)
    assert torch.equal(tokens, expected)

    again = CompileCache(tmp_path, {})
    build_missing(again, [built], num_workers=1, progress=StartProgress())
    assert not again.built, "what is there is not compiled again"


def test_code_of_other_settings_is_not_taken_from_another_process(tmp_path: Path) -> None:
    cache, built = CompileCache(tmp_path, {}), job("sample_2")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.warns(UserWarning, match=r"torch is set up otherwise here: the default dtype is 'torch.float32'"):
            build_missing(cache, [built], num_workers=1, progress=StartProgress())
    finally:
        torch.set_default_dtype(torch.float32)
    assert not cache.built
    assert not list(tmp_path.iterdir())


def test_what_fails_there_is_warned_about_and_left_to_this_process(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, {})
    too_few = (torch.ones(1),)
    gone = Job("gone", functools.partial(make_sampler), too_few, 1, weight=3.0, depends={})
    with pytest.warns(UserWarning, match="gone could not be compiled beside others"):
        build_missing(cache, [gone], num_workers=1, progress=StartProgress())
    assert isinstance(cache.find(cache.key_of("gone", sampler_function, gone.args, {})), str)
    assert not cache.built


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


def test_a_fork_leaves_the_processes_of_its_parent_alone() -> None:
    """And does not wait for them."""
    processes = BuildProcesses()
    processes.start(1)
    (process,) = processes._all
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
