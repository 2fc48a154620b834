"""Adapters over hours, in minutes: many on disk, few slots, files that change, nothing lost, wrong or leaked.

Requests come by Zipf's law, with priorities, and some are aborted. Adapters on disk are exchanged, spoiled and taken
away at random moments. At full size 2,000 adapters, 8 slots, 20,000 requests and 1,000 changes.
"""

import asyncio
import dataclasses
import gc
import json
import os
import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, TextIO

import psutil
import pytest

from compiled_llm import AsyncCompiledEngine, CompiledEngine, LoRARequest, RequestOutput, SamplingParams
from compiled_llm.adapters.host_adapters import _FRESH_SECONDS
from tests.adapters.made import linear_modules, write_adapter
from tests.families import checkpoint, transformers_model

MODEL = "qwen3"
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16", "bucket_sizes": (12,), "token_bucket_sizes": (64,), "max_model_len": 96, "enforce_eager": True,
    "enable_lora": True, "max_lora_rank": 4, "progress": "off", "num_threads": 1,
}  # fmt: skip
MOST_UNFINISHED = 24
MOST_ADDED_BYTES = 16 * 2**20  # of the second half
KEPT = 64  # adapters in host memory without a request


@dataclasses.dataclass
class Served:
    """A request, and what could have been its adapter: the contents that were there before it had its first token."""

    prompt: list[int]
    max_tokens: int
    contents: set[int | None]  # None: none, or one that is refused
    output: RequestOutput | None = None
    aborted: bool = False


class Disk:
    """Adapters as links to directories of contents, so that an exchange is one step."""

    def __init__(self, directory: Path, num_adapters: int, num_contents: int) -> None:
        self.links = directory / "adapters"
        self.links.mkdir()
        modules = [item for item in linear_modules(transformers_model(MODEL)).items() if ".layers.0." in item[0]]
        self.contents = [
            write_adapter(
                directory / f"content {seed}", dict(random.Random(seed).sample(modules, 2)), seed=seed,
                r=1 + seed % 4, lora_alpha=8 + seed % 3,
            )
            for seed in range(num_contents)
        ]  # fmt: skip
        self.bad = [directory / name for name in ("cut off", "no config", "not there")]
        for place, lacking in zip(self.bad[:2], ("", "adapter_config.json"), strict=True):
            place.mkdir()
            for file in self.contents[0].iterdir():
                data = file.read_bytes()
                if file.name != lacking:
                    (place / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
        self.now: list[int | None] = [None] * num_adapters
        self._replaced: dict[int, list[tuple[float, int | None]]] = defaultdict(list)  # by adapter: until when
        for number in range(num_adapters):
            self.put(number, number % num_contents)
        self._replaced.clear()

    def path(self, number: int) -> Path:
        return self.links / str(number)

    def put(self, number: int, content: int | None, bad: int = 0) -> None:
        target = self.bad[bad] if content is None else self.contents[content]
        link = self.links / "new"
        link.symlink_to(target)
        os.replace(link, self.path(number))
        self._replaced[number].append((time.monotonic(), self.now[number]))
        self.now[number] = content

    def contents_of(self, number: int) -> set[int | None]:
        """What the engine may serve for it: one that it looked at within the last second is taken to be unchanged."""
        since = time.monotonic() - 2 * _FRESH_SECONDS
        return {self.now[number]} | {content for until, content in self._replaced[number] if until > since}


class Client:
    """Sends requests, aborts some, and changes what is on disk."""

    def __init__(self, engine: AsyncCompiledEngine, disk: Disk, share_of_changes: float, finished: TextIO) -> None:
        self.engine, self.disk = engine, disk
        self._finished = finished  # what is kept in memory would be the second half's
        self._num_sent, self._share = 0, share_of_changes
        self.counts: Counter[str] = Counter()
        self._rng = random.Random(46)
        numbers = range(len(disk.now))
        self._weights = [1 / (1 + number) ** 1.1 for number in numbers]
        self._numbers = list(numbers)
        self._starts = [[self._rng.randrange(3, 300) for _ in range(34)] for _ in range(4)]
        self._waiting: list[set[tuple[int, Served]]] = []
        self._open: dict[int, tuple[int, Served]] = {}  # without a token yet, by its place: the adapter's number
        self._free = asyncio.Semaphore(MOST_UNFINISHED)

    async def serve(self, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await self._free.acquire()
                if self._rng.random() < self._share:
                    self._change()
                group.create_task(self._request())

    def _change(self) -> None:
        """Another content, a bad one, or none, in the place of an adapter that may be in use."""
        (number,) = self._rng.choices(self._numbers, self._weights)
        kind = self._rng.choice(("exchanged", "spoiled"))
        content = self._rng.randrange(len(self.disk.contents)) if kind == "exchanged" else None
        self.disk.put(number, content, self._rng.randrange(len(self.disk.bad)))
        self.counts[kind] += 1
        for of_number, request in self._open.values():
            if of_number == number:
                request.contents.add(content)

    async def _request(self) -> None:
        rng, place = self._rng, self._num_sent
        self._num_sent += 1
        prompt = rng.choice(self._starts)[: rng.choice((3, 20, 34))] + [rng.randrange(3, 300) for _ in range(3)]
        (number,) = rng.choices(self._numbers, self._weights)
        adapter = None if rng.random() < 0.1 else LoRARequest(f"{number}", str(self.disk.path(number)))
        request = Served(
            prompt, rng.choice((1, 3, 8, 16)), {None} if adapter is None else self.disk.contents_of(number)
        )
        if adapter is not None:
            self._open[place] = number, request
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, logprobs=1, ignore_eos=True)
        end = rng.randrange(request.max_tokens) if rng.random() < 0.15 else -1  # outputs before it is aborted
        outputs = self.engine.generate(
            {"prompt_token_ids": prompt}, params, lora_request=adapter, priority=rng.randrange(3)
        )
        try:
            async for output in outputs:
                self._open.pop(place, None)
                assert request.output is None or not request.output.finished, "an output behind the last"
                request.output = output
                if len(output.outputs[0].token_ids) > end >= 0 and not output.finished:
                    request.aborted = True
                    await outputs.aclose()
                    break
        except ValueError:  # its adapter is refused
            assert adapter is not None
            assert None in request.contents, "a good adapter was refused"
            request.contents, request.output = {None}, None
            self.counts["refused"] += 1
        else:
            assert request.aborted or (request.output is not None and request.output.finished)
            self.counts["aborted" if request.aborted else "finished"] += 1
            if not request.aborted:
                assert request.output is not None
                row = (prompt, request.max_tokens, [*request.contents], bits(request.output))
                self._finished.write(json.dumps(row) + "\n")
        finally:
            self._open.pop(place, None)
            self._free.release()


def bits(output: RequestOutput) -> list[tuple[int, str]]:
    completion = output.outputs[0]
    rows = zip(completion.token_ids, completion.logprobs or [], strict=True)
    return [(token, row[token].logprob.hex()) for token, row in rows]


def used() -> tuple[int, int]:
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds()


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("adapters", "slots", "requests", "changes"),
    [
        pytest.param(12, 2, 60, 20, id="small"),
        pytest.param(2000, 8, 20_000, 1000, id="full", marks=pytest.mark.battery),
    ],
)
def test_nothing_is_lost_wrong_or_leaked(
    adapters: int, slots: int, requests: int, changes: int, tmp_path: Path, battery_counts: Counter[str]
) -> None:
    disk = Disk(tmp_path, adapters, min(adapters, 300))
    sizes = ARGUMENTS | {"model": str(checkpoint(MODEL))}
    serving: dict[str, Any] = {
        "max_loras": slots, "max_cpu_loras": min(KEPT, adapters // 2), "num_kv_blocks": 12, "check_invariants": True,
        "scheduling_policy": "priority",
    }  # fmt: skip
    engine = CompiledEngine(**sizes, **serving)
    memory: list[tuple[int, int]] = []

    async def all_of_them() -> Client:
        async with AsyncCompiledEngine.from_engine(engine) as served:
            client = Client(served, disk, changes / requests, finished)
            for part in (0.2, 0.3, 0.5):
                await client.serve(int(requests * part))
                memory.append(used())
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
    assert requests == sum(counts[end] for end in ("finished", "aborted", "refused"))
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
            params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, ignore_eos=True)

            def alone(content: int | None, prompt: Any = prompt, params: SamplingParams = params) -> list[Any]:
                adapter = None if content is None else LoRARequest(f"{content}", str(disk.contents[content]))
                (output,) = engine.generate(
                    [{"prompt_token_ids": prompt}], params, lora_request=adapter, use_tqdm=False, raise_on_error=True
                )
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
