"""StageProcesses: the processes of pipeline parallelism, which the engine takes for one worker.

Every stage gets every step, and runs its own layers of it once the stage before has. The last one samples. Where stages
have cores of their own, on NUMA nodes of their own, steps of other requests are in the others meanwhile. On a machine
with one memory they take turns with all its cores: a step of all requests, which reads each weight once, goes through
all stages. Two steps of half the requests would each read all weights, beside each other, from the same memory.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import psutil
import torch
from torch import Tensor

from compiled_llm.api.config import EngineConfig
from compiled_llm.compiling.report import CompileReport
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.sharding import Shard
from compiled_llm.models.stages import balanced, check_stages
from compiled_llm.ops.parallel.rank_group import abort, bytes_for, meetings
from compiled_llm.parallel import rank_processes
from compiled_llm.parallel.layer_costs import layer_costs
from compiled_llm.parallel.rank_processes import PIECE_BYTES, RankProcesses
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult, WorkerFacts
from compiled_llm.system.numa import cores_of_stages
from compiled_llm.system.progress import StartProgress
from compiled_llm.system.resources import granted_cores
from compiled_llm.worker.device import resolve_device
from compiled_llm.worker.rank_gpus import check_ranks_on_gpus
from compiled_llm.worker.rank_start import Inherited, RankStart, map_memory
from compiled_llm.worker.stage_link import LinkEnd, SkippedError, StageStart
from compiled_llm.worker.worker_process import Failure, Followed, WorkerProcess, digest_of

_LINE = 128  # bytes that processes exchange to agree


class StageProcesses(RankProcesses):
    """A ``WorkerProcess`` for each of ``config.pipeline_parallel_size`` stages, or ``tensor_parallel_size`` of them.

    Attributes:
        ranks: the processes, stage after stage.
        layers: of each stage, its first layer and the one behind its last.
        num_threads: of the stages that compute at once.
        steps_at_once: that stages can compute, since each has cores of its own. Where stages share the cores of a
            memory, one after the other computes the same step, with all of them.

    Raises:
        ValueError: as ``RankProcesses``; or the model cannot be cut so.
        WorkerFailedError: a stage's process ended or hung, or ranks of a stage are not alike; the message names it.
    """

    _alike = ("limits", "dtype")

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        progress: StartProgress,
        num_draft_tokens: int = 0,
    ) -> None:
        self.num_stages, self.num_ranks = config.pipeline_parallel_size, config.tensor_parallel_size
        if resolve_device(config.device).type == "cuda":
            check_ranks_on_gpus(config)
        check_stages(model_config, self.num_stages)
        size = self.num_stages * self.num_ranks
        cores, self.steps_at_once = cores_of_stages(self.num_stages, self.num_ranks)
        if len({core for own in cores[: self.num_ranks] for core in own}) < self.num_ranks:
            progress.line(f"{self.num_ranks} ranks of a stage share fewer cores, which they wait for in turns")
        takes_turns = self.steps_at_once < self.num_stages
        threads = config.num_threads or min(torch.get_num_threads(), len(cores[0]), granted_cores())  # as stages do
        costs = layer_costs(config, model_config, directory, progress, threads)
        self.layers = balanced(model_config, costs, self.num_stages) or []
        of_stages = ", ".join(f"{first} to {end - 1}" for first, end in self.layers)
        progress.line(f"layers of {self.num_stages} stages: {of_stages}")
        self._is_started, self._failure = False, ""
        self._failed: tuple[int, Failure] | None = None
        self._inbox: list[deque[Any]] = [deque() for _ in range(size)]
        self._progress: tuple[float, Any] = 0.0, None
        self.ranks: list[WorkerProcess] = []
        quiet = dataclasses.replace(config, progress="off")
        with contextlib.ExitStack() as opened:  # what this process needs no more once all are started
            try:
                peers, self._memory = _memory(bytes_for(size, _LINE), opened)
                groups = [_memory(bytes_for(self.num_ranks, PIECE_BYTES), opened) for _ in range(self.num_stages)]
                self._of_stages = [memory for _, memory in groups]
                links = [[_link(opened) for _ in range(self.num_ranks)] for _ in range(self.num_stages - 1)]
                for place, own in enumerate(cores):
                    stage, rank = divmod(place, self.num_ranks)
                    receives = links[stage - 1][rank][0] if stage else None
                    sends = links[stage][rank][1] if stage + 1 < self.num_stages else None
                    linked = StageStart(
                        place, size, Inherited(peers), receives, sends, self.steps_at_once + 1, takes_turns
                    )
                    shard = None
                    if self.num_ranks > 1 or config.tensor_parallel_exact:
                        shard = Shard(rank, self.num_ranks, config.tensor_parallel_exact, config.enable_expert_parallel)
                    start = RankStart(shard, Inherited(groups[stage][0]), tuple(own), self._name(place), linked)
                    staged = dataclasses.replace(model_config, own_layers=self.layers[stage])
                    of_all = staged, directory, num_draft_tokens, None, start
                    self.ranks.append(WorkerProcess(quiet if place else config, *of_all))
                opened.close()
                self._start()
            except BaseException:
                self._end(kill=True)
                raise

    def _start(self) -> None:
        super()._start()
        firsts = self.ranks[:: self.num_ranks]
        self.num_threads = self.num_threads * self.steps_at_once // self.num_stages
        self.limits = dataclasses.replace(self.limits, steps_at_once=self.steps_at_once)
        self.facts = dataclasses.replace(_facts([process.facts for process in firsts]), limits=self.limits)
        self.cache_dtypes = tuple(dtype for process in firsts for dtype in process.cache_dtypes)
        self.transforms = self.ranks[-1].transforms

    def launch(self, output: SchedulerOutput) -> int:
        """As ``RankProcesses.launch``. Behind a failure, once nothing that nobody collects is left in any stage."""
        if output.resets:  # else such a step could be told of a slot that is written again
            self._check()
            for process in self.ranks:
                process.drop_results()
        return super().launch(output)

    def collect(self, step: int) -> StepResult:
        """Wait for a step of all stages.

        Raises:
            RuntimeError: a stage failed, and goes on with a step that begins with no request.
        """
        self._check()
        results = [process.result(step) for process in self.ranks]
        failures = {place: result for place, result in enumerate(results) if isinstance(result, Failure)}
        causes = [place for place, failure in failures.items() if failure.kind != SkippedError.__name__]
        if failures:
            place = min(causes or failures)
            first = place // self.num_ranks * self.num_ranks
            if not all(other in failures for other in range(first, first + self.num_ranks)):
                self._fail(place, f"{self._name(place)} failed: {failures[place].kind}: {failures[place].text}")
            raise failures[place].error()
        of_stages = [results[first : first + self.num_ranks] for first in range(0, len(results), self.num_ranks)]
        for stage, (first_of, *others) in enumerate(of_stages):
            for rank, other in enumerate(others, 1):
                if cast(Followed, other).digest != digest_of(cast(StepResult, first_of)):
                    self._fail(stage * self.num_ranks + rank, f"{self._name(stage * self.num_ranks + rank)} drifts")
        firsts = [cast(StepResult, own[0]) for own in of_stages]
        return dataclasses.replace(
            firsts[-1],
            seconds=sum(result.seconds for result in firsts),
            num_experts=sum(result.num_experts for result in firsts),
        )

    def compile_report(self) -> CompileReport:
        """What compiling each function gave, in each process."""
        return CompileReport(
            tuple(
                dataclasses.replace(one, name=f"{one.name} ({self._name(place)})")
                for place, process in enumerate(self.ranks)
                for one in process.compile_report().reports
            )
        )

    def describe_start(self) -> str:
        """What the start of the first process did, in a line."""
        of_each = f"{self.num_ranks} ranks of " if self.num_ranks > 1 else ""
        threads = self.ranks[0].num_threads
        return f"{self.ranks[0].describe_start()}; {self.num_stages} stages of {of_each}{threads} threads"

    def _name(self, place: int) -> str:
        stage, rank = divmod(place, self.num_ranks)
        return f"stage {stage}" if self.num_ranks == 1 else f"stage {stage}, rank {rank}"

    # -- Watching

    def _watch(self) -> None:
        """No message came: look whether a stage gets on, by the processor time of its process.

        Ranks that wait for each other use it as well: of these it is known how often they have met.
        """
        since, before = self._progress
        now = time.monotonic()
        if self.num_ranks > 1:
            works = [count for memory in self._of_stages for count in meetings(memory, self.num_ranks)]
        else:
            works = [_processor_seconds(process.pid) for process in self.ranks]
        if works != before:
            self._progress = (now if before is not None else since), works
            return
        if now - since > rank_processes.HANG_SECONDS:
            # Those behind it wait for it, and those before it have done more.
            done = [process.num_received + len(inbox) for process, inbox in zip(self.ranks, self._inbox, strict=True)]
            places = [place for place, count in enumerate(done) if count == min(done)]
            stage = places[0] // self.num_ranks
            of_stage = [place for place in places if place // self.num_ranks == stage]
            place = min(of_stage, key=works.__getitem__)
            self._fail(place, f"{self._name(place)} hangs: it has done nothing for {now - since:.0f} s")

    def _fail(self, rank: int, reason: str) -> NoReturn:
        for memory in self._of_stages:
            abort(memory, rank)
        super()._fail(rank, reason)


def _memory(size: int, opened: contextlib.ExitStack) -> tuple[int, Tensor]:
    """Memory without a name: its descriptor, until ``opened`` is closed, and the bytes."""
    descriptor = os.memfd_create("compiled-llm-stages")
    opened.callback(os.close, descriptor)
    os.ftruncate(descriptor, size)
    return descriptor, map_memory(os.dup(descriptor))


def _link(opened: contextlib.ExitStack) -> tuple[LinkEnd, LinkEnd]:
    """The ends of what leads from a stage to the next: of the one that receives, and of the one that sends."""
    descriptor = os.memfd_create("compiled-llm-link")
    opened.callback(os.close, descriptor)
    receiving, sending = multiprocessing.get_context("spawn").Pipe(duplex=False)
    for pipe in (receiving, sending):
        opened.callback(pipe.close)
    return LinkEnd(receiving, Inherited(descriptor)), LinkEnd(sending, Inherited(descriptor))


def _facts(facts: Sequence[WorkerFacts]) -> WorkerFacts:
    """What the scheduler has to know, of the facts of each stage: times are those of all, one after the other."""

    def total(name: str) -> tuple[Any, ...]:
        columns = [dict(getattr(each, name)) for each in facts]
        return tuple((key, sum(column[key] for column in columns)) for key in columns[0])

    sums: dict[str, Any] = {name: total(name) for name in ("bucket_seconds", "decode_seconds", "sampling_seconds")}
    swap_seconds = sum(each.swap_seconds for each in facts)
    return dataclasses.replace(facts[0], **sums, swap_seconds=swap_seconds)


def _processor_seconds(pid: int) -> int:
    """That a process has used, in whole seconds."""
    with contextlib.suppress(psutil.Error):
        used = psutil.Process(pid).cpu_times()
        return int(used.user + used.system)
    return 0
