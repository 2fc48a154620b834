"""How long compiling will take: nothing is said before this machine has compiled, and then what is said is right."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.compiling import parallel
from compiled_llm.compiling.build_processes import BuildProcesses, Built, Job
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.costs import Cost
from compiled_llm.compiling.forecast import expected_cost, expected_start, finish_times
from compiled_llm.compiling.parallel import build_missing
from compiled_llm.system import progress
from compiled_llm.system.progress import Stage, StartProgress

START = 4.0  # seconds until a process can compile


def run(*tensors: torch.Tensor) -> torch.Tensor:
    return sum(tensors, torch.zeros(1))


def recipe() -> Any:
    return run


def job(name: str, num_arguments: int) -> Job:
    """A step of a model has as many arguments as its layers have tensors."""
    return Job(name, recipe, tuple(torch.zeros(3) for _ in range(num_arguments)), 1, 3.0, {})


def key(cache: CompileCache, of: Job) -> dict[str, Any]:
    return cache.key_of(of.name, of.recipe(), of.args, of.depends)


def store(cache: CompileCache, of: Job, cost: Cost) -> None:
    cache.store(key(cache, of), b"code", {"cost": list(cost), "start": START})


def test_costs_are_those_of_functions_of_that_name_on_this_kind_of_machine(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, {"cpu": "fast", "torch": "2"})
    wanted = key(cache, job("step", 1000))
    assert (expected_cost(cache, wanted), expected_start(cache)) == (None, 0.0)
    store(cache, job("sample", 5), Cost(1.0, 2.0, 1))
    store(CompileCache(tmp_path, {"cpu": "slow", "torch": "2"}), job("step", 10), Cost(9.0, 9.0, 9))
    assert expected_cost(cache, wanted) is None
    store(cache, job("step", 190), Cost(4.0, 8.0, 6))
    expected = Cost(pytest.approx(4.0 * 1170 / 360), 8.0, 6)  # type: ignore[arg-type]
    assert expected_cost(cache, wanted) == expected, "tracing takes longer for more layers, libraries do not"
    store(cache, job("step", 1030), Cost(12.0, 0.1, 0))
    expected = Cost(pytest.approx(12.0 * 1170 / 1200), 8.0, 6)  # type: ignore[arg-type]
    assert expected_cost(cache, wanted) == expected, "the nearest; its libraries were there already"
    assert expected_start(cache) == START


def test_functions_are_done_when_cores_have_had_the_time_for_them() -> None:
    step, small = Cost(4.0, 8.0, 6), Cost(1.0, 3.0, 2)
    assert finish_times({"step": step}, 1, [0.0]) == {"step": pytest.approx(12.0)}
    assert finish_times({"step": step}, 2, [1.0]) == {"step": pytest.approx(1 + 4 + 8 / 2)}
    assert finish_times({"step": step}, 16, [0.0]) == {"step": pytest.approx(4 + 8 / 6)}
    two = finish_times({"step": step, "small": small}, 2, [2.0, 2.0])
    # Until second 6 each has a core. Then the step has them both: 8 CPU seconds.
    assert two == {"small": pytest.approx(6.0), "step": pytest.approx(10.0)}
    three = finish_times({"step": step, "small": small, "last": small}, 2, [0.0, 0.0])
    assert three == {"small": pytest.approx(4.0), "last": pytest.approx(8.0), "step": pytest.approx(10.0)}
    assert finish_times({}, 2, []) == {}


class Machine:
    """Compiles functions in the time of a fake clock, and notes what a stage says meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: float = 1.0) -> None:
        self.now, self.slower, self.stage = 0.0, slower, None
        self.said: list[tuple[float, float | None]] = []  # at which moment, what is left
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(parallel, "granted_cores", lambda: 1)
        monkeypatch.setattr(BuildProcesses, "build", lambda processes, job: self.build(job))
        shown, machine = StartProgress.stage, self

        def stage(*args: Any, **options: Any) -> Any:
            context = shown(*args, **options)

            class Noting:
                def __enter__(self) -> Stage:
                    machine.stage = context.__enter__()
                    return machine.stage

                def __exit__(self, *error: Any) -> Any:
                    return context.__exit__(*error)

            return Noting()

        monkeypatch.setattr(StartProgress, "stage", stage)

    def build(self, job: Job) -> Built:
        """A process begins with its imports."""
        assert self.stage is not None
        cost = Cost(1.6 + 0.015 * len(job.args), 5.0, 4) if job.name == "step" else Cost(0.8, 2.5, 2)
        seconds = (START if not self.said else 0.0) + cost.own + cost.cpp
        end = self.now + seconds * self.slower
        while self.now < end:
            self.said.append((self.now, self.stage.remaining()))
            self.now = min(end, self.now + 0.5)
        return Built(b"code", {"cost": list(cost), "start": START}, "")


@pytest.mark.parametrize("slower", [0.85, 1.0, 1.15])
def test_the_second_compile_on_a_machine_knows_within_a_quarter_how_long_it_takes(
    slower: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a model of seven times as many layers. The first one says nothing, whatever is done."""
    cache, stream = CompileCache(tmp_path, {"cpu": "this"}), io.StringIO()
    names = ("sample", "sample_changed", "logprobs")
    machine = Machine(monkeypatch)
    build_missing(cache, [job("step", 176), *(job(name, 9) for name in names)], 1, StartProgress("lines", stream))
    assert len(machine.said) > 40
    assert {left for _, left in machine.said} == {None}
    assert "about" not in stream.getvalue()

    machine = Machine(monkeypatch, slower)
    build_missing(cache, [job("step", 1064), job("sample", 10)], 1, StartProgress("lines", stream))
    assert "2 (step, sample), about 27 s" in stream.getvalue()
    assert len(machine.said) > 40
    for moment, left in machine.said:
        assert left is not None
        assert moment + left == pytest.approx(machine.now, rel=0.25), f"at {moment} s: {left} s left"


def test_what_is_left_follows_the_plan_where_functions_are_compiled_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is done first says nothing of how far the long one is."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    costs = {"step": Cost(20.0, 5.0, 4), "small": Cost(0.5, 3.0, 2)}
    plan = finish_times(costs, 2, [START, START])
    whole = plan["step"]
    assert whole == pytest.approx(4 + 20 + 5 / 2)
    stage = Stage("compiling", {"step": 25.0, "small": 3.5}, plan=plan)
    for name in plan:
        stage.begin(name)
    while now[0] < whole - 1:
        assert stage.remaining() == pytest.approx(whole - now[0], rel=0.05, abs=0.5)
        now[0] += 0.5
        if now[0] == 7.5:
            stage.finish("small")
