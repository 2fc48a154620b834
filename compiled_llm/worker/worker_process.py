"""WorkerProcess: a ModelRunner in another process, which gets steps and returns results through a pipe."""

import contextlib
import dataclasses
import multiprocessing
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.checkpoint.digests import model_digest
from compiled_llm.checkpoint.draft_model import DraftCheckpoint
from compiled_llm.compiling.report import CompileReport
from compiled_llm.models.config import ModelConfig
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import LOOK_SECONDS, StepResult, Worker, WorkerFacts, WorkerFailedError
from compiled_llm.step.logits_transforms import load_transforms
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.block_copies import Layout
from compiled_llm.worker.memory import MemoryLedger
from compiled_llm.worker.message import Message, receive
from compiled_llm.worker.rank_gpus import GpuProgress, Launch, seen_by_children
from compiled_llm.worker.rank_start import Alike, Inherited, RankStart, alike, begin_rank
from compiled_llm.worker.runner import ModelRunner
from compiled_llm.worker.stage_link import Stage, StageStart
from compiled_llm.worker.times import RunnerTimes, StartTimes

_SECONDS_TO_END = 30.0


class Failure(NamedTuple):
    """An error of the worker: an error itself may not survive pickling."""

    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """One of the kinds that the engine tells apart, as it was; else a ``RuntimeError`` that names the kind."""
        known = {kind.__name__: kind for kind in (ValueError, RuntimeError, WorkerFailedError)}.get(self.kind)
        error = RuntimeError(f"{self.kind}: {self.text}") if known is None else known(self.text)
        error.add_note(f"in the worker process:\n{self.trace}")
        return error


class _State(NamedTuple):
    """What a worker says of itself at any time, in answer to ``_ASK``."""

    times: RunnerTimes
    compile_report: CompileReport


class _Start(NamedTuple):
    """What a worker says of itself once it has started; names are those of ``ModelRunner``."""

    facts: WorkerFacts
    limits: EngineLimits
    device: torch.device
    dtype: torch.dtype
    cache_dtypes: tuple[torch.dtype, ...]
    exact: str
    num_threads: int
    weight_bytes: int
    kv_cache_bytes: int
    start_times: StartTimes
    memory_ledger: MemoryLedger
    host_layout: Layout
    description: str
    state: _State

    @classmethod
    def of(cls, runner: ModelRunner) -> "_Start":
        own = {name: getattr(runner, name) for name in cls._fields if name not in ("description", "state")}
        return cls(**own, description=runner.describe_start(), state=_state_of(runner))


def _state_of(runner: ModelRunner) -> _State:
    return _State(dataclasses.replace(runner.times), runner.compile_report())


# What is told to a rank once all are alike, and what is asked of a worker besides steps.
_GO = "start"
_ASK, UNCOMPILE, COMPILED_AGAIN = "its state", "uncompiled steps", "compiled steps"


class WorkerProcess(Worker):
    """Starts a process with a ``ModelRunner`` of these arguments, and speaks to it.

    Steps run in the order of their launch, and ``launch`` does not wait for them. The process ends with ``close``, and
    when the process that started it ends.

    Args:
        rank: the process is one of several that run the model together. Who makes it then asks ``alike``, and calls
            ``start``; results of other ranks than the first are ``Followed``.

    Attributes:
        facts, limits, device and so on: those of the ``ModelRunner``.
        transforms: the users' changes of logits, in this process, to check what requests ask of them.
        profiler: none can look on.

    Raises:
        ValueError: as ``ModelRunner``; or the arguments cannot be sent to another process.
        RuntimeError: the process ended; the message has its exit code. ``launch`` and ``collect`` raise it as well.
    """

    profiler: None = None
    adapters: None = None

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        num_draft_tokens: int = 0,
        drafter: DraftCheckpoint | None = None,
        rank: RankStart | None = None,
    ) -> None:
        self._name = "the worker process" if rank is None else f"the process of {rank.name}"
        try:
            pickle.dumps((config, model_config))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                "engine arguments must go to another process with model_process=True, tensor_parallel_size or "
                f"pipeline_parallel_size above 1: give logits_transforms that a module has by name ({error})"
            ) from error
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.receive = self.connection.recv  # the next message; ranks have another, which looks after all of them
        drafts = num_draft_tokens, drafter
        arguments = other_end, config, model_config, directory, *drafts, torch.get_num_threads(), rank
        self._process = context.Process(target=_serve, args=arguments, name="compiled-llm-worker", daemon=True)
        with seen_by_children(None if rank is None else rank.gpu):
            self._process.start()
        other_end.close()
        self._num_launched = self._num_received = 0
        self._early: deque[Any] = deque()  # results that came before an answer
        self._load_transforms = lambda: load_transforms(
            config.logits_transforms, model_config.vocab_size, torch.device("cpu")
        )
        if rank is None:
            try:
                self.start()
            except BaseException:
                self.end()
                raise

    def alike(self) -> Alike:
        """What the process of a rank says of itself. It goes on when ``go`` is called."""
        return self.answer()

    def go(self) -> None:
        self.send(_GO)

    def start(self) -> None:
        """Wait until it can serve. Raises what the class does."""
        start = self.answer()
        self.transforms = self._load_transforms()
        self.facts, self.limits, self.device, self.dtype = start.facts, start.limits, start.device, start.dtype
        self.cache_dtypes, self.exact, self.num_threads = start.cache_dtypes, start.exact, start.num_threads
        self.weight_bytes, self.kv_cache_bytes = start.weight_bytes, start.kv_cache_bytes
        self.start_times, self.memory_ledger = start.start_times, start.memory_ledger
        self.host_layout, self._description, self._state = start.host_layout, start.description, start.state

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def num_received(self) -> int:
        """Steps whose results have been taken."""
        return self._num_received

    # -- Steps

    def launch(self, output: SchedulerOutput) -> int:
        """Send a step. Its number, from 0, is what ``collect`` takes."""
        with contextlib.closing(Message(output)) as message:
            return self.launch_message(message)

    def launch_message(self, output: Message) -> int:
        """The same of an output that several get."""
        self.send_message(output)
        self._num_launched += 1
        return self._num_launched - 1

    def collect(self, step: int) -> StepResult:
        """Wait for a step. The results of earlier ones that were not collected are dropped; errors in them too."""
        return _value(self.result(step))

    def result(self, step: int) -> "StepResult | Followed | Failure":
        """As ``collect``, with an error as it was sent; of other ranks than the first what these send."""
        while True:
            result = self._early.popleft() if self._early else self._message()
            self._num_received += 1
            if self._num_received > step:
                return result

    def drop_results(self) -> None:
        """Wait until all steps that were launched have ended, whatever became of them."""
        if self._num_received < self._num_launched:
            self.result(self._num_launched - 1)

    def close(self) -> None:
        """End the process. What it last said of itself stays."""
        self._update_state()
        self.end()

    def end(self, *, kill: bool = False) -> None:
        """End the process, and ask it nothing."""
        self.connection.close()
        if kill:
            self._process.kill()
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Steps run uncompiled meanwhile, as ``ModelRunner.uncompiled`` says."""
        self._ask(UNCOMPILE)
        try:
            yield
        finally:
            self._ask(COMPILED_AGAIN)

    # -- What it is and did

    @property
    def times(self) -> RunnerTimes:
        """Until now; of a process that has ended, as far as they are known."""
        return self._update_state().times

    def compile_report(self) -> CompileReport:
        """What compiling each function gave; of a process that has ended, as far as that is known."""
        return self._update_state().compile_report

    def describe_start(self) -> str:
        """What the start did, in a line."""
        return self._description

    def _update_state(self) -> _State:
        with contextlib.suppress(RuntimeError):  # it has ended, which the next step says
            self._state = self._ask(_ASK)
        return self._state

    # -- Messages

    def _ask(self, what: str) -> Any:
        """The answer to one of the questions above. It comes after the results of the steps that were launched."""
        self.send(what)
        return self.answer()

    def send(self, what: str) -> None:
        """Ask one of the questions above, for ``answer``."""
        with contextlib.closing(Message(what)) as message:
            self.send_message(message)

    def answer(self) -> Any:
        while not isinstance(message := self._message(), Answer):
            self._early.append(message)
        return _value(message.value)

    def send_message(self, message: Message) -> None:
        """To be read before what is sent later."""
        try:
            message.send(self.connection)
        except OSError as error:
            raise self.ended() from error

    def _message(self) -> Any:
        try:
            return self.receive()
        except (EOFError, OSError) as error:
            raise self.ended() from error

    def ended(self) -> RuntimeError:
        """An error that says how the process ended."""
        if self.connection.closed:
            return RuntimeError(f"{self._name} is closed")
        self._process.join(_SECONDS_TO_END)
        return RuntimeError(f"{self._name} ended with exit code {self._process.exitcode}")


class Answer(NamedTuple):
    """An answer, or the ``Failure`` to give one."""

    value: Any


def _value(message: Any) -> Any:
    if isinstance(message, Failure):
        raise message.error()
    return message


def _serve(
    connection: Connection,
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    num_draft_tokens: int,
    drafter: DraftCheckpoint | None,
    num_threads: int,
    rank: RankStart | None,
) -> None:
    """What the other process runs: its start goes out first, and then a result for each step, an answer if asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the engine decides what it ends
    torch.set_num_threads(num_threads)
    try:
        shard, group = (None, None) if rank is None else (rank.shard, begin_rank(rank))
        if rank is not None:
            places = [(directory, config), *([] if drafter is None else [(drafter.directory, drafter.config)])]
            digests = " ".join(model_digest(path, own.load_format) for path, own in places)
            if not _may_start(connection, alike(digests, rank.gpu is not None)):
                return
        progress = StartProgress(config.progress)
        of_stage: StageStart | None = None if rank is None else rank.stage
        peers, rows = None if of_stage is None else of_stage.group(), None if rank is None else rank.rows
        assert not isinstance(rows, Inherited), "it is a number here"
        of_all = config, model_config, directory, progress, num_draft_tokens, drafter
        gpu = None
        if rank is not None and rank.gpu is not None:
            assert not isinstance(rank.meeting, Inherited), "it is a number here"
            gpu = rank.gpu, rank.meeting
        runner = ModelRunner(*of_all, shard, group, peers, rows, gpu)
        launch: Launch = runner.launch if of_stage is None else Stage(of_stage, runner).launch
        watched = None
        if gpu is not None:
            assert group is not None
            watched = GpuProgress(group, runner.group)
            launch = watched.noting(launch)
    except Exception as error:
        connection.send(Answer(Failure.of(error)))
        return
    connection.send(Answer(_Start.of(runner)))
    launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Another thread waits for the device, so that this one prepares the next step.
    is_first = rank is None or rank.shard is None or rank.shard.rank == 0
    thread = threading.Thread(target=_send_results, args=(connection, runner, launched, is_first), daemon=True)
    thread.start()
    uncompiled = contextlib.ExitStack()
    try:
        while True:
            message = _next_message(connection, runner)
            if isinstance(message, list):
                assert runner.adapters is not None
                runner.adapters.receive(message)
                continue
            try:
                launched.put(_do(message, runner, launch, uncompiled))
            except Exception as error:
                failure = Failure.of(error)
                launched.put(failure if isinstance(message, SchedulerOutput) else Answer(failure))
    except EOFError:  # the engine has closed its end, or is gone
        launched.put(None)
        thread.join()
        if watched is not None:
            watched.close()
        runner.close()


def _next_message(connection: Connection, runner: ModelRunner) -> Any:
    """As ``receive``. Code that is compiled beside takes over though no message comes."""
    while runner.is_changing and not connection.poll(LOOK_SECONDS):
        runner.settle()
    return receive(connection)


def _may_start(connection: Connection, own: Alike) -> bool:
    """Of a rank that is ``own``: whether the engine finds that all are alike."""
    connection.send(Answer(own))
    try:
        return receive(connection) == _GO
    except EOFError:
        return False


def _do(
    message: Any,
    runner: ModelRunner,
    launch: Launch,
    uncompiled: contextlib.ExitStack,
) -> Any:
    """Launch a step, or answer a question."""
    if isinstance(message, SchedulerOutput):
        return launch(message)
    if message == UNCOMPILE:
        uncompiled.enter_context(runner.uncompiled())
    elif message == COMPILED_AGAIN:
        uncompiled.close()
    return Answer(_state_of(runner))


class Followed(NamedTuple):
    """Of a step, what another rank than the first says: what all must have in common."""

    digest: int


def digest_of(result: StepResult) -> int:
    """Of what ranks must have in common after a step. The same in all processes, as numbers hash."""
    return hash((result.sampled_token_ids, result.draft_token_ids or ()))


def _send_results(
    connection: Connection, runner: ModelRunner, launched: "queue.SimpleQueue[Any]", in_full: bool
) -> None:
    """Send the result of each launched step and each answer, in their order, until a None comes.

    Not ``in_full``: ``Followed`` for the results.
    """
    while (step := launched.get()) is not None:
        try:
            message: Any = step if isinstance(step, Failure | Answer) else runner.collect(step)
            if isinstance(message, StepResult) and not in_full:
                message = Followed(digest_of(message))
        except Exception as error:
            message = Failure.of(error)
        try:
            connection.send(message)
        except OSError:  # the engine has closed its end
            return
