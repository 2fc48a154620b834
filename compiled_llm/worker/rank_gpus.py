"""Ranks on GPUs: which GPU each gets, the memory through which they exchange pieces, and how far they have come."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.ops import RankGroup, all_gather
from compiled_llm.ops.parallel import device_memory
from compiled_llm.ops.parallel.rank_group import note_gpu
from compiled_llm.ops.parallel.reductions import least
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.launched_step import LaunchedStep

Launch = Callable[[SchedulerOutput], LaunchedStep]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LEAST_SMS = 32  # on which all programs of a sum run at once (triton_exchange.py)
_LOOK_SECONDS = 1.0


class GpuOfRank(NamedTuple):
    """Of one rank. Its own GPU is the first that it sees, so that all ranks run the same code for "cuda:0".

    Attributes:
        visible: all GPUs of the ranks, as CUDA_VISIBLE_DEVICES has them.
        places: of each rank's GPU among those.
        shared: all ranks have the same one.
    """

    visible: str
    places: tuple[int, ...]
    shared: bool


def gpus_of_ranks(device: str, size: int) -> list[GpuOfRank]:
    """A GPU for each of ``size`` ranks: the first ones that this process sees; with "cuda:INDEX" that one for all.

    Raises:
        ValueError: there are fewer GPUs.
    """
    count, given = torch.cuda.device_count(), os.environ.get(_VISIBLE)
    names = [str(index) for index in range(count)] if given is None else [name.strip() for name in given.split(",")]
    names = names[:count]
    if ":" in device:
        name = names[torch.device(device).index]
        return [GpuOfRank(name, (0,) * size, shared=True)] * size
    if count < size:
        raise ValueError(
            f"tensor_parallel_size must be at most {count}, the GPUs that torch sees (CUDA_VISIBLE_DEVICES="
            f"{given}), given {size}: each rank has one. To try ranks on a single GPU, at a low speed, give "
            "device='cuda:0'"
        )
    names = names[:size]
    own = []
    for rank in range(size):
        others = [other for other in range(size) if other != rank]
        places = tuple(0 if other == rank else 1 + others.index(other) for other in range(size))
        own.append(GpuOfRank(",".join(names[other] for other in (rank, *others)), places, shared=False))
    return own


def check_ranks_on_gpus(config: EngineConfig) -> None:
    """``ValueError`` for what ranks on GPUs do not go with."""
    ranks = f"tensor_parallel_size={config.tensor_parallel_size} on GPUs"
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size must be 1 on GPUs (stages are processes of CPUs), given "
            f"{config.pipeline_parallel_size}: give device='cpu'"
        )
    if config.tensor_parallel_exact:
        raise ValueError(
            "tensor_parallel_exact must be False on GPUs (the bits of a product depend on its size there, so other "
            "numbers of ranks have other bits), given True: exact=True has the same bits in any company"
        )
    if config.cuda_graphs not in ("auto", "manual"):
        raise ValueError(
            f"cuda_graphs must be 'auto' or 'manual' with {ranks} (no launch may start before the one before has "
            f"ended, and ranks record graphs in one order), given {config.cuda_graphs!r}"
        )
    if config.has_files:
        raise ValueError(
            f"kv_disk_path must be None and role 'both' with {ranks} (the rows of host memory that ranks share are not "
            f"pinned), given {config.kv_disk_path!r} and {config.role!r}"
        )
    sizes = config.num_kv_blocks, config.kv_cache_memory_bytes
    if ":" in config.device and sizes == (None, None):
        raise ValueError(
            f"num_kv_blocks or kv_cache_memory_bytes must be given with device={config.device!r} and {ranks}: all "
            "ranks are on that one GPU, which is for trials, and cannot measure what is free for each"
        )


@contextlib.contextmanager
def seen_by_children(gpu: GpuOfRank | None) -> Iterator[None]:
    """In the engine's process: a process that is started within it sees the GPU of its rank first. None: no change.

    It must see it from its first moment on. CUDA reads the variable once, as soon as anything asks for GPUs, and a
    spawned process first imports the user's script, where ``torch.cuda.is_available()`` may stand.
    """
    before = os.environ.get(_VISIBLE)
    if gpu is not None:
        os.environ[_VISIBLE] = gpu.visible
    try:
        yield
    finally:
        if gpu is not None:
            os.environ.pop(_VISIBLE)
            os.environ.update({} if before is None else {_VISIBLE: before})


def described_gpu(device: torch.device) -> str:
    """What must be the same of all ranks' GPUs."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}"


def gpu_group(host: RankGroup, gpu: GpuOfRank, device: torch.device, meeting: int | None) -> RankGroup:
    """In each rank: the group of all ranks on GPUs, on its own one.

    Ranks map each other's memory, if all of them reach it; else NCCL carries pieces, and the group's memory is empty.

    Args:
        host: the same ranks, by memory of the host.
        meeting: the descriptor of an empty file without a name, the same for all: there NCCL's ranks meet.

    Raises:
        ValueError: the GPU is too small; or the ranks can neither reach each other nor use NCCL.
    """
    from compiled_llm.ops.parallel.triton_reductions import bytes_on_gpu  # it loads Triton

    torch.cuda.set_device(device)
    torch.cuda.synchronize(device)  # makes the context that the driver's calls need
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if sms < _LEAST_SMS:
        raise ValueError(
            f"tensor_parallel_size must be 1 on a GPU of fewer than {_LEAST_SMS} SMs, whose programs could wait for "
            f"each other for ever; this one has {sms}"
        )
    rank, size = host.place.tolist()
    reaches = all(device_memory.reaches(0, place) for place in gpu.places)
    if not least(int(reaches), host):
        _meet_by_nccl(meeting, rank, size, device)
        return RankGroup(
            torch.tensor([rank] + size * [0], device=device), torch.empty(0, dtype=torch.uint8, device=device)
        )
    own = device_memory.allocate(bytes_on_gpu())
    handle = torch.frombuffer(bytearray(device_memory.handle_of(own)), dtype=torch.uint8)
    handles = all_gather(handle[None], host, size).view(size, -1)
    addresses = [
        own if other == rank else device_memory.open_memory(bytes(handles[other].tolist())) for other in range(size)
    ]
    least(0, host)  # from here on all memories are there, and zeros
    return RankGroup(
        torch.tensor([rank, *addresses], device=device), device_memory.tensor_at(own, bytes_on_gpu(), device)
    )


def _meet_by_nccl(meeting: int | None, rank: int, size: int, device: torch.device) -> None:
    if not torch.distributed.is_nccl_available():
        raise ValueError(
            "tensor_parallel_size must be 1: the GPUs do not reach each other's memory with atomics, as over NVLink, "
            f"and this torch has no NCCL, given {size}"
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    store = torch.distributed.FileStore(f"/proc/self/fd/{meeting}", size)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)


def close_group(group: RankGroup) -> None:
    """End what ``gpu_group`` gave, when nothing uses it. A rank's own memory stays while others may have it mapped."""
    if not group.memory.numel():
        torch.distributed.destroy_process_group()
        return
    rank, *addresses = group.place.tolist()
    for other, address in enumerate(addresses):
        if other != rank:
            device_memory.close_memory(address)


class GpuProgress:
    """Notes for the engine's process how far a rank has come: steps launched, and meetings that its GPU has come to.

    A thread looks at the GPU while nothing is launched: it reads the flags by which programs wait for each other, on a
    stream of its own, so that it sees them while they wait.

    Args:
        host: where to note it.
        group: of the GPUs.
    """

    def __init__(self, host: RankGroup, group: RankGroup) -> None:
        self._host, self._rank = host.memory, int(host.place[0])
        self._memory, self._launched, self._met = group.memory, 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="compiled_llm flags", daemon=True)
        if self._memory.numel():  # NCCL has no such flags
            self._thread.start()

    def noting(self, launch: Launch) -> Launch:
        """``launch``, whose calls are counted."""

        def noted(output: SchedulerOutput) -> LaunchedStep:
            step = launch(output)
            self._launched += 1
            note_gpu(self._host, self._rank, self._launched, self._met)
            return step

        return noted

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * _LOOK_SECONDS)

    def _look(self) -> None:
        from compiled_llm.ops.parallel.triton_exchange import CHANNELS, HEADER_BYTES

        header = self._memory[: HEADER_BYTES.value]
        copy = torch.empty(header.shape, dtype=torch.uint8, pin_memory=header.is_cuda)
        stream = torch.cuda.Stream(header.device) if header.is_cuda else None
        flags = copy.view(torch.int64).view(CHANNELS.value, -1)[:, self._rank]  # that it has set itself
        before = -1
        while not self._ended.wait(_LOOK_SECONDS):
            if before == self._launched:
                _copy(header, copy, stream)
                self._met = int(flags.sum())
                note_gpu(self._host, self._rank, self._launched, self._met)
            before = self._launched


def _copy(source: Tensor, target: Tensor, stream: "torch.cuda.Stream | None") -> None:
    if stream is None:
        target.copy_(source)
        return
    with torch.cuda.device(source.device), torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()
