"""What was read from a model's files is kept: for these files alone, with its warnings, and nothing that is damaged."""

import os
import time
import warnings
from pathlib import Path

import pytest

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import kept_values, model_files
from compiled_llm.checkpoint.kept_values import kept
from compiled_llm.checkpoint.model_files import DEMO_MODEL, load_tokenizer, model_config
from compiled_llm.models.config_file import read_config
from compiled_llm.text.tokenizer_files import read_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text("{}")
    return path


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def unexpected() -> str:
    raise AssertionError("it is kept")


def test_a_value_is_made_once(file: Path, cache: Path) -> None:
    def make() -> tuple[str, int]:
        warnings.warn("a field is ignored", FutureWarning, stacklevel=1)
        return "made", 1

    with pytest.warns(FutureWarning, match="a field is ignored"):
        assert kept("config", [file], make) == ("made", 1)
    with pytest.warns(FutureWarning, match="a field is ignored"):
        assert kept("config", [file], unexpected) == ("made", 1)
    assert [path.stat().st_mode & 0o777 for path in entries(cache)] == [0o600]


@pytest.mark.parametrize("change", ["content", "another file", "name", "package", "gone"])
def test_another_file_is_another_value(
    change: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, name = [file, tmp_path / "more"], "config"
    assert kept(name, files, lambda: "first") == "first"
    if change == "content":
        file.write_text("{ }")
    elif change == "another file":
        files[1].touch()
    elif change == "name":
        name = "tokenizer"
    elif change == "package":
        monkeypatch.setattr(kept_values, "_version", lambda package: "another")
    else:
        file.unlink()
    assert kept(name, files, lambda: "second") == "second"


def test_damaged_and_old_entries_are_made_again(file: Path, cache: Path) -> None:
    kept("config", [file], lambda: "first")
    (entry,) = entries(cache)
    entry.write_bytes(entry.read_bytes()[:-1])
    assert kept("config", [file], lambda: "second") == "second"
    os.utime(entry, (0, time.time() - 40 * 24 * 3600))
    kept("tokenizer", [file], lambda: "third")
    assert [path.name.split("-")[0] for path in entries(cache)] == ["tokenizer"]


def test_another_process_may_remove_an_old_entry_first(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept("config", [file], lambda: "first")
    os.utime(entries(cache)[0], (0, time.time() - 40 * 24 * 3600))

    def removed_before(entry: os.DirEntry[str]) -> None:
        raise FileNotFoundError(entry.path)

    monkeypatch.setattr(os, "unlink", removed_before)
    kept("tokenizer", [file], lambda: "second")
    assert kept("tokenizer", [file], unexpected) == "second"


def test_an_error_is_raised_each_time(file: Path, tmp_path: Path) -> None:
    for path in (file, tmp_path):  # a directory cannot be read
        for _ in range(2):
            with pytest.raises(AssertionError, match="it is kept"):
                kept("config", [path], unexpected)


def test_others_may_not_write_there(file: Path, cache: Path) -> None:
    kept("config", [file], lambda: "first")
    for mode in (0o777, 0o1777):  # of a sticky one others may not replace an entry, but make it before it is read
        cache.chmod(mode)
        for name in ("config", "another"):  # which is read, and is not there
            with pytest.raises(ValueError, match=rf"others than its owner may write to .*models \(mode {mode:o}\)"):
                kept(name, [file], unexpected)
    cache.chmod(0o700)
    (entry,) = entries(cache)
    entry.chmod(0o622)
    with pytest.raises(ValueError, match=r"others than its owner may write to .*\.kept \(mode 622\)"):
        kept("config", [file], unexpected)


def test_where_nothing_can_be_written_it_is_made_each_time(
    file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(kept_values, "write_whole", refuse)
    assert [kept("config", [file], lambda n=n: n) for n in range(2)] == [0, 1]


def test_a_models_files_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a tokenizer from disk is the one that transformers made."""
    config, text = EngineConfig(), "def fib(n):\n    <|endoftext|>\u00e9\U0001f600"
    first, expected = load_tokenizer(config, DEMO_MODEL), read_config(DEMO_MODEL)
    assert model_config(DEMO_MODEL) == expected
    monkeypatch.setattr(model_files, "read_config", lambda *args: unexpected())
    monkeypatch.setattr(model_files, "read_parts", lambda directory, compare: unexpected())
    assert model_config(DEMO_MODEL) == expected
    again = load_tokenizer(config, DEMO_MODEL)
    assert first is not None
    assert again is not None
    assert again.encode(text) == first.encode(text)
    assert again.vocabulary() == first.vocabulary()
    assert (again.chat_templates, again.named_tokens) == (first.chat_templates, first.named_tokens)
    assert again.special_tokens.keys() == first.special_tokens.keys()
    assert first.vocabulary()[0] == read_tokenizer(DEMO_MODEL).backend_tokenizer.to_str()
