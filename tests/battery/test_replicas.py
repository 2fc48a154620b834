"""Two engines behind one server, as processes: tokens, prefix hits, compiled graphs, and deaths at any moment."""

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm.ops import native
from tests.server.test_run import COMMAND, LONG, Program, program, until

pytestmark = [
    pytest.mark.battery,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core for each engine is needed"),
]
TWO = ("--data-parallel-size", "2")
TEXT = "".join(chr(32 + i % 90) for i in range(900))


@contextlib.contextmanager
def serving(*flags: str, **more: Any) -> Iterator[Program]:
    with program(*flags, **more) as server:
        server.wait_until("/health")
        yield server


def total(server: Program, name: str) -> dict[str, float]:
    """Engine -> the sum of a metric's samples."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                engine = sample.labels.get("engine", "")
                found[engine] = found.get(engine, 0) + sample.value
    return found


def bodies() -> list[dict[str, Any]]:
    rng = random.Random(0)
    made: list[dict[str, Any]] = []
    for _ in range(24):
        start, length = rng.randrange(200), rng.randrange(1, 300)
        body = {"prompt": TEXT[start : start + length], "max_tokens": rng.randrange(1, 24), "logprobs": 2}
        made.append({**body, **rng.choice([{"temperature": 0}, {}, {"seed": 4}, {"n": 3}, {"top_p": 0.8}])})
    return made


def test_answers_are_those_of_one_engine() -> None:
    answers = []
    for flags in ((), TWO):
        with serving(*flags) as server:
            answers.append([server.http.post("/v1/completions", json=body).json()["choices"] for body in bodies()])
            if flags:
                cores = [set(engine.cpu_affinity()) for engine in server.engines()]
                assert len(cores) == 2
                assert not cores[0] & cores[1]
                served = total(server, "vllm:request_success_total").values()
                assert min(served) > 0, "both have served"
    assert answers[0] == answers[1]


def test_more_prefix_hits_than_by_turns() -> None:
    """16 groups; each engine has blocks for about 8, and what else runs."""
    flags = ("--num-kv-blocks", "340", "--max-model-len", "768", "--bucket-sizes", "1,4")
    rng = random.Random(1)
    prompts = [
        [*range(20 * group, 20 * group + 640), *(rng.randrange(500) for _ in range(8))]
        for group in (rng.randrange(16) for _ in range(160))
    ]
    body = {"max_tokens": 1, "temperature": 0}
    with serving(*TWO, *flags) as server:
        for prompt in prompts:
            assert server.http.post("/v1/completions", json={**body, "prompt": prompt}).status_code == 200
        by_router = sum(total(server, "vllm:prefix_cache_hits_total").values())
    with serving(*flags) as first, serving(*flags) as second:
        for number, prompt in enumerate(prompts):
            server = (first, second)[number % 2]
            assert server.http.post("/v1/completions", json={**body, "prompt": prompt}).status_code == 200
        by_turns = sum(total(server, "vllm:prefix_cache_hits_total")["0"] for server in (first, second))
    print(f"hits by the router {by_router:.0f}, by turns {by_turns:.0f}, {by_router / by_turns:.2f} times")
    assert by_router >= 1.6 * by_turns


def test_the_second_engine_finds_what_the_first_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served while graphs compile: each is compiled once."""
    cache = tmp_path / "cache"
    # As links: those of GGUF files that were moved lead nowhere.
    shutil.copytree(native.cache_directory(), cache, symlinks=True, ignore=shutil.ignore_patterns("*.graph", "*.lock"))
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(cache))
    command = [word for word in COMMAND if word != "--enforce-eager"]
    with serving(*TWO, command=command) as server:
        until(lambda: total(server, "compiled_llm:graphs_pending") == {"0": 0, "1": 0}, 900)
        graphs = total(server, "compiled_llm:graphs")
    assert graphs["0"] == graphs["1"] > 0
    assert len(list((cache / "graphs").glob("*.graph"))) == graphs["0"]


def ended_once(url: str, body: dict[str, Any], ends: Counter[str]) -> None:
    """Ask, and note how it ends: a whole answer, a status of 503, or a stream with one error."""
    with httpx.Client(base_url=url, timeout=120) as http:
        if not body.get("stream"):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code in (200, 503), answer.text
            if answer.status_code == 200:
                (choice,) = answer.json()["choices"]
                assert choice["finish_reason"] == "length"
                assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
            ends["whole" if answer.status_code == 200 else "refused"] += 1
            return
        with http.stream("POST", "/v1/completions", json=body) as stream:
            # A line that begins with a colon is a comment: on a busy machine events are far apart.
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line and line[0] != ":"]
        if stream.status_code != 200:
            assert stream.status_code == 503
            ends["refused"] += 1
            return
        assert lines.count("[DONE]") == 1
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        errors = [event for event in events if "error" in event]
        reasons = [one["finish_reason"] for event in events for one in event.get("choices", ()) if one["finish_reason"]]
        if errors:
            assert errors == events[-1:]
            assert reasons == []
            ends["broken off"] += 1
        else:
            assert reasons == ["length"]
            assert events[-1]["usage"]["completion_tokens"] == body["max_tokens"]
            ends["whole"] += 1


@pytest.mark.parametrize("restarts", [True, False])
def test_an_engine_killed_at_any_moment_under_load(restarts: bool, tmp_path: Path) -> None:
    """20 times, and 3 without another start: each request is answered whole, or fails, and once."""
    rng, ends, faults, is_over = random.Random(0), Counter[str](), list[BaseException](), threading.Event()
    flags = ("--restart-engine",) if restarts else ()
    servers, kills = (4, 5) if restarts else (3, 1)  # one more would end a server

    def client(number: int, url: str) -> None:
        own = random.Random(number)
        try:
            while not is_over.is_set():
                body = {
                    "prompt": TEXT[own.randrange(60) :][:300],
                    "max_tokens": own.randrange(1, 24),
                    "ignore_eos": True,
                }
                if own.random() < 0.5:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                if own.random() < 0.1:  # a client that goes
                    with contextlib.suppress(httpx.TimeoutException):
                        httpx.post(f"{url}/v1/completions", json=body, timeout=own.uniform(0.01, 0.2))
                        ends["in time"] += 1
                    continue
                ended_once(url, body, ends)
        except BaseException as error:
            faults.append(error)

    served_again = 0.0
    for _ in range(servers):
        # Not through a pipe, which nobody would read.
        with (tmp_path / "log").open("w") as log, serving(*TWO, *flags, stderr=log) as server:
            fixed = {"prompt": TEXT[:100], "max_tokens": 20, "seed": 3}
            expected = server.http.post("/v1/completions", json=fixed).json()["choices"]
            url, is_over = str(server.http.base_url), threading.Event()
            threads = [threading.Thread(target=client, args=(number, url), daemon=True) for number in range(6)]
            for thread in threads:
                thread.start()
            for _ in range(kills):
                time.sleep(rng.uniform(0.2, 1.5))
                killed = rng.choice(server.engines())
                killed.send_signal(signal.SIGKILL)
                until(lambda killed=killed: killed not in server.engines())
                if restarts:
                    until(lambda: len(server.engines()) == 2)
                    until(lambda: server.http.get("/health").json().get("engines") == ["ok", "ok"])
                else:
                    until(lambda: "has ended: signal SIGKILL" in str(server.http.get("/health").json()))
            time.sleep(0.5)
            is_over.set()
            for thread in threads:
                thread.join()
            assert faults == []
            assert server.http.post("/v1/completions", json=fixed).json()["choices"] == expected
            until(lambda: server.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0})
            served_again += total(server, "compiled_llm:requests_served_again_total")[""]
            assert server.http.get("/health").json()["engines"].count("ok") == (2 if restarts else 1)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
    print(dict(ends), f"{served_again:.0f} served again")
    assert ends["whole"] > 20 * servers
    assert ends["refused"] == 0, "another engine was there"
    assert served_again > 0


ASKED: list[dict[str, Any]] = [
    {"prompt": TEXT[7 * n :][:300], "max_tokens": 40, "seed": n, "temperature": 0.9, "ignore_eos": True,
     "logprobs": 1, **({"presence_penalty": 0.5} if n % 3 == 1 else {"n": 2} if n % 3 == 2 else {})}
    for n in range(12)
]  # fmt: skip
Found = list[tuple[str, list[float]]]  # text and log-probabilities of each continuation


def alone() -> list[Found]:
    """What one engine answers to ``ASKED``."""
    with serving() as server:
        answers = [server.http.post("/v1/completions", json=body).json()["choices"] for body in ASKED]
    return [[(one["text"], one["logprobs"]["token_logprobs"]) for one in choices] for choices in answers]


def streamed(http: httpx.Client, body: dict[str, Any]) -> Found:
    """The same of a stream, which has no error."""
    found = [("", list[float]()) for _ in range(body.get("n", 1))]
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for one in event["choices"]:
                text, logprobs = found[one["index"]]
                more = one["logprobs"]["token_logprobs"] if one["logprobs"] else []
                found[one["index"]] = text + one["text"], logprobs + more
    return found


@pytest.mark.parametrize(
    "flags", [("--prefill-replicas", "1", "--min-prefill-tokens", "48"), TWO], ids=["roles", "same"]
)
def test_streams_go_on_whichever_engine_is_killed_or_drained(flags: tuple[str, ...], tmp_path: Path) -> None:
    """50 moments: each answer is that of one engine, to the token, whole and once."""
    rng, faults, ends = random.Random(1), list[BaseException](), Counter[str]()
    tokens = alone()

    def client(number: int, url: str, is_over: threading.Event) -> None:
        own = random.Random(number)
        try:
            with httpx.Client(base_url=url, timeout=120) as http:
                while not is_over.is_set():
                    n = own.randrange(len(ASKED))
                    found = streamed(http, ASKED[n])
                    assert found == tokens[n], f"request {n}"
                    ends["whole"] += 1
        except BaseException as error:
            faults.append(error)

    for _ in range(10):
        drains = ("--allow-drain", "--kv-host-bytes", "100000000", "--restart-engine")
        with (tmp_path / "log").open("w") as log, serving(*flags, *drains, stderr=log) as server:
            url, is_over = str(server.http.base_url), threading.Event()
            threads = [threading.Thread(target=client, args=(one, url, is_over), daemon=True) for one in range(4)]
            for thread in threads:
                thread.start()
            for _ in range(5):
                time.sleep(rng.uniform(1.0, 3.0))  # no request meets two ends
                if rng.random() < 0.3:
                    engine = rng.randrange(2)
                    drained = server.http.post("/drain", json={"engine": engine, "grace_seconds": rng.uniform(0, 1)})
                    ends["drained" if drained.status_code == 200 else "not drained"] += 1
                    server.http.post("/undrain", json={"engine": engine})
                    continue
                killed = rng.choice(server.engines())
                killed.send_signal(signal.SIGKILL)
                ends["killed"] += 1
                until(lambda killed=killed: killed not in server.engines())
                until(lambda: len(server.engines()) == 2)
                until(lambda: server.http.get("/health").json().get("engines") == ["ok", "ok"])
            is_over.set()
            for thread in threads:
                thread.join()
            assert faults == []
            until(lambda: server.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0})
            for name in ("prompts_apart", "prompts_back", "requests_handed_over", "requests_served_again"):
                ends[name] += int(total(server, f"compiled_llm:{name}_total")[""])
    print(dict(ends))
    assert ends["whole"] > 50
    assert ends["requests_served_again"] > 0
    assert ends["requests_handed_over"] > 0 or "--prefill-replicas" in flags


@pytest.mark.parametrize("transport", ["unix", "tcp", "tokens"])
def test_a_drained_server_hands_its_requests_to_another(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 10 moments, in 3 of which the other one is killed later: answers are those of one engine, and it ends."""
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that both of them share")
    rng, tokens, counts = random.Random(2), alone(), Counter[str]()
    for moment in range(10):
        address = f"unix:{tmp_path}/{moment}" if transport == "unix" else "127.0.0.1:0"
        host = () if transport == "tokens" else ("--kv-host-bytes", "100000000")
        gives = ("--role", "both", "--kv-transfer-address", address) if host else ()
        takes = ("--role", "decode") if host else ()
        flags = ("--allow-drain", *host)
        with (
            (tmp_path / "log").open("w") as log,
            serving(*flags, *gives, stderr=log) as first,
            serving(*flags, *takes, stderr=log) as second,
        ):
            numbers = [rng.randrange(len(ASKED)) for _ in range(4)]
            with ThreadPoolExecutor(4) as pool:
                found = [pool.submit(streamed, first.http, ASKED[n]) for n in numbers]
                until(
                    lambda first=first, found=found: (
                        first.http.get("/load").json()["server_load"] + sum(one.done() for one in found) == 4
                    )
                )
                time.sleep(rng.uniform(0, 0.1))
                url = str(second.http.base_url)
                answer = first.http.post("/drain", json={"to": url, "grace_seconds": rng.choice([0, 0.05, 5])})
                assert answer.status_code == 200, answer.text
                counts["moved"] += answer.json()["moved"]
                if moment % 3 == 2:
                    time.sleep(rng.uniform(0, 0.1))
                    second.process.kill()
                assert [one.result() for one in found] == [tokens[n] for n in numbers]
            assert first.process.wait(30) == 0
            if moment % 3 != 2:
                counts["peer_hit_tokens"] += int(total(second, "vllm:external_prefix_cache_hits_total").get("0", 0))
    print(dict(counts))
    assert counts["moved"] > 10
    assert (counts["peer_hit_tokens"] > 0) is (transport != "tokens")


def test_the_start_ends_with_the_error_of_any_engine_and_sigterm_drains_all() -> None:
    with program(*TWO, "--num-threads", "64") as server:
        status, err = server.ended()
        assert status == 2
        assert "num_threads must be at most" in err
    with serving(*TWO) as server:
        engines = server.engines()
        bodies = [{**LONG, "prompt": TEXT[: 100 * number], "max_tokens": 80} for number in range(1, 5)]
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(server.http.stream("POST", "/v1/completions", json=body)) for body in bodies]
            lines = [stream.iter_lines() for stream in streams]
            for one in lines:
                next(one)
            server.process.send_signal(signal.SIGTERM)
            for one in lines:
                assert [line for line in one if line][-1] == "data: [DONE]"
        status, err = server.ended()
        assert status == 0
        assert "error" not in err
        assert not any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in engines)
