"""Engines behind one server: who gets a request, what a death does to it, and what is said of all of them."""

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm import CompiledEngine
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.sampling_params import derived_seed
from compiled_llm.server import replicas as module
from compiled_llm.server.engine_client import EngineClient, Place
from compiled_llm.server.messages import VERSION, AdapterRef, Generate, Output, Piece, Started, Times, decode_for_engine
from compiled_llm.server.replicas import Replicas, engine_clients
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.unread import EngineEndedError, RequestAbortedError
from compiled_llm.system import numa
from compiled_llm.system.child_process import LENGTH_BYTES
from tests.server.conftest import BrokenEngineError, Running, running_with
from tests.server.test_manners import CLOSE, LONG, events, open_request, until

TIMES = Times(0.1, 0.1, 0.1, 0)
STARTED = Started(VERSION, None, 512, "max_model_len", 512, 4, 100, 16, 64, 2, "cpu", {})
PIECE = Piece(0, "x", [5])


class FakeClient(EngineClient):
    """An engine that a test plays.

    Attributes:
        sent: requests that it was given since it started; ``aborted``: ids of requests that ended early.
        started_with: arguments of its engine at each start.
    """

    def __init__(self, place: Place, *, device: str = "cpu", error: Exception | None = None) -> None:
        super().__init__(EngineConfig(num_kv_blocks=None), place)
        self.sent: list[Generate] = []
        self.aborted: list[str] = []
        self.started_with: list[EngineConfig] = []
        self._device, self._error = device, error

    async def start(self) -> None:
        self.started_with.append(self.config)

    async def ready(self) -> Started:
        if self._error is not None:
            raise self._error
        self.started = msgspec.structs.replace(STARTED, device=self._device)
        return self.started

    async def restart(self) -> Started:
        self.ended = None
        self.sent.clear()
        await self.start()
        return await self.ready()

    def send(self, request_id: str, frame: bytes) -> None:
        assert self.ended is None
        asked = decode_for_engine(frame[LENGTH_BYTES:])
        assert isinstance(asked, Generate)
        assert asked.request_id == request_id
        self.sent.append(asked)
        self._unfinished[request_id] = None

    def abort(self, request_ids: Any) -> None:
        left = [one for one in request_ids if one in self._unfinished]
        for one in left:
            del self._unfinished[one]
        self.aborted += left

    def give(self, request_id: str, *pieces: Piece, ends: bool = False) -> None:
        """An output comes from it, if somebody waits for it."""
        self._hand_out(Output(request_id, list(pieces), times=TIMES if ends else None))

    def die(self) -> None:
        self.ended = f"engine {self.place.number} has died"
        lost, self._unfinished = list(self._unfinished), {}
        self.on_end(self.place.number, lost, self.ended)


def asked(request_id: str, group: int = 0, **sampling: Any) -> Generate:
    return Generate(request_id, [*range(100 * group, 100 * group + 40)], {"max_tokens": 8, **sampling})


@contextlib.asynccontextmanager
async def serving(count: int = 2, **settings: Any) -> AsyncIterator[tuple[Replicas, list[FakeClient]]]:
    clients = [FakeClient(Place(number, count)) for number in range(count)]
    replicas = Replicas(clients, ServerSettings(**settings))
    await replicas.start()
    await replicas.ready()
    yield replicas, clients
    assert replicas._requests == {}
    assert replicas._loads == [0] * count, "what was counted is counted off"
    assert all(client._unfinished == {} for client in clients)


async def collected(replicas: Replicas, *requests: Generate) -> list[Output] | Exception:
    """All outputs, or the error after them."""
    found: list[Output] = []
    try:
        async for output in replicas.generate(requests, asyncio.get_running_loop().time() + 60):
            found += [output]
    except Exception as error:
        return error
    return found


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def runs(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is a coroutine."""

    def run() -> None:
        asyncio.run(test())

    run.__doc__ = test.__doc__
    return run


@runs
async def test_requests_of_a_prefix_go_to_one_engine_and_others_to_the_least_busy() -> None:
    async with serving() as (replicas, (first, second)):
        tasks = [asyncio.create_task(collected(replicas, asked(f"r{i}", group=i % 2))) for i in range(6)]
        await settle()
        assert [one.request_id for one in first.sent] == ["r0", "r2", "r4"]
        assert [one.request_id for one in second.sent] == ["r1", "r3", "r5"]
        assert replicas._loads == [40 + 8 + 2 * (8 + 8)] * 2, "the first has its prompt to compute, the others its end"
        first.give("r0", PIECE, PIECE)
        assert replicas._loads[0] == 6 + 2 * 16
        for client in (first, second):
            for one in client.sent:
                client.give(one.request_id, PIECE, ends=True)
        outputs = [await task for task in tasks]
        assert [[one.engine for one in found] for found in outputs] == [[0], [1], [0], [1], [0], [1]]  # type: ignore[union-attr]


@runs
async def test_an_engine_that_is_much_busier_is_left_though_it_holds_the_prefix() -> None:
    async with serving(max_load_difference=50) as (replicas, (first, second)):
        task = asyncio.create_task(collected(replicas, *(asked(f"r{i}") for i in range(4))))
        await settle()
        assert [one.request_id for one in first.sent] == ["r0", "r1"]
        assert [one.request_id for one in second.sent] == ["r2", "r3"], "then both hold it"
        task.cancel()
        await settle()
        assert sorted(first.aborted + second.aborted) == ["r0", "r1", "r2", "r3"]


@runs
async def test_a_death_before_anything_was_read_is_not_seen() -> None:
    async with serving() as (replicas, (first, second)):
        task = asyncio.create_task(collected(replicas, asked("a"), asked("b")))
        await settle()
        first.give("a", PIECE)  # it comes in the same moment as the end, and nobody has read it
        first.die()
        await settle()
        assert [one.request_id for one in second.sent] == ["a", "b"]
        assert {(one.request_id, str(one.sampling)) for one in second.sent} == {
            (one.request_id, str(one.sampling)) for one in first.sent
        }, "also its seed"
        second.give("a", PIECE)
        second.give("a", Piece(0, "y", [6], finish_reason="stop"), ends=True)
        second.give("b", PIECE, ends=True)
        found = await task
        assert isinstance(found, list)
        assert "".join(piece.text for one in found if one.request_id == "a" for piece in one.pieces) == "xy"
        assert Counter(one.request_id for one in found if one.has_ended) == {"a": 1, "b": 1}
        assert replicas.num_served_again == 2
        assert replicas.faults() == ["engine 0 has died", None]
        assert replicas.ended is None


@runs
async def test_after_a_death_another_engine_goes_on_and_each_token_comes_once() -> None:
    async with serving() as (replicas, (first, second)):
        outputs = replicas.generate([asked("a"), asked("b", n=2)], asyncio.get_running_loop().time() + 60)
        reading = asyncio.ensure_future(anext(outputs))
        await settle()
        first.give("a", Piece(0, "xy", [5, 6, 7]))
        assert (await reading).pieces == [Piece(0, "xy", [5, 6, 7])]
        first.give("b", Piece(0, "l", [1]), Piece(1, "r", [2], finish_reason="stop"))
        assert len((await anext(outputs)).pieces) == 2
        first.die()
        assert [(one.request_id, one.output_token_ids) for one in second.sent] == [("a", [5, 6, 7]), ("b", [])]
        second.give("a", Piece(0, "x", [5]))
        second.give("a", Piece(0, "y", [6, 7], [[], []]), Piece(0, "z", [8, 9], [[], []]))
        found = await anext(outputs)
        assert [(piece.text, piece.token_ids) for piece in found.pieces] == [("z", [8, 9])]
        second.give("b", Piece(0, "lk", [1, 3]), Piece(1, "r", [2], finish_reason="stop"))
        assert [(one.index, one.text, one.token_ids) for one in (await anext(outputs)).pieces] == [(0, "k", [3])]
        second.give("a", Piece(0, "", [], finish_reason="length"), ends=True)
        second.give("b", Piece(0, "", [], finish_reason="length"), ends=True)
        assert [[piece.finish_reason for piece in (await anext(outputs)).pieces] for _ in "ab"] == [["length"]] * 2
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


@runs
async def test_a_request_is_served_twice_at_most() -> None:
    """One that kills its engines must not kill them all."""
    async with serving(3) as (replicas, clients):
        task = asyncio.create_task(collected(replicas, asked("poison")))
        for _ in range(2):
            await settle()
            next(client for client in clients if client.ended is None and client.sent).die()
        error = await task
        assert isinstance(error, EngineEndedError)
        assert sum(client.ended is None for client in clients) == 1
        assert sum(len(client.sent) for client in clients) == 2


@runs
async def test_the_last_death_fails_all_and_none_is_served_without_an_engine() -> None:
    async with serving() as (replicas, (first, second)):
        first.die()
        task = asyncio.create_task(collected(replicas, asked("a")))
        await settle()
        second.die()
        assert "engine 1 has died" in str(await task)
        assert replicas.ended == "engine 1 has died"
        assert replicas.started is None
        assert "engine 1 has died" in str(await collected(replicas, asked("b")))
        await replicas.restart(first)
        assert replicas.ended is None
        last = asyncio.create_task(collected(replicas, asked("c")))
        await settle()
        first.give("c", PIECE, ends=True)
        assert isinstance(await last, list)


@runs
async def test_a_client_that_goes_while_its_engine_dies_leaves_nothing() -> None:
    for dies_first in (False, True):
        async with serving() as (replicas, (first, second)):
            task = asyncio.create_task(collected(replicas, asked("a"), asked("b")))
            await settle()
            if dies_first:
                first.die()
            task.cancel()
            if not dies_first:
                first.die()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await settle()
            assert sorted(second.aborted) == ["a", "b"] == sorted(one.request_id for one in second.sent)
            second.give("a", PIECE, ends=True)  # it was on its way


@runs
async def test_an_engine_that_hangs_gets_nothing_new() -> None:
    async with serving(stall_seconds=1) as (replicas, (first, second)):
        task = asyncio.create_task(collected(replicas, asked("a")))
        await settle()
        first._heard_at -= 2
        assert replicas.faults() == ["no step of the engine for 2 s", None]
        other = asyncio.create_task(collected(replicas, asked("b")))
        await settle()
        assert [one.request_id for one in second.sent] == ["b"], "the prefix is with the first"
        second._heard_at -= 2
        both = asyncio.create_task(collected(replicas, asked("c", group=5)))
        await settle()
        assert len(first.sent) + len(second.sent) == 3, "if all hang, one of them"
        replicas.abort(["a"])
        replicas.fail_all("the end")
        assert isinstance(await task, RequestAbortedError | EngineEndedError)
        assert [str(await one) for one in (other, both)] == ["the end"] * 2


@runs
async def test_a_request_without_a_seed_gets_that_of_a_single_engine() -> None:
    async with serving() as (replicas, (first, second)):
        task = asyncio.create_task(collected(replicas, asked("a"), asked("b", seed=7), asked("c", 1)))
        await settle()
        seeds = {one.request_id: one.sampling["seed"] for one in first.sent + second.sent}
        assert seeds == {"a": derived_seed("0/0"), "b": 7, "c": derived_seed("0/2")}
        task.cancel()
        await settle()


@runs
async def test_the_others_start_with_the_firsts_blocks_and_any_error_ends_the_start() -> None:
    async with serving(3) as (_, clients):
        assert [[config.num_kv_blocks for config in client.started_with] for client in clients] == [[None], [64], [64]]
        assert all(client.config.num_kv_blocks == 64 for client in clients), "also when they start again"
    for error in (ValueError("too little memory"), RuntimeError("no")):
        failing = Replicas([FakeClient(Place(0, 2)), FakeClient(Place(1, 2), error=error)], ServerSettings())
        await failing.start()
        with pytest.raises(type(error), match=str(error)):
            await failing.ready()
    gpus = Replicas([FakeClient(Place(0, 2), device="cuda"), FakeClient(Place(1, 2))], ServerSettings())
    await gpus.start()
    with pytest.raises(ValueError, match="data_parallel_size must be at most the number of GPUs, given 2"):
        await gpus.ready()


def test_each_engine_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = engine_clients(EngineConfig(), ServerSettings())
    assert alone.place == Place(), "one is as ever"
    assert alone.config == EngineConfig()
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.setattr(numa, "granted_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    clients = engine_clients(EngineConfig(), ServerSettings(data_parallel_size=2))
    assert sorted(core for client in clients for core in client.place.cores) == list(range(5))
    assert [client.config.num_threads for client in clients] == [2, 2], "as many, for graphs are compiled for a number"
    of_ranks = engine_clients(EngineConfig(tensor_parallel_size=2), ServerSettings(data_parallel_size=2))
    assert [client.config.num_threads for client in of_ranks] == [1, 1], "of each rank, which has its part of the cores"
    of_stages = engine_clients(EngineConfig(pipeline_parallel_size=2), ServerSettings(data_parallel_size=2))
    assert [client.config.num_threads for client in of_stages] == [2, 2], "of each stage, which take turns"
    assert [client.config.progress for client in clients] == ["auto", "off"]
    assert [client.place.environment for client in clients] == [{"CUDA_VISIBLE_DEVICES": name} for name in "35"]
    monkeypatch.setattr(numa, "granted_cores", lambda: 1)
    assert engine_clients(EngineConfig(), ServerSettings(data_parallel_size=4))[0].config.num_threads == 1
    own = engine_clients(EngineConfig(num_threads=2), ServerSettings(data_parallel_size=2))
    assert [client.config.num_threads for client in own] == [2, 2]
    with pytest.raises(ValueError, match=r"data_parallel_size must be at most 5, the cores .*, given 6"):
        engine_clients(EngineConfig(), ServerSettings(data_parallel_size=6))
    with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda' with data_parallel_size"):
        engine_clients(EngineConfig(device="cuda:1"), ServerSettings(data_parallel_size=2))


def test_at_random_each_request_ends_once() -> None:
    """Engines give, die and start again, and clients go, in any order: each request is whole, an error, or left."""

    async def once(seed: int) -> Counter[str]:
        rng, ends = random.Random(seed), Counter[str]()
        async with serving(3, max_load_difference=64) as (replicas, clients):
            tasks: dict[str, asyncio.Task[Any]] = {}
            for number in range(120):
                action = rng.random()
                serving_now = [client for client in clients if client.serves]
                if action < 0.3:
                    name = f"r{number}"
                    tasks[name] = asyncio.create_task(collected(replicas, asked(name, rng.randrange(5))))
                elif action < 0.75 and serving_now:
                    client = rng.choice(serving_now)
                    if client._unfinished:
                        name = rng.choice(sorted(client._unfinished))
                        client.give(name, Piece(0, f"<{name}>", [1]), ends=rng.random() < 0.4)
                elif action < 0.82 and len(serving_now) > 1:
                    rng.choice(serving_now).die()
                elif action < 0.9:
                    for client in clients:
                        if client.ended is not None:
                            await replicas.restart(client)
                elif tasks:
                    tasks[rng.choice(sorted(tasks))].cancel()
                if rng.random() < 0.7:
                    await settle()
            await settle()
            for client in clients:
                for name in sorted(client._unfinished):
                    client.give(name, Piece(0, f"<{name}>", [1]), ends=True)
            for name, task in tasks.items():
                try:
                    found = await asyncio.wait_for(task, 5)
                except asyncio.CancelledError:
                    ends["left"] += 1
                    continue
                if isinstance(found, Exception):
                    assert isinstance(found, EngineEndedError)
                    ends["error"] += 1
                else:
                    assert [one.has_ended for one in found] == [False] * (len(found) - 1) + [True]
                    assert {one.request_id for one in found} == {name}
                    ends["whole"] += 1
            ends["again"] += replicas.num_served_again
        return ends

    total = sum((asyncio.run(once(seed)) for seed in range(30)), Counter[str]())
    assert min(total[end] for end in ("whole", "error", "left", "again")) > 20, total


# -- With engines


@pytest.fixture(scope="module")
def both(engine: CompiledEngine, reference: CompiledEngine) -> Iterator[Running]:
    with running_with(engine, reference, dev=True) as running:
        yield running


BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "import os", "max_tokens": 12, "temperature": 0, "logprobs": 2},
    {"prompt": "def f(x):\n    return x", "max_tokens": 12, "n": 3},
    {"prompt": ["class A", "for i in"], "max_tokens": 8, "temperature": 0.7},
    {"prompt": "import os", "max_tokens": 12, "seed": 5, "stop": ["\n"], "echo": True},
)
PAGE = "/metrics"


def choices(running: Running, body: dict[str, Any]) -> list[Any]:
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_answers_are_those_of_one_engine(engine: CompiledEngine, reference: CompiledEngine) -> None:
    """Also of requests without a seed, in their order."""
    engine._core.counts.num_requests = 0
    with running_with(engine) as one:
        expected = [choices(one, body) for body in BODIES]
        scored = {"prompt": "import os", "continuations": ["\n", ", sys"]}
        scores = one.http.post("/score", json=scored).json()["data"]
    with running_with(engine, reference) as two:
        assert [choices(two, body) for body in BODIES] == expected
        assert two.http.post("/score", json=scored).json()["data"] == scores
        streamed = events(two.http.post("/v1/completions", json={**BODIES[0], "stream": True}).text)
        assert "".join(one["choices"][0]["text"] for one in streamed) == expected[0][0]["text"]


def samples(running: Running) -> dict[tuple[str, str], float]:
    """(name, engine) -> value."""
    families = list(text_string_to_metric_families(running.http.get(PAGE).text))
    assert len({family.name for family in families}) == len(families), "a name has one place on the page"
    found: dict[tuple[str, str], float] = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, sample.labels.get("engine", "")
            found[key] = found.get(key, 0) + sample.value
    return found


def test_one_page_of_metrics_and_states_of_all(both: Running) -> None:
    before = samples(both)
    prompts = [f"# {number}\n" + "import os\n" * 12 for number in range(4)]
    for prompt in prompts * 2:
        choices(both, {"prompt": prompt, "max_tokens": 2, "temperature": 0})
    after = samples(both)

    def change(name: str) -> list[float]:
        return [after[name, engine] - before.get((name, engine), 0) for engine in "01"]

    ended = [after["vllm:request_success_total", e] - before.get(("vllm:request_success_total", e), 0) for e in "01"]
    assert ended == [4, 4], "new prefixes are spread, known ones go back"
    assert change("vllm:request_prompt_tokens_count") == change("vllm:e2e_request_latency_seconds_count") == [4, 4]
    assert change("vllm:generation_tokens_total") == [8, 8]
    assert min(change("vllm:prefix_cache_hits_total")) > 0
    assert [after["compiled_llm:engine_up", engine] for engine in "01"] == [1, 1]
    assert both.http.get("/health").json() == {"status": "ok", "engines": ["ok", "ok"]}
    assert both.http.get("/ready").status_code == 200
    assert both.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    assert both.http.get("/server_info").json()["sizes"]["max_num_seqs"] == 4
    assert both.http.post("/reset_prefix_cache").json() == {"reset": True}
    assert both.client._router._held[0].blocks._names == {}  # type: ignore[union-attr]
    hits = samples(both)
    choices(both, {"prompt": prompts[0], "max_tokens": 2})
    assert samples(both)["vllm:prefix_cache_hits_total", "0"] == hits["vllm:prefix_cache_hits_total", "0"]


def test_requests_beyond_one_engine_run_in_the_other(
    both: Running, engine: CompiledEngine, reference: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, go_on = CompiledEngine.step, threading.Event()

    def held(self: CompiledEngine) -> Any:
        """Makes steps that let requests in: none ends before all run."""
        if self.scheduler.num_waiting or go_on.is_set():
            return step(self)
        time.sleep(0.005)
        return []

    monkeypatch.setattr(CompiledEngine, "step", held)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(open_request(both, {**LONG, "prompt": "x"}))
        until(lambda: len(engine.scheduler.running) == len(reference.scheduler.running) == 4)
        until(lambda: both.http.get("/load").json() == {"server_load": 8, "running": 8, "waiting": 0})
    go_on.set()
    until(lambda: not (engine.has_unfinished_requests() or reference.has_unfinished_requests()))
    until(lambda: both.client._loads == [0, 0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_death_of_an_engine(
    engine: CompiledEngine, reference: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures, may_step = CompiledEngine.step, list[CompiledEngine](), threading.Event()

    def breaking(self: CompiledEngine) -> Any:
        may_step.wait(20)
        if self in failures:
            self.abort([*self._core.entries])  # another process would not have them
            raise BrokenEngineError
        return step(self)

    def killed(number: int) -> None:
        failures.append((engine, reference)[number])
        may_step.set()

    body = {"prompt": "import os\n" * 12, "max_tokens": 6}  # a prefix, which leads to one engine
    may_step.set()
    with running_with(engine, reference) as running:
        expected = choices(running, {**body, "seed": 3})
        monkeypatch.setattr(CompiledEngine, "step", breaking)
        with open_request(running, {**LONG, **body, "max_tokens": 400, "stream": True}, CLOSE) as stream:
            read = b""
            while b"data: " not in read:
                read += stream.recv(65536)
            may_step.clear()
            answers: list[Any] = []
            asking = threading.Thread(target=lambda: answers.append(choices(running, {**body, "seed": 3})))
            asking.start()
            until(lambda: len(running.client.unfinished) == 2)
            killed(0)
            text = b"".join(iter(lambda: stream.recv(65536), b"")).decode()
            assert '"error"' not in text
            assert text.count("[DONE]") == 1
            assert text.count('"finish_reason":"length"') == 1
            asking.join()
        assert answers == [expected], "the other one has served it"
        assert running.client.num_served_again == 2
        health = running.http.get("/health")
        assert (health.status_code, health.json()["engines"]) == (200, ["the engine's thread has ended", "ok"])
        found = samples(running)
        assert [found.get(("compiled_llm:engine_up", engine)) for engine in "01"] == [0, 1]
        assert ("vllm:num_requests_running", "0") not in found
        assert found["compiled_llm:requests_served_again_total", ""] == 2
        assert choices(running, {**body, "seed": 3}) == expected
        killed(1)
        assert running.http.post("/v1/completions", json=body).status_code == 503
        assert running.ended() == 1


def test_adapters_go_to_all_that_serve() -> None:
    async def check() -> None:
        async with serving(3) as (replicas, clients):
            asked_of: list[tuple[str, int]] = []
            for client in clients:
                number = client.place.number

                async def read(adapter: AdapterRef, number: int = number) -> None:
                    asked_of.append(("read", number))
                    if adapter.name == "bad":
                        raise ValueError("no adapter")
                    if number == 1:
                        raise EngineEndedError("it dies meanwhile")

                client.read_adapter = read  # type: ignore[method-assign]
                client.drop_adapter = lambda adapter, number=number: asked_of.append(("drop", number))  # type: ignore[method-assign,misc]
            clients[2].die()
            await replicas.read_adapter(AdapterRef("good", "/x"))
            replicas.drop_adapter(AdapterRef("good", "/x"))
            assert asked_of == [("read", 0), ("read", 1), ("drop", 0), ("drop", 1)]
            with pytest.raises(ValueError, match="no adapter"):
                await replicas.read_adapter(AdapterRef("bad", "/x"))
            clients[0].die()
            with pytest.raises(EngineEndedError):
                await replicas.read_adapter(AdapterRef("good", "/x"))

    asyncio.run(check())
