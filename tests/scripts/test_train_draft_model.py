"""The script that trains a draft model on a tiny budget, and the one that ships: size, shape, and what it claims."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "compiled_llm" / "demo_drafters" / "draft_model"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))  # it imports the script that trained the model
        return load(REPOSITORY / "scripts" / "train_draft_model.py")


@pytest.mark.battery
def test_some_seconds_give_a_draft_model(script: ModuleType, tmp_path: Path) -> None:
    script.main(["--minutes", "0.1", "--max-files", "20", "--context-length", "32", "--output", str(tmp_path)])
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] > 0
    assert 0 < record["held_out"]["shared_probability"] < 1
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


@pytest.mark.parametrize("arguments", ["--minutes 0", "--num-layers 0", "--context-length 30", "--learning-rate 2"])
def test_bad_values_are_refused(script: ModuleType, arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(arguments.split())
    assert f"{arguments.split()[0]} must be" in capsys.readouterr().err


def test_what_ships_is_small_and_of_the_vocabulary_of_the_model() -> None:
    config, record = (json.loads((SHIPPED / name).read_text()) for name in ("config.json", "training.json"))
    assert (config["vocab_size"], config["num_hidden_layers"]) == (4096, 1)
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 4_000_000
    assert record["held_out"]["same_likeliest_token"] > 0.4
    assert record["held_out"]["shared_probability"] > 0.5
