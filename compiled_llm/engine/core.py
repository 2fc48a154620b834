"""EngineCore: the loop under CompiledEngine. Scheduler, runner, and the requests that they serve, a step at a time."""

import time
from collections import deque

from compiled_llm.config import EngineConfig
from compiled_llm.constraints.token_masks import allows_any
from compiled_llm.engine.beam_search import BeamGroup
from compiled_llm.engine.completions import Completion, LogprobReader, ServedRequest
from compiled_llm.engine.parts import make_scheduler
from compiled_llm.engine.stats import EngineCounts
from compiled_llm.models.config import ModelConfig
from compiled_llm.report.step_log import StepLog
from compiled_llm.scheduling.invariants import check_scheduler, check_step
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.text.tokenizer import Tokenizer
from compiled_llm.worker.runner import LaunchedStep, ModelRunner


class EngineCore:
    """Serves requests; knows nothing of prompts, streams and other ways to ask for one.

    Attributes:
        entries: unfinished requests as their users named them.
        touched: names of those that got a token or ended since somebody looked. A finished one is to be forgotten then.
        launched: steps that the device works on, oldest first: one, or one more that the host prepares meanwhile.
        counts, log: of what was done.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer | None, runner: ModelRunner
    ) -> None:
        self.config, self.model_config, self.runner = config, model_config, runner
        self.scheduler = make_scheduler(config, model_config, runner)
        self.entries: dict[str, ServedRequest] = {}
        self.touched: dict[str, None] = {}
        self.launched: deque[tuple[SchedulerOutput, LaunchedStep]] = deque()
        self.counts = EngineCounts()
        self.log = StepLog()
        self._completions: dict[str, tuple[ServedRequest, Completion]] = {}  # by the id that the scheduler knows
        self._beams: dict[str, BeamGroup] = {}  # likewise
        self._advanced: deque[Request] = deque()  # who got a token or ended, and is to be looked at
        overlaps = runner.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._most_launched = 2 if overlaps else 1
        self._logprob_reader = LogprobReader(tokenizer, config.max_logprobs)

    def add(self, entry: ServedRequest) -> None:
        """Queue a request whose name nobody has."""
        self._count(entry.completions[0].request)
        self.entries[entry.request_id] = entry
        for completion in entry.completions:
            self._completions[completion.request.request_id] = entry, completion

    def _count(self, request: Request) -> None:
        self.scheduler.add(request)
        self.log.arrive()
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += len(request.prompt_token_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests() or bool(self._advanced or self.touched)

    def advance(self) -> None:
        """Run a step, and look at everybody who got a token or ended; they are in ``touched`` then.

        The engine holds interrupts back meanwhile. What is raised all the same, in the middle of a change that was not
        made whole, ends all requests.
        """
        try:
            if self.scheduler.has_unfinished_requests():
                self._step()
            while self._advanced:
                self._look_at(self._advanced.popleft())
        except BaseException as error:
            self._fail_all(error)
            raise

    def abort(self, entry: ServedRequest) -> None:
        """End a request now, and forget it."""
        for request in entry.requests:
            self.scheduler.finish(request, "abort")
        self.forget(entry)

    def forget(self, entry: ServedRequest) -> None:
        """A request has ended."""
        self.scheduler.let_go(entry.requests[0])
        for request in entry.requests:
            del self._completions[request.request_id]
        del self.entries[entry.request_id]
        self.counts.num_finished += 1

    def reset_log(self, log: StepLog) -> None:
        """Begin the log anew: unfinished requests count as arriving now."""
        self.log = log
        for _ in self.entries:
            log.arrive()
        for _, completion in self._completions.values():
            completion.last_token_time = None

    def drain(self) -> None:
        """Wait for the steps that the device works on; nobody wants their results."""
        while self.launched:
            self.runner.collect(self.launched.popleft()[1])

    # -- Beams

    def add_beams(self, group: BeamGroup) -> None:
        """Queue a beam search. When it ``has_all`` after a step, ``advance_beams``."""
        request = group.start()
        self._beams[request.request_id] = group
        self._count(request)

    def advance_beams(self, group: BeamGroup) -> bool:
        """All continuations of a group are in: set the next beams going. False when its search is over."""
        parents = group.requests
        for parent, child in group.advance():
            self._beams[child.request_id] = group
            self.scheduler.fork(parent, child)
        for parent in parents:
            self.scheduler.let_go(parent)
            del self._beams[parent.request_id]
        return bool(group.requests)

    def end_beams(self, group: BeamGroup) -> None:
        for request in group.requests:
            self.scheduler.finish(request, "abort")
            self.scheduler.let_go(request)
            self._beams.pop(request.request_id, None)
        self.counts.num_finished += 1

    # -- Inside

    def _step(self) -> None:
        """Launch a step, and enter the results of the oldest one when as many are launched as may be.

        Who got a token, or ended with an error, is in ``_advanced`` then.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self.counts.schedule_seconds += time.perf_counter() - started
        if self.config.check_invariants:
            check_step(self.scheduler, output)
        self._ask(output)
        try:
            if output.request_ids:
                self.launched.append((output, self.runner.launch(output)))
                if len(self.launched) < self._most_launched:
                    return
            output, launched = self.launched.popleft()
            sampled = self.runner.collect(launched)
        except Exception as error:
            self._fail_steps(error)
            return
        started = time.perf_counter()
        advanced = self.scheduler.update(output, sampled)
        self._read_logprobs(output, launched, advanced)
        self.counts.schedule_seconds += time.perf_counter() - started
        if self.config.check_invariants:
            check_scheduler(self.scheduler)
        self._advanced += advanced
        self.counts.num_steps += 1
        self.counts.num_output_tokens += len(advanced)
        self.counts.num_computed_tokens += output.num_tokens
        self.log.record_step(launched.bucket, output, launched.seconds)
        if self.log.series.is_due():
            scheduler, pool = self.scheduler, self.scheduler.pool
            self.log.record_state(pool.num_used, pool.num_cached, len(scheduler.running), scheduler.num_waiting)

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
                if allows_any(words, self.model_config.vocab_size):
                    output.masks.append((index, words))
                else:
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
                if wanted is None or request.finish_reason == "error":
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
        completion.last_token_time = self.log.record_token(started, completion.last_token_time)
        if completion.failure is not None and request.finish_reason != "error":
            completion.drop_last_token()
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
            self.log.record_request(request)
        self.touched[entry.request_id] = None
        self.counts.output_seconds += time.perf_counter() - started

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

    def _fail_steps(self, error: BaseException) -> None:
        """The device failed: the requests of the steps in flight end with the reason, and the others are served."""
        self.launched.clear()
        self.runner.rows.clear()
        self._advanced += self.scheduler.fail_steps_in_flight(f"{type(error).__name__}: {error}")

    def _fail_all(self, error: BaseException) -> None:
        """A step failed half-way, and not on the device: end all requests, and start again with an empty scheduler."""
        self.launched.clear()
        self.runner.rows.clear()
        self._advanced.clear()
        old, self.scheduler = self.scheduler, make_scheduler(self.config, self.model_config, self.runner)
        self.scheduler.take_over_counts(old)
        groups = {id(group): group for group in self._beams.values()}.values()
        for group in groups:
            group.failure = f"{type(error).__name__}: {error}"
        ended = [completion.request for _, completion in self._completions.values()]
        for request in [*ended, *(request for group in groups for request in group.requests)]:
            if request.finish_reason is None:
                request.finish_reason, request.stop_reason = "error", f"{type(error).__name__}: {error}"
            request.status = Status.FINISHED
            request.finished_time = request.finished_time or time.monotonic()
            self._advanced.append(request)
