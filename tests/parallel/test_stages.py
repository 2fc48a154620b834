"""Stages as real processes, two of them: the bits of one process, what they say of themselves, and faults."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.parallel import rank_processes
from compiled_llm.parallel.stages import StageProcesses
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.system.resources import granted_cores
from compiled_llm.worker.worker_process import WorkerProcess
from tests.families import checkpoint
from tests.forked_workers import forked_workers  # noqa: F401 - a fixture
from tests.parallel.test_rank_processes import ARGUMENTS, PARAMS, PROMPTS, SMALL, brief, outcomes

SIZES: dict[str, Any] = {**ARGUMENTS, "async_scheduling": None, "progress": "off"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
LONG = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)


@pytest.fixture(scope="module")
def stages() -> Iterator[CompiledEngine]:
    """Two that take turns with the same cores."""
    with CompiledEngine(pipeline_parallel_size=2, speculative_config=NGRAM, **SIZES) as engine:
        yield engine


@pytest.fixture(scope="module")
def stages_apart() -> Iterator[CompiledEngine]:
    """Two as on a machine with two NUMA nodes, each with the cores of one."""
    with pytest.MonkeyPatch.context() as patch:
        cores = sorted(os.sched_getaffinity(0))
        patch.setattr("compiled_llm.parallel.stages.cores_of_stages", lambda *sizes: ([cores[:1], cores[-1:]], 2))
        with CompiledEngine(pipeline_parallel_size=2, speculative_config=NGRAM, **SIZES) as engine:
            yield engine


@pytest.fixture(scope="module")
def of_one_process() -> list[Any]:
    with CompiledEngine(speculative_config=NGRAM, **SIZES) as engine:
        return served(engine)


def runner_of(engine: CompiledEngine) -> StageProcesses:
    assert isinstance(engine.runner, StageProcesses)
    return engine.runner


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (one.prompt_logprobs, [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in one.outputs])
        for one in outputs
    ]


def served(engine: CompiledEngine) -> list[Any]:
    return bits(engine.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False))


def test_the_same_bits_as_of_one_process(stages: CompiledEngine, of_one_process: list[Any]) -> None:
    """With prompts in chunks, preemption by swap, prefix hits, sampling, penalties, a grammar, drafts."""
    assert served(stages) == of_one_process
    stats = stages.stats()
    assert stats.num_swap_preemptions > 0
    assert stats.num_swapped_in_tokens > 0
    assert stats.num_accepted_draft_tokens > 0
    stages.generate(PROMPTS[1], PARAMS[1], use_tqdm=False)
    before = stages.stats().prefix_hit_tokens
    found = stages.generate(PROMPTS[1], PARAMS[1], use_tqdm=False)
    assert stages.stats().prefix_hit_tokens > before
    assert bits(found) == of_one_process[1:2]


def test_layers_are_measured_on_the_threads_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cores that a container may not keep busy all the time, as many as its quota has."""
    asked = list[int]()

    def noting(*args: Any) -> Any:
        asked.append(args[-1])
        raise RuntimeError("far enough")

    monkeypatch.setattr("compiled_llm.parallel.stages.layer_costs", noting)
    monkeypatch.setattr("compiled_llm.parallel.stages.granted_cores", lambda: 3)
    monkeypatch.setattr("compiled_llm.parallel.stages.cores_of_stages", lambda *sizes: ([[*range(8)]] * 2, 1))
    for threads, given in ((8, None), (2, None), (8, 1)):
        monkeypatch.setattr("compiled_llm.parallel.stages.torch.get_num_threads", lambda threads=threads: threads)
        with pytest.raises(RuntimeError, match="far enough"):
            CompiledEngine(pipeline_parallel_size=2, num_threads=given, **SIZES)
    assert asked == [3, 2, 1]


def steps_of_four_requests(engine: CompiledEngine) -> list[tuple[list[Any], list[Any]]]:
    """After each step: the requests of those that are under way then, and of the one that was launched last."""
    seen, launch, last = list[tuple[list[Any], list[Any]]](), engine.runner.launch, list[Any]()

    def noting(output: SchedulerOutput) -> Any:
        last[:] = output.request_ids
        return launch(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "launch", noting)
        for number in range(4):
            engine.add_request(str(number), PROMPTS[number], SamplingParams(temperature=0, max_tokens=12))
        while engine.has_unfinished_requests():
            engine.step()
            seen.append(([list(output.request_ids) for output, _ in engine._core.launched], list(last)))
    return seen


def test_stages_on_the_same_cores_have_a_step_of_all_requests(stages: CompiledEngine) -> None:
    seen = steps_of_four_requests(stages)
    assert runner_of(stages).steps_at_once == stages.scheduler.limits.steps_at_once == 1
    threads = min(torch.get_num_threads(), granted_cores())
    assert [process.num_threads for process in runner_of(stages).ranks] == [threads, threads]
    assert stages.runner.num_threads == threads, "no more compute at once"
    assert not any(under_way for under_way, _ in seen)
    assert max(len(last) for _, last in seen) == 4


def test_the_seconds_of_a_step_are_not_those_beside_the_next_stage(
    stages: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that take turns compute one after the other, so all seconds of a step are within those of the clock."""
    found, collect = list[float](), stages.runner.collect

    def noting(step: Any) -> Any:
        result = collect(step)
        found.append(result.seconds)
        return result

    monkeypatch.setattr(stages.runner, "collect", noting)
    began = time.perf_counter()
    stages.generate(PROMPTS[:4], LONG, use_tqdm=False)
    assert min(found) > 0
    assert sum(found) < time.perf_counter() - began


def test_stages_on_cores_of_their_own_have_steps_of_different_requests(
    stages_apart: CompiledEngine, of_one_process: list[Any]
) -> None:
    assert served(stages_apart) == of_one_process
    seen = [under_way for under_way, _ in steps_of_four_requests(stages_apart)]
    # After a step was collected, one of other requests is under way.
    assert max(map(len, seen)) == 1
    decodes = [steps[0] for steps in seen if steps and len(steps[0]) == 2]
    assert len(decodes) > 8
    assert any(set(one).isdisjoint(other) for one, other in itertools.pairwise(decodes))
    runner = runner_of(stages_apart)
    assert runner.num_threads == sum(process.num_threads for process in runner.ranks)


def test_reports_are_of_all_stages(stages: CompiledEngine) -> None:
    runner = runner_of(stages)
    names = [report.name for report in stages.compile_report().reports]
    assert {"step (stage 0)", "step (stage 1)", "sample (stage 1)"} <= set(names)
    assert "sample (stage 0)" not in names
    (first, second), ledger = (process.memory_ledger for process in runner.ranks), stages.memory_report()
    assert [end for _, end in runner.layers][-1] == stages.model_config.num_layers == len(runner.cache_dtypes)
    assert first.bytes_of("KV pool") + second.bytes_of("KV pool") == ledger.bytes_of("KV pool") == runner.kv_cache_bytes
    layers = [end - begin for begin, end in runner.layers]
    pools = [process.memory_ledger.bytes_of("KV pool") for process in runner.ranks]
    assert pools[0] * layers[1] == pools[1] * layers[0], "each stage has its own layers' alone"
    expected = brief(stages)
    with runner.uncompiled():
        assert brief(stages) == expected
    assert "steps" in str(stages.report(measure_limits=False))
    with pytest.raises(ValueError, match="and so pipeline_parallel_size, given False, 1 and 2"):
        _ = stages.own_runner


def test_a_step_that_fails_is_an_error_and_stages_go_on(stages_apart: CompiledEngine) -> None:
    """Steps behind it are skipped, until one begins without any request."""
    stages = stages_apart
    expected, runner = brief(stages), runner_of(stages)
    unknown = SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,))
    first, second = runner.launch(unknown), runner.launch(unknown)
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        runner.collect(first)
    with pytest.raises(RuntimeError, match="SkippedError: a step before has failed"):
        runner.collect(second)
    stages.scheduler.fail_steps_in_flight("")
    assert brief(stages) == expected


def test_steps_that_nobody_collects_have_ended_before_others_are_sent(stages_apart: CompiledEngine) -> None:
    """Else a stage that is behind could be told of the memory of a step that is overwritten by now."""
    stages = stages_apart
    expected, runner, launch = brief(stages), runner_of(stages), WorkerProcess.launch_message
    unknown = SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,))
    left = [runner.launch(unknown) for _ in range(4)]
    ended = list[int]()

    def noting(process: WorkerProcess, output: Any) -> int:
        ended.append(process.num_received)
        return launch(process, output)

    stages.scheduler.fail_steps_in_flight("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "launch_message", noting)
        assert brief(stages) == expected
    assert ended[:2] == [left[-1] + 1] * 2


def test_requests_of_a_killed_stage_end_with_its_name_and_exit_code(stages: CompiledEngine) -> None:
    """The last test of this engine."""
    os.kill(runner_of(stages).ranks[1].pid, signal.SIGKILL)
    (reason,) = set(outcomes(stages))
    assert "the process of stage 1 ended with exit code -9" in reason


@pytest.mark.battery
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_hangs_is_named(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "HANG_SECONDS", 5.0)
    engine = CompiledEngine(pipeline_parallel_size=3, **SMALL)
    os.kill(runner_of(engine).ranks[stage].pid, signal.SIGSTOP)
    (reason,) = set(outcomes(engine))
    assert f"stage {stage} hangs" in reason
    engine.close()


@pytest.mark.battery
@pytest.mark.parametrize("changes", [{"pipeline_parallel_size": 3}, {"preemption_mode": "recompute"}, {"seed": 1}])
def test_the_same_bits_with_other_arguments(changes: dict[str, Any]) -> None:
    """Without drafts."""
    own = {"pipeline_parallel_size": 2, **SIZES, **changes}
    with CompiledEngine(**{**own, "pipeline_parallel_size": 1}) as engine:
        theirs = served(engine)
    with CompiledEngine(**own) as engine:
        assert served(engine) == theirs
        assert engine.stats().num_preemptions > 0


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_stage_runs_one_graph(dtype: str) -> None:
    sizes = {**SIZES, "enforce_eager": False, "dtype": dtype, "speculative_config": {**NGRAM, "method": "suffix"}}
    with CompiledEngine(**sizes) as engine:
        theirs = served(engine)
    with CompiledEngine(pipeline_parallel_size=2, **sizes) as engine:
        assert served(engine) == theirs
        report = engine.compile_report()
    assert len(report.reports) == report.graphs
    assert report.graph_breaks == report.recompiles == 0


@pytest.mark.battery
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "glm4-moe", "gemma2", "mistral", "olmo3", "qwen3.5"])
def test_families_have_the_same_bits(name: str) -> None:
    """Among them windows that one stage has and the other has not, and layers with a state."""
    sizes = {**SIZES, "model": str(checkpoint(name)), "load_format": "dummy"}
    prompts = [{"prompt_token_ids": [*range(5, 5 + count)]} for count in (3, 40, 21, 7)]
    params = [SamplingParams(temperature=1.0, seed=number, max_tokens=20, logprobs=2) for number in range(4)]
    with CompiledEngine(**sizes) as engine:
        theirs = bits(engine.generate(prompts, params, use_tqdm=False))
    with CompiledEngine(pipeline_parallel_size=2, **sizes) as engine:
        assert bits(engine.generate(prompts, params, use_tqdm=False)) == theirs


@pytest.mark.battery
def test_stages_of_ranks() -> None:
    """Four processes: the bits of two ranks, and with exact sums of one."""
    exact = {**SIZES, "tensor_parallel_exact": True}
    with CompiledEngine(**exact) as engine:
        theirs = served(engine)
    with CompiledEngine(pipeline_parallel_size=2, tensor_parallel_size=2, **exact) as engine:
        assert served(engine) == theirs
        runner = runner_of(engine)
        assert [process.facts.num_blocks for process in runner.ranks] == [24] * 4
        os.kill(runner.ranks[2].pid, signal.SIGKILL)
        (reason,) = set(outcomes(engine))
    assert "the process of stage 1, rank 0 ended with exit code -9" in reason
    assert not any(psutil.pid_exists(process.pid) for process in runner.ranks)
