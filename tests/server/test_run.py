"""``compiled-llm serve`` as a program: its start, signals at any moment, the death of its engine."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import psutil
import pytest

from compiled_llm.__main__ import main
from compiled_llm.system.child_process import with_package

COMMAND = [
    sys.executable,
    "-m",
    "compiled_llm",
    "serve",
    "--enforce-eager",
    "--bucket-sizes",
    "1,4",
    "--progress",
    "off",
]
LONG = {"prompt": "import os", "max_tokens": 600, "ignore_eos": True, "stream": True}


class Program:
    """The program, started on a free port.

    Attributes:
        http: a client for it.
    """

    def __init__(self, *flags: str, command: Sequence[str] = COMMAND, stderr: Any = subprocess.PIPE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [*command, "--port", str(port), *flags], stderr=stderr, text=True, env=with_package(os.environ)
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def wait_until(self, path: str) -> None:
        """Until a path answers with 200."""
        while self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get(path).status_code == 200:
                    return
            time.sleep(0.02)

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (found,) = self.engines()
        return found

    def engines(self) -> list[psutil.Process]:
        """The engines' processes, as they were started."""
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and "compiled_llm.server.engine_process" in child.cmdline()
        ]

    def ended(self) -> tuple[int, str]:
        """Its exit status and what it said, once it has ended. Nothing that it started is left."""
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


def until(condition: Callable[[], Any], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.05)


@contextlib.contextmanager
def program(*flags: str, command: Sequence[str] = COMMAND, stderr: Any = subprocess.PIPE) -> Iterator[Program]:
    """One that is ended after the test, whatever happens."""
    started = Program(*flags, command=command, stderr=stderr)
    try:
        yield started
    finally:
        started.http.close()
        started.process.kill()
        started.process.communicate()


def test_it_loads_streams_and_ends_after_its_answers() -> None:
    with program() as server:
        server.wait_until("/ping")
        loading = server.http.post("/v1/completions", json=LONG)
        assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
        assert server.http.get("/health").json()["error"]["message"] == "the model is being loaded"
        assert server.http.get("/").status_code == 200, "the page says so"
        server.wait_until("/health")
        engine = server.engine()
        maps = [one.path for one in psutil.Process(server.process.pid).memory_maps()]
        assert maps
        assert not any("libtorch" in path for path in maps), "torch is for the engine's process"
        assert any("libtorch" in one.path for one in engine.memory_maps())
        body = {**LONG, "max_tokens": 100, "stream_options": {"include_usage": True}}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"completion_tokens":100' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        status, err = server.ended()
        assert status == 0
        assert "SIGTERM: ends when 1 prompts are answered" in err
        assert not engine.is_running()


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use: give another --port" in capsys.readouterr().err


@pytest.mark.battery
def test_the_death_of_the_engine_ends_it() -> None:
    with program() as server:
        server.wait_until("/health")
        with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.engine().kill()
            rest = [line for line in lines if line]
        assert "the engine's process has ended: signal SIGKILL" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        status, err = server.ended()
        assert status == 1
        assert "error: the engine's process has ended: signal SIGKILL" in err


@pytest.mark.battery
def test_the_death_of_the_server_ends_the_engine() -> None:
    with program() as server:
        server.wait_until("/health")
        engine = server.engine()
        server.process.kill()
        engine.wait(timeout=20)


@pytest.mark.battery
def test_an_engine_that_does_not_start() -> None:
    for flags, status, words in ((("--model", "/nowhere"), 2, "neither a directory"),):
        with program(*flags) as server:
            found, err = server.ended()
            assert found == status
            assert words in err


@pytest.mark.battery
@pytest.mark.parametrize("number", range(20))
def test_a_signal_at_any_moment(number: int) -> None:
    """During the start, idle, and within an answer; a second one ends it at once."""
    rng = random.Random(number)
    with program("--drain-seconds", "5") as server:
        server.wait_until("/ping")
        if number % 2:
            server.wait_until("/health")
            answer = server.http.send(server.http.build_request("POST", "/v1/completions", json=LONG), stream=True)
        time.sleep(rng.uniform(0, 2))
        server.process.send_signal(signal.SIGTERM)
        if number % 4 == 3:
            time.sleep(rng.uniform(0, 0.3))
            server.process.send_signal(signal.SIGTERM)
        if number % 2:
            with contextlib.suppress(httpx.TransportError):
                answer.read()
            answer.close()
        status, _ = server.ended()
        assert status in ((0, 143) if number % 4 == 3 else (0,) if number % 2 else (0, 143))
