"""A server on a real socket whose engine runs in a thread of the tests, so that no process has to start."""

import asyncio
import contextlib
import queue
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import uvloop

from compiled_llm import CompiledEngine
from compiled_llm.server import engine_process
from compiled_llm.server.engine_client import EngineClient, Place
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.run import Server
from compiled_llm.server.settings import DEMO_NAME, ServerSettings
from compiled_llm.system.child_process import Channel
from tests.server.browser import is_fault, is_own, opened

_CHROMIUM = shutil.which("chromium")
SIZES = {"bucket_sizes": (1, 4), "token_bucket_sizes": (64,), "num_kv_blocks": 256, "max_model_len": 512}


class BrokenEngineError(Exception):
    """Ends the thread of the engine, as any other error would, and is no failure of the test."""


class ThreadClient(EngineClient):
    """Speaks to an engine of this process as it would to one of another."""

    def __init__(self, engine: CompiledEngine, place: Place = Place()) -> None:  # noqa: B008
        super().__init__(engine.config, place)
        self._engine = engine

    async def start(self) -> None:
        own, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        await self._connect(own)

    def _serve(self) -> None:
        with self._theirs, contextlib.suppress(BrokenEngineError):
            try:
                engine_process.run(Channel(self._theirs), lambda config: contextlib.nullcontext(self._engine))
            finally:  # the thread that reads messages still waits for one
                self._theirs.shutdown(socket.SHUT_RDWR)

    async def _how_it_ended(self) -> str:
        return "the engine's thread has ended"

    async def close(self) -> None:
        if self._frames is None:
            return
        self._frames.close()
        await asyncio.to_thread(self._thread.join)


class Running:
    """A server that runs in a thread.

    Attributes:
        http: a client of httpx; ``openai``: a client of OpenAI's own library.
        status: of the server, once it has ended.
    """

    status: int | None = None
    _is_stopped = False

    def __init__(self, *engines: CompiledEngine, **settings: Any) -> None:
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        listener = socket.create_server(("127.0.0.1", 0))

        async def run() -> None:
            places = [Place(number, len(engines)) for number in range(len(engines))]
            clients = list(map(ThreadClient, engines, places))
            self.client = Replicas(clients, ServerSettings(**settings))
            self.server = Server("test", self.client, ServerSettings(**settings), listener, DEMO_NAME)
            made.put(asyncio.get_running_loop())
            self.status = await self.server.run()

        def run_loop() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())

        self._thread = threading.Thread(target=run_loop, daemon=True)
        self._thread.start()
        self._loop = made.get()
        self.url = self.server.url
        known: Any = ssl.create_default_context(cafile=settings.get("ssl_certfile"))
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, timeout=60, limits=limits, verify=known)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        while self.http.get("/health").status_code != 200:
            pass

    def stop(self) -> None:
        """As by SIGTERM, of which a second one would end this process."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._loop.call_soon_threadsafe(self.server.stop, signal.SIGTERM)

    def ended(self) -> int | None:
        """Its status, once it has ended."""
        self._thread.join(30)
        return self.status

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ends by itself
                self.stop()
        self._thread.join()


@pytest.fixture(scope="package")
def engine() -> Iterator[CompiledEngine]:
    """That of the servers, whose thread may step it at any time: tests look at it and no more."""
    with CompiledEngine(enforce_eager=True, progress="off", **SIZES) as engine:  # type: ignore[arg-type]
        yield engine


@pytest.fixture(scope="package")
def reference() -> Iterator[CompiledEngine]:
    """Another one, for what a server should answer."""
    with CompiledEngine(enforce_eager=True, progress="off", **SIZES) as engine:  # type: ignore[arg-type]
        yield engine


@contextlib.contextmanager
def running_with(*engines: CompiledEngine, **settings: Any) -> Iterator[Running]:
    """A server of its own. One at a time uses an engine."""
    server = Running(*engines, **settings)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def running(engine: CompiledEngine) -> Iterator[Running]:
    with running_with(engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, headless, through playwright: ``apt install chromium; pip install playwright``."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if _CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, running: Running) -> Iterator[Any]:
    """The page in a browser that has seen nothing before. Nothing may be amiss in its scripts, or leave the server."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1200, "height": 800}, base_url=running.url)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
    page.on("request", lambda request: faults.append(request.url) if not is_own(request.url, running.url) else None)
    page.on("dialog", lambda dialog: dialog.accept() if dialog.type == "confirm" else faults.append(dialog.message))
    opened(page)
    yield page
    context.close()
    assert faults == []
