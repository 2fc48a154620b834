"""AsyncCompiledEngine: a CompiledEngine for asyncio, which runs in a thread of its own."""

import asyncio
import atexit
import dataclasses
import functools
import itertools
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast

from compiled_llm.compiling.report import CompileReport
from compiled_llm.config import EngineConfig
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.text.prompts import Capacity, Prompt, encode_prompt

# Outputs of a request that wait for a consumer; of a slower one, the newest of these is replaced.
_MAX_UNREAD = 16
# What the end of the interpreter waits for the step, or the start, that the engine is in the middle of.
_EXIT_SECONDS = 10.0
# Characters of a prompt that is encoded in a thread of its own.
_LONG_PROMPT = 4096
# What ends the thread, and with it the engine: somebody wants the program to end. All else is of one request or step.
_INTERRUPTS = (KeyboardInterrupt, SystemExit)

Result = TypeVar("Result")


class AsyncCompiledEngine:
    """A ``CompiledEngine`` whose requests are awaited. One thread owns it, and steps while there are requests.

    ``AsyncCompiledEngine(model, **engine_args)``; the arguments are those of ``EngineConfig``. This returns at once:
    the engine is made in its thread, and ``async with``, or ``ready``, waits for that, as every other method does.

    Any number of threads and event loops may use one engine. Without ``close`` it ends when nobody holds it any more,
    or with the interpreter. On a GPU, have torch compile nothing else meanwhile: each step forbids it in all threads.

    Raises:
        ValueError: an argument is not allowed. What else stops the engine's start is raised by ``ready``.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        config = EngineConfig(model=model, **engine_args)
        self._start(functools.partial(CompiledEngine.from_config, config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "AsyncCompiledEngine":
        engine = cls.__new__(cls)
        engine._start(functools.partial(CompiledEngine.from_config, config))
        return engine

    @classmethod
    def from_engine(cls, engine: CompiledEngine) -> "AsyncCompiledEngine":
        """Take over an engine that is there. From now on nobody else may call it, and ``close`` closes it.

        Raises:
            ValueError: it has unfinished requests, or CUDA graphs that only the thread which made them can replay.
        """
        if engine.has_unfinished_requests():
            raise ValueError("engine must have no unfinished requests: finish or abort them first")
        config = engine.config
        if engine.runner.device.type == "cuda" and not config.enforce_eager and config.cuda_graphs == "trees":
            raise ValueError(
                "engine must have cuda_graphs='manual', since torch's CUDA graph trees belong to the thread that made "
                "them, given 'trees'; or use AsyncCompiledEngine.from_config, which makes them in its own"
            )
        wrapper = cls.__new__(cls)
        wrapper._start(lambda: engine)
        return wrapper

    def _start(self, make_engine: Callable[[], CompiledEngine]) -> None:
        self._thread = _EngineThread(make_engine)
        weakref.finalize(self, self._thread.stop).atexit = False  # at exit the thread sees to itself

    async def __aenter__(self) -> "AsyncCompiledEngine":
        try:
            await self.ready()
        except BaseException:
            self._thread.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def ready(self) -> None:
        """Wait until the engine serves: every bucket is compiled. Raises what ``CompiledEngine(...)`` raises."""
        await asyncio.wrap_future(self._thread.started)  # what it returns is not for the user

    async def close(self) -> None:
        """End all requests, with ``finish_reason="abort"``, and free the device memory. A second time does nothing."""
        self._thread.stop()
        await asyncio.wrap_future(self._thread.ended)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: yields its output after each step that advanced it, the text so far each time.

        The engine waits for no consumer. One that falls behind by more than 16 outputs misses some of those between,
        never the last; since each holds all of the text so far, nothing of the text is missed, and what each adds to
        the one before it still joins to the whole.

        A consumer that goes away, by ``break``, ``aclose`` or because its task is cancelled, aborts its request. The
        request begins with the first step of the iteration.

        Args:
            prompt: a str, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``.
            request_id: for ``abort``; None makes one, which the outputs have.
            sampling_params: without a ``seed``, the random numbers follow from the order in which requests reach the
                engine. Those with long prompts, bad words or grammars are prepared first, beside the others.
            priority: lower is served first; for ``scheduling_policy="priority"``.

        Raises:
            ValueError: at the first step: the id is in use, or the prompt or its parameters cannot be served.
            RuntimeError: the engine is closed, could not be started, or its thread has ended by a fault. (A fault in
                a step is none: the requests of that step end with ``finish_reason="error"``, and the others go on.)
        """
        reader = _Reader(prompt, sampling_params)
        try:
            if _may_take_long(prompt, reader.params):
                engine = await self._engine()
                reader.prompt = await self._beside(lambda: engine.prepare(prompt, reader.params))
            await self._call(lambda engine: self._thread.add(engine, reader, request_id, priority))
            while True:
                output = await reader.next()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.drop(reader)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for one conversation, by the chat template. ``options`` are those of ``CompiledEngine.chat``.

        Without ``sampling_params``, those of ``get_default_sampling_params``.
        """
        engine = await self._engine()
        params = engine.chat_sampling_params() if sampling_params is None else sampling_params
        prompt = await self._beside(lambda: engine.encode_chat(messages, **options))
        outputs = self.generate(prompt, params, request_id=request_id, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests now and free their blocks; their consumers get a last output, with ``finish_reason="abort"``.

        Unknown and finished ids are passed over.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda engine: self._thread.abort(engine, request_ids))

    async def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """As ``CompiledEngine.get_tokenizer``."""
        return await self._call(CompiledEngine.get_tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """As ``CompiledEngine.get_default_sampling_params``."""
        return await self._call(CompiledEngine.get_default_sampling_params)

    async def stats(self) -> EngineStats:
        """Counts since the engine was made, and its state between two steps."""
        return await self._call(CompiledEngine.stats)

    async def compile_report(self) -> CompileReport:
        """Per compiled graph: graph breaks, recompiles since ready, seconds, cache hit or miss."""
        return await self._call(CompiledEngine.compile_report)

    async def _engine(self) -> CompiledEngine:
        """The engine, once it serves: for those of its methods that any thread may call."""
        started = self._thread.started
        if started.done() and started.exception() is None:
            return started.result()
        return await self._call(lambda engine: engine)

    async def _beside(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returns or raises, called in a thread of its own: others are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(None, function)

    async def _call(self, function: Callable[[CompiledEngine], Result]) -> Result:
        """What ``function`` returns or raises, called between two steps in the engine's thread."""
        return await asyncio.wrap_future(self._thread.call(function))


class _Reader:
    """Who waits for the outputs of one request: an async generator, in the event loop where this is made.

    Attributes:
        request_id: None until the engine has the request.
        last: the newest output. Of the engine's thread, as all of these.
    """

    def __init__(self, prompt: Prompt, sampling_params: SamplingParams | None) -> None:
        self.prompt = prompt
        self.params = SamplingParams() if sampling_params is None else sampling_params
        self.arrival_time = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.request_id: str | None = None
        self.last: RequestOutput | None = None
        self._lock = Lock()
        self._unread: deque[RequestOutput | Exception] = deque()
        self._is_woken = False  # or about to be
        self._news = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> bool:
        """In the engine's thread: what ``next`` will return, or raise. Returns whether the reader is to be woken."""
        with self._lock:
            if len(self._unread) >= _MAX_UNREAD and isinstance(item, RequestOutput):
                self._unread.pop()
            self._unread.append(item)
            wakes, self._is_woken = not self._is_woken, True
        return wakes

    def wake(self) -> None:
        """In the reader's loop."""
        self._news.set()

    async def next(self) -> RequestOutput:
        """The oldest output that is unread."""
        while True:
            with self._lock:
                if self._unread:
                    item = self._unread.popleft()
                    break
                self._is_woken = False
                self._news.clear()
            await self._news.wait()
        if isinstance(item, Exception):
            raise item
        return item


# A function to call between two steps, and who waits for it, if somebody does; None: stop.
_Command = tuple[Callable[[CompiledEngine], Any], Future | None] | None


class _EngineThread:
    """The thread that makes, owns and steps the engine. Others send it commands, and it sends outputs to readers.

    Attributes:
        started: the engine when it serves, or the error of its start.
        ended: done when the thread is about to end, or with the error of closing the engine.
    """

    def __init__(self, make_engine: Callable[[], CompiledEngine]) -> None:
        self.started: Future[CompiledEngine] = Future()
        self.ended: Future[None] = Future()
        for future in (self.started, self.ended):
            future.set_running_or_notify_cancel()  # so that no waiter who is cancelled cancels it
        # The only thing that other threads touch. It may be put to anywhere, by the garbage collector too.
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._readers: dict[str, _Reader] = {}
        self._ids = itertools.count()
        self._reason: tuple[str, BaseException | None] | None = None  # why it has ended
        # A daemon, since the interpreter waits for other threads before it calls ``_stop_at_exit``.
        self._thread = Thread(target=self._run, args=(make_engine,), name="compiled_llm engine", daemon=True)
        atexit.register(self._stop_at_exit)
        self._thread.start()

    # -- For other threads

    def call(self, function: Callable[[CompiledEngine], Result]) -> "Future[Result]":
        """Call ``function`` between two steps, unless the future is cancelled before."""
        future: Future[Result] = Future()
        self._send((function, future))
        return future

    def drop(self, reader: _Reader) -> None:
        """Nobody reads any more: end its request, if that has not ended."""
        self._send((lambda engine: self._forget(engine, reader), None))

    def stop(self) -> None:
        self._send(None)

    def _send(self, command: _Command) -> None:
        self._commands.put(command)
        if self._reason is not None:  # then nobody reads the queue, unless the thread did after the line above
            self._refuse_commands()

    def _stop_at_exit(self) -> None:
        self.stop()
        self._thread.join(_EXIT_SECONDS)

    # -- Commands, called in the thread itself

    def add(self, engine: CompiledEngine, reader: _Reader, request_id: str | None, priority: int) -> None:
        if request_id is None:
            request_id = next(name for n in self._ids if (name := f"async-{n}") not in self._readers)
        engine.add_request(request_id, reader.prompt, reader.params, priority)
        reader.request_id = request_id
        self._readers[request_id] = reader

    def abort(self, engine: CompiledEngine, request_ids: Sequence[str]) -> None:
        ended = []
        for request_id in request_ids:
            reader = self._readers.get(request_id)
            if reader is not None:
                ended.append((reader, _aborted_output(engine, reader)))
                self._forget(engine, reader)
        _hand_out(ended)

    def _forget(self, engine: CompiledEngine, reader: _Reader) -> None:
        if reader.request_id is not None and self._readers.get(reader.request_id) is reader:
            del self._readers[reader.request_id]
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
        """Obey and step by turns, and sleep while there is nothing to step; until the command to stop."""
        while True:
            steps = engine.has_unfinished_requests()
            if self._readers and not steps:
                raise RuntimeError(f"the engine lost {sorted(self._readers)}: no output says how they ended")
            # Those that come meanwhile wait for the next turn: nobody's adding keeps others from being served.
            for _ in range(max(self._commands.qsize(), 0 if steps else 1)):
                if not self._obey(engine, self._commands.get()):
                    return
            if engine.has_unfinished_requests():
                self._step(engine)

    def _obey(self, engine: CompiledEngine, command: _Command) -> bool:
        """Returns whether to go on."""
        if command is None:
            self.abort(engine, list(self._readers))
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
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:  # a library's panic: of this command, whatever it was, and no other
                future.set_exception(_as_exception(error))
        return True

    def _step(self, engine: CompiledEngine) -> None:
        try:
            outputs = engine.step()
        except _INTERRUPTS:
            raise
        except BaseException:
            outputs = engine.step()  # It has ended all requests concerned, and says so now; or else it is broken.
        delivered = []
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue  # dropped meanwhile
            if reader.loop.is_closed():
                self._forget(engine, reader)
                continue
            reader.last = output
            delivered.append((reader, output))
            if output.finished:
                del self._readers[output.request_id]
        _hand_out(delivered)

    def _end(self, what: str, error: BaseException | None) -> None:
        """Tell all who wait, and all who come from now on."""
        self._reason = (what if error is None else f"{what}: {type(error).__name__}: {error}"), error
        _hand_out([(reader, self._refusal()) for reader in self._readers.values()])
        self._readers.clear()
        self._refuse_commands()

    def _refuse_commands(self) -> None:
        """Of any thread, once the reason is there."""
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


def _may_take_long(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether the engine's thread should find this request prepared, for the sake of the others."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    is_long = isinstance(text, str) and len(text) > _LONG_PROMPT
    return is_long or (isinstance(params, SamplingParams) and bool(params.bad_words or params.structured_outputs))


def _as_exception(error: BaseException) -> RuntimeError:
    """For who waits: tasks and threads expect an ``Exception``."""
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _hand_out(items: Sequence[tuple[_Reader, RequestOutput | Exception]]) -> None:
    """Each to its reader; one call wakes all readers of a loop."""
    waking: dict[asyncio.AbstractEventLoop, list[_Reader]] = {}
    for reader, item in items:
        if reader.put(item):
            waking.setdefault(reader.loop, []).append(reader)
    for loop, readers in waking.items():
        with suppress(RuntimeError):  # the loop was closed: nobody reads
            loop.call_soon_threadsafe(_wake, readers)


def _wake(readers: Sequence[_Reader]) -> None:
    for reader in readers:
        reader.wake()


def _aborted_output(engine: CompiledEngine, reader: _Reader) -> RequestOutput:
    """The last output of a request that the engine is about to abort, which gives none itself."""
    assert reader.request_id is not None
    last = reader.last
    if last is None:
        capacity = Capacity(engine.scheduler.request_capacity, "room")
        truncate = reader.params.truncate_prompt_tokens
        text, token_ids, _ = encode_prompt(reader.prompt, engine.tokenizer, capacity, truncate)
        nothing = [CompletionOutput(index=index, text="", token_ids=[]) for index in range(reader.params.n)]
        metrics = RequestMetrics(arrival_time=reader.arrival_time)
        last = RequestOutput(reader.request_id, text, token_ids, nothing, finished=False, metrics=metrics)
    completions = [
        completion if completion.finish_reason else dataclasses.replace(completion, finish_reason="abort")
        for completion in last.outputs
    ]
    metrics = dataclasses.replace(last.metrics, finished_time=time.monotonic())
    return dataclasses.replace(last, outputs=completions, finished=True, metrics=metrics)
