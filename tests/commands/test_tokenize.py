"""compiled-llm tokenize: the ids that the engine makes of a text, without the engine."""

import io
import json
import shutil
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.__main__ import main
from compiled_llm.checkpoint.model_files import DEMO_MODEL

TEXT = "import os\n<|endoftext|> é"
ONE = SamplingParams(max_tokens=1)


def ids_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[int]:
    assert main(["tokenize", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["token_ids"]


def test_they_are_those_of_a_prompt(engine: CompiledEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert ids_of(capsys, TEXT) == engine.generate(TEXT, ONE, use_tqdm=False)[0].prompt_token_ids
    split = SamplingParams(max_tokens=1, split_special_tokens=True)
    expected = engine.generate(TEXT, split, use_tqdm=False)[0].prompt_token_ids
    assert ids_of(capsys, TEXT, "--split-special-tokens") == expected != ids_of(capsys, TEXT)
    messages = [{"role": "user", "content": TEXT}]
    assert ids_of(capsys, TEXT, "--chat") == engine.chat(messages, ONE, use_tqdm=False)[0].prompt_token_ids


def test_a_line_for_each_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", TEXT]) == 0
    out, err = capsys.readouterr()
    shown = [line.split(maxsplit=1)[1] for line in out.splitlines()]
    assert shown == ["'import'", "' os'", r"'\n'", "'<|endoftext|>'", "' '", r"b'\xc3'", r"b'\xa9'"]
    assert err == "compiled-llm tokenize: 7 tokens of 25 characters\n"


def test_a_tokenizer_is_all_that_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    assert ids_of(capsys, TEXT, "--model", str(tmp_path)) == ids_of(capsys, TEXT)


def test_a_text_from_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("a\n")
    assert ids_of(capsys, "--file", str(tmp_path / "text")) == ids_of(capsys, "a\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert ids_of(capsys, "-") == ids_of(capsys, "a")
