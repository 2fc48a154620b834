"""Service: a client's request -> prompts for the engine, and the outputs that come back. It knows nothing of HTTP."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server.engine_client import EngineClient, EngineEndedError
from compiled_llm.server.errors import ApiError
from compiled_llm.server.messages import Generate, Output, Started
from compiled_llm.server.metrics import Metrics
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.traces import Traces, otlp_exporter
from compiled_llm.text.chat import ChatEncoder
from compiled_llm.text.prompts import Capacity, EncodedPrompt, encode_prompt
from compiled_llm.text.tokenizer import Tokenizer

# Characters of a prompt that may take long to encode: another thread does it.
_LONG_PROMPT = 4096
_THREADS = 4
_MAX_TOKENS = {"completion": 16, "chat": None}  # where neither request nor model says

Result = TypeVar("Result")


class ServedPrompt(NamedTuple):
    """A prompt with its tokens, and the engine's name of it."""

    request_id: str
    text: str | None
    token_ids: list[int]


@dataclasses.dataclass
class Served:
    """A client's request in the engine. ``params``: of each prompt."""

    asked: OpenAIRequest
    params: SamplingParams
    prompts: list[ServedPrompt]
    outputs: AsyncIterator[Output]


class Service:
    """What the server does with text, on its side of the engine.

    Attributes:
        names: of the model; the first one stands in answers.
        tokenizer, texts: None, and without texts, for a model that has none. Set by ``start``.
        is_draining: no new requests are taken.
        traces: None unless they are asked for.
        num_admitted: prompts that are served or wait.
    """

    def __init__(self, settings: ServerSettings, client: EngineClient, names: Sequence[str], metrics: Metrics) -> None:
        self.settings, self.client, self.names, self.metrics = settings, client, tuple(names), metrics
        self.created = int(time.time())
        self.is_draining = False
        self.tokenizer: Tokenizer | None = None
        self.num_admitted = 0
        endpoint = settings.otlp_traces_endpoint
        self.traces = Traces(otlp_exporter(endpoint), self.names[0]) if endpoint else None
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(_THREADS, "compiled_llm text")

    def start(self, started: Started) -> None:
        """The engine serves from now on."""
        if started.tokenizer is not None:
            self.tokenizer = Tokenizer(Path("the model's directory"), started.tokenizer)
        self.texts = TokenTexts(self.tokenizer)
        self._chats = ChatEncoder(self.tokenizer)
        self.metrics.start(started)
        self.restart(started)

    def restart(self, started: Started) -> None:
        """Another process serves the same model from now on."""
        self._started = started

    def close(self) -> None:
        if self.client.started is not None:
            self._chats.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()

    @property
    def started(self) -> Started:
        """What the engine said of itself. ``ApiError`` while it loads, and when the server ends."""
        if self.client.ended is not None:
            raise ApiError(503, self.client.ended)
        if self.is_draining:
            raise ApiError(503, "the server is about to end", {"Retry-After": "10"})
        if self.client.started is None:
            raise ApiError(503, "the model is being loaded", {"Retry-After": "1"})
        return self._started

    @property
    def fault(self) -> str | None:
        """Why the server does not answer requests; None: it does. Any while none waits for a step that does not end."""
        try:
            _ = self.started
        except ApiError as error:
            return error.message
        silent = self.client.silent_seconds
        return f"no step of the engine for {silent:.0f} s" if silent > self.settings.stall_seconds else None

    def check_model(self, name: str | None) -> str:
        """The model's name in the answer. ``ApiError`` for another model; None is any."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model {name:.200} is not served here: {known} is", code="model_not_found")
        return name or self.names[0]

    @contextlib.contextmanager
    def admitted(self, asked: OpenAIRequest) -> Iterator[None]:
        """A request has a place in the queue within this. ``ApiError`` if there is none."""
        most, count = self.started.max_num_seqs + self.settings.max_waiting_requests, max(1, len(asked.prompts))
        completions = count * asked.sampling.get("n", 1)
        if completions > self.settings.max_completions:
            raise ApiError(
                400,
                f"n times the number of prompts must be at most {self.settings.max_completions}, given {completions}",
            )
        if self.num_admitted + count > most:
            self.metrics.rejections.inc()
            raise ApiError(429, f"{most} prompts are being served or wait already", {"Retry-After": "1"})
        self.num_admitted += count
        try:
            yield
        finally:
            self.num_admitted -= count

    @property
    def too_late(self) -> ApiError:
        """What is said of an answer that takes too long. A client that asked again would wait as long."""
        given = f"the answer took more than {self.settings.max_request_seconds:g} s"
        return ApiError(408, given, {"x-should-retry": "false"})

    async def serve(self, asked: OpenAIRequest, request_id: str, deadline: float) -> Served:
        """Encode a request and give it to the engine, which begins when its outputs are read.

        Args:
            deadline: of the event loop's clock, when its outputs end with an ``ApiError``.

        Raises:
            ApiError: it cannot be served.
        """
        defaults = {"max_tokens": _MAX_TOKENS[asked.kind], **self.started.sampling}
        sampling = {**defaults, **asked.sampling, "output_kind": "delta" if asked.stream else "final"}
        try:
            params = SamplingParams(**sampling)
            encoded = await self.encode(asked, params)
        except (ValueError, ImportError) as error:
            raise ApiError.of(error) from error
        sampling.pop("truncate_prompt_tokens", None)  # it was done
        # Clients may give two requests one name.
        names = (f"{request_id}-{next(self._numbers)}" for _ in encoded)
        prompts = [ServedPrompt(name, one.text, one.token_ids) for name, one in zip(names, encoded, strict=True)]
        requests = [
            Generate(prompt.request_id, prompt.token_ids, sampling, asked.priority, asked.cache_salt)
            for prompt in prompts
        ]
        return Served(asked, params, prompts, self._outputs(requests, deadline))

    async def _outputs(self, requests: Sequence[Generate], deadline: float) -> AsyncIterator[Output]:
        """``ApiError`` for what the engine refuses, when it has ended, and after the deadline."""
        outputs = self.client.generate(requests, deadline)
        try:
            async for output in outputs:
                if output.error is not None:
                    raise ApiError(500 if output.is_fault else 400, output.error)
                failed = [piece for piece in output.pieces if piece.finish_reason in ("error", "abort")]
                if failed:
                    raise ApiError(500, str(failed[0].stop_reason or failed[0].finish_reason))
                yield output
        except EngineEndedError as error:
            raise ApiError(503, str(error)) from error
        except TimeoutError:
            raise self.too_late from None
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def encode(self, asked: OpenAIRequest, params: SamplingParams) -> list[EncodedPrompt]:
        """The prompts of a request as tokens. ``ValueError``: they cannot be served."""
        started = self.started
        capacity = Capacity(started.capacity, started.limit)
        keep, split = params.truncate_prompt_tokens, bool(params.split_special_tokens)

        def encode_all(prompts: Sequence[Any]) -> list[EncodedPrompt]:
            return [encode_prompt(prompt, self.tokenizer, capacity, keep, split) for prompt in prompts]

        def encode_chat() -> list[EncodedPrompt]:
            return encode_all([self.chat_prompt(asked.messages, {**asked.chat_options, "hints": asked.template_hints})])

        if asked.kind == "chat":
            return await self.in_thread(encode_chat)
        if sum(len(prompt.get("prompt", "")) for prompt in asked.prompts) > _LONG_PROMPT:
            return await self.in_thread(lambda: encode_all(asked.prompts))
        return encode_all(asked.prompts)

    def chat_prompt(self, messages: Sequence[Any], options: Mapping[str, Any]) -> EncodedPrompt:
        """A conversation as the chat template writes it; waits for that. ``ValueError`` as ``ChatEncoder.encode``."""
        return EncodedPrompt(*self._chats.encode(messages, self.started.capacity, **options))

    async def in_thread(self, function: Callable[[], Result]) -> Result:
        """For what may take long, so that others do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of tokens. ``ApiError`` without a tokenizer."""
        if self.tokenizer is None:
            raise ApiError(400, "the model has no tokenizer: its tokens have no text")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens)

    def text_of(self, prompt: ServedPrompt) -> str:
        """A prompt as text, for an answer that begins with it."""
        return self.decode(prompt.token_ids, skip_special_tokens=False) if prompt.text is None else prompt.text
