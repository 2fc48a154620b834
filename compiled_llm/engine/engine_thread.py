"""EngineThread: makes, owns and steps the engine of an AsyncCompiledEngine. Requests are prepared in other threads."""

import atexit
import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.engine.admission import PreparedRequest
from compiled_llm.engine.completions import unserved_output
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.engine.failures import WorkerFailedError
from compiled_llm.engine.output_reader import OutputReader, hand_out
from compiled_llm.engine.own_process import OwnProcess
from compiled_llm.engine.turns import commands_of_turn
from compiled_llm.ops.user_warnings import at_callers_line

# What the end of the interpreter waits for the step, or the start, that the engine is in the middle of.
_EXIT_SECONDS = 10.0
# Errors that end the thread, and with it the engine. All others belong to one request or step.
_INTERRUPTS = (KeyboardInterrupt, SystemExit)
# Threads that prepare requests: one where requests keep their order, several where one may take long.
_THREADS = {"text": 1, "chat": 1, "long": 8}

Result = TypeVar("Result")
# A function to call between two steps, and the future of its result, if it is waited for; None: stop.
Prepare = Callable[[CompiledEngine, LoRARequest | None], PreparedRequest]
_Command = tuple[Callable[[CompiledEngine], Any], Future | None] | None


class EngineThread:
    """The thread of the engine. Others send it commands, and it sends outputs to readers.

    A request is known by its name at once, is prepared in another thread, and then added to the engine. So while it is
    encoded or its grammar is compiled, the engine serves the others; and it can be aborted at any time.

    Attributes:
        started: the engine when it serves, or the error of its start.
        ended: done when the thread is about to end, or with the error of closing the engine.
        own_process: in which the thread is; a fork of that one has no such thread.
    """

    def __init__(self, make_engine: Callable[[], CompiledEngine]) -> None:
        self.own_process = OwnProcess()
        self.started: Future[CompiledEngine] = Future()
        self.ended: Future[None] = Future()
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # so that no waiter who is cancelled cancels it
        # The only thing that other threads touch. It may be put to anywhere, by the garbage collector too.
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._preparing: dict[str, OutputReader] = {}  # of requests that the engine does not have yet
        self._readers: dict[str, OutputReader] = {}  # of requests that it has
        self._ids = itertools.count()
        self._reason: tuple[str, BaseException | None] | None = None  # why it has ended
        self._pools = {kind: ThreadPoolExecutor(count, f"compiled_llm {kind}") for kind, count in _THREADS.items()}
        # A daemon, since the interpreter waits for other threads before it calls ``_stop_at_exit``.
        self._thread = Thread(
            target=at_callers_line(self._run), args=(make_engine,), name="compiled_llm engine", daemon=True
        )
        atexit.register(self._stop_at_exit)
        self._thread.start()

    # -- For other threads

    def state(self) -> str:
        """The engine as text, or why there is none. Waits for nothing."""
        if not self.started.done():
            return "starting"
        error = self.started.exception()
        return f"{self.started.result()!r}" if error is None else f"not started, {type(error).__name__}: {error}"

    def call(self, function: Callable[[CompiledEngine], Result]) -> "Future[Result]":
        """Call ``function`` between two steps, unless the future is cancelled before.

        Raises:
            RuntimeError: this process is a fork of the thread's.
        """
        self.own_process.check()
        future: Future[Result] = Future()
        self._send((function, future))
        return future

    def submit(
        self,
        reader: OutputReader,
        prepare: Prepare,
        kind: str,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> "Future[None]":
        """Prepare a request and add it to the engine; ``reader`` gets its outputs, or what ``prepare`` raises.

        Args:
            prepare: called with the engine, and ``lora_request`` when its adapter has been read.
            kind: one of ``_THREADS``. Requests of a kind with one thread are added in the order of these calls.
            request_id: None: one is made up.

        Returns:
            Done when the request has its name and can be aborted by it, or with the error of name or priority.
        """
        known = self.call(lambda engine: self._enter(engine, reader, request_id, priority))

        def work(engine: CompiledEngine, reading: "Future[LoRARequest | None]") -> None:
            if reader.is_dropped:
                return
            prepared: PreparedRequest | Exception
            try:
                prepared = prepare(engine, reading.result())
            except BaseException as error:
                prepared = _as_exception(error)
            self._send((lambda engine: self._add(engine, reader, prepared, priority), None))

        def start(started: Future[CompiledEngine]) -> None:
            if started.exception() is None:
                with suppress(RuntimeError):  # the pools are shut down: ``known`` says why
                    engine = started.result()
                    engine.begin_reading(lora_request).add_done_callback(functools.partial(enqueue, engine))

        def enqueue(engine: CompiledEngine, reading: "Future[LoRARequest | None]") -> None:
            with suppress(RuntimeError):
                self._pools[kind].submit(work, engine, reading)

        self.started.add_done_callback(start)
        return known

    def drop(self, reader: OutputReader) -> None:
        """Nobody reads any more: end its request, if that has not ended."""
        reader.is_dropped = True
        self._send((lambda engine: self._forget(engine, reader), None))

    def stop(self) -> None:
        self._send(None)

    def _send(self, command: _Command) -> None:
        self._commands.put(command)
        if self._reason is not None:  # nothing else reads the queue now
            self._refuse_commands()

    def _stop_at_exit(self) -> None:
        if self.own_process.is_this_one:
            self.stop()
            self._thread.join(_EXIT_SECONDS)

    # -- Commands, called in the thread itself

    def abort(self, engine: CompiledEngine, request_ids: Sequence[str]) -> None:
        """End requests; their readers get a last output."""
        ended = []
        for request_id in request_ids:
            if request_id in self._preparing:
                reader = self._preparing.pop(request_id)
                ended.append((reader, unserved_output(request_id, reader.prompt, "abort", n=reader.n)))
            elif request_id in self._readers:
                reader = self._readers.pop(request_id)
                ended += [(reader, output) for output in engine.abort_all([request_id])]
        hand_out(ended)

    def _enter(self, engine: CompiledEngine, reader: OutputReader, request_id: str | None, priority: int) -> None:
        if request_id is None:
            names = ChainMap(self._preparing, self._readers)
            request_id = next(name for n in self._ids if (name := f"async-{n}") not in names)
        engine.check_request(request_id, priority, self._preparing)
        reader.request_id = request_id
        self._preparing[request_id] = reader

    def _add(
        self, engine: CompiledEngine, reader: OutputReader, prepared: PreparedRequest | Exception, priority: int
    ) -> None:
        request_id = reader.request_id
        if request_id is None or self._preparing.get(request_id) is not reader:
            return  # refused, dropped or aborted meanwhile
        del self._preparing[request_id]
        try:
            if isinstance(prepared, Exception):
                raise prepared
            engine.add_request(request_id, prepared, priority=priority)
            self._readers[request_id] = reader
        except _INTERRUPTS:
            raise
        except BaseException as error:
            hand_out([(reader, _as_exception(error))])

    def _forget(self, engine: CompiledEngine, reader: OutputReader) -> None:
        for readers in (self._preparing, self._readers):
            if reader.request_id is not None and readers.get(reader.request_id) is reader:
                del readers[reader.request_id]
                engine.abort(reader.request_id)

    # -- Inside

    def _run(self, make_engine: Callable[[], CompiledEngine]) -> None:
        try:
            engine = make_engine()
            self.started.set_result(engine)
        except BaseException as error:
            self._end("the engine could not be started", error)
            self.started.set_exception(error)
            self.ended.set_result(None)
            atexit.unregister(self._stop_at_exit)
            return
        try:
            self._serve(engine)
            self._end("the engine is closed", None)
        except BaseException as error:
            self._end("the engine's thread has ended", error)
        try:
            engine.close()
            self.ended.set_result(None)
        except BaseException as error:
            self.ended.set_exception(error)
        atexit.unregister(self._stop_at_exit)

    def _serve(self, engine: CompiledEngine) -> None:
        """Run commands and steps in turns; wait for a command while there is no step to run. Ends with a stop."""
        while True:
            if self._readers and not engine.has_unfinished_requests():
                raise RuntimeError(f"the engine lost {sorted(self._readers)}: no output says how they ended")
            for command in commands_of_turn(engine, self._commands):
                if not self._run_command(engine, command):
                    return
            if engine.has_unfinished_requests():
                self._step(engine)

    def _run_command(self, engine: CompiledEngine, command: _Command) -> bool:
        """Returns whether to go on."""
        if command is None:
            self.abort(engine, [*self._preparing, *self._readers])
            return False
        function, future = command
        if future is None:
            function(engine)
        elif future.set_running_or_notify_cancel():
            try:
                future.set_result(function(engine))
            except _INTERRUPTS as error:
                future.set_exception(error)
                raise
            except BaseException as error:
                future.set_exception(_as_exception(error))
        return True

    def _step(self, engine: CompiledEngine) -> None:
        failure = None
        try:
            outputs = engine.step()
        except _INTERRUPTS:
            raise
        except BaseException as error:
            # The requests of that step have ended, and this gives their outputs. If it fails too, the engine is broken.
            outputs = engine.step()
            failure = error if isinstance(error, WorkerFailedError) else None
        delivered = []
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue  # dropped meanwhile
            if reader.loop.is_closed():
                self._forget(engine, reader)
                continue
            delivered.append((reader, output))
            if output.finished:
                del self._readers[output.request_id]
        hand_out(delivered)
        if failure is not None:  # no step will run any more
            raise failure

    def _end(self, what: str, error: BaseException | None) -> None:
        """Answer all readers and commands, now and from now on, with the reason."""
        self._reason = (what if error is None else f"{what}: {type(error).__name__}: {error}"), error
        hand_out([(reader, self._refusal()) for reader in [*self._preparing.values(), *self._readers.values()]])
        self._preparing.clear()
        self._readers.clear()
        self._refuse_commands()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

    def _refuse_commands(self) -> None:
        """In any thread, once ``_reason`` is set."""
        with suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                future = None if command is None else command[1]
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(self._refusal())

    def _refusal(self) -> RuntimeError:
        assert self._reason is not None
        text, cause = self._reason
        error = RuntimeError(text)
        error.__cause__ = cause
        return error


def _as_exception(error: BaseException) -> Exception:
    """``error`` for a future or a reader: they expect an ``Exception``, which the panic of a library is not."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
