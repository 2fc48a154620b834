"""WorkerProcess: a ModelRunner in another process, which gets steps and returns results through a pipe."""

import multiprocessing
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult, Worker
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.runner import ModelRunner

_SECONDS_TO_END = 30.0


class _Failure(NamedTuple):
    """An error of the worker: an error itself may not survive pickling."""

    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> "_Failure":
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """A ``ValueError`` or ``RuntimeError`` as it was; for others a ``RuntimeError`` that names the kind."""
        known = {"ValueError": ValueError, "RuntimeError": RuntimeError}.get(self.kind)
        error = RuntimeError(f"{self.kind}: {self.text}") if known is None else known(self.text)
        error.add_note(f"in the worker process:\n{self.trace}")
        return error


class WorkerProcess(Worker):
    """Starts a process with a ``ModelRunner`` of these arguments, and speaks to it.

    Steps run in the order of their launch, and ``launch`` does not wait for them. The process ends with ``close``, and
    when the process that started it ends.

    Raises:
        ValueError: as ``ModelRunner``.
        RuntimeError: the process ended; the message has its exit code. ``launch`` and ``collect`` raise it as well.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, directory: Path, num_draft_tokens: int = 0
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        arguments = other_end, config, model_config, directory, num_draft_tokens, torch.get_num_threads()
        self._process = context.Process(target=_serve, args=arguments, name="compiled-llm-worker", daemon=True)
        self._process.start()
        other_end.close()
        self._num_launched = 0
        self._num_received = 0
        try:
            self.facts = self._receive()
        except BaseException:
            self.close()
            raise

    def launch(self, output: SchedulerOutput) -> int:
        """Send a step. Its number, from 0, is what ``collect`` takes."""
        try:
            self._connection.send(output)
        except OSError as error:
            raise self._ended() from error
        self._num_launched += 1
        return self._num_launched - 1

    def collect(self, step: int) -> StepResult:
        """Wait for a step. The results of earlier ones that were not collected are dropped; errors in them too."""
        while self._num_received < step:
            self._next_message()
        return self._receive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(_SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        message = self._next_message()
        if isinstance(message, _Failure):
            raise message.error()
        return message

    def _next_message(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self._num_received += isinstance(message, _Failure | StepResult)
        return message

    def _ended(self) -> RuntimeError:
        if self._connection.closed:
            return RuntimeError("the worker process is closed")
        self._process.join(_SECONDS_TO_END)
        return RuntimeError(f"the worker process ended with exit code {self._process.exitcode}")


def _serve(
    connection: Connection,
    config: EngineConfig,
    model_config: ModelConfig,
    directory: Path,
    num_draft_tokens: int,
    num_threads: int,
) -> None:
    """What the other process runs: the facts go out first, and then a result or a failure for each step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the engine decides what it ends
    torch.set_num_threads(num_threads)
    try:
        runner = ModelRunner(config, model_config, directory, StartProgress(config.progress), num_draft_tokens)
    except Exception as error:
        connection.send(_Failure.of(error))
        return
    connection.send(runner.facts)
    launched: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Another thread waits for the device, so that this one prepares the next step.
    thread = threading.Thread(target=_send_results, args=(connection, runner, launched), daemon=True)
    thread.start()
    try:
        while True:
            output = connection.recv()
            try:
                launched.put(runner.launch(output))
            except Exception as error:
                launched.put(_Failure.of(error))
    except EOFError:  # the engine has closed its end, or is gone
        launched.put(None)
        thread.join()
        runner.close()


def _send_results(connection: Connection, runner: ModelRunner, launched: "queue.SimpleQueue[Any]") -> None:
    """Send the result of each launched step, in their order, until a None comes."""
    while (step := launched.get()) is not None:
        try:
            message = step if isinstance(step, _Failure) else runner.collect(step)
        except Exception as error:
            message = _Failure.of(error)
        try:
            connection.send(message)
        except OSError:  # the engine has closed its end
            return
