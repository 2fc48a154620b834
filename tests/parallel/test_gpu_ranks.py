"""Ranks on GPUs: which GPU each gets, what is refused, and whole engines on stand-ins (``gpu_stand_in.py``).

That GPUs map each other's memory, keep the order of flags and record these sums in graphs, no test here shows.
"""

import argparse
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench import all_reduce
from compiled_llm.ops import RankGroup
from compiled_llm.ops.parallel.rank_group import bytes_for, gpu_counts, meetings, note_gpu
from compiled_llm.parallel import rank_processes
from compiled_llm.parallel.rank_processes import RankProcesses
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import WorkerFailedError
from compiled_llm.worker import rank_gpus, started_model
from compiled_llm.worker.memory import MemoryLedger, MemoryRow, StartMemory
from compiled_llm.worker.rank_gpus import (
    GpuOfRank,
    GpuProgress,
    check_ranks_on_gpus,
    gpus_of_ranks,
    seen_by_children,
)
from compiled_llm.worker.worker_process import Failure
from tests.parallel.gpu_stand_in import build, on_stand_ins
from tests.parallel.test_rank_processes import assert_alike

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True, "bucket_sizes": (2,), "token_bucket_sizes": (16,), "max_model_len": 32, "num_kv_blocks": 8,
    "dtype": "float32", "progress": "off",
}  # fmt: skip
PROMPTS = ["def f", "import os"]
PARAMS = [SamplingParams(temperature=0, max_tokens=6, logprobs=2), SamplingParams(seed=1, max_tokens=6, top_p=0.9)]
RANKS: dict[str, Any] = {**ARGUMENTS, "device": "cuda", "tensor_parallel_size": 2}
SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_ranks.py"
battery = pytest.mark.battery


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("stand-in"))


def served(engine: CompiledEngine) -> Any:
    return engine.generate(PROMPTS, PARAMS, use_tqdm=False)


def check_the_outputs_of_one_process(engine: CompiledEngine) -> None:
    with CompiledEngine(device="cpu", **ARGUMENTS) as plain:
        assert_alike(served(engine), served(plain))


def runner_of(engine: CompiledEngine) -> RankProcesses:
    assert isinstance(engine.runner, RankProcesses)
    return engine.runner


def serve_all(engine: CompiledEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def check_all_ended(before: set[int]) -> None:
    assert children() <= before


def children() -> set[int]:
    """Living processes of this one; multiprocessing's own, which looks after what others leave, is not an engine's."""
    alive = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie: nothing of it runs
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                alive.add(child.pid)
    return alive


# -- Which GPU


def test_each_rank_sees_its_own_gpu_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_of_ranks("auto", 3) == [
        GpuOfRank("0,1,2", (0, 1, 2), shared=False),
        GpuOfRank("1,0,2", (1, 0, 2), shared=False),
        GpuOfRank("2,0,1", (1, 2, 0), shared=False),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b, GPU-a,3,2")
    assert [gpu.visible for gpu in gpus_of_ranks("cuda", 2)] == ["GPU-b,GPU-a", "GPU-a,GPU-b"]
    assert gpus_of_ranks("cuda:2", 2) == [GpuOfRank("3", (0, 0), shared=True)] * 2
    with pytest.raises(
        ValueError, match=r"must be at most 4, the GPUs that torch sees \(CUDA_VISIBLE_DEVICES=GPU-b, G"
    ):
        gpus_of_ranks("cuda", 5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_parallel_exact": True}, "tensor_parallel_exact must be False on GPUs"),
        ({"cuda_graphs": "programmatic"}, "cuda_graphs must be 'auto' or 'manual' with tensor_parallel_size=2 on GPUs"),
        ({"kv_disk_path": "somewhere", "kv_host_bytes": 2**21}, "kv_disk_path must be None and role 'both'"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 on GPUs"),
        ({"device": "cuda:0"}, "num_kv_blocks or kv_cache_memory_bytes must be given with device='cuda:0'"),
    ],
    ids=str,
)
def test_what_ranks_on_gpus_do_not_go_with(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_ranks_on_gpus(EngineConfig(**{"tensor_parallel_size": 2, "device": "cuda", **arguments}))
    check_ranks_on_gpus(EngineConfig(tensor_parallel_size=2, device="cuda:0", num_kv_blocks=4))


def test_what_processes_see_that_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own process sees what it saw before."""
    name, command = (
        "CUDA_VISIBLE_DEVICES",
        [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"],
    )
    for before in (None, "5,7"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with seen_by_children(None):
            assert os.environ.get(name) == before
        with seen_by_children(GpuOfRank("1,0", (1, 0), shared=False)):
            assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1,0\n"
        assert os.environ.get(name) == before


# -- How far they have come


def test_progress_is_that_of_launches_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread reads the flags while nothing is launched; what the host's meetings are kept in stays as it is."""
    from compiled_llm.ops.parallel.triton_reductions import bytes_on_gpu

    monkeypatch.setattr(rank_gpus, "_LOOK_SECONDS", 0.01)
    host = torch.zeros(bytes_for(2, 128), dtype=torch.uint8)
    memory = torch.zeros(bytes_on_gpu(1024), dtype=torch.uint8)
    place = torch.tensor([1, 0, 0])
    progress = GpuProgress(RankGroup.of(1, 2, host), RankGroup(place, memory))
    launch = progress.noting(lambda output: output)  # type: ignore[arg-type, return-value]
    step = SchedulerOutput(request_ids=())
    assert launch(step) is step  # type: ignore[comparison-overlap]
    launch(step)
    assert gpu_counts(host, 2) == [0, 2]
    flags = memory.view(torch.int64)[: 64 * 128].view(64, 128)
    flags[0, 1], flags[5, 1], flags[5, 0], flags[0, 64] = 4, 3, 100, 100  # of the rank; of another, of pieces
    deadline = time.monotonic() + 20
    while gpu_counts(host, 2) != [0, 9] and time.monotonic() < deadline:
        time.sleep(0.01)
    progress.close()
    note_gpu(host, 0, 5, 6)
    assert gpu_counts(host, 2) == [11, 9]
    assert meetings(host, 2) == [0, 0]


@pytest.mark.parametrize(("on_gpus", "texts", "ends"), [(True, "ab", True), (True, "aa", False), (False, "ab", False)])
def test_after_errors_that_differ_gpus_may_wait_for_each_other(on_gpus: bool, texts: str, ends: bool) -> None:
    """On CPUs it is known how often ranks have met."""
    ranks = RankProcesses.__new__(RankProcesses)
    ranks._failure, ranks._failed, ranks._idle_seconds = "", None, {}
    ranks._memory, ranks.gpus = (
        torch.zeros(bytes_for(2, 128), dtype=torch.uint8),
        (GpuOfRank("0,1", (0, 1), shared=False),) * 2 * on_gpus,
    )
    failures = [Failure("OutOfMemoryError", text, "") for text in texts]
    ranks.ranks = [Mock(result=lambda step, failure=failure: failure) for failure in failures]
    with pytest.raises(WorkerFailedError if ends else RuntimeError, match="OutOfMemoryError: a") as raised:
        ranks.collect(0)
    assert isinstance(raised.value, WorkerFailedError) == ends == bool(ranks._failure)


def test_memory_of_gpus_adds_up() -> None:
    rows = [MemoryRow("weights", 3, "device", "exact"), MemoryRow("swap space", 5, "host", "exact")]
    rows += [MemoryRow("other programs and everything else", 1, "device", "measured")]
    one = MemoryLedger((*rows, MemoryRow("free afterwards", 6, "device", "measured")), "device", 0)
    both = MemoryLedger.of_ranks([one, one], 2)
    assert (both.total, both.bytes_of("weights"), both.bytes_of("free afterwards")) == (20, 6, 12)
    assert both.bytes_of("other programs and everything else") == 2


def test_a_pool_has_the_blocks_for_which_all_ranks_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once graphs are recorded on it: a rank that recorded again by itself would wait for the others."""
    of_another: list[int] = []

    def has_room_for_all(memory: StartMemory, asked: int) -> int:
        of_another.append(5)
        return asked

    def least_of_both(value: int, group: RankGroup) -> int:
        return min([value, *of_another])

    monkeypatch.setattr(StartMemory, "blocks_after_recording", has_room_for_all)
    monkeypatch.setattr(started_model, "least", least_of_both)
    with CompiledEngine(device="cpu", **ARGUMENTS) as engine:
        assert engine.runner.facts.num_blocks == 5
        assert len(engine.generate("def f", SamplingParams(max_tokens=2), use_tqdm=False)) == 1


# -- Whole engines


def test_two_ranks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each maps the memory of the other; tokens are those of one process; one that stands still is named."""
    on_stand_ins(monkeypatch, library, 2, STAND_IN_KERNELS="plain")
    before = children()
    with CompiledEngine(**RANKS) as engine:
        runner = runner_of(engine)
        check_the_outputs_of_one_process(engine)
        (launched, other) = runner._counts()
        assert launched == other >= 6
        monkeypatch.setattr(rank_processes, "HANG_SECONDS", 4.0)  # flags are looked at each second
        os.kill(runner.ranks[1].pid, signal.SIGSTOP)
        engine.add_request("0", "abc", SamplingParams(max_tokens=4))
        with pytest.raises(WorkerFailedError, match="rank 1 hangs: it has done nothing for"):
            serve_all(engine)
    check_all_ended(before)


@battery
@pytest.mark.parametrize(
    ("count", "arguments", "environment"),
    [
        pytest.param(2, {}, {}, id="the kernels, interpreted"),
        pytest.param(2, {"device": "cuda:1"}, {"STAND_IN_WITHOUT": "2"}, id="both on one GPU"),
        pytest.param(2, {}, {"STAND_IN_WITHOUT": "3", "STAND_IN_NCCL": "1"}, id="links without atomics"),
        pytest.param(2, {}, {"STAND_IN_WITHOUT": "2", "STAND_IN_NCCL": "1"}, id="no links"),
    ],
)
def test_ways(
    library: Path, monkeypatch: pytest.MonkeyPatch, count: int, arguments: dict[str, Any], environment: dict[str, str]
) -> None:
    on_stand_ins(monkeypatch, library, count, **environment)
    before = children()
    with CompiledEngine(**{**RANKS, **arguments}) as engine:
        check_the_outputs_of_one_process(engine)
    check_all_ended(before)


@battery
@pytest.mark.parametrize(
    ("environment", "text"),
    [
        pytest.param({"STAND_IN_WITHOUT": "2"}, "do not reach each other's memory with atomics", id="no way"),
        pytest.param({"STAND_IN_OTHER": "rank 1"}, "the same gpu: rank 0 has stand-in.*rank 1 has another", id="GPUs"),
        pytest.param(
            {"STAND_IN_FAILS": "cuIpcOpenMemHandle_v2", "STAND_IN_RANK": "rank 1"},
            r"cuIpcOpenMemHandle_v2: CUDA_ERROR_STAND_IN \(201\)",
            id="memory that cannot be mapped",
        ),
        pytest.param(
            {"STAND_IN_FAILS": "cuMemAlloc_v2", "STAND_IN_RANK": "rank 0"},
            r"cuMemAlloc_v2: CUDA_ERROR_STAND_IN \(2\)",
            id="no memory",
        ),
    ],
)
def test_starts_that_fail(
    library: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str
) -> None:
    """One rank's error is the engine's, and the others, which wait for it, end."""
    on_stand_ins(monkeypatch, library, 2, **environment)
    before = children()
    with pytest.raises((ValueError, RuntimeError), match=text):
        CompiledEngine(**RANKS)
    check_all_ended(before)


@battery
def test_a_rank_that_is_killed(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_stand_ins(monkeypatch, library, 3, STAND_IN_KERNELS="plain")
    before = children()
    with CompiledEngine(**RANKS) as engine:
        served(engine)
        os.kill(runner_of(engine).ranks[0].pid, signal.SIGKILL)
        engine.add_request("0", "abc", SamplingParams(max_tokens=4))
        with pytest.raises(WorkerFailedError, match="the process of rank 0 ended with exit code -9"):
            serve_all(engine)
    check_all_ended(before)


@battery
@pytest.mark.parametrize("rank", [0, 1])
def test_a_benchmark_of_sums_in_which_a_rank_fails(library: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The other one waits for it, and ends."""
    on_stand_ins(monkeypatch, library, 2, STAND_IN_FAILS="cuMemAlloc_v2", STAND_IN_RANK=f"rank {rank}")
    before = children()
    args = argparse.Namespace(ranks=2, device="cuda", kib=(4,), dtype="bfloat16", rounds=1)
    with pytest.raises(RuntimeError, match=f"rank {rank} ended with exit code 1: its error is above"):
        all_reduce.measure(args)
    check_all_ended(before)


def test_a_benchmark_of_sums_on_a_gpu_that_is_not_there() -> None:
    args = argparse.Namespace(ranks=2, device="cuda:5", kib=(4,), dtype="bfloat16", rounds=1)
    with pytest.raises(ValueError, match="device='cuda:5' is not there"):
        all_reduce.measure(args)


def test_fewer_gpus_than_ranks(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_stand_ins(monkeypatch, library, 1)
    before = children()
    with pytest.raises(ValueError, match="tensor_parallel_size must be at most 1, the GPUs that torch sees"):
        CompiledEngine(**RANKS)
    check_all_ended(before)


@battery
def test_what_a_lent_gpu_is_to_run(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part "ranks" of gpu_validate, as far as stand-ins go: no step is compiled, no graph recorded."""
    on_stand_ins(monkeypatch, library, 1, STAND_IN_KERNELS="plain")
    monkeypatch.setattr(started_model, "resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--eager", "--json", str(tmp_path / "ranks.json")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    result = json.loads((tmp_path / "ranks.json").read_text())
    assert (result["device"], result["same_tokens"]) == ("cuda:0", True)
    assert [row["KiB"] for row in result["sums"]] == [4, 64, 1024]
