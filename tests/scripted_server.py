"""A server on a real socket that answers with the bytes that a test tells it to, for clients of servers."""

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@contextlib.contextmanager
def starting_scripts() -> Iterator[Callable[..., "Script"]]:
    """What makes servers of their answers; its end ends them."""
    made: list[Script] = []

    def make(answer: Callable[[str, dict[str, Any]], Iterator[bytes]]) -> Script:
        made.append(Script(answer))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


class Script(socketserver.ThreadingTCPServer):
    """Answers each request with the bytes that ``answer(path, body)`` gives, one after the other.

    Attributes:
        requests: path, headers and body of each.
        connections: that were made.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, answer: Callable[[str, dict[str, Any]], Iterator[bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.requests, self.connections = answer, list[tuple[str, str, dict[str, Any]]](), 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(socketserver.StreamRequestHandler):
    server: Script

    def handle(self) -> None:
        self.server.connections += 1
        while line := self.rfile.readline():
            head = "".join(iter(lambda: self.rfile.readline().decode(), "\r\n"))
            sizes = [text.partition(":")[2] for text in head.splitlines() if text.lower().startswith("content-length")]
            body = json.loads(self.rfile.read(int(sizes[0])) if sizes else b"{}")
            path = line.decode().split()[1]
            self.server.requests.append((path, head, body))
            for part in self.server.answer(path, body):
                self.wfile.write(part)
                self.wfile.flush()


def json_answer(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def events(*events: dict[str, Any], done: bool = True) -> bytes:
    found = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    return found + (b"data: [DONE]\n\n" if done else b"")


def completion(text: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}
