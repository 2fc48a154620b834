"""Ranks on GPUs that are not there: real processes, each with a CPU that it takes for a GPU.

``on_stand_ins`` changes the engine's process, and has each rank's process change itself before it does anything. Real
are then: which GPU a rank sees, the driver's calls (of ``stand_in_cuda.cpp``, by ctypes), the memory that ranks map, a
group on GPUs in the weights, what is noted and watched, how all ends. Not real are the devices: models run on the CPU,
uncompiled, and the sums over ranks are the Triton kernels, interpreted, or NCCL's carrying, by gloo; or, for tests that
are run often, plain torch by the same flags and addresses.
"""

import ctypes
import functools
import os
import subprocess
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.bench import all_reduce
from compiled_llm.ops import native
from compiled_llm.ops.library import LIBRARY
from compiled_llm.ops.parallel import device_memory, reductions
from compiled_llm.ops.parallel.carried_reductions import in_order
from compiled_llm.ops.rowwise import rowwise
from compiled_llm.ops.sampling import rank_sampling
from compiled_llm.parallel import rank_processes
from compiled_llm.system import gpu_packages
from compiled_llm.worker import started_model
from compiled_llm.worker.rank_start import RankStart

CPU = torch.device("cpu")
OPS = ("all_reduce", "all_gather", "join_parts")


def build(directory: Path) -> Path:
    """The library that stands for the driver's."""
    library, source = directory / "stand_in_cuda.so", Path(__file__).with_name("stand_in_cuda.cpp")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def on_stand_ins(monkeypatch: pytest.MonkeyPatch, library: Path, count: int, **environment: str) -> None:
    """In the engine's process: it sees ``count`` GPUs. ``environment``: of the ranks' processes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr("compiled_llm.worker.device.check_triton", lambda what: None)
    for module in (rank_processes, all_reduce):
        monkeypatch.setattr(module, "RankStart", functools.partial(_start, library, environment))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _start(library: Path, environment: dict[str, str], *arguments: Any, **named: Any) -> RankStart:
    start = RankStart(*arguments, **named)
    return start._replace(name=_Name(start.name, str(library), environment))


class _Name(str):
    """A name that changes the process in which it is unpickled."""

    def __new__(cls, name: str, library: str, environment: dict[str, str]) -> "_Name":
        made = super().__new__(cls, name)
        made.arguments = name, library, environment
        return made

    arguments: tuple[str, str, dict[str, str]]

    def __reduce__(self) -> Any:
        return _change_process, self.arguments


def _change_process(name: str, library: str, environment: dict[str, str]) -> str:
    """In a rank's process, as it starts: its CPU is a GPU, and the GPUs that it will see are told already."""
    assert "CUDA_VISIBLE_DEVICES" in os.environ, "a user's script that asks for GPUs would see others"
    os.environ.update({"TRITON_INTERPRET": "1", **environment})
    if os.environ.get("STAND_IN_RANK", name) != name:  # faults of another rank
        os.environ.pop("STAND_IN_FAILS", None)
    device_memory._LIBRARY = library
    device_memory.tensor_at = _tensor_at
    properties = types.SimpleNamespace(name="stand-in", major=9, minor=0, multi_processor_count=132)
    if os.environ.get("STAND_IN_OTHER") == name:
        properties.name = "another"
    torch.cuda.get_device_properties = lambda device: properties
    torch.cuda.synchronize = torch.cuda.set_device = lambda device=None: None
    gpu_packages.check_triton = lambda what: None
    started_model.resolve_device = all_reduce.resolve_device = lambda name: CPU  # config.device is "cuda"
    all_reduce.gpu_seconds = all_reduce.cpu_seconds
    distributed = torch.distributed
    join = distributed.init_process_group
    distributed.is_nccl_available = lambda: os.environ.get("STAND_IN_NCCL") == "1"
    distributed.init_process_group = lambda backend, device_id, **named: join("gloo", **named)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _take_ops()
    return name


def _take_ops() -> None:
    """Ops of a group on GPUs get what computes them there; those of a group on CPUs keep theirs."""
    for library in ("parallel_cpu", "sampling_cpu", "rowwise_cpu"):
        native.load(library)
    functions: dict[str, Any] = {name: functools.partial(_op, name) for name in OPS}
    functions["sample_tokens_of_ranks"] = rank_sampling._on_gpu
    functions["log_sum_exp_of_ranks"] = rowwise._log_sum_exp_of_ranks_on_gpu
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the ops have kernels for CPUs
        for name, function in functions.items():
            LIBRARY.impl(name, function, "CPU")


def _op(name: str, x: Tensor, place: Tensor, memory: Tensor, *others: Any) -> Any:
    if len(place) == 2:  # a rank and how many there are, on the host
        return getattr(reductions, f"{name}_reference")(x, place, memory, *others)
    if os.environ.get("STAND_IN_KERNELS") == "plain" and memory.numel():
        pieces = _exchange(x, place)
        return torch.cat(pieces, dim=1) if name == "all_gather" else in_order(pieces).to(x.dtype)
    from compiled_llm.ops.parallel import triton_reductions

    return getattr(triton_reductions, name)(x, place, memory, *others)


def _exchange(x: Tensor, place: Tensor) -> list[Tensor]:
    """What the kernels do in channel 0, one-shot: slots of all ranks, by the addresses of ``place``."""
    from compiled_llm.ops.parallel.triton_exchange import HEADER_BYTES

    rank, *addresses = place.tolist()
    words = [(ctypes.c_int64 * 128).from_address(address) for address in addresses]
    words[rank][64] += 1
    piece, size = words[rank][64], x.nbytes
    slot = HEADER_BYTES.value + piece % 2 * (1 << 24)
    assert size < 1 << 24, "one piece"
    ctypes.memmove(addresses[rank] + slot, x.contiguous().data_ptr(), size)
    for own in words:
        own[rank] = 2 * piece
    while min(words[rank][: len(addresses)]) < 2 * piece:
        time.sleep(0.0005)
    read = [torch.empty_like(x) for _ in addresses]
    for target, address in zip(read, addresses, strict=True):
        ctypes.memmove(target.data_ptr(), address + slot, size)
    return read


def _tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
