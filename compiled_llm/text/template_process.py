"""TemplateProcess: chat templates run in a process of their own, with limits of time and memory.

The process (template_worker.py) is started for the first request and kept, so that a rendering costs a fraction of a
millisecond more than it would here. One that reaches a limit is killed, and the next request starts another.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2
import markupsafe

from compiled_llm.text import template_worker
from compiled_llm.text.template_worker import LENGTH_BYTES, OUT_OF_MEMORY, decoded, encoded

# Of processor time for a request; a long chat takes some tens of milliseconds. And of the worker's address space.
SECONDS, MEMORY_BYTES = 2.0, 2**29
# The processor may be busy with other things: so much longer an answer is waited for, and so long for the start.
_WAITS, _START_SECONDS = 15, 120
_CHUNK = 2**20
_ENVIRONMENT = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # all that the worker gets of this process's


class TemplateProcess:
    """Sends requests to the worker, one at a time. Threads may share it. ``close`` or the garbage collector ends it.

    Args:
        seconds: of processor time for each request.
        memory_bytes: of address space, the interpreter's own 30 MiB or so among them.
    """

    def __init__(self, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = Lock()
        self._worker: _Worker | None = None
        self._end: weakref.finalize | None = None  # ends the worker; also at the interpreter's exit

    def ask(self, request: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
        """The worker's answer. ``request``: values of JSON, see template_worker.py.

        Raises:
            ValueError: the template reached a limit, ended the process, or the answer has more than ``most_bytes``.
            RuntimeError: the worker could not be started.
        """
        content = encoded(request)
        with self._lock:
            try:
                # Given up for as long as it owes an answer, which must not be taken for that to a later request.
                worker, self._worker = self._running(), None
                deadline = time.monotonic() + _WAITS * self._seconds
                try:
                    worker.send(content, deadline)
                    answer = worker.receive(most_bytes, deadline)
                except TimeoutError as error:
                    waited = f"{_WAITS * self._seconds:g} s"
                    raise ValueError(f"the chat template gave no answer within {waited}") from error
                except (EOFError, ConnectionError) as error:
                    raise ValueError(f"the chat template {self._reason(worker)}") from error
                self._worker = worker
            except BaseException:  # an interrupt too
                self._stop()
                raise
        return decoded(answer)

    def close(self) -> None:
        """End the worker, after the request under way. A later request would start another."""
        with self._lock:
            self._stop()

    def _running(self) -> "_Worker":
        if self._worker is not None and self._worker.has_ended():  # somebody killed it
            self._stop()
        if self._worker is None:
            self._worker = _Worker()
            self._end = weakref.finalize(self, self._worker.end)  # known before there is something to end
            self._worker.start(self._seconds, self._memory_bytes)
        return self._worker

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._worker = self._end = None

    def _reason(self, worker: "_Worker") -> str:
        status = worker.status()
        if status == -signal.SIGPROF:
            return f"took longer than {self._seconds:g} s of processor time"
        if status == OUT_OF_MEMORY:
            return f"needed more than {self._memory_bytes >> 20} MiB of memory"
        return f"ended the process in which it ran: {worker.how()}"


class _Worker:
    """One process, and the socket that leads to it. It has no files of this process, and a session of its own, so that
    an interrupt from a terminal does not reach it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seconds: float, memory_bytes: int) -> None:
        """Start the process and wait until it is ready."""
        directories = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        command = [sys.executable, "-I", "-S", str(Path(template_worker.__file__).resolve())]
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(seconds), str(memory_bytes), *sorted(directories)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,
            )
        assert self._process.stderr is not None
        try:
            self.receive(0, time.monotonic() + _START_SECONDS)
        except TimeoutError as error:
            raise RuntimeError(f"the process for chat templates did not start within {_START_SECONDS} s") from error
        except (EOFError, ConnectionError) as error:
            said = self._process.stderr.read().decode(errors="replace")[-1000:]
            raise RuntimeError(f"the process for chat templates cannot start ({self.how()}): {said}") from error
        self._process.stderr.close()  # nobody would read it any more

    def send(self, content: bytes, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(len(content).to_bytes(LENGTH_BYTES, "little"))
        self._socket.sendall(content)

    def receive(self, most_bytes: int, deadline: float) -> bytes:
        length = int.from_bytes(self._receive(LENGTH_BYTES, deadline), "little")
        if length > most_bytes:
            raise ValueError(f"the chat template makes {length} bytes, and {most_bytes} are allowed")
        return self._receive(length, deadline)

    def _receive(self, length: int, deadline: float) -> bytes:
        assert self._socket is not None
        content = bytearray()
        while len(content) < length:
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(min(length - len(content), _CHUNK))
            if not chunk:
                raise EOFError
            content += chunk
        return bytes(content)

    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def status(self) -> int:
        """How it ended, when it has closed its end of the socket."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return 0

    def how(self) -> str:
        status = self.status()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self._socket is not None:
            self._socket.close()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
