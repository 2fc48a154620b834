"""CompiledEngine: prompts in, outputs out. Ties tokenizer, scheduler and runner together."""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from compiled_llm.beam_search import BeamGroup, check_beam_search
from compiled_llm.compiler import CompileReport
from compiled_llm.config import EngineConfig, integer
from compiled_llm.engine_parts import load_tokenizer, make_scheduler
from compiled_llm.engine_stats import EngineCounts
from compiled_llm.intake import Intake
from compiled_llm.invariants import check_scheduler, check_step
from compiled_llm.loader import model_directory
from compiled_llm.memory import MemoryLedger
from compiled_llm.models.config import ModelConfig
from compiled_llm.outputs import EngineStats, RequestOutput
from compiled_llm.prompts import Prompt, pair_priorities, pair_sampling_params, prompt_list
from compiled_llm.report import RunReport, make_report, make_trace
from compiled_llm.request import Request, Status
from compiled_llm.runner import LaunchedStep, ModelRunner
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler_output import SchedulerOutput
from compiled_llm.served_request import Completion, LogprobReader, ServedRequest, error_output
from compiled_llm.step_log import StepLog
from compiled_llm.step_profile import StepProfiler
from compiled_llm.stream import RequestStream
from compiled_llm.token_masks import allows_any

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
        self._completions: dict[str, tuple[ServedRequest, Completion]] = {}  # by the id that the scheduler knows
        self._beams: dict[str, BeamGroup] = {}  # likewise
        self._intake = Intake(
            config,
            self.model_config,
            self.tokenizer,
            self.runner.transforms,
            self.scheduler.request_capacity,
            self.runner.limits.max_model_len,
        )
        self._logprob_reader = LogprobReader(self.tokenizer, config.max_logprobs)
        self._ids = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}  # where the outputs of each stream go
        self._dropped: deque[str] = deque()  # streams that nobody holds any more
        self._advanced: deque[Request] = deque()  # who got a token or ended, and is to be looked at
        self._touched: dict[str, None] = {}  # user's requests whose outputs are to be made
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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        *,
        ignore_eos: bool = False,
        raise_on_error: bool = False,
    ) -> list[RequestOutput]:
        """The likeliest continuations of every prompt, as transformers' ``generate(num_beams=beam_width)`` finds them.

        Beams share the KV blocks of what they have in common, and copy the last one when they part. Other requests are
        served meanwhile; ``step`` returns their outputs.

        Args:
            length_penalty: score = (sum of log-probabilities) / (number of tokens) ** length_penalty.
            ignore_eos: go on after an end-of-text token.
            raise_on_error: as in ``generate``.

        Returns:
            For each prompt the ``beam_width`` best in ``outputs``, best first, with their ``cumulative_logprob``.

        Raises:
            ValueError: an argument, with what is allowed; with ``raise_on_error`` also a bad prompt.
        """
        eos_token_ids = () if ignore_eos else self.model_config.eos_token_ids
        check_beam_search(beam_width, max_tokens, length_penalty, eos_token_ids, self.config.max_logprobs)
        groups: dict[str, BeamGroup] = {}
        outputs: dict[str, RequestOutput] = {}
        items = prompt_list(prompts)
        request_ids = [self._unused_id("beam_search") for _ in items]
        for request_id, prompt in zip(request_ids, items, strict=True):
            try:
                entry = self._intake.make(request_id, prompt, SamplingParams(max_tokens=max_tokens), 0, 0)
            except ValueError as error:
                if raise_on_error:
                    raise
                outputs[request_id] = error_output(request_id, prompt, str(error))
                continue
            request = entry.completions[0].request
            groups[request_id] = BeamGroup(
                request_id,
                entry.prompt,
                request.prompt_token_ids,
                request.cache_salt,
                beam_width=beam_width,
                max_tokens=request.max_num_tokens - len(request.prompt_token_ids),
                length_penalty=length_penalty,
                eos_token_ids=eos_token_ids,
            )
        try:
            for group in groups.values():
                request = group.start()
                self._beams[request.request_id] = group
                self.scheduler.add(request)
                self._log.arrive()
                self._counts.num_requests += 1
                self._counts.num_prompt_tokens += len(request.prompt_token_ids)
            while groups:
                self._undelivered += self._advance()
                for request_id, group in list(groups.items()):
                    if group.failure is not None or (group.has_all and not self._advance_beams(group)):
                        outputs[request_id] = group.output(self.tokenizer)
                        self._end_beams(group)
                        del groups[request_id]
        finally:
            for group in groups.values():
                self._end_beams(group)
        return [outputs[request_id] for request_id in request_ids]

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
        if not isinstance(request_id, str) or not request_id or "\0" in request_id or request_id in self._entries:
            raise ValueError(
                f"request_id must be a non-empty str without NUL that no unfinished request has, given {request_id!r}"
            )
        integer("priority", priority, -(2**31), 2**31 - 1)
        if priority != 0 and self.config.scheduling_policy != "priority":
            raise ValueError(
                f"priority must be 0 unless the engine's scheduling_policy is 'priority', given {priority!r}"
            )
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, given {type(params).__name__}")
        entry = self._intake.make(request_id, prompt, params, priority, self._counts.num_requests)
        self._entries[request_id] = entry
        for completion in entry.completions:
            self._completions[completion.request.request_id] = entry, completion
        self.scheduler.add(entry.completions[0].request)
        self._log.arrive()
        self._counts.num_requests += 1
        self._counts.num_prompt_tokens += len(entry.prompt_token_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        self._abort_dropped_streams()
        return self.scheduler.has_unfinished_requests() or bool(self._undelivered or self._advanced or self._touched)

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
            entry = self._entries.get(name)
            if entry is not None:
                for request in entry.requests:
                    self.scheduler.finish(request, "abort")
                self._forget(entry)
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
        for _ in self._entries:
            self._log.arrive()
        for _, completion in self._completions.values():
            completion.last_token_time = None

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
        while self._advanced:
            self._look_at(self._advanced[0])
            self._advanced.popleft()
        outputs = []
        while self._touched:
            request_id = next(iter(self._touched))
            output = self._next_output(request_id, only_finished)
            del self._touched[request_id]
            if output is not None and request_id in self._streams:
                self._streams[request_id].append(output)
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
            self._ask(output)
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
            self._read_logprobs(output, launched, advanced)
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

    def _ask(self, output: SchedulerOutput) -> None:
        """Add to a scheduled step what its requests want besides: masks, and log-probabilities of prompts."""
        for index, request_id in enumerate(output.request_ids):
            entry, completion = self._completions.get(request_id, (None, None))
            if entry is None or completion is None:  # a beam
                continue
            request, mask = completion.request, completion.mask
            if mask is not None and output.samples[index]:
                # The token to be chosen is counted in num_tokens already.
                num_output_tokens = request.num_tokens - 1 - len(request.prompt_token_ids)
                try:
                    words = mask.words(request.output_token_ids, num_output_tokens)
                except Exception as error:  # of a grammar's library: this request fails, and no other
                    completion.failure = f"{type(error).__name__}: {error}"
                    continue
                output.masks.append((index, words))
                if not allows_any(words, self.model_config.vocab_size):
                    completion.failure = "bad_words and allowed_token_ids leave no token to go on with"
            if entry.prompt_logprobs is not None and request is entry.completions[0].request:
                start, count = output.num_computed_tokens[index], output.num_scheduled_tokens[index]
                targets = entry.wanted_prompt_targets(start, count)
                if targets:
                    output.prompt_targets.append((index, targets))

    def _read_logprobs(self, output: SchedulerOutput, launched: LaunchedStep, advanced: list[Request]) -> None:
        """Hand out the log-probabilities of a step: of tokens that were chosen, and of prompts."""
        if launched.logprobs is not None:
            columns = [column.tolist() for column in launched.logprobs]
            place_of = {request_id: index for index, request_id in enumerate(output.request_ids)}
            for request in advanced:
                wanted = request.sampling_params.logprobs
                if wanted is None:
                    continue
                place = place_of[request.request_id]
                logprob, rank, top_logprobs, top_ids = (column[place] for column in columns)
                if request.request_id in self._completions:
                    row = logprob, rank, top_logprobs, top_ids
                    read = self._logprob_reader.read(row, request.output_token_ids[-1], wanted)
                    self._completions[request.request_id][1].add_logprobs(read)
                elif request.request_id in self._beams:
                    self._beams[request.request_id].take(request, top_ids, top_logprobs)
        if launched.prompt_logprobs is not None:
            rows = zip(*(column.tolist() for column in launched.prompt_logprobs), strict=True)
            for index, targets in output.prompt_targets:
                found = [next(rows) for _ in targets]
                entry = self._completions.get(output.request_ids[index], (None, None))[0]
                if entry is not None and entry.params.prompt_logprobs is not None:
                    count = entry.params.prompt_logprobs
                    tokens = zip(found, targets, strict=True)
                    read_all = [self._logprob_reader.read(row, token_id, count) for row, token_id in tokens]
                    entry.add_prompt_logprobs(output.num_computed_tokens[index], read_all)

    def _look_at(self, request: Request) -> None:
        """A request got a token or ended: decode it, see whether it ends there, and set going who waits for it."""
        started = time.perf_counter()
        if request.request_id in self._beams and request.finish_reason == "error":
            self._beams[request.request_id].failure = str(request.stop_reason)
        entry, completion = self._completions.get(request.request_id, (None, None))
        if entry is None or completion is None or completion.request is not request:  # aborted meanwhile
            return
        completion.last_token_time = self._log.record_token(started, completion.last_token_time)
        if completion.failure is not None and request.finish_reason != "error":
            del request.output_token_ids[-1]
            self._end(request, "error", completion.failure)
        try:
            stop = completion.read_new_tokens()
            if stop is not None:
                self._end(request, "stop", stop)
            elif completion.mask is not None and request.status is not Status.FINISHED:
                completion.mask.accept(request.output_token_ids)
                if completion.mask.is_finished:
                    self._end(request, "stop", None)
                    completion.read_new_tokens()
        except Exception as error:  # of a tokenizer's or a grammar's library: this request ends, and no other
            self._end(request, "error", f"{type(error).__name__}: {error}")
        if not entry.is_forked and request is entry.completions[0].request:
            self._fork(entry)
        if request.status is Status.FINISHED:
            self._log.record_request(request)
        self._touched[entry.request_id] = None
        self._counts.output_seconds += time.perf_counter() - started

    def _end(self, request: Request, finish_reason: str, stop_reason: str | int | None) -> None:
        """End a request, or give another reason to one that its last token ended."""
        self.scheduler.finish(request, finish_reason, stop_reason)
        request.finish_reason, request.stop_reason = finish_reason, stop_reason

    def _fork(self, entry: ServedRequest) -> None:
        """The first completion has computed the prompt: the others start from it; or they end as it did."""
        entry.is_forked = True
        parent, *children = entry.requests
        for child in children:
            if parent.finish_reason == "error":
                self.scheduler.finish(child, "error", parent.stop_reason)
            else:
                self.scheduler.fork(parent, child)
        self.scheduler.let_go(parent)

    def _advance_beams(self, group: BeamGroup) -> bool:
        """All continuations of a group are in: set the next beams going. False when its search is over."""
        parents = group.requests
        for parent, child in group.advance():
            self._beams[child.request_id] = group
            self.scheduler.fork(parent, child)
        for parent in parents:
            self.scheduler.let_go(parent)
            del self._beams[parent.request_id]
        return bool(group.requests)

    def _end_beams(self, group: BeamGroup) -> None:
        for request in group.requests:
            self.scheduler.finish(request, "abort")
            self.scheduler.let_go(request)
            self._beams.pop(request.request_id, None)
        self._counts.num_finished += 1

    def _next_output(self, request_id: str, only_finished: bool) -> RequestOutput | None:
        """What the user sees of a request that advanced."""
        started = time.perf_counter()
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        finished = entry.is_finished
        output = entry.output() if finished or not only_finished else None
        if finished:
            self._forget(entry)
        self._counts.output_seconds += time.perf_counter() - started
        return output

    def _forget(self, entry: ServedRequest) -> None:
        """A request has ended."""
        del self._entries[entry.request_id]
        for request in entry.requests:
            del self._completions[request.request_id]
        self._counts.num_finished += 1

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
        for _, completion in self._completions.values():
            request = completion.request
            if request.finish_reason is None:
                request.finish_reason, request.stop_reason = "error", f"{type(error).__name__}: {error}"
            request.status = Status.FINISHED
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
