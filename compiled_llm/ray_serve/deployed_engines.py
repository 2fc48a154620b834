"""DeployedEngines: the engines of a deployment of Ray Serve as the server sees them, which are many, and change.

Which of them gets a request is the business of Serve and its request router. What dies is replaced by Serve too; a
request that it had is asked for again here, once at most, as long as nobody has read anything of its output.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from compiled_llm.api.config import EngineConfig
from compiled_llm.server.engine_client import EngineClient
from compiled_llm.server.messages import VERSION, AdapterRef, Output, Start, Started, encode
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.unread import EngineEndedError

_STATS_SECONDS = 5.0
decode_output = msgspec.msgpack.Decoder(Output).decode
decode_started = msgspec.msgpack.Decoder(Started).decode


def config_digest(config: Mapping[str, Any]) -> str:
    """Of the arguments of ``EngineConfig``, and what messages mean: what two sides compare, one of which is older."""
    return hashlib.sha256(encode(Start(VERSION, dict(config)))).hexdigest()


class DeployedEngines(Replicas):
    """The engines of a deployment, as one.

    Args:
        handle: Ray Serve's ``DeploymentHandle`` of it.
        config: arguments of its engines.
    """

    def __init__(self, handle: Any, config: Mapping[str, Any], settings: ServerSettings) -> None:
        self._deployment = _Deployment(handle, config)
        super().__init__([self._deployment], settings)
        self._serves_again = True

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once, in as many engines as there should be at least."""
        return super().max_num_seqs * self._settings.data_parallel_size

    async def stats(self) -> list[dict[str, Any] | None]:
        return await self._deployment.stats_of_all()


class _Deployment(EngineClient):
    """All engines of a deployment: each request that is sent is a call of its own."""

    def __init__(self, handle: Any, config: Mapping[str, Any]) -> None:
        super().__init__(EngineConfig(**config))
        self._handle, self._digest = handle, config_digest(config)
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Ray Serve starts them."""

    async def ready(self) -> Started:
        self.started = decode_started(await self._handle.describe.remote(self._digest))
        return self.started

    def send(self, request_id: str, frame: bytes) -> None:
        self._unfinished[request_id] = None
        self.num_running += 1
        self._calls[request_id] = asyncio.create_task(self._call(request_id, frame))

    async def _call(self, request_id: str, frame: bytes) -> None:
        outputs = self._handle.options(stream=True).generate.remote(frame, self._digest)
        reason = "the engine's answer has broken off"
        try:
            async for output in outputs:
                self._hand_out(decode_output(output))
        except (Exception, asyncio.CancelledError) as error:  # Ray has one for each way in which an engine can go
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # nobody waits for it any more
                raise
            reason = f"an engine was lost: {_brief(error)}"
        finally:
            self.num_running -= 1
            outputs.cancel()
            if self._calls.get(request_id) is asyncio.current_task():
                del self._calls[request_id]
        if request_id in self._unfinished:
            del self._unfinished[request_id]
            self.on_end(self.place.number, [request_id], reason)

    def _hand_out(self, output: Output) -> None:
        if output.request_id not in self._unfinished:
            return  # aborted meanwhile
        if output.has_ended:
            del self._unfinished[output.request_id]
        self.on_output(output)

    @property
    def silent_seconds(self) -> float:
        """0: Ray Serve asks each engine itself whether it hangs."""
        return 0.0

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._unfinished:
                del self._unfinished[request_id]
                self._calls[request_id].cancel()

    async def stats_of_all(self) -> list[dict[str, Any] | None]:
        """By their numbers; None: it does not answer."""
        try:
            async with asyncio.timeout(_STATS_SECONDS):
                found = dict(await self._all("stats"))
        except (EngineEndedError, TimeoutError):
            return [None]
        return [found.get(number) for number in range(max(found) + 1)]

    async def read_adapter(self, adapter: AdapterRef) -> None:
        for is_missing, error in await self._all("read_adapter", adapter.name, adapter.path):
            if error is not None:
                raise (FileNotFoundError if is_missing else ValueError)(error)

    def drop_adapter(self, adapter: AdapterRef) -> None:
        self._dropping = asyncio.create_task(self._all("drop_adapter", adapter.name, adapter.path))

    async def reset_prefix_cache(self) -> None:
        errors = [error for error in await self._all("reset_prefix_cache") if error is not None]
        if errors:
            raise RuntimeError(errors[0])

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """What each engine answers. ``EngineEndedError``: there is none, or one was lost on the way."""
        try:
            return await self._handle.broadcast(method, *arguments).results_async()
        except TimeoutError:
            raise
        except Exception as error:
            raise EngineEndedError(_brief(error)) from error

    async def close(self) -> None:
        """Ray Serve ends them."""


def _brief(error: Exception) -> str:
    """The first line of an error of Ray, without the identifiers that follow."""
    return str(error).split("\n", 1)[0].rstrip(":. ") or type(error).__name__
