"""What a process is told that runs one rank of a model, and what it says of itself before it loads anything."""

import hashlib
import json
import mmap
import os
import platform
import threading
from collections.abc import Callable
from multiprocessing import connection, parent_process, reduction
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_llm.api.version import __version__
from compiled_llm.compiling.keys import source_digests
from compiled_llm.models.sharding import Shard
from compiled_llm.ops import RankGroup, native
from compiled_llm.ops.parallel.reductions import least
from compiled_llm.system.resources import granted_cores
from compiled_llm.worker.rank_gpus import GpuOfRank, described_gpu

T = TypeVar("T")


class Inherited:
    """A descriptor that a process gets as it is spawned: there it is a number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._descriptor),)


def _detached(duplicate: Any) -> int:
    return duplicate.detach()


class RankStart(NamedTuple):
    """Of one rank.

    Attributes:
        shard: of tensor parallelism; None: the process has layers whole.
        memory: the descriptor of the memory of the ranks of such layers.
        cores: that the process keeps to.
        name: of the process, in messages.
        stage: the ``StageStart`` of a stage; None: the process has all layers.
        rows: the descriptor of memory for rows of host memory that ranks have in common; None: each has its own.
        gpu: that of the rank; None: it runs on CPUs.
        meeting: the descriptor of an empty file, the same for all ranks on GPUs.
    """

    shard: Shard | None
    memory: Inherited | int
    cores: tuple[int, ...]
    name: str
    stage: Any = None
    rows: Inherited | int | None = None
    gpu: GpuOfRank | None = None
    meeting: Inherited | int | None = None


class Alike(NamedTuple):
    """What must be the same in all ranks: otherwise they would compute different things, or wait for each other."""

    package: str
    source_files: str
    torch: str
    python: str
    instructions: str
    model_files: str
    gpu: str = "none"


class CompileTurn:
    """The first of several ranks compiles, on the cores of all, and the others then load what it has made.

    A process alone is the first.

    Attributes:
        waits: whether another rank compiles for this one.
    """

    def __init__(self, shard: Shard | None, group: RankGroup) -> None:
        self._group, self._cores = group, os.sched_getaffinity(0)
        self.waits = shard is not None and shard.rank > 0
        self._is_for_others = shard is not None and shard.size > 1 and not self.waits

    def begin(self) -> None:
        """Take the cores of all: other ranks sleep meanwhile."""
        if self._is_for_others:
            os.sched_setaffinity(0, self._cores | os.sched_getaffinity(os.getppid()))

    def num_workers(self, asked: int | None) -> int | None:
        """Processes that compile. What the first rank compiles itself, the others would not find."""
        return granted_cores() if self._is_for_others and asked is None else asked

    def end(self) -> None:
        """Give the cores back, and let the other ranks load."""
        if self._is_for_others:
            os.sched_setaffinity(0, self._cores)
        if not self.waits:
            least(0, self._group)


def in_turns(run: Callable[[], T], group: RankGroup, peers: RankGroup) -> T:
    """What ``run`` gives while other stages sleep, which may have the same cores. For times that are measured.

    Args:
        run: what the ranks of a stage do together.
        group: the ranks of this process's stage.
        peers: all processes of all stages, stage after stage.
    """
    (place, size), num_ranks, found = peers.place[:2].tolist(), int(group.place[1]), list[T]()
    if size == num_ranks:
        return run()
    for stage in range(size // num_ranks):
        if stage == place // num_ranks:
            found.append(run())
        least(0, peers)
    return found[0]


def map_memory(descriptor: int) -> Tensor:
    """The memory behind a descriptor, which is closed: ``[bytes]`` uint8, that live as long as the tensor."""
    try:
        return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def begin_rank(start: RankStart) -> RankGroup:
    """In the rank's process, first of all: it keeps to its cores, and ends when the engine's process does."""
    os.sched_setaffinity(0, start.cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    assert isinstance(start.memory, int)
    if start.shard is None:
        os.close(start.memory)
        return RankGroup.alone()
    return RankGroup.of(start.shard.rank, start.shard.size, map_memory(start.memory))


def _end_with_parent() -> None:
    """Ranks may be waiting for each other, and then read nothing from the engine."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def alike(model_files: str, on_gpu: bool = False) -> Alike:
    """Of this process. ``model_files``: their digest."""
    isa = native.best_isa() or "none, without a C++ compiler"
    sources = hashlib.sha256(json.dumps(source_digests()).encode()).hexdigest()
    gpu = described_gpu(torch.device("cuda", 0)) if on_gpu else "none"
    return Alike(__version__, sources, torch.__version__, platform.python_version(), isa, model_files, gpu)
