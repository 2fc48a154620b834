"""What runs on a cluster: engines, and HTTP before them. ``application.py`` makes Ray Serve's deployments of them.

The classes are not decorated here: so Ray sends their names alone, and each machine has the code.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import read_lora_modules
from compiled_llm.ray_serve.autoscaling import KV_USE
from compiled_llm.ray_serve.deployed_engines import DeployedEngines, config_digest
from compiled_llm.server.engine_client import EngineClient
from compiled_llm.server.messages import AdapterRef, Generate, decode_for_engine, encode
from compiled_llm.server.metrics import Metrics
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.routes import make_app
from compiled_llm.server.service import Service
from compiled_llm.server.settings import ServerSettings
from compiled_llm.system.child_process import LENGTH_BYTES


class Engine:
    """One engine. Its process is a child of this one, and the ranks of its model are children of that.

    When that process ends, this one does: so nobody sends it requests any more, and Ray Serve starts another.

    Args:
        config: arguments of ``EngineConfig``.
    """

    async def __init__(self, config: dict[str, Any], settings: ServerSettings) -> None:
        self._digest, self._settings = config_digest(config), settings
        self._client = EngineClient(EngineConfig(**config))
        self._requests = Replicas([self._client], settings)
        await self._requests.start()
        self._started = await self._requests.ready()
        self._waiting = asyncio.create_task(self._end_with_it())

    async def _end_with_it(self) -> None:
        await self._client.wait_ended()
        print(f"compiled-llm: {self._client.ended}", file=sys.stderr, flush=True)
        os._exit(1)

    @property
    def _number(self) -> int:
        """Ray Serve gives its engines the numbers from 0 on, and the number of one that ended to another."""
        serve: Any = importlib.import_module("ray.serve")
        return serve.get_replica_context().rank.rank

    def _check(self, digest: str) -> None:
        if digest != self._digest:
            raise RuntimeError("this engine has other arguments than the server: one of them is about to be replaced")

    async def describe(self, digest: str) -> bytes:
        """What the engine says of itself: ``Started``."""
        self._check(digest)
        return encode(self._started)

    async def generate(self, frame: bytes, digest: str) -> AsyncIterator[bytes]:
        """Serve one request. ``frame``: a message ``Generate``. Gives each ``Output``."""
        self._check(digest)
        request = decode_for_engine(frame[LENGTH_BYTES:])
        assert isinstance(request, Generate)
        deadline = asyncio.get_running_loop().time() + self._settings.max_request_seconds
        number = self._number
        async for output in self._requests.generate([request], deadline):
            output.engine = number
            yield encode(output)

    async def stats(self) -> tuple[int, dict[str, Any]]:
        """The engine's number and its statistics."""
        return self._number, await self._client.stats()

    async def read_adapter(self, name: str, path: str) -> tuple[bool, str | None]:
        """Whether it is missing, and what is wrong with it; None: nothing."""
        try:
            await self._client.read_adapter(AdapterRef(name, path))
        except (FileNotFoundError, ValueError) as error:
            return isinstance(error, FileNotFoundError), str(error)
        return False, None

    async def drop_adapter(self, name: str, path: str) -> None:
        self._client.drop_adapter(AdapterRef(name, path))

    async def reset_prefix_cache(self) -> str | None:
        """Why it cannot be done now; None: it was."""
        try:
            await self._client.reset_prefix_cache()
        except RuntimeError as error:
            return str(error)
        return None

    # -- What Ray Serve asks

    def check_health(self) -> None:
        """Raises where the engine has ended, or hangs."""
        fault = self._requests.faults()[0]
        if fault is not None:
            raise RuntimeError(fault)

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the request router."""
        started, config = self._started, self._client.config
        return {
            "block_size": started.block_size,
            "num_blocks": started.num_kv_blocks if config.enable_prefix_caching else 0,
            "num_adapters": config.max_cpu_loras or started.max_loras,
            "digest": self._digest,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaling policy."""
        stats = await self._client.stats()
        return {KV_USE: stats["used_blocks"] / max(1, stats["num_kv_blocks"])}

    async def __del__(self) -> None:
        """Called by Ray Serve when all requests have ended, or had the time for it."""
        if hasattr(self, "_waiting"):
            self._waiting.cancel()
        await self._requests.close()


class Server:
    """HTTP and text, for engines that are found through ``engines``, a handle.

    Args:
        config: arguments of the engines.
        name: of the model, unless ``settings`` give it others.
    """

    async def __init__(self, engines: Any, config: dict[str, Any], settings: ServerSettings, name: str) -> None:
        client = DeployedEngines(engines, config, settings)
        names = settings.served_model_name or (name,)
        self._service = Service(settings, client, names, Metrics(names[0]))
        started = await client.ready()
        for module in read_lora_modules(settings.lora_modules).values():
            await self._service.adapters.load(module)
        self._service.start(started)

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self._service)

    def __del__(self) -> None:
        """Called by Ray Serve when all requests have ended, or had the time for it."""
        self._service.close()
