"""Adapters in host memory: when files are read, what stays, and what a slot holds."""

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.adapters import host_adapters
from compiled_llm.adapters.host_adapters import HostAdapters
from compiled_llm.adapters.peft import FileStamp, Stamp, read_adapter
from compiled_llm.api.lora_request import LoRARequest
from tests.adapters.made import write_adapter
from tests.adapters.test_peft import SHAPES, places


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that are read."""
    found: list[Path] = []

    def reading(name, directory, *arguments):
        found.append(directory)
        return read_adapter(name, directory, *arguments)

    monkeypatch.setattr(host_adapters, "read_adapter", reading)
    return found


def request(directory: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", str(write_adapter(directory / str(number), SHAPES, seed=number)))


def test_files_are_read_when_they_are_new(reads: list[Path], tmp_path: Path) -> None:
    adapters, one = HostAdapters(places(), 8, 2), request(tmp_path, 1)
    first = adapters.get(one)
    assert adapters.get(one) is first
    assert len(reads) == 1
    shutil.copytree(one.lora_path, tmp_path / "copy")
    assert adapters.get(LoRARequest("other", str(tmp_path / "copy"))) is first  # of the same content
    shutil.rmtree(one.lora_path)
    write_adapter(Path(one.lora_path), SHAPES, seed=5)
    assert adapters.get(one).digest != first.digest
    assert len(reads) == 3


def write(directory: Path, seed: int) -> None:
    """In place: the files stay those that they are, and keep their size."""
    directory.mkdir(exist_ok=True)
    for file in write_adapter(directory.parent / f"of seed {seed}", SHAPES, seed=seed).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())


def test_a_copy_that_brings_the_time_of_its_file_along_is_seen(tmp_path: Path) -> None:
    adapters, path = HostAdapters(places(), 8, 2), tmp_path / "one"
    digests = []
    for seed in (1, 2):
        write(path, seed)
        for file in path.iterdir():
            os.utime(file, ns=(10**18, 10**18))
        digests.append(adapters.get(LoRARequest("one", str(path))).digest)
    assert digests[0] != digests[1]


def test_a_change_at_the_same_time_of_a_clock_of_large_steps_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended clock, which goes on when somebody sleeps."""
    step, now, written = host_adapters._CLOCK_STEP_NS, 10**18 + 5, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += round(seconds * 1e9)

    def stamp(directory: Path) -> Stamp:
        return (FileStamp(0, 0, 0, written, written),)

    monkeypatch.setattr(host_adapters, "stamp", stamp)
    monkeypatch.setattr(host_adapters.time, "sleep", sleep)
    monkeypatch.setattr(host_adapters.time, "time_ns", lambda: now)
    adapters, path, digests = HostAdapters(places(), 8, 2), tmp_path / "one", []
    for seed in (1, 2, 3):
        write(path, seed)
        written = now // step * step
        digests.append(adapters.get(LoRARequest("one", str(path))).digest)
    assert len(set(digests)) == 3


def test_what_nobody_holds_is_dropped(reads: list[Path], tmp_path: Path) -> None:
    adapters, requests = HostAdapters(places(), 8, 2), [request(tmp_path, number) for number in range(4)]
    held = adapters.get(requests[0])
    digests = [adapters.get(one).digest for one in requests]
    gc.collect()
    assert set(adapters._known) == {held.digest, *digests[2:]}
    assert adapters.get(requests[0]) is held  # read again, and found to be the same
    assert len(reads) == 5


def test_a_slot_holds_one_adapter_alone(tmp_path: Path) -> None:
    """Nothing of the adapter before it, where it changes fewer layers and has a lower rank."""
    found = places()
    adapters = HostAdapters(found, 8, 2)
    name = "model.layers.0.self_attn.q_proj"
    large = LoRARequest("large", str(write_adapter(tmp_path / "large", SHAPES, r=8)))
    small = LoRARequest("small", str(write_adapter(tmp_path / "small", {name: SHAPES[name]}, r=2, lora_alpha=5)))
    for one in (large, small):
        adapter = adapters.get(one)
        adapters.load(1, adapter.digest)
        for layer, place in found.items():
            change = adapter.changes.get(layer)
            rank = 0 if change is None else len(change.a)
            assert place.changes.ranks.tolist() == [[rank]]
            if change is not None:
                assert torch.equal(place.changes.a[0, 0, :rank], change.a)
                assert torch.equal(place.changes.b[0, :, :rank], change.b)
                assert place.changes.scales.item() == change.scale


def test_reading_one_keeps_nobody_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, (slow, quick) = HostAdapters(places(), 8, 2), [request(tmp_path, number) for number in range(2)]
    may_read, reading, read = threading.Event(), threading.Event(), []

    def waiting(name: str, path: Path, *arguments: Any) -> Any:
        read.append(name)
        if name == slow.lora_name:
            reading.set()
            assert may_read.wait(10)
        return read_adapter(name, path, *arguments)

    monkeypatch.setattr(host_adapters, "read_adapter", waiting)
    futures = [adapters.begin(slow) for _ in range(100)]
    assert reading.wait(10)
    adapters.get(quick)
    assert adapters.begin(quick).done()  # which was just looked at
    assert not any(future.done() for future in futures)
    may_read.set()
    assert len({future.result(10).digest for future in futures}) == 1
    assert adapters.get(slow) is futures[0].result()
    assert read == [slow.lora_name, quick.lora_name]
    adapters.drop(slow.lora_path)
    assert not adapters.begin(slow).done()
    adapters.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "must be a directory with adapter_config.json"),
        (lambda path: path.write_text("x"), "must be a directory"),
        (lambda path: None, "must be a directory"),
    ],
)
def test_directories_that_are_none(make, message: str, tmp_path: Path) -> None:
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=message):
        HostAdapters(places(), 8, 2).get(LoRARequest("x", str(tmp_path / "x")))


def test_weights_that_may_be_code_are_not_read(tmp_path: Path) -> None:
    path = Path(request(tmp_path, 1).lora_path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"adapter_model\.bin can hold code and is not read"):
        HostAdapters(places(), 8, 2).get(LoRARequest("x", str(path)))
