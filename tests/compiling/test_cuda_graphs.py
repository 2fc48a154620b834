"""CUDA graphs captured by hand, without a GPU: a stand-in records the operations of a capture and replays them."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling import function as function_module
from compiled_llm.compiling.cuda_graphs import CapturedFunction, GraphPool, begin_step_of_trees, graph_pool
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.engine.engine import EngineConfig
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.worker import build_ahead, compiled_steps, sampling_stage, started_model
from tests.drafted_runs import RecordedDrafter, check_equal, serve, work_of

CPU = torch.device("cpu")
REAL_GRAPH = inspect.signature(torch.cuda.graph)
PROMPTS = [[5], [9, 8, 7], list(range(3, 40)), list(range(70, 90)), [5, 6]]


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph: the operations of the capture, done again on the same tensors."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.operations: list[tuple[Any, tuple, dict, Any]] = []

    def replay(self) -> None:
        self.events.append("replay")
        for function, args, kwargs, output in self.operations:
            again = function(*args, **kwargs)
            for old, new in zip(tensors(output), tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # a view of the same memory has its content already
                    old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.graph.operations.append((function, args, kwargs or {}, output))
        return output


class FakeStream:
    def __init__(self, device: Any = None, events: list[str] | None = None) -> None:
        self.events = events

    def wait_stream(self, other: "FakeStream") -> None:
        assert self.events is not None
        self.events.append("wait")


def tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [tensor for item in output or () for tensor in tensors(item)]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda's graphs and streams, standing in; what is asked of them, in order."""
    events: list[str] = []

    @contextlib.contextmanager
    def graph(cuda_graph: RecordedGraph, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        REAL_GRAPH.bind(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode)
        assert pool == (0, 1)
        events.append("capture")
        with Recording(cuda_graph):
            yield
        events.append("captured")

    @contextlib.contextmanager
    def stream(stream: FakeStream) -> Iterator[None]:
        events.append("side stream")
        yield
        events.append("main stream")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(events))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(device, events))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("renew"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: events.append("clear"), raising=False)
    return events


def test_a_function_runs_aside_then_is_captured_then_only_replayed(events: list[str]) -> None:
    calls = []

    def function(weight: torch.Tensor, x: tuple[torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        events.append("run")
        return weight * x[0] + 1

    captured = CapturedFunction(GraphPool(CPU))
    weight, x = torch.tensor([2.0, 3.0]), (torch.tensor([1.0, 1.0]),)
    captured.capture(function, (weight, x))
    capture = ["wait", "side stream", "run", "main stream", "clear", "capture", "run", "captured", "clear"]
    assert events == capture

    x[0].copy_(torch.tensor([5.0, 7.0]))
    first = captured(weight, x)
    assert first.tolist() == [11.0, 22.0]
    x[0].zero_()
    assert captured(weight, x) is first
    assert first.tolist() == [1.0, 1.0]
    assert events == [*capture, "replay", "replay"]
    assert len(calls) == 2


@pytest.mark.parametrize("programmatic", [False, True])
def test_launches_are_programmatic_while_a_graph_is_made_and_not_after(events: list[str], programmatic: bool) -> None:
    seen = []

    def function(weight: torch.Tensor, x: tuple[torch.Tensor]) -> torch.Tensor:
        seen.append(launch_options(1))
        return weight * x[0]

    captured = CapturedFunction(GraphPool(CPU, programmatic))
    captured.capture(function, (torch.ones(1), (torch.ones(2),)))
    expected = {"PROGRAMMATIC": True, "launch_pdl": True} if programmatic else {"PROGRAMMATIC": False}
    assert seen == [expected] * 2  # first to compile, then to capture
    assert launch_options(1) == {"PROGRAMMATIC": False}


def test_a_graph_for_each_input_and_a_new_one_in_place_of_the_old(events: list[str]) -> None:
    captured = CapturedFunction(GraphPool(CPU))
    inputs = [(torch.zeros(2),), (torch.zeros(3),)]
    weight, other = torch.ones(1), torch.full((1,), 4.0)
    for x in inputs:
        captured.capture(lambda weight, x: x[0] + weight, (weight, x))
    assert [captured(weight, x).tolist() for x in inputs] == [[1.0] * 2, [1.0] * 3]

    with pytest.raises(AssertionError, match="tensors that it was captured with"):
        captured(other, inputs[0])
    captured.capture(lambda weight, x: x[0] + weight, (other, inputs[0]))
    assert captured(other, inputs[0]).tolist() == [4.0] * 2
    assert captured(weight, inputs[1]).tolist() == [1.0] * 3
    with pytest.raises(AssertionError, match="tensors that it was captured with"):
        captured(weight, inputs[0])


def test_nested_tuples_may_be_new_as_long_as_their_tensors_are_not(events: list[str]) -> None:
    captured = CapturedFunction(GraphPool(CPU))
    x, feedback = (torch.ones(2),), (torch.ones(2), torch.ones(2))
    captured.capture(lambda one, x, feedback: one + x[0] + feedback[1], (feedback[0], x, feedback))
    assert captured(feedback[0], x, (feedback[0], feedback[1])).tolist() == [3.0, 3.0]
    with pytest.raises(AssertionError, match="tensors that it was captured with"):
        captured(feedback[0], x, (feedback[0], torch.ones(2)))


def test_a_compiled_function_captures_at_warm_up_and_counts_recompiles(events: list[str]) -> None:
    seen = []

    def function(weight: torch.Tensor, x: tuple[torch.Tensor]) -> torch.Tensor:
        seen.append(1)
        return weight * x[0]

    compiled = CompiledFunction(function, "product", CPU, enforce_eager=True, graph_pool=GraphPool(CPU))
    weight, x = torch.ones(2), (torch.ones(2),)
    compiled.warm_up(lambda: (weight, x))
    assert len(seen) == 2
    x[0].fill_(6.0)
    assert compiled(weight, x).tolist() == [6.0, 6.0]
    larger = torch.full((2,), 2.0)
    compiled.record_again(lambda: (larger, x))
    assert compiled(larger, x).tolist() == [12.0, 12.0]
    assert len(seen) == 4, "a call replays and does not run the function"
    assert events.count("replay") == 2
    assert compiled.report().recompiles == 0


def test_manual_graphs_are_compiled_without_the_compilers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    function_module.compile_at_first_call(len, cuda_graphs=True)
    function_module.compile_at_first_call(len, cuda_graphs=False)
    assert [options["options"]["triton.cudagraphs"] for options in given] == [True, False]
    assert all(options["fullgraph"] and options["dynamic"] is False for options in given)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record graphs of functions that are not compiled, here or in other processes."""
    monkeypatch.setattr(function_module, "compile_at_first_call", lambda function, cuda_graphs: function)
    monkeypatch.setattr(started_model, "graph_pool", lambda _, device, *others: GraphPool(device))
    for module in (compiled_steps, build_ahead):
        monkeypatch.setattr(module, "keeps_compiled_code", lambda: False)


def test_an_engine_on_replayed_graphs_gives_the_same_tokens(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, in every bucket, on the pool that took the trial pool's place. The functions run no more."""
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (32,), "max_model_len": 64, "num_kv_blocks": 24}
    sampled = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=3)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    runs = [(PROMPTS, greedy), (PROMPTS, [sampled, greedy, sampled, greedy, sampled]), (PROMPTS[1:2], sampled)]

    def tokens(engine: CompiledEngine) -> list[list[int]]:
        outputs = [out for prompts, params in runs for out in engine.generate(prompts, params, use_tqdm=False)]
        return [out.outputs[0].token_ids for out in outputs]

    with CompiledEngine(enforce_eager=True, check_invariants=True, **sizes) as engine:
        expected = tokens(engine)

    record_graphs(monkeypatch)
    with CompiledEngine(check_invariants=True, **sizes) as engine:
        order = list(engine.runner.steps._functions)
        assert order == ["tokens_32", "decode_4"]
        # Two pools, and on each a graph for every bucket and the three behind it, and one for prompts.
        assert events.count("capture") == 2 * (4 * len(order) + 1)
        # What the graphs on the first pool held is free before those on the second one are recorded.
        assert events.count("renew") == 1
        assert events[: events.index("renew")].count("capture") == 4 * len(order) + 1
        events.clear()
        steps = engine.stats().num_steps
        assert tokens(engine) == expected
        steps = engine.stats().num_steps - steps
    assert set(events) == {"replay"}
    assert steps < len(events) < 2 * steps, "one replay a step, and one more where some request samples"


def test_logits_that_ranks_gather_are_where_graphs_were_recorded(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gathered between the graphs of the step and of what follows it, into new memory each time."""
    sizes = {"bucket_sizes": (1, 4), "token_bucket_sizes": (32,), "max_model_len": 64, "num_kv_blocks": 24}
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=3, logprobs=2)

    def served(engine: CompiledEngine) -> list[Any]:
        outputs = engine.generate(PROMPTS, params, use_tqdm=False)
        return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]

    with CompiledEngine(enforce_eager=True, **sizes) as engine:
        expected = served(engine)
    record_graphs(monkeypatch)
    head = types.SimpleNamespace(own_tokens=None, gathered=torch.clone, ranks=types.SimpleNamespace(size=2))
    head.out_features = 4096
    monkeypatch.setattr(compiled_steps, "shared_head", lambda weights: head)
    with CompiledEngine(**sizes) as engine:
        assert served(engine) == expected


def test_drafts_on_replayed_graphs(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"bucket_sizes": (1, 4), "token_bucket_sizes": (32,), "max_model_len": 64, "num_kv_blocks": 24}
    with CompiledEngine(enforce_eager=True, **sizes) as engine:
        work, vocab_size = work_of(engine)[:12], engine.model_config.vocab_size
        plain = serve(engine, work)
    drafter = RecordedDrafter(3, vocab_size)
    drafter.kind = "half right"
    drafter.record(plain)
    record_graphs(monkeypatch)
    with CompiledEngine(check_invariants=True, drafter=drafter, **sizes) as engine:
        names = [bucket.name for bucket in engine.runner.steps.buckets]
        assert names == ["decode_1", "decode_1x2", "decode_1x4", "decode_4", "decode_4x2", "decode_4x4", "tokens_32"]
        events.clear()
        check_equal(work, plain, serve(engine, work))
        assert engine.stats().num_accepted_draft_tokens > 0
    assert set(events) == {"replay"}


def test_trees_work_in_any_thread_of_a_torch_before_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cudagraph_trees as trees

    def get_obj(local: Any, name: str) -> Any:  # as it was
        if hasattr(local, name):
            return getattr(local, name)
        assert torch._C._is_key_in_tls(name)
        return torch._C._get_obj_in_tls(name)

    monkeypatch.setattr(trees, "get_obj", get_obj)

    def container_of_a_thread(prepares: bool) -> object:
        if prepares:
            for _ in range(2):
                begin_step_of_trees()
        return trees.get_container(0)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(AssertionError):
            pool.submit(container_of_a_thread, False).result()
        found = pool.submit(container_of_a_thread, True).result()
        assert found is pool.submit(container_of_a_thread, True).result(), "the thread's own stays"
    assert found is not container_of_a_thread(True)


def test_prompts_begin_a_step_of_their_own_with_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were recorded: else each of their graphs would be recorded again after each other graph."""
    begun: list[int] = []
    monkeypatch.setattr(sampling_stage, "begin_step_of_trees", lambda: begun.append(1))
    sizes = {"bucket_sizes": (1,), "token_bucket_sizes": (16,), "max_model_len": 64, "enforce_eager": True}
    with CompiledEngine(**sizes) as engine:
        stage = engine.runner.steps.sampling
        stage._uses_trees = True
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = engine.generate([list(range(5, 45))], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert len(begun) == 3, "a chunk of 16, 16 and 8 tokens"


def test_a_cpu_refuses_cuda_graphs() -> None:
    assert graph_pool("auto", CPU) is None
    for mode in ("manual", "programmatic", "pinned", "trees"):
        with pytest.raises(ValueError, match=f"cuda_graphs must be 'auto', the default, on a cpu, given '{mode}'"):
            CompiledEngine(device="cpu", cuda_graphs=mode)


def test_on_a_gpu_the_engine_records_its_graphs_itself(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert isinstance(graph_pool("auto", gpu), GraphPool)
    assert isinstance(graph_pool("manual", gpu), GraphPool)
    assert graph_pool("trees", gpu) is None
    assert graph_pool("auto", gpu, enforce_eager=True) is None


def test_programmatic_launches_need_a_gpu_that_has_them(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for capability in ((9, 0), (10, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        pools = [graph_pool(mode, gpu) for mode in ("auto", "manual", "pinned")]
        beside_fetches = graph_pool("auto", gpu, in_order=True)
        assert beside_fetches is not None
        assert not beside_fetches.programmatic
        assert [pool is not None and pool.programmatic for pool in pools] == [capability >= (9, 0), False, False]
        if capability >= (9, 0):
            pool = graph_pool("programmatic", gpu)
            assert pool is not None
            assert pool.programmatic
    with pytest.raises(ValueError, match=r"'programmatic' needs a GPU of compute capability 9\.0 .* given one of 8\.9"):
        graph_pool("programmatic", gpu)


def test_the_config_knows_what_is_allowed() -> None:
    modes = "'auto', 'manual', 'programmatic', 'pinned', 'trees'"
    with pytest.raises(ValueError, match=f"cuda_graphs must be one of {modes}, given 'none'"):
        EngineConfig(cuda_graphs="none")
    for mode in ("manual", "programmatic", "pinned", "trees"):
        with pytest.raises(ValueError, match=f"cuda_graphs must be 'auto', .* enforce_eager=True .* given '{mode}'"):
            EngineConfig(cuda_graphs=mode, enforce_eager=True)
