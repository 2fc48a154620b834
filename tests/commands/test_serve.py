"""compiled-llm serve: where its keys and its model come from, and what is missing. tests/server runs it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.__main__ import main
from compiled_llm.server import run


def test_the_extra_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "msgspec" else find(name))
    with pytest.raises(SystemExit, match="2"):
        main(["serve"])
    assert "serve needs the packages msgspec: pip install 'compiled-llm[server]'" in capsys.readouterr().err


def test_model_and_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda program, config, settings: given.append((config, settings)) or 0)
    keys = tmp_path / "keys"
    keys.write_text("two\n\n three \n")
    monkeypatch.setenv("COMPILED_LLM_API_KEY", "four,five")
    flags = ["--api-key", "one", "--api-key-file", str(keys), "--served-model-name", "a", "--served-model-name", "b"]
    assert main(["serve", "some/model", *flags, "--port", "0", "--bucket-sizes", "1,2"]) == 0
    ((config, settings),) = given
    assert (config.model, config.bucket_sizes) == ("some/model", (1, 2))
    assert settings.api_key == ("one", "four", "five", "two", "three")
    assert settings.served_model_name == ("a", "b")
    keys.write_text("\n")
    monkeypatch.delenv("COMPILED_LLM_API_KEY")
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--api-key-file", str(keys)])


@pytest.mark.parametrize(("flags", "waits"), [([], False), (["--wait-for-compile"], True)])
def test_it_serves_before_graphs_are_compiled_unless_it_is_told_to_wait(
    flags: list[str], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda program, config, settings: given.append(config) or 0)
    assert main(["serve", *flags]) == 0
    assert [config.waits_for_compile for config in given] == [waits]


@pytest.mark.parametrize(
    ("flags", "target"),
    [
        ([], 250),
        (["--target-itl-ms", "5"], 5),
        (["--target-itl-ms", "none"], None),
        (["--max-num-batched-tokens", "64"], None),
        (["--token-bucket-sizes", "32,64"], None),
        (["--no-enable-chunked-prefill"], None),
        (["--target-itl-ms", "250", "--max-num-batched-tokens", "64"], 250),
    ],
)
def test_streams_wait_for_prompts_of_others_for_a_time_unless_sizes_of_steps_are_given(
    flags: list[str], target: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(run, "serve", lambda program, config, settings: given.append(config) or 0)
    assert main(["serve", *flags]) == 0
    assert [config.target_itl_ms for config in given] == [target]
