"""The script that trains a draft model on a tiny budget, and the one that ships: size, shape, and what it claims."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

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


@pytest.mark.parametrize("arguments", ["--minutes 0", "--layers -1", "--context-length 30", "--learning-rate 2"])
def test_bad_values_are_refused(script: ModuleType, arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(arguments.split())
    assert f"{arguments.split()[0]} must be" in capsys.readouterr().err


def test_steps_of_matrices_are_orthogonal(script: ModuleType) -> None:
    wanted = torch.linalg.qr(torch.randn(48, 16, generator=torch.Generator().manual_seed(0)))[0]
    matrix = torch.nn.Parameter(torch.zeros(48, 16))
    matrix.grad = wanted * torch.arange(1, 17)  # singular values 1 to 16
    script.Muon([matrix], lr=1.0).step()
    values = torch.linalg.svdvals(matrix.detach()) / 3**0.5
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (matrix.detach() * wanted).sum() < 0, "downhill"


def test_some_windows_are_of_texts_that_the_model_wrote(script: ModuleType, tmp_path: Path) -> None:
    np.savez(tmp_path / "texts.npz", texts=np.full((4, 40), 7, dtype=np.uint16))
    arguments = ["--context-length", "32", "--texts", str(tmp_path / "texts.npz")]
    stream = script.windows([[1] * 2000], script.parse_args(arguments))
    rows = [row for _ in range(20) for row in next(stream)]
    assert {tuple(row.unique().tolist()) for row in rows} == {(1,), (7,)}
    assert 20 < sum(int(row[0]) == 7 for row in rows) < 50, "six of ten"


def test_texts_that_are_shorter_than_a_window_are_refused(script: ModuleType, tmp_path: Path) -> None:
    np.savez(tmp_path / "texts.npz", texts=np.full((4, 32), 7, dtype=np.uint16))
    arguments = ["--context-length", "32", "--texts", str(tmp_path / "texts.npz")]
    with pytest.raises(SystemExit, match="--context-length must be below the 32 tokens of --texts, got 32"):
        next(script.windows([[1] * 2000], script.parse_args(arguments)))


def test_a_head_that_is_not_the_embedding_stays_as_it_is(script: ModuleType) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=40, num_hidden_layers=2, head_dim=16, tie_word_embeddings=False, **sizes)
    teacher = Qwen3ForCausalLM(config)
    student = script.build_student([1], teacher)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert not student.lm_head.weight.requires_grad


def test_what_ships_is_small_and_of_the_vocabulary_of_the_model() -> None:
    config, record = (json.loads((SHIPPED / name).read_text()) for name in ("config.json", "training.json"))
    assert (config["vocab_size"], config["num_hidden_layers"]) == (4096, 2)
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 6_000_000
    assert record["held_out"]["same_likeliest_token"] > 0.5
    assert record["held_out"]["shared_probability"] > 0.57
