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
from compiled_llm.server.adapters import ServedAdapters
from compiled_llm.server.answer_formats import AnswerFormats, AnswerPlan
from compiled_llm.server.errors import ApiError
from compiled_llm.server.messages import AdapterRef, Generate, Output, Started
from compiled_llm.server.metrics import Metrics
from compiled_llm.server.replicas import Replicas
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.traces import Traces, otlp_exporter
from compiled_llm.server.unread import EngineEndedError, RequestAbortedError, Unread
from compiled_llm.text.chat import ChatEncoder
from compiled_llm.text.prompts import Capacity, EncodedPrompt, check_token_ids, encode_prompt, encode_scored
from compiled_llm.text.tokenizer import Tokenizer

# Characters of a prompt that may take long to encode: another thread does it.
_LONG_PROMPT = 4096
_THREADS = 4
_MAX_TOKENS = {"completion": 16, "chat": None, "score": None}  # where neither request nor model says

Result = TypeVar("Result")


class ServedPrompt(NamedTuple):
    """A prompt with its tokens, and the engine's name of it. ``scored_from``: where those begin that are scored."""

    request_id: str
    text: str | None
    token_ids: list[int]
    scored_from: int | None = None


@dataclasses.dataclass
class Served:
    """A client's request in the engine. ``params``: of each prompt. ``plan``: None: answers are content alone.

    ``adapter``: None: the model as it is. ``unread``: what ``outputs`` come from.
    """

    asked: OpenAIRequest
    params: SamplingParams
    plan: AnswerPlan | None
    prompts: list[ServedPrompt]
    outputs: AsyncIterator[Output]
    adapter: AdapterRef | None = None
    unread: Unread = dataclasses.field(default_factory=Unread)


class Service:
    """What the server does with text, on its side of the engine.

    Attributes:
        names: of the model; the first one stands in answers.
        adapters: those that clients may name as their model.
        tokenizer, texts: None, and without texts, for a model that has none. Set by ``start``.
        formats: of reasoning and tool calls; set by ``start``.
        is_started: the engines have started; is_draining: no new requests are taken; is_unused: nor are any left.
        traces: None unless they are asked for.
        num_admitted: prompts that are served or wait.
    """

    def __init__(self, settings: ServerSettings, client: Replicas, names: Sequence[str], metrics: Metrics) -> None:
        self.settings, self.client, self.names, self.metrics = settings, client, tuple(names), metrics
        self.created = int(time.time())
        self.is_started = self.is_draining = False
        self.is_unused = asyncio.Event()
        self.adapters = ServedAdapters(client, self.names)
        self.tokenizer: Tokenizer | None = None
        self.num_admitted = 0
        endpoint = settings.otlp_traces_endpoint
        self.traces = Traces(otlp_exporter(endpoint), self.names[0]) if endpoint else None
        self._numbers = itertools.count()
        self._pool = ThreadPoolExecutor(_THREADS, "compiled_llm text")

    def start(self, started: Started) -> None:
        """The engines serve from now on."""
        if started.tokenizer is not None:
            self.tokenizer = Tokenizer(Path("the model's directory"), started.tokenizer)
        self.texts = TokenTexts(self.tokenizer)
        self._chats = ChatEncoder(self.tokenizer)
        parsers = self.settings.tool_call_parser, self.settings.reasoning_parser
        self.formats = AnswerFormats(*parsers, self.tokenizer)
        self.metrics.start(started, len(self.client.clients))
        self.is_started = True

    def close(self) -> None:
        if self.is_started:
            self._chats.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()

    @property
    def started(self) -> Started:
        """What an engine said of itself. ``ApiError`` while none serves, and when the server ends."""
        if self.is_draining and self.client.ended is None:
            raise ApiError(503, "the server is about to end", {"Retry-After": "10"})
        return self._engines

    @property
    def _engines(self) -> Started:
        """As ``started``, also while the server ends: for requests that have a place."""
        if self.client.ended is not None:
            raise ApiError(503, self.client.ended)
        started = self.client.started
        if started is None or not self.is_started:
            raise ApiError(503, "the model is being loaded", {"Retry-After": "1"})
        return started

    @property
    def fault(self) -> str | None:
        """Why the server does not answer requests; None: it does. Any while none waits for a step that does not end."""
        try:
            _ = self.started
        except ApiError as error:
            return error.message
        faults = self.client.faults()
        return faults[0] if all(faults) else None

    def model_names(self) -> list[str]:
        """All that clients may give as their model."""
        return [*self.names, *(adapter.ref.name for adapter in self.adapters)]

    def check_model(self, name: str | None) -> str:
        """The model's name in the answer, or that of an adapter. ``ApiError`` for another one; None is the model."""
        self.adapter_of(name)
        return name or self.names[0]

    def adapter_of(self, name: str | None) -> AdapterRef | None:
        """What the model of this name is changed by; None: nothing. ``ApiError`` as ``check_model``."""
        if name is None or name in self.names:
            return None
        adapter = self.adapters.get(name)
        if adapter is None:
            known = ", ".join(self.names) + (f" and {len(self.adapters)} adapters of it" if self.adapters else "")
            raise ApiError(404, f"model {name:.200} is not served here: {known} is", code="model_not_found")
        return adapter.ref

    @contextlib.contextmanager
    def admitted(self, asked: OpenAIRequest) -> Iterator[None]:
        """A request has a place in the queue within this. ``ApiError`` if there is none."""
        _, count = self.started, max(1, len(asked.prompts))
        completions = count * asked.sampling.get("n", 1)
        if completions > self.settings.max_completions:
            raise ApiError(
                400,
                f"n times the number of prompts must be at most {self.settings.max_completions}, given {completions}",
            )
        most = self.client.max_num_seqs + self.settings.max_waiting_requests
        if self.num_admitted + count > most:
            self.metrics.rejections.inc()
            raise ApiError(429, f"{most} prompts are being served or wait already", {"Retry-After": "1"})
        self.num_admitted += count
        try:
            yield
        finally:
            self.num_admitted -= count
            if self.is_draining and not self.num_admitted:
                self.is_unused.set()

    def end_when_answered(self) -> None:
        """Take no new requests; the server ends when those that it has are answered."""
        self.is_draining = True
        if not self.num_admitted:
            self.is_unused.set()

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
        adapter = self.adapter_of(asked.model)
        defaults = {"max_tokens": _MAX_TOKENS[asked.kind], **self._engines.sampling}
        sampling = {**defaults, **asked.sampling, "output_kind": "delta" if asked.stream else "final"}
        try:
            params = SamplingParams(**sampling)
            starts: Sequence[int | None]
            if asked.kind == "score":
                encoded, starts = await self._encode_scored(asked)
            else:
                encoded = await self.encode(asked, params)
                starts = [None] * len(encoded)
            for prompt in encoded:
                check_token_ids("prompt", prompt.token_ids, self._engines.vocab_size)
            plan = await self.plan(asked, encoded)
            if plan is not None:
                sampling |= plan.sampling
                params = SamplingParams(**sampling)
        except (ValueError, ImportError) as error:
            raise ApiError.of(error) from error
        sampling.pop("truncate_prompt_tokens", None)  # it was done
        # Clients may give two requests one name.
        names = (f"{request_id}-{next(self._numbers)}" for _ in encoded)
        prompts = [
            ServedPrompt(name, one.text, one.token_ids, start)
            for name, one, start in zip(names, encoded, starts, strict=True)
        ]
        requests = [
            Generate(
                one.request_id,
                one.token_ids,
                sampling,
                asked.priority,
                asked.cache_salt,
                one.scored_from,
                adapter,
                kv_transfer_params=None if asked.kv_transfer_params is None else dict(asked.kv_transfer_params),
            )
            for one in prompts
        ]
        unread = Unread()
        return Served(asked, params, plan, prompts, self._outputs(requests, deadline, unread), adapter, unread)

    async def _outputs(self, requests: Sequence[Generate], deadline: float, unread: Unread) -> AsyncIterator[Output]:
        """``ApiError`` for what the engine refuses, when it has ended, and after the deadline."""
        outputs = self.client.generate(requests, deadline, unread)
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
        except RequestAbortedError as error:
            raise ApiError(500, "the request was aborted", {"x-should-retry": "false"}) from error
        except TimeoutError:
            raise self.too_late from None
        except OverflowError as error:
            raise ApiError(400, "integers in logits_transforms and in schemas must have at most 64 bits") from error
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def encode(self, asked: OpenAIRequest, params: SamplingParams) -> list[EncodedPrompt]:
        """The prompts of a request as tokens. ``ValueError``: they cannot be served."""
        capacity = self._capacity
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

    async def _encode_scored(self, asked: OpenAIRequest) -> tuple[list[EncodedPrompt], list[int]]:
        """Prompts with their continuations, and where these begin. ``ValueError`` as ``encode``."""
        capacity, split = self._capacity, bool(asked.sampling.get("split_special_tokens"))

        def encode_all() -> list[tuple[EncodedPrompt, int]]:
            return [encode_scored(prompt, self.tokenizer, capacity, split) for prompt in asked.prompts]

        found = await self.in_thread(encode_all)
        return [encoded for encoded, _ in found], [start for _, start in found]

    @property
    def _capacity(self) -> Capacity:
        return Capacity(self._engines.capacity, self._engines.limit)

    async def plan(self, asked: OpenAIRequest, encoded: Sequence[EncodedPrompt]) -> AnswerPlan | None:
        """How the answer to a request is read. ``ValueError``: it wants calls in a way that cannot be served."""
        if asked.kind != "chat":
            return None
        text = encoded[0].text or ""
        if not asked.tool_use.tools:
            return self.formats.plan(asked, text)
        return await self.in_thread(lambda: self.formats.plan(asked, text))  # grammars may be long

    def chat_prompt(self, messages: Sequence[Any], options: Mapping[str, Any]) -> EncodedPrompt:
        """A conversation as the chat template writes it; waits for that. ``ValueError`` as ``ChatEncoder.encode``."""
        return EncodedPrompt(*self._chats.encode(messages, self._engines.capacity, **options))

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
