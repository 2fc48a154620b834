"""B12: requests that break the steps that compute them: they alone end, and all others have what they would have had.

Each fault comes with a step that computes a token of the request "3" from some position on, however often it is tried.
"""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.api.config import EngineConfig
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.worker.runner import ModelRunner
from tests.drafted_runs import RecordedDrafter, facts, serve, work_of
from tests.drawn import marked
from tests.families import COMPILED_SIZES, checkpoint

CAUSE = "3"
CONTROL = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# Of each kind: what is raised, or None for a token that is not found; and how it is counted.
KINDS: dict[str, tuple[Exception | None, str]] = {
    "exception": (RuntimeError("the kernel broke"), "exception"),
    "out of memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
    "out of host memory": (MemoryError(), "out of memory"),
    "not finite": (None, "not finite"),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True, "async_scheduling": False},
    "eager overlapping": {"enforce_eager": True, "async_scheduling": True},
    "compiled": {"async_scheduling": False},
    "compiled overlapping": {"async_scheduling": True},
}
SIZES = {"num_kv_blocks": 24, "swap_space_bytes": 2**22, "preemption_mode": "swap", "check_invariants": True}


class FaultyWorker:
    """Stands before a runner, and breaks the steps that compute a token of ``CAUSE`` from ``position`` on.

    Attributes:
        error: raised, in ``launch`` or in ``collect``; None: the step finds no token for the request.
        position: None: no step breaks.
        num_broken: steps that broke.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.launch_runner, self.collect_runner = runner.launch, runner.collect
        self.error: Exception | None = None
        self.in_collect = False
        self.position: int | None = None
        self.num_broken = 0
        self._launched: deque[SchedulerOutput] = deque()
        runner.launch, runner.collect = self.launch, self.collect  # type: ignore[method-assign]

    def launch(self, output: SchedulerOutput) -> Any:
        if output.resets:
            self._launched.clear()
        launched = self.launch_runner(output)
        self._launched.append(output)
        if self._breaks(output) and self.error is not None and not self.in_collect:
            self.num_broken += 1
            raise self.error
        return launched

    def collect(self, step: Any) -> StepResult:
        result, output = self.collect_runner(step), self._launched.popleft()
        if not self._breaks(output):
            return result
        self.num_broken += 1
        if self.error is not None:
            raise self.error
        row = output.first_rows()[output.request_ids.index(RequestId(CAUSE))]
        sampled = [*result.sampled_token_ids[:row], -1, *result.sampled_token_ids[row + 1 :]]
        return dataclasses.replace(result, sampled_token_ids=tuple(sampled))

    def _breaks(self, output: SchedulerOutput) -> bool:
        if self.position is None or RequestId(CAUSE) not in output.request_ids:
            return False
        index = output.request_ids.index(RequestId(CAUSE))
        return output.num_computed_tokens[index] + output.num_scheduled_tokens[index] > self.position


def check_others(found: dict[str, RequestOutput], expected: dict[str, RequestOutput], reason: str) -> None:
    """The cause has failed with what it had, and all others have what they have without a fault, to the bit."""
    assert found.keys() == expected.keys()
    for name, output in found.items():
        if name != CAUSE:
            assert facts(output) == facts(expected[name])
            continue
        completion, whole = output.outputs[0], expected[name].outputs[0]
        assert (output.finished, completion.finish_reason) == (True, "error")
        assert reason in str(completion.stop_reason)
        assert len(completion.token_ids) < len(whole.token_ids)
        assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]


def check_it_serves(engine: CompiledEngine, control: list[RequestOutput]) -> None:
    again = engine.generate(["import os", "def add(a, b):"], CONTROL, use_tqdm=False)
    assert [output.outputs for output in again] == [output.outputs for output in control]
    stats = engine.stats()
    assert stats.num_finished == stats.num_requests
    assert stats.used_blocks == stats.used_swap_blocks == 0


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[CompiledEngine]:
    with CompiledEngine(**COMPILED_SIZES, **SIZES, **WAYS[request.param]) as engine:
        yield engine


FAULTS = [
    ("exception", False),
    ("exception", True),
    ("out of memory", False),
    ("out of host memory", True),
    ("not finite", True),
]
# Of the ordinary run: faults of each kind and place; memory of the host is counted as that of a device.
ORDINARY = {
    ("eager", "exception", False),
    ("compiled overlapping", "out of memory", False),
    ("compiled overlapping", "not finite", True),
}
ENDINGS = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in ORDINARY else pytest.mark.battery)
    for case in ((way, *fault) for way in WAYS for fault in FAULTS)
]


@pytest.mark.parametrize(("engine", "kind", "in_collect"), ENDINGS, indirect=["engine"])
def test_one_request_that_breaks_its_steps_ends_alone(
    engine: CompiledEngine, kind: str, in_collect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = engine.generate(["import os", "def add(a, b):"], CONTROL, use_tqdm=False)
    work = work_of(engine, most_prompts=0)
    expected = serve(engine, work)
    for name in ("launch", "collect"):
        monkeypatch.setattr(engine.runner, name, getattr(engine.runner, name))  # so that they are put back
    worker = FaultyWorker(engine.runner)
    error, counted = KINDS[kind]
    worker.error, worker.in_collect = error, in_collect
    length = len(expected[CAUSE].prompt_token_ids)
    for position in (0, length + 9):  # in the prompt, and in a decode
        before, worker.num_broken, worker.position = engine.stats(), 0, position
        engine.reset_prefix_cache()
        found = serve(engine, work)
        worker.position = None
        check_others(found, expected, "logits are not finite" if error is None else f"{type(error).__name__}: {error}")
        assert engine.stats().since(before).failures == {kind: int(kind == counted) for kind in before.failures}
        assert 1 <= worker.num_broken <= 2 + 5, "32 run at once"
        check_it_serves(engine, control)


@pytest.mark.parametrize("engine", marked(WAYS, ("eager", "compiled overlapping")), indirect=True)
def test_a_device_that_fails_for_good_ends_all_and_the_engine_says_so(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = engine.generate(["import os", "def add(a, b):"], CONTROL, use_tqdm=False)

    def launch(output: SchedulerOutput) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    before = engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", launch)
        found = serve(engine, [(f"x = {n}", CONTROL) for n in range(20)])
    assert len(found) == 20
    for output in found.values():
        assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
        assert "an illegal memory access" in str(output.outputs[0].stop_reason)
    assert engine.stats().since(before).failures["exception"] == 20
    check_it_serves(engine, control)


@pytest.mark.parametrize("name", marked(["gemma3", "lfm2", "qwen3-next", "nemotron-h"], ("gemma3", "lfm2")))
@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.battery), True], ids=["in turns", "overlapping"]
)
def test_windows_and_states(name: str, overlap: bool) -> None:
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "max_num_batched_tokens": 16, "max_model_len": 64}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=1)
    work = [([*range(3, 9 + n), 40 + n], dataclasses.replace(params, n=1 + n % 2)) for n in range(6)]
    options = {"check_invariants": True, "block_size": 4, "num_kv_blocks": 40, "async_scheduling": overlap}
    with CompiledEngine(str(checkpoint(name)), enforce_eager=True, **sizes, **options) as engine:
        work[int(CAUSE)] = (work[int(CAUSE)][0], params)
        expected = serve(engine, work)
        worker = FaultyWorker(engine.runner)
        worker.error, worker.position = RuntimeError("the kernel broke"), 14
        found = serve(engine, work)
        check_others(found, expected, "the kernel broke")
        stats = engine.stats()
        assert stats.failures["exception"] == 1
        assert (stats.used_blocks, stats.used_slots) == (0, 0)


@pytest.mark.parametrize("kind", ["right", "half right"])
def test_drafts(kind: str) -> None:
    vocab_size = 307
    drafter = RecordedDrafter(3, vocab_size)
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "max_num_batched_tokens": 16, "max_model_len": 64}
    config = EngineConfig(model=str(checkpoint("llama")), enforce_eager=True, check_invariants=True, **sizes)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    work = [([*range(3, 9 + n), 40 + n], params) for n in range(6)]
    with CompiledEngine.from_config(config) as plain:
        expected = serve(plain, work)
    drafter.record(expected)
    drafter.kind = kind
    with CompiledEngine.from_config(config, drafter=drafter) as engine:
        worker = FaultyWorker(engine.runner)
        worker.error, worker.position = RuntimeError("the kernel broke"), 18
        check_others(serve(engine, work), expected, "the kernel broke")
        assert engine.stats().num_accepted_draft_tokens > 0
        assert engine.stats().used_blocks == 0


def test_a_beam_that_breaks_its_steps_ends_its_search_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "max_num_batched_tokens": 16, "max_model_len": 64}
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]]
    with CompiledEngine(str(checkpoint("llama")), enforce_eager=True, check_invariants=True, **sizes) as engine:
        expected = engine.beam_search(prompts, 3, 6)
        launch = engine.runner.launch
        bad: set[str] = set()

        def breaking(output: SchedulerOutput) -> Any:
            bad.update(a.request_id for a in output.admissions if a.prompt_token_ids[:3] == (7, 8, 9))
            steps = zip(output.request_ids, output.num_computed_tokens, output.num_scheduled_tokens, strict=True)
            if any(request_id in bad and start + count > 5 for request_id, start, count in steps):
                raise RuntimeError("the kernel broke")
            return launch(output)

        monkeypatch.setattr(engine.runner, "launch", breaking)
        found = engine.beam_search(prompts, 3, 6)
        assert [facts(found[n]) for n in (0, 2)] == [facts(expected[n]) for n in (0, 2)]
        assert {completion.finish_reason for completion in found[1].outputs} == {"error"}
        assert engine.stats().used_blocks == 0
