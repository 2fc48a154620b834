"""The script that has the model write texts for drafters: what its prompts are of, and a text or two."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from transformers import AutoTokenizer

from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.quantizing.texts import read_source_files, split_files
from tests.scripts.test_gpu_validate import load

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        return load(REPOSITORY / "scripts" / "write_own_texts.py")


def test_prompts_are_of_files_to_learn_from_and_the_same_again(script: ModuleType) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    files, _ = split_files(read_source_files(40))
    prompts = script.Prompts(tokenizer, 0, 40)
    found = [prompts.one() for _ in range(40)]
    again = script.Prompts(tokenizer, 0, 40)
    assert found == [again.one() for _ in range(40)]
    texts = [tokenizer.decode(prompt[1:30]) for prompt in found]
    assert all(any(text in file for file in files.values()) for text in texts if "\ufffd" not in text)
    assert any("# Once more:" in tokenizer.decode(prompt) for prompt in found)


@pytest.mark.battery
def test_texts_are_as_long_as_they_must_be(script: ModuleType, tmp_path: Path) -> None:
    script.main([str(tmp_path / "texts.npz"), "--num-texts", "2", "--max-files", "40"])
    written = np.load(tmp_path / "texts.npz")
    assert (written["texts"].shape, written["texts"].dtype) == ((2, script.LENGTH), np.uint16)
    assert all(0 < length < script.LENGTH for length in written["prompt_lengths"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["texts.npz", "--num-texts", "0"], "--num-texts must be"),
        (["texts.npz", "--edits", "1.5"], "--edits must be from 0 to 1, got 1.5"),
        (["texts.npy"], "output must be a file.npz"),
        (["not/there/texts.npz"], "in a folder that is there"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    script: ModuleType, capsys: pytest.CaptureFixture, arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        script.parse_args(arguments)
    assert said in capsys.readouterr().err
