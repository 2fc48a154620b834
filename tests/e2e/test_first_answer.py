"""Serving before graphs are compiled: when an engine waits after all, and what it says where one cannot be compiled.

That no bit differs when functions change over is in tests/battery/test_change_over.py.
"""

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling import build_processes
from compiled_llm.compiling.background import BackgroundBuilds
from compiled_llm.compiling.build_processes import Built, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.scheduling.worker import WorkerFailedError
from compiled_llm.worker import compiled_steps, pool_pages, runner
from tests.engine.test_admission import Steer

SMALL: dict[str, Any] = {"bucket_sizes": (2,), "num_kv_blocks": 16, "max_model_len": 64, "progress": "off"}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


class Refuses:
    """A process that compiles nothing."""

    has_ended = False

    def __init__(self, target: None, niceness: int) -> None:
        self.started = 0.0

    def build(self, job: Job, settings: Any) -> Built:
        return Built(b"", {}, "BackendCompilerFailed: no space left")

    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_steps, "engine_cache", lambda target: CompileCache(tmp_path, {}))


def test_a_graph_that_cannot_be_compiled_is_an_error_of_every_step_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build_processes, "BuildProcess", Refuses)
    with CompiledEngine(**SMALL, wait_for_compile=False) as engine:
        builds = engine.own_runner.steps._builds
        assert builds is not None
        end = time.monotonic() + 60
        while not builds.finished and time.monotonic() < end:
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(WorkerFailedError, match="step could not be compiled: BackendCompilerFailed: no space"):
                engine.generate("import os", GREEDY, use_tqdm=False)
        assert engine.stats().used_blocks == 0
        assert "step, sample" in engine.compile_report().change_overs()[0]


def test_a_report_takes_what_is_compiled_by_now_though_no_request_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's page says so while it is idle."""
    taken: list[Any] = []
    monkeypatch.setattr(build_processes, "BuildProcess", Refuses)
    monkeypatch.setattr(CompiledFunction, "take_over", lambda self, finished, seconds: taken.append(finished))
    with CompiledEngine(**SMALL, wait_for_compile=False) as engine:
        builds = engine.own_runner.steps._builds
        assert builds is not None
        compiled = SimpleNamespace(job=SimpleNamespace(name="step"), error="")
        monkeypatch.setattr(builds, "finished", deque([compiled]))
        engine.compile_report()
        assert taken == [compiled]


def test_graphs_are_loaded_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    monkeypatch.setattr(BackgroundBuilds, "begin", lambda self: began.append(1))
    monkeypatch.setattr(compiled_steps, "_HEAD_START", 3600.0)
    monkeypatch.setattr(pool_pages, "free_memory", lambda: 2**40)
    monkeypatch.setattr(pool_pages, "madvise", lambda address, size, advice: 0)
    with CompiledEngine(**SMALL, wait_for_compile=False) as engine:
        assert engine.is_changing
        assert engine.ask_for_memory(), "the next blocks' need not wait for graphs"
        engine.generate("import os", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert not began, "graphs were loaded beside the first step"
        engine.generate("import os", GREEDY, use_tqdm=False)
        assert began
        steps = engine.own_runner.steps
        assert steps._builds is not None
        monkeypatch.setattr(CompiledFunction, "is_pending", False)
        monkeypatch.setattr(CompiledFunction, "take_over", lambda self, finished, seconds: None)
        steps._builds.finished.append(SimpleNamespace(job=SimpleNamespace(name="step"), error=""))
        released: list[int] = []
        monkeypatch.setattr(runner, "release_freed_memory", lambda: released.append(1))
        assert engine.is_changing
        engine.ask_for_memory()
        assert released == [1], "code that is there takes over first"
        assert not engine.is_changing
        engine.ask_for_memory()
        assert released == [1], "it takes a tenth of a second"


class WaitsError(Exception):
    """Something is compiled before the start is over."""


@pytest.mark.parametrize(
    "arguments",
    [{"compile_workers": 0}, {"logits_transforms": [Steer()]}, {"swap_space_bytes": 2**22}],
    ids=["compile_workers=0", "logits_transforms", "swap_space_bytes"],
)
def test_an_engine_waits_where_its_own_process_would_compile_and_where_steps_are_measured(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_missing(*args: Any, **options: Any) -> None:
        raise WaitsError

    monkeypatch.setattr(compiled_steps, "build_missing", build_missing)
    with pytest.raises(WaitsError):
        CompiledEngine(**SMALL, wait_for_compile=False, **arguments)
