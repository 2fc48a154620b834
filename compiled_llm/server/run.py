"""The server's process from its start to its exit status: the socket, the engines' processes, signals, the end."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.server.adapters import check_lora_settings
from compiled_llm.server.engine_client import EngineClient
from compiled_llm.server.metrics import Metrics
from compiled_llm.server.protocol import bounded_protocol
from compiled_llm.server.replicas import Replicas, engine_clients
from compiled_llm.server.routes import make_app
from compiled_llm.server.service import Service
from compiled_llm.server.settings import DEMO_NAME, ServerSettings
from compiled_llm.server.unread import EngineEndedError

_BACKLOG = 2048
_OTHER_DESCRIPTORS = 64  # that the server needs besides those of connections
_LAST_SECONDS = 5.0  # for streams to say that the server has ended, after the seconds for draining
_MOST_RESTARTS, _RESTARTS_SECONDS = 5, 600.0
_PAUSE_SECONDS = 1.0  # behind a start that failed, which may have taken no time
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(program: str, config: EngineConfig, settings: ServerSettings) -> int:
    """Serve until a signal comes, or the last engine ends. Returns the exit status.

    Raises:
        ValueError: an argument does not allow it.
        OSError: the address cannot be listened to.
    """
    check_lora_settings(settings, config)
    client = Replicas(engine_clients(config, settings), settings)
    with _listening(settings) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is one
        return runner.run(Server(program, client, settings, listener, config.model or DEMO_NAME).run())


def _listening(settings: ServerSettings) -> socket.socket:
    """Taken before the model is loaded, so that a port that is in use is known at once."""
    try:
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        raise OSError(f"--host {settings.host} --port {settings.port}: {reason}: give another --port") from error


class _HttpServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not for uvicorn."""
        yield


class Server:
    """HTTP on a socket that listens, for engines that ``client`` starts.

    Args:
        program: whose messages these are.
        name: of the model, unless ``settings`` give it others.

    Raises:
        ValueError: the settings' certificate is none.

    Attributes:
        url: where it is found.
    """

    def __init__(
        self, program: str, client: Replicas, settings: ServerSettings, listener: socket.socket, name: str
    ) -> None:
        self._program, self._client, self._settings, self._listener = program, client, settings, listener
        names = settings.served_model_name or (name,)
        self._service = Service(settings, client, names, Metrics(names[0]))
        self._is_stopping = False  # by a signal
        max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS
        config = uvicorn.Config(
            make_app(self._service),
            http=bounded_protocol(settings.max_header_bytes, settings.client_seconds, max_connections),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(settings.drain_seconds + _LAST_SECONDS) + 1,
        )
        config.load()
        config.ssl = settings.tls()  # uvicorn's own would ask for the password of a key
        self._http = _HttpServer(config)

    async def run(self) -> int:
        """Until a signal comes (of these there are none but in the main thread) or the last engine ends."""
        await self._client.start()
        loop = asyncio.get_running_loop()
        numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
        for number in numbers:
            loop.add_signal_handler(number, self.stop, number)
        http = asyncio.create_task(self._http.serve([self._listener]))
        status = 0
        try:
            try:
                started = await self._client.ready()
                for module in read_lora_modules(self._settings.lora_modules).values():
                    await self._service.adapters.load(module)
            except FileNotFoundError as error:
                raise ValueError(str(error)) from error
            except EngineEndedError as error:
                self._say(f"error: {error}")
                return 1
            except RuntimeError as error:
                self._say(f"error: {error}")
                return 1
            self._service.start(started)
            self._say(str(self._service.formats))
            if (count := len(self._client.clients)) > 1:
                threads = self._client.config.num_threads
                self._say(f"{count} engines, each with {threads} thread{'s' * (threads != 1)}")
            adapters = [adapter.ref.name for adapter in self._service.adapters]
            self._say(f"serves {', '.join([*self._service.names, *adapters])} at {self.url}")
            keeping = asyncio.gather(*map(self._keep, self._client.clients))
            drained = asyncio.ensure_future(self._service.is_unused.wait())
            await asyncio.wait((http, keeping, drained), return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
            status = int(keeping.done())
            self._http.should_exit = True
            await http
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
        finally:
            self._http.should_exit = True
            await http
            await self._client.close()
            self._service.close()
            for number in numbers:
                loop.remove_signal_handler(number)
        return status

    async def _keep(self, client: EngineClient) -> None:
        """Until an engine's process has ended for good."""
        restarts: list[float] = []  # moments of ``time.monotonic``
        await client.wait_ended()
        error = str(client.ended)
        while True:
            self._say(f"error: {error}")
            if self._service.is_draining or not self._settings.restart_engine:
                return
            now = time.monotonic()
            if len(restarts) == _MOST_RESTARTS:
                self._say(f"error: {self._name_of(client)} has ended {_MOST_RESTARTS + 1} times within "
                          f"{max(_RESTARTS_SECONDS, now - restarts[0]):.0f} s")  # fmt: skip
                return
            restarts.append(now)
            self._say(f"starts {self._name_of(client)} again")
            try:
                await self._client.restart(client)
            except ValueError as refusal:  # another start would say the same
                self._say(f"error: {refusal}")
                return
            except RuntimeError as failure:  # it was killed as it started, say, or lacked memory for a moment
                error = str(failure)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue  # a start that fails counts, however long it took
            self._say(f"{self._name_of(client)} serves again")
            await client.wait_ended()
            error = str(client.ended)
            restarts = [moment for moment in restarts if moment > time.monotonic() - _RESTARTS_SECONDS]

    def _name_of(self, client: EngineClient) -> str:
        return "the engine" if len(self._client.clients) == 1 else f"engine {client.place.number}"

    def stop(self, number: int) -> None:
        """The first signal: answer what is under way, and end. A second one, or one while the model loads: end now."""
        if self._is_stopping or not self._service.is_started:
            self._say(f"stopped by {signal.Signals(number).name}")
            self._client.kill()
            os._exit(128 + number)
        self._service.is_draining = self._is_stopping = self._http.should_exit = True
        seconds = self._settings.drain_seconds
        self._say(f"{signal.Signals(number).name}: ends when {self._service.num_admitted} prompts are answered, "
                  f"in {seconds:g} s at the latest")  # fmt: skip
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._client.fail_all, "the server has ended")

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._settings.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _say(self, text: str) -> None:
        print(f"{self._program}: {text}", file=sys.stderr, flush=True)
