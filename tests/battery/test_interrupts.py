"""Interrupts and faults at every line that changes a request, a block or a queue: the engine serves on as if new.

A scenario is run once to see which lines it passes through, and then once more for each of them. When the line is about
to run, a signal comes whose handler raises, as that of Ctrl-C does; or, inside a step, the line itself raises.
"""

import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.engine.core import EngineCore
from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.battery import sized
from tests.families import checkpoint

PACKAGE = Path(sys.modules["compiled_llm"].__file__ or "").parent
# Where requests, blocks and queues are changed.
STATE = [
    "engine/engine", "engine/step_engine", "engine/core", "scheduling/scheduler", "scheduling/step_planner",
    "scheduling/running_set", "scheduling/forks", "scheduling/block_pool", "scheduling/window_pool",
    "scheduling/window_places", "scheduling/state_pool", "scheduling/prefix_cache", "scheduling/request_queue",
    "scheduling/request", "scheduling/suspects", "engine/completions", "engine/request_stream",
    "engine/beam_search", "engine/interrupts", "constraints/token_masks",
]  # fmt: skip
# What else runs inside a step.
DEVICE = [
    "worker/runner", "worker/compiled_steps", "worker/block_copies", "worker/request_rows", "worker/step_buffers",
    "worker/sampling_stage", "worker/field_buffers",
]  # fmt: skip
FILES = {str(PACKAGE / f"{name}.py") for name in STATE + DEVICE}
SIGNAL_FILES = {str(PACKAGE / f"{name}.py") for name in STATE}

Line = tuple[str, int]
PREFIX = list(range(3, 11))
PROMPTS = [[*PREFIX, 30 + index] for index in range(3)]
CONTROL = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
FORKED = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, logprobs=1, min_tokens=2, frequency_penalty=0.3)


class Fault(BaseException):
    """What no handler expects."""


def generate(engine: CompiledEngine) -> None:
    """Forks, a shared prefix, and too few blocks for all."""
    engine.generate(PROMPTS, [FORKED, CONTROL, FORKED], use_tqdm=False)


def beam_search(engine: CompiledEngine) -> None:
    engine.beam_search(PROMPTS[:2], 3, 4)


def step(engine: CompiledEngine) -> None:
    """Streams, one of them dropped, beside requests, one of them aborted."""
    engine.add_request("aborted", PROMPTS[0], FORKED)
    dropped = engine.stream(PROMPTS[2], CONTROL)
    stream = engine.stream(PROMPTS[1], CONTROL)
    next(stream)
    del dropped
    engine.add_request("mine", PROMPTS[1], CONTROL)
    engine.step()
    engine.abort("aborted")
    for _ in stream:
        pass
    while engine.has_unfinished_requests():
        engine.step()


def broken_steps(engine: CompiledEngine) -> None:
    """A request breaks every step that computes its third token, until it is found."""
    runner, bad = engine.runner, set[str]()
    launch = runner.launch

    def breaking(output: SchedulerOutput) -> Any:
        bad.update(admission.request_id for admission in output.admissions if admission.prompt_token_ids[-1] == 31)
        columns = output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens
        if any(name in bad and start + count > 11 for name, start, count in zip(*columns, strict=True)):
            raise RuntimeError("a step broke")
        return launch(output)

    runner.launch = breaking  # type: ignore[method-assign]
    try:
        engine.generate(PROMPTS, [CONTROL, FORKED, CONTROL], use_tqdm=False)
    finally:
        runner.launch = launch  # type: ignore[method-assign]


SCENARIOS: list[Callable[[CompiledEngine], None]] = [generate, beam_search, step, broken_steps]


IN_TURNS: dict[str, Any] = {"async_scheduling": False}
OVERLAPPING: dict[str, Any] = {"async_scheduling": True, "sliding_window": 10}


@pytest.fixture(scope="module", params=[IN_TURNS, OVERLAPPING], ids=["in turns", "overlapping, with a window"])
def engine(request: pytest.FixtureRequest) -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "max_num_batched_tokens": 16, "max_model_len": 32}
    blocks = {"block_size": 4, "num_kv_blocks": 9, "swap_space_bytes": 2**20, "preemption_mode": "swap"}
    with CompiledEngine(str(checkpoint("llama")), enforce_eager=True, **request.param, **sizes, **blocks) as engine:
        yield engine


@contextmanager
def tracing(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Call ``trace(frame, "line", None)`` before each line of ``FILES`` that runs."""

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return trace if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def is_within(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def lines_of(engine: CompiledEngine, scenario: Callable[[CompiledEngine], None]) -> Counter[Line]:
    """How often each line runs."""
    lines: Counter[Line] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    with tracing(trace):
        scenario(engine)
    return lines


def run_interrupted(
    engine: CompiledEngine,
    scenario: Callable[[CompiledEngine], None],
    line: Line,
    passes: int,
    act: Callable[[FrameType], bool],
) -> bool:
    """Run ``scenario``; before ``line`` runs for the time ``passes``, counted from 0, ``act``, once it returns True."""
    is_done = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passes, is_done
        if event == "line" and not is_done and (frame.f_code.co_filename, frame.f_lineno) == line:
            passes -= 1
            if passes < 0:
                is_done = True  # before act raises
                is_done = act(frame)
        return trace

    with suppress(KeyboardInterrupt, Fault), tracing(trace):
        scenario(engine)
    return is_done


def send_signal(frame: FrameType) -> bool:
    signal.raise_signal(signal.SIGINT)
    return True


def raise_fault(frame: FrameType) -> bool:
    """Inside a step: faults elsewhere are not promised to be survived."""
    if not is_within(frame, EngineCore.advance.__code__) or is_within(frame, EngineCore._fail_all.__code__):
        return False
    raise Fault


def check_idle(engine: CompiledEngine, expected: list[list[int]]) -> None:
    """Nothing is left of the requests that were, and new ones get their tokens."""
    for name in ("mine", "aborted"):
        engine.abort(name)  # for a fault or an interrupt may have kept the scenario from doing so
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        assert steps < 100, "a request never ends"
    core = engine._core
    assert not core.entries
    assert not core._completions
    assert not core._beams
    assert not core.updated
    assert not engine._streams
    assert not engine._stream_references
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens_of(engine.generate(PROMPTS, CONTROL, use_tqdm=False)) == expected
    check_scheduler(engine.scheduler)
    stats = engine.stats()
    assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
    assert stats.num_finished == stats.num_requests


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.usefixtures("_one_thread")
@sized("size", 2, 0)
@pytest.mark.parametrize("act", [send_signal, raise_fault])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_engine_serves_on_after_an_interrupt_at_any_line(
    engine: CompiledEngine,
    scenario: Callable[[CompiledEngine], None],
    act: Callable[[FrameType], bool],
    size: int,
    battery_counts: Counter[str],
) -> None:
    expected = tokens_of(engine.generate(PROMPTS, CONTROL, use_tqdm=False))
    files = SIGNAL_FILES if act is send_signal else FILES
    lines = sorted((line, count) for line, count in lines_of(engine, scenario).items() if line[0] in files)
    assert engine.stats().num_preemptions > 0 or scenario is not generate
    rng = random.Random(0)
    if size:
        lines = rng.sample(lines, size)
    for line, count in lines:
        for passes in {0, rng.randrange(count)}:
            try:
                battery_counts["interrupts"] += run_interrupted(engine, scenario, line, passes, act)
                check_idle(engine, expected)
            except BaseException as error:
                error.add_note(f"interrupted at {line[0]}:{line[1]}, passed {passes} times before")
                raise
    assert battery_counts["interrupts"] > len(lines) / 2
