"""The script that trains heads on a tiny budget, and those that ship: size, shape, and what they claim."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.bench.speculation import edit_prompts
from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "compiled_llm" / "demo_drafters"
METHODS = ["eagle3", "medusa", "mtp"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))  # it imports the scripts that trained the model
        return load(REPOSITORY / "scripts" / "train_heads.py")


@pytest.mark.battery
@pytest.mark.parametrize("method", METHODS)
def test_some_seconds_give_heads(script: ModuleType, method: str, tmp_path: Path) -> None:
    script.main([method, "--minutes", "0.1", "--max-files", "20", "--context-length", "32", "--output", str(tmp_path)])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] > 0
    assert all(0 < share < 1 for share in record["held_out"]["shared_probability"])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # of mtp with the model's own tensors
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize(
    ("method", "least"), [("eagle3", 0.6), pytest.param("medusa", 0.25, marks=pytest.mark.battery)]
)
def test_what_ships_is_small_and_guesses_as_often_as_it_says(method: str, least: float) -> None:
    directory = SHIPPED / method
    record = json.loads((directory / "training.json").read_text())
    assert sum(file.stat().st_size for file in directory.iterdir()) < 2_500_000
    assert record["held_out"]["same_likeliest_token"][0] > least
    config = {"method": method, "model": str(directory), "adaptive": False}
    with CompiledEngine(speculative_config=config, enforce_eager=True, progress="off") as engine:
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        engine.generate(["def read(path):", "import os\n\n\nclass"], params, use_tqdm=False)
        stats = engine.stats()
    assert stats.num_accepted_by_position[0] > least * stats.num_drafts


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({"num_speculative_tokens": 7, "speculative_token_tree": "auto"}, 2.0),
        pytest.param({}, 1.6, marks=pytest.mark.battery),
    ],
)
def test_medusa_heads_that_ship_give_these_tokens_a_step_of_edits(fields: dict[str, Any], least: float) -> None:
    config = {"method": "medusa", "model": str(SHIPPED / "medusa"), "adaptive": False, **fields}
    with CompiledEngine(speculative_config=config, enforce_eager=True, dtype="float32", progress="off") as engine:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        engine.generate(edit_prompts(5), params, use_tqdm=False)
        assert engine.stats().mean_accepted_length > least
