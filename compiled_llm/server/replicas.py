"""Replicas: the engines of one server, each in a process of its own, as one. ``routing/`` chooses among them.

A request whose engine dies is served again by another one, once at most: two engines die of a request that kills them.
What is not seeded gets a seed here, so that it is the same tokens the second time: a token follows from seed and
position alone. So the second engine goes on after the tokens that are known here, or begins anew, and what the client
has had already is left out: it gets each token once.

With engines of the role "prefill" a long prompt goes to one of them, and at the same time to another one, which takes
its KV blocks from there while they are computed. Of several prompts in one engine the next one goes to another when the
first has ended: blocks that are waited for take room. Where that fails, or takes too long, the second one computes the
prompt itself.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from compiled_llm.api.config import KV_KEY_VARIABLE, EngineConfig
from compiled_llm.api.sampling_params import derived_seed
from compiled_llm.routing.router import RoutedPrompt, Router
from compiled_llm.server.engine_client import EngineClient, Place
from compiled_llm.server.messages import AdapterRef, Generate, Output, Started, encode
from compiled_llm.server.open_request import OpenRequest, num_expected_tokens
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.take_over import OtherServer, OtherServerError
from compiled_llm.server.unread import EngineEndedError, RequestAbortedError, Unread
from compiled_llm.system.child_process import framed
from compiled_llm.system.numa import threads_each
from compiled_llm.system.resources import core_parts, threads_of

_STATS_SECONDS = 2.0  # a step may take so long; then /metrics is without the engine's own counts
_HOST_BYTES = 1 << 30  # by way of which blocks come and go, where nothing is given
_HAND_OVER_SECONDS = 5.0  # beyond those for blocks, that an engine may take to answer


def engine_clients(config: EngineConfig, settings: ServerSettings) -> list[EngineClient]:
    """Clients for the engines of a server, each with its share of the cores; those of the role "prefill" come last.

    ``ValueError``: there are too few cores.
    """
    count_decode = settings.data_parallel_size
    count = count_decode + settings.prefill_replicas
    if count == 1:
        return [EngineClient(config)]
    if (settings.prefill_replicas or settings.allow_drain) and config.transfers:
        raise ValueError(
            "role must be 'both' and kv_transfer_address None with prefill_replicas and allow_drain, which set them "
            f"for each engine, given {config.role!r} and {config.kv_transfer_address!r}"
        )
    if config.device.startswith("cuda:"):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda' with data_parallel_size, given {config.device!r}")
    if count > (num_cores := len(os.sched_getaffinity(0))):
        names = "data_parallel_size" + " and prefill_replicas together" * (settings.prefill_replicas > 0)
        raise ValueError(f"{names} must be at most {num_cores}, the cores that this process may use, given {count}")
    if config.num_threads is None:  # the same number for all: code is compiled for one
        most = threads_each(core_parts(count), config.pipeline_parallel_size, config.tensor_parallel_size)
        config = dataclasses.replace(config, num_threads=threads_of(os.environ.get("OMP_NUM_THREADS", ""), most))
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count * config.tensor_parallel_size)))
    gpus = [name.strip() for name in given.split(",")]
    clients = []
    moves, secret, directory = settings.prefill_replicas > 0 or settings.allow_drain, {}, ""
    if moves:
        secret = {KV_KEY_VARIABLE: os.environ.get(KV_KEY_VARIABLE) or secrets.token_hex(32)}
        directory = tempfile.mkdtemp(prefix="compiled-llm-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for number, cores in enumerate(core_parts(count)):
        own = config if number == 0 else dataclasses.replace(config, progress="off")
        if settings.prefill_replicas or (moves and config.kv_host_bytes):
            role: Any = "both" if not settings.prefill_replicas else "decode" if number < count_decode else "prefill"
            host, address = config.kv_host_bytes or _HOST_BYTES, f"unix:{directory}/{number}"
            own = dataclasses.replace(own, role=role, kv_transfer_address=address, kv_host_bytes=host)
        gpu = ",".join(gpus[number * config.tensor_parallel_size :][: config.tensor_parallel_size])
        clients.append(EngineClient(own, Place(number, count, cores, {"CUDA_VISIBLE_DEVICES": gpu, **secret})))
    return clients


def _may_be_apart(asked: Generate) -> bool:
    """Whether another engine may compute the prompt: of no log-probability in it is asked."""
    return asked.scored_from is None and not asked.kv_transfer_params and asked.sampling.get("prompt_logprobs") is None


class Replicas:
    """The engines of ``clients``, one at least, none of which is started. All in one event loop.

    Attributes:
        config: the engines' arguments.
        num_served_again: requests, after their engine had died.
        num_prompts_apart: prompts that an engine of the role "prefill" computed; num_prompts_back: those that none did
            in time.
        on_prompt: told of a request whose prompt an engine of the role "prefill" has computed, and of its output.
        num_handed_over: requests that went from one engine to another while they ran; num_handed_back: those that
            another server was to serve, and did not to the end.
    """

    on_prompt: Callable[[str, Output], object] | None = None

    def __init__(self, clients: Sequence[EngineClient], settings: ServerSettings) -> None:
        self.clients, self.config, self._settings = tuple(clients), clients[0].config, settings
        self._requests: dict[str, OpenRequest] = {}  # that have not ended
        self._drained: set[int] = set()  # engines that get no requests
        self._other: OtherServer | None = None  # that gets all requests
        self._handing = [asyncio.Lock() for _ in clients]  # an engine hands over to one drain at a time
        # Those that compute prompts for others, if there are others.
        of_prefill = {client.place.number for client in clients if client.config.role == "prefill"}
        self._prefill = of_prefill if len(of_prefill) < len(clients) else set()
        self._router: Router | None = None  # while there is nothing to choose
        self._prompts: dict[int, list[str]] = {}  # in engines of the role "prefill", in the order in which they came
        self._loads = [0] * len(self.clients)
        self._numbers = itertools.count()
        self._serves_again = len(self.clients) > 1  # a request whose engine died, by another one
        self.num_served_again = self.num_prompts_apart = self.num_prompts_back = self.num_handed_over = 0
        self.num_handed_back = 0
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
        self._drained.discard(client.place.number)
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

    @property
    def counts(self) -> dict[str, int]:
        """What was done with requests of several engines, by the names of metrics."""
        return {
            "requests_served_again": self.num_served_again,
            "requests_handed_over": self.num_handed_over,
            "requests_handed_back": self.num_handed_back,
            "prompts_apart": self.num_prompts_apart,
            "prompts_back": self.num_prompts_back,
        }

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

    async def generate(
        self, requests: Sequence[Generate], deadline: float, unread: Unread | None = None
    ) -> AsyncIterator[Output]:
        """What each step gives one of the requests, until all have ended. Leaving the iteration aborts them.

        What a slow reader has not read of a request is one output, which grows, in ``unread`` if that is given.

        Raises:
            EngineEndedError: no engine is left that could serve one of them, or ``fail_all`` was called.
            RequestAbortedError: ``abort`` was called for one of them.
            TimeoutError: ``deadline``, of the event loop's clock, has come.
            OverflowError: an integer among the sampling parameters has more than 64 bits.
        """
        unread = Unread() if unread is None else unread
        made = {request.request_id: self._made(request, unread) for request in requests}
        open_ids = set(made)
        assert not open_ids & self._requests.keys(), open_ids
        self._requests |= made
        # One timer for all: a timeout around each wait would cost as much as what is waited for.
        timer = asyncio.get_running_loop().call_at(deadline, unread.fail, TimeoutError())
        try:
            for request_id, request in made.items():
                if self._other is None:
                    self._send(request_id, request)
                else:
                    encode(request.asked)  # what cannot be sent is refused now
                    self._send_elsewhere(self._other, request_id, request, None)
            while open_ids:
                output = await unread.next()
                if output.has_ended:
                    open_ids.remove(output.request_id)
                yield output
        finally:
            timer.cancel()
            self._forget(open_ids)

    def _made(self, request: Generate, unread: Unread) -> OpenRequest:
        expected = num_expected_tokens(request)
        if not (self._serves_again or self._settings.allow_drain):
            return OpenRequest(request, None, unread, expected)
        number = next(self._numbers)
        if request.sampling.get("seed") is None:  # as an engine alone has it
            seed = derived_seed(f"{self.config.seed}/{number}")
            request = msgspec.structs.replace(request, sampling={**request.sampling, "seed": seed})
        if self._router is None:
            return OpenRequest(request, None, unread, expected)
        adapter = "" if request.adapter is None else request.adapter.path
        tokens, size = request.prompt_token_ids, self._router.block_size
        return OpenRequest(request, RoutedPrompt.of(tokens, size, adapter, request.cache_salt), unread, expected)

    def _send(self, request_id: str, request: OpenRequest, *, prefills: bool = True) -> None:
        """To the engine that is best for it, or first to one of the role "prefill". If none serves, it fails."""
        loads = self._of_role(prefill=False)
        if not loads:
            request.unread.fail(EngineEndedError(self.ended or "the model is being loaded"))
            return
        engine = 0
        if self._router is not None:
            assert request.prompt is not None
            engine = self._router.choose(request.prompt, loads)
            of_prefill = self._of_role(prefill=True) if prefills and engine not in self._prefill else {}
            num_new = self._router.num_new(engine, request.prompt) + len(request.known_ids)
            if of_prefill and num_new >= self._settings.min_prefill_tokens and _may_be_apart(request.asked):
                encode(request.asked)  # what cannot be sent is refused now: later nobody waits who could be told
                self._begin_prompt(min(of_prefill, key=of_prefill.__getitem__), request_id, request, num_new)
                return
        self._send_to(engine, request_id, request, None)

    def _of_role(self, *, prefill: bool) -> dict[int, int]:
        """Engines that get requests, with what they have to do: those of the role "prefill", or the others.

        While no other serves, those that hang or are drained; then those of the role "prefill", which can do all.
        """
        of_role = [one for one in self._serving if (one.place.number in self._prefill) is prefill]
        working = [one for one in of_role if self._fault(one) is None and one.place.number not in self._drained]
        others = [] if prefill else of_role or self._serving
        return {one.place.number: self._loads[one.place.number] for one in working or others}

    def _send_to(self, engine: int, request_id: str, request: OpenRequest, params: dict[str, Any] | None) -> None:
        """``params``: where blocks of it are."""
        request.engine = engine
        num_tokens = 0
        if self._router is not None:
            assert request.prompt is not None
            num_tokens = self._router.send(engine, request.prompt)
        self._set_left(request, (0 if params else num_tokens) + request.num_expected)
        self.clients[engine].send(request_id, framed(encode(request.message(params))))

    def _begin_prompt(self, engine: int, request_id: str, request: OpenRequest, num_tokens: int) -> None:
        """An engine of the role "prefill" computes a prompt."""
        request.prompt_engine, request.prompt_left, request.engine = engine, num_tokens, None
        self._loads[engine] += num_tokens
        loop, seconds = asyncio.get_running_loop(), self._settings.max_prefill_seconds
        request.late = loop.call_later(seconds, self._end_prefill, request_id, request, None)
        self.clients[engine].send(request_id, framed(encode(request.prompt_message())))
        prompts = self._prompts.setdefault(engine, [])
        prompts.append(request_id)
        if len(prompts) == 1:
            self._take_early(request_id, request)

    def _take_early(self, request_id: str, request: OpenRequest) -> None:
        """Another engine gets a request, and takes blocks of the prompt as they are computed."""
        loads, engine = self._of_role(prefill=False), request.prompt_engine
        assert engine is not None
        if engine in self._drained or self._other is not None or not self.clients[engine].serves:
            return  # what it has goes elsewhere just now
        if loads and request.prompt is not None and self._router is not None and engine not in loads:
            place = {"remote_host": self.clients[engine].config.kv_transfer_address, "remote_port": 0}
            params = {"do_remote_prefill": True, "remote_request_id": request.lease, **place}
            self._send_to(self._router.choose(request.prompt, loads), request_id, request, params)

    def _end_prefill(self, request_id: str, request: OpenRequest, params: dict[str, Any] | None) -> None:
        """A prompt was computed, and its blocks are where ``params`` say; None: they are not, or too late."""
        self.num_prompts_apart += params is not None
        self.num_prompts_back += params is None
        self._leave_prompt(request_id, request)
        if request.engine is not None:
            return  # it takes what is there, and computes the rest
        loads = self._of_role(prefill=False)
        if self._other is not None:
            self._send_elsewhere(self._other, request_id, request, None)
        elif params is None or not loads or request.prompt is None or self._router is None:
            self._send(request_id, request, prefills=False)
        else:
            self._send_to(self._router.choose(request.prompt, loads), request_id, request, params)

    def _leave_prompt(self, request_id: str, request: OpenRequest) -> None:
        """No engine of the role "prefill" has a request any more."""
        if request.late is None or request.prompt_engine is None:
            return
        engine, request.prompt_engine = request.prompt_engine, None
        request.late.cancel()
        request.late = None
        self._loads[engine] -= request.prompt_left
        self.clients[engine].abort([request_id])  # if it has not ended
        prompts = self._prompts[engine]
        was_first = prompts[0] == request_id
        prompts.remove(request_id)
        if was_first and prompts and prompts[0] in self._requests:
            self._take_early(prompts[0], self._requests[prompts[0]])

    def _set_left(self, request: OpenRequest, num_tokens: int) -> None:
        if request.engine is not None:
            self._loads[request.engine] += num_tokens - request.num_left
            request.num_left = num_tokens

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Requests that have no reader any more."""
        left = {name: self._requests.pop(name) for name in request_ids if name in self._requests}
        for request_id, request in left.items():
            self._set_left(request, 0)
            self._leave_prompt(request_id, request)
            if request.elsewhere is not None:
                request.elsewhere.cancel()
        for client in self.clients if left else ():
            client.abort(left)

    def _take(self, output: Output) -> None:
        """An output came."""
        request = self._requests[output.request_id]
        if request.prompt_engine is not None and output.engine == request.prompt_engine:
            if output.has_ended:
                if self.on_prompt is not None:
                    self.on_prompt(output.request_id, output)
                self._end_prefill(output.request_id, request, output.kv_transfer_params)
            return
        output = request.take(output)
        if output.has_ended:
            self._set_left(request, 0)
            self.num_prompts_apart += request.prompt_engine is not None  # which has yet to say so
            self._leave_prompt(output.request_id, request)
            del self._requests[output.request_id]
        elif request.elsewhere is None:
            left = request.num_left if request.is_begun else request.num_expected  # then the prompt is computed
            request.is_begun = True
            self._set_left(request, max(1, left - sum([len(piece.token_ids) for piece in output.pieces])))
        request.unread.put(output)

    def _lose(self, engine: int, request_ids: Sequence[str], reason: str) -> None:
        """An engine has ended, with requests that had not."""
        for request_id in request_ids:
            request = self._requests[request_id]
            if request.prompt_engine == engine:  # nothing has come of it
                self._end_prefill(request_id, request, None)
                continue
            self._set_left(request, 0)
            self._leave_prompt(request_id, request)
            if request.is_second or not self._serves_again:
                request.unread.fail(EngineEndedError(reason))
                continue
            request.is_second = True
            request.begin_again()
            self.num_served_again += 1
            self._send(request_id, request)

    # -- Hand-over

    async def drain(self, engine: int, seconds: float) -> int:
        """No requests go to an engine any more, and those that it has go to others. Returns how many these are.

        Blocks that it can lay ready within ``seconds`` are taken from it; other tokens are computed again. It serves
        again after ``undrain``, or when it was restarted.

        Raises:
            ValueError: there is no such engine, or no other one serves.
        """
        client = self._begin_drain(engine)
        handed = await self._hand_over(client, seconds)
        for request_id, request, params in handed:
            loads = self._of_role(prefill=False)
            if request.prompt_engine == engine:
                self._end_prefill(request_id, request, None)
            elif params is None or not loads:
                self._send(request_id, request)
            else:
                assert request.prompt is not None
                assert self._router is not None
                self._send_to(self._router.choose(request.prompt, loads), request_id, request, params)
        return len(handed)

    def _begin_drain(self, engine: int) -> EngineClient:
        client = self._client(engine)
        others = [one for one in self._serving if one is not client and one.place.number not in self._prefill]
        if engine not in self._prefill and all(one.place.number in self._drained for one in others):
            raise ValueError(f"engine must not be the last one that serves requests, given {engine}")
        self._drained.add(engine)
        return client

    @property
    def adapters_in_use(self) -> set[AdapterRef]:
        """Those of requests that have not ended."""
        return {one.asked.adapter for one in self._requests.values() if one.asked.adapter is not None}

    async def _hand_over(
        self, client: EngineClient, seconds: float
    ) -> list[tuple[str, OpenRequest, dict[str, Any] | None]]:
        """Have an engine end its requests. Returns them, with where their blocks are; they are to begin again."""
        if not client.serves:
            return []
        engine = client.place.number
        try:
            async with self._handing[engine]:
                asking = asyncio.wait_for(client.hand_over(seconds), seconds + _HAND_OVER_SECONDS)
                handed = (await asking).requests
        except TimeoutError:  # its requests are computed again elsewhere
            own = [
                name
                for name, one in self._requests.items()
                if engine in (one.engine, one.prompt_engine) and one.elsewhere is None
            ]
            handed = dict.fromkeys(own, ([], None))
            client.abort(handed)
        except EngineEndedError:
            return []  # ``_lose`` has sent them elsewhere
        found = []
        for request_id, (tokens, params) in handed.items():
            request = self._requests.get(request_id)
            if request is None or engine not in (request.engine, request.prompt_engine):
                continue
            client.forget(request_id)
            if request.prompt_engine != engine:
                self._set_left(request, 0)
                self._leave_prompt(request_id, request)
                request.begin_again(tokens)
            found.append((request_id, request, params))
        self.num_handed_over += len(found)
        return found

    async def drain_to(self, other: OtherServer, engine: int | None, seconds: float) -> int:
        """Another server gets the requests of an engine, or of all; their outputs come from there.

        What it refuses, or does not serve to its end, goes on here. Arguments, result and errors as of ``drain``.
        """
        clients = self.clients if engine is None else [self._begin_drain(engine)]
        if engine is None:
            self._other = other

        async def move(client: EngineClient) -> int:
            handed = await self._hand_over(client, seconds)
            for request_id, request, params in handed:
                if request.prompt_engine is not None:
                    self._leave_prompt(request_id, request)
                    params = None
                if request.engine is not None and request.engine != client.place.number:
                    continue  # it is computed there
                self._send_elsewhere(other, request_id, request, params)
            return len(handed)

        return sum(await asyncio.gather(*map(move, clients)))

    def _send_elsewhere(
        self, other: OtherServer, request_id: str, request: OpenRequest, params: dict[str, Any] | None
    ) -> None:
        request.elsewhere = asyncio.create_task(self._serve_elsewhere(other, request_id, request, params))

    async def _serve_elsewhere(
        self, other: OtherServer, request_id: str, request: OpenRequest, params: dict[str, Any] | None
    ) -> None:
        for given in (None,) if params is None else (params, None):  # its blocks may be no longer there
            try:
                async with contextlib.aclosing(other.outputs(request.message(given))) as outputs:
                    async for output in outputs:
                        output.request_id, output.engine = request_id, request.engine or 0
                        self._take(output)
                return
            except OtherServerError as error:
                print(f"request {request_id} of another server: {error}", file=sys.stderr, flush=True)
                request.begin_again(request.known_ids)
        self.num_handed_back += 1
        request.elsewhere = None
        self._send(request_id, request)

    def undrain(self, engine: int) -> None:
        """Requests go to an engine again. ``ValueError``: there is none of this number."""
        self._drained.discard(self._client(engine).place.number)

    def _client(self, engine: int) -> EngineClient:
        if not 0 <= engine < len(self.clients):
            raise ValueError(f"engine must be 0 to {len(self.clients) - 1}, given {engine}")
        return self.clients[engine]

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


async def _stats(client: EngineClient) -> dict[str, Any] | None:
    if client.serves:
        with contextlib.suppress(EngineEndedError, TimeoutError):
            return await asyncio.wait_for(client.stats(), _STATS_SECONDS)
    return None
