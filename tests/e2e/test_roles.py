"""Prefill and decode apart: outputs are those of one engine, to the bit, wherever prompts are computed."""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, LoRARequest, RequestOutput, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.scheduling import tiers
from compiled_llm.scheduling.tiers import KVTiers
from compiled_llm.tiers.giver import BlockGiver
from tests.adapters.made import linear_modules, write_adapter
from tests.e2e.test_draft_model import SMALL, SWAP, Work, facts, random_work, serve
from tests.e2e.test_tiers import network, wrong_adapter
from tests.families import checkpoint, transformers_model

KEY = "a key that all of them share"
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "swap": ("qwen3", SWAP),
    "recompute, overlap": ("llama", {"preemption_mode": "recompute", "async_scheduling": True}),
    "windows": ("gemma3", SWAP),
    "latent": ("deepseek-v3", SWAP),
    "int8": ("qwen3", {**SWAP, "kv_cache_dtype": "int8"}),
    "states": ("lfm2", SWAP),
    "states, overlap": ("granite-hybrid", {"preemption_mode": "recompute", "async_scheduling": True}),
    "states, int8": ("qwen3-next", {**SWAP, "kv_cache_dtype": "int8"}),
    "states, bfloat16": ("nemotron-h", {**SWAP, "dtype": "bfloat16"}),
    "bfloat16, no chunks": (
        "qwen2",
        {"dtype": "bfloat16", "enable_chunked_prefill": False, "token_bucket_sizes": (64,)},
    ),
    "ngram": ("llama", {**SWAP, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", KEY)


def engine_of(model: str, arguments: dict[str, Any], role: str, address: str | None = None) -> CompiledEngine:
    more = {"role": role, "kv_transfer_address": address, "kv_host_bytes": 2**20}
    if address is not None:
        more["kv_transfer_bytes"] = 2**25  # leases of all requests that wait
    return CompiledEngine(str(checkpoint(model)), **SMALL | arguments | more)


def finished(engine: CompiledEngine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def computed(prefill: CompiledEngine, number: str, prompt: Any, **more: Any) -> dict[str, Any]:
    """What the prefill engine says of a prompt that it has computed."""
    prompt_only = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    prefill.add_request(number, prompt, prompt_only, kv_transfer_params={"do_remote_decode": True}, **more)
    params = finished(prefill)[number].kv_transfer_params
    assert params is not None
    assert params["do_remote_prefill"]
    return params


def serve_apart(prefill: CompiledEngine, decode: CompiledEngine, work: Work) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for number, (prompt, params) in enumerate(work):
        given = None if params.prompt_logprobs else computed(prefill, str(number), prompt)
        decode.add_request(str(number), prompt, params, kv_transfer_params=given)
        for _ in range(2):
            outputs |= {output.request_id: output for output in decode.step()}
    return outputs | finished(decode)


def check_apart(
    prefill: CompiledEngine, decode: CompiledEngine, work: Work, expected: dict[str, RequestOutput]
) -> None:
    """Two engines give for ``work`` what one does, and blocks go from the first to the second."""
    outputs = serve_apart(prefill, decode, work)
    for number, output in outputs.items():
        assert facts(output) == facts(expected[number]), f"request {number}: {work[int(number)]}"
    stats, given = decode.stats(), prefill.stats()
    assert stats.peer_hit_tokens > 0
    assert stats.num_takes_failed == 0
    assert stats.peer_taken_bytes > 0
    assert given.peer_given_bytes > 0


@pytest.mark.parametrize(
    ("name", "count", "transport"),
    [
        pytest.param("windows", 10, "unix", id="small-unix"),
        pytest.param("swap", 10, "tcp", id="small-tcp"),
        pytest.param("swap", 10, "nixl", id="small-nixl"),
        *(
            pytest.param(name, 200, transport, id=f"full-{name}-{transport}", marks=pytest.mark.battery)
            for name in ENGINES
            for transport in ("unix", "tcp", "nixl")
        ),
    ],
)
def test_outputs_are_those_of_one_engine(name: str, count: int, transport: str, tmp_path: Path) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    (model, arguments), rng = ENGINES[name], random.Random(name)
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None)) for prompt, params in random_work(rng, count)
    ]
    with CompiledEngine(str(checkpoint(model)), **SMALL | arguments) as engine:
        expected = serve(engine, work)
    address = {"unix": f"unix:{tmp_path}/blocks", "tcp": "127.0.0.1:0", "nixl": "nixl:127.0.0.1:0"}[transport]
    with engine_of(model, arguments, "prefill", address) as prefill, engine_of(model, arguments, "decode") as decode:
        check_apart(prefill, decode, work, expected)


@pytest.mark.parametrize(
    ("method", "count"),
    [
        ("draft_model", 4),
        *(pytest.param(name, 100, marks=pytest.mark.battery) for name in ("draft_model", "eagle3", "medusa")),
    ],
)
def test_networks_that_draft(method: str, count: int, tmp_path: Path) -> None:
    """The decode engine's network computes what it lacks of blocks that come from elsewhere."""
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None))
        for prompt, params in random_work(random.Random(method), count)
    ]
    with CompiledEngine(str(checkpoint("llama")), **SMALL) as engine:
        expected = serve(engine, work)
    adaptive = count > 4  # of few requests an account learns too late what pays
    config = {"speculative_config": network(method, tmp_path / "draft") | {"adaptive": adaptive}}
    address = f"unix:{tmp_path}/blocks"
    with engine_of("llama", config, "prefill", address) as prefill, engine_of("llama", config, "decode") as decode:
        outputs = serve_apart(prefill, decode, work)
        for number, output in outputs.items():
            assert facts(output) == facts(expected[number]), f"request {number}: {work[int(number)]}"
        assert decode.stats().peer_hit_tokens > 0
        assert decode.stats().num_draft_tokens > 0


@pytest.mark.parametrize("model", ["llama", "lfm2"])
def test_blocks_are_taken_while_the_prompt_is_computed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a request that comes before its prompt is known there; nothing is given twice, nor kept afterwards."""
    sizes = {"max_model_len": 250, "num_kv_blocks": 70, "kv_host_bytes": 2**22}
    (prompt,), address = prompts_of(1, seed=4, length=201), f"unix:{tmp_path}/blocks"
    named = {"remote_request_id": "ab" * 32}
    prompt_only = dataclasses.replace(GREEDY, max_tokens=1, logprobs=None)
    with (
        engine_of(model, sizes | {"kv_transfer_bytes": 2**22}, "prefill", address) as prefill,
        engine_of(model, sizes, "decode") as decode,
    ):
        taken = decode.stats().peer_taken_bytes
        params = {"do_remote_prefill": True, "remote_host": address, **named}
        decode.add_request("a", prompt, GREEDY, kv_transfer_params=params)
        for _ in range(3):
            assert decode.step() == []
        prefill.add_request("a", prompt, prompt_only, kv_transfer_params={"do_remote_decode": True, **named})
        with pytest.raises(ValueError, match="remote_request_id of kv_transfer_params must be no other request's"):
            prefill.add_request("b", prompt, prompt_only, kv_transfer_params={"do_remote_decode": True, **named})
        steps = 0
        while not any(output.finished for output in prefill.step()):
            time.sleep(0.03)  # real steps leave threads more time
            decode.step()
            steps += prefill.scheduler.running != []
            if prefill.scheduler.running:
                taken = decode.stats().peer_taken_bytes
        found, stats = facts(finished(decode)["a"])[2:], decode.stats()
        assert steps >= 8, "of 24 tokens each"
        assert taken >= 0.5 * stats.peer_taken_bytes, "the rest came after the prompt"
        assert (stats.peer_hit_tokens, stats.num_takes_failed) == (200, 0)
        assert stats.num_computed_tokens == 1 + 5
        assert prefill.stats().peer_given_bytes == stats.peer_taken_bytes
        deadline = time.monotonic() + 10
        giver = prefill._transfers.exchange.giver  # type: ignore[union-attr]
        while giver.num_leases and time.monotonic() < deadline:
            time.sleep(0.01)
        assert giver.num_leases == 0
        forget_all((prefill, decode))
        monkeypatch.setattr(tiers, "_PEER_WAIT", 0.1)
        decode.add_request("b", prompt, GREEDY, kv_transfer_params={**params, "remote_request_id": "cd" * 32})
        assert facts(finished(decode)["b"])[2:] == found, "nobody has computed it in time, so it is computed here"
        assert decode.stats().num_computed_tokens == 2 * (1 + 5) + 200
        monkeypatch.undo()
        monkeypatch.setenv("COMPILED_LLM_KV_KEY", KEY)
        prefill.add_request("c", prompt, GREEDY)
        while not any(len(output.outputs[0].token_ids) == 4 for output in prefill.step()):
            pass
        tokens, given = prefill.hand_over(5.0)["c"]
        decode.reset_prefix_cache()
        decode.add_request("c", prompt, GREEDY, kv_transfer_params=given, output_token_ids=tokens)
        assert finished(decode)["c"].outputs[0].token_ids == found[0][0].token_ids
        # Takes for "b" may be still under way, and fail; then they are tried again for "c".
        assert decode.stats().peer_hit_tokens == 200 + 204


LLAMA: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 40, "enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CompiledEngine, CompiledEngine]]:
    """An engine that computes prompts, and one that decodes."""
    place = f"unix:{tmp_path_factory.mktemp('roles')}/blocks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_LLM_KV_KEY", KEY)
        with engine_of("llama", LLAMA, "prefill", place) as prefill, engine_of("llama", LLAMA, "decode") as decode:
            yield prefill, decode


def prompts_of(count: int, seed: int, length: int = 41) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(length)] for _ in range(count)]


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)


def forget_all(pair: tuple[CompiledEngine, CompiledEngine]) -> None:
    giver = pair[0]._transfers.exchange.giver  # type: ignore[union-attr]
    for slot in giver._slots.values():
        giver._free[slot.offset in giver._offsets[True]].append(slot.offset)
    giver._slots.clear()
    for engine in pair:
        engine.reset_prefix_cache()


def apart(pair: tuple[CompiledEngine, CompiledEngine], prompts: list[list[int]], adapter: Any = None) -> list[Any]:
    """Tokens and log-probabilities, with the prompts computed by the first; neither knows them from before."""
    prefill, decode = pair
    forget_all(pair)
    for number, prompt in enumerate(prompts):
        params = computed(prefill, str(number), prompt, lora_request=adapter)
        decode.add_request(str(number), prompt, GREEDY, kv_transfer_params=params, lora_request=adapter)
    found = finished(decode)
    return [facts(found[str(number)])[2:] for number in range(len(prompts))]


def alone(engine: CompiledEngine, prompts: list[list[int]], adapter: Any = None) -> list[Any]:
    engine.reset_prefix_cache()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY, lora_request=adapter)
    found = finished(engine)
    return [facts(found[str(number)])[2:] for number in range(len(prompts))]


def test_a_prefill_engine_that_is_gone_or_forgets_costs_time_alone(
    pair: tuple[CompiledEngine, CompiledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    (prompt,) = prompts_of(1, seed=1)
    expected = alone(decode, [prompt])
    decode.reset_prefix_cache()
    params = computed(prefill, "a", prompt)
    giver = prefill._transfers.exchange.giver  # type: ignore[union-attr]
    monkeypatch.setattr(giver, "_slots", type(giver._slots)(list(giver._slots.items())[:-3]))
    before = decode.stats()
    decode.add_request("a", prompt, GREEDY, kv_transfer_params=params)
    assert [facts(finished(decode)["a"])[2:]] == expected
    after = decode.stats()
    assert after.num_takes_failed - before.num_takes_failed == 3
    assert after.peer_hit_tokens - before.peer_hit_tokens == 7 * 4
    decode.reset_prefix_cache()
    gone = {**params, "remote_host": "unix:nowhere"}
    decode.add_request("b", prompt, GREEDY, kv_transfer_params=gone)
    assert [facts(finished(decode)["b"])[2:]] == expected
    for name, ends in (("c", "abort"), ("d", "refuse")):  # its blocks are given back on each way out
        params = computed(prefill, name, prompt)
        decode.add_request(name, prompt, GREEDY, kv_transfer_params=params)
        if ends == "abort":
            decode.abort(name)
        else:
            with pytest.raises(ValueError, match="request_id"):
                decode.add_request(name, prompt, GREEDY, kv_transfer_params=params)
            decode.abort(name)
    deadline = time.monotonic() + 10
    while giver.num_leases and time.monotonic() < deadline:
        time.sleep(0.01)
    assert giver.num_leases == 0
    prefill.add_request("e", prompt, GREEDY, kv_transfer_params={"do_remote_decode": True})
    prefill.abort("e")
    assert giver.num_leases == 0
    assert not prefill.scheduler.tiers.to_give  # type: ignore[union-attr]


def test_an_output_goes_on_elsewhere(pair: tuple[CompiledEngine, CompiledEngine]) -> None:
    """With its tokens alone, or with the blocks of a hand-over; the random numbers, penalties and text are the same."""
    prefill, decode = pair
    (prompt,) = prompts_of(1, seed=2)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=14, presence_penalty=0.7, frequency_penalty=0.3,
                            min_tokens=8, logprobs=1, ignore_eos=True, detokenize=False)  # fmt: skip
    decode.reset_prefix_cache()
    decode.add_request("a", prompt, params)
    whole = finished(decode)["a"].outputs[0]
    for blocks in (False, True):
        decode.reset_prefix_cache()
        prefill.reset_prefix_cache()
        prefill.add_request("a", prompt, params)
        for _ in range(11):
            prefill.step()
        before = decode.stats().peer_hit_tokens
        tokens, given = prefill.hand_over(5.0)["a"]
        assert not prefill.has_unfinished_requests()
        assert tokens == whole.token_ids[: len(tokens)]
        assert len(tokens) > 5
        decode.add_request("a", prompt, params, kv_transfer_params=given if blocks else None, output_token_ids=tokens)
        output = finished(decode)["a"]
        assert output.num_cached_tokens == blocks * len(prompt), "tokens of the prompt alone count"
        rest = output.outputs[0]
        assert rest.token_ids == whole.token_ids
        assert rest.logprobs is not None
        assert whole.logprobs is not None
        assert rest.logprobs[len(tokens) :] == whole.logprobs[len(tokens) :]
        taken = decode.stats().peer_hit_tokens - before
        assert taken == blocks * (len(prompt) + len(tokens) - 1) // 4 * 4
    for wrong, said in (
        ({"output_token_ids": [5] * 14}, "output_token_ids must have at most 13 tokens, given 14"),
        ({"output_token_ids": [10**6]}, "output_token_ids"),
    ):
        with pytest.raises(ValueError, match=said):
            decode.add_request("b", prompt, params, **wrong)
    with pytest.raises(ValueError, match="output_token_ids must be empty with n above 1"):
        decode.add_request("b", prompt, dataclasses.replace(params, n=2), output_token_ids=[5])


def test_a_full_giver_holds_nobody_up(
    pair: tuple[CompiledEngine, CompiledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a prompt waits for blocks that nobody has room for; steps of others do not."""
    prefill, _ = pair
    prompt, other = prompts_of(2, seed=5)
    monkeypatch.setattr(BlockGiver, "write", lambda *given: (False, []))
    prompt_only = dataclasses.replace(GREEDY, max_tokens=1, logprobs=None)
    prefill.add_request("other", other, dataclasses.replace(GREEDY, max_tokens=30))
    prefill.add_request("gives", prompt, prompt_only, kv_transfer_params={"do_remote_decode": True})
    ended: dict[str, float] = {}
    while prefill.has_unfinished_requests():
        for output in prefill.step():
            if output.finished:
                ended[output.request_id] = time.monotonic()
    assert ended["other"] + 0.2 < ended["gives"]


# -- Planted bugs: what the tests above would see


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given is what the row held before."""
    own, last = BlockGiver.write, list[list[memoryview]]()

    def write(self: BlockGiver, digest: bytes, parts: Any, windows: Any) -> Any:
        last.append([memoryview(bytes(part)) for part in parts])
        return own(self, digest, last[-2] if len(last) > 1 else last[-1], windows)

    monkeypatch.setattr(BlockGiver, "write", write)


def _half_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a block's bytes are given, before the checksum is made."""
    own = BlockGiver.write

    def write(self: BlockGiver, digest: bytes, parts: Any, windows: Any) -> Any:
        halves = [memoryview(bytes(part[: len(part) // 2]) + bytes(len(part) - len(part) // 2)) for part in parts]
        return own(self, digest, halves, windows)

    monkeypatch.setattr(BlockGiver, "write", write)


def _reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks come in each other's place."""
    own = KVTiers.send

    def send(self: KVTiers, output: Any) -> None:
        rows = [row for _, row, _ in self._to_read]
        self._to_read = [(one[0], row, one[2]) for one, row in zip(self._to_read, reversed(rows), strict=True)]
        own(self, output)

    monkeypatch.setattr(KVTiers, "send", send)


@pytest.mark.parametrize("plant", [_stale, wrong_adapter, _half_a_layer, _reordered])
def test_planted_bugs_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    pair: tuple[CompiledEngine, CompiledEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = LoRARequest("a", str(write_adapter(tmp_path / "a", linear_modules(transformers_model("llama")), r=4)))
    prompts = prompts_of(2, seed=3)

    def results() -> list[Any]:
        found = [apart(pair, prompts, one) for one in (None, adapter)]
        if plant is wrong_adapter:  # what the first of two has computed is in the cache
            forget_all(pair)
            params = computed(pair[0], "x", prompts[0])
            pair[1].add_request("x", prompts[0], GREEDY, kv_transfer_params=params, lora_request=adapter)
            found.append([facts(finished(pair[1])["x"])[2:]])
        return found

    expected = results()
    assert expected[:2] == [alone(pair[1], prompts, one) for one in (None, adapter)]
    plant(monkeypatch)
    assert results() != expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"role": "prefill"}, "kv_transfer_address must be given with role='prefill'"),
        ({"role": "decode"}, "kv_host_bytes must be above 0 with role='decode'"),
        ({"kv_transfer_bytes": 5}, "kv_transfer_bytes must be None without kv_transfer_address"),
        ({"kv_transfer_address": ""}, "kv_transfer_address must be unix:PATH, HOST:PORT or nixl:HOST:PORT"),
        ({"kv_transfer_peers": ("a",)}, "kv_transfer_peers must be empty"),
        ({"role": "decode", "kv_host_bytes": 1, "kv_disk_path": "a"}, "kv_disk_path must be None with role='decode'"),
        ({"role": "decode", "kv_host_bytes": 1, "model_process": True}, "model_process must be False"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**arguments)


def test_without_a_key_or_a_role(monkeypatch: pytest.MonkeyPatch, pair: Any) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "short")
    with pytest.raises(ValueError, match="COMPILED_LLM_KV_KEY must have at least 16 characters"):
        engine_of("llama", LLAMA, "decode")
    with pytest.raises(ValueError, match="do_remote_decode needs an engine with kv_transfer_address"):
        pair[1].add_request("a", [1, 2], GREEDY, kv_transfer_params={"do_remote_decode": True})
