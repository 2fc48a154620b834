"""What the server does when something around it breaks: each time it ends, or goes on, as docs/serving.md says."""

import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.test_run import LONG, Program, program, until

pytestmark = pytest.mark.battery

SHORT = {"prompt": "import os", "max_tokens": 4, "temperature": 0}


def resident_bytes(server: Program) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def address(server: Program) -> tuple[str, int]:
    return server.http.base_url.host, server.http.base_url.port or 0


def test_a_killed_engine_is_started_again() -> None:
    with program("--restart-engine") as server:
        server.wait_until("/health")
        before = server.http.post("/v1/completions", json=SHORT).json()["choices"]
        for _ in range(5):
            with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.engine().kill()
                rest = [line for line in lines if line]
            assert "the engine's process has ended: signal SIGKILL" in rest[-2]
            assert server.http.get("/ready").status_code == 503
            server.wait_until("/ready")
            assert server.http.post("/v1/completions", json=SHORT).json()["choices"] == before
        server.engine().kill()
        status, err = server.ended()
        assert status == 1
        assert err.count("starts the engine again") == err.count("serves again") == 5
        assert "the engine has ended 6 times within 600 s" in err


def test_killed_grammar_processes_end_their_requests_alone() -> None:
    with program() as server:
        server.wait_until("/health")
        for length in range(5, 8):
            body = {**LONG, "max_tokens": 100, "ignore_eos": False, "structured_outputs": {"regex": "[a-z]{60}"}}
            with server.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                for worker in grammar_processes(server):
                    worker.kill()
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert "error" in rest[-2] or '"finish_reason":"stop"' in rest[-2]
            # Another grammar needs a new process.
            regex = f"[a-z]{{{length}}}"
            body = {**SHORT, "max_tokens": 20, "structured_outputs": {"regex": regex}}
            text = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            assert re.fullmatch(regex, text)
            assert grammar_processes(server)


def grammar_processes(server: Program) -> list[psutil.Process]:
    """That which compiles, and those that it has made."""
    children = [one for one in server.engine().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in children if "grammar" in " ".join(one.cmdline())]


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    with Path("/dev/full").open("w") as full, program(stderr=full) as server:
        server.wait_until("/health")
        for _ in range(300):
            assert server.http.post("/v1/completions", json=SHORT).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_log_that_nobody_reads_ends_nothing() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as pipe, program(stderr=pipe) as server:
        server.wait_until("/health")
        for _ in range(100):
            assert server.http.post("/v1/completions", json=SHORT).status_code == 200
        assert b"missing" not in read.read(1 << 16)
        assert server.http.post("/v1/completions", json=SHORT).status_code == 200
        assert b"lines of this log are missing: nobody read it\n" in read.read(1 << 16)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_body_of_100_megabytes_is_refused_and_not_kept() -> None:
    content = b'{"prompt": "' + b"a" * 100 * 2**20 + b'"}'
    with program() as server:
        server.wait_until("/health")
        server.http.post("/v1/completions", json=SHORT)
        before = resident_bytes(server)
        for _ in range(3):
            refused = server.http.post("/v1/completions", content=content)
            assert refused.status_code == 413
            assert "16777216 bytes at most" in refused.json()["error"]["message"]
        assert resident_bytes(server) - before < 64 * 2**20
        assert server.http.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("most", [None, 1000])
def test_10000_connections_at_once(most: int | None) -> None:
    """As many as there are descriptors for are kept, idle; the others are told so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_200:
        pytest.skip(f"10,200 descriptors are needed, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with program() as server, contextlib.ExitStack() as stack:
            server.wait_until("/health")
            if most is not None:
                resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (most, most))
            connections = [stack.enter_context(socket.create_connection(address(server))) for _ in range(10_000)]
            if most is None:
                until(lambda: psutil.Process(server.process.pid).num_fds() > 10_000)
                assert server.http.post("/v1/completions", json=SHORT).status_code == 200
            else:
                with contextlib.suppress(httpx.TransportError):
                    server.http.get("/health")
            for connection in connections:
                connection.close()
            until(lambda: psutil.Process(server.process.pid).num_fds() < 100)
            assert server.http.post("/v1/completions", json=SHORT).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.ended()[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
