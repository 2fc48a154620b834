"""Engines of several roles behind one server: answers are those of one engine, whoever computes, dies or is drained."""

import asyncio
import contextlib
import dataclasses
import io
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.api.config import EngineConfig
from compiled_llm.commands.drain import main
from compiled_llm.server import replicas as module
from compiled_llm.server.engine_client import Place
from compiled_llm.server.messages import AdapterRef, Generate, HandedOver, Output, Piece
from compiled_llm.server.replicas import Replicas, engine_clients
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.take_over import OtherServer
from tests.server.conftest import SIZES, BrokenEngineError, Running, running_with
from tests.server.test_manners import events, until
from tests.server.test_replicas import PIECE, TIMES, FakeClient, asked, collected, runs, settle

GIVEN = {"do_remote_prefill": True, "remote_host": "unix:somewhere"}


class RoleClient(FakeClient):
    """``handed``: what it hands over; None: it does not answer."""

    handed: dict[str, Any] | None = None

    def __init__(self, place: Place, role: Any) -> None:
        super().__init__(place)
        self.config = dataclasses.replace(
            self.config, role=role, kv_transfer_address=f"unix:{place.number}", kv_host_bytes=1
        )

    async def hand_over(self, seconds: float) -> HandedOver:
        if self.handed is None:
            await asyncio.sleep(3600)
        return HandedOver(0, self.handed or {})

    def end_prompt(self, request_id: str, params: dict[str, Any] | None = GIVEN) -> None:
        self._hand_out(Output(request_id, [Piece(0, "", [9])], times=TIMES, kv_transfer_params=params))


@contextlib.asynccontextmanager
async def serving(*roles: str, **settings: Any) -> AsyncIterator[tuple[Replicas, list[RoleClient]]]:
    clients = [RoleClient(Place(number, len(roles)), role) for number, role in enumerate(roles)]
    replicas = Replicas(clients, ServerSettings(**{"min_prefill_tokens": 30, **settings}))
    await replicas.start()
    await replicas.ready()
    yield replicas, clients
    assert replicas._requests == {}
    assert replicas._loads == [0] * len(roles), "what was counted is counted off"
    assert all(client._unfinished == {} for client in clients)


def texts(outputs: Any) -> str:
    assert isinstance(outputs, list), outputs
    return "".join(piece.text for one in outputs for piece in one.pieces)


@runs
async def test_a_long_new_prompt_goes_by_way_of_a_prefill_engine() -> None:
    async with serving("decode", "prefill") as (replicas, (decode, prefill)):
        task = asyncio.create_task(collected(replicas, asked("a", stop=["."], n=2)))
        await settle()
        (prompt,), (sent,) = prefill.sent, decode.sent
        assert prompt.kv_transfer_params is not None
        lease = {"remote_request_id": prompt.kv_transfer_params["remote_request_id"]}
        assert (prompt.sampling["max_tokens"], prompt.kv_transfer_params) == (1, {"do_remote_decode": True, **lease})
        assert "stop" not in prompt.sampling
        early = {"do_remote_prefill": True, "remote_host": "unix:1", "remote_port": 0, **lease}
        assert (sent.kv_transfer_params, sent.sampling["n"]) == (early, 2)
        prefill.end_prompt("a")
        assert len(decode.sent) == 1
        decode.give("a", PIECE, ends=True)
        assert texts(await task) == "x"
        again = asyncio.create_task(collected(replicas, asked("b")))
        await settle()
        assert [one.request_id for one in prefill.sent] == ["a"], "of this prompt too little is new"
        scored = asyncio.create_task(collected(replicas, asked("c", group=5, prompt_logprobs=1)))
        await settle()
        assert [one.request_id for one in decode.sent] == ["a", "b", "c"]
        for name in "bc":
            decode.give(name, PIECE, ends=True)
        await asyncio.gather(again, scored)
        assert replicas.counts == {
            **{
                "requests_served_again": 0,
                "requests_handed_over": 0,
                "requests_handed_back": 0,
                "prompts_apart": 1,
                "prompts_back": 0,
            }
        }


@runs
async def test_a_prefill_engine_that_dies_is_slow_or_has_no_room_is_done_without() -> None:
    async with serving("decode", "prefill", max_prefill_seconds=0.5) as (replicas, (decode, prefill)):
        tasks = [asyncio.create_task(collected(replicas, asked(name, group=g))) for g, name in enumerate("ab")]
        await settle()
        assert len(prefill.sent) == 2
        assert [one.request_id for one in decode.sent] == ["a"], "the other prompt is not yet computed"
        prefill.end_prompt("b", None)
        assert [one.kv_transfer_params is None for one in decode.sent] == [False, True]
        async with asyncio.timeout(30):
            while len(decode.sent) < 2 or not prefill.aborted:
                await asyncio.sleep(0.01)
        assert prefill.aborted == ["a"]
        assert [one.request_id for one in decode.sent] == ["a", "b"], "a is computed where it waits"
        tasks.append(asyncio.create_task(collected(replicas, asked("c", group=2))))
        await settle()
        prefill.die()
        tasks.append(asyncio.create_task(collected(replicas, asked("d", group=3))))
        await settle()
        assert [one.request_id for one in decode.sent] == ["a", "b", "c", "d"]
        for name in "abcd":
            decode.give(name, PIECE, ends=True)
        assert [texts(await task) for task in tasks] == ["x"] * 4
        assert replicas.num_prompts_back == 3


@runs
async def test_blocks_are_waited_for_of_one_prompt_at_a_time() -> None:
    """Of those in one engine; a prompt whose reader or whose other engine goes lets the next one in."""
    async with serving("decode", "decode", "prefill") as (replicas, (first, second, prefill)):
        tasks = [asyncio.create_task(collected(replicas, asked(name, group=g))) for g, name in enumerate("abc")]
        await settle()
        assert [one.request_id for one in first.sent + second.sent] == ["a"]
        tasks[0].cancel()
        await settle()
        assert prefill.aborted == ["a"]
        waits = next(one for one in (first, second) if "b" in one._unfinished)
        other = second if waits is first else first
        waits.die()
        assert prefill.aborted == ["a", "b"]
        assert [one.request_id for one in prefill.sent] == ["a", "b", "c", "b"]
        assert [one.request_id for one in other.sent][-1] == "c"
        prefill.end_prompt("b")
        assert other.sent[-1].kv_transfer_params == GIVEN, "it was behind c, and has ended before it"
        prefill.handed = {"c": ([9], None)}
        assert await replicas.drain(2, 1.0) == 1
        for name in "bc":
            other.give(name, PIECE, ends=True)
        assert [texts(await task) for task in tasks[1:]] == ["x", "x"]


@runs
async def test_what_cannot_be_sent_is_refused_before_its_prompt_is_computed() -> None:
    async with serving("decode", "prefill") as (replicas, (decode, prefill)):
        transforms = {"x": 2**70}
        assert isinstance(await collected(replicas, asked("a", logits_transforms=transforms)), OverflowError)
        assert prefill.sent == decode.sent == []


@runs
async def test_a_death_while_it_decodes_goes_by_way_of_the_prefill_engine_again() -> None:
    async with serving("decode", "decode", "prefill") as (replicas, (first, second, prefill)):
        task = asyncio.create_task(collected(replicas, asked("a")))
        await settle()
        prefill.end_prompt("a")
        first.give("a", PIECE)
        await settle()
        first.die()
        assert prefill.sent[1].prompt_token_ids == [*asked("a").prompt_token_ids, 5]
        prefill.end_prompt("a")
        assert second.sent[0].output_token_ids == [5]
        second.give("a", PIECE)
        second.give("a", Piece(0, "y", [6], finish_reason="stop"), ends=True)
        assert texts(await task) == "xy"


@runs
async def test_while_no_other_serves_a_prefill_engine_does_all() -> None:
    async with serving("decode", "prefill") as (replicas, (decode, prefill)):
        tasks = [asyncio.create_task(collected(replicas, asked("a")))]
        await settle()
        prefill.end_prompt("a")
        decode.give("a", PIECE)
        decode.die()
        assert prefill.sent[-1].output_token_ids == [5]
        tasks.append(asyncio.create_task(collected(replicas, asked("b", group=1))))
        await settle()
        assert prefill.sent[-1].sampling["max_tokens"] == 8
        for name in "ab":
            prefill.give(name, PIECE, ends=True)
        assert [texts(await task) for task in tasks] == ["x", "x"]


@runs
async def test_a_drained_engine_hands_over_what_it_knows_and_gets_nothing_more() -> None:
    async with serving("both", "both", min_prefill_tokens=1) as (replicas, (first, second)):
        tasks = [asyncio.create_task(collected(replicas, asked(name, **more))) for name, more in
                 (("a", {}), ("b", {"logprobs": 1}), ("c", {"n": 2}))]  # fmt: skip
        await settle()
        for name in "abc":
            first.give(name, PIECE)
        first.handed = {"a": ([5, 6, 7], GIVEN), "b": ([5, 6, 7], GIVEN), "c": ([5, 6], None)}
        assert await replicas.drain(0, 1.0) == 3
        assert [(one.output_token_ids, one.kv_transfer_params) for one in second.sent] == [
            ([5, 6, 7], GIVEN),
            ([5], GIVEN),  # the log-probabilities of the others are not known
            ([], None),
        ]
        second.give("a", Piece(0, "xyz", [5, 6, 7]), Piece(0, "", [], finish_reason="stop"), ends=True)
        for name in "bc":
            second.give(name, Piece(0, "xyz", [5, 6, 7], finish_reason="stop"), ends=True)
        assert [texts(await task) for task in tasks] == ["xyz"] * 3
        with pytest.raises(ValueError, match="engine must not be the last one that serves requests, given 1"):
            await replicas.drain(1, 1.0)
        with pytest.raises(ValueError, match="engine must be 0 to 1, given 2"):
            await replicas.drain(2, 1.0)
        task = asyncio.create_task(collected(replicas, asked("d")))
        await settle()
        assert [one.request_id for one in second.sent][3:] == ["d"], "though the first holds its prefix"
        second.give("d", PIECE, ends=True)
        await task
        with pytest.raises(ValueError, match="engine must be 0 to 1, given 2"):
            replicas.undrain(2)
        replicas.undrain(0)
        assert await replicas.drain(1, 1.0) == 0 if second.handed is not None else True


@runs
async def test_an_engine_that_does_not_answer_or_dies_in_a_drain_loses_nothing() -> None:
    module_seconds, module._HAND_OVER_SECONDS = module._HAND_OVER_SECONDS, 0.05
    try:
        async with serving("both", "both") as (replicas, (first, second)):
            task = asyncio.create_task(collected(replicas, asked("a")))
            await settle()
            first.give("a", PIECE)
            assert await replicas.drain(0, 0.0) == 1
            assert first.aborted == ["a"]
            assert second.sent[0].output_token_ids == [5]
            second.give("a", PIECE, Piece(0, "", [], finish_reason="stop"), ends=True)
            assert texts(await task) == "x"
    finally:
        module._HAND_OVER_SECONDS = module_seconds


def test_engines_get_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(4)))
    made = engine_clients(EngineConfig(), ServerSettings(data_parallel_size=2, prefill_replicas=1))
    assert [client.config.role for client in made] == ["decode", "decode", "prefill"]
    keys = {client.place.environment["COMPILED_LLM_KV_KEY"] for client in made}
    assert len(keys) == 1
    assert len(min(keys)) == 64
    addresses = [Path(str(client.config.kv_transfer_address).removeprefix("unix:")) for client in made]
    assert len({*addresses}) == 3
    assert addresses[0].parent.stat().st_mode & 0o777 == 0o700
    plain = engine_clients(EngineConfig(), ServerSettings(data_parallel_size=2, allow_drain=True))
    assert [client.config.kv_transfer_address for client in plain] == [None] * 2, "tokens are computed again"
    moving = engine_clients(EngineConfig(kv_host_bytes=1), ServerSettings(data_parallel_size=2, allow_drain=True))
    assert all(client.config.role == "both" and client.config.kv_transfer_address for client in moving)
    config = EngineConfig(role="decode", kv_host_bytes=1)
    with pytest.raises(ValueError, match="role must be 'both'"):
        engine_clients(config, ServerSettings(prefill_replicas=1))


# -- With engines

PROMPT = "import os\n" * 40
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2},
    {"prompt": "# one\n" + PROMPT, "max_tokens": 12, "n": 3, "seed": 2},
    {"prompt": [f"class A\n{PROMPT}", f"for i in\n{PROMPT}"], "max_tokens": 8, "temperature": 0.7, "seed": 3},
    {"prompt": "# two\n" + PROMPT, "max_tokens": 12, "seed": 5, "stop": ["\n"], "echo": True, "logprobs": 1},
    {"prompt": "# three\n" + PROMPT, "max_tokens": 12, "seed": 5, "structured_outputs": {"regex": "[a-z]{20}"}},
)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CompiledEngine]]:
    """Two engines that decode, and one that computes prompts for them."""
    place = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("COMPILED_LLM_KV_KEY", "a key that all of them share")
        more = {"enforce_eager": True, "progress": "off", "kv_host_bytes": 2**22, **SIZES}
        yield [
            stack.enter_context(CompiledEngine(role=role, kv_transfer_address=f"unix:{place}/{number}", **more))
            for number, role in enumerate(("decode", "decode", "prefill"))
        ]


def choices(running: Running, body: dict[str, Any]) -> list[Any]:
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_answers_are_those_of_one_engine(three: list[CompiledEngine], reference: CompiledEngine) -> None:
    with running_with(reference) as one:
        expected = [choices(one, body) for body in BODIES]
    with running_with(*three, min_prefill_tokens=32) as apart:
        for engine in three:
            engine.reset_prefix_cache()
        assert [choices(apart, body) for body in BODIES] == expected
        assert apart.client.num_prompts_apart == 5, "one asks for log-probabilities of its prompt"
        assert apart.client.num_prompts_back == 0
    assert sum(engine.stats().peer_hit_tokens for engine in three[:2]) >= 5 * 96
    assert three[2]._transfers.exchange.giver.num_leases == 0, "each was given back"  # type: ignore[union-attr]


def test_proxies_of_vllm_find_their_fields(three: list[CompiledEngine]) -> None:
    body = {"prompt": "# proxy\n" + PROMPT, "max_tokens": 6, "temperature": 0}
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    asks: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
    with running_with(three[2]) as prefill, running_with(three[0]) as decode:
        before = three[0].stats().peer_hit_tokens
        first = prefill.http.post("/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": asks}).json()
        params = first["kv_transfer_params"]
        assert params["do_remote_prefill"]
        assert not params["do_remote_decode"]
        answer = decode.http.post("/v1/completions", json={**body, "kv_transfer_params": params})
        assert answer.json()["choices"][0]["text"].startswith(first["choices"][0]["text"])
        assert three[0].stats().peer_hit_tokens > before
        body, name, before = {**body, "prompt": "# both\n" + PROMPT}, "ef" * 32, three[0].stats().peer_hit_tokens
        early = {key: params[key] for key in ("do_remote_prefill", "remote_host", "remote_port")}
        early["remote_request_id"] = asks["remote_request_id"] = name
        with ThreadPoolExecutor(1) as pool:  # the second one need not wait for the first
            second = pool.submit(decode.http.post, "/v1/completions", json={**body, "kv_transfer_params": early})
            first = prefill.http.post(
                "/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": asks}
            ).json()
        assert second.result().json()["choices"][0]["text"].startswith(first["choices"][0]["text"])
        assert three[0].stats().peer_hit_tokens > before + 96
        for wrong, said in (
            ({**params, "tp_size": 0}, "tp_size of kv_transfer_params must be"),
            ({**params, "remote_host": "example.org", "remote_port": 80}, "must be this machine, or one of"),
            ({**params, "remote_request_id": "x"}, "remote_request_id of kv_transfer_params"),
            ({"nonsense": 1}, "must be a dict with names of"),
        ):
            refused = decode.http.post("/v1/completions", json={**body, "kv_transfer_params": wrong})
            assert refused.status_code == 400
            assert said in refused.json()["error"]["message"]


def streamed(running: Running, body: dict[str, Any], found: list[Any], begun: threading.Event) -> None:
    with running.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line.removeprefix("data: ")))
                begun.set()


def test_streams_go_on_when_their_engine_is_drained_or_dies(
    three: list[CompiledEngine],
    reference: CompiledEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    step, failures, slow = CompiledEngine.step, list[CompiledEngine](), threading.Event()

    def stepping(self: CompiledEngine) -> Any:
        if self in failures:
            self.abort([*self._core.entries])  # another process would not have them
            raise BrokenEngineError
        if slow.is_set():
            threading.Event().wait(0.005)
        return step(self)

    body = {"prompt": "# four\n" + PROMPT, "max_tokens": 150, "temperature": 0.8, "seed": 4, "ignore_eos": True,
            "logprobs": 1}  # fmt: skip
    with running_with(reference) as one:
        text = one.http.post("/v1/completions", json={**body, "stream": True}).text
        expected = [event["choices"][0] for event in events(text)]
    monkeypatch.setattr(CompiledEngine, "step", stepping)
    with running_with(*three[:2], allow_drain=True) as running:
        for kills in (False, True):
            found, begun = list[Any](), threading.Event()
            slow.set()
            asking = threading.Thread(target=streamed, args=(running, body, found, begun))
            asking.start()
            assert begun.wait(20)
            until(lambda found=found: len(found) > 10)
            (request,) = running.client._requests.values()
            before = three[1].stats().peer_hit_tokens
            if kills:
                failures.append(three[request.engine])
            else:
                arguments = [running.url, "--engine", str(request.engine), "--grace-seconds", "5"]
                assert main("drain", arguments) == 0
                assert capfd.readouterr().out == "engine 0 is drained: 1 requests moved\n"
            slow.clear()
            asking.join()
            got = [event["choices"][0] for event in found]
            assert "".join(one["text"] for one in got) == "".join(one["text"] for one in expected)
            logprobs = [[row for one in some for row in one["logprobs"]["token_logprobs"]] for some in (got, expected)]
            assert logprobs[0] == logprobs[1]
            assert len(logprobs[0]) == 150
            if not kills:
                assert three[1].stats().peer_hit_tokens > before
                until(lambda: running.client.clients[0].num_running == 0)
                assert main("drain", [running.url, "--engine", "0", "--undo"]) == 0
                assert running.http.post("/drain", json={"engine": 7}).status_code == 400
        assert running.client.num_handed_over == running.client.num_served_again == 1


# -- From one server to another


class PlayedServer(OtherServer):
    """Another server that a test plays: it gives what is put into ``given``."""

    def __init__(self) -> None:
        self.asked: list[Generate] = []
        self.given: asyncio.Queue[Output] = asyncio.Queue()

    async def outputs(self, asked: Generate) -> AsyncGenerator[Output, None]:
        self.asked.append(asked)
        while True:
            yield await self.given.get()


@runs
async def test_what_was_still_to_be_encoded_goes_there_at_once() -> None:
    async with serving("both") as (replicas, (engine,)):
        engine.handed, other = {}, PlayedServer()
        assert await replicas.drain_to(other, None, 0.0) == 0
        task = asyncio.create_task(collected(replicas, asked("a")))
        await settle()
        assert (len(other.asked), engine.sent) == (1, [])
        other.given.put_nowait(Output("theirs", [Piece(0, "", [])]))
        await settle()
        assert replicas._loads == [0], "it is no work of an engine here"
        other.given.put_nowait(Output("theirs", [Piece(0, "x", [5], finish_reason="stop")], times=TIMES))
        assert texts(await task) == "x"
        assert isinstance(await collected(replicas, asked("b", logits_transforms={"x": 2**70})), OverflowError)


@runs
async def test_two_drains_at_once_move_a_request_once() -> None:
    """The second one is impatient, while the engine still lays blocks ready for the first."""
    module_seconds, module._HAND_OVER_SECONDS = module._HAND_OVER_SECONDS, 0.05
    try:
        async with serving("both") as (replicas, (engine,)):
            task = asyncio.create_task(collected(replicas, asked("a")))
            await settle()
            ready = asyncio.Event()

            async def hand_over(seconds: float) -> HandedOver:
                await ready.wait()
                return HandedOver(0, {} if others[0].asked else {"a": ([5, 6], GIVEN)})

            others = PlayedServer(), PlayedServer()
            engine.hand_over = hand_over  # type: ignore[method-assign]
            drains = [asyncio.create_task(replicas.drain_to(others[0], None, 60.0))]
            await settle()
            drains.append(asyncio.create_task(replicas.drain_to(others[1], None, 0.0)))
            await asyncio.sleep(0.1)
            ready.set()
            assert [await drain for drain in drains] == [1, 0]
            await settle()
            assert [len(other.asked) for other in others] == [1, 0]
            others[0].given.put_nowait(Output("theirs", [Piece(0, "xy", [5, 6], finish_reason="stop")], times=TIMES))
            assert texts(await task) == "xy"
    finally:
        module._HAND_OVER_SECONDS = module_seconds


@runs
async def test_prompts_of_a_drained_server_go_elsewhere_whatever_their_engine_has_begun() -> None:
    """The first is handed over; the next, which waits for its turn, is not given to an engine here meanwhile."""
    async with serving("decode", "prefill") as (replicas, (decode, prefill)):
        tasks = [asyncio.create_task(collected(replicas, asked(name, group=g))) for g, name in enumerate("abc")]
        await settle()
        decode.handed, other = {"a": ([], None)}, PlayedServer()
        prefill.handed = {name: ([9], None) for name in "ab"}
        drain = asyncio.create_task(replicas.drain_to(other, None, 0.0))
        await settle()
        prefill.end_prompt("c")  # between the two
        await drain
        await settle()
        assert [one.request_id for one in decode.sent] == ["a"]
        assert sorted(one.request_id for one in other.asked) == ["a", "b", "c"]
        for task in tasks:
            task.cancel()
        await settle()


@runs
async def test_prompts_of_a_drained_prefill_engine_are_not_waited_for() -> None:
    async with serving("decode", "prefill") as (replicas, (decode, prefill)):
        tasks = [asyncio.create_task(collected(replicas, asked(name, group=g))) for g, name in enumerate("abc")]
        await settle()
        prefill.handed = {name: ([9], None) for name in "abc"}
        await replicas.drain(1, 0.0)
        assert [one.kv_transfer_params is not None for one in decode.sent] == [True, False, False]
        for name in "abc":
            decode.give(name, PIECE, ends=True)
        assert [texts(await task) for task in tasks] == ["x"] * 3


TO = {"max_tokens": 60, "ignore_eos": True}
MOVED: tuple[dict[str, Any], ...] = (
    {**TO, "prompt": "# five\n" + PROMPT, "temperature": 0.8, "seed": 4, "logprobs": 1, "stream": True},
    {**TO, "prompt": "# six\n" + PROMPT, "n": 2, "seed": 5},
    {"prompt": "# seven\n" + PROMPT, "structured_outputs": {"regex": "[a-z]{250}"}, "seed": 6, "max_tokens": 60},
)


def answered_by(running: Running, body: dict[str, Any]) -> Any:
    """Choices as they are at the end, whole or streamed."""
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()["choices"]
    found = [event["choices"][0] for event in events(answer.text)]
    text = "".join(one["text"] for one in found)
    logprobs = [value for one in found for value in (one["logprobs"] or {}).get("token_logprobs", ())]
    return text, logprobs, [one["finish_reason"] for one in found if one["finish_reason"]]


@contextlib.contextmanager
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    step = CompiledEngine.step

    def stepping(self: CompiledEngine) -> Any:
        threading.Event().wait(0.01)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledEngine, "step", stepping)
        yield


@pytest.mark.parametrize("ends", ["whole", "breaks off"])
def test_a_drained_server_has_another_one_go_on(
    ends: str,
    three: list[CompiledEngine],
    reference: CompiledEngine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also where that one is gone before the end: then the first one goes on."""
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that all of them share")
    with running_with(reference) as one:
        expected = [answered_by(one, body) for body in MOVED]
    with (
        running_with(three[0], allow_drain=True) as first,
        running_with(three[1], allow_drain=True, drain_seconds=0) as second,
    ):
        for engine in three[:2]:
            engine.reset_prefix_cache()
        before = three[1].stats().peer_hit_tokens
        with slow_steps(monkeypatch), ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(answered_by, first, body) for body in MOVED]
            until(lambda: sum(len(one.output_token_ids) > 5 for one in three[0].scheduler.running) == 4)
            assert main("drain", [first.url, "--to", second.url, "--grace-seconds", "5"]) == 0
            assert "the server is drained: 3 requests moved" in capfd.readouterr().out
            assert first.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            if ends == "breaks off":
                until(lambda: sum(len(one.output_token_ids) > 20 for one in three[1].scheduler.running) == 4)
                second.stop()
            assert [answer.result() for answer in answers] == expected
        assert first.ended() == 0
        assert first.client.counts["requests_handed_over"] == 3
        assert first.client.counts["requests_handed_back"] == 3 * (ends == "breaks off")
        assert three[1].stats().peer_hit_tokens > before
        until(lambda: three[0]._transfers.exchange.giver.num_leases == 0)  # type: ignore[union-attr]


def test_a_server_is_drained_over_https(
    three: list[CompiledEngine], reference: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one that the system's certificates, or those of SSL_CERT_FILE, vouch for."""
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that all of them share")
    tls = Path(__file__).with_name("tls")
    files = {"ssl_certfile": str(tls / "certificate.pem"), "ssl_keyfile": str(tls / "key.pem")}
    with running_with(reference) as one:
        expected = answered_by(one, MOVED[0])
    with (
        running_with(three[0], allow_drain=True) as first,
        running_with(three[1], allow_drain=True, **files) as second,
    ):
        strange = first.http.post("/drain", json={"to": second.url})
        assert strange.status_code == 400
        assert "CERTIFICATE_VERIFY_FAILED" in strange.text
        monkeypatch.setenv("SSL_CERT_FILE", files["ssl_certfile"])
        with slow_steps(monkeypatch), ThreadPoolExecutor(1) as pool:
            answer = pool.submit(answered_by, first, MOVED[0])
            until(lambda: any(len(one.output_token_ids) > 5 for one in three[0].scheduler.running))
            assert first.http.post("/drain", json={"to": second.url}).json() == {"moved": 1}
            assert answer.result() == expected
        assert first.ended() == 0
        assert first.client.num_handed_back == 0


def test_another_server_is_refused_by_name(
    three: list[CompiledEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that all of them share")
    with (
        running_with(three[0], allow_drain=True) as first,
        running_with(three[1], allow_drain=True, api_key=("k",)) as second,
    ):
        started = first.client.started
        assert started is not None
        facts = {"model": "None", "key": started.token_key, "capacity": str(started.capacity)}
        strange = OtherServer(second.url, "k", facts)
        strange._secret = b"another key of theirs"
        for other, adapters, said in (
            (OtherServer(second.url, "k", {**facts, "model": "a/b"}), [], None),  # the same files elsewhere
            (
                OtherServer(second.url, "k", {"model": "a/b", "key": "x"}),
                [],
                "same model, given a/b here and None there",
            ),
            (OtherServer(second.url, "k", {**facts, "key": "x"}), [], "same weights, tokenizer, code"),
            (OtherServer(second.url, "k", {**facts, "capacity": "64"}), [], "of a request .* given 64 here and 512"),
            (OtherServer(second.url, "k", {**facts, "version": "0"}), [], "same version of messages, given 0 here"),
            (OtherServer(second.url, "k", facts), [AdapterRef("x", str(tmp_path))], "has the same adapter 'x'"),
            (OtherServer(second.url, "j", facts), [], "answers with status 401: the request needs an API key"),
            (strange, [], "has the same COMPILED_LLM_KV_KEY"),
        ):
            if said is None:
                assert len(asyncio.run(other.meet(*adapters))) == 64
            else:
                with pytest.raises(ValueError, match=said):
                    asyncio.run(other.meet(*adapters))
        forged = {"challenge": "0" * 64, "proof": "0" * 64, "request": ""}
        key = {"Authorization": "Bearer k"}
        assert second.http.post("/take_over/request", json=forged, headers=key).status_code == 401
        assert second.http.post("/take_over/request", json=forged).status_code == 401
        for arguments, said in (
            (["--to", second.url], "answers with status 401"),
            (["--to", "http://127.0.0.1:1"], "to must name a server that answers"),
            (["--to", second.url, "--to-api-key", "k", "--engine", "0"], "engine must not be the last one"),
            (["--to", first.url], "to must name another server than this one"),
            (["--to-api-key", "k", "--engine", "0"], "to_api_key must be None without to"),
            ([], "--engine must be given unless --to is"),
            (["--to", "x", "--undo", "--engine", "0"], "--to and --to-api-key have no meaning with --undo"),
        ):
            # Not by capfd: it begins to read at the place where the servers' threads write their log.
            with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit, match="2"):
                main("drain", [first.url, *arguments])
            assert said in err.getvalue()
        monkeypatch.setenv("COMPILED_LLM_TO_API_KEY", "k")  # which nobody sees on a command line
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit, match="2"):
            main("drain", [first.url, "--to", second.url, "--engine", "0"])
        assert "engine must not be the last one" in err.getvalue()
        assert first.http.get("/health").status_code == 200, "nothing was moved"
