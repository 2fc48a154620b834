"""What a server refuses, bounds and ends: keys, sizes, queues, times, clients that go, an engine that breaks."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from compiled_llm import CompiledEngine, RequestOutput
from compiled_llm.server import run
from compiled_llm.server.engine_client import EngineClient
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.service import Service
from tests.server.conftest import SIZES, BrokenEngineError, Running, ThreadClient, running_with

LONG: Any = {"prompt": "import os", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def until(condition: Any) -> None:
    """Wait until it holds, which it must not do for moments alone. The deadline is of a machine that does much else."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.005)


class Held:
    """An engine that makes no step until ``count`` requests are there, and none while these run.

    Aborts and new requests are taken in meanwhile. When ``go_on`` is set, it steps as ever.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.runs, self.go_on, step = threading.Event(), threading.Event(), CompiledEngine.step

        def held_step(engine: CompiledEngine) -> list[RequestOutput]:
            scheduler = engine.scheduler
            is_early = len(scheduler.running) + scheduler.num_waiting < count
            if len(scheduler.running) == min(count, SIZES["bucket_sizes"][-1]):
                self.runs.set()
            if (is_early or self.runs.is_set()) and not self.go_on.is_set():
                time.sleep(0.005)
                return []
            return step(engine)

        monkeypatch.setattr(CompiledEngine, "step", held_step)

    def wait(self) -> None:
        assert self.runs.wait(60), "the requests do not run"


def is_open(running: Running) -> bool:
    """Whether it takes connections."""
    try:
        socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))).close()
    except ConnectionRefusedError:
        return False
    return True


CLOSE = b"\r\nconnection: close"  # else it stays open for some seconds after the answer


def open_request(running: Running, body: Any, more: bytes = b"") -> socket.socket:
    """A connection on which a completion was asked for. ``more``: headers, each behind a line's end."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: " + str(len(content)).encode()
    connection.sendall(head + more + b"\r\n\r\n" + content)
    return connection


def events(text: str) -> list[Any]:
    """The values of a stream's events; the last one is [DONE]."""
    *found, end = text.split("\n\n")
    assert end == ""
    contents = [event.removeprefix("data: ") for event in found]
    assert contents.pop() == "[DONE]"
    return [json.loads(content) for content in contents]


def test_all_but_the_public_paths_need_a_key(engine: CompiledEngine) -> None:
    with running_with(engine, api_key=("first", "second")) as running:
        get = running.http.get
        for headers in ({"authorization": "Bearer first"}, {"x-api-key": "second"}, {"authorization": "bearer second"}):
            assert get("/v1/models", headers=headers).status_code == 200
        for wrong in ({}, {"authorization": "Bearer firs"}, {"authorization": "first"}, {"x-api-key": ""}):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/health/../v1/models", "/%2Fhealth"):
                refused = get(path, headers=wrong)
                assert refused.status_code == 401, path
                assert refused.json()["error"]["code"] == "invalid_api_key"
        assert [get(path).status_code for path in ("/health", "/ready", "/ping")] == [200, 200, 200]


def test_bodies_and_heads_are_bounded(engine: CompiledEngine) -> None:
    with running_with(engine, max_body_bytes=2048, max_header_bytes=2048) as running:
        post = running.http.post

        def pieces(count: int) -> Iterator[bytes]:
            return (b" " * 1000 for _ in range(count))

        for content in (b" " * 2049, pieces(3)):
            refused = post("/v1/completions", content=content)
            assert refused.status_code == 413
            assert "a body may have 2048 bytes at most" in refused.json()["error"]["message"]
        with contextlib.suppress(httpx.TransportError):  # what is far too large is not even read
            assert post("/v1/completions", content=b" " * 10**7).status_code == 413
        for content in (b"", b"{", b"[1]", b"[" * 2000, b'{"prompt": NaN}', b'{"prompt": "\xff"}', b'{"a": "\\ud800"}'):
            refused = post("/v1/completions", content=content)
            assert refused.status_code == 400, content[:20]
            assert "the body must be" in refused.json()["error"]["message"]
        assert running.http.get("/version", headers={"a": "b" * 1800}).status_code == 200
        refused = running.http.get("/version", headers={"a": "b" * 2100})
        assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
        body = {"prompt": "a" * 1900, "truncate_prompt_tokens": 4, "max_tokens": 1}
        assert post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 4


def test_a_full_queue_is_said_so(engine: CompiledEngine) -> None:
    with running_with(engine, max_waiting_requests=1) as running:  # and four run
        refused = running.http.post("/v1/completions", json={"prompt": ["a"] * 6})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 'reason="queue_full"} 1.0' in running.http.get("/metrics").text
        assert running.http.post("/v1/completions", json={"prompt": ["a"] * 5, "max_tokens": 1}).status_code == 200


def test_an_answer_that_takes_too_long_ends(engine: CompiledEngine) -> None:
    with running_with(engine, max_request_seconds=0.2) as running:
        late = running.http.post("/v1/completions", json=LONG)
        assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
        streamed = running.http.post("/v1/completions", json={**LONG, "stream": True})
        assert streamed.status_code == 200
        *chunks, last = events(streamed.text)
        assert chunks
        assert last["error"]["message"] == "the answer took more than 0.2 s"
        until(lambda: not engine.scheduler.has_unfinished_requests())
        assert running.http.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request(
    stream: bool, engine: CompiledEngine, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, scheduler, held = engine.stats().num_output_tokens, engine.scheduler, Held(monkeypatch, 6)
    with contextlib.ExitStack() as connections:
        for _ in range(6):
            connections.enter_context(open_request(running, {**LONG, "stream": stream}))
        held.wait()  # until four run and two wait
        assert running.http.get("/load").json()["server_load"] == 6
    until(lambda: running.http.get("/load").json()["server_load"] == 0)
    held.go_on.set()
    until(lambda: not scheduler.has_unfinished_requests())
    assert engine.stats().num_output_tokens - before < 6 * 500, "none of the six came to its end"


def test_a_client_that_is_too_slow_in_asking(engine: CompiledEngine) -> None:
    with running_with(engine, client_seconds=0.3) as running:
        port = int(running.url.rpartition(":")[2])
        heads = (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
        for head in heads:
            with socket.create_connection(("127.0.0.1", port)) as half_a_head:
                half_a_head.sendall(head)
                assert half_a_head.recv(4096).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_requests_have_names(running: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    named = running.http.post("/v1/completions", json=body, headers={"x-request-id": "my-name:1"})
    assert named.headers["x-request-id"] == "my-name:1"
    assert named.json()["id"] == "cmpl-my-name:1"
    made = running.http.post("/v1/completions", json=body, headers={"x-request-id": "no\tname"})
    assert made.headers["x-request-id"] != "no\tname"
    assert running.http.get("/nowhere").headers["x-request-id"]


def test_a_line_of_the_log_has_no_prompt(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    running.http.post("/v1/completions", json={"prompt": "secret", "max_tokens": 2}, headers={"x-request-id": "one"})
    running.http.get("/a%0Ab")
    for often in ("/health", "/metrics", "/", "/page/main.js"):
        assert running.http.get(often).status_code == 200
    lines: list[str] = []
    until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or len(lines) == 2)
    served, missing = lines
    assert re.fullmatch(
        r"\S+ 200 POST '/v1/completions' seconds=\S+ id=one prompt_tokens=3 output_tokens=2 first_seconds=\S+", served
    )
    assert " 404 GET '/a\\nb' " in missing


def test_no_page_of_another_origin_unless_asked(engine: CompiledEngine) -> None:
    asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
    with running_with(engine) as running:
        assert "access-control-allow-origin" not in running.http.options("/v1/models", headers=asked).headers
    with running_with(engine, cors_origin=("http://page.example",), api_key=("key",)) as running:
        allowed = running.http.options("/v1/models", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "http://page.example"
        assert "access-control-allow-credentials" not in allowed.headers
        refused = running.http.options("/v1/models", headers={**asked, "origin": "http://other.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_states(running: Running) -> None:
    get = running.http.get
    assert get("/version").json()["version"]
    assert running.http.post("/ping").status_code == 200
    missing = get("/v1/completions")
    assert (missing.status_code, missing.headers["allow"]) == (405, "POST")
    assert running.http.put("/ping").headers["allow"] == "GET, POST"


def test_an_end_waits_for_answers(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**LONG, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
    held = Held(monkeypatch, 1)
    with running_with(engine) as running, open_request(running, body) as stream:
        held.wait()
        running.stop()
        until(lambda: not is_open(running))
        held.go_on.set()
        text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
        assert '"completion_tokens":60' in text
        assert '"finish_reason":"length"' in text
        assert "[DONE]" in text
        assert running.ended() == 0


def test_an_end_waits_no_longer_than_it_may(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, 1)
    with running_with(engine, drain_seconds=0.1) as running, open_request(running, {**LONG, "stream": True}) as stream:
        held.wait()
        running.stop()
        text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
        held.go_on.set()
        assert '{"error":{"message":"the server has ended"' in text
        assert "[DONE]" in text
        assert running.ended() == 0
    until(lambda: not engine.scheduler.has_unfinished_requests())


def test_the_end_of_the_engine_is_told_to_everyone(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CompiledEngine) -> None:
        raise BrokenEngineError

    held = Held(monkeypatch, 2)
    with running_with(engine) as running:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(running.http.post("/v1/completions", json=LONG)))
        asking.start()
        with open_request(running, {**LONG, "stream": True}) as stream:
            held.wait()
            monkeypatch.setattr(CompiledEngine, "step", broken)
            text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
        asking.join()
        assert answers[0].status_code == 503
        assert '{"error":{"message":"the engine\'s thread has ended"' in text
        assert "[DONE]" in text
        assert running.ended() == 1
    engine.abort([*engine._core.entries])


def test_an_engine_that_ends_is_started_again_but_not_for_ever(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, restart, starts = CompiledEngine.step, Replicas.restart, [False, True]
    failures: list[bool] = []  # whether the next steps fail, the last one first

    async def failing_at_first(self: Replicas, client: EngineClient) -> None:
        if starts.pop():
            raise RuntimeError("the engine's process has ended: signal SIGKILL")
        await restart(self, client)

    def breaking(self: CompiledEngine) -> Any:
        if failures and failures.pop():
            engine.abort([*engine._core.entries])  # another process would not have them
            raise BrokenEngineError
        return step(self)

    monkeypatch.setattr(run, "_MOST_RESTARTS", 2)
    monkeypatch.setattr(run, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(Replicas, "restart", failing_at_first)
    monkeypatch.setattr(CompiledEngine, "step", breaking)
    body = {"prompt": "import os", "max_tokens": 4, "temperature": 0}
    with running_with(engine, restart_engine=True) as running:
        before = running.http.post("/v1/completions", json=body).json()["choices"]
        failures.extend((True, True, *[False] * 6))  # a step is tried twice
        with open_request(running, {**LONG, "stream": True}, CLOSE) as stream:
            text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
        assert '{"error":{"message":"the engine\'s thread has ended"' in text
        until(lambda: running.http.get("/ready").status_code == 200)
        assert running.http.post("/v1/completions", json=body).json()["choices"] == before
        assert running.http.get("/metrics").status_code == 200
        failures.extend((True, True))
        assert running.http.post("/v1/completions", json=LONG).status_code == 503
        assert running.ended() == 1


def test_an_engine_starts_again_where_the_system_grants_no_process_at_first(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals = ThreadClient.start, [BlockingIOError(11, "Resource temporarily unavailable")]

    async def refused_at_first(self: ThreadClient) -> None:
        if refusals:
            raise refusals.pop()
        await start(self)

    monkeypatch.setattr(run, "_PAUSE_SECONDS", 0.2)
    with running_with(engine, restart_engine=True) as running:
        monkeypatch.setattr(ThreadClient, "start", refused_at_first)
        running.client.clients[0]._theirs.shutdown(socket.SHUT_RDWR)
        until(lambda: "cannot be started: [Errno 11]" in running.http.get("/health").text)
        until(lambda: running.http.get("/ready").status_code == 200)


class _FailingStarts:
    """A client of engines whose starts fail, each after 200 seconds of ``clock``."""

    def __init__(self, clock: list[float]) -> None:
        self.clients, self.ended, self.num_starts, self._clock = [self], "it was killed", 0, clock

    async def wait_ended(self) -> None:
        pass

    async def restart(self, client: Any) -> None:
        self.num_starts += 1
        assert self.num_starts < 20, "it is started for ever"
        self._clock[0] += 200
        raise RuntimeError("out of memory")


def test_starts_that_take_long_and_fail_come_to_an_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(run, "_PAUSE_SECONDS", 0)
    server, client = run.Server.__new__(run.Server), _FailingStarts(clock)
    server._program, server._client = "test", client
    server._service = server._settings = SimpleNamespace(is_draining=False, restart_engine=True)
    asyncio.run(server._keep(client))
    assert client.num_starts == 5
    assert "the engine has ended 6 times within 1000 s" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_is_sent_what_is_no_message_ends(engine: CompiledEngine) -> None:
    """It would hear of no request any more, and of no abort."""
    with running_with(engine) as running:
        running._loop.call_soon_threadsafe(running.client.clients[0]._frames.write, b"no message")
        assert running.ended() == 1


def test_a_step_that_fails_ends_its_requests_alone(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.own_runner
    with running_with(engine) as running:
        monkeypatch.setattr(runner, "launch", _failing(runner.launch))
        failed = running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert failed.status_code == 500
        assert "out of order" in failed.json()["error"]["message"]
        monkeypatch.undo()
        assert running.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def _failing(launch: Any) -> Any:
    def fail(*args: Any) -> None:
        raise RuntimeError("out of order")

    return fail


def test_an_engine_that_hangs_is_not_healthy(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, hangs = CompiledEngine.step, threading.Event()

    def hanging(self: CompiledEngine) -> Any:
        hangs.wait(20)
        return step(self)

    with running_with(engine, stall_seconds=1) as running:
        monkeypatch.setattr(CompiledEngine, "step", hanging)
        with open_request(running, {**LONG, "max_tokens": 3}) as asked:
            until(lambda: running.http.get("/health").status_code == 503)
            assert "no step of the engine for 1 s" in running.http.get("/health").json()["error"]["message"]
            assert running.http.get("/ping").status_code == 200
            hangs.set()
            assert asked.recv(4096).startswith(b"HTTP/1.1 200")
            assert running.http.get("/health").status_code == 200


def test_what_has_a_place_is_answered_though_its_server_ends_before_its_tokens_are_known(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_with(engine) as running:
        encode = Service.encode

        async def encoding(self: Service, *given: Any) -> Any:
            running.stop()
            until_ending = asyncio.Event()
            asyncio.get_running_loop().call_later(0.1, until_ending.set)
            await until_ending.wait()
            assert self.is_draining
            return await encode(self, *given)

        monkeypatch.setattr(Service, "encode", encoding)
        answer = running.http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert running.ended() == 0


def test_with_a_certificate_it_is_found_at_https_alone(engine: CompiledEngine) -> None:
    tls = Path(__file__).with_name("tls")
    files = {"ssl_certfile": str(tls / "certificate.pem"), "ssl_keyfile": str(tls / "key.pem")}
    with running_with(engine, **files) as running:
        assert running.url.startswith("https://127.0.0.1:")
        text = running.http.post("/v1/completions", json={**LONG, "max_tokens": 4, "stream": True}).text
        assert [one["object"] for one in events(text)] == ["text_completion"] * len(events(text))
        with pytest.raises(httpx.TransportError), httpx.Client() as plain:
            plain.get(running.url.replace("https", "http") + "/ping")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"), httpx.Client() as stranger:
            stranger.get(f"{running.url}/ping")


def test_nothing_is_left_of_requests(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "import os", "max_tokens": 3, "temperature": 0}
    with running_with(engine) as running:
        until(lambda: not running.server._http.server_state.tasks)
        num_tasks = len(asyncio.all_tasks(running._loop))
        for asked, status in ((body, 200), ({**body, "stream": True}, 200), ({**body, "n": 0}, 400)):
            assert running.http.post("/v1/completions", json=asked).status_code == status
        for asked in (LONG, {**LONG, "stream": True}):
            with monkeypatch.context() as patch:
                held = Held(patch, 1)
                with open_request(running, asked):
                    held.wait()
            until(lambda: not engine.scheduler.has_unfinished_requests())
        assert engine.stats().used_blocks == 0
        until(lambda: len(asyncio.all_tasks(running._loop)) == num_tasks)
        assert running.client.unfinished == []
        assert running.server._service.num_admitted == 0


def test_connections_leave_descriptors_for_the_rest(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.resource, "getrlimit", lambda which: (run._OTHER_DESCRIPTORS + 8, 100))
    with running_with(engine) as running, contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(running.url.rpartition(":")[2])
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(8)]
        until(lambda: len(running.server._http.server_state.connections) == 8)
        with socket.create_connection(address) as refused:
            text = b"".join(iter(lambda: refused.recv(65536), b"")).decode()
        assert text.startswith("HTTP/1.1 503 ")
        assert '"message":"8 connections are open, as many as may be"' in text
        idle.pop().close()
        until(lambda: running.http.get("/health").status_code == 200)


def test_a_clock_that_is_moved_changes_no_time(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps, now = itertools.cycle((86400.0, -86400.0, 10.0**9)), time.time
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    body = {"prompt": "import os", "max_tokens": 8, "temperature": 0}
    with running_with(engine, max_request_seconds=30, client_seconds=10, stall_seconds=10) as running:
        texts = {running.http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(4)}
        assert len(texts) == 1
        pieces = events(running.http.post("/v1/completions", json={**body, "stream": True}).text)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) in texts
        assert running.http.get("/health").status_code == 200
        seconds = [line for line in running.http.get("/metrics").text.splitlines() if "_seconds_sum" in line]
        assert seconds
        assert all(0 <= float(line.rpartition(" ")[2]) < 30 for line in seconds)
