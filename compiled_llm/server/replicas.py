"""Replicas: the engines of one server, each in a process of its own, as one. ``routing/`` chooses among them.

A request whose engine dies is served again by another one, once at most, as long as nobody has read anything of its
output. So a client gets each token once, and two engines at most die of a request that kills them. What is not seeded
gets a seed here, so that it is the same tokens the second time.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import derived_seed
from compiled_llm.routing.router import RoutedPrompt, Router
from compiled_llm.server.engine_client import EngineClient, Place
from compiled_llm.server.messages import AdapterRef, Generate, Output, Started, encode
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.unread import EngineEndedError, RequestAbortedError, Unread
from compiled_llm.system.child_process import framed
from compiled_llm.system.resources import core_parts, granted_cores, threads_of

_STATS_SECONDS = 2.0  # a step may take so long; then /metrics is without the engine's own counts
_EXPECTED_TOKENS = 256  # of an output that may be longer, or as long as it likes


@dataclasses.dataclass(eq=False)
class _Request:
    """A request that has not ended.

    Attributes:
        frame: itself, as a message; empty once it cannot be served again.
        prompt: None where there is nothing to choose.
        unread: of its client.
        num_expected: tokens of its output, about.
        engine: the one that has it.
        num_left: tokens that this has still to compute for it, about.
    """

    frame: bytes
    prompt: RoutedPrompt | None
    unread: Unread
    num_expected: int
    engine: int = 0
    num_left: int = 0
    is_begun: bool = False
    is_second: bool = False


def engine_clients(config: EngineConfig, settings: ServerSettings) -> list[EngineClient]:
    """Clients for the engines of a server, each with its share of the cores. ``ValueError``: there are too few."""
    count = settings.data_parallel_size
    if count == 1:
        return [EngineClient(config)]
    if config.device.startswith("cuda:"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with data_parallel_size, given {config.device!r}")
    num_cores = len(os.sched_getaffinity(0))
    if count > num_cores:
        raise ValueError(
            f"data_parallel_size must be at most {num_cores}, the cores that this process may use, given {count}"
        )
    if config.num_threads is None:  # the same number for all: code is compiled for one
        threads = threads_of(os.environ.get("OMP_NUM_THREADS", ""), max(1, granted_cores() // count))
        config = dataclasses.replace(config, num_threads=threads)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [name.strip() for name in given.split(",")] if given else [str(index) for index in range(count)]
    clients = []
    for number, cores in enumerate(core_parts(count)):
        own = config if number == 0 else dataclasses.replace(config, progress="off")
        gpu = gpus[number] if number < len(gpus) else ""
        clients.append(EngineClient(own, Place(number, count, cores, {"CUDA_VISIBLE_DEVICES": gpu})))
    return clients


class Replicas:
    """The engines of ``clients``, one at least, none of which is started. All in one event loop.

    Attributes:
        config: the engines' arguments.
        num_served_again: requests, after their engine had died.
    """

    def __init__(self, clients: Sequence[EngineClient], settings: ServerSettings) -> None:
        self.clients, self.config, self._settings = tuple(clients), clients[0].config, settings
        self._requests: dict[str, _Request] = {}  # that have not ended
        self._router: Router | None = None  # while there is nothing to choose
        self._loads = [0] * len(self.clients)
        self._numbers = itertools.count()
        self._serves_again = len(self.clients) > 1  # a request whose engine died, by another one
        self.num_served_again = 0
        for client in self.clients:
            client.on_output, client.on_end = self._take, self._lose

    # -- Start and end

    async def start(self) -> None:
        """Start the first process; it has read nothing yet."""
        await self.clients[0].start()

    async def ready(self) -> Started:
        """Wait until all serve: the first one, and then the others, which find what that has compiled.

        Errors as in ``EngineClient.ready``, of any of them.
        """
        first, *others = self.clients
        started = await first.ready()
        # All have as many blocks, so that each can serve what another one can.
        count = started.num_kv_blocks
        for client in self.clients if others else ():
            client.config = dataclasses.replace(client.config, num_kv_blocks=count, kv_cache_memory_bytes=None)
        for client in others:
            await client.start()
        for other in await asyncio.gather(*(client.ready() for client in others)):
            if other.device != started.device:
                raise ValueError(
                    f"data_parallel_size must be at most the number of GPUs, given {len(self.clients)}: not each has "
                    "one. device='cpu' serves without"
                )
        if others:
            self._router = Router(started.block_size, self._settings.max_load_difference)
            for client in self.clients:
                self._add_to_router(client)
        return started

    def _add_to_router(self, client: EngineClient) -> None:
        if self._router is not None and client.started is not None:
            started, config = client.started, client.config
            num_blocks = started.num_kv_blocks if config.enable_prefix_caching else 0
            self._router.add(client.place.number, num_blocks, config.max_cpu_loras or started.max_loras)

    async def restart(self, client: EngineClient) -> None:
        """Start one that has ended again, and wait until it serves. Errors as in ``EngineClient.ready``."""
        await client.restart()
        self._add_to_router(client)

    async def read_adapter(self, adapter: AdapterRef) -> None:
        """As ``EngineClient.read_adapter``, of all that serve."""
        await self._all(lambda client: client.read_adapter(adapter))

    def drop_adapter(self, adapter: AdapterRef) -> None:
        """As ``EngineClient.drop_adapter``, of all that serve."""
        for client in self._serving:
            client.drop_adapter(adapter)

    async def reset_prefix_cache(self) -> None:
        """As ``EngineClient.reset_prefix_cache``, of all that serve."""
        for client in self._serving:
            self._add_to_router(client)
        await self._all(lambda client: client.reset_prefix_cache())

    @property
    def _serving(self) -> list[EngineClient]:
        return [client for client in self.clients if client.serves]

    async def _all(self, ask: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Ask all that serve. One that ends meanwhile is passed over, unless it is the last."""
        answers = await asyncio.gather(*(ask(client) for client in self._serving), return_exceptions=True)
        for error in answers:
            if error is not None and not isinstance(error, EngineEndedError):
                raise error
        if None not in answers:
            raise next(filter(None, answers), EngineEndedError(self.ended or "the model is being loaded"))

    async def close(self) -> None:
        """End the processes, whatever they do."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def kill(self) -> None:
        """End the processes at once."""
        for client in self.clients:
            client.kill()

    # -- What they do, as one

    @property
    def started(self) -> Started | None:
        """What an engine that serves says of itself, which is the same for all; None while none does."""
        return next((client.started for client in self._serving), None)

    @property
    def ended(self) -> str | None:
        """How the last one has ended; None while one runs."""
        return None if any(client.ended is None for client in self.clients) else self.clients[-1].ended

    async def stats(self) -> list[dict[str, Any] | None]:
        """The statistics of each engine; None: it does not answer."""
        return await asyncio.gather(*map(_stats, self.clients))

    def faults(self) -> list[str | None]:
        """Why each engine does not answer requests; None: it does."""
        return [self._fault(client) for client in self.clients]

    def _fault(self, client: EngineClient) -> str | None:
        if not client.serves:
            return client.ended or "the model is being loaded"
        silent = client.silent_seconds
        return f"no step of the engine for {silent:.0f} s" if silent > self._settings.stall_seconds else None

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once."""
        return sum(client.started.max_num_seqs for client in self.clients if client.serves and client.started)

    @property
    def num_running(self) -> int:
        return sum(client.num_running for client in self.clients)

    @property
    def num_waiting(self) -> int:
        return sum(client.num_waiting for client in self.clients)

    async def generate(self, requests: Sequence[Generate], deadline: float) -> AsyncIterator[Output]:
        """What each step gives one of the requests, until all have ended. Leaving the iteration aborts them.

        What a slow reader has not read of a request is one output, which grows.

        Raises:
            EngineEndedError: no engine is left that could serve one of them, or ``fail_all`` was called.
            RequestAbortedError: ``abort`` was called for one of them.
            TimeoutError: ``deadline``, of the event loop's clock, has come.
            OverflowError: an integer among the sampling parameters has more than 64 bits.
        """
        unread = Unread()
        made = {request.request_id: self._made(request, unread) for request in requests}
        open_ids = set(made)
        assert not open_ids & self._requests.keys(), open_ids
        self._requests |= made
        # One timer for all: a timeout around each wait would cost as much as what is waited for.
        timer = asyncio.get_running_loop().call_at(deadline, unread.fail, TimeoutError())
        try:
            for request_id, request in made.items():
                self._send(request_id, request)
            while open_ids:
                output = await unread.next()
                made[output.request_id].frame = b""
                if output.has_ended:
                    open_ids.remove(output.request_id)
                yield output
        finally:
            timer.cancel()
            self._forget(open_ids)

    def _made(self, request: Generate, unread: Unread) -> _Request:
        expected = num_expected_tokens(request)
        if not self._serves_again:
            return _Request(framed(encode(request)), None, unread, expected)
        number = next(self._numbers)
        if request.sampling.get("seed") is None:  # as an engine alone has it
            seed = derived_seed(f"{self.config.seed}/{number}")
            request = msgspec.structs.replace(request, sampling={**request.sampling, "seed": seed})
        if self._router is None:
            return _Request(framed(encode(request)), None, unread, expected)
        adapter = "" if request.adapter is None else request.adapter.path
        tokens, size = request.prompt_token_ids, self._router.block_size
        return _Request(
            framed(encode(request)), RoutedPrompt.of(tokens, size, adapter, request.cache_salt), unread, expected
        )

    def _send(self, request_id: str, request: _Request) -> None:
        """To the engine that is best for it. If none serves, it fails."""
        serving = [client.place.number for client in self._serving]
        working = [number for number in serving if self._fault(self.clients[number]) is None]
        loads = {number: self._loads[number] for number in working or serving}
        if not loads:
            request.unread.fail(EngineEndedError(self.ended or "the model is being loaded"))
            return
        num_tokens = 0
        if self._router is not None:
            assert request.prompt is not None
            request.engine = self._router.choose(request.prompt, loads)
            num_tokens = self._router.send(request.engine, request.prompt)
        self._set_left(request, num_tokens + request.num_expected)
        self.clients[request.engine].send(request_id, request.frame)

    def _set_left(self, request: _Request, num_tokens: int) -> None:
        self._loads[request.engine] += num_tokens - request.num_left
        request.num_left = num_tokens

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have no reader any more."""
        left = {
            request_id: self._requests.pop(request_id) for request_id in request_ids if request_id in self._requests
        }
        for request in left.values():
            self._set_left(request, 0)
        for client in self.clients if left else ():
            client.abort(left)

    def _take(self, output: Output) -> None:
        """An output came."""
        request = self._requests[output.request_id]
        if output.has_ended:
            del self._requests[output.request_id]
            self._set_left(request, 0)
        else:
            left = request.num_left if request.is_begun else request.num_expected  # then the prompt is computed
            request.is_begun = True
            self._set_left(request, max(1, left - sum(len(piece.token_ids) for piece in output.pieces)))
        request.unread.put(output)

    def _lose(self, engine: int, request_ids: Sequence[str], reason: str) -> None:
        """An engine has ended, with requests that had not."""
        for request_id in request_ids:
            request = self._requests[request_id]
            self._set_left(request, 0)
            if not request.frame or request.is_second or not self._serves_again:
                request.unread.fail(EngineEndedError(reason))
                continue
            request.unread.drop(request_id)
            request.is_begun, request.is_second = False, True
            self.num_served_again += 1
            self._send(request_id, request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests, if they have not ended: they raise a ``RequestAbortedError``."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests[request_id].unread.fail(RequestAbortedError())

    @property
    def unfinished(self) -> list[str]:
        """Ids of requests that have not ended."""
        return list(self._requests)

    def fail_all(self, reason: str) -> None:
        """All requests raise an ``EngineEndedError`` with this reason, and the engines drop them."""
        for request in self._requests.values():
            request.unread.fail(EngineEndedError(reason))


def num_expected_tokens(request: Generate) -> int:
    """Of a request's output, about."""
    n, most = request.sampling.get("n", 1), request.sampling.get("max_tokens")
    return 0 if request.scored_from is not None else n * min(most or _EXPECTED_TOKENS, _EXPECTED_TOKENS)


async def _stats(client: EngineClient) -> dict[str, Any] | None:
    if client.serves:
        with contextlib.suppress(EngineEndedError, TimeoutError):
            return await asyncio.wait_for(client.stats(), _STATS_SECONDS)
    return None
