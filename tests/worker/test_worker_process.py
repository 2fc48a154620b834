"""A worker in another process: the engine's core and scheduler here, the ModelRunner there, a pipe between them."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.api.outputs import RequestOutput
from compiled_llm.engine.failures import RequestsFailedWarning
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker import worker_process
from tests.forked_workers import forking

ARGUMENTS = {
    "enforce_eager": True, "check_invariants": True, "bucket_sizes": (1, 4), "token_bucket_sizes": (16,),
    "max_model_len": 96, "block_size": 4, "num_kv_blocks": 24, "swap_space_bytes": 2**20, "preemption_mode": "swap",
    "async_scheduling": True,
}  # fmt: skip
LONG = {"max_tokens": 24, "ignore_eos": True}
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
def remote() -> Iterator[CompiledEngine]:
    """The same engine with its model in another process."""
    with CompiledEngine(model_process=True, **ARGUMENTS) as remote:
        yield remote
    assert remote.runner._process.exitcode == 0
    assert remote.compile_report().graphs == 0, "what was known of it stays"
    assert remote.stats().execute_seconds > 0


def serve(engine: CompiledEngine) -> list[RequestOutput]:
    return engine.generate(PROMPTS * 2, PARAMS * 2, use_tqdm=False)


def brief(engine: CompiledEngine) -> list[object]:
    return content(engine.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False))


def content(outputs: list[RequestOutput]) -> list[object]:
    return [
        (out.prompt_logprobs, [(one.token_ids, one.text, one.logprobs, one.finish_reason) for one in out.outputs])
        for out in outputs
    ]


def test_the_same_outputs_as_in_one_process(
    engine: CompiledEngine, remote: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in chunks, preemption by swap, sampling, penalties, a grammar, and two steps in flight."""
    expected = content(serve(engine))
    assert remote.runner.facts == engine.runner.facts
    most_launched = 0
    launch = remote.runner.launch

    def counting(output: SchedulerOutput) -> int:
        nonlocal most_launched
        most_launched = max(most_launched, 1 + len(remote._core.launched))
        return launch(output)

    monkeypatch.setattr(remote.runner, "launch", counting)
    assert content(serve(remote)) == expected
    stats = remote.stats()
    assert most_launched == 2
    assert stats.num_swap_preemptions > 0
    assert stats.num_swapped_in_tokens > 0
    assert stats.num_steps > stats.num_requests


def test_the_reports_are_those_of_the_other_process(engine: CompiledEngine, remote: CompiledEngine) -> None:
    remote.reset_report()
    remote.add_request("me", "Once upon", SamplingParams(max_tokens=9))
    while remote.has_unfinished_requests():
        remote.step()
        assert remote.stats().prepare_seconds > 0  # asked while a step is launched
    assert remote._work == engine._work
    ours, theirs = ([(r.name, r.graphs, r.cache) for r in one.compile_report().reports] for one in (engine, remote))
    assert theirs == ours
    assert remote.memory_report().bytes_of("weights") == engine.memory_report().bytes_of("weights")
    assert "steps" in str(remote.report(measure_limits=False))
    with remote.runner.uncompiled():
        assert brief(remote) == brief(engine)
    with pytest.raises(ValueError, match="profile_steps must be 0 with model_process=True"):
        remote.reset_report(profile_steps=1)


def test_an_error_of_a_step_has_its_text_and_the_worker_goes_on(engine: CompiledEngine, remote: CompiledEngine) -> None:
    expected, process = brief(engine), remote.runner
    unknown = process.launch(SchedulerOutput(request_ids=("nobody",), num_scheduled_tokens=(1,), token_ids=(5,)))
    process.launch(SchedulerOutput(released_request_ids=("nobody",)))  # its error is dropped with it
    assert process.times.num_padding_tokens >= 0, "an answer comes after the results, which stay to be collected"
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'") as error:
        process.collect(unknown)
    assert "request_rows.py" in error.value.__notes__[0]
    assert brief(remote) == expected


def test_a_bad_argument_is_the_error_that_it_would_be_here() -> None:
    with forking(), pytest.raises(ValueError, match="kv_cache_memory_bytes must be from"):
        CompiledEngine(model_process=True, enforce_eager=True, bucket_sizes=(1,), kv_cache_memory_bytes=10)
    with pytest.raises(ValueError, match="must go to another process with model_process=True"):
        CompiledEngine(model_process=True, logits_transforms=[lambda logits: logits])


def test_requests_of_a_dead_process_end_with_its_exit_code_and_the_end_is_final() -> None:
    sizes = {"enforce_eager": True, "bucket_sizes": (1,), "max_model_len": 32, "num_kv_blocks": 4}
    with forking():
        engine = CompiledEngine(model_process=True, **sizes)
    process = engine.runner
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.warns(RequestsFailedWarning):
        (output,) = engine.generate("abc", use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "RuntimeError: the worker process ended with exit code -9"
    assert engine.stats().num_exception_failures == 1
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="the worker process is closed"):
        process.launch(SchedulerOutput())


@pytest.mark.parametrize("turns", [0, 3])
def test_code_that_is_there_takes_over_while_no_message_comes(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """A message ends the wait at once; once nothing is left to change, only a message does."""
    monkeypatch.setattr(worker_process, "LOOK_SECONDS", 0.001)
    here, there = multiprocessing.Pipe()
    looked: list[int] = []

    class Changes:
        @property
        def is_changing(self) -> bool:
            return len(looked) < turns

        def settle(self) -> None:
            looked.append(1)
            if len(looked) == turns:
                here.send("a step")

    if not turns:
        here.send("a step")
    late = threading.Timer(10, here.send, ("a step that nobody looked for",))
    late.start()
    assert worker_process._next_message(there, Changes()) == "a step"  # type: ignore[arg-type]
    late.cancel()
    assert len(looked) == turns
