"""A worker in another process: the engine's core and scheduler here, the ModelRunner there, a pipe between them."""

import os
import signal
from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.checkpoint.model_files import checkpoint_directory
from compiled_llm.engine.core import EngineCore
from compiled_llm.models.config_file import read_config
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.worker_process import WorkerProcess

ARGUMENTS = {
    "enforce_eager": True,
    "check_invariants": True,
    "bucket_sizes": (1, 4),
    "token_bucket_sizes": (16,),
    "max_model_len": 96,
    "block_size": 4,
    "num_kv_blocks": 30,
    "swap_space_bytes": 2**20,
    "preemption_mode": "swap",
    "async_scheduling": True,
}
LONG = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, **LONG),
    SamplingParams(temperature=1.0, seed=3, logprobs=2, **LONG),
    SamplingParams(temperature=0.8, top_k=20, seed=4, presence_penalty=1.0, prompt_logprobs=1, **LONG),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, structured_outputs={"regex": "[a-c]{12}"}),
    SamplingParams(temperature=1.0, top_p=0.9, n=2, seed=6, **LONG),
]
PROMPTS = ["The ship", "A long list of words " * 4, "She said that " * 6, "abc", "Once upon a time"]


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(**ARGUMENTS) as engine:
        yield engine


@pytest.fixture(scope="module")
def process(engine: CompiledEngine) -> Iterator[WorkerProcess]:
    process = WorkerProcess(engine.config, engine.model_config, checkpoint_directory(engine.config))
    yield process
    process.close()
    assert process._process.exitcode == 0


def serve(engine: CompiledEngine) -> list[RequestOutput]:
    return engine.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)


def content(outputs: list[RequestOutput]) -> list[object]:
    return [
        (out.prompt_logprobs, [(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in out.outputs])
        for out in outputs
    ]


def test_the_same_outputs_as_in_one_process(
    engine: CompiledEngine, process: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in chunks, preemption by swap, sampling, penalties, a grammar, and two steps in flight."""
    expected = content(serve(engine))
    assert process.facts == engine.runner.facts
    core = EngineCore(engine.config, engine.model_config, engine.tokenizer, process)
    monkeypatch.setattr(engine, "_core", core)
    most_launched = 0

    def launch(output: SchedulerOutput) -> int:
        nonlocal most_launched
        most_launched = max(most_launched, 1 + len(core.launched))
        return WorkerProcess.launch(process, output)

    monkeypatch.setattr(process, "launch", launch)
    assert content(serve(engine)) == expected
    stats = engine.stats()
    assert most_launched == 2
    assert stats.num_swap_preemptions > 0
    assert stats.num_swapped_in_tokens > 0
    assert stats.num_steps > stats.num_requests


def test_an_error_of_a_step_has_its_text_and_the_worker_goes_on(
    engine: CompiledEngine, process: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(serve(engine))
    core = EngineCore(engine.config, engine.model_config, engine.tokenizer, process)
    monkeypatch.setattr(engine, "_core", core)
    unknown = process.launch(SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,)))
    process.launch(SchedulerOutput(released_request_ids=("nobody",)))  # its error is dropped with it
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'") as error:
        process.collect(unknown)
    assert "request_rows.py" in error.value.__notes__[0]
    assert content(serve(engine)) == expected


def test_a_bad_argument_is_the_error_that_it_would_be_here(engine: CompiledEngine) -> None:
    config = EngineConfig(enforce_eager=True, bucket_sizes=(1,), kv_cache_memory_bytes=10)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes must be from"):
        WorkerProcess(config, engine.model_config, checkpoint_directory(config))


def test_a_dead_process_is_an_error_with_its_exit_code_and_the_end_is_final() -> None:
    config = EngineConfig(enforce_eager=True, bucket_sizes=(1,), max_model_len=32, num_kv_blocks=4)
    directory = checkpoint_directory(config)
    process = WorkerProcess(config, read_config(directory), directory)
    os.kill(process._process.pid, signal.SIGKILL)
    message = "the worker process ended with exit code -9"
    with pytest.raises(RuntimeError, match=message):
        process.collect(0)
    with pytest.raises(RuntimeError, match=message):
        process.launch(SchedulerOutput())
    process.close()
    process.close()
    with pytest.raises(RuntimeError, match="the worker process is closed"):
        process.launch(SchedulerOutput())
