"""Headers: what they hold is read, and a damaged one is a clear error before anything is made of it."""

import random
from pathlib import Path

import numpy as np
import pytest

from compiled_llm.checkpoint.gguf.header import read_header
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from tests.checkpoint.gguf.writing import metadata_of, tensors_of, write


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"tokenizer.ggml.tokens": ["a", "ä", ""], "tokenizer.ggml.scores": [0.5, 1.5], "general.name": "small"}
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write(path, "qwen3", {**metadata_of("qwen3"), **more, "general.flag": True}, tensors_of("qwen3"))


def test_metadata_and_tensors(file: Path) -> None:
    header = read_header(file)
    said = header.metadata
    assert said["tokenizer.ggml.tokens"] == ["a", "ä", ""]
    assert said["tokenizer.ggml.scores"].tolist() == [0.5, 1.5]
    assert (said["general.name"], said["general.flag"], said["qwen3.block_count"]) == ("small", True, 2)
    assert said["qwen3.attention.layer_norm_rms_epsilon"] == 1e-6, "as it was meant, not float32's neighbour"
    held = tensors_of("qwen3")
    assert {name: place.shape for name, place in header.tensors.items()} == {n: tuple(t.shape) for n, t in held.items()}
    place = header.tensors["blk.1.ffn_up.weight"]
    values = np.fromfile(file, "<f4", held[place.name].numel(), offset=place.offset)
    assert np.array_equal(values, held[place.name].numpy().reshape(-1))


def test_a_model_of_several_files(tmp_path: Path) -> None:
    held = tensors_of("qwen3")
    first = write(tmp_path / "model.gguf", "qwen3", metadata_of("qwen3"), held, split=9)
    header = read_header(first)
    assert len(header.paths) == 3
    assert header.tensors.keys() == held.keys()
    with pytest.raises(CheckpointError, match="is number 2 of 3 files; give the first, model-00001-of-00003"):
        read_header(header.paths[1])
    header.paths[2].unlink()
    with pytest.raises(CheckpointError, match="missing files of the same model: model-00003-of-00003"):
        read_header(first)


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, (1).to_bytes(4, "little"), "version must be 2 or 3, found 1"),
        (4, (3).to_bytes(4, "big"), "it is big-endian"),
        (8, (1 << 40).to_bytes(8, "little"), "at most 100000 tensors, found 1099511627776"),
        (16, (1 << 40).to_bytes(8, "little"), "at most 65536 keys of metadata"),
        (24, (1 << 60).to_bytes(8, "little"), "a string beyond the end of the file"),
    ],
)
def test_what_is_wrong_is_said(file: Path, tmp_path: Path, at: int, content: bytes, message: str) -> None:
    damaged = bytearray(file.read_bytes())
    damaged[at : at + len(content)] = content
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=message):
        read_header(tmp_path / "damaged.gguf")


def test_a_file_that_is_cut_off(file: Path, tmp_path: Path) -> None:
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 3, 23, 24, 100, 700, len(content) // 2, len(content) - 40):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut off|end of the file|lie within"):
            read_header(cut)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.battery)])
def test_damaged_headers_are_read_or_refused(file: Path, tmp_path: Path, count: int) -> None:
    """A byte, a word or a stretch of a header is another one: what comes is a header, or a ``CheckpointError``."""
    content, generator = file.read_bytes(), random.Random(0)
    end = min(place.offset for place in read_header(file).tensors.values())
    refused = 0
    for number in range(count):
        damaged, at = bytearray(content), generator.randrange(end)
        length = generator.choice([1, 1, 4, 8, 64])
        damaged[at : at + length] = generator.choice([bytes(length), b"\xff" * length, generator.randbytes(length)])
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        try:
            read_header(path)
        except CheckpointError:
            refused += 1
        path.unlink()
    assert refused > count / 5, "most of a header are numbers and names that must fit"
