"""20,000 requests to a server, a tenth of them aborted and a tenth malformed, beside idle connections and slow readers:
memory does not grow, nothing is left, and every token is that of ``generate``.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from compiled_llm import CompiledEngine, SamplingParams
from tests.server.test_run import Program, program

pytestmark = pytest.mark.battery

NUM_REQUESTS = int(os.environ.get("COMPILED_LLM_SOAK_REQUESTS", "20000"))
NUM_PARTS = 10  # after each nothing is under way, and memory is measured
NUM_IDLE, NUM_SLOW, NUM_AT_ONCE = 200, 8, 32
SIZES = {"bucket_sizes": (1, 8, 32), "num_kv_blocks": 512, "max_model_len": 512}
COMMAND = [sys.executable, "-m", "compiled_llm", "serve", "--bucket-sizes", "1,8,32", "--num-kv-blocks", "512",
           "--max-model-len", "512", "--wait-for-compile", "--progress", "off"]  # fmt: skip
# Malformed: a body, and the status that it gets.
MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": 7}', 400),
    (b'{"prompt": "a", "temperatur": 1}', 400),
    (b'{"prompt": "a", "max_tokens": -1}', 400),
    (b'{"prompt": [999999]}', 400),
    (b'{"prompt": "a", "model": "other"}', 404),
    (b'{"prompt": "' + b"a " * 4000 + b'"}', 400),
    (b"\xff\xfe", 400),
)


def known_requests() -> list[tuple[dict[str, Any], list[int]]]:
    """Fields of requests, and the tokens that ``generate`` gives for them."""
    rng = random.Random(5)
    starts = [[rng.randrange(64, 4000) for _ in range(40)] for _ in range(8)]
    fields = [
        {
            "prompt": rng.choice(starts)[: rng.choice((0, 9, 40))] + [rng.randrange(64, 4000) for _ in range(8)],
            "max_tokens": rng.choice((1, 2, 8, 32)),
            "temperature": float(index % 10 == 0),
            "seed": index,
            "ignore_eos": index % 2 == 0,
        }
        for index in range(200)
    ]
    fields += [{**fields[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}] * NUM_SLOW
    with CompiledEngine(enforce_eager=True, progress="off", **SIZES) as engine:
        prompts = [one["prompt"] for one in fields]
        params = [SamplingParams(**{name: one[name] for name in one if name != "prompt"}) for one in fields]
        outputs = engine.generate(prompts, params, use_tqdm=False)
    return [(one, output.outputs[0].token_ids) for one, output in zip(fields, outputs, strict=True)]


def posted(content: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)


def streamed(fields: dict[str, Any]) -> bytes:
    return posted(json.dumps({**fields, "stream": True, "return_token_ids": True}).encode())


def tokens_of(stream: bytes) -> list[int]:
    """Those of the whole events."""
    events = [line for line in stream.split(b"\n") if line.startswith(b"data: {") and line.endswith(b"}")]
    return [token_id for event in events for token_id in json.loads(event[6:])["choices"][0]["token_ids"]]


class Client:
    """Sends requests, and compares what comes."""

    def __init__(self, port: int, known: list[tuple[dict[str, Any], list[int]]], counts: Counter[str]) -> None:
        self._port, self._known, self._counts = port, known, counts
        self._rng = random.Random(14)

    async def serve(self, count: int) -> None:
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        slow = [self._read_slowly(*one) for one in self._known[-NUM_SLOW:]]
        await asyncio.gather(*slow, *(self._one(number) for number in range(count)))

    async def _one(self, number: int) -> None:
        async with self._places:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                if number % 10 == 0:
                    content, status = self._rng.choice(MALFORMED)
                    writer.write(posted(content))
                    assert (await reader.readline()).split()[1] == str(status).encode(), content[:100]
                    self._counts["malformed"] += 1
                    return
                fields, token_ids = self._rng.choice(self._known[:-NUM_SLOW])
                writer.write(streamed(fields))
                if number % 10 == 1:
                    found = b""
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._rng.uniform(0, 0.1)):
                            found = await reader.readuntil(b"}\n\n")
                    given = tokens_of(found)
                    assert given == token_ids[: len(given)]
                    self._counts["aborted"] += 1
                    return
                assert tokens_of(await reader.readuntil(b"0\r\n\r\n")) == token_ids
                self._counts["tokens"] += len(token_ids)
            finally:
                writer.transport.abort()

    async def _read_slowly(self, fields: dict[str, Any], token_ids: list[int]) -> None:
        """With a small buffer, a little at a time."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self._port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=2048)
        writer.write(streamed(fields))
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1024)
            assert piece
            found += piece
            await asyncio.sleep(0.01)
        writer.transport.abort()
        assert tokens_of(found) == token_ids
        self._counts["slow readers"] += 1


def gauges(server: Program) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("vllm:")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if "_bucket" not in line}


def test_nothing_is_left_of_any_request_to_a_server(battery_counts: Counter[str]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    known = known_requests()
    with program(command=COMMAND, stderr=subprocess.DEVNULL) as server, contextlib.ExitStack() as stack:
        server.wait_until("/health")
        port = server.http.base_url.port
        assert port is not None
        processes = [psutil.Process(server.process.pid), server.engine()]
        asyncio.run(Client(port, known, Counter()).serve(300))  # a warm-up
        descriptors = [process.num_fds() for process in processes]
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_IDLE)]
        client, memories = Client(port, known, battery_counts), []
        started = time.monotonic()
        for _ in range(NUM_PARTS):
            asyncio.run(client.serve(NUM_REQUESTS // NUM_PARTS))
            memories.append([process.memory_info().rss for process in processes])
        battery_counts["seconds"] = int(time.monotonic() - started)
        for connection in idle:
            connection.close()
        deadline = time.monotonic() + 20
        while [process.num_fds() for process in processes] > descriptors and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [process.num_fds() for process in processes] <= descriptors
        assert server.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
        found = gauges(server)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            assert found[name] == 0, name
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    for name, column in zip(("server", "engine"), zip(*memories, strict=True), strict=True):
        middle = column[NUM_PARTS // 2 - 1]
        battery_counts[f"KiB of the {name} in the middle"] = middle // 1024
        battery_counts[f"KiB that the {name}'s second half added"] = (max(column[NUM_PARTS // 2 :]) - middle) // 1024
        assert max(column[NUM_PARTS // 2 :]) <= 1.01 * middle, (name, column)
    assert battery_counts["aborted"] == battery_counts["malformed"] == NUM_REQUESTS // 10
