"""``bench servers``: servers that wait while others are measured, and what is made of the figures."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from compiled_llm.bench import servers
from compiled_llm.bench.peers.processes import PeerFailed
from compiled_llm.bench.servers import FIGURES, OURS, THEIRS, Server, compared
from compiled_llm.terminal.server_client import ServerClient

MODELS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def is_stopped(process: psutil.Process) -> bool:
    """Within some seconds: a signal takes a moment."""
    for _ in range(500):
        if process.status() == psutil.STATUS_STOPPED:
            return True
        time.sleep(0.02)
    return False


def test_a_server_is_stopped_but_while_it_is_awake(tmp_path: Path) -> None:
    (port,) = servers._free_ports(1)
    server = Server([sys.executable, "-S", "-c", MODELS, str(port)], {}, port, tmp_path / "log", 60)
    process = psutil.Process(server._process.pid)
    try:
        assert is_stopped(process)
        with server.awake():
            assert ServerClient(server.url).models() == [{"id": "m"}]
        assert is_stopped(process)
    finally:
        server.close()
    assert not process.is_running()


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit('no such model')"]
    with pytest.raises(PeerFailed, match="no such model"):
        Server(command, {}, servers._free_ports(1)[0], tmp_path / "log", 60)


def test_above_one_this_server_is_ahead() -> None:
    slow = {key: (50.0 if more else 200.0) for key, (_, more) in FIGURES.items()}
    fast = dict.fromkeys(FIGURES, 100.0)
    rows = compared({"1 streams": {OURS: [fast, fast, slow], THEIRS: [slow, slow, slow]}})
    assert [row["figure"] for row in rows] == [title for title, _ in FIGURES.values()]
    assert all((row["ratio"], row["least"], row["most"]) == (2, 1, 2) for row in rows)
