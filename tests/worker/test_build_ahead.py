"""Processes that compile start ahead where it is clear that the step is not on disk, and end whatever happens."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.compiling import build_processes
from compiled_llm.compiling.build_processes import BuildProcesses, Built, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.models.config_file import read_config
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker import build_ahead, graph_fields
from compiled_llm.worker.build_ahead import start_builds
from tests.families import checkpoint

LIMITS = EngineLimits(64, 2, 64, 16, (2,), (64,), True)
CPU = torch.device("cpu")


class FakeProcess:
    """Builds nothing, and notes that it has ended."""

    ended: list["FakeProcess"]

    def __init__(self, target: GpuTarget | None, niceness: int) -> None:
        self.started, self.has_ended = 0.0, False

    def build(self, job: Job, settings: Any) -> Built:
        self.has_ended = job.name == "fails"
        return Built(job.name.encode(), {"by": id(self)}, "")

    def end(self) -> None:
        self.ended.append(self)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "ended", [], raising=False)
    monkeypatch.setattr(build_processes, "BuildProcess", FakeProcess)


def test_they_start_only_if_the_step_is_not_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_config(checkpoint("llama"))
    dtypes = (torch.float32, [torch.float32] * model.num_layers)
    cache = CompileCache(tmp_path, {"cpu": "this"})
    monkeypatch.setattr(build_ahead, "engine_cache", lambda: cache)
    monkeypatch.setattr(build_ahead, "ops_of", lambda *args: [])
    monkeypatch.setattr(build_ahead, "granted_cores", lambda: 4)

    def started(device: torch.device = CPU, **arguments: Any) -> int | None:
        config = EngineConfig(**arguments)
        builds = start_builds(config, device, model, LIMITS, *dtypes, None, StartProgress())  # type: ignore[arg-type]
        if builds is None:
            return None
        try:
            return len(builds.processes.ages())
        finally:
            builds.processes.close()
            builds.kernels.finish()

    assert started() == 2
    assert len(FakeProcess.ended) == 2
    assert started(torch.device("cuda")) is None
    assert started(enforce_eager=True) == started(compile_workers=0) == started(compile_workers=1) == 0
    assert started(wait_for_compile=False) == 0, "the first request has the cores"
    assert started(wait_for_compile=False, swap_space_bytes=2**22) == 2, "compiled steps are measured"
    monkeypatch.setattr(build_ahead, "granted_cores", lambda: 1)
    assert started() == 0, "one core compiles in this process"
    monkeypatch.setattr(build_ahead, "granted_cores", lambda: 4)
    fields = graph_fields.of_step(model, LIMITS, *dtypes, CPU)
    cache.store(cache.key_of("step", lambda x: x, (1,), fields | {"block_size": 128}), b"code", {})
    assert started() == 2, "of other blocks"
    cache.store(cache.key_of("step", lambda x: x, (1,), fields), b"code", {})
    assert started() == 0


def test_a_process_that_is_idle_takes_the_next_job_and_one_that_ended_none() -> None:
    processes = BuildProcesses()
    processes.start(1)
    by = [processes.build(Job(name, list, (), 1, 1.0, {})).facts["by"] for name in ("one", "fails", "three", "four")]
    assert by[0] == by[1] != by[2] == by[3]
    assert len(processes.ages()) == 2
    processes.close()
    processes.close()
    assert len(FakeProcess.ended) == 2


def test_they_end_with_a_start_that_fails() -> None:
    def start() -> None:
        processes = BuildProcesses()
        processes.start(2)
        raise ValueError("no such weights")

    with pytest.raises(ValueError, match="no such weights"):
        start()
    gc.collect()
    assert len(FakeProcess.ended) == 2
