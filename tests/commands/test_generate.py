"""compiled-llm generate: the answer on stdout as it comes, all else on stderr."""

import contextlib
import io
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, LoRARequest, SamplingParams
from compiled_llm.__main__ import main
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.terminal.answer import Answer

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def run(*arguments: str) -> int:
    try:
        return main(["generate", *arguments])
    except SystemExit as bad_arguments:
        return int(bad_arguments.code or 0)


def test_the_answer_and_a_line_of_summary(engine: CompiledEngine, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = engine.generate("import os", params, use_tqdm=False)[0].outputs[0].text
    assert run("import os", *GREEDY) == 0
    out, err = capsys.readouterr()
    assert out == expected.rstrip("\n") + "\n" or out == expected
    assert err.startswith("compiled-llm generate: 12 tokens in ")
    assert run("import os", *GREEDY, "--quiet") == 0
    assert capsys.readouterr() == (out, "")


def test_several_continuations(engine: CompiledEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("import os", "--n", "2", "--max-tokens", "3", "--sampling-seed", "1") == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- 1 of 2 ---\n")
    assert "\n--- 2 of 2 ---\n" in out
    assert "6 tokens in" in err


def test_a_text_from_standard_input(
    engine: CompiledEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("def f(x):", *GREEDY, "--quiet") == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n"))
    assert run("-", *GREEDY, "--quiet") == 0
    assert capsys.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert run("-", *GREEDY) == 2
    assert "standard input must be text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error", "given"),
    [
        ([], 'TEXT must be one argument, as in "def fibonacci(n):", or - for standard input, given none', "nothing"),
        (["def", "f"], 'as in "def fibonacci(n):", or - for standard input, given 2 words', "def f"),
        (["a", "--top-p", "3"], "top_p must be a number from 0.0 to 1.0, given 3.0", "--top-p 3"),
        (["a", "--tempreature", "3"], "unknown flag --tempreature: did you mean '--temperature'?", "--tempreature 3"),
        (["a", "--logprobs", "3"], "unknown flag --logprobs", "--logprobs 3"),
        (
            ["a", "--model", "/nowhere"],
            "model='/nowhere' is neither a directory, a .gguf file nor a hub id",
            "--model /nowhere",
        ),
        (["a " * 600], "prompt must be shorter than 256 tokens", "'a a a"),
    ],
)
def test_bad_arguments_are_told_in_three_lines(
    arguments: list[str], error: str, given: str, engine: CompiledEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    what, where, todo = err.splitlines()
    assert what.startswith("compiled-llm generate: error: ")
    assert error in what
    assert where.startswith(f"  given: {given}")
    assert todo == "  see:   compiled-llm generate --help"
    assert out == ""


@pytest.mark.parametrize("command", [["generate", "a", "--model"], ["chat", "--model"], ["chat"]])
def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompiledEngine, "from_config", None)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*command, str(tmp_path)])
    assert "the model has no tokenizer, and a " in capsys.readouterr().err


def test_an_interrupt_ends_it_cleanly(
    engine: CompiledEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Answer.take

    def interrupted(self: Answer, output: Any) -> None:
        take(self, output)
        if self.num_tokens == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Answer, "take", interrupted)
    assert run("import os", "--max-tokens", "100", "--ignore-eos") == 130
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert err == "compiled-llm generate: stopped by SIGINT\n"
    assert not engine.has_unfinished_requests(), "the request was aborted"


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_stdout_ends_it(
    engine: CompiledEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.stats().num_output_tokens
    monkeypatch.setattr("sys.stdout", _Closed())
    assert run("import os", "--max-tokens", "200", "--ignore-eos") == 141
    assert capsys.readouterr().err == ""
    assert engine.stats().num_output_tokens - before < 20, "it does not go on for nobody"


def test_an_adapter(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chat, too."""
    configs, adapters = [], []

    def from_config(config: EngineConfig) -> Any:
        configs.append(config)
        return contextlib.nullcontext(engine)

    def stream(self: CompiledEngine, prompt: Any, params: SamplingParams, lora_request: LoRARequest | None) -> Any:
        adapters.append(lora_request)
        return iter(())

    monkeypatch.setattr(CompiledEngine, "from_config", from_config)
    monkeypatch.setattr(CompiledEngine, "stream", stream)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    run("import os", "--quiet", "--lora", "some/path")
    main(["chat", "--lora", "some/path"])
    assert [(config.enable_lora, config.max_loras) for config in configs] == [(True, 1)] * 2
    assert adapters == [LoRARequest("lora", "some/path")] * 2
