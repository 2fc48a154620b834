"""CompiledEngine: prompts in, outputs out. Ties tokenizer, scheduler and runner together."""

import dataclasses
import hashlib
import itertools
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compiled_llm.block_pool import BlockPool
from compiled_llm.compiler import CompileReport
from compiled_llm.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput
from compiled_llm.prompts import Prompt, check_token_ids, encode_prompt, prompt_list
from compiled_llm.request import Request, Status
from compiled_llm.runner import ModelRunner
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler import Scheduler
from compiled_llm.stream import RequestStream
from compiled_llm.tokenizer import OutputText, Tokenizer

DEMO_MODEL = Path(__file__).parent / "demo_model"


@dataclasses.dataclass
class _Entry:
    """A request and what its user sees of it. ``text`` is None where nothing is decoded."""

    request: Request
    prompt: str | None
    text: OutputText | None


class CompiledEngine:
    """An engine for one model: load, compile every bucket, then serve.

    ``CompiledEngine(model, **engine_args)``; the arguments are those of ``EngineConfig``. Compilation happens here, so
    that no request waits for it; from then on a recompile is an error.

    Raises:
        ValueError: an argument, the model directory or the memory does not allow it; the message says what would.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        self._start(EngineConfig.from_arguments(model=model, **engine_args))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "CompiledEngine":
        engine = cls.__new__(cls)
        engine._start(config)
        return engine

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        directory = DEMO_MODEL if config.model is None else _model_directory(config.model)
        self.model_config = ModelConfig.from_directory(directory)
        self.tokenizer = _load_tokenizer(config, directory)
        self.runner = ModelRunner(config, self.model_config, directory)
        self.scheduler = Scheduler(self.runner.limits, BlockPool(self.runner.num_blocks))
        self._closed = False
        self._entries: dict[str, _Entry] = {}
        self._ids = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}  # where the outputs of each stream go
        self._undelivered: list[RequestOutput] = []  # outputs for step(), of steps that stream() ran
        self._num_requests = self._num_finished = self._num_steps = 0
        self._num_prompt_tokens = self._num_output_tokens = self._num_computed_tokens = 0
        self._schedule_seconds = self._output_seconds = 0.0

    def __enter__(self) -> "CompiledEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and free the weights and the KV cache. The engine serves nothing afterwards."""
        if not self._closed:
            self._closed = True
            self.abort(list(self._entries))
            self.runner.close()

    # -- Serving lists of prompts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; returns the outputs in the order of the prompts.

        Args:
            prompts: a str, a list of token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [...]}``, or a list of
                these.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar.
            raise_on_error: raise for a bad prompt; otherwise its output has ``finish_reason="error"`` and the reason
                in ``stop_reason``, and the other prompts are served.

        Raises:
            ValueError: the arguments do not pair up, or ``raise_on_error`` and a prompt is bad.
            RuntimeError: requests of ``add_request`` are unfinished; their outputs would be lost.
        """
        if priority is not None:
            raise ValueError("priority is not supported in this version; leave it at None")
        items = prompt_list(prompts)
        params = _pair(sampling_params, len(items))
        if self._entries.keys() - self._streams.keys():
            raise RuntimeError("generate() while requests of add_request() are unfinished: finish or abort them first")
        outputs: dict[str, RequestOutput] = {}
        request_ids = [f"generate-{next(self._ids)}" for _ in items]
        pending = set()
        try:
            for request_id, prompt, param in zip(request_ids, items, params, strict=True):
                try:
                    self.add_request(request_id, prompt, param)
                    pending.add(request_id)
                except ValueError as error:
                    if raise_on_error:
                        raise
                    outputs[request_id] = _error_output(request_id, prompt, str(error))
            with tqdm(total=len(items), initial=len(outputs), unit="prompt", disable=not use_tqdm) as bar:
                while pending:
                    for output in self._advance(only_finished=not self._streams):
                        if output.finished:
                            pending.discard(output.request_id)
                            outputs[output.request_id] = output
                            bar.update()
        finally:
            self.abort(list(pending))
        return [outputs[request_id] for request_id in request_ids]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Complete one prompt; an iterator over its output after each of its tokens, the text so far each time.

        Several streams may be consumed in turns. A stream that is closed early, or dropped, aborts its request.
        """
        request_id = f"stream-{next(self._ids)}"
        self.add_request(request_id, prompt, sampling_params)

        def advance() -> None:
            self._undelivered += self._advance()

        def end() -> None:
            del self._streams[request_id]
            self.abort(request_id)

        stream = RequestStream(advance, end)
        self._streams[request_id] = stream.outputs
        return stream

    # -- The loop that these run, for those who write their own

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request; ``step`` advances it.

        Raises:
            ValueError: the id is in use, or the prompt or its parameters cannot be served; nothing is queued then.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not isinstance(request_id, str) or not request_id or request_id in self._entries:
            raise ValueError(f"request_id must be a non-empty str that no unfinished request has, given {request_id!r}")
        if priority != 0:
            raise ValueError(f"priority={priority!r} is not supported in this version; leave it at 0")
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
        capacity = self.scheduler.request_capacity
        text, token_ids = encode_prompt(prompt, self.tokenizer, capacity)
        check_token_ids("prompt_token_ids", token_ids, self.model_config.vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids or (), self.model_config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none: use stop_token_ids")
        if len(token_ids) >= capacity:
            limit = "max_model_len" if capacity == self.runner.limits.max_model_len else "size of the KV pool"
            raise ValueError(
                f"prompt must be shorter than {capacity} tokens (the {limit}; the output needs one at least), given "
                f"{len(token_ids)}"
            )

        max_tokens = capacity if params.max_tokens is None else params.max_tokens
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=self._seed_of_next_request() if params.seed is None else params.seed,
            stop_token_ids=frozenset(params.stop_token_ids or ())
            | frozenset(() if params.ignore_eos else self.model_config.eos_token_ids),
            max_num_tokens=min(len(token_ids) + max_tokens, capacity),
            arrival_time=time.monotonic(),
        )
        decodes = self.tokenizer is not None and params.detokenize
        output_text = OutputText(self.tokenizer, token_ids, params) if self.tokenizer and decodes else None
        self._entries[request_id] = _Entry(request, text, output_text)
        self.scheduler.add(request)
        self._num_requests += 1
        self._num_prompt_tokens += len(token_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        return self.scheduler.has_unfinished_requests() or bool(self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that got a token, those of ``stream`` left out."""
        outputs, self._undelivered = self._undelivered, []
        return outputs + self._advance()

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests now and free their blocks. Unknown and finished ids are passed over.

        A stream gets a last output, with ``finish_reason="abort"``.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self.scheduler.finish(entry.request, "abort")
                self._num_finished += 1
                if name in self._streams:
                    self._streams[name].append(_request_output(entry))

    # -- Reports

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and its state now."""
        pool, times = self.scheduler.pool, self.runner.times
        return EngineStats(
            num_steps=self._num_steps,
            num_requests=self._num_requests,
            num_finished=self._num_finished,
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_padding_tokens=times.num_padding_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_kv_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            peak_used_blocks=pool.peak_used,
            schedule_seconds=self._schedule_seconds,
            prepare_seconds=times.prepare_seconds,
            execute_seconds=times.execute_seconds,
            output_seconds=self._output_seconds,
        )

    def compile_report(self) -> CompileReport:
        """Per compiled graph: graph breaks, recompiles since ready, seconds, cache hit or miss."""
        return self.runner.compile_report()

    # -- Inside

    def _advance(self, only_finished: bool = False) -> list[RequestOutput]:
        """Run one step; outputs of streams go to them, the others are returned."""
        outputs = []
        for output in self._step(only_finished):
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
            else:
                outputs.append(output)
        return outputs

    def _step(self, only_finished: bool) -> list[RequestOutput]:
        if not self.scheduler.has_unfinished_requests():
            return []
        started = time.perf_counter()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter()
        sampled = self.runner.execute(output)
        executed = time.perf_counter()
        advanced = self.scheduler.update(output, sampled)
        updated = time.perf_counter()
        outputs = []
        for request in advanced:
            entry = self._entries[request.request_id]
            self._extend_text(entry)
            finished = request.status is Status.FINISHED
            if finished:
                del self._entries[request.request_id]
                self._num_finished += 1
            if finished or not only_finished:
                outputs.append(_request_output(entry))
        if self.config.check_invariants:
            self.scheduler.check_invariants()
        self._num_steps += 1
        self._num_output_tokens += len(advanced)
        self._num_computed_tokens += output.num_tokens
        self._schedule_seconds += scheduled - started + updated - executed
        self._output_seconds += time.perf_counter() - updated
        return outputs

    def _extend_text(self, entry: _Entry) -> None:
        """Decode the newest token; a stop string in the text ends the request."""
        request, text = entry.request, entry.text
        if text is None:
            return
        # The token that ended a request is not text, unless asked for.
        hidden = request.finish_reason == "stop" and not request.sampling_params.include_stop_str_in_output
        stop = None if hidden else text.append(request.output_token_ids[-1])
        if stop is None and request.status is Status.FINISHED:
            stop = text.finish()
        if stop is not None:
            self.scheduler.finish(request, "stop", stop)
            request.finish_reason, request.stop_reason = "stop", stop

    def _seed_of_next_request(self) -> int:
        text = f"{self.config.seed}/{self._num_requests}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _request_output(entry: _Entry) -> RequestOutput:
    request = entry.request
    finished = request.status is Status.FINISHED
    completion = CompletionOutput(
        index=0,
        text=entry.text.text(finished) if entry.text else "",
        token_ids=list(request.output_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )
    metrics = RequestMetrics(
        arrival_time=request.arrival_time,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finished_time=request.finished_time,
        num_preemptions=request.num_preemptions,
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=entry.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=[completion],
        finished=finished,
        metrics=metrics,
    )


def _error_output(request_id: str, prompt: Any, reason: str) -> RequestOutput:
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", stop_reason=reason)],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )


def _pair(sampling_params: Any, count: int) -> list[Any]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence):
        raise ValueError(f"sampling_params must be a SamplingParams or a list, given {type(sampling_params).__name__}")
    if len(sampling_params) != count:
        raise ValueError(
            f"sampling_params must be one or as many as the prompts, {count}, given {len(sampling_params)}"
        )
    return list(sampling_params)


def _model_directory(model: str) -> Path:
    """The directory of a model: ``model`` itself, or the hub's snapshot of that id with data files alone."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        raise ValueError(f"model={model!r} is neither a directory nor a hub id ('organisation/name')")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # of the network, the hub or the disk
        raise ValueError(f"model={model!r} is no directory here, and not to be had as a hub id: {error}") from error


def _load_tokenizer(config: EngineConfig, directory: Path) -> Tokenizer | None:
    if config.tokenizer is not None:
        return Tokenizer(_model_directory(config.tokenizer))
    return Tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
