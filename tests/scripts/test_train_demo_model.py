"""The training script on a tiny budget, and the demo model that ships: its size, its shape, and the loss it claims."""

import hashlib
import json
import math
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "compiled_llm" / "demo_model"
ANY_TEXT = "def f(x):\n\treturn 'naïve 日本語 🙂👩‍🚀'  # don't  split \r\n\n  \x00 <|endo"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load(REPOSITORY / "scripts" / "train_demo_model.py")


@pytest.mark.battery
def test_some_seconds_give_a_loadable_checkpoint(script: ModuleType, tmp_path: Path) -> None:
    arguments = "--minutes 0.2 --max-files 20 --vocab-size 512 --context-length 64 --hidden-size 128 --num-layers 2"
    script.main([*arguments.split(), "--no-compile", "--output", str(tmp_path)])

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.dtype == torch.bfloat16
    assert tokenizer.decode(tokenizer(ANY_TEXT).input_ids) == ANY_TEXT
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(DEMO_MODEL).chat_template == script.CHAT_TEMPLATE
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] > 0
    assert record["curve"]
    assert record["final_held_out_loss"] < math.log(512), "better than a uniform guess over the vocabulary"


def test_the_learning_rate_ends_at_zero(script: ModuleType) -> None:
    factors = [script.learning_rate_factor(i / 100) for i in range(101)]
    assert factors[0] == factors[100] == 0.0
    assert max(factors) == factors[2] == pytest.approx(1.0)
    assert factors[2:] == sorted(factors[2:], reverse=True)


@pytest.mark.parametrize(
    "arguments",
    ["--minutes 0", "--minutes nan", "--seed -1", "--max-files 3", "--vocab-size 256", "--context-length 30",
     "--hidden-size 192", "--num-layers 0", f"--output {__file__}"],
)  # fmt: skip
def test_bad_values_are_refused(script: ModuleType, arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(arguments.split())
    assert f"{arguments.split()[0]} must be" in capsys.readouterr().err


def test_the_shipped_model_is_a_small_qwen3() -> None:
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 12 * 2**20
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert 2e6 < model.num_parameters() < 6e6
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(tokenizer(ANY_TEXT).input_ids) == ANY_TEXT


def test_the_shipped_prompts_are_32_different_beginnings() -> None:
    prompts = [json.loads(line)["prompt"] for line in (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == 32


def test_the_recorded_held_out_loss_is_reproduced(script: ModuleType) -> None:
    record = json.loads((DEMO_MODEL / "training.json").read_text())
    library = Path(sysconfig.get_path("stdlib"))
    same_files = {}
    for entry in record["held_out_files"]:
        path = library / entry["path"]
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]:
            same_files[entry["path"]] = path.read_text(encoding="utf-8")
    by_path = {entry["path"]: entry for entry in record["held_out_files"]}
    chosen = sorted((path for path in same_files if by_path[path]["tokens"] > 500), key=lambda p: by_path[p]["tokens"])[
        :4
    ]
    if not chosen:
        pytest.skip("this Python's standard library has none of the held-out files as they were")

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    documents = script.encode_files({path: same_files[path] for path in chosen}, tokenizer)
    for path, tokens in documents.items():
        assert script.measure(model, tokens) == pytest.approx(by_path[path]["loss"], rel=0.02)
