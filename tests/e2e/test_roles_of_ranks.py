"""Prefill and decode apart, of engines with other numbers of ranks: with exact sums the same bits, whoever computed."""

import copy
import dataclasses
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.parallel import rank_processes
from compiled_llm.parallel.rank_processes import RankProcesses
from compiled_llm.scheduling.scheduler_output import FileOutput, SchedulerOutput
from compiled_llm.scheduling.worker import WorkerFailedError
from tests.e2e.test_draft_model import SWAP, facts, random_work, serve
from tests.e2e.test_roles import GREEDY, KEY, SMALL, alone, check_apart, computed, finished, prompts_of, serve_apart
from tests.families import EVERY_CONFIG
from tests.forked_workers import forked_workers  # noqa: F401 - a fixture
from tests.models.ranks import SHARED

EXACT: dict[str, Any] = {**SMALL, **SWAP, "num_kv_blocks": 40, "num_threads": 1, "tensor_parallel_exact": True}
SIZES = {"kv_host_bytes": 2**20, "kv_transfer_bytes": 2**23}
Engines = tuple[CompiledEngine, CompiledEngine]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", KEY)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Of two ranks, and of one process. Each gives and takes."""
    place = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILED_LLM_KV_KEY", KEY)
        more = {**EXACT, **SIZES, "kv_cache_dtype": "int8"}
        with (
            CompiledEngine(kv_transfer_address=f"unix:{place}/ranks", tensor_parallel_size=2, **more) as ranks,
            CompiledEngine(kv_transfer_address=f"unix:{place}/one", **more) as one,
        ):
            yield ranks, one


@pytest.mark.parametrize("way", ["2 to 1", "1 to 2"])
def test_outputs_are_those_of_one_engine(way: str, engines: Engines) -> None:
    """Of scaled keys, with prompts in chunks, preemption, hits in the prefix caches of both sides."""
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None))
        for prompt, params in random_work(random.Random(way), 8)
    ]
    with CompiledEngine(**EXACT, kv_cache_dtype="int8") as engine:
        expected = serve(engine, work)
    prefill, decode = engines if way == "2 to 1" else reversed(engines)
    before = decode.stats()
    outputs = serve_apart(prefill, decode, work)
    for number, output in outputs.items():
        assert facts(output) == facts(expected[number]), f"request {number}: {work[int(number)]}"
    stats = decode.stats()
    assert stats.peer_hit_tokens > before.peer_hit_tokens
    assert stats.num_takes_failed == before.num_takes_failed == 0


def test_blocks_are_taken_while_ranks_compute_the_prompt(engines: Engines) -> None:
    """And an output goes on elsewhere: the parameters of a hand-over say how many ranks gave."""
    ranks, one = engines
    (prompt,), named = prompts_of(1, seed=4, length=50), {"remote_request_id": "ab" * 32}
    expected = alone(one, [prompt])
    for engine in engines:
        engine.reset_prefix_cache()
    address = ranks._transfers.exchange.giver.address  # type: ignore[union-attr]
    params = {"do_remote_prefill": True, "remote_host": address, **named}
    before = one.stats().peer_hit_tokens
    one.add_request("a", prompt, GREEDY, kv_transfer_params=params)
    prompt_only = dataclasses.replace(GREEDY, max_tokens=1, logprobs=None)
    ranks.add_request("a", prompt, prompt_only, kv_transfer_params={"do_remote_decode": True, **named})
    outputs = list[Any]()
    while ranks.has_unfinished_requests():
        outputs += ranks.step()
        one.step()
    assert outputs[-1].kv_transfer_params["tp_size"] == 2
    assert [facts(finished(one)["a"])[2:]] == expected
    assert one.stats().peer_hit_tokens - before == 48
    one.reset_prefix_cache()
    ranks.add_request("b", prompt, GREEDY)
    while not any(len(output.outputs[0].token_ids) == 4 for output in ranks.step()):
        pass
    tokens, given = ranks.hand_over(5.0)["b"]
    one.add_request("b", prompt, GREEDY, kv_transfer_params=given, output_token_ids=tokens)
    assert finished(one)["b"].outputs[0].token_ids == expected[0][0][0].token_ids
    assert one.stats().peer_hit_tokens - before == 48 + 52
    with pytest.raises(ValueError, match="tp_size of kv_transfer_params must be an integer from 1 to 64, given 0"):
        one.add_request("c", prompt, GREEDY, kv_transfer_params={**params, "tp_size": 0})


def test_rows_are_given_anew_only_when_no_rank_uses_them(engines: Engines) -> None:
    """What was launched has ended in all ranks before files and other engines have the rows that it may copy to."""
    runner = engines[0].runner
    assert isinstance(runner, RankProcesses)
    given_up = runner.launch(SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,)))
    step = runner.launch(SchedulerOutput(files=FileOutput(resets=True)))
    assert [process.num_received for process in runner.ranks] == [given_up + 1] * 2
    assert runner._failed is None, "it failed in all ranks, but the next step has as much time as any"
    assert runner.collect(step).files is not None
    (out,) = engines[0].generate("Once upon a time", SamplingParams(max_tokens=4), use_tqdm=False)
    assert out.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tensor_parallel_exact": False}, "tensor_parallel_exact False here and True there"),
        ({"num_threads": 2}, "num_threads 2 here and 1 there"),
    ],
)
def test_engines_whose_bits_differ_are_refused_with_both_values(
    arguments: dict[str, Any], said: str, engines: Engines
) -> None:
    giver = engines[0]._transfers.exchange.giver  # type: ignore[union-attr]
    params = {"do_remote_prefill": True, "remote_host": giver.address, "remote_request_id": "ab" * 32}
    more = {**EXACT, "kv_host_bytes": 2**20, "kv_cache_dtype": "int8", **arguments}
    with CompiledEngine(role="decode", **more) as other, pytest.raises(ValueError, match=said):
        other.add_request("a", [1, 2], GREEDY, kv_transfer_params=params)


def test_blocks_of_a_killed_rank_are_taken_or_computed(engines: Engines) -> None:
    """The last test of these engines: what was laid ready is whole, and the rest is computed."""
    ranks, one = engines
    (prompt,) = prompts_of(1, seed=5)
    expected = alone(one, [prompt])
    params = computed(ranks, "a", prompt)
    os.kill(ranks.runner.ranks[1].pid, signal.SIGKILL)  # type: ignore[union-attr]
    with pytest.raises(WorkerFailedError, match="the process of rank 1 ended with exit code -9"):
        ranks.generate("Once upon a time", use_tqdm=False)
    for taken in (40, 0):
        one.reset_prefix_cache()
        before = one.stats().peer_hit_tokens
        one.add_request("a", prompt, GREEDY, kv_transfer_params=params)
        assert [facts(finished(one)["a"])[2:]] == expected
        assert one.stats().peer_hit_tokens - before == taken
        ranks.close()


@pytest.mark.battery
def test_a_start_that_fails_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise ValueError("no adapters")

    monkeypatch.setattr(rank_processes, "readable", refused)
    gives: dict[str, Any] = {"role": "prefill", "kv_transfer_address": f"unix:{tmp_path}/blocks", **SIZES}
    with pytest.raises(ValueError, match="no adapters"):
        CompiledEngine(tensor_parallel_size=2, enable_lora=True, **gives, **EXACT)
    assert not list(tmp_path.iterdir())


# Families whose heads four ranks can share.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "windows": ("gemma3", {}),
    "latents": ("deepseek-v3", {}),
    "int8": ("qwen3", {"kv_cache_dtype": "int8"}),
    "fp8": ("qwen3", {"kv_cache_dtype": "fp8"}),
    "bfloat16": ("llama-biases", {"dtype": "bfloat16"}),
    "delta net": ("qwen3-next", {}),
    "mamba": ("nemotron-h", {"dtype": "bfloat16"}),
    "ngram": ("qwen3", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
}


@pytest.mark.battery
@pytest.mark.parametrize(
    ("name", "sizes", "transport"),
    [
        *((name, sizes, "unix") for name in FAMILIES for sizes in ((2, 1), (1, 2))),
        *(("full", sizes, "unix") for sizes in ((2, 2), (4, 1), (1, 4), (4, 2))),
        *(("windows", (2, 1), transport) for transport in ("tcp", "nixl")),
        *(("delta net", sizes, "unix") for sizes in ((4, 1), (2, 4))),
    ],
    ids=str,
)
def test_outputs_of_all_families(name: str, sizes: tuple[int, int], transport: str, tmp_path: Path) -> None:
    """Here 4 ranks are more than heads of keys, so that some have the same."""
    if transport == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    model, arguments = FAMILIES[name]
    directory, own = write_shared(model, tmp_path / "model"), EXACT | arguments
    work = [
        (prompt, dataclasses.replace(params, num_speculative_tokens=None))
        for prompt, params in random_work(random.Random(f"{name} {sizes}"), 60)
    ]
    with CompiledEngine(directory, **own) as engine:
        expected = serve(engine, work)
    address = {"unix": f"unix:{tmp_path}/blocks", "tcp": "127.0.0.1:0", "nixl": "nixl:127.0.0.1:0"}[transport]
    own |= {"kv_host_bytes": 2**21}
    gives = {"role": "prefill", "kv_transfer_address": address, "kv_transfer_bytes": 2**25}
    with (
        CompiledEngine(directory, tensor_parallel_size=sizes[0], **gives, **own) as prefill,
        CompiledEngine(directory, tensor_parallel_size=sizes[1], role="decode", **own) as decode,
    ):
        check_apart(prefill, decode, work, expected)


def write_shared(name: str, directory: Path) -> str:
    """A family's checkpoint of the sizes of ``tests/models/ranks.py``."""
    class_name, fields = EVERY_CONFIG[name]
    torch.manual_seed(0)
    family = getattr(transformers, class_name)
    family(family.config_class(**copy.deepcopy({**fields, **SHARED[name]}))).save_pretrained(directory)
    return str(directory)
