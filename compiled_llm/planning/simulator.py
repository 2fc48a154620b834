"""Requests served by groups of devices, as discrete events over known step costs.

A step is planned as ``scheduling/step_planner.py`` does it: a token for each request that decodes, and beside them
prompts by arrival, in chunks where the step has no room. ``tests/planning/test_simulator.py`` holds both against each
other. Left out: blocks (the KV pool is counted in tokens), the host's time but for what measured steps contain.

A group runs one model or several, which take turns step by step, over one stage or the stages of a pipeline. In a
pipeline of n stages each model has n batches, whose steps are in different stages at a time (``_Lane``). A request goes
to the replica of its model whose group has least to do.

Steps that only decode are alike: many of them are one event, which an arrival cuts short.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.planning.costs import ReplicaCosts
from compiled_llm.planning.traces import TraceRequest

_LOOK_AHEAD = 64  # waiting requests that are tried beside a chunked one
_MOST_REPEATS = 32  # steps of a lane that are one event beside other lanes


class GroupPlan(NamedTuple):
    """Devices that serve together: ``replicas`` has the costs of each model on them, and its KV pool in tokens."""

    replicas: Mapping[str, tuple[ReplicaCosts, float]]


class Outcome(NamedTuple):
    """``ttft``, ``e2el``: seconds from the arrival, float64 ``[n]``, in the trace's order; infinite: not served.

    ``busy``: of each group, the share of the time in which its first stage worked, until the last request ended.
    """

    ttft: np.ndarray
    e2el: np.ndarray
    busy: np.ndarray
    num_preemptions: int


class _Request:
    __slots__ = ("arrival", "deadline", "done", "end", "finished", "first", "index", "output", "owed", "prompt")

    def __init__(self, index: int, row: TraceRequest, deadline: float) -> None:
        self.index, self.arrival, self.deadline = index, row.arrival, row.arrival + deadline
        self.prompt, self.output, self.done = row.prompt_tokens, row.output_tokens, row.cached_tokens
        self.first = self.finished = math.inf
        self.end = 0  # the step of its lane that gives its last token
        self.owed = 0  # tokens that count as its group's load

    def __lt__(self, other: "_Request") -> bool:
        return (self.end, self.index) < (other.end, other.index)


class _Lane:
    """A batch of a replica: ``running`` decode, a heap by their ends; ``lacking`` are in the middle of their prompts.

    Attributes:
        count: steps that gave tokens. keys: tokens that ``running`` have in the cache.
        chunks: of the step that runs: (request, tokens of its prompt).
        num_steps: steps alike that its event stands for; such take ``scale`` times their seconds, and ``extra``.
    """

    def __init__(self, replica: "_Replica") -> None:
        self.replica, self.running, self.lacking = replica, list[_Request](), list[_Request]()
        self.count = self.keys = self.num_steps = self.version = 0
        self.chunks: list[tuple[_Request, int]] = []
        self.is_busy = False
        self.started = self.stage_seconds = self.extra = 0.0
        self.scale, self.turn = 1.0, 0

    def __len__(self) -> int:
        return len(self.running) + len(self.lacking)

    def seconds_of(self, num_steps: int) -> float:
        """Of steps that only decode, one after the other."""
        costs, rows = self.replica.costs, len(self.running)
        first = costs.decode_seconds[rows] + costs.key_seconds * (self.keys + rows)
        growth = costs.key_seconds * rows * num_steps * (num_steps - 1) / 2
        return self.scale * (num_steps * first + growth) + self.extra * num_steps

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.lacking or self.replica.waiting)


class _Replica:
    """A model on a group. ``used``: tokens of its pool; a prompt has its own from its first step on."""

    def __init__(self, group: "_Group", costs: ReplicaCosts, kv_tokens: float) -> None:
        self.group, self.costs, self.kv_tokens = group, costs, kv_tokens
        self.waiting: deque[_Request] = deque()
        self.lanes = [_Lane(self) for _ in range(costs.pp)]
        self.seats = -(-costs.max_num_seqs // costs.pp)
        self.used = 0
        # Tokens count alike, as for ``routing.Router``; those of several models by what a decode of 8 takes.
        self.token_seconds = costs.step_seconds(min(8, costs.max_num_seqs), 0)

    def plan(self, lane: _Lane, now: float, admits: bool) -> None:
        """Choose the prompts of the lane's next step; hopeless requests wait no more."""
        costs, rows = self.costs, len(lane.running)
        left = (costs.max_tokens_beside_decodes if rows else costs.max_tokens) - rows
        limit, partial = left, None
        share = min(self.seats, -(-(len(self.waiting) + sum(map(len, self.lanes))) // len(self.lanes)))
        others, place = deque(lane.lacking), 0
        lane.chunks = []
        while limit > 0:
            if others:
                request = others.popleft()
            elif not admits:
                break
            else:
                while place < len(self.waiting) and self.waiting[place].deadline < now:
                    self.owe(self.waiting[place], 0)
                    del self.waiting[place]
                if place >= min(len(self.waiting), _LOOK_AHEAD) or len(lane) >= share:
                    break
                request = self.waiting[place]
                if partial is not None and request.prompt - request.done > limit:
                    place += 1
                    continue
                if self.used + request.prompt + rows + len(lane.lacking) > self.kv_tokens and self.used:
                    break
                del self.waiting[place]
                lane.lacking.append(request)
                self.used += request.prompt
            lacks = request.prompt - request.done
            if lacks <= limit:
                lane.chunks.append((request, lacks))
                left, limit = left - lacks, limit - lacks
            elif partial is None:
                partial, limit = request, left // 2
        if partial is not None and left > 0:
            lane.chunks.append((partial, min(left, partial.prompt - partial.done)))

    def preempt(self, lane: _Lane) -> None:
        """The last of the lane's requests waits again, to compute all its tokens anew."""
        request = max(lane.running, key=lambda one: one.index)
        lane.running.remove(request)
        heapq.heapify(lane.running)
        left = request.end - lane.count
        request.prompt, request.output, request.done = request.prompt + request.output - left, left, 0
        lane.keys -= request.prompt - 1
        self.used -= request.prompt - 1
        self.waiting.appendleft(request)
        self.owe(request, request.prompt + left)

    def owe(self, request: _Request, tokens: int) -> None:
        """The group has still to compute so many tokens for ``request``."""
        self.group.load += (tokens - request.owed) * self.token_seconds
        request.owed = tokens


class _Group:
    """Attributes:

    free: when each stage can begin another step. waits: whether an event says when the first can.
    """

    def __init__(self, plan: GroupPlan) -> None:
        self.replicas = {name: _Replica(self, *each) for name, each in plan.replicas.items()}
        self.lanes = [lane for replica in self.replicas.values() for lane in replica.lanes]
        self.free = [0.0] * max(len(replica.lanes) for replica in self.replicas.values())
        self.waits = False
        self.load = self.busy = 0.0


def _load_of(replica: _Replica) -> float:
    return replica.group.load


def _turn_of(lane: _Lane) -> int:
    return lane.turn


class Simulation:
    """One run. ``deadlines``: seconds after which a request of a model is not begun any more; none: all are served."""

    def __init__(self, groups: Sequence[GroupPlan], deadlines: Mapping[str, float] | None = None) -> None:
        self._groups = [_Group(plan) for plan in groups]
        self._deadlines = deadlines or {}
        self._events: list[tuple[float, int, _Lane | _Group, int]] = []
        self._numbers = itertools.count()
        self._of_model: dict[str, list[_Replica]] = {}
        for group in self._groups:
            for name, replica in group.replicas.items():
                self._of_model.setdefault(name, []).append(replica)
        self._num_preemptions = 0

    def run(self, trace: Sequence[TraceRequest]) -> Outcome:
        requests = [_Request(index, row, self._deadlines.get(row.model, math.inf)) for index, row in enumerate(trace)]
        events, now = self._events, 0.0
        for request, row in zip(requests, trace, strict=True):
            while events and events[0][0] <= row.arrival:
                now = events[0][0]
                self._handle(*heapq.heappop(events))
            if row.model in self._of_model:
                self._arrive(request, row.model)
        while events:
            now = events[0][0]
            self._handle(*heapq.heappop(events))
        arrivals = np.array([row.arrival for row in trace])
        seconds = max(now, 1e-9)
        return Outcome(
            np.array([one.first for one in requests]) - arrivals,
            np.array([one.finished for one in requests]) - arrivals,
            np.array([group.busy / seconds for group in self._groups]),
            self._num_preemptions,
        )

    def _arrive(self, request: _Request, model: str) -> None:
        replica = min(self._of_model[model], key=_load_of)
        if request.prompt + request.output > replica.kv_tokens:
            return  # which no placement of these devices can serve here; it counts as missed
        replica.waiting.append(request)
        replica.owe(request, request.prompt - request.done + request.output)
        for lane in replica.group.lanes:
            if lane.is_busy and lane.num_steps > 1:
                self._cut(lane, request.arrival)
        self._start(replica.group, request.arrival)

    def _push(self, time: float, what: "_Lane | _Group", version: int) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what, version))

    def _handle(self, now: float, number: int, what: "_Lane | _Group", version: int) -> None:
        if isinstance(what, _Group):
            what.waits = False
            self._start(what, now)
        elif what.version == version:
            self._end_step(what, now)
            self._start(what.replica.group, now)

    def _start(self, group: _Group, now: float) -> None:
        """Begin steps while the first stage is free and a lane has something to do."""
        while True:
            ready = [lane for lane in group.lanes if not lane.is_busy and lane.has_work]
            if not ready:
                return
            if group.free[0] > now:
                break
            if len(ready) > 1:
                ready.sort(key=_turn_of)
            if not any(self._begin_step(lane, now) for lane in ready):
                return  # all that waits waits for room
        if not group.waits:
            group.waits = True
            self._push(group.free[0], group, 0)

    def _begin_step(self, lane: _Lane, now: float) -> bool:
        replica, costs, group, admits = lane.replica, lane.replica.costs, lane.replica.group, True
        while len(lane.running) > 1 and replica.used + len(lane.running) > replica.kv_tokens:
            replica.preempt(lane)
            self._num_preemptions, admits = self._num_preemptions + 1, False
        rows, tokens, pairs = len(lane.running), 0, 0.0
        if replica.waiting or lane.lacking:
            replica.plan(lane, now, admits)
            for request, count in lane.chunks:
                tokens += count
                pairs += count * request.done + count * (count + 1) / 2
        if not rows and not tokens:
            return False
        lane.num_steps, lane.started, lane.is_busy, lane.turn = 1, now, True, next(self._numbers)
        seconds = costs.step_seconds(rows, lane.keys + rows if rows else 0, tokens, pairs)
        lane.stage_seconds = seconds * costs.slowest_stage
        if not tokens and not any(one.replica.waiting or one.lacking for one in group.lanes):
            self._repeat(lane, seconds)
            end = now + lane.seconds_of(lane.num_steps)
            group.free[0] = end if len(group.lanes) == 1 else now + lane.stage_seconds
        else:
            end = now
            for stage in range(costs.pp):
                end = max(end, group.free[stage]) + lane.stage_seconds
                group.free[stage] = end
                end += costs.hop_seconds if stage < costs.pp - 1 else 0.0
        group.busy += lane.num_steps * lane.stage_seconds
        lane.version += 1
        self._push(end, lane, lane.version)
        return True

    def _repeat(self, lane: _Lane, seconds: float) -> None:
        """The event stands for as many steps of a lane as are alike. The first takes ``seconds``.

        A step waits for the lane's own one before, and for the steps of the other lanes in each stage.
        """
        replica, costs = lane.replica, lane.replica.costs
        active = [one for one in replica.group.lanes if one.running]
        most = lane.running[0].end - lane.count
        if replica.used + most * len(lane.running) * len(active) > replica.kv_tokens:
            most = int((replica.kv_tokens - replica.used) / len(lane.running) / len(active))
        lane.num_steps = max(1, min(most, _MOST_REPEATS) if len(active) > 1 else most)
        hops, turns = (costs.pp - 1) * costs.hop_seconds, sum(one.stage_seconds for one in active)
        lane.scale, lane.extra = costs.pp * costs.slowest_stage, hops
        if turns > lane.scale * seconds + hops:
            lane.scale, lane.extra = turns / seconds, 0.0

    def _cut(self, lane: _Lane, now: float) -> None:
        """An event that stands for several steps ends with the one that runs now."""
        first, growth = lane.seconds_of(1), lane.scale * lane.replica.costs.key_seconds * len(lane.running) / 2
        steps = elapsed = now - lane.started
        if growth * lane.num_steps > 1e-9 * first:
            steps = (growth - first + math.sqrt((first - growth) ** 2 + 4 * growth * elapsed)) / (2 * growth)
        else:
            steps = elapsed / first
        num_steps = max(1, math.ceil(steps - 1e-9))
        if num_steps >= lane.num_steps:
            return
        group = lane.replica.group
        group.busy -= (lane.num_steps - num_steps) * lane.stage_seconds
        lane.num_steps, lane.version = num_steps, lane.version + 1
        end = max(now, lane.started + lane.seconds_of(num_steps))
        if len(group.lanes) == 1:
            group.free[0] = end
        self._push(end, lane, lane.version)

    def _end_step(self, lane: _Lane, now: float) -> None:
        """The tokens of a step, or of several, are there."""
        replica, lane.is_busy = lane.replica, False
        lane.count += lane.num_steps
        lane.keys += lane.num_steps * len(lane.running)
        replica.used += lane.num_steps * len(lane.running)
        while lane.running and lane.running[0].end <= lane.count:
            request = heapq.heappop(lane.running)
            lane.keys -= request.prompt + request.output - 1
            replica.used -= request.prompt + request.output - 1
            request.finished = now
            replica.owe(request, 0)
        for request, count in lane.chunks:
            request.done += count
            if request.done < request.prompt:
                continue
            lane.lacking.remove(request)
            request.first = min(request.first, now)  # it may have been preempted since
            replica.owe(request, request.output if request.output > 1 else 0)
            if request.output == 1:
                request.finished = now
                replica.used -= request.prompt
                continue
            lane.keys += request.prompt
            request.end = lane.count + request.output - 1
            heapq.heappush(lane.running, request)
        lane.chunks = []


def simulate(
    groups: Sequence[GroupPlan], trace: Sequence[TraceRequest], deadlines: Mapping[str, float] | None = None
) -> Outcome:
    """Serve ``trace``; requests of models that no group has are not served."""
    return Simulation(groups, deadlines).run(trace)
