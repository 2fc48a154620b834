"""ModelRunner: from a step that the scheduler has chosen to tensors at fixed addresses, the run, and its results."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.ops.torch_settings import own_settings
from compiled_llm.scheduling.bucket import FILES, Bucket, choose_bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import FileResult, StepResult, Worker, WorkerFailedError
from compiled_llm.step.logprobs import LogprobRows
from compiled_llm.system.resources import release_freed_memory
from compiled_llm.worker.device import device_context
from compiled_llm.worker.draft_stage import Drafts, DraftStage
from compiled_llm.worker.launched_step import HostSlot, LaunchedStep
from compiled_llm.worker.profiler import StepProfiler
from compiled_llm.worker.sampling_stage import SamplingNeeds
from compiled_llm.worker.started_model import StartedModel

# (what a step is to do, its bucket, what runs it) -> its logits ``[L, V]``. It has to run the step once.
StepWatch = Callable[[SchedulerOutput, Bucket, Callable[[], Tensor]], Tensor]
# (what a step was to do, the tokens that it sampled ``[rows]`` int64, which may be changed)
Exchange = Callable[[SchedulerOutput, Tensor], None]


class ModelRunner(StartedModel, Worker):
    """The worker of this process: a ``StartedModel``, and how it runs steps.

    With what its start has made: ``steps``, the compiled functions of all buckets with the weights, the KV cache and
    the buffers that they read; ``rows``, what is known of the running requests; ``swap_space``, host memory for blocks,
    and ``files`` of blocks; ``adapters``; and ``read_ahead``, where weights are mapped from a file.

    Attributes:
        profiler: set from outside while steps are to be profiled.
        watch: set from outside, it runs each step, before its tokens are sampled: for checks that look on.
        exchange: set from outside, it may put others in the place of a step's tokens, before a network drafts behind
            it. The step's results are as they were.
    """

    profiler: StepProfiler | None = None
    watch: StepWatch | None = None
    exchange: Exchange | None = None
    # Rows of the last step and which of them sample, and the needs that follow: most steps have the same.
    _last_needs: tuple[Any, list[bool], SamplingNeeds] = None, [], SamplingNeeds(False, False, False)

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Hand a step to the device. On a CPU it is done when this returns; on a GPU, ``collect`` waits for it.

        One step may be launched while another is uncollected; its inputs may be tokens that the other samples.
        """
        with own_settings(self.num_threads), device_context(self.device):
            if self.read_ahead is None:
                return self._launch(output)
            with self.read_ahead.step():
                step = self._launch(output)
            if self.read_ahead.plan.ahead_bytes:
                self.times.disk_bytes = self.read_ahead.bytes_read
            return step

    def ask_for_memory(self) -> bool:
        if self.pool_pages is None:
            return False
        self.settle()
        return self.pool_pages.ask(self.rows.blocks_end)

    @property
    def is_changing(self) -> bool:
        """Whether code has still to take over, or what that freed to be given back."""
        return self.steps.is_changing or self.steps.has_changed

    def settle(self) -> None:
        """While no step runs: let code that is there take over.

        Once all has, what that and the steps before freed goes back to the system.
        """
        with contextlib.suppress(WorkerFailedError):  # which the next step raises
            self.steps.change_over()
        if self.steps.has_changed:
            self.steps.has_changed = False
            release_freed_memory()

    def _launch(self, output: SchedulerOutput) -> LaunchedStep:
        if output.files.resets and self.files is not None:
            self.files.reset()  # before blocks are copied to rows that it still reads files into, or writes from
        drafting = self.steps.drafting
        drafts_nothing = drafting is None or drafting.expect(output)
        if not output.request_ids:
            return self._move_files(output)
        preparing = time.perf_counter()
        steps, bucket = self.steps, choose_bucket(self.steps.buckets, output)
        steps.change_over()
        rows, num_rows = steps.fill(bucket, output, self.rows)
        steps.sampling.admit(output.admissions, self.rows)
        is_sampled = list(map(bool, output.num_samples))
        if self._last_needs[0] is not rows or self._last_needs[1] != is_sampled:
            self._last_needs = rows, is_sampled, SamplingNeeds.of(rows, is_sampled, self.rows)
        needs = self._last_needs[2]
        if needs.changed_logits:
            steps.sampling.fill(rows, output, self.rows, bucket.num_rows)
        prepared = time.perf_counter()
        for slot_number, digest in output.adapter_loads:
            assert self.adapters is not None
            self.adapters.load(slot_number, digest)
        steps.move_keys(output)
        moves_blocks = output.moves_blocks
        if moves_blocks:
            self.swap_space.copy(output, steps.cache_groups())
        copied = time.perf_counter()
        self._submit_files(output)
        slot = None  # on a CPU
        if self._host_slots:
            self._host_slots.rotate()
            slot = self._host_slots[0]
            slot.started.record()
        profiler = self.profiler if self.profiler is not None and self.profiler.is_due(bucket.name) else None
        take_back = None if profiler is None else steps.undo(bucket)  # a step that is profiled runs twice
        used = steps.used_experts
        if used is not None:
            used.zero_()  # the step counts them
        around = None if self.watch is None else functools.partial(self.watch, output, bucket)
        logprobs = steps.run(bucket, needs, around)
        tokens = steps.last_tokens.numpy()[:num_rows].copy() if slot is None else self._tokens_in(slot, bucket)
        if slot is not None and logprobs is not None:
            logprobs = LogprobRows(*(tensor.to("cpu", non_blocking=True) for tensor in logprobs))
        prompt_logprobs = (
            steps.sampling.prompt_logprobs(steps.weights, output, self.rows) if output.prompt_targets else None
        )
        num_experts = None if used is None else used.to("cpu", non_blocking=True, copy=True)
        step = LaunchedStep(bucket, num_rows, tokens, logprobs, prompt_logprobs, slot=slot, num_experts=num_experts)
        step.num_requests = len(rows)
        if drafting is not None:
            if slot is not None:
                slot.sampled.record()
            if not drafts_nothing:
                if self.exchange is not None:
                    self.exchange(output, steps.last_tokens)
                began = time.perf_counter()
                step.drafts = self._run_drafter(drafting, output, bucket, rows, slot)
                step.draft_seconds = time.perf_counter() - began
        finished = time.perf_counter()
        if slot is not None:
            slot.ended.record()
            self.times.launch_seconds += finished - prepared
        self.times.prepare_seconds += prepared - preparing
        self.times.execute_seconds += finished - prepared
        self.times.num_padding_tokens += steps.buffers[bucket].num_tokens - output.num_tokens
        if profiler is not None and take_back is not None:
            if slot is not None:
                slot.ended.synchronize()
                step.tokens = torch.as_tensor(tokens).clone()  # the step is repeated, and may leave others
            profiler.repeat(steps, bucket, needs, take_back)
        step.seconds = finished - copied
        step.copy_seconds = copied - prepared if moves_blocks and slot is None else 0.0
        return step

    def _move_files(self, output: SchedulerOutput) -> LaunchedStep:
        """A step without requests: blocks go down, and files are read and written."""
        began = time.perf_counter()
        if output.moves_blocks:
            self.swap_space.copy(output, self.steps.cache_groups())
        copied = time.perf_counter() - began if self.device.type == "cpu" else 0.0
        self._submit_files(output)
        step = LaunchedStep(FILES, 0, torch.empty(0, dtype=torch.int64))
        step.copy_seconds, step.wait_seconds = copied, output.files.wait_seconds
        return step

    def _submit_files(self, output: SchedulerOutput) -> None:
        """Begin to read and write files, behind the copies of a step that were just launched."""
        files = output.files
        if files.reads and (drafting := self.steps.drafting) is not None:
            drafting.lack_on_host([row for _, row, _ in files.reads if row > 0])  # the others are of states
        if self.files is None or not (files.reads or files.writes):
            return
        wait: Callable[[], object] = int  # on a CPU copies are done
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            wait = event.synchronize
        self.files.submit(files, wait)

    def _tokens_in(self, slot: HostSlot, bucket: Bucket) -> Tensor:
        """The tokens of the step that was just launched on a GPU, on their way to the host."""
        written = self.steps.tokens_of_step(bucket)
        if written is not None:  # by the graph itself
            return written
        return slot.tokens.copy_(self.steps.last_tokens, non_blocking=True)

    def _run_drafter(
        self, drafting: DraftStage, output: SchedulerOutput, bucket: Bucket, rows: np.ndarray, slot: HostSlot | None
    ) -> Drafts | None:
        """Let a network draft. The drafts are on their way to the host."""
        drafts = drafting.run(output, bucket, rows, self.rows)
        if drafts is None:
            return None
        if slot is None:
            return drafts._replace(token_ids=drafting.token_ids[: len(drafts.places)].numpy().copy())
        assert slot.drafts is not None
        slot.drafts.copy_(drafting.token_ids, non_blocking=True)
        return drafts._replace(token_ids=slot.drafts)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a step, and return its results."""
        waiting = time.perf_counter()
        step.wait()
        self.times.execute_seconds += time.perf_counter() - waiting
        if not self.swap_space.num_tier_blocks:
            return step.result()
        files = FileResult() if self.files is None else self.files.take_result(step.wait_seconds)
        if step.bucket is FILES:
            step.seconds = time.perf_counter() - waiting
        return dataclasses.replace(step.result(), files=files._replace(copy_seconds=step.copy_seconds))
