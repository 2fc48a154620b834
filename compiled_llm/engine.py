"""CompiledEngine: prompts in, outputs out. Ties tokenizer, scheduler and runner together."""

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compiled_llm.compiler import CompileReport
from compiled_llm.config import EngineConfig, integer
from compiled_llm.engine_parts import load_tokenizer, make_scheduler
from compiled_llm.engine_stats import EngineCounts
from compiled_llm.invariants import check_scheduler, check_step
from compiled_llm.loader import model_directory
from compiled_llm.memory import MemoryLedger
from compiled_llm.models.config import ModelConfig
from compiled_llm.outputs import EngineStats, RequestOutput
from compiled_llm.prompts import (
    Prompt,
    check_token_ids,
    encode_prompt,
    pair_priorities,
    pair_sampling_params,
    prompt_list,
)
from compiled_llm.report import RunReport, make_report, make_trace
from compiled_llm.request import Request, Status
from compiled_llm.runner import LaunchedStep, ModelRunner
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler_output import SchedulerOutput
from compiled_llm.served_request import ServedRequest, error_output
from compiled_llm.step_log import StepLog
from compiled_llm.step_profile import StepProfiler
from compiled_llm.stream import RequestStream
from compiled_llm.tokenizer import OutputText

DEMO_MODEL = Path(__file__).parent / "demo_model"


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
        directory = DEMO_MODEL if config.model is None else model_directory(config.model)
        self.model_config = ModelConfig.from_directory(directory)
        self.tokenizer = load_tokenizer(config, directory)
        self.runner = ModelRunner(config, self.model_config, directory)
        self.scheduler = make_scheduler(self.config, self.model_config, self.runner)
        # Steps that the device works on, oldest first: one, or with overlap one more while the host prepares it.
        self._launched: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
        overlaps = self.runner.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._most_launched = 2 if overlaps else 1
        self._closed = False
        self._entries: dict[str, ServedRequest] = {}
        self._ids = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}  # where the outputs of each stream go
        self._dropped: deque[str] = deque()  # streams that nobody holds any more
        self._advanced: deque[Request] = deque()  # whose outputs are to be made
        self._undelivered: list[RequestOutput] = []  # outputs for step(), of steps that stream() ran
        self._counts = EngineCounts()
        self.reset_report()

    def __enter__(self) -> "CompiledEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and free the weights and the KV cache. The engine serves nothing afterwards."""
        if not self._closed:
            self._closed = True
            try:
                self.abort(list(self._entries))
                while self._launched:
                    self.runner.collect(self._launched.popleft()[1])
            finally:
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
            priority: one for each prompt, lower is served first; for ``scheduling_policy="priority"``.
            raise_on_error: raise for a bad prompt; otherwise its output has ``finish_reason="error"`` and the reason
                in ``stop_reason``, and the other prompts are served.

        Raises:
            ValueError: the arguments do not pair up, or ``raise_on_error`` and a prompt is bad.
            RuntimeError: requests of ``add_request`` are unfinished; their outputs would be lost.
        """
        items = prompt_list(prompts)
        params = pair_sampling_params(sampling_params, len(items))
        priorities = pair_priorities(priority, len(items))
        if self._entries.keys() - self._streams.keys():
            raise RuntimeError("generate() while requests of add_request() are unfinished: finish or abort them first")
        outputs: dict[str, RequestOutput] = {}
        request_ids = [self._unused_id("generate") for _ in items]
        pending = set()
        try:
            for request_id, prompt, param, number in zip(request_ids, items, params, priorities, strict=True):
                try:
                    self.add_request(request_id, prompt, param, number)
                    pending.add(request_id)
                except ValueError as error:
                    if raise_on_error:
                        raise
                    outputs[request_id] = error_output(request_id, prompt, str(error))
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
        request_id = self._unused_id("stream")
        self.add_request(request_id, prompt, sampling_params)

        def advance() -> None:
            self._undelivered += self._advance()

        stream = RequestStream(advance, lambda: self._end_stream(request_id), lambda: self._dropped.append(request_id))
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
        integer("priority", priority, -(2**31), 2**31 - 1)
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority must be 0 unless the engine's scheduling_policy is 'priority', given {priority!r}"
            )
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
        capacity = self.scheduler.request_capacity
        text, token_ids, cache_salt = encode_prompt(prompt, self.tokenizer, capacity)
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
            priority=priority,
            cache_salt=cache_salt,
        )
        decodes = self.tokenizer is not None and params.detokenize
        output_text = OutputText(self.tokenizer, token_ids, params) if self.tokenizer and decodes else None
        self._entries[request_id] = ServedRequest(request, text, list(token_ids), output_text)
        self.scheduler.add(request)
        self._log.arrive()
        self._counts.num_requests += 1
        self._counts.num_prompt_tokens += len(token_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        self._abort_dropped_streams()
        return self.scheduler.has_unfinished_requests() or bool(self._undelivered or self._advanced)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs of the requests that got a token, those of ``stream`` left out."""
        advanced = self._advance()
        outputs, self._undelivered = self._undelivered, []
        return outputs + advanced

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests now and free their blocks. Unknown and finished ids are passed over.

        A stream gets a last output, with ``finish_reason="abort"``.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            entry = self._entries.pop(name, None)
            if entry is not None:
                self.scheduler.finish(entry.request, "abort")
                self._counts.num_finished += 1
                if name in self._streams:
                    self._streams[name].append(entry.output())

    def reset_prefix_cache(self) -> None:
        """Forget all cached KV blocks. ``RuntimeError`` while requests are unfinished: theirs are in use."""
        if self.scheduler.has_unfinished_requests():
            raise RuntimeError("reset_prefix_cache() while requests are unfinished: finish or abort them first")
        self.scheduler.pool.clear_cache()

    # -- Reports

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and its state now."""
        return self._counts.stats(self.scheduler, self.runner.times)

    def compile_report(self) -> CompileReport:
        """Per compiled graph: graph breaks, recompiles since ready, seconds, cache hit or miss."""
        return self.runner.compile_report()

    def memory_report(self) -> MemoryLedger:
        """What the memory goes to, as measured at the start: weights, graphs, activations, KV pool, what stays free."""
        return self.runner.memory_ledger

    def reset_report(self, *, profile_steps: int = 0) -> None:
        """Begin the report anew: what was served so far, a warm-up perhaps, is no part of it.

        Args:
            profile_steps: so many steps of each bucket are run a second time under torch's profiler, for the shares of
                attention, linears and sampling. No time in the report counts that, but the run takes longer by it.
        """
        integer("profile_steps", profile_steps, 0, 1000)
        profiler = StepProfiler(profile_steps, self.runner.device) if profile_steps else None
        self.runner.profiler = profiler
        self._log = StepLog(profiler.pauses if profiler else None)
        self._stats_before = self.stats()
        for entry in self._entries.values():
            entry.last_token_time = None
            self._log.arrive()

    def report(self, *, measure_limits: bool = True) -> RunReport:
        """What was served since the start or ``reset_report``, and how near the machine's limits that was.

        Args:
            measure_limits: measure the machine's limits, once and in a few seconds, if no earlier run did.

        Raises:
            RuntimeError: they are to be measured and too little memory is free for that.
        """
        return make_report(self, self._log, self.stats().since(self._stats_before), measure_limits)

    def trace(self) -> dict[str, Any]:
        """The shapes of all steps since the start or ``reset_report``, as ``scripts/tune_buckets.py`` reads them."""
        return make_trace(self, self._log)

    # -- Inside

    def _advance(self, only_finished: bool = False) -> list[RequestOutput]:
        """Run one step; outputs of streams go to them, the others are returned."""
        self._abort_dropped_streams()
        self._log.enter(device_is_busy=bool(self._launched))
        if self.scheduler.has_unfinished_requests():
            self._step()
        outputs = []
        while self._advanced:
            output = self._next_output(self._advanced[0], only_finished)
            self._advanced.popleft()
            if output is not None and output.request_id in self._streams:
                self._streams[output.request_id].append(output)
            elif output is not None:
                outputs.append(output)
        self._log.leave()
        return outputs

    def _step(self) -> None:
        """Launch a step, and enter the results of the oldest one when as many are launched as may be.

        Who got a token, or ended with an error, is in ``_advanced`` then.
        """
        try:
            started = time.perf_counter()
            output = self.scheduler.schedule()
            self._counts.schedule_seconds += time.perf_counter() - started
            if self.config.check_invariants:
                check_step(self.scheduler, output)
        except BaseException as error:
            self._fail_all(error)
            raise
        try:
            if output.request_ids:
                self._launched.append((output, self.runner.launch(output)))
                if len(self._launched) < self._most_launched:
                    return
            output, launched = self._launched.popleft()
            sampled = self.runner.collect(launched)
        except BaseException as error:
            self._fail_steps(error)
            if isinstance(error, Exception):
                return
            raise
        try:
            started = time.perf_counter()
            advanced = self.scheduler.update(output, sampled)
            self._counts.schedule_seconds += time.perf_counter() - started
            if self.config.check_invariants:
                check_scheduler(self.scheduler)
        except BaseException as error:
            self._fail_all(error)
            raise
        self._advanced += advanced
        self._counts.num_steps += 1
        self._counts.num_output_tokens += len(advanced)
        self._counts.num_computed_tokens += output.num_tokens
        self._log.record_step(launched.bucket, output, launched.seconds)
        if self._log.series.is_due():
            scheduler, pool = self.scheduler, self.scheduler.pool
            self._log.record_state(pool.num_used, pool.num_cached, len(scheduler.running), scheduler.num_waiting)

    def _next_output(self, request: Request, only_finished: bool) -> RequestOutput | None:
        """What the user sees of a request that got a token or ended."""
        started = time.perf_counter()
        entry = self._entries.get(request.request_id)
        if entry is None or entry.request is not request:  # aborted meanwhile, or seen already
            return None
        entry.last_token_time = self._log.record_token(started, entry.last_token_time)
        stop = entry.read_new_tokens()
        if stop is not None:
            self.scheduler.finish(request, "stop", stop)
            request.finish_reason, request.stop_reason = "stop", stop
        finished = request.status is Status.FINISHED
        output = entry.output() if finished or not only_finished else None
        if finished:
            del self._entries[request.request_id]
            self._counts.num_finished += 1
            self._log.record_request(request)
        self._counts.output_seconds += time.perf_counter() - started
        return output

    def _fail_steps(self, error: BaseException) -> None:
        """The device failed: the requests of the steps in flight end with the reason, and the others are served."""
        self._launched.clear()
        self.runner.rows.clear()
        self._advanced += self.scheduler.fail_steps_in_flight(f"{type(error).__name__}: {error}")

    def _fail_all(self, error: BaseException) -> None:
        """Scheduling failed or was interrupted half-way: end all requests, and begin anew with an empty scheduler."""
        self._launched.clear()
        self.runner.rows.clear()
        old, self.scheduler = self.scheduler, make_scheduler(self.config, self.model_config, self.runner)
        self.scheduler.take_over_counts(old)
        for entry in self._entries.values():
            request = entry.request
            request.status, request.finish_reason = Status.FINISHED, request.finish_reason or "error"
            request.stop_reason = request.stop_reason or f"{type(error).__name__}: {error}"
            request.finished_time = request.finished_time or time.monotonic()
            self._advanced.append(request)

    def _abort_dropped_streams(self) -> None:
        """Streams that the garbage collector found: it may run anywhere, so they wait for a safe moment."""
        while self._dropped:
            self._end_stream(self._dropped.popleft())

    def _end_stream(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self.abort(request_id)

    def _unused_id(self, kind: str) -> str:
        return next(name for n in self._ids if (name := f"{kind}-{n}") not in self._entries)

    def _seed_of_next_request(self) -> int:
        text = f"{self.config.seed}/{self._counts.num_requests}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
