"""Scheduler: which tokens of which requests run in the next step, and what their results mean. Never imports torch.

It knows no prefill and no decode. Each request has tokens known and tokens computed; a step lets the second catch up
with the first within a budget of tokens. A prompt larger than the budget is thereby chunked, a preempted request starts
over with nothing computed, and a running one catches up by the one token sampled last. (vLLM V1's idea.)

Order is first come, first served. Running requests go first, oldest first; when blocks run out, the latest one gives
its blocks up and waits at the head of the queue. So the oldest always progresses.
"""

import dataclasses
import time
from collections import deque

from compiled_llm.block_pool import BlockPool
from compiled_llm.config import Limits
from compiled_llm.request import Request, Status
from compiled_llm.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's part of a step.

    Attributes:
        token_ids: the tokens to run, at positions ``num_computed_tokens`` and on.
        new_block_ids: blocks to append to its table; all of them when ``admission`` is given.
        samples: whether these are its last known tokens, so that the step samples the next one.
        admission: sampling parameters and seed when the runner meets the request, or meets it again; else None.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    new_block_ids: list[int]
    samples: bool
    admission: tuple[SamplingParams, int] | None


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A step's work. ``released_request_ids``: finished, aborted or preempted since the step before."""

    requests: list[ScheduledRequest]
    released_request_ids: list[str]
    num_tokens: int
    max_query_len: int


class Scheduler:
    """Continuous batching over a pool of KV blocks."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.num_preemptions = 0
        self._released: list[str] = []

    @property
    def request_capacity(self) -> int:
        """Most tokens one request can ever have: the one place that decides what can fit."""
        return min(self.limits.max_model_len, self.pool.num_blocks * self.limits.block_size)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request whose ``max_num_tokens`` is within ``request_capacity``."""
        assert request.status is Status.WAITING
        assert 0 < len(request.prompt_token_ids) < request.max_num_tokens <= self.request_capacity
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and give them blocks."""
        budget = self.limits.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preemptions_before = self.num_preemptions

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._grow(request, count):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            else:
                scheduled.append(self._scheduled(request, count))
                budget -= count
                index += 1

        # A pool that just ran out takes nobody in: the newcomer would be the next victim.
        while self.waiting and self.num_preemptions == preemptions_before:
            request = self.waiting[0]
            count = min(request.num_tokens, budget)
            if len(self.running) == self.limits.max_num_seqs or count == 0:
                break
            if not self.limits.chunked_prefill and count < request.num_tokens:
                break
            # Room for all its known tokens, though this step may compute fewer: or it might be thrown out half-way.
            if self._blocks_for(request.num_tokens) > self.pool.num_free:
                break
            grown = self._grow(request, count)
            assert grown
            self.waiting.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            if request.first_scheduled_time is None:
                request.first_scheduled_time = time.monotonic()
            scheduled.append(self._scheduled(request, count))
            budget -= count

        if not scheduled and self.has_unfinished_requests():
            raise RuntimeError(f"no request can progress; this is a bug in the scheduler. State: {self._describe()}")
        released, self._released = self._released, []
        return SchedulerOutput(
            requests=scheduled,
            released_request_ids=released,
            num_tokens=self.limits.max_num_batched_tokens - budget,
            max_query_len=max((len(item.token_ids) for item in scheduled), default=0),
        )

    def update(self, output: SchedulerOutput, sampled_token_ids: list[int]) -> list[Request]:
        """Enter a step's results: ``sampled_token_ids[i]`` belongs to ``output.requests[i]``.

        Returns the requests that got a token. Those that this token ended are finished, and their blocks free.
        """
        by_id = {request.request_id: request for request in self.running}
        now = time.monotonic()
        advanced = []
        for item, token_id in zip(output.requests, sampled_token_ids, strict=True):
            request = by_id.get(item.request_id)
            if request is None:  # aborted while the step ran
                continue
            request.num_computed_tokens = item.num_computed_tokens + len(item.token_ids)
            if not item.samples:
                continue
            request.output_token_ids.append(token_id)
            if request.first_token_time is None:
                request.first_token_time = now
            advanced.append(request)
            self._check_end(request, token_id)
        return advanced

    def finish(self, request: Request, finish_reason: str, stop_reason: int | str | None = None) -> None:
        """End a request, wherever it stands, and free its blocks. A finished one is left as it is."""
        if request.status is Status.FINISHED:
            return
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = finish_reason, stop_reason
        request.finished_time = time.monotonic()

    def check_invariants(self) -> None:
        """Assert what must hold between any two steps."""
        assert len(self.running) <= self.limits.max_num_seqs
        self.pool.check_invariants([block for request in self.running for block in request.block_ids])
        requests = [*self.running, *self.waiting]
        assert len({request.request_id for request in requests}) == len(requests), "a request stands in two queues"
        for request in self.running:
            assert request.status is Status.RUNNING
            assert 0 <= request.num_computed_tokens < request.num_tokens <= request.max_num_tokens
            assert self._blocks_for(request.num_computed_tokens) <= len(request.block_ids)
            assert len(request.block_ids) <= self._blocks_for(request.num_tokens)
            assert request.num_sent_blocks == len(request.block_ids), "the runner was not told of a block"
        for request in self.waiting:
            assert request.status is Status.WAITING
            assert not request.block_ids
            assert request.num_computed_tokens == request.num_sent_blocks == 0
        if not requests:
            assert self.pool.num_used == 0, "blocks are used while nothing runs"

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _grow(self, request: Request, count: int) -> bool:
        """Give ``request`` the blocks that ``count`` more tokens need. False, and no change, when there is no room."""
        wanted = self._blocks_for(request.num_computed_tokens + count) - len(request.block_ids)
        blocks = self.pool.allocate(wanted) if wanted > 0 else []
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def _scheduled(self, request: Request, count: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        item = ScheduledRequest(
            request_id=request.request_id,
            token_ids=request.tokens(start, start + count),
            num_computed_tokens=start,
            new_block_ids=request.block_ids[request.num_sent_blocks :],
            samples=start + count == request.num_tokens,
            admission=(request.sampling_params, request.seed) if request.num_sent_blocks == 0 else None,
        )
        request.num_sent_blocks = len(request.block_ids)
        return item

    def _preempt(self, request: Request) -> None:
        """Free the blocks of ``request`` (already out of ``running``); it starts over at the head of the queue."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
        if request.num_sent_blocks:
            self._released.append(request.request_id)
        request.num_sent_blocks = 0

    def _check_end(self, request: Request, token_id: int) -> None:
        params = request.sampling_params
        if token_id in request.stop_token_ids:
            # An end-of-text id is no reason of its own; an id that the user named is.
            self.finish(request, "stop", token_id if token_id in (params.stop_token_ids or ()) else None)
        elif request.num_tokens >= request.max_num_tokens:
            self.finish(request, "length")

    def _describe(self) -> str:
        requests = ", ".join(
            f"{request.request_id} ({request.status.value}: {request.num_computed_tokens} of {request.num_tokens} "
            f"tokens computed, {len(request.block_ids)} blocks)"
            for request in [*self.running, *self.waiting][:20]
        )
        return f"{self.pool.num_free} of {self.pool.num_blocks} blocks free; {requests}; {self.limits}"
