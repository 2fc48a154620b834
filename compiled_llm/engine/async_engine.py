"""AsyncCompiledEngine: a CompiledEngine for asyncio, which runs in another thread."""

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest
from compiled_llm.api.outputs import EngineStats, RequestOutput, ScoreOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.compiling.report import CompileReport
from compiled_llm.engine.admission import PreparedRequest
from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.engine.engine_thread import EngineThread, Prepare
from compiled_llm.engine.output_reader import OutputReader
from compiled_llm.engine.scoring import score_output, scoring_params
from compiled_llm.scheduling.drafter import Drafter
from compiled_llm.text.prompts import Prompt, ScoredPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Characters of a prompt that may take long to encode.
_LONG_PROMPT = 4096

Result = TypeVar("Result")


class AsyncCompiledEngine:
    """A ``CompiledEngine`` whose requests are awaited. One thread owns it, and steps while there are requests.

    ``AsyncCompiledEngine(model, **engine_args)``; the arguments are those of ``CompiledEngine``. This returns at once:
    the engine is made in its thread, and ``async with``, or ``ready``, waits for that, as every other method does.

    Any number of threads and event loops may use one engine. Without ``close`` it ends when it is garbage collected,
    or with the interpreter. In a fork of the process that made it, all but ``close`` raise a ``RuntimeError``. On a
    GPU, have torch compile nothing else meanwhile: each step forbids it in all threads.

    Raises:
        ValueError: an argument is not allowed. What else stops the engine's start is raised by ``ready``.
    """

    def __init__(self, model: str | None = None, *, drafter: Drafter | None = None, **engine_args: Any) -> None:
        config = EngineConfig(model=model, **engine_args)
        self._start(functools.partial(CompiledEngine.from_config, config, drafter=drafter))

    @classmethod
    def from_config(cls, config: EngineConfig, *, drafter: Drafter | None = None) -> "AsyncCompiledEngine":
        engine = cls.__new__(cls)
        engine._start(functools.partial(CompiledEngine.from_config, config, drafter=drafter))
        return engine

    @classmethod
    def from_engine(cls, engine: CompiledEngine) -> "AsyncCompiledEngine":
        """Use an engine that exists already. From then on nothing else may call it, and ``close`` closes it.

        Raises:
            ValueError: it has unfinished requests, or CUDA graphs that only the thread which made them can replay.
        """
        if engine.has_unfinished_requests():
            raise ValueError("engine must have no unfinished requests: finish or abort them first")
        config = engine.config
        if engine.runner.device.type == "cuda" and not config.enforce_eager and config.cuda_graphs == "trees":
            raise ValueError(
                "engine must have cuda_graphs='auto', since torch's CUDA graph trees belong to the thread that made "
                "them, given 'trees'; or use AsyncCompiledEngine.from_config, which makes them in its own"
            )
        wrapper = cls.__new__(cls)
        wrapper._start(lambda: engine)
        return wrapper

    def _start(self, make_engine: Callable[[], CompiledEngine]) -> None:
        self._thread = EngineThread(make_engine)
        weakref.finalize(self, self._thread.stop).atexit = False  # at exit the thread sees to itself

    def __repr__(self) -> str:
        return f"<AsyncCompiledEngine: {self._thread.state()}>"

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
        self._thread.own_process.check()
        await asyncio.wrap_future(self._thread.started)  # what it returns is not for the user

    async def close(self) -> None:
        """End all requests, with ``finish_reason="abort"``, and free the device memory. A second time does nothing.

        Nor does it in a fork of the process that made the engine.
        """
        if self._thread.own_process.is_this_one:
            self._thread.stop()
            await asyncio.wrap_future(self._thread.ended)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: yields an output after each step that advanced it, as ``output_kind`` asks.

        The engine waits for no consumer. Of outputs that a slow one has not read, the first 15 and the newest are kept,
        which holds all of the text so far; deltas are joined. So no text is missed.

        A consumer that goes away, by ``break``, ``aclose`` or because its task is cancelled, aborts its request. The
        request starts with the first step of the iteration.

        Requests are encoded, and their grammars compiled, in other threads than the engine's, while it serves others.
        They reach the engine in the order in which they start, but for those with long prompts, bad words or grammars:
        others do not wait for these, nor for an adapter that is being read.

        Args:
            prompt: a str, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``.
            lora_request: an adapter; None: the model as it is. It is read in another thread where it is not here yet.
            request_id: for ``abort``; None makes one, which the outputs have.
            sampling_params: without a ``seed``, the random numbers follow from the order in which requests reach the
                engine.
            priority: lower is served first; for ``scheduling_policy="priority"``.

        Raises:
            ValueError: at the first step: the id is in use, or the prompt or its parameters cannot be served.
            RuntimeError: the engine is closed, could not be started, or its thread has ended by a fault. (A fault in
                a step is none: the requests of that step end with ``finish_reason="error"``, and the others go on.)
        """
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        is_long = isinstance(text, str) and len(text) > _LONG_PROMPT
        if isinstance(sampling_params, SamplingParams):
            is_long = is_long or bool(sampling_params.bad_words or sampling_params.structured_outputs)

        def prepare(engine: CompiledEngine, read: LoRARequest | None) -> PreparedRequest:
            return engine.prepare(prompt, sampling_params, lora_request=read)

        kind = "long" if is_long else "text"
        return self._outputs(prepare, kind, prompt, sampling_params, request_id, priority, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for one conversation, by the chat template. ``options`` are those of ``CompiledEngine.chat``.

        Without ``sampling_params``, those of ``get_default_sampling_params``.
        """

        def prepare(engine: CompiledEngine, read: LoRARequest | None) -> PreparedRequest:
            params = engine.chat_sampling_params() if sampling_params is None else sampling_params
            return engine.prepare(engine.encode_chat(messages, **options), params, lora_request=read)

        return self._outputs(prepare, "chat", None, sampling_params, request_id, priority, lora_request)

    async def score(
        self,
        prompt: Prompt,
        continuation: str | Sequence[int] | None = None,
        *,
        top_logprobs: int = 0,
        split_special_tokens: bool | None = None,
        lora_request: LoRARequest | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> ScoreOutput:
        """How likely the given ``continuation`` is after its prompt, as ``CompiledEngine.score`` says.

        Cancelling it aborts the request. ``lora_request``, ``request_id`` and ``priority`` are those of ``generate``.

        Raises:
            ValueError, RuntimeError: as ``generate``.
        """
        scored = ScoredPrompt(prompt, continuation)
        texts = [part for part in (prompt, continuation) if isinstance(part, str)]
        kind = "long" if sum(map(len, texts)) > _LONG_PROMPT else "text"

        def prepare(engine: CompiledEngine, read: LoRARequest | None) -> PreparedRequest:
            params = scoring_params(top_logprobs, engine.config.max_logprobs, split_special_tokens)
            return engine.prepare(scored, params, lora_request=read)

        of_request = prepare, kind, scored, None, request_id, priority, lora_request
        outputs = [output async for output in self._outputs(*of_request)]
        return score_output(outputs[-1], has_top_logprobs=top_logprobs != 0)

    async def _outputs(
        self,
        prepare: Prepare,
        kind: str,
        prompt: Prompt | None,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        reader = OutputReader(prompt, params)
        try:
            await asyncio.wrap_future(self._thread.submit(reader, prepare, kind, request_id, priority, lora_request))
            while True:
                output = await reader.next()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.drop(reader)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests now and free their blocks; their consumers get a last output, with ``finish_reason="abort"``.

        Unknown and finished ids are passed over.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda engine: self._thread.abort(engine, request_ids))

    async def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """As ``CompiledEngine.get_tokenizer``."""
        engine = await self._call(lambda engine: engine)
        return await asyncio.to_thread(engine.get_tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """As ``CompiledEngine.get_default_sampling_params``."""
        return await self._call(CompiledEngine.get_default_sampling_params)

    async def stats(self) -> EngineStats:
        """Counts since the engine was made, and its state between two steps."""
        return await self._call(CompiledEngine.stats)

    async def compile_report(self) -> CompileReport:
        """Per compiled graph: graph breaks, recompiles since ready, seconds, cache hit or miss."""
        return await self._call(CompiledEngine.compile_report)

    async def _call(self, function: Callable[[CompiledEngine], Result]) -> Result:
        """What ``function`` returns or raises, called between two steps in the engine's thread."""
        return await asyncio.wrap_future(self._thread.call(function))
