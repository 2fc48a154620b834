"""Features of steps that are entered at once are those of an engine that computes them behind each step, to the bit."""

import hashlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from compiled_llm import CompiledEngine
from compiled_llm.compiling.argument_specs import specs_of
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker import draft_coverage, head_coverage
from compiled_llm.worker.head_stage import HeadStage
from compiled_llm.worker.kept_hidden import KeptHidden
from tests.draft_heads import write_eagle3
from tests.drafting_networks import Drafted, draft_in_turns, record_drafts
from tests.e2e.test_draft_model import ENGINES, SMALL, Work, facts, random_work, serve
from tests.families import checkpoint


class Seen(NamedTuple):
    """What an engine did.

    Attributes:
        features: digests of all features on the device but those of the sink, behind each step that was entered.
        skipped: of each step, whether it was entered later.
        kept: how many rows were entered at once, each time.
    """

    features: dict[int, str]
    skipped: list[bool]
    kept: list[int]
    outputs: dict[str, Any]
    found: list[Drafted]
    num_preemptions: int


def run(target: str, directory: str, arguments: dict[str, Any], work: Work, monkeypatch: pytest.MonkeyPatch) -> Seen:
    config = {"method": "eagle3", "model": directory, "num_speculative_tokens": 3, "adaptive": False}
    features, skipped, kept, aborted = dict[int, str](), list[bool](), list[int](), frozenset(range(5, len(work), 11))
    with CompiledEngine(target, **arguments, speculative_config=config) as engine, monkeypatch.context() as patch:
        drafting = engine.own_runner.steps.drafting
        assert isinstance(drafting, HeadStage)
        run_stage, fill = drafting.run, KeptHidden.fill

        def running(output: SchedulerOutput, *others: Any) -> Any:
            skipped.append(drafting._is_skipped)
            drafts = run_stage(output, *others)
            if not skipped[-1]:
                rows = drafting.kv_cache[-1].features[1:].view(torch.uint8)
                features[len(skipped)] = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
            return drafts

        def filling(self: KeptHidden, slots: Any) -> Any:
            kept.append(len(slots))
            return fill(self, slots)

        patch.setattr(drafting, "run", running)
        patch.setattr(KeptHidden, "fill", filling)
        draft_in_turns(engine)
        found = record_drafts(engine)
        outputs = serve(engine, work, aborted)
        return Seen(features, skipped, kept, outputs, found, engine.stats().num_preemptions)


@pytest.mark.parametrize(
    ("name", "count", "most_rows"),
    [
        pytest.param("overlap", 24, 1024, id="small"),
        pytest.param("swap", 24, 6, id="small, few rows"),
        *(
            pytest.param(name, 200, rows, id=f"full-{name}-{rows}", marks=pytest.mark.battery)
            for name in ENGINES
            for rows in (4, 7, 1024)
            if name != "other process"
        ),
    ],
)
def test_features_are_those_of_each_step(
    name: str, count: int, most_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts between, chunks, prefix hits, preemption, swaps and aborts, and with a buffer that is full."""
    target, arguments = checkpoint("llama"), SMALL | ENGINES[name]
    directory, work = write_eagle3(tmp_path / "head", target), random_work(random.Random(7), count)
    monkeypatch.setattr(head_coverage, "_MOST_ROWS", most_rows)
    found = run(str(target), directory, arguments, work, monkeypatch)
    monkeypatch.setattr(draft_coverage.DraftCoverage, "skip", lambda *_: False)
    wanted = run(str(target), directory, arguments, work, monkeypatch)
    assert sum(found.skipped) > count // 2
    assert not any(wanted.skipped)
    assert not wanted.kept
    assert len(found.skipped) == len(wanted.skipped)
    for step, digest in found.features.items():
        assert digest == wanted.features[step], f"features differ behind step {step}"
    assert max(found.kept) > 4 if most_rows > 100 else max(found.kept) in (most_rows, most_rows - 1, most_rows - 2)
    assert found.num_preemptions > 0 or name == "no chunks"
    assert found.found == wanted.found
    assert len(found.found) > count // 2
    assert {name: facts(output) for name, output in found.outputs.items()} == {
        name: facts(output) for name, output in wanted.outputs.items()
    }


def test_one_compiled_function_serves_rows_of_steps_and_rows_that_are_kept(tmp_path: Path) -> None:
    """It is compiled for what the first of these looks like."""
    target = checkpoint("llama")
    config = {"method": "eagle3", "model": write_eagle3(tmp_path / "head", target)}
    with CompiledEngine(str(target), **SMALL, speculative_config=config) as engine:
        drafting = engine.own_runner.steps.drafting
        assert isinstance(drafting, HeadStage)
        arguments = [part.arguments() for part in drafting._parts() if part.name == "draft_features"]
        arguments += [drafting._feature_arguments(x, drafting._kept.hidden) for x in drafting._kept.slots.values()]
        assert len({len(x[1]) for x in arguments}) > 5
        assert len({specs_of(x) for x in arguments}) == 1
        held = drafting._kept.nbytes
        assert drafting.nbytes > held > drafting._kept.hidden.nbytes > 0
