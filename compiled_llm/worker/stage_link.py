"""Stages in their processes: what one is told at its start, and how the residual stream comes from one to the next.

Memory without a name holds the streams of the steps in flight, a slot each; a pipe says which step's is there, or that
the step failed. A slot is free again once the engine has the results of its step from all stages.
"""

import contextlib
import os
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

from torch import Tensor

from compiled_llm.ops import RankGroup, native
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.worker.launched_step import LaunchedStep
from compiled_llm.worker.rank_start import Inherited, map_memory
from compiled_llm.worker.runner import ModelRunner

_MESSAGE = struct.Struct("<qq")  # number of a step, tokens of its bucket; no tokens: it failed


class SkippedError(RuntimeError):
    """A stage does not run a step, since another failed in it or in one before."""


class LinkEnd(NamedTuple):
    """A stage's end of what leads to another: a pipe, and the descriptor of the memory."""

    pipe: Connection
    memory: Inherited | int


class StageStart(NamedTuple):
    """Of one process of a stage.

    Attributes:
        place: of the process among all of all stages; ``num_processes``: how many these are.
        peers: the descriptor of the memory in which all agree.
        receives, sends: None where no stage comes before, or after.
        num_slots: of the memory of links: one more than steps in flight.
        takes_turns: whether the stages before and after compute on the same cores.
    """

    place: int
    num_processes: int
    peers: Inherited | int
    receives: LinkEnd | None
    sends: LinkEnd | None
    num_slots: int
    takes_turns: bool

    def group(self) -> RankGroup:
        """All processes of all stages. Once, in the process itself."""
        assert isinstance(self.peers, int)
        return RankGroup.of(self.place, self.num_processes, map_memory(self.peers))


class Stage:
    """A stage's runner, with its links.

    After a step that failed, here or before, no step runs until one begins with nothing known of any request: what
    blocks and tables hold is not what the scheduler takes it to be.
    """

    def __init__(self, start: StageStart, runner: ModelRunner) -> None:
        hidden = runner.steps.hidden
        self._runner, self._num_slots = runner, start.num_slots
        self._receives, self._sends = (
            None if end is None else (end.pipe, _slots(end.memory, start.num_slots, hidden))
            for end in (start.receives, start.sends)
        )
        self._number, self._is_broken, self._is_sent = -1, False, False
        # Seconds of the step that runs: for the stage before, and from its stream until the own one is sent.
        self._waited = self._computed = 0.0
        # g++ makes one team of the threads of all ops: any of its libraries will do. All models have loaded this one.
        self._kernels = native.load("rowwise_cpu") if start.takes_turns else None
        runner.watch = self._between

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """As ``ModelRunner.launch``. Each stage gets all steps, in one order."""
        self._number, self._waited, self._computed, self._is_sent = self._number + 1, 0.0, 0.0, False
        self._is_broken &= not output.resets
        try:
            if self._is_broken:
                raise SkippedError("a step before has failed")
            step = self._runner.launch(output)
        except BaseException:
            self._is_broken = True
            if self._sends is not None and not self._is_sent:
                self._say(0)
            raise
        # Once the stream is sent the next stage computes, perhaps on the same cores. What follows here takes no part.
        seconds = step.seconds - self._waited if self._sends is None else self._computed
        self._runner.times.execute_seconds += seconds - step.seconds
        step.seconds = seconds
        if self._kernels is not None:
            self._kernels.rest()
        return step

    def _between(self, output: SchedulerOutput, bucket: Bucket, run: Callable[[], Tensor]) -> Tensor:
        """Run the stage's layers between the stages before and after."""
        if self._receives is not None:
            self._receive(self._runner.steps.buffers[bucket].num_tokens)
        began = time.perf_counter()
        result = run()
        if self._sends is not None:  # the last stage samples first, and rests then
            if self._kernels is not None:
                self._kernels.rest()
            slot = self._sends[1][self._number % self._num_slots]
            slot[: len(result)] = result
            self._computed = time.perf_counter() - began
            self._say(len(result))
        return result

    def _receive(self, expected: int) -> None:
        """Take the stream of so many tokens."""
        assert self._receives is not None
        pipe, slots = self._receives
        began, number, num_tokens = time.perf_counter(), -1, 0
        while number < self._number:  # of steps that were not run here
            number, num_tokens = _MESSAGE.unpack(pipe.recv_bytes())
        self._waited = time.perf_counter() - began
        if not num_tokens:
            raise SkippedError("the stage before has failed")
        assert (number, num_tokens) == (self._number, expected), "stages run different steps"
        self._runner.steps.hidden[:num_tokens] = slots[number % self._num_slots, :num_tokens]

    def _say(self, num_tokens: int) -> None:
        assert self._sends is not None
        self._is_sent = True
        with contextlib.suppress(BrokenPipeError):  # the engine tells of a stage that has ended
            self._sends[0].send_bytes(_MESSAGE.pack(self._number, num_tokens))


def _slots(descriptor: Inherited | int, count: int, hidden: Tensor) -> Tensor:
    """The memory of a link: ``[count, T, D]`` as ``hidden`` is."""
    assert isinstance(descriptor, int)
    os.ftruncate(descriptor, count * hidden.nbytes)  # by both ends, to the same size
    return map_memory(descriptor).view(hidden.dtype).view(count, *hidden.shape)
