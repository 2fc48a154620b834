"""The memory ledger, the size of the KV pool that follows from it, and pools of any size in one compiled graph."""

import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from compiled_llm import CompiledEngine, EngineConfig, MemoryLedger, MemoryRow, SamplingParams
from compiled_llm.api.config import EngineLimits, StepDefaults
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.models.weights import tensors
from compiled_llm.step.kv_cache import bytes_per_token
from compiled_llm.step.logprobs import bytes_of_row
from compiled_llm.worker import memory
from compiled_llm.worker.memory import StartMemory
from compiled_llm.worker.pool_sizes import PoolSizes
from compiled_llm.worker.sampling_stage import most_prompt_rows
from tests.families import COMPILED_SIZES

MIB = 2**20
BLOCK = 64 << 10
SMALL = {"bucket_sizes": (1,), "max_num_batched_tokens": 64, "device": "cpu"}
LIMITS = EngineLimits.resolve(EngineConfig(), 4096, StepDefaults(512, 512, (1,), (1,)))
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def start_memory(
    device: str = "cpu", num_seqs: int = 4, max_model_len: int = 1024, estimate: int = 0, **arguments
) -> StartMemory:
    """Of an engine with blocks of 16 tokens and 64 KiB, and 4 cache tensors."""
    config = EngineConfig(bucket_sizes=(num_seqs,), max_model_len=max_model_len, **arguments)
    limits = EngineLimits.resolve(config, 4096, StepDefaults(512, 512, (1,), (1, 1 / 4, 1 / 16)))
    return StartMemory(config, limits, torch.device(device), PoolSizes(BLOCK, (), 2**20, 2**20), 4, estimate)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets the host memory that is free."""
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda: size)


def named_length(error: pytest.ExceptionInfo[ValueError]) -> int:
    found = re.search(r"Lower max_model_len to (\d+) or less", str(error.value))
    assert found, str(error.value)
    return int(found[1])


def test_the_ledger_is_a_table_that_adds_up() -> None:
    rows = (
        MemoryRow("weights", 3 * MIB, "device", "exact"),
        MemoryRow("KV pool", 5 * MIB // 2, "device", "exact"),
        MemoryRow("swap space", 7 * MIB, "host", "exact"),
        MemoryRow("free afterwards", 120 * MIB, "device", "measured"),
    )
    ledger = MemoryLedger(rows, "device", 0)
    assert ledger.total == 125.5 * MIB
    assert ledger.bytes_of("swap space") == 7 * MIB
    assert str(ledger).split("\n") == [
        "memory              MiB  where   how",
        "weights             3.0  device  exact",
        "KV pool             2.5  device  exact",
        "swap space          7.0  host    exact",
        "free afterwards   120.0  device  measured",
        "total of the GPU  125.5  device",
    ]
    with_text = ledger.with_text_of_drafter(MIB)
    assert (with_text.total, with_text.bytes_of("free afterwards")) == (ledger.total, 120 * MIB), "not on the GPU"
    assert [row.name for row in with_text.rows] == [
        "weights",
        "KV pool",
        "drafter's text",
        "swap space",
        "free afterwards",
    ]
    on_a_host = MemoryLedger((MemoryRow("weights", 3 * MIB, "host", "exact"),), "host", 0)
    assert str(on_a_host).split("\n")[-1] == "total of the machine  3.0  host"


def test_the_ledger_has_what_a_drafter_keeps_of_tokens() -> None:
    with CompiledEngine(
        **SMALL, enforce_eager=True, speculative_config={"method": "suffix"}, num_kv_blocks=20
    ) as engine:
        ledger, block_size = engine.memory_report(), engine.runner.limits.block_size
        assert ledger.bytes_of("drafter's text") == 230 * (20 * block_size + 131_072)
        assert ledger.total == engine.runner.memory_ledger.total, "it is not free"


@pytest.mark.parametrize("size", [{"num_kv_blocks": 20}, {"kv_cache_memory_bytes": 2 * MIB}, {}])
def test_the_ledger_of_an_engine_is_exact(size: dict[str, int]) -> None:
    with CompiledEngine(**SMALL, enforce_eager=True, swap_space_bytes=MIB, **size) as engine:
        ledger, runner = engine.memory_report(), engine.runner
        assert ledger.bytes_of("weights") == sum(t.numel() * t.itemsize for t in tensors(runner.steps.weights))
        per_block = bytes_per_token(engine.model_config, runner.cache_dtypes) * runner.limits.block_size
        assert ledger.bytes_of("KV pool") == (runner.facts.num_blocks + 1) * per_block
        assert ledger.bytes_of("KV pool") == sum(t.numel() * t.itemsize for t in tensors(runner.steps.kv_cache))
        assert ledger.bytes_of("swap space") == runner.facts.num_swap_blocks * per_block > 0
        inputs = tensors(tuple((*b.step_input, *b.sampling_input) for b in runner.steps.buffers.values()))
        assert ledger.bytes_of("step buffers") >= sum(t.nbytes for t in inputs)
        assert ledger.total == memory.total_bytes(runner.device) <= psutil.virtual_memory().total
        assert all(row.bytes >= 0 for row in ledger.rows)
        assert {row.where for row in ledger.rows} == {"host"}
        assert ledger.start_peak_bytes > ledger.bytes_of("weights")


def test_too_little_memory_fails_before_compiling_and_what_the_message_names_fits(
    free, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(16 * MIB)
    monkeypatch.setattr(memory, "growth_while", lambda run: 0)  # what steps take is not known before compiling
    share = 0.15  # of half: 1.2 MiB for a pool of blocks of 32 KiB
    with monkeypatch.context() as compiling:
        compiling.setattr(CompiledFunction, "warm_up", lambda *_: pytest.fail("compiled first"))
        with pytest.raises(ValueError, match="1 MiB are free for the KV pool") as error:
            CompiledEngine(**SMALL, gpu_memory_utilization=share)
    length = named_length(error)
    assert 16 <= length < 1024
    with CompiledEngine(**SMALL, gpu_memory_utilization=share, max_model_len=length, enforce_eager=True) as engine:
        (output,) = engine.generate([[5] * (length - 4)], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        assert engine.memory_report().bytes_of("KV pool") <= 8 * MIB * share


def test_memory_that_compiling_and_running_take_counts_too(free, monkeypatch: pytest.MonkeyPatch) -> None:
    free(40 * MIB)
    arguments = {**SMALL, "gpu_memory_utilization": 0.2, "enforce_eager": True}
    with CompiledEngine(**arguments) as engine:
        counts = engine.own_runner.steps.sampling.unwritten_bytes
        beside = engine.own_runner.steps.bytes_behind_largest
        # Tokens of prompts have the most logits here, since one request runs.
        results = engine.own_runner.limits.token_bucket_sizes[-1] * 21 * 12
        assert beside == 64 * bytes_of_row(engine.model_config.vocab_size, 20) + results
    assert counts > 0
    free(40 * MIB + counts + beside)  # no pool gets what counts of tokens will take once a request has penalties
    monkeypatch.setattr(memory, "growth_while", lambda run: 30 * MIB)
    with pytest.raises(ValueError, match="1 MiB are free for the KV pool") as error:
        CompiledEngine(**arguments)
    assert named_length(error) == (MIB // (32 << 10) - 1) * 16
    with CompiledEngine(**arguments, max_model_len=named_length(error)) as engine:
        ledger = engine.memory_report()
        assert (ledger.bytes_of("activations"), engine.runner.facts.num_blocks) == (30 * MIB + beside, 31)
        assert ledger.bytes_of("free afterwards") == 40 * MIB - 30 * MIB - MIB


def test_activations_are_estimated_where_the_system_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    with CompiledEngine(**SMALL, enforce_eager=True) as engine:
        row = next(row for row in engine.memory_report().rows if row.name == "activations")
        runner = engine.runner
        expected = memory.estimated_activations(engine.model_config, runner.limits, runner.dtype, runner.linears)
        assert (row.how, row.bytes) == ("estimated", expected)


def test_activations_are_estimated_with_a_margin_where_steps_begin_uncompiled() -> None:
    with CompiledEngine(**SMALL, wait_for_compile=False) as engine:
        row = next(row for row in engine.memory_report().rows if row.name == "activations")
        runner = engine.own_runner
        expected = memory.estimated_activations(engine.model_config, runner.limits, runner.dtype, runner.linears)
        assert (row.how, row.bytes) == ("estimated", int(1.5 * expected))


def test_activations_are_measured_as_growth_of_the_peak() -> None:
    # More than what malloc ever takes from pages that the process holds already.
    measured = memory.growth_while(lambda: torch.zeros(96 * MIB, dtype=torch.uint8).add_(1))
    if measured is None:
        pytest.skip("this system cannot tell")
    assert 95 * MIB <= measured <= 112 * MIB


_SCORES = """
import json
import sys
import torch
from compiled_llm.step.logprobs import logprob_rows
from compiled_llm.system.resources import release_freed_memory
from compiled_llm.worker import memory

for rows, vocab_size, count in json.loads(sys.argv[1]):
    ids = torch.zeros(rows, dtype=torch.int64)
    logprob_rows(torch.zeros(2, vocab_size), ids[:2], count)
    release_freed_memory()
    # Not compiled.
    print(memory.growth_while(lambda: logprob_rows(torch.ones(rows, vocab_size, dtype=torch.bfloat16), ids, count)))
"""


def test_log_probabilities_take_no_more_than_is_counted() -> None:
    """In a process of its own: one that has run much else holds memory that nothing has to grow for."""
    cases = []
    for vocab_size, count in [(262_144, 20), (262_144, 1000), (4096, 1000)]:
        rows = most_prompt_rows(LIMITS, vocab_size)
        assert rows * vocab_size <= 1 << 22, "16 MiB in float32"
        cases.append((rows * (1 if vocab_size > 4096 else 16), vocab_size, count))  # enough to be measured
    done = subprocess.run(
        [sys.executable, "-c", _SCORES, json.dumps(cases)], capture_output=True, text=True, check=True
    )
    for (rows, vocab_size, count), measured in zip(cases, done.stdout.split(), strict=True):
        if measured == "None":
            pytest.skip("this system cannot tell")
        counted = rows * bytes_of_row(vocab_size, count)
        assert counted / 2 < int(measured) < counted + 12 * MIB, (vocab_size, count)


@pytest.mark.parametrize("arguments", [{"num_kv_blocks": 200}, {"kv_cache_memory_bytes": 200 * BLOCK}])
def test_sizes_asked_for_are_checked_against_the_memory_free(free, arguments: dict[str, int]) -> None:
    free(201 * BLOCK)
    (name,) = arguments
    start = start_memory(**arguments)
    start.check()
    assert start.num_blocks() == 200
    free(200 * BLOCK)
    with pytest.raises(ValueError, match=rf"{name} must be .* \(the memory free\), given {arguments[name]}$"):
        start_memory(**arguments).check()
    # Swap space on a CPU comes out of the same memory.
    free(201 * BLOCK)
    with pytest.raises(ValueError, match=f"{name} must be"):
        start_memory(**arguments, swap_space_bytes=BLOCK).check()
    # Where one request of max_model_len does not fit either, the message says which would.
    free(11 * BLOCK)
    with pytest.raises(ValueError, match=f"{name} must be") as error:
        start_memory(**arguments, estimate=3 * BLOCK).check()
    assert named_length(error) == 7 * 16, "11 blocks without the sink and the three that a step may take"


def test_nothing_fits(free) -> None:
    free(BLOCK)
    with pytest.raises(ValueError, match=r"0 MiB are free .* needs 4\. Free some memory$"):
        start_memory().check()
    with pytest.raises(ValueError, match=rf"swap_space_bytes must be 0 or from {BLOCK} .* given {2 * BLOCK}"):
        start_memory(swap_space_bytes=2 * BLOCK).check()


def test_what_a_pool_gets_on_a_cpu(free) -> None:
    share = 0.8
    free(int(101 * BLOCK / (0.5 * share)) + 1)
    start = start_memory(gpu_memory_utilization=share)
    start.check()
    assert start.num_blocks() == 100
    free(2**40)
    start.check()
    assert start.num_blocks() == 4 * 1024 // 16, "no more than four requests can use"


class FakeGpu:
    """A device of 1000 MiB, 100 of them in others' use, and torch's allocator on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.reserved = 100, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: ((1000 - self.used) * MIB, 1000 * MIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved * MIB)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        self.cached = 0

    def take_for_a_while(self, reserved: int) -> None:
        """What torch's allocator keeps until its cache is emptied."""
        self.take(reserved)
        self.cached += reserved

    def empty_cache(self) -> None:
        self.take(-self.cached)
        self.cached = 0

    def take(self, reserved: int, outside: int = 0) -> None:
        self.reserved += reserved
        self.used += reserved + outside


@pytest.mark.parametrize("keeps_graphs", [False, True])
def test_the_way_through_a_start_on_a_gpu(monkeypatch: pytest.MonkeyPatch, keeps_graphs: bool) -> None:
    gpu = FakeGpu(monkeypatch)
    start = start_memory("cuda", num_seqs=64, max_model_len=4096, gpu_memory_utilization=0.875, swap_space_bytes=BLOCK)
    gpu.take(300)  # weights
    start.check()
    gpu.take(2)  # buffers
    start.before_compiling()
    gpu.take(20, outside=30)  # activations, graphs
    gpu.take_for_a_while(12)  # by the functions as they are
    start.after_compiling(lambda: pytest.fail("nothing runs for this on a GPU"), keeps_graphs=keeps_graphs)
    blocks = start.num_blocks()
    # 1000 - 452 used - 125 kept by the share - 12 for a while - 8 for rounding, and the sink; graphs that stay - 50.
    assert blocks == (403 - 50 * keeps_graphs) * MIB // BLOCK - 1
    pool = (blocks + 1) * BLOCK
    gpu.take(pool // MIB + 8)
    if keeps_graphs:
        gpu.take(5, outside=25)  # recorded again
    gpu.take_for_a_while(12)
    assert start.blocks_after_recording(blocks) == blocks
    ledger = start.ledger(300 * MIB, 2 * MIB, pool, BLOCK)
    assert [(row.name, row.bytes // MIB, row.where) for row in ledger.rows] == [
        ("weights", 300, "device"),
        ("step buffers", 2, "device"),
        ("compiled code and CUDA graphs", 30 + 25 * keeps_graphs, "device"),
        ("activations", 20 + 8 + 5 * keeps_graphs, "device"),
        ("KV pool", 403 - 50 * keeps_graphs, "device"),
        ("swap space", 0, "host"),
        ("other programs and everything else", 100, "device"),
        ("free afterwards", 137 + 20 * keeps_graphs, "device"),
    ]
    assert ledger.total == 1000 * MIB


def test_a_pool_shrinks_if_recording_on_it_took_more_than_on_the_trial_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    start = start_memory("cuda", num_seqs=64, max_model_len=4096, gpu_memory_utilization=0.875)
    asked_for = start_memory("cuda", num_kv_blocks=100)
    for memory_of in (start, asked_for):
        memory_of.before_compiling()
        memory_of.after_compiling(lambda: None, keeps_graphs=False)
    blocks = start.num_blocks()
    gpu.take((blocks + 1) * BLOCK // MIB + 8)
    gpu.take(30)  # nobody knew
    assert start.blocks_after_recording(blocks) == blocks - 30 * MIB // BLOCK
    assert asked_for.blocks_after_recording(100) == 100, "a size that was asked for stays"
    gpu.take(990 - gpu.used)
    with pytest.raises(ValueError, match="are free for the KV pool"):
        start.blocks_after_recording(8 * MIB // BLOCK)


def test_what_grows_by_nothing_does_not_shrink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peaks = iter([200 << 10, 150 << 10])  # the system's count is rough
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_peak_resident_bytes", lambda: next(peaks))
    assert memory.growth_while(lambda: None) == 0


def test_too_little_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    start = start_memory("cuda", max_model_len=4096, estimate=2 * MIB)
    gpu.take(780)
    with pytest.raises(ValueError, match=r"20 MiB are free .* max_model_len=4096 tokens needs 16") as error:
        start.check()
    assert named_length(error) == (10 * MIB // BLOCK - 1) * 16, "20 without 8 for rounding and 2 for a step"


@pytest.mark.battery
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_one_compiled_graph_serves_pools_of_any_size(kv_cache_dtype: str) -> None:
    """A quantised cache has all four kinds of tensors."""

    def start(num_kv_blocks: int) -> CompiledEngine:
        return CompiledEngine(kv_cache_dtype=kv_cache_dtype, num_kv_blocks=num_kv_blocks, **COMPILED_SIZES)

    prompts = [[5, 6, 7], [9] * 12]
    with start(40) as engine:
        expected = [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY, use_tqdm=False)]
        for num_blocks in (2000, 40, 30, 9):
            engine.runner.steps.kv_cache = engine.runner._allocate(num_blocks, 0)
            outputs = engine.generate([[4], *prompts], GREEDY, use_tqdm=False)[1:]
            assert [output.outputs[0].token_ids for output in outputs] == expected
        report = engine.compile_report()
        assert [(r.graphs, r.graph_breaks, r.recompiles) for r in report.reports] == [(1, 0, 0)] * 5
    with start(77) as engine:
        assert {report.cache for report in engine.compile_report().reports} == {"hit"}
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
