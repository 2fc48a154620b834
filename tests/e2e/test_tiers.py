"""KV blocks in host memory and in files: outputs are those without, to the bit, whatever moves and whatever breaks."""

import dataclasses
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, LoRARequest, RequestOutput, SamplingParams
from compiled_llm.scheduling import tiers as scheduling_tiers
from compiled_llm.scheduling.host_blocks import HostBlock, MoveCosts
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.scheduler_output import FileOutput, SchedulerOutput
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.tiers import file_thread
from compiled_llm.tiers.block_file import HEADER_BYTES
from compiled_llm.worker import block_copies, started_model
from tests.adapters.made import linear_modules, write_adapter
from tests.draft_heads import Eagle3Reference, write_eagle3, write_medusa
from tests.drafting_networks import inexact_copy, record_drafts
from tests.e2e.test_draft_heads import wrong_drafts
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.families import checkpoint, transformers_model

HOST, GREEDY = 2**16, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
HYBRIDS = ("granite-hybrid", "nemotron-h", "qwen3-next", "qwen3.5")
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "swap": ("qwen3", SWAP),
    "recompute, overlap": ("llama", {"preemption_mode": "recompute", "async_scheduling": True}),
    "windows": ("gemma3", SWAP),
    "windows, sinks, experts": ("gpt-oss", SWAP),
    "latent": ("deepseek-v3", SWAP),
    "int8": ("qwen3", {**SWAP, "kv_cache_dtype": "int8"}),
    "fp8": ("qwen3", {"kv_cache_dtype": "fp8", "async_scheduling": True}),
    "bfloat16, no chunks": (
        "qwen2",
        {"dtype": "bfloat16", "enable_chunked_prefill": False, "token_bucket_sizes": (64,)},
    ),
    "ngram": ("llama", {**SWAP, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "states": ("lfm2", SWAP),
    "states, overlap": ("granite-hybrid", {"preemption_mode": "recompute", "async_scheduling": True}),
    "states, int8": ("qwen3-next", {**SWAP, "kv_cache_dtype": "int8"}),
    "states, drafts": (
        "nemotron-h",
        {**SWAP, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "other process": ("llama", {**SWAP, "model_process": True}),
    "compiled": ("llama", {**SWAP, "enforce_eager": False, "async_scheduling": True}),
}


def host_bytes(model: str, arguments: dict[str, Any], blocks: int) -> int:
    """Memory for so many blocks, and as many states."""
    with CompiledEngine(
        str(checkpoint(model)), **SMALL | arguments | {"kv_host_bytes": HOST, "model_process": False}
    ) as e:
        return (e.runner.facts.host_block_bytes + e.runner.facts.host_slot_bytes) * blocks


def network(method: str, directory: Path) -> dict[str, Any]:
    """A speculative_config for llama whose network drafts by this method."""
    target, made = checkpoint("llama"), {"eagle3": write_eagle3, "medusa": write_medusa}
    model = inexact_copy("llama", directory) if method == "draft_model" else made[method](directory, target)
    return {"method": method, "model": model, "num_speculative_tokens": 3}


def without_tiers(model: str, arguments: dict[str, Any], work: Work) -> dict[str, RequestOutput]:
    with CompiledEngine(str(checkpoint(model)), **SMALL | arguments) as engine:
        return serve(engine, work)


def check(outputs: dict[str, RequestOutput], expected: dict[str, RequestOutput], work: Work) -> None:
    for number, output in outputs.items():
        assert facts(output) == facts(expected[number]), f"request {number}: {work[int(number)]}"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("windows", 6, id="small"),
        pytest.param("states", 8, id="small-states"),
        *(pytest.param(name, 200, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES),
    ],
)
def test_outputs_are_those_without_and_a_restarted_engine_finds_blocks(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random requests on pools of a few blocks, so that all moves all the time; some are aborted."""
    if "states" in name:  # small models compute faster than states of 100 blocks are copied
        monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)
    (model, arguments), rng = ENGINES[name], random.Random(name)
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in random_work(rng, count)
    ]
    expected = without_tiers(model, arguments, work)
    tiers = {"kv_host_bytes": host_bytes(model, arguments, 12)}
    aborted = frozenset(number for number in range(count) if number % 7 == 3)
    with CompiledEngine(str(checkpoint(model)), **SMALL | arguments, **tiers) as engine:
        for _ in range(2):
            check(serve(engine, work, aborted), expected, work)
        stats = engine.stats()
        assert stats.host_hit_tokens > 0
        assert stats.num_host_evictions > 0
        assert not engine.scheduler.tiers.has_disk, "nothing is to be written where there is none"
    for restart in range(2):
        disk = {"kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 2**24}
        with CompiledEngine(str(checkpoint(model)), **SMALL | arguments, **tiers, **disk) as engine:
            check(serve(engine, work, aborted), expected, work)
            stats = engine.stats()
            assert stats.num_disk_failures == 0
            assert (stats.disk_hit_tokens > 0) >= bool(restart)
            assert stats.disk_written_bytes > 0 or restart


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """Arguments of an engine whose device holds a prompt or two, and whose host memory holds more."""
    arguments = {"dtype": "float32", "num_kv_blocks": 20}
    return {**SMALL, **arguments, "kv_host_bytes": host_bytes("llama", arguments, 60)}


def prompts_of(count: int, length: int = 49) -> list[dict[str, Any]]:
    rng = random.Random(count)
    return [{"prompt_token_ids": [rng.randrange(3, 300) for _ in range(length)]} for _ in range(count)]


def tokens(engine: CompiledEngine, prompts: list[dict[str, Any]], **more: Any) -> list[Any]:
    """Of each prompt alone: tokens and log-probabilities."""
    found = []
    for prompt in prompts:
        (output,) = engine.generate([prompt], GREEDY, use_tqdm=False, raise_on_error=True, **more)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    return found


def test_a_restarted_engine_computes_nothing_but_the_last_block(tiny: dict[str, Any], tmp_path: Path) -> None:
    prompts, disk = prompts_of(3), {"kv_disk_path": str(tmp_path / "kv")}
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        expected = tokens(engine, prompts)
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        assert tokens(engine, prompts) == expected
        stats = engine.stats()
        assert stats.disk_hit_tokens == 3 * 48
        assert stats.num_computed_tokens == 3 * (1 + 5)
        assert stats.disk_read_bytes == 3 * 12 * engine.runner.facts.host_block_bytes
        assert "KV tier" in str(engine.memory_report())
        engine.scheduler.pool.clear_cache()  # it is in host memory now
        assert tokens(engine, prompts) == expected
        assert engine.stats().host_hit_tokens >= 2 * 48


def test_damaged_files_are_noticed_and_computed_again(tiny: dict[str, Any], tmp_path: Path) -> None:
    """A flipped bit anywhere, a file cut short, one of another block, one that others may write to."""
    prompts, disk = prompts_of(2), {"kv_disk_path": str(tmp_path / "kv")}
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        expected = tokens(engine, prompts)
    files, rng = sorted((tmp_path / "kv").glob("*/*.kv")), random.Random(0)
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        if number % 4 == 0:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif number % 4 == 1:
            del content[rng.randrange(len(content)) :]
        elif number % 4 == 2:
            content = bytearray(files[(number + 1) % len(files)].read_bytes())
        else:
            path.chmod(0o666)
        path.write_bytes(content)
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        assert tokens(engine, prompts) == expected
        stats = engine.stats()
        assert stats.disk_hit_tokens == 0
        assert stats.num_disk_failures > 0
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:  # good ones are in their places
        assert tokens(engine, prompts) == expected
        assert engine.stats().disk_hit_tokens > 0


@pytest.mark.parametrize("reads", [True, False], ids=["read", "write"])
def test_rows_are_given_anew_only_when_no_file_uses_them(
    reads: bool, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps broke while a file was read or written: the next one copies a block to that row once it has ended."""
    with CompiledEngine(str(checkpoint("llama")), **tiny, kv_disk_path=str(tmp_path / "kv")) as engine:
        runner, began, goes_on = engine.own_runner, threading.Event(), threading.Event()
        pool, seen = runner.swap_space.pools[0], list[bytes]()
        assert runner.files is not None

        def read_all(blocks: Any, source: Any) -> list[Any]:
            began.set()
            goes_on.wait(10)
            blocks[0].own[:] = bytes([1]) * len(blocks[0].own)
            return [None]

        def write(digest: bytes, parts: Any, windows: Any) -> tuple[bool, list[bytes]]:
            began.set()
            goes_on.wait(10)
            seen.append(bytes(parts[0]))
            return False, []

        for method in (read_all, write):
            monkeypatch.setattr(runner.files.folder, method.__name__, method)
        pool[0] = 2
        asked = FileOutput(reads=((bytes(32), 1, None),)) if reads else FileOutput(writes=((bytes(32), 1, ()),))
        runner.launch(SchedulerOutput(files=asked))
        assert began.wait(10)
        threading.Timer(0.2, goes_on.set).start()
        runner.launch(SchedulerOutput(swapped_out=((1, 1), (2, 2)), files=FileOutput(resets=True)))
        assert goes_on.is_set()
        block = torch.cat([cache[1].flatten().view(torch.uint8) for cache in runner.steps.cache_groups()[0]])
        assert torch.equal(pool[0], block), "the block of the step that began anew"
        assert reads or seen == [bytes([2]) * pool.shape[1]], "the file has what it was to have"


@pytest.mark.parametrize(
    "model",
    ["lfm2", *(pytest.param(name, marks=pytest.mark.battery) for name in HYBRIDS)],
)
def test_states_come_back_with_their_blocks(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory and, after a restart, from files; a state whose file is damaged is computed, with its blocks."""
    monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)
    prompts, disk = prompts_of(3, 50), {"kv_disk_path": str(tmp_path / "kv"), "kv_host_bytes": 2**21}
    arguments = {**SMALL, "dtype": "float32", "num_kv_blocks": 20}
    with CompiledEngine(str(checkpoint(model)), **arguments, **disk) as engine:
        expected = tokens(engine, prompts)
        assert tokens(engine, prompts) == expected
        assert engine.stats().host_hit_tokens == 3 * 48
        state_bytes = engine.runner.facts.host_slot_bytes
    for damage in (False, True):
        damaged = [
            path
            for path in (tmp_path / "kv").glob("*/*.kv")
            if damage and path.stat().st_size == HEADER_BYTES + state_bytes
        ]
        for path in damaged:
            content = bytearray(path.read_bytes())
            content[-state_bytes // 2] ^= 1
            path.write_bytes(content)
        with CompiledEngine(str(checkpoint(model)), **arguments, **disk) as engine:
            assert tokens(engine, prompts) == expected
            stats = engine.stats()
            assert stats.disk_hit_tokens == (not damage) * 3 * 48
            assert stats.num_computed_tokens == 3 * ((50 if damage else 2) + 5)
            assert stats.num_disk_failures == damage * 3
    assert damaged


@pytest.mark.battery
def test_another_model_finds_nothing(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Weights with noise at the same shapes, in the same directory."""
    prompts, disk = prompts_of(1), {"kv_disk_path": str(tmp_path / "kv")}
    results = []
    for seed in range(2):
        directory = inexact_copy("llama", tmp_path / "model", noise=0.03 * seed)
        with CompiledEngine(directory, **tiny, **disk) as engine:
            results.append(tokens(engine, prompts))
            assert engine.stats().disk_hit_tokens == 0
    assert results[0] != results[1]
    assert len(list((tmp_path / "kv").iterdir())) == 2


@pytest.mark.battery
def test_an_adapter_has_blocks_of_its_own(tiny: dict[str, Any], tmp_path: Path) -> None:
    modules = linear_modules(transformers_model("llama"))
    adapters = [
        LoRARequest(str(seed), str(write_adapter(tmp_path / str(seed), modules, seed=seed, r=4))) for seed in range(2)
    ]
    prompts, disk = prompts_of(2), {"kv_disk_path": str(tmp_path / "kv")}
    arguments = {**tiny, "enable_lora": True, "max_lora_rank": 8}
    with CompiledEngine(str(checkpoint("llama")), **arguments, **disk) as engine:
        expected = [tokens(engine, prompts, lora_request=adapter) for adapter in (None, *adapters)]
    assert expected[0] != expected[1] != expected[2]
    with CompiledEngine(str(checkpoint("llama")), **arguments, **disk) as engine:
        for adapter, wanted in zip((*adapters[::-1], None), expected[::-1], strict=True):
            assert tokens(engine, prompts, lora_request=adapter) == wanted
        assert engine.stats().disk_hit_tokens == 3 * 2 * 48


@pytest.mark.battery
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_with_a_network_that_drafts(method: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    """What it keeps of a block from a file is computed again: no token suffers, and later drafts are accepted."""
    config = network(method, tmp_path / "draft") | {"adaptive": False}
    prompts, disk = prompts_of(3), {"kv_disk_path": str(tmp_path / "kv")}
    with CompiledEngine(str(checkpoint("llama")), **tiny) as engine:
        expected = tokens(engine, prompts)
    accepted = []
    for _ in range(2):
        with CompiledEngine(str(checkpoint("llama")), **tiny, **disk, speculative_config=config) as engine:
            found = record_drafts(engine)
            assert tokens(engine, prompts) == expected
            accepted.append(engine.stats().num_accepted_draft_tokens)
    assert engine.stats().disk_hit_tokens > 0
    if method == "eagle3":  # hidden states of the prompt are those from the file
        assert len(found) > 5
        assert wrong_drafts(found, Eagle3Reference(tmp_path / "draft", checkpoint("llama"))) == []
    assert min(accepted) > 0 or method != "draft_model"  # heads with random weights are never right


# -- Planted bugs: what the tests above would see


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are found in host memory before they are copied there."""
    monkeypatch.setattr(KVTiers, "_store", _store_nothing)


def _store_nothing(self: KVTiers, block: int, digest: bytes, *, makes_room: bool) -> bool:
    row = None if digest in self._blocks else self._take_row(makes_room=makes_room)
    if row is not None:
        self._blocks[digest] = HostBlock(digest, row)
    return True


def wrong_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests do not tell adapters apart."""
    own = PrefixCache._digests

    def digests(self: PrefixCache, request: Any, count: int) -> list[bytes]:
        adapter, request.adapter = request.adapter, ""
        try:
            return own(self, request, count)
        finally:
            request.adapter = adapter

    monkeypatch.setattr(PrefixCache, "_digests", digests)


def _half_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first tensor half comes back."""
    own = block_copies.swap.swap_in

    def swap_in(caches: list, host: Any, device_blocks: Any, host_blocks: Any) -> None:
        before = caches[0].clone()
        own(caches, host, device_blocks, host_blocks)
        half = caches[0].flatten(1).shape[1] // 2
        caches[0].flatten(1)[:, :half] = before.flatten(1)[:, :half]

    monkeypatch.setattr(block_copies.swap, "swap_in", swap_in)


def _reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks come back in each other's place."""
    own = block_copies.swap_indices

    def swap_indices(pairs: Any) -> Any:
        device, host = own(pairs)
        return device, host.flip(0)

    monkeypatch.setattr(block_copies, "swap_indices", swap_indices)


def _stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are found in host memory before they are copied there."""

    def store(self: KVTiers, slot: int, digest: bytes, *, makes_room: bool) -> bool:
        name = scheduling_tiers.state_name(digest)
        if name not in self._blocks and (row := self._take_row(makes_room=makes_room, is_state=True)) is not None:
            self._blocks[name] = HostBlock(name, row)
        return True

    monkeypatch.setattr(KVTiers, "_store_state", store)


def _one_state_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are not told apart by what they follow."""
    monkeypatch.setattr(scheduling_tiers, "state_name", lambda digest: bytes(32))


def test_planted_bugs_of_states_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)
    prompts = prompts_of(3)
    with CompiledEngine(str(checkpoint("lfm2")), **SMALL, dtype="float32", kv_host_bytes=2**21) as engine:
        expected = tokens(engine, prompts)
        assert tokens(engine, prompts) == expected
        assert engine.stats().host_hit_tokens > 0
        for plant in (_stale_state, _one_state_for_all):
            engine.reset_prefix_cache()
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                assert [tokens(engine, prompts), tokens(engine, prompts)] != [expected, expected]


@pytest.mark.battery
@pytest.mark.parametrize("plant", [_stale, wrong_adapter, _half_a_layer, _reordered])
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = linear_modules(transformers_model("llama"))
    adapter = LoRARequest("a", str(write_adapter(tmp_path / "a", modules, r=4)))
    prompts = prompts_of(2)
    with CompiledEngine(str(checkpoint("llama")), **tiny, enable_lora=True, max_lora_rank=8) as engine:

        def results() -> list[Any]:
            return [tokens(engine, prompts, lora_request=one) for one in (None, adapter)]

        expected = results()
        assert results() == expected
        assert engine.stats().host_hit_tokens > 0
        engine.reset_prefix_cache()
        plant(monkeypatch)
        assert [results(), results()] != [expected, expected]


def test_a_row_that_is_not_pinned_is_noticed(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the invariants, in the step that copies it."""
    monkeypatch.setattr(KVTiers, "_pin_for_step", lambda self, held: self._step.pinned.append(held))
    with CompiledEngine(str(checkpoint("llama")), **tiny) as engine, pytest.raises(AssertionError, match="pin"):
        tokens(engine, prompts_of(4))


@pytest.mark.battery
def test_a_late_file_is_computed(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, disk = prompts_of(2), {"kv_disk_path": str(tmp_path / "kv")}
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        expected = tokens(engine, prompts)
    own = file_thread.FileThread._read

    def read_slowly(self: file_thread.FileThread, *job: Any) -> Any:
        self._changed.acquire()
        self._changed.wait(0.2)
        self._changed.release()
        return own(self, *job)

    monkeypatch.setattr(file_thread.FileThread, "_read", read_slowly)
    monkeypatch.setattr(KVTiers, "least_wait", 0.01)
    with CompiledEngine(str(checkpoint("llama")), **tiny, **disk) as engine:
        assert tokens(engine, prompts) == expected
        stats = engine.stats()
        assert stats.num_fetches_late > 0
        assert stats.tier_idle_seconds > 0


@pytest.mark.parametrize(("model", "what"), [("llama", "a block"), ("lfm2", "a block and a state")])
def test_a_bound_of_files_has_room_for_one(model: str, what: str, tmp_path: Path) -> None:
    sizes = {"kv_host_bytes": 2**20, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 1000}
    with pytest.raises(ValueError, match=rf"kv_disk_bytes must be at least \d+, {what}, given 1000"):
        CompiledEngine(str(checkpoint(model)), **SMALL, **sizes)
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_late_leaves_no_thread(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        assert len(threading.enumerate()) > len(before), "nothing reads files yet"
        raise RuntimeError("no costs")

    before = set(threading.enumerate())
    monkeypatch.setattr(started_model, "worker_facts", fails)
    with pytest.raises(RuntimeError, match="no costs"):
        CompiledEngine(str(checkpoint("llama")), **tiny, kv_disk_path=str(tmp_path / "kv"))
    assert set(threading.enumerate()) <= before


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"kv_host_bytes must be 0 or at least \d+ for layers with a state"):
        CompiledEngine(str(checkpoint("lfm2")), **SMALL, kv_host_bytes=3000)
    for arguments, message in (
        ({"kv_host_bytes": 2**20, "enable_prefix_caching": False}, "kv_host_bytes must be 0 with"),
        ({"kv_disk_path": "kv"}, "kv_host_bytes must be above 0 with kv_disk_path"),
        ({"kv_disk_bytes": 2**20}, "kv_disk_bytes must be None without kv_disk_path"),
        ({"kv_host_bytes": 2**20, "kv_disk_path": ""}, "kv_disk_path must be a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            CompiledEngine(**arguments)
