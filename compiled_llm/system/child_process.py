"""Child processes: parts of this package that run in other processes, with limits of time and memory.

``ChildProcess`` is for the engine's side, the functions at the end are for that of the child, and both send messages by
``Channel``. The first message is the child's settings. Its answer is empty when it is ready, or else an error.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = 77  # exit status of a child
_START_SECONDS = 120
LENGTH_BYTES, _CHUNK_BYTES = 8, 2**20
# All that a child gets of the environment, and a library of numpy that would start threads, before a fork too.
_INHERITED = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_MAIN = (
    "import importlib, json, sys; module, paths = json.loads(sys.argv[1]); sys.path += paths; "
    "importlib.import_module(module).main()"
)


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` of a Python process that is to find this package where this process has it, installed or not."""
    root = str(Path(__file__).parents[2])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))}


class Channel:
    """Messages over a socket: each is its length (8 bytes, little-endian) and its content.

    ``EOFError`` or an ``OSError``: the other side has ended. ``TimeoutError``: the moment ``deadline``, of
    ``time.monotonic``, has come; the channel cannot be used any more. None: it waits for ever.
    """

    def __init__(self, own: socket.socket) -> None:
        self.socket = own

    def send(self, content: bytes, deadline: float | None = None) -> None:
        self.socket.settimeout(_left(deadline))
        self.socket.sendall(framed(content))

    def receive(self, deadline: float | None = None, most_bytes: int | None = None) -> bytes:
        """The next message. ``ValueError``: it has more than ``most_bytes``."""
        length = int.from_bytes(self._receive(LENGTH_BYTES, deadline), "little")
        if most_bytes is not None and length > most_bytes:
            raise ValueError(f"{length} bytes, and {most_bytes} are allowed")
        return self._receive(length, deadline)

    def _receive(self, length: int, deadline: float | None) -> bytes:
        content = bytearray()
        while len(content) < length:
            self.socket.settimeout(_left(deadline))
            chunk = self.socket.recv(min(length - len(content), _CHUNK_BYTES))
            if not chunk:
                raise EOFError("the process has ended")
            content += chunk
        return bytes(content)


def framed(content: bytes) -> bytes:
    """``content`` as ``Channel`` sends it."""
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.001)


def encoded(value: Any) -> bytes:
    """Values of JSON as a message. Strings may hold halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decoded(content: bytes) -> Any:
    return json.loads(content.decode("utf-8", "surrogatepass"))


class ChildProcess:
    """A process that runs ``main()`` of a module; it is started when it is first needed, and again when it has ended.

    It has no files of this process, almost nothing of its environment, and another session, so that an interrupt from a
    terminal does not reach it. It ends with ``end``, when this object is collected, and when the interpreter ends. A
    fork of this process has none: what is called there leaves this one's alone.

    Args:
        name: for messages.
        packages: other packages that the module imports, besides this one and the standard library.
        settings: values of JSON, the first message.
    """

    def __init__(self, name: str, module: str, packages: tuple[str, ...], settings: Any) -> None:
        self._name, self._module, self._packages = name, module, packages
        self._settings = encoded(settings)
        self._parts = types.SimpleNamespace(socket=None, process=None, owner=0)
        weakref.finalize(self, _end, self._parts)

    def channel(self) -> Channel:
        """To the process, which runs then.

        Raises:
            RuntimeError: it cannot be started.
            ValueError: it refuses its settings.
        """
        if self.pid is None:
            self.end()
            self._start()
        return Channel(self._parts.socket)

    @property
    def pid(self) -> int | None:
        """None: it does not run."""
        process = self._parts.process
        if process is None or self._parts.owner != os.getpid() or process.poll() is not None:
            return None
        return process.pid

    def status(self) -> int | None:
        """How it ended, now that its end of the channel is closed: ``subprocess.Popen.returncode``. None: it runs."""
        try:
            return self._parts.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None

    def how_it_ended(self) -> str:
        return described_end(self.status())

    def end(self) -> None:
        _end(self._parts)

    def _start(self) -> None:
        specs = [importlib.util.find_spec(name) for name in self._packages]
        directories = {str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin}
        arguments = json.dumps([self._module, [str(Path(__file__).parents[2]), *sorted(directories)]])
        self._parts.socket, theirs = socket.socketpair()
        with theirs:
            self._parts.owner = os.getpid()
            self._parts.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=_ENVIRONMENT | {name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,
            )
        channel, deadline = Channel(self._parts.socket), time.monotonic() + _START_SECONDS
        try:
            channel.send(self._settings, deadline)
            refusal = channel.receive(deadline)
        except TimeoutError as error:
            raise RuntimeError(f"{self._name} did not start within {_START_SECONDS} s") from error
        except (EOFError, OSError) as error:
            reason = self._parts.process.stderr.read().decode(errors="replace")[-1000:]
            raise RuntimeError(f"{self._name} cannot start ({self.how_it_ended()}): {reason}") from error
        self._parts.process.stderr.close()  # it is not read any more
        if refusal:
            self.end()
            raise ValueError(refusal.decode())


def described_end(status: int | None) -> str:
    """``status``: as ``subprocess.Popen.returncode``. None: nobody knows."""
    if status is None:
        return "nothing says how"
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {names.get(-status, -status)}"


def _end(parts: types.SimpleNamespace) -> None:
    """End the process, and close what leads to it. A fork of the process that started it only closes its own copies."""
    if parts.process is not None:
        if parts.owner == os.getpid():
            parts.process.kill()
            parts.process.wait()
        else:
            parts.process.poll()  # notes that it is no child of this process
        parts.process.stderr.close()
        parts.process = None
    if parts.socket is not None:
        parts.socket.close()
        parts.socket = None


# -- In the child


def own_channel() -> Channel:
    return Channel(socket.socket(fileno=0))


def limit_memory(num_bytes: int) -> None:
    """Bound the address space of this process."""
    with contextlib.suppress(ValueError):  # macOS has no such limit: there the processor time alone is bounded
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


class ProcessorTime:
    """Seconds that this process may compute. Within ``with`` the kernel ends it by SIGPROF when they are used up."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def add(self, seconds: float) -> None:
        """Within ``with``."""
        self.left += seconds
        signal.setitimer(signal.ITIMER_PROF, self.left)

    def __enter__(self) -> None:
        self._started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(self.left, 0.001))

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self.left -= time.process_time() - self._started
