"""A server that has nothing to do lets compiled code take over, and gives back what that frees."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.compiling.background import BackgroundBuilds
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.engine import turns
from compiled_llm.worker import compiled_steps, runner
from tests.server.conftest import SIZES, running_with


def test_memory_goes_back_once_graphs_are_ready_though_no_request_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks, released = threading.Semaphore(0), threading.Event()
    settle = runner.ModelRunner.settle

    def look(self: runner.ModelRunner) -> None:
        settle(self)
        looks.release()

    monkeypatch.setattr(turns, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(compiled_steps, "engine_cache", lambda target: CompileCache(tmp_path, {}))
    monkeypatch.setattr(BackgroundBuilds, "begin", lambda self: None)  # here nothing is compiled
    monkeypatch.setattr(compiled_steps, "_HEAD_START", 3600.0)
    body = {"prompt": "import os", "max_tokens": 3, "temperature": 0}
    with (
        CompiledEngine(progress="off", wait_for_compile=False, **SIZES) as engine,  # type: ignore[arg-type]
        running_with(engine) as server,
    ):
        answered = server.http.post("/v1/completions", json=body).json()["choices"]
        monkeypatch.setattr(runner.ModelRunner, "settle", look)
        assert all(looks.acquire(timeout=30) for _ in range(10)), "nothing looks while no command comes"
        builds = engine.own_runner.steps._builds
        assert builds is not None
        monkeypatch.setattr(runner, "release_freed_memory", released.set)
        monkeypatch.setattr(CompiledFunction, "is_pending", False)
        monkeypatch.setattr(CompiledFunction, "take_over", lambda self, finished, seconds: None)
        builds.finished.append(SimpleNamespace(job=SimpleNamespace(name="step"), error=""))  # type: ignore[arg-type]
        assert released.wait(30)
        assert not engine.is_changing
        assert server.http.post("/v1/completions", json=body).json()["choices"] == answered
