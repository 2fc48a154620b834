"""Ranks and the engine's process end at any moment: who is left ends too, and says why."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, SamplingParams
from compiled_llm.scheduling.worker import WorkerFailedError
from compiled_llm.server.engine_process import EngineServer
from tests.parallel.test_rank_processes import SMALL

LONG = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


def ranks_here() -> list[psutil.Process]:
    """The processes of ranks that this one has started and that run, in their order."""
    found = []
    for child in psutil.Process().children():
        try:
            if any("spawn_main" in word for word in child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.pid)


def shared_files() -> set[str]:
    """Named shared memory, but for what OpenMP libraries of other programs have there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("__KMP")}


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.1)


def kill_at_a_random_moment(seed: int, of_what: str, **arguments: Any) -> None:
    """One of two processes of an engine is killed: at its start, while it loads, between steps, in one."""
    moment, place = random.Random(seed).uniform(0, 20), seed % 2
    ends, before = threading.Event(), shared_files()

    def kill() -> None:
        ends.wait(moment)
        deadline = time.monotonic() + 60
        while not ends.is_set() and len(found := ranks_here()) < 2:
            time.sleep(0.05)
            if time.monotonic() > deadline:
                ends.set()  # nothing will be raised
        if not ends.is_set():
            found[place].send_signal(signal.SIGKILL)
            ends.wait(60)  # for the engine to find out
            ends.set()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        message = f"the process of {of_what} {place} ended with exit code -9"
        with pytest.raises(WorkerFailedError, match=message):  # noqa: PT012
            engine = CompiledEngine(**arguments, **SMALL)
            while not ends.is_set():
                engine.generate(["def", "import os"], LONG, use_tqdm=False)
    finally:
        ends.set()
        killer.join()
    assert not ranks_here()
    assert shared_files() <= before


@pytest.mark.battery
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_is_killed_at_a_random_moment(seed: int) -> None:
    kill_at_a_random_moment(seed, "rank", tensor_parallel_size=2)


@pytest.mark.battery
@pytest.mark.parametrize("seed", range(6))
def test_a_stage_is_killed_at_a_random_moment(seed: int) -> None:
    kill_at_a_random_moment(seed, "stage", pipeline_parallel_size=2)


@pytest.mark.battery
def test_ranks_end_with_the_process_of_the_engine() -> None:
    program = (
        "from compiled_llm import CompiledEngine, SamplingParams\n"
        f"engine = CompiledEngine(tensor_parallel_size=2, **{SMALL})\n"
        "print(*[process._process.pid for process in engine.runner.ranks], flush=True)\n"
        "while True: engine.generate('def', SamplingParams(max_tokens=28, ignore_eos=True), use_tqdm=False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 2
        time.sleep(1)
        process.kill()
    wait_until_gone(pids)


@pytest.mark.battery
def test_an_async_engine_ends_with_a_rank() -> None:
    async def run() -> None:
        engine = AsyncCompiledEngine(tensor_parallel_size=2, **SMALL)
        outputs = [output async for output in engine.generate("def", SamplingParams(max_tokens=2))]
        assert outputs[-1].finished
        ranks_here()[1].send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the process of rank 1 ended with exit code -9"):  # noqa: PT012
            while True:
                async for output in engine.generate("def", LONG):
                    if output.outputs[0].finish_reason == "error":
                        assert "rank 1" in str(output.outputs[0].stop_reason)
        await engine.close()

    asyncio.run(run())


def test_the_servers_engine_ends_once_no_step_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the requests of the step that failed have their errors."""
    steps = iter([WorkerFailedError("rank 1 hangs"), None])

    def step() -> list[Any]:
        if (error := next(steps)) is not None:
            raise error
        return []

    runner = SimpleNamespace(device=SimpleNamespace(type="cuda"), num_threads=1)
    engine: Any = SimpleNamespace(step=step, runner=runner)
    server, sent = EngineServer(engine, SimpleNamespace(send=None), SimpleQueue()), list[Any]()  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_send_outputs", sent.append)
    with pytest.raises(WorkerFailedError, match="rank 1 hangs"):
        server._step()
    assert sent == [[]]
