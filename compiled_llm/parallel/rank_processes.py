"""RankProcesses: the processes of tensor parallelism, which the engine takes for one worker.

Every rank gets every step. All have the same logits, so all sample the same tokens: those of rank 0 count, and digests
of the others' are compared with them. A rank that ends, hangs or drifts apart ends the whole; the error names it.
"""

import contextlib
import dataclasses
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from compiled_llm.adapters.host_adapters import HostAdapters, readable
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.draft_model import DraftCheckpoint
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.compiling.report import CompileReport
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.sharding import Shard
from compiled_llm.ops.parallel.rank_group import abort, bytes_for, gpu_counts, meetings
from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult, Worker, WorkerFailedError
from compiled_llm.system.numa import cores_of_ranks
from compiled_llm.system.progress import StartProgress
from compiled_llm.tiers.file_thread import FileThread
from compiled_llm.worker.device import resolve_device
from compiled_llm.worker.memory import MemoryLedger
from compiled_llm.worker.message import Message
from compiled_llm.worker.rank_gpus import GpuOfRank, check_ranks_on_gpus, gpus_of_ranks
from compiled_llm.worker.rank_start import Alike, Inherited, RankStart, map_memory
from compiled_llm.worker.shared_rows import map_pools
from compiled_llm.worker.tier_files import open_files
from compiled_llm.worker.times import RunnerTimes
from compiled_llm.worker.worker_process import (
    COMPILED_AGAIN,
    UNCOMPILE,
    Answer,
    Failure,
    Followed,
    WorkerProcess,
    digest_of,
)

PIECE_BYTES = 1 << 18  # that ranks exchange at once: few enough for a core's own cache
HANG_SECONDS = 60.0  # without a piece or a message of any rank, while a step runs
FAILED_SECONDS = 5.0  # the same once a rank has failed in the step
_LOOK_SECONDS = 0.5
T = TypeVar("T")


class RankProcesses(Worker):
    """A ``WorkerProcess`` for each rank of ``config.tensor_parallel_size``.

    The memory that ranks share has no name, and is gone with the last process that has it.

    Attributes:
        ranks: the processes.
        facts, limits, device and so on: those of rank 0. weight_bytes, kv_cache_bytes, num_threads: of all ranks.
        gpus: of the ranks; empty: they run on CPUs.
        files: of blocks of all ranks, whose rows of host memory are this process's, too; None: there are none.
        profiler: none can look on.
        adapters: those that this process has read. A rank gets an adapter whole before the step that it is needed in.

    Raises:
        ValueError: as ``ModelRunner``; or the ranks are not alike, with what differs.
        WorkerFailedError: a rank ended, hung, or sampled another token than rank 0. So do ``launch`` and ``collect``,
            and again each time; the message names the rank. All processes have ended then.
    """

    profiler: None = None
    gpus: Sequence[GpuOfRank] = ()
    files: FileThread | None = None
    adapters: HostAdapters | None = None
    _alike: tuple[str, ...] = ("limits", "dtype", "cache_dtypes")  # in all processes, besides the blocks of pools

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        progress: StartProgress,
        num_draft_tokens: int = 0,
        drafter: DraftCheckpoint | None = None,
    ) -> None:
        size, cores = config.tensor_parallel_size, cores_of_ranks(config.tensor_parallel_size)
        self.gpus = rank_gpus(config)
        if len({core for own in cores for core in own}) < size:
            progress.line(f"tensor_parallel_size={size} processes share fewer cores, which they wait for in turns")
        self._is_started, self._failure = False, ""
        self._failed: tuple[int, Failure] | None = None  # in a step that is not collected yet
        self._inbox: list[deque[Any]] = [deque() for _ in range(size)]
        self._progress: tuple[float, Any] = 0.0, None  # since when ranks have been where they are
        self.ranks: list[WorkerProcess] = []
        self._idle_seconds: dict[int, float] = {}  # step -> how long it may wait for files
        quiet = dataclasses.replace(config, progress="off")
        descriptor, meeting = os.memfd_create("compiled-llm-ranks"), os.memfd_create("compiled-llm-meeting")
        rows = os.memfd_create("compiled-llm-rows") if config.has_files else None
        try:
            os.ftruncate(descriptor, bytes_for(size, PIECE_BYTES))
            self._memory = map_memory(os.dup(descriptor))
            for rank, own in enumerate(cores):
                shard = Shard(rank, size, config.tensor_parallel_exact, config.enable_expert_parallel)
                of_rows = None if rows is None else Inherited(rows)
                start = RankStart(shard, Inherited(descriptor), tuple(own), f"rank {rank}", rows=of_rows)
                told = quiet if rank else config
                if self.gpus:
                    start = start._replace(gpu=self.gpus[rank], meeting=Inherited(meeting))
                    told = dataclasses.replace(told, device="cuda")  # the first that it sees
                self.ranks.append(WorkerProcess(told, model_config, directory, num_draft_tokens, drafter, start))
            self._start()
            if config.enable_lora:
                self.adapters = readable(
                    linears_of(config, model_config, self.device, self.dtype), config, model_config, self.dtype
                )
            if rows is not None:  # last: a thread and a socket would outlive what fails behind it
                self._open_files(config, model_config, directory, drafter, os.dup(rows))
        except BaseException:
            self._end(kill=True)
            raise
        finally:
            for one in (descriptor, meeting, *([] if rows is None else [rows])):
                os.close(one)

    def _start(self) -> None:
        self._poll = select.poll()
        for number, process in enumerate(self.ranks):
            self._poll.register(process.connection, select.POLLIN)
            process.receive = lambda number=number: self._receive(number)  # type: ignore[misc]
        self._of_descriptor = {process.connection.fileno(): n for n, process in enumerate(self.ranks)}
        check_alike([process.alike() for process in self.ranks])
        for process in self.ranks:
            process.go()
        for process in self.ranks:
            process.start()
        first = self.ranks[0]
        for name in self._alike:
            check_equal(name, [getattr(process, name) for process in self.ranks])
        check_equal("blocks of pools", [_pools(process) for process in self.ranks])
        self.facts, self.limits, self.device, self.dtype = first.facts, first.limits, first.device, first.dtype
        self.facts = dataclasses.replace(
            first.facts,
            host_block_bytes=sum(process.facts.host_block_bytes for process in self.ranks),
            host_slot_bytes=sum(process.facts.host_slot_bytes for process in self.ranks),
        )
        self.cache_dtypes, self.exact, self.transforms = first.cache_dtypes, first.exact, first.transforms
        self.start_times = first.start_times
        self.num_threads = sum(process.num_threads for process in self.ranks)
        self.weight_bytes = sum(process.weight_bytes for process in self.ranks)
        self.kv_cache_bytes = sum(process.kv_cache_bytes for process in self.ranks)
        devices = 1 if not self.gpus or self.gpus[0].shared else len(self.ranks)
        self.memory_ledger = MemoryLedger.of_ranks([process.memory_ledger for process in self.ranks], devices)
        self._is_started = True

    def _open_files(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        drafter: DraftCheckpoint | None,
        descriptor: int,
    ) -> None:
        """Files and other engines are this process's: in the rows of all ranks, blocks are whole."""
        first, facts = self.ranks[0], self.ranks[0].facts
        blocks, slots = facts.num_swap_blocks + facts.num_tier_blocks, facts.num_swap_slots + facts.num_tier_slots
        counts = [*(blocks for _ in first.host_layout[:-1]), slots]
        pools = map_pools(descriptor, first.host_layout, counts)
        of_model = model_config, first.dtype, first.exact, directory, drafter
        with own_settings(first.num_threads):
            self.files = open_files(config, *of_model, first.device, first.host_layout, pools)
        self.facts = dataclasses.replace(
            facts,
            block_contents=(self.files.folder.key.hex(),),
            blocks_on_disk=tuple(self.files.folder.known),
        )

    # -- Steps

    def launch(self, output: SchedulerOutput) -> int:
        """Send a step to all ranks. Its number, from 0, is what ``collect`` takes."""
        self._check()
        if output.adapter_loads:
            assert self.adapters is not None
            loaded = [self.adapters.known(digest) for _, digest in output.adapter_loads]
            self._send(loaded, WorkerProcess.send_message)
        if self.files is not None:
            if output.files.resets:
                self._settle()
                self.files.reset()
            if output.files.reads or output.files.writes:
                self.files.submit(output.files, int)  # no step that is under way uses these rows
        step = self._send(output, WorkerProcess.launch_message)[0]
        if self.files is not None:
            self._idle_seconds[step] = output.files.wait_seconds
        return step

    def _settle(self) -> None:
        """Steps that nobody collects any more have ended in all ranks: what they copied to is free."""
        for process in self.ranks:
            process.drop_results()
        self._idle_seconds.clear()
        self._failed = None  # an error in one of them is no reason to be short with the next step

    def _send(self, content: Any, how: Callable[[WorkerProcess, Message], T]) -> list[T]:
        """To all ranks, packed once."""
        with contextlib.closing(Message(content)) as message:
            given = []
            for number, process in enumerate(self.ranks):
                try:
                    given.append(how(process, message))
                except RuntimeError:
                    self._end_of(number)
        return given

    def collect(self, step: int) -> StepResult:
        """Wait for a step of all ranks.

        Raises:
            RuntimeError: all failed in the same way, and go on.
        """
        self._check()
        idle_seconds = self._idle_seconds.pop(step, 0.0)
        results = [process.result(step) for process in self.ranks]
        first, *others = results
        failed = [number for number, result in enumerate(results) if isinstance(result, Failure)]
        if failed:
            failure = results[failed[0]]
            assert isinstance(failure, Failure)
            alike = len(failed) == len(results) and len(set(self._pieces())) == 1
            # How far GPUs had come is known too late: that of one may wait for another's, which never comes so far.
            texts = {(one.kind, one.text) for one in results if isinstance(one, Failure)}
            if not alike or (self.gpus and len(texts) > 1):
                self._fail(failed[0], f"rank {failed[0]} failed: {failure.kind}: {failure.text}")
            self._failed = None
            raise failure.error()
        self._failed = None
        assert isinstance(first, StepResult)
        digest = digest_of(first)
        for number, other in enumerate(others, 1):
            assert isinstance(other, Followed)
            if other.digest != digest:
                self._fail(number, f"rank {number} sampled other tokens than rank 0")
        if self.files is None or first.files is None:  # no files, or no room for a block in host memory
            return first
        began = time.perf_counter()
        files = self.files.take_result(idle_seconds)._replace(copy_seconds=first.files.copy_seconds)
        waited = time.perf_counter() - began if idle_seconds else 0.0
        return dataclasses.replace(first, files=files, seconds=first.seconds + waited)

    def close(self) -> None:
        """End the processes. What they last said of themselves stays."""
        if self.files is not None:
            self.files.close()
            self.files = None
        if not self._failure:
            self.compile_report()
        self._failure = self._failure or "the processes of all ranks are closed"
        self._end()

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Steps run uncompiled meanwhile, as ``ModelRunner.uncompiled`` says."""
        self._ask(UNCOMPILE)
        try:
            yield
        finally:
            self._ask(COMPILED_AGAIN)

    # -- What they are and did

    @property
    def times(self) -> RunnerTimes:
        """Of rank 0."""
        return self.ranks[0].times

    def compile_report(self) -> CompileReport:
        """What compiling each function gave, in each rank."""
        reports = [process.compile_report().reports for process in self.ranks]
        named = [
            dataclasses.replace(one, name=f"{one.name} (rank {rank})")
            for rank, of_rank in enumerate(reports)
            for one in of_rank
        ]
        return CompileReport(tuple(named))

    def describe_start(self) -> str:
        """What the start of rank 0 did, in a line."""
        threads = self.ranks[0].num_threads
        return f"{self.ranks[0].describe_start()}; {len(self.ranks)} ranks of {threads} threads"

    # -- Messages

    def _ask(self, what: str) -> None:
        """Ask all, then wait: what they do about it they may do together."""
        self._check()
        for process in self.ranks:
            process.send(what)
        for process in self.ranks:
            process.answer()

    def _receive(self, rank: int) -> Any:
        """The next message of a rank. Those that others send meanwhile are kept."""
        self._progress = time.monotonic(), None
        while not self._inbox[rank]:
            self._check()
            ready = self._poll.poll(1000 * _LOOK_SECONDS)
            for descriptor, _ in ready:
                self._take(self._of_descriptor[descriptor])
            if not ready and self._is_started:
                self._watch()
        return self._inbox[rank].popleft()

    def _take(self, rank: int) -> None:
        try:
            message = self.ranks[rank].connection.recv()
        except (EOFError, OSError):
            self._end_of(rank)
        if not self._is_started and isinstance(message, Answer) and isinstance(message.value, Failure):
            raise message.value.error()  # the others may be waiting for it
        if isinstance(message, Failure) and self._failed is None:
            self._failed = rank, message
        self._inbox[rank].append(message)
        self._progress = time.monotonic(), None

    def _watch(self) -> None:
        """No message came: look whether the ranks get on."""
        since, before = self._progress
        now, pieces = time.monotonic(), self._counts()
        if pieces != before:
            self._progress = (now if before is not None else since), pieces
            return
        if self._failed is not None and now - since > FAILED_SECONDS:
            rank, failure = self._failed
            self._fail(rank, f"rank {rank} failed: {failure.kind}: {failure.text}")
        if now - since > HANG_SECONDS:
            silent = [rank for rank, inbox in enumerate(self._inbox) if not inbox]
            rank = min(silent, key=pieces.__getitem__)
            self._fail(rank, f"rank {rank} hangs: it has done nothing for {now - since:.0f} s")

    def _pieces(self) -> list[int]:
        return meetings(self._memory, len(self.ranks))

    def _counts(self) -> list[int]:
        """How far each rank has come in its steps."""
        return gpu_counts(self._memory, len(self.ranks)) if self.gpus else self._pieces()

    # -- Ends

    def _check(self) -> None:
        if self._failure:
            raise WorkerFailedError(self._failure)

    def _end_of(self, rank: int) -> NoReturn:
        """A rank's process has ended."""
        self._fail(rank, str(self.ranks[rank].ended()))

    def _fail(self, rank: int, reason: str) -> NoReturn:
        abort(self._memory, rank)
        self._failure = f"{reason}. The engine serves nothing any more"
        self._end(kill=True)
        self._check()
        raise AssertionError

    def _end(self, *, kill: bool = False) -> None:
        for process in self.ranks:
            process.connection.close()
        for process in self.ranks:
            process.end(kill=kill)


def rank_gpus(config: EngineConfig) -> Sequence[GpuOfRank]:
    """Of each rank, if ``config`` asks for GPUs; ``ValueError`` where they cannot be had."""
    if resolve_device(config.device).type != "cuda":
        return ()
    check_ranks_on_gpus(config)
    return gpus_of_ranks(config.device, config.tensor_parallel_size)


def check_alike(ranks: Sequence[Alike]) -> None:
    """``ValueError`` if one differs from rank 0."""
    for name in Alike._fields:
        check_equal(name.replace("_", " "), [getattr(rank, name) for rank in ranks])


def check_equal(name: str, values: Sequence[Any]) -> None:
    """``ValueError`` if the value of some rank is not that of rank 0, with both."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"all ranks must have the same {name}: rank 0 has {values[0]}, rank {rank} has {value}. Start the "
                "engine again, while nothing changes its files or packages"
            )


def _pools(process: WorkerProcess) -> tuple[Any, ...]:
    facts = process.facts
    below = facts.num_tier_blocks, facts.num_tier_slots
    return (
        facts.num_blocks,
        facts.num_swap_blocks,
        facts.window_places,
        facts.num_state_slots,
        facts.num_swap_slots,
        below,
    )
