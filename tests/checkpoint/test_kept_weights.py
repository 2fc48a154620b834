"""Layers in a file are those of the checkpoint to the bit; what is not whole or of other weights is not believed."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import kept_weights as files
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.keeping import Keeping
from compiled_llm.checkpoint.kept_weights import KeptWeights, LayersWriter, kept_weights, opened
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.linears.rounding import errors_of
from tests import mxfp4
from tests.drawn import marked
from tests.families import CONFIGS, checkpoint

CPU = torch.device("cpu")
KINDS = ("plain", "int8", "int8_w8a8", "int4", "int4_w4a8", "fp8", "mxfp4")
# A family with each kind of layer, and each kind of weights with one of them; the battery has all with all.
ORDINARY = (
    *("llama-int4", "qwen3-moe-plain", "gpt-oss-mxfp4", "deepseek-v3-int8", "gemma4-moe-fp8", "gemma2-int4_w4a8"),
    "gpt2-int8_w8a8",
)
FIELDS = {"what": "these"}
LAYER = torch.arange(3000.0), None, (torch.arange(12, dtype=torch.int8).view(3, 4).t(), 7)


def described(tree: object) -> object:
    """A tree of weights with all that tells its tensors apart, and their content."""
    if isinstance(tree, Tensor):
        content = tree.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return str(tree.dtype), tuple(tree.shape), tree.stride(), content
    if isinstance(tree, tuple):
        return type(tree).__name__, [described(item) for item in tree]
    return tree


def check_same(directory: Path, kept: Path, quantization: str | None, compress: bool = False) -> KeptWeights:
    """The same weights come from the checkpoint and from a file."""
    config = read_config(directory)
    engine = EngineConfig(quantization=quantization, compress_weights=compress)
    kind = linears_of(engine, config, CPU, torch.bfloat16)

    def load(kind: Any) -> Any:
        return loader.load_weights(directory, config, torch.bfloat16, CPU, kind)

    plain = load(kind)
    file = kept_weights(kept, None, FIELDS, 1, lambda writer: load(Keeping(kind, writer)))
    mapped = load(Keeping(kind, file))
    assert described(plain) == described(mapped)
    assert (mapped.head is mapped.embedding) == (plain.head is plain.embedding)
    file.verify()
    return file


@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("name", marked((f"{family}-{kind}" for family in CONFIGS for kind in KINDS), ORDINARY))
def test_layers_of_every_kind_and_family(name: str, tmp_path: Path) -> None:
    family, kind = name.rsplit("-", 1)
    file = check_same(checkpoint(family), tmp_path / "kept", None if kind == "plain" else kind)
    assert {layer.role for layer in file.layers} <= {"layer", "head", "table", "experts"}


def test_layers_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    mxfp4.write_checkpoint(tmp_path)
    assert any(layer.role == "experts" for layer in check_same(tmp_path, tmp_path / "kept", None).layers)


@pytest.mark.skipif(not Compressed.serves(CPU, torch.bfloat16), reason="for CPUs with AVX512-BF16")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("family", marked(CONFIGS, ("glm4-moe", "deepseek-v3", "gpt2")))
def test_compressed_layers_of_every_family(family: str, tmp_path: Path) -> None:
    """Some have layers in float32, which cannot be compressed."""
    check_same(checkpoint(family), tmp_path / "kept", None, compress=True)


def test_compressed_layers_of_which_one_has_many_exceptions(tmp_path: Path) -> None:
    if not Compressed.serves(CPU, torch.bfloat16):
        pytest.skip("for CPUs with AVX512-BF16")
    directory = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    sizes = torch.randint(-60, 60, tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = torch.ldexp(tensors[name], sizes)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    file = check_same(directory, tmp_path / "kept", None, compress=True)
    rooms = {place.shape[1] for layer in file.layers for place in layer.places if place.dtype == "int32"}
    assert len(rooms) == 2, rooms


# -- The file


def write(writer: LayersWriter) -> None:
    left = writer.layer("one", "layer", LAYER)
    assert left[0].is_meta
    writer.layer("two", "head", (torch.ones(5), torch.empty(0)))


def unexpected(writer: LayersWriter) -> None:
    raise AssertionError("it is there")


def keep(directory: Path, write: Callable[[LayersWriter], None] = write, most: int | None = None) -> KeptWeights:
    return kept_weights(directory, most, FIELDS, 1, write)


def shapes_of(tree: Any) -> Any:
    return files.with_tensors(tree, lambda tensor: tensor.to("meta"))


def test_it_is_written_once_and_mapped_read_only(tmp_path: Path) -> None:
    first = keep(tmp_path / "kept")
    assert first.path.stat().st_mode & 0o777 == 0o600
    again = keep(tmp_path / "kept", unexpected)
    assert described(again.layer("one", "layer", shapes_of(LAYER))) == described(LAYER)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [first.path.name]
    with pytest.raises(TypeError, match="readonly"):
        again.memory[0] = 1


@pytest.mark.parametrize("where", [-1, -20, -50, -100])
def test_a_damaged_end_is_not_believed(where: int, tmp_path: Path) -> None:
    path = keep(tmp_path / "kept").path
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="written again"):
        assert described(keep(tmp_path / "kept").layer("one", "layer", shapes_of(LAYER))) == described(LAYER)


@pytest.mark.parametrize("left", [0, 10, 5000, -1])
def test_a_file_that_is_cut_off_is_not_believed(left: int, tmp_path: Path) -> None:
    path = keep(tmp_path / "kept").path
    os.truncate(path, left if left >= 0 else path.stat().st_size - 1)
    with pytest.warns(UserWarning, match="written again"):
        keep(tmp_path / "kept").verify()


def test_a_flipped_bit_of_a_layer_is_found_when_it_is_looked_for(tmp_path: Path) -> None:
    path = keep(tmp_path / "kept").path
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\1")
    kept = keep(tmp_path / "kept", unexpected)
    with pytest.raises(ValueError, match=r"one is not what was written.*delete the file"):
        kept.verify()


def test_sizes_beyond_the_file_are_not_believed(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "made", os.O_RDWR | os.O_CREAT)
    writer = LayersWriter(descriptor)
    writer.layer("one", "layer", LAYER)
    writer._layers["one"] = writer._layers["one"]._replace(nbytes=1 << 40)
    writer.finish(FIELDS)
    os.close(descriptor)
    with pytest.warns(UserWarning, match="shorter than its layers"):
        assert opened(tmp_path / "made", FIELDS) is None


def test_a_killed_writer_leaves_nothing_that_is_believed(tmp_path: Path) -> None:
    """Killed at many moments, the last ones after the file is whole."""
    seconds = 0.0
    for number in range(8):

        def run() -> None:
            def slowly(writer: LayersWriter) -> None:
                for name in range(20):
                    writer.layer(f"layer {name}", "layer", (torch.full((4000,), float(name)),))
                    time.sleep(0.002)

            keep(tmp_path / "kept", slowly)

        child = os.fork()
        if child == 0:
            run()
            os._exit(0)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in (tmp_path / "kept").glob("*.weights"):
            kept = opened(path, FIELDS)
            assert kept is not None
            assert len(kept.layers) == 20
            kept.verify()
            path.unlink()
        seconds = 0.01 * (number + 1)
    keep(tmp_path / "kept").verify()
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".weights"]


def test_who_comes_while_it_is_written_waits(tmp_path: Path) -> None:
    began, goes_on, times = threading.Event(), threading.Event(), list[int]()

    def slowly(writer: LayersWriter) -> None:
        times.append(1)
        began.set()
        assert goes_on.wait(10)
        write(writer)

    threads = [threading.Thread(target=keep, args=(tmp_path / "kept", slowly)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert times == [1]


def test_an_error_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    def fail(writer: LayersWriter) -> None:
        write(writer)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        keep(tmp_path / "kept", fail)
    assert not list((tmp_path / "kept").iterdir())


def test_those_not_used_for_longest_go(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o700)
    names = ["a.weights", "b.weights", "c.part"]
    for age, name in enumerate(names):
        (tmp_path / "kept" / name).write_bytes(bytes(1000))
        os.utime(tmp_path / "kept" / name, (age, age))
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    made = kept_weights(tmp_path / "kept", 4000, FIELDS, 2500, write).path
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"c.part", "notes.txt", made.name}
    with pytest.raises(ValueError, match=r"weights_path: the packed weights take 5,000 bytes.* may have 4,000"):
        kept_weights(tmp_path / "kept", 4000, {"what": "others"}, 5000, write)


def test_what_others_could_have_written_is_refused(tmp_path: Path) -> None:
    keep(tmp_path / "kept")
    (tmp_path / "kept").chmod(0o777)
    with pytest.raises(ValueError, match=r"weights are not mapped from .*set weights_path to a directory of your own"):
        keep(tmp_path / "kept")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = keep(tmp_path / "kept").path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="cannot keep the weights"):
        keep(tmp_path / "kept")


def test_the_key_has_all_that_decides_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    config = read_config(checkpoint("llama"))

    def key(dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> str:
        return json.dumps(files.fields_of(EngineConfig(**arguments), config, dtype, [file]), sort_keys=True)

    keys = {key(), key(torch.float32), key(quantization="int8"), key(quantization="int4", quantization_group_size=64)}
    assert key() in keys
    assert len(keys) == 4
    status = file.stat()
    time.sleep(0.03)  # clocks of file systems have ticks of up to 10 ms
    file.write_bytes(b"2")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # the same size and time
    assert key() not in keys
    monkeypatch.setenv("COMPILED_LLM_ISA", "portable")
    assert '"isa": "portable"' in key()


def test_what_rounding_cost_is_known_at_later_starts(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "made", os.O_RDWR | os.O_CREAT)
    writer = LayersWriter(descriptor)
    writer.errors = [("a", 1.0, 2.0)]
    writer.finish(FIELDS)
    os.close(descriptor)
    found = opened(tmp_path / "made", FIELDS)
    assert found is not None
    assert found.errors == [["a", 1.0, 2.0]]
    kind = linears_of(EngineConfig(quantization="int8"), read_config(checkpoint("llama")), CPU, torch.bfloat16)
    assert errors_of(Keeping(kind)) == []
