"""A step that breaks once, on the device or in the scheduler, and interrupts: the engine serves on.

test_faults.py has steps that break whenever they compute a certain request.
"""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["def add(a, b):", "import os", "class Stack:", "for i in range(10):"]
EAGER = {"enforce_eager": True, "dtype": "float32", "token_bucket_sizes": (16,), "check_invariants": True}


@pytest.fixture(scope="module", params=[False, True], ids=["in turns", "overlapping"])
def engine(request: pytest.FixtureRequest) -> Iterator[CompiledEngine]:
    sizes = {"bucket_sizes": (2,), "num_kv_blocks": 64, "max_model_len": 256}
    with CompiledEngine(**EAGER, **sizes, async_scheduling=request.param) as engine:
        yield engine


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def break_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int, error: BaseException) -> None:
    """The call of ``owner.name`` with the number ``after`` raises ``error`` when its work is done."""
    function, calls = getattr(owner, name), iter(range(10**6))

    def breaking(*args: Any) -> Any:
        result = function(*args)
        if next(calls) == after:
            raise error
        return result

    monkeypatch.setattr(owner, name, breaking)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int) -> None:
    """Ctrl-C is pressed while ``owner.name`` is called for the time ``after``, counted from 0."""
    function, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*args: Any) -> Any:
        if next(calls) == after:
            signal.raise_signal(signal.SIGINT)
        return function(*args)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("launch", 0),
        ("collect", 5),
        pytest.param("launch", 5, marks=pytest.mark.battery),
        pytest.param("collect", 0, marks=pytest.mark.battery),
    ],
)
def test_a_step_that_breaks_once_ends_nobody(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, where: str, after: int
) -> None:
    expected = tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    break_once(monkeypatch, engine.runner, where, after, RuntimeError("the device is on fire"))
    before = engine.stats()
    outputs = engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    stats = engine.stats()
    assert stats.since(before).num_unexplained_faults == 1
    assert 1 <= stats.since(before).num_recompute_preemptions <= 2, "those of the step: two run at once"
    assert set(stats.since(before).failures.values()) == {0}
    assert tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert stats.used_blocks == 0


STAGES = [("scheduler", "schedule"), ("scheduler", "update"), ("runner", "launch"), ("runner", "collect")]


class Fault(BaseException):
    """Something that nobody expects: no ``Exception``, and no signal either."""


@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_whatever_is_raised_in_a_step_leaves_an_engine_that_serves(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    expected = tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False))
    before = engine.stats()
    break_once(monkeypatch, getattr(engine, owner), name, 3, Fault())
    with pytest.raises(Fault):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats()
    assert stats.num_finished == stats.num_requests
    assert stats.prefix_queried_tokens >= before.prefix_queried_tokens > 0, "counts go on"
    assert tokens_of(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert engine.stats().used_blocks == 0


@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_users_of_step_and_stream_learn_that_a_fault_ended_their_requests(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    stream = engine.stream(PROMPTS[0], GREEDY)
    engine.add_request("mine", PROMPTS[1], GREEDY)
    next(stream)
    break_once(monkeypatch, getattr(engine, owner), name, 0, Fault())
    with pytest.raises(Fault):
        engine.step()
    ended = []
    while engine.has_unfinished_requests():
        ended += [output for output in engine.step() if output.finished]
    assert [(output.request_id, output.outputs[0].finish_reason) for output in ended] == [("mine", "error")]
    assert [output.outputs[0].finish_reason for output in stream][-1] == "error"


@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_an_interrupt_in_a_step_is_raised_after_it_and_nothing_is_lost(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    (first, second) = engine.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    stream = engine.stream(PROMPTS[0], GREEDY)
    engine.add_request("mine", PROMPTS[1], GREEDY)
    interrupt_once(monkeypatch, getattr(engine, owner), name, 2)
    outputs: list[RequestOutput] = []
    interrupts = 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [second.outputs[0].token_ids[: len(ids)] for ids in tokens], "in their order"
    assert len(tokens) == len(second.outputs[0].token_ids), "one output for each token"
    assert [output.outputs[0].text for output in stream][-1] == first.outputs[0].text


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS * 8])
def test_an_interrupt_while_generate_queues_its_prompts_leaves_none_of_them(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, prompts: list[str]
) -> None:
    interrupt_once(monkeypatch, engine._core, "add", 1)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, GREEDY, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_waiting == 0
    assert len(engine.generate(prompts, GREEDY, use_tqdm=False)) == len(prompts)


def test_an_interrupt_that_comes_twice_still_leaves_an_engine_that_serves(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_once(monkeypatch, engine.runner, "launch", 1)
    interrupt_once(monkeypatch, engine._core, "forget", 0)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert not engine._core.entries
    assert len(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


def test_a_stream_dropped_in_the_middle_of_scheduling_waits_for_its_end(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the garbage collector may do: it runs whenever it likes."""
    expected = tokens_of(engine.generate(PROMPTS[1], GREEDY, use_tqdm=False))
    streams = [engine.stream(PROMPTS[0], GREEDY)]
    next(streams[0])
    budget = engine.scheduler.planner.budget

    def collecting(num_decodes: int) -> int:
        streams.clear()
        return budget(num_decodes)

    monkeypatch.setattr(engine.scheduler.planner, "budget", collecting)
    engine.add_request("mine", PROMPTS[1], GREEDY)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert not streams
    assert outputs[-1].outputs[0].token_ids == expected[0]
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_swapped_and_waiting_requests_survive_a_step_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [f"def function_{n}(a, b, c):\n    return a" for n in range(8)]
    sizes = {"bucket_sizes": (8,), "max_model_len": 64}
    with CompiledEngine(**EAGER, **sizes) as large:
        expected = tokens_of(large.generate(prompts, params, use_tqdm=False))
    swap = {"num_kv_blocks": 14, "swap_space_bytes": 2**24, "preemption_mode": "swap"}
    with CompiledEngine(**EAGER, **sizes, **swap) as small:
        launch, broken = small.runner.launch, []

        def breaking(output: Any) -> Any:
            if output.swapped_out and not broken:
                broken.append(output)
                raise RuntimeError("the copy failed")
            return launch(output)

        monkeypatch.setattr(small.runner, "launch", breaking)
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert len(broken[0].request_ids) < len(prompts)
        assert tokens_of(outputs) == expected
        assert small.stats().used_swap_blocks == 0
