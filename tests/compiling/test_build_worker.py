"""Code for a GPU, made by a process that has none, for one that has: what it holds, and what is found of it."""

import dataclasses
import marshal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling import function as function_module
from compiled_llm.compiling import parallel
from compiled_llm.compiling.build_processes import BuildProcess, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.cuda_graphs import gpu_target
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.gpu_properties import GpuTarget
from compiled_llm.compiling.keys import gpu_fields
from compiled_llm.compiling.parallel import build_missing
from compiled_llm.compiling.ready_code import load_ready
from compiled_llm.gpu_step.fake_step import properties_of
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.ops import rms_norm
from compiled_llm.ops.torch_private import DynamicSize, mark_dynamic_size
from compiled_llm.ops.torch_private_gpu import FakeTensorMode
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker import compiled_steps, started_model
from tests.pretend_gpu import pretended_gpu

CPU = torch.device("cpu")
H200 = GpuTarget(properties_of(GPUS["h200"]), programmatic=False)
ROWS = DynamicSize("rows", 8)


def scaled_norm(x: Tensor, others: tuple[Tensor, Tensor]) -> Tensor:
    return rms_norm(x * others[1], others[0], 1e-6)


def make_scaled_norm() -> Callable:
    return scaled_norm


def arguments(rows: int, device: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x = torch.empty(rows, 256, dtype=torch.bfloat16, device=device)
    mark_dynamic_size(x, 0, ROWS)
    others = torch.empty(256, dtype=torch.bfloat16, device=device), torch.empty(1, dtype=torch.bfloat16, device=device)
    return x, others


def test_a_process_without_a_gpu_compiles_a_function_and_all_kernels_that_it_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    process = BuildProcess(H200)
    try:
        with FakeTensorMode():
            args = arguments(2, "cuda")
        sizes = ({"rows": 1}, {"rows": 300})
        job = Job("scaled_norm", make_scaled_norm, args, torch.get_num_threads(), 1.0, {}, sizes)
        built = process.build(job)
    finally:
        process.end()
    assert built.error == ""
    assert built.facts["graphs"] == 1
    assert built.facts["cost"][0] > 0
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)  # a build for CPUs
    sources: dict[str, str] = {}
    load_ready(built.payload, {}, lambda name, source: sources.setdefault(name, source))
    assert sources.keys() == marshal.loads(built.payload)[2]["piece"][2].keys()
    assert all("@triton_heuristics.pointwise" in source for source in sources.values())
    compiled = [file.stem for file in (tmp_path / "triton").rglob("*.cubin")]
    assert set(compiled) == {*sources, "norm_kernel"}
    assert all(compiled.count(name) == 1 for name in sources), "none is tried out in several configurations"


def test_what_to_compile_for_goes_to_another_process_as_a_word_and_is_part_of_keys() -> None:
    assert GpuTarget.of_text(H200.as_text()) == H200
    fields = gpu_fields(H200)
    other_memory = dataclasses.replace(H200.properties, total_memory=1 << 30)
    assert gpu_fields(GpuTarget(other_memory, False)) == fields, "no code depends on it"
    assert gpu_fields(GpuTarget(H200.properties, True)) != fields, "other kernels are compiled"
    a100 = GpuTarget(properties_of(GPUS["a100"]), False)
    assert gpu_fields(a100)["gpu"]["major"] == 8
    assert gpu_target(None) is None


# -- In the process that has the GPU: here what is captured is called instead


class CalledInstead:
    """Stands for CapturedFunction."""

    def __init__(self, pool: object) -> None:
        self.calls: dict[int, tuple[Callable, tuple]] = {}

    def capture(self, call: Callable, args: tuple) -> None:
        call(*args)
        self.calls[id(args[1])] = call, args

    def drop(self) -> None:
        self.calls.clear()

    def __call__(self, *args: Any) -> Any:
        call, _ = self.calls[id(args[1])]
        return call(*args)


@pytest.fixture
def at_first_call(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that this process compiles."""
    compiled: list[str] = []

    def compile_at_first_call(function: Callable, cuda_graphs: bool) -> Callable:
        assert not cuda_graphs
        compiled.append(function.__name__)
        return function

    monkeypatch.setattr(function_module, "compile_at_first_call", compile_at_first_call)
    monkeypatch.setattr(function_module, "CapturedFunction", CalledInstead)
    return compiled


def product(weight: Tensor, x: tuple[Tensor]) -> Tensor:
    return weight * x[0]


def test_a_function_whose_graph_is_captured_loads_what_the_cache_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first_call: list[str]
) -> None:
    args = torch.ones(2), (torch.full((2,), 3.0),)
    monkeypatch.setattr(function_module, "load_ready", lambda payload, known: {b"code": product}[payload])

    def started() -> CompiledFunction:
        pool: Any = object()
        cache = CompileCache(tmp_path, {"gpu": "this"})
        function = CompiledFunction(product, "product", CPU, enforce_eager=False, graph_pool=pool, cache=cache)
        function.warm_up(lambda: args)
        assert function(*args).tolist() == [3.0, 3.0]
        return function

    report = started().report()
    assert at_first_call == ["product"]
    assert (report.cache, report.reason) == ("miss", "nothing of that name is stored")

    cache = CompileCache(tmp_path, {"gpu": "this"})
    key = cache.key_of("product", product, args, {})
    cache.store(key, b"code", {"graphs": 1, "graph_breaks": 0, "cpp_seconds": 0.0})
    function = started()
    report = function.report()
    assert (report.cache, report.graphs, report.recompiles, report.reason) == ("hit", 1, 0, "")
    assert at_first_call == ["product"], "nothing more"
    again = torch.full((2,), 5.0), args[1]
    function.record_again(lambda: again)
    assert function(*again).tolist() == [15.0, 15.0]
    with pytest.raises(RuntimeError, match=r"would have to be compiled again: argument.* was of shape"):
        function.record_again(lambda: (torch.ones(3), args[1]))

    cache.store(key, b"damaged", {"graphs": 1, "graph_breaks": 0, "cpp_seconds": 0.0})
    report = started().report()
    assert report.cache == "miss"
    assert report.reason.startswith("the stored code does not load: KeyError")
    assert at_first_call == ["product"] * 2


def test_stored_code_that_does_not_run_is_compiled_anew_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first_call: list[str]
) -> None:
    def fails(*args: Any) -> None:
        raise ImportError("no kernel")

    monkeypatch.setattr(function_module, "load_ready", lambda payload, known: fails)
    args = torch.ones(2), (torch.full((2,), 3.0),)
    cache = CompileCache(tmp_path, {"gpu": "this"})
    cache.store(cache.key_of("product", product, args, {}), b"code", {"graphs": 1, "graph_breaks": 0})
    pool: Any = object()
    function = CompiledFunction(product, "product", CPU, enforce_eager=False, graph_pool=pool, cache=cache)
    with pytest.warns(UserWarning, match="product is compiled anew, .* does not run: ImportError: no kernel"):
        function.warm_up(lambda: args)
    assert function(*args).tolist() == [3.0, 3.0]
    assert at_first_call == ["product"]
    assert function.report().cache == "miss"


@pytest.mark.parametrize(("jobs", "cores", "expected"), [(1, 16, 1), (18, 16, 18), (40, 16, 16), (3, 2, 3), (9, 2, 2)])
def test_processes_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, cores: int, expected: int
) -> None:
    """One for a single job too, since this process could not keep it. A few more than cores all go together."""
    started: list[object] = []

    def build(cache: object, missing: list, costs: object, workers: int, *others: object) -> None:
        started.append(workers)
        for job, _, reason in missing:
            cache.built[job.name] = reason, 0.0  # type: ignore[attr-defined]

    monkeypatch.setattr(parallel, "_build", build)
    monkeypatch.setattr(parallel, "granted_cores", lambda: cores)
    made = [Job(f"f{n}", make_scaled_norm, (n,), 1, 1.0, {}) for n in range(jobs)]
    assert build_missing(CompileCache(tmp_path, {}), made, None, StartProgress(), needs_process=True) == {}
    assert started == [expected]


def test_a_start_finds_the_code_of_every_job_and_compiles_nothing_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_first_call: list[str]
) -> None:
    """The keys of jobs are those of the functions. On a pretended GPU, whose functions run as they are."""
    recipes: dict[str, Callable] = {}

    def build_all(cache: CompileCache, jobs: list[Job], *others: object, needs_process: bool) -> dict:
        assert needs_process
        for job in jobs:
            key = cache.key_of(job.name, job.recipe(), job.args, job.depends)
            recipes[job.name] = job.recipe
            cache.store(key, job.name.encode(), {"graphs": 1, "graph_breaks": 0, "cpp_seconds": 0.0})
        return {}

    class Pool:
        programmatic = pinned = False

        def __init__(self) -> None:
            self.device = torch.device("cuda", 0)

        def renew(self) -> None: ...

    sizes = {"bucket_sizes": (1, 4), "token_bucket_sizes": (8, 32), "max_model_len": 64, "num_kv_blocks": 8}
    prompts, params = [[5], [9, 8, 7]], SamplingParams(temperature=1, seed=2, max_tokens=4, logprobs=1)
    monkeypatch.setattr(compiled_steps, "engine_cache", lambda target: CompileCache(tmp_path, gpu_fields(H200)))
    monkeypatch.setattr(compiled_steps, "build_missing", build_all)
    monkeypatch.setattr(function_module, "load_ready", lambda payload, known: recipes[payload.decode()]())
    for module in (compiled_steps, started_model):
        monkeypatch.setattr(module, "gpu_target", lambda pool: None if pool is None else H200)
    monkeypatch.setattr(started_model, "start_builds", lambda *args: None)
    monkeypatch.setattr(started_model, "graph_pool", lambda *args: Pool())
    with CompiledEngine(device="cpu", dtype="float32", enforce_eager=True, **sizes) as engine:
        expected = [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]
    with pretended_gpu(monkeypatch), CompiledEngine(device="cuda", dtype="float32", **sizes) as engine:
        report = engine.compile_report()
        found = [out.outputs[0].token_ids for out in engine.generate(prompts, params, use_tqdm=False)]
    steps = {"decode_1", "decode_4", "tokens_8", "tokens_32"}
    assert recipes.keys() == steps | {"sample", "sample_changed", "logprobs", "prompt_logprobs"}
    assert {one.name: one.cache for one in report.reports} == dict.fromkeys(recipes, "hit")
    assert at_first_call == []
    assert found == expected
