"""The directory that stands for a GGUF file: made once for it, and found again."""

import os
import shutil
import time
from pathlib import Path

import pytest

from compiled_llm.checkpoint.gguf.directory import directory_of, has_index, is_gguf
from compiled_llm.checkpoint.model_files import model_directory
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from tests.checkpoint.gguf.writing import MODELS, metadata_of, tensors_of, write


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    return write(tmp_path / "model.gguf", MODELS["qwen3"][0], metadata_of("qwen3"), tensors_of("qwen3"))


def test_it_is_made_once_and_again_for_a_file_that_changed(file: Path) -> None:
    first = directory_of(file)
    made = (first / "config.json").stat().st_mtime_ns
    assert directory_of(file) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    assert (first / "model.gguf").resolve() == file
    os.utime(file, (1, 1))
    assert directory_of(file) != first


def test_what_was_not_used_for_a_month_is_deleted(file: Path) -> None:
    old = directory_of(file)
    os.utime(old, (1, 1))
    os.utime(file, (2, 2))
    new = directory_of(file)
    assert new.is_dir()
    assert not old.exists()
    assert new.stat().st_mtime > time.time() - 60


def test_a_directory_of_files(file: Path) -> None:
    assert is_gguf(file.parent)
    assert model_directory(str(file.parent)) == directory_of(file)
    write(file.with_name("other.gguf"), MODELS["qwen3"][0], metadata_of("qwen3"), tensors_of("qwen3"))
    with pytest.raises(CheckpointError, match=r"holds 2 models: model\.gguf, other\.gguf\. Give one of the files"):
        model_directory(str(file.parent))
    (file.parent / "config.json").write_text("{}")
    assert not is_gguf(file.parent), "it is a checkpoint of the hub's layout"


def test_an_index_in_a_directory_of_others_is_not_believed(file: Path) -> None:
    own = directory_of(file)
    assert has_index(own)
    theirs = file.parent / "theirs"
    shutil.copytree(own, theirs, symlinks=True)
    assert not has_index(theirs)


def test_a_long_name(file: Path) -> None:
    long = file.with_name("m" * 250 + ".gguf")
    file.rename(long)
    assert (directory_of(long) / long.name).resolve() == long
