"""Adapters over hours, in minutes: many on disk, few slots, files that change, nothing lost, wrong or leaked.

Requests come by Zipf's law, with priorities, and some are aborted. Adapters on disk are exchanged, spoiled in all ways
of ``tests/adapters/malformed.py`` and taken away at random moments. At full size 2,000 adapters, 8 slots, 20,000
requests and 1,000 changes; and over HTTP, with adapters loaded and unloaded, while engines are killed.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_llm import AsyncCompiledEngine, CompiledEngine, LoRARequest, RequestOutput, SamplingParams
from compiled_llm.adapters import host_adapters
from tests.adapters.made import linear_modules, write_adapter
from tests.adapters.malformed import MALFORMED
from tests.battery import sized
from tests.families import checkpoint, transformers_model
from tests.server.test_run import COMMAND, Program, program

MODEL = "qwen3"
DEMO_MODEL = Path(__file__).parents[2] / "compiled_llm" / "demo_model"
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16", "bucket_sizes": (12,), "token_bucket_sizes": (64,), "max_model_len": 96, "enforce_eager": True,
    "enable_lora": True, "max_lora_rank": 4, "progress": "off", "num_threads": 1,
}  # fmt: skip
MOST_UNFINISHED = 24
MOST_ADDED_BYTES = 16 * 2**20  # of the second half
KEPT = 64  # adapters in host memory without a request
EXCHANGED = 3  # adapters, at the end, one after the other
NOWHERE = 1e30


class Shown(NamedTuple):
    """What an adapter was from one moment to another; None: what is refused."""

    content: int | None
    since: float
    until: float


class Disk:
    """Adapters as links to directories of contents, so that an exchange is one step.

    Args:
        modules: layers that adapters change, two each.
    """

    def __init__(
        self, directory: Path, modules: dict[str, tuple[int, int]], num_adapters: int, num_contents: int
    ) -> None:
        self.links = directory / "adapters"
        self.links.mkdir()
        self.contents = [
            write_adapter(
                directory / f"content {seed}", dict(random.Random(seed).sample([*modules.items()], 2)), seed=seed,
                r=1 + seed % 4, lora_alpha=8 + seed % 3,
            )
            for seed in range(num_contents)
        ]  # fmt: skip
        self.bad = [directory / "not there"]
        for number, (spoil, _) in enumerate(MALFORMED.values()):
            path = write_adapter(directory / f"bad {number}", modules)
            with contextlib.suppress(KeyError):  # it spoils a tensor that this one lacks
                spoil(path)
                self.bad.append(path)
        assert len(self.bad) >= 40
        self._shown: dict[int, list[Shown]] = defaultdict(list)  # by adapter
        for number in range(num_adapters):
            self.put(number, number % num_contents)

    def path(self, number: int) -> Path:
        return self.links / str(number)

    def put(self, number: int, content: int | None, bad: int = 0) -> None:
        target, before = self.bad[bad] if content is None else self.contents[content], time.monotonic()
        link = self.links / "new"
        link.symlink_to(target)
        os.replace(link, self.path(number))
        shown = self._shown[number]
        if shown:
            shown[-1] = shown[-1]._replace(until=time.monotonic())
        shown.append(Shown(content, before, NOWHERE))

    def change(self, number: int, rng: random.Random) -> str:
        """Another content, or a bad one, in the place of an adapter that may be in use."""
        kind = rng.choice(("exchanged", "spoiled"))
        content = rng.randrange(len(self.contents)) if kind == "exchanged" else None
        self.put(number, content, rng.randrange(len(self.bad)))
        return kind

    def contents_of(self, number: int, asked: float, until: float = NOWHERE) -> set[int | None]:
        """What may serve a request of then: the engine takes what it saw within the last second to be unchanged."""
        since = asked - 2 * host_adapters._FRESH_SECONDS
        return {shown.content for shown in self._shown[number] if shown.since < until and shown.until > since}


class Requests:
    """Prompts, of which many begin alike, lengths, and adapters by Zipf's law; all of one order."""

    def __init__(self, num_adapters: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self._numbers = range(num_adapters)
        self._weights = [1 / (1 + number) ** 1.1 for number in self._numbers]
        rng = random.Random(46)
        self._starts = [[rng.randrange(3, 300) for _ in range(34)] for _ in range(4)]

    def adapter(self) -> int:
        (number,) = self.rng.choices(self._numbers, self._weights)
        return number

    def next(self) -> tuple[list[int], int, int | None]:
        """A prompt, the number of tokens, and an adapter or none."""
        rng = self.rng
        prompt = rng.choice(self._starts)[: rng.choice((3, 20, 34))] + [rng.randrange(3, 300) for _ in range(3)]
        number = self.adapter()
        return prompt, rng.choice((1, 3, 8, 16)), None if rng.random() < 0.1 else number


class Client:
    """Sends requests, aborts some, and changes what is on disk."""

    def __init__(self, engine: AsyncCompiledEngine, disk: Disk, num_adapters: int, share: float, rows: TextIO) -> None:
        self.engine, self.disk = engine, disk
        self._rows = rows  # what is kept in memory would be the second half's
        self._share_of_changes = share
        self._requests = Requests(num_adapters, 46)
        self.counts: Counter[str] = Counter()
        self._free = asyncio.Semaphore(MOST_UNFINISHED)

    async def serve(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await self._free.acquire()
                if self._requests.rng.random() < self._share_of_changes:
                    self.counts[self.disk.change(self._requests.adapter(), self._requests.rng)] += 1
                group.create_task(self._request())

    async def serve_exchanged(self, number: int) -> None:
        """Serve an adapter before and behind an exchange of its files."""
        for content in range(2):
            self.disk.put(number, content)
            await self._free.acquire()
            await self._request(number)

    async def _request(self, own: int | None = None) -> None:
        """``own``: the adapter, else any; then some are aborted."""
        rng, asked = self._requests.rng, time.monotonic()
        prompt, max_tokens, number = self._requests.next()
        may_be_aborted = own is None and rng.random() < 0.15
        number = number if own is None else own
        end = rng.randrange(max_tokens) if may_be_aborted else -1  # outputs before it is aborted
        outputs = self.engine.generate(
            {"prompt_token_ids": prompt},
            greedy(max_tokens),
            lora_request=None if number is None else LoRARequest(f"{number}", str(self.disk.path(number))),
            priority=rng.randrange(3),
        )
        last: RequestOutput | None = None
        first = NOWHERE
        try:
            async for output in outputs:
                first = min(first, time.monotonic())
                assert last is None or not last.finished, "an output behind the last"
                last = output
                if len(output.outputs[0].token_ids) > end >= 0 and not output.finished:
                    self.counts["aborted"] += 1
                    await outputs.aclose()
                    return
        except ValueError:  # its adapter is refused
            assert number is not None
            assert None in self.disk.contents_of(number, asked), "a good adapter was refused"
            self.counts["refused"] += 1
        else:
            assert last is not None
            assert last.finished
            self.counts["finished"] += 1
            contents = {None} if number is None else self.disk.contents_of(number, asked, first)
            self._rows.write(json.dumps((prompt, max_tokens, [*contents], bits(last))) + "\n")
        finally:
            self._free.release()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)


def bits(output: RequestOutput) -> list[tuple[int, str]]:
    completion = output.outputs[0]
    rows = zip(completion.token_ids, completion.logprobs or [], strict=True)
    return [(token, row[token].logprob.hex()) for token, row in rows]


def used() -> tuple[int, int]:
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds()


@pytest.mark.usefixtures("_one_thread")
@sized(("adapters", "slots", "requests", "changes"), (12, 2, 60, 20), (2000, 8, 20_000, 1000))
def test_nothing_is_lost_wrong_or_leaked(
    adapters: int, slots: int, requests: int, changes: int, tmp_path: Path, battery_counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    modules = {n: size for n, size in linear_modules(transformers_model(MODEL)).items() if ".layers.0." in n}
    disk = Disk(tmp_path, modules, adapters, min(adapters, 300))
    sizes = ARGUMENTS | {"model": str(checkpoint(MODEL))}
    serving: dict[str, Any] = {
        "max_loras": slots, "max_cpu_loras": min(KEPT, adapters // 2), "num_kv_blocks": 12, "check_invariants": True,
        "scheduling_policy": "priority",
    }  # fmt: skip
    engine = CompiledEngine(**sizes, **serving)
    memory: list[tuple[int, int]] = []

    async def all_of_them() -> Client:
        async with AsyncCompiledEngine.from_engine(engine) as served:
            client = Client(served, disk, adapters, changes / requests, finished)
            for part in (0.2, 0.3, 0.5):
                await client.serve(int(requests * part))
                memory.append(used())
            # Each change is to be seen at once now, not within a second, which a small run may not last.
            monkeypatch.setattr(host_adapters, "_FRESH_SECONDS", 0.0)
            for number in range(EXCHANGED):
                await client.serve_exchanged(number)
            stats = await served.stats()
            scheduler = engine.scheduler
            assert (stats.num_running, stats.num_waiting, scheduler.pool.num_used) == (0, 0, 0)
            scheduler.running_set.adapters.check_invariants([])
            known = engine.own_runner.adapters
            assert known is not None
            assert len(known._recent) <= serving["max_cpu_loras"]
            gc.collect()
            assert len(known._known) <= serving["max_cpu_loras"], "adapters that nobody holds are in memory"
            client.counts["preemptions"] = stats.num_preemptions
            return client

    rows = tmp_path / "finished.jsonl"
    with rows.open("w") as finished:
        client = asyncio.run(all_of_them())
    counts = client.counts
    assert requests + 2 * EXCHANGED == sum(counts[end] for end in ("finished", "aborted", "refused"))
    assert min(counts[kind] for kind in ("exchanged", "spoiled", "refused")) > 0
    assert counts["preemptions"] > 0 or requests < 1000  # of few requests it depends on their moments
    assert memory[2][0] - memory[1][0] < MOST_ADDED_BYTES
    assert memory[2][1] <= memory[1][1], "files stay open"
    _compare(rows, disk, sizes, counts)
    assert counts["compared"] == counts["finished"]
    battery_counts.update(counts | {"requests": requests})


def _compare(rows: Path, disk: Disk, sizes: dict[str, Any], counts: Counter[str]) -> None:
    """Each with its adapter alone, to the bit. Where files changed meanwhile, one of them is it."""
    with (
        CompiledEngine(**sizes, max_loras=1, num_kv_blocks=26, enable_prefix_caching=False) as engine,
        rows.open() as finished,
    ):
        for row in finished:
            prompt, max_tokens, contents, served = json.loads(row)

            def alone(content: int | None, prompt: Any = prompt, max_tokens: int = max_tokens) -> list[Any]:
                adapter = None if content is None else LoRARequest(f"{content}", str(disk.contents[content]))
                (output,) = engine.generate(
                    [{"prompt_token_ids": prompt}], greedy(max_tokens), lora_request=adapter, use_tqdm=False,
                    raise_on_error=True,
                )  # fmt: skip
                return [*map(list, bits(output))]

            possible = {*contents} - {None} or {None}
            found = [alone(content) for content in possible]
            if possible != {None} and counts["beside the base model"] < 5:
                counts["beside the base model"] += 1
                counts["unlike the base model"] += alone(None) not in found
            assert served in found, f"another adapter than {contents} served {prompt}"
            counts["compared"] += 1
            counts["of several contents"] += len(found) > 1
    assert counts["unlike the base model"] > 0


class Ended(NamedTuple):
    """A request over HTTP: how it ended, when it was asked and answered, and what it was."""

    kind: str  # "whole", "left" by its client, "broken off" with an error in its stream, or a status
    asked: float
    answered: float
    prompt: list[int]
    max_tokens: int
    number: int | None
    found: Any  # bits, or the body of an error


class Turns(threading.Thread):
    """Takes turns until it ``is_over``, or one raises the ``fault``."""

    def __init__(self, url: str, requests: Requests) -> None:
        super().__init__(daemon=True)
        self._http, self._requests = httpx.Client(base_url=url, timeout=120), requests
        self.is_over = False
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            with self._http:
                while not self.is_over:
                    self._turn()
        except BaseException as error:
            self.fault = error

    def _turn(self) -> None:
        raise NotImplementedError


class WebClient(Turns):
    """Sends requests to a server one after another, and notes how each ends."""

    def __init__(self, url: str, requests: Requests) -> None:
        super().__init__(url, requests)
        self.ended: list[Ended] = []

    def _turn(self) -> None:
        prompt, max_tokens, number = self._requests.next()
        asked = time.monotonic()
        kind, found = self._ask(prompt, max_tokens, number)
        self.ended.append(Ended(kind, asked, time.monotonic(), prompt, max_tokens, number, found))
        time.sleep(0.3 * (kind == "503"))

    def _ask(self, prompt: list[int], max_tokens: int, number: int | None) -> tuple[str, Any]:
        body = {
            "model": "base" if number is None else f"{number}", "prompt": prompt, "max_tokens": max_tokens,
            "temperature": 0, "logprobs": 1, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        way = self._requests.rng.random()
        if way < 0.5:
            answer = self._http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                return str(answer.status_code), answer.text
            return "whole", bits_of(answer.json()["choices"])
        with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return str(answer.status_code), answer.read().decode()
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            if way > 0.95:
                next(lines)
                return "left", None
            events = [*lines]
        assert events.pop() == "[DONE]"
        assert "[DONE]" not in events
        choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
        ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        errors = [event for event in events if "error" in json.loads(event)]
        if errors:
            assert (errors, ends) == (events[-1:], []), "something behind the end"
            return "broken off", errors[0]
        assert ends == ["length"]
        return "whole", bits_of(choices)


def bits_of(choices: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """As ``bits``, of an answer over HTTP, or of the events of one."""
    tokens = [token for choice in choices for token in choice["token_ids"]]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return [(token, value.hex()) for token, value in zip(tokens, logprobs, strict=True)]


class Changes(Turns):
    """Exchanges and spoils files, and loads and unloads every third adapter, at random moments.

    Attributes:
        absent: of an adapter, from when to when the server may not know it.
    """

    def __init__(self, url: str, requests: Requests, disk: Disk) -> None:
        super().__init__(url, requests)
        self._disk = disk
        self.absent: dict[int, list[list[float]]] = defaultdict(list)
        self.counts: Counter[str] = Counter()

    def _turn(self) -> None:
        time.sleep(self._requests.rng.uniform(0, 0.3))
        number, rng = self._requests.adapter(), self._requests.rng
        if number % 3 or rng.random() < 0.3:
            self.counts[self._disk.change(number, rng)] += 1
            return
        body, spans = {"lora_name": f"{number}"}, self.absent[number]
        if spans and spans[-1][1] == NOWHERE:
            answer = self._http.post("/v1/load_lora_adapter", json={**body, "lora_path": str(self._disk.path(number))})
            assert answer.status_code in (200, 400, 404, 503), answer.text
            if answer.status_code == 200:
                spans[-1][1] = time.monotonic()
            self.counts["loaded" if answer.status_code == 200 else "not loaded"] += 1
        else:
            spans.append([time.monotonic(), NOWHERE])
            answer = self._http.post("/v1/unload_lora_adapter", json=body)
            assert answer.status_code in (200, 503), answer.text
            if answer.status_code == 503:
                spans.pop()
            self.counts["unloaded" if answer.status_code == 200 else "not unloaded"] += 1


def is_within(ended: Ended, spans: list[list[float]]) -> bool:
    return any(since < ended.answered and until > ended.asked for since, until in spans)


@pytest.mark.battery
@pytest.mark.usefixtures("_one_thread")
def test_requests_end_once_while_the_engine_is_killed(tmp_path: Path, battery_counts: Counter[str]) -> None:
    """Five times, as often as a server starts it again: whole, refused with the reason, or broken off by the kill."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    shape = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    modules = {f"model.layers.{layer}.self_attn.q_proj": shape for layer in range(config["num_hidden_layers"])}
    disk, adapters, rng, outages = Disk(tmp_path, modules, 40, 30), 40, random.Random(0), list[list[float]]()
    flags = ["--dtype", "bfloat16", "--served-model-name", "base", "--enable-lora", "--max-loras", "3"]
    flags += ["--max-lora-rank", "4", "--max-cpu-loras", "8", "--bucket-sizes", "1,8", "--max-model-len", "96"]
    flags += ["--num-kv-blocks", "16", "--num-threads", "1", "--allow-lora-updates", "--restart-engine"]
    flags += ["--lora-modules", *(f"{number}={disk.path(number)}" for number in range(adapters))]
    with (tmp_path / "log").open("w") as log, program(*flags, command=COMMAND[:5], stderr=log) as server:
        server.wait_until("/health")
        url = str(server.http.base_url)
        clients = [WebClient(url, Requests(adapters, seed)) for seed in range(1, 9)]
        changes = Changes(url, Requests(adapters, 0), disk)
        threads: list[Turns] = [*clients, changes]
        for thread in threads:
            thread.start()
        for _ in range(5):
            time.sleep(rng.uniform(1, 6))
            outages.append([time.monotonic(), NOWHERE])
            engine = server.engine()
            engine.send_signal(signal.SIGKILL)
            engine.wait(60)
            server.wait_until("/health")
            outages[-1][1] = time.monotonic()
        time.sleep(5)
        for thread in threads:
            thread.is_over = True
            thread.join()
            assert thread.fault is None, thread.fault
        _check_nothing_is_left(server)
    ended = [one for client in clients for one in client.ended]
    counts = changes.counts + Counter(one.kind for one in ended)
    rows = tmp_path / "finished.jsonl"
    with rows.open("w") as finished:
        for one in ended:
            contents = {None} if one.number is None else disk.contents_of(one.number, one.asked, one.answered)
            told = f"{one}, {outages}"
            if one.kind == "whole":
                finished.write(json.dumps((one.prompt, one.max_tokens, [*contents], one.found)) + "\n")
            elif one.kind == "400":
                assert one.number is not None
                assert None in contents, told
                assert str(disk.path(one.number)) in one.found, told
            elif one.kind == "404":
                assert one.number is not None
                assert is_within(one, changes.absent[one.number]), told
            elif one.kind != "left":
                assert one.kind in ("503", "broken off"), told
                assert is_within(one, outages), told
    sizes = {name: value for name, value in ARGUMENTS.items() if name != "bucket_sizes"}
    _compare(rows, disk, sizes, counts)
    assert counts["compared"] == counts["whole"]
    assert min(counts[kind] for kind in ("400", "404", "503", "loaded", "unloaded", "exchanged", "spoiled")) > 0
    battery_counts.update(counts | {"requests": len(ended), "kills": len(outages)})


def _check_nothing_is_left(server: Program) -> None:
    """Of requests; of killed engines; and the server ends when it is asked to."""

    def info() -> Iterator[tuple[str, str]]:
        for family in text_string_to_metric_families(server.http.get("/metrics").text):
            if family.name == "vllm:lora_requests_info":
                for sample in family.samples:
                    yield sample.labels["running_lora_adapters"], sample.labels["waiting_lora_adapters"]

    deadline = time.monotonic() + 60
    while server.http.get("/load").json() != {"server_load": 0, "running": 0, "waiting": 0}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [*info()] == [("", "")]
    process = psutil.Process(server.process.pid)
    assert len(server.engines()) == 1
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in process.children(recursive=True))
    assert process.num_fds() < 60
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
