"""EngineCore: the loop below CompiledEngine. It takes the scheduler and the worker from one step to the next."""

import time
from collections import deque
from typing import Any

from compiled_llm.api.config import EngineConfig
from compiled_llm.engine.beam_search import BeamGroup
from compiled_llm.engine.completions import Completion, LogprobReader, UserRequest
from compiled_llm.engine.failures import is_out_of_memory
from compiled_llm.engine.stats import EngineCounts
from compiled_llm.engine.step_logprobs import StepLogprobs
from compiled_llm.engine.transfers import Transfers
from compiled_llm.models.config import ModelConfig
from compiled_llm.report.roofline import windows_of
from compiled_llm.report.step_log import StepLog
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.invariants import check_scheduler, check_step
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.state_pool import StatePool
from compiled_llm.scheduling.window_pool import WindowPool
from compiled_llm.scheduling.worker import Worker, WorkerFacts, WorkerFailedError
from compiled_llm.text.tokenizer import Tokenizer

_NONE: tuple[None, None] = None, None
_MOVING_SECONDS = 0.02  # that a step without requests waits for files


class EngineCore:
    """Serves requests, whatever way they were asked for.

    An entry (``UserRequest``) is what a user asked for. It has a ``Completion`` for each of its ``n`` continuations,
    and each of these has a ``Request``, which is all that the scheduler knows of it. A beam has a ``Request`` alone.

    Attributes:
        entries: unfinished requests by the names that their users gave them.
        updated: names of requests that got a token or ended since the caller last read them. The caller removes a name
            once it has read the request, and calls ``forget`` for a finished one.
        launched: steps that the device works on, oldest first: one, two where steps overlap, or as many as stages
            compute at once.
        counts, log: of what was done.
        delta_seconds: (base, of each, most): deltas are given every ``base + of each * running requests`` seconds, at
            least every ``most``, and are of several steps then. First and last tokens do not wait.
    """

    delta_seconds = 0.0, 0.0, 0.0

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        worker: Worker,
        drafter: DraftSource | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self._transfers = transfers
        self.config, self.model_config, self.worker, self._drafter = config, model_config, worker, drafter
        self.scheduler = self._new_scheduler()
        self.entries: dict[str, UserRequest] = {}
        self.updated: dict[str, None] = {}
        self.launched: deque[tuple[SchedulerOutput, Any]] = deque()
        self.counts = EngineCounts()
        self.log = self._new_log(None)
        self._completions: dict[Request, tuple[UserRequest, Completion]] = {}
        self._beams: dict[Request, BeamGroup] = {}
        self._advanced: deque[Request] = deque()  # requests that got a token or ended, and are still to be processed
        self._deltas_at = 0.0  # of ``time.perf_counter``: when they were last given
        overlaps = worker.facts.device_type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._most_launched = 2 if overlaps else worker.facts.limits.steps_at_once
        reader = LogprobReader(tokenizer, config.max_logprobs)
        self._step_logprobs = StepLogprobs(reader, self._completions, self._beams)

    def _new_scheduler(self) -> Scheduler:
        scheduler = make_scheduler(self.config, self.worker.facts, self._drafter)
        if self._transfers is not None and scheduler.tiers is not None:
            self._transfers.enter(scheduler.tiers)
        return scheduler

    def add(self, entry: UserRequest) -> None:
        """Queue a request whose name is not in use."""
        self._queue(entry.completions[0].request)
        self.entries[entry.request_id] = entry
        for completion in entry.completions:
            self._completions[completion.request] = entry, completion

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        self.log.arrive()
        self.counts.num_requests += 1
        self.counts.num_prompt_tokens += len(request.prompt_token_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests() or bool(self._advanced or self.updated)

    def advance(self) -> None:
        """Run a step, and process the requests that got a token or ended; their names are in ``updated`` then.

        The caller delays Ctrl-C until this returns. An error that is raised all the same may leave a change half made,
        so it ends all requests.
        """
        try:
            if self.scheduler.has_unfinished_requests():
                self._step()
            self._process_advanced()
        except BaseException as error:
            self._fail_all(error)
            raise

    def abort(self, entry: UserRequest) -> None:
        """End a request now, and forget it."""
        for completion in entry.completions:
            if completion.request.status is not Status.FINISHED:
                try:
                    completion.read_new_tokens()
                except Exception as error:  # as when the request would have ended by itself
                    self.scheduler.end(completion.request, "error", f"{type(error).__name__}: {error}")
                self.scheduler.finish(completion.request, "abort")
        self.forget(entry)

    def forget(self, entry: UserRequest) -> None:
        """Drop a request that has ended."""
        self.scheduler.end_forking(entry.requests[0])
        for request in entry.requests:
            del self._completions[request]
        del self.entries[entry.request_id]
        self.counts.num_finished += 1

    def reset_log(self, pauses: list[tuple[float, float]] | None) -> None:
        """Start a new log: unfinished requests count as arriving now. ``pauses``: see ``StepLog``."""
        self.log = self._new_log(pauses)
        for _ in self.entries:
            self.log.arrive()
        for _, completion in self._completions.values():
            completion.last_token_time = None

    def _new_log(self, pauses: list[tuple[float, float]] | None) -> StepLog:
        pads = self.worker.facts.device_type != "cpu"
        return StepLog(pauses, windows_of(self.model_config), self.config.enable_lora, computes_padding=pads)

    def drain(self) -> None:
        """Wait for the steps that the device works on. What they sampled is seen by nobody."""
        while self.launched:
            output, launched = self.launched.popleft()
            self.scheduler.update(output, self.worker.collect(launched))

    def move_blocks(self) -> bool:
        """Run a step without requests, if blocks are still on their way to the disk. Returns whether some are then.

        No request may be unfinished.
        """
        tiers = self.scheduler.tiers
        if tiers is None or not tiers.is_moving or self.scheduler.in_flight:
            return False
        output = self.scheduler.move_files(_MOVING_SECONDS)
        try:
            result = self.worker.collect(self.worker.launch(output))
        except WorkerFailedError:
            raise
        except Exception as error:
            self._fail_steps(error)
            return False
        self.scheduler.update(output, result)
        return tiers.is_moving

    def ask_for_memory(self) -> bool:
        """As the worker's, unless a step is in flight."""
        return not self.scheduler.in_flight and self.worker.ask_for_memory()

    @property
    def is_changing(self) -> bool:
        """As the worker's."""
        return self.worker.is_changing

    # -- Beams

    def add_beams(self, group: BeamGroup) -> None:
        """Queue a beam search. When it ``has_all`` after a step, ``advance_beams``."""
        request = group.start()
        self._beams[request] = group
        self._queue(request)

    def advance_beams(self, group: BeamGroup) -> bool:
        """Start the next beams of a group that ``has_all`` continuations. False when its search is over."""
        parents = group.requests
        for parent, child in group.advance():
            self._beams[child] = group
            self.scheduler.fork(parent, child)
        for parent in parents:
            self.scheduler.end_forking(parent)
            del self._beams[parent]
        return bool(group.requests)

    def end_beams(self, group: BeamGroup) -> None:
        for request in group.requests:
            self.scheduler.finish(request, "abort")
            self.scheduler.end_forking(request)
            self._beams.pop(request, None)
        self.counts.num_finished += 1

    # -- Inside

    def _step(self) -> None:
        """Launch a step. When as many are launched as may be, or none can be, collect the oldest one.

        Requests that got a token, or ended with an error, are in ``_advanced`` then.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        self.counts.schedule_seconds += time.perf_counter() - started
        if self.config.check_invariants:
            check_step(self.scheduler, output)
        try:
            if output.request_ids or output.files.wait_seconds:
                self.launched.append((output, self.worker.launch(output)))
                if len(self.launched) < self._most_launched:
                    return
            output, launched = self.launched.popleft()
            result = self.worker.collect(launched)
        except WorkerFailedError:
            raise
        except Exception as error:
            self._fail_steps(error)
            return
        started = time.perf_counter()
        requests = self.scheduler.in_flight[0]  # before ``update`` removes them there
        advanced = self.scheduler.update(output, result)
        if not output.request_ids:
            return
        if result.logprobs is not None:
            self._step_logprobs.of_tokens(requests, output, result.logprobs, advanced, self.scheduler.paths)
        if result.prompt_logprobs is not None:
            self._step_logprobs.of_prompts(requests, output, result.prompt_logprobs)
        self.counts.schedule_seconds += time.perf_counter() - started
        if self.config.check_invariants:
            check_scheduler(self.scheduler)
        self._advanced += advanced
        self.counts.num_steps += 1
        self.counts.num_output_tokens += sum([request.generates for request in advanced])
        self.counts.num_computed_tokens += output.num_tokens
        self.log.record_step(result.bucket, output, result.seconds, result.num_experts, requests)
        if self.log.series.is_due():
            scheduler, pool = self.scheduler, self.scheduler.pool
            self.log.record_state(pool.num_used, pool.num_cached, len(scheduler.running), scheduler.num_waiting)

    def _process_advanced(self) -> None:
        """Process the requests that got tokens or ended."""
        started = time.perf_counter()
        advanced, completions, now = self._advanced, self._completions, self.log.token_time(started)
        base, of_each, most = self.delta_seconds
        joins_deltas = started - self._deltas_at < min(most, base + of_each * len(self.scheduler.running))
        if not joins_deltas:
            self._deltas_at = started
        gaps = []
        while advanced:
            request = advanced.popleft()
            entry, completion = completions.get(request, _NONE)
            if entry is None or completion is None:  # a beam, or aborted meanwhile
                if request in self._beams and request.finish_reason == "error":
                    self._beams[request].failure = str(request.stop_reason)
                continue
            if request.generates:
                if completion.last_token_time is not None:
                    gaps.append(now - completion.last_token_time)
                completion.last_token_time = now
            # Where nobody sees this token yet, it is read with later ones.
            waits = entry.waits_for_the_end or (joins_deltas and entry.may_join_deltas)
            is_due = len(request.output_token_ids) >= completion.read_at or not waits
            if is_due or request.status is Status.FINISHED or request.pending_error is not None:
                self._process(request, entry, completion)
        self.log.gaps.extend(gaps)
        self.counts.output_seconds += time.perf_counter() - started

    def _process(self, request: Request, entry: UserRequest, completion: Completion) -> None:
        """A request got tokens or ended: decode them, end it where it is to end, and start those that wait for it."""
        if request.pending_error is not None and request.finish_reason != "error":
            if request.generates:
                self._keep_output(completion, len(request.output_token_ids) - 1)  # its mask failed
            self.scheduler.end(request, "error", request.pending_error)
        try:
            stop = completion.read_new_tokens()
            if stop is not None:
                self._keep_output(completion, completion.num_read)  # drafts may have been accepted after the stop
                self.scheduler.end(request, "stop", stop)
            elif completion.mask is not None and request.status is not Status.FINISHED:
                completion.mask.accept(request.output_token_ids)
                if completion.mask.is_finished:
                    self.scheduler.end(request, "stop")
                    completion.read_new_tokens()
        except Exception as error:  # of a tokenizer's or a grammar's library: this request ends, and no other
            self.scheduler.end(request, "error", f"{type(error).__name__}: {error}")
        if not entry.is_forked and request is entry.completions[0].request:
            self._fork(entry)
        if request.status is Status.FINISHED:
            self.log.record_request(request)
        self.updated[entry.request_id] = None

    def _keep_output(self, completion: Completion, num_tokens: int) -> None:
        """The first ``num_tokens`` output tokens stay, and those after them are dropped."""
        self.scheduler.drop_output(completion.request, num_tokens)
        completion.drop_logprobs(num_tokens)

    def _fork(self, entry: UserRequest) -> None:
        """The first completion has computed the prompt: the others start from it; or they fail as it did."""
        entry.is_forked = True
        parent, *children = entry.requests
        for child in children:
            if parent.finish_reason == "error":
                self.scheduler.finish(child, "error", parent.stop_reason)
            else:
                self.scheduler.fork(parent, child)
        self.scheduler.end_forking(parent)

    def _fail_steps(self, error: Exception) -> None:
        """The device failed: requests that turn out to be the cause end with the reason, and the others go on."""
        self.launched.clear()
        ended = self.scheduler.fail_steps_in_flight(f"{type(error).__name__}: {error}")
        if is_out_of_memory(error):
            self.counts.num_out_of_memory_failures += len(ended)
        else:
            self.counts.num_exception_failures += len(ended)
        self._advanced += ended

    def _fail_all(self, error: BaseException) -> None:
        """A step failed half-way, and not on the device: end all requests, and start again with an empty scheduler."""
        reason = f"{type(error).__name__}: {error}"
        self.launched.clear()
        groups = {id(group): group for group in self._beams.values()}.values()
        for group in groups:
            group.failure = reason
        requests = [completion.request for _, completion in self._completions.values()]
        requests += [request for group in groups for request in group.requests]
        broken, self.scheduler = self.scheduler, self._new_scheduler()
        self.scheduler.replace(broken, requests, reason)
        self._advanced = deque(requests)


def make_scheduler(config: EngineConfig, facts: WorkerFacts, drafter: DraftSource | None) -> Scheduler:
    """An empty scheduler for the sizes of a worker and its pools of blocks."""
    limits = facts.limits
    windows = [WindowPool(*sizes, limits) for sizes in facts.window_places]
    pool = BlockPool(facts.num_blocks, windows, StatePool(facts.num_state_slots))
    return Scheduler(
        limits,
        pool,
        prefix_caching=config.enable_prefix_caching,
        block_contents=facts.block_contents,
        swap_pool=BlockPool(facts.num_swap_blocks, states=StatePool(facts.num_swap_slots)),
        tier_rows=range(facts.num_swap_blocks + 1, facts.num_swap_blocks + facts.num_tier_blocks + 1),
        on_disk=facts.blocks_on_disk,
        row_bytes=facts.host_block_bytes or 1,
        tier_slots=range(facts.num_swap_slots + 1, facts.num_swap_slots + facts.num_tier_slots + 1),
        state_bytes=facts.host_slot_bytes or 1,
        preemption_mode=config.preemption_mode,
        policy=config.scheduling_policy,
        target_itl_ms=config.target_itl_ms,
        costs=StepCosts(dict(facts.bucket_seconds), facts.swap_seconds, pads=facts.device_type != "cpu"),
        drafter=drafter,
        decode_seconds=facts.decode_seconds,
        sampling_seconds=facts.sampling_seconds,
    )
