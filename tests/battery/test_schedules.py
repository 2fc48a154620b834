"""B2: random schedules on a fake model that checks every KV slot, with the invariants after every step.

Some requests are forked on the way, whatever they are doing, and some keep their blocks for that when they have ended.
"""

import dataclasses
import pickle
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from compiled_llm.api.streaming import Stream
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from tests.fake_engine import (
    VOCABULARY,
    FakeDrafter,
    FakeEngine,
    FakeTrees,
    check_result,
    drafters,
    hash_of,
    make_child,
    make_request,
    make_scheduler,
)

MAX_LEN = 24


def random_scheduler(
    rng: random.Random,
    *,
    drafts: bool = False,
    streams: bool = True,
    trees: bool = True,
    adapters: bool = True,
    tiers: random.Random | None = None,
    disk: dict[bytes, Any] | None = None,
) -> Scheduler:
    """Any mode, policy and size; the pool has room for 1 to 4 of the longest requests.

    ``drafts``: some schedulers have a drafter; ``trees``: which may draft trees. ``streams``: some requests keep sink
    tokens and a window. ``adapters``: some schedulers have slots for them. ``tiers``: there is a prefix cache and few
    blocks of host memory below it, and the ``disk`` of a ``FakeFiles``.
    """
    block_size = rng.choice([1, 4, 16])
    max_num_seqs = rng.choice([1, 2, 8, 16])
    chunked_prefill = rng.random() < 0.8
    batched = rng.randint(max_num_seqs, 40)
    if not chunked_prefill:
        batched = max(batched, MAX_LEN)
    buckets = tuple(sorted({size for size in (4, 8, 16) if size < batched} | {batched}))
    num_blocks = int(-(-MAX_LEN // block_size) * rng.choice([1, 1.5, 2, 3, 4]))
    prefix_caching, num_swap_blocks, windows = rng.random() < 0.7, rng.choice([0, 4, 200]), random_windows(rng)
    stream = random_stream(rng, block_size) if chunked_prefill and streams and rng.random() < 0.2 else None
    if stream is not None:
        prefix_caching, num_swap_blocks, windows = False, 0, [(stream.window, rng.choice([None, 0]))]
        batched = max(batched, stream.sink_tokens + max_num_seqs - 1)
        buckets = (*buckets[:-1], batched)
    num_state_slots = rng.choice([0, max_num_seqs + 1, 3 * max_num_seqs + 1]) if stream is None else 0
    if tiers is not None:
        prefix_caching = True
    drafter = random_drafter(rng) if drafts and stream is None and rng.random() < 0.5 else None
    has_trees = drafter is not None and not num_state_slots and rng.random() < 0.5 and trees
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        num_tier_blocks=0 if tiers is None else tiers.choice([1, 3, 10, 100]),
        num_tier_slots=0 if tiers is None else tiers.choice([1, 2, 10, 100]),
        disk=disk,
        num_state_slots=num_state_slots,
        num_swap_slots=rng.choice([0, 2, 200]),
        prefix_caching=prefix_caching,
        num_swap_blocks=num_swap_blocks,
        arguments={
            "policy": rng.choice(["fcfs", "priority"]),
            "preemption_mode": rng.choice(["auto", "recompute", "swap"]),
            "target_itl_ms": rng.choice([None, 100.0, 1e-3]),
            "costs": StepCosts({size: rng.random() for size in buckets}, rng.choice([0.0, 1e-9, 0.01, 1.0])),
        },
        drafter=None if has_trees else drafter,
        source=FakeTrees(rng.randint(2, 15), rng.randrange(1000)) if has_trees else None,
        windows=windows,
        stream=stream,
        max_loras=(num_blocks + max_num_seqs) % 4 if adapters else 0,
        max_model_len=MAX_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=block_size,
        token_bucket_sizes=buckets,
        chunked_prefill=chunked_prefill,
    )
    if scheduler.tiers is not None and tiers is not None and tiers.random() < 0.3:
        scheduler.tiers.least_wait = 0.0  # files are late
    return scheduler


def random_windows(rng: random.Random) -> list[tuple[int, int | None]]:
    """None, one or two, with as many places as an engine has, or as few as one request may need."""
    sizes = rng.choice([[], [rng.randint(1, 20)], [2, rng.randint(3, 12)]])
    return [(size, rng.choice([None, 0])) for size in sizes]


def random_stream(rng: random.Random, block_size: int) -> Stream:
    return Stream(block_size, block_size * rng.randint(1, 3), block_size)


def random_drafter(rng: random.Random) -> FakeDrafter:
    return rng.choice(list(drafters(rng.randint(1, 5), rng.randrange(1000)).values()))


def random_request(rng: random.Random, name: str, prefixes: list[list[int]]) -> Request:
    length = rng.randint(1, MAX_LEN - 1)
    prompt = rng.choice(prefixes)[: rng.randint(0, length)]
    if rng.random() < 0.7 or not prompt:
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(length - len(prompt))]
    max_tokens = rng.randint(1, MAX_LEN - len(prompt))
    return make_request(
        name,
        prompt or [1],
        0 if length % 8 == 0 else max_tokens,
        frozenset(rng.sample(range(VOCABULARY), 20)),
        priority=rng.randint(0, 2),
        cache_salt=rng.choice(["", "", "x"]),
        keeps_blocks=rng.random() < 0.15,
        most_cached_tokens=max_tokens if length % 16 == 0 else None,
    )


def random_children(rng: random.Random, parent: Request, name: str) -> list[Request]:
    """One to four that have the prompt of ``parent``, some tokens of it, or all that it has and perhaps some more."""
    num_known = len(parent.prompt_token_ids) + len(parent.output_token_ids)
    num_shared = rng.choice([num_known, len(parent.prompt_token_ids), rng.randint(1, num_known)])
    num_shared = min(num_shared, MAX_LEN - 1)
    children = []
    for index in range(rng.randint(1, 4)):
        num_own = min(rng.randint(0, 3), MAX_LEN - 1 - num_shared) if num_shared == num_known else 0
        own = [rng.randrange(VOCABULARY) for _ in range(num_own)]
        child = make_child(
            parent,
            f"{name}/{index}",
            rng.randint(1, MAX_LEN - num_shared - len(own)),
            num_shared=num_shared,
            own=own,
            stop=parent.stop_token_ids,
            keeps_blocks=rng.random() < 0.15,
        )
        children.append(child)
    return children


class Watch:
    """Follows an engine from step to step, and asserts what must hold from one to the next."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.unfinished: dict[Request, None] = {}  # those added
        self.keeping: dict[Request, None] = {}  # those that keep their blocks, or will
        self.ends: dict[Request, tuple] = {}
        self.num_forked = self.num_taken_back = self.num_held_back = 0

    def add(self, request: Request) -> None:
        self.engine.scheduler.add(request)
        self._follow(request)

    def fork(self, parent: Request, child: Request) -> None:
        self.engine.scheduler.fork(parent, child)
        check_scheduler(self.engine.scheduler)
        self.num_forked += bool(child.block_ids)
        self._follow(child)

    def end_forking(self, request: Request) -> None:
        del self.keeping[request]
        self.engine.scheduler.end_forking(request)
        assert request not in self.engine.scheduler.forks.kept
        check_scheduler(self.engine.scheduler)

    def step(self) -> None:
        scheduler = self.engine.scheduler
        first = min(self.unfinished, key=lambda request: request.rank)
        if scheduler.running and scheduler.running[0].rank == first.rank:
            first = scheduler.running[0]  # a child has the rank of its parent
        num_preemptions = first.num_preemptions
        holders = set(scheduler.forks.holders)
        searched = scheduler.suspects.is_searching  # then requests after the first may run before it
        self.engine.step()
        self.num_held_back += scheduler.running_set.adapters.num_held_back > 0
        assert searched or scheduler.suspects.is_searching or first.num_preemptions == num_preemptions, (
            "the first by rank was preempted"
        )
        self.num_taken_back += sum(request in scheduler.waiting for request in holders - scheduler.forks.holders.keys())
        self.see_ends()

    def abort(self, request: Request) -> None:
        self.engine.scheduler.finish(request, "abort")
        check_scheduler(self.engine.scheduler)
        self.see_ends()

    def _follow(self, request: Request) -> None:
        self.unfinished[request] = None
        if request.keeps_blocks:
            self.keeping[request] = None

    def see_ends(self) -> None:
        for request in [request for request in self.unfinished if request.status is Status.FINISHED]:
            del self.unfinished[request]
            self.ends[request] = self._end(request)

    def check_ends(self) -> None:
        """Every request has come to one end, which nothing has changed since, and nothing is left behind."""
        scheduler = self.engine.scheduler
        for request in list(self.keeping):
            self.end_forking(request)
        scheduler.forks.end_copies()  # of a step in flight, whose requests may all have been aborted
        assert not self.unfinished, "requests are stuck"
        assert not scheduler.has_unfinished_requests()
        assert (scheduler.pool.num_used, scheduler.swap_pool.num_used) == (0, 0), "blocks are leaked"
        assert (scheduler.pool.states.num_used, scheduler.swap_pool.states.num_used) == (0, 0), "slots are leaked"
        assert scheduler.num_waiting == scheduler.prefix_cache.num_held_back == 0
        for request, end in self.ends.items():
            assert self._end(request) == end, "changed after its end"
            assert request.finish_reason in ("stop", "length", "abort", "error")
            check_result(request)
        counts = scheduler.counts
        assert sum(request.num_preemptions for request in self.ends) == scheduler.num_preemptions
        assert sum(request.num_recomputed_tokens for request in self.ends) == counts.num_recomputed_tokens
        assert sum(request.num_swapped_tokens for request in self.ends) == counts.num_swapped_out_tokens
        assert counts.num_swapped_in_tokens <= counts.num_swapped_out_tokens

    def count(self, counts: Counter[str]) -> None:
        scheduler = self.engine.scheduler
        counts["schedules"] += 1
        counts["steps"] += len(self.engine.outputs)
        counts["requests"] += len(self.ends)
        counts["ended with the prompt"] += sum(
            not request.generates and request.finish_reason == "length" for request in self.ends
        )
        counts["aborted"] += sum(request.finish_reason == "abort" for request in self.ends)
        counts["preemptions by recompute"] += scheduler.counts.num_recompute_preemptions
        counts["preemptions by swap"] += scheduler.counts.num_swap_preemptions
        counts["tokens recomputed"] += scheduler.counts.num_recomputed_tokens
        counts["tokens swapped in"] += scheduler.counts.num_swapped_in_tokens
        counts["tokens hit"] += scheduler.prefix_cache.num_hit_tokens
        counts["evictions"] += scheduler.pool.num_evictions
        if scheduler.pool.states.num_slots:
            outputs = [output.states for output in self.engine.outputs]
            writes = [entry for output in outputs for entry in output.writes]
            counts["states written"] += len(writes)
            counts["snapshots written besides"] += sum(len(entry) > 1 for entry in writes)
            counts["states swapped out"] += sum(len(output.swapped_out) for output in outputs)
            counts["states swapped in"] += sum(len(output.swapped_in) for output in outputs)
            counts["snapshots evicted"] += scheduler.pool.states.num_evictions
            counts["tokens hit by snapshots"] += scheduler.prefix_cache.num_hit_tokens
        if scheduler.limits.max_loras:
            counts["adapters loaded"] += sum(len(output.adapter_loads) for output in self.engine.outputs)
            counts["steps with adapters held back"] += self.num_held_back
        counts["forked"] += self.num_forked
        counts["copied on write"] += sum(len(output.copies) for output in self.engine.outputs)
        counts["taken back"] += self.num_taken_back
        if scheduler.limits.num_draft_tokens:
            counts["drafted"] += scheduler.counts.num_draft_tokens
            counts["drafts accepted"] += scheduler.counts.num_accepted_draft_tokens

    @staticmethod
    def _end(request: Request) -> tuple:
        return request.finish_reason, request.stop_reason, tuple(request.output_token_ids), request.finished_time


def fork_at_random(rng: random.Random, watch: Watch, name: str) -> list[Request]:
    """The children of one that runs, mostly; or else of one that waits, keeps its blocks, or has ended without."""
    others = [*watch.unfinished, *watch.keeping, *list(watch.ends)[-2:]]
    parent = rng.choice(
        watch.engine.scheduler.running if watch.engine.scheduler.running and rng.random() < 0.7 else others
    )
    children = random_children(rng, parent, name)
    for child in children:
        watch.fork(parent, child)
    return children


def end_forking_at_random(rng: random.Random, watch: Watch) -> None:
    for request in [request for request in watch.keeping if rng.random() < 0.1]:
        watch.end_forking(request)


class Causes:
    """Requests that break every step that computes their tokens from some position on."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}

    def break_step(self, output: SchedulerOutput) -> bool:
        for index, request_id in enumerate(output.request_ids):
            num_drafts = max(0, output.num_samples[index] - 1)
            end = output.num_computed_tokens[index] + output.num_scheduled_tokens[index] - num_drafts
            if index not in dict(output.moved_sinks) and end > self.positions.get(request_id, MAX_LEN):
                return True
        return False

    def check(self, requests: Iterable[Request], num_draft_tokens: int) -> int:
        """A request fails if it is a cause and gets so far, and no other does. Returns how many failed."""
        num_failed = 0
        for request in requests:
            position = self.positions.get(request.request_id, MAX_LEN)
            known = len(request.prompt_token_ids) + len(request.output_token_ids)
            if request.finish_reason == "error":
                assert known > position, "a request failed that breaks no step"
                num_failed += 1
            elif request.finish_reason != "abort":
                # Its last tokens may have been drafts that were right.
                assert known - request.generates - num_draft_tokens <= position, "it breaks steps, and ended well"
        return num_failed


def run_schedule(seed: int, counts: Counter[str], *, tiers: bool = False) -> None:
    rng = random.Random(seed)
    causes = Causes()
    overlap = rng.random() < 0.5
    of_tiers = random.Random(-1 - seed) if tiers else None
    disk: dict[bytes, Any] | None = {} if of_tiers is not None and of_tiers.random() < 0.6 else None
    scheduler = random_scheduler(rng, drafts=True, streams=not tiers, tiers=of_tiers, disk=disk)
    watch = Watch(FakeEngine(scheduler, overlap=overlap, breaks=causes.break_step, disk=disk, seed=seed))
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(MAX_LEN - 1)] for _ in range(3)]
    queue = [random_request(rng, f"{seed}-{i}", prefixes) for i in range(rng.randint(1, 64))]
    for request in queue if watch.engine.scheduler.limits.max_loras else ():
        number = hash_of(str(request.request_id)) % 6
        request.adapter = f"adapter {number}" if number else ""
    # Steps after it came; some have ended by then.
    to_abort = {request: rng.randint(0, 20) for request in queue if rng.random() < 0.25}
    num_forks = rng.randint(0, 15)
    pace = rng.choice([0.2, 0.5, 1.0])
    if seed % 3 == 0:
        causes.positions = {r.request_id: rng.randrange(MAX_LEN) for r in queue if rng.random() < 0.2}
    for _ in range(10_000):
        while queue and (pace == 1.0 or rng.random() < pace):
            watch.add(queue.pop(0))
        for request in [request for request in to_abort if request in watch.unfinished]:
            if to_abort[request] == 0:
                watch.abort(request)
            to_abort[request] -= 1
        if num_forks and watch.unfinished and rng.random() < 0.2:
            num_forks -= 1
            for child in fork_at_random(rng, watch, f"{seed}/{num_forks}"):
                if rng.random() < 0.1:
                    to_abort[child] = rng.randint(0, 5)
        end_forking_at_random(rng, watch)
        if watch.unfinished:
            watch.step()
        elif not queue:
            break
    assert not queue
    watch.check_ends()
    watch.count(counts)
    if scheduler.tiers is not None:
        counts.update(dataclasses.asdict(scheduler.tiers.counts))
    if causes.positions:
        counts["requests that broke steps"] += causes.check(watch.ends, watch.engine.scheduler.limits.num_draft_tokens)
        counts["broken steps"] += len(watch.engine.broken)


@pytest.mark.parametrize(
    "num_schedules",
    [pytest.param(30, id="small"), pytest.param(2_000, id="full", marks=pytest.mark.battery)],
)
def test_random_schedules(num_schedules: int, battery_counts: Counter[str]) -> None:
    for seed in range(num_schedules):
        try:
            run_schedule(seed, battery_counts)
        except BaseException as error:
            error.add_note(f"in schedule {seed}")
            raise
    for what, count in battery_counts.items():
        assert count > 0, what


@pytest.mark.parametrize(
    "num_schedules",
    [pytest.param(12, id="small"), pytest.param(2_000, id="full", marks=pytest.mark.battery)],
)
def test_random_schedules_with_tiers(num_schedules: int, battery_counts: Counter[str]) -> None:
    """Few blocks in each tier, files that take their time, vanish and are damaged: each slot holds what it should."""
    for seed in range(num_schedules):
        try:
            run_schedule(seed, battery_counts, tiers=True)
        except BaseException as error:
            error.add_note(f"in schedule {seed}")
            raise
    if num_schedules < 100:
        return
    rare = {"num_disk_evictions", "num_fetches_dearer", "tier_copy_seconds", "tier_file_seconds"}  # none in the fake
    for what, count in battery_counts.items():
        assert count > 0 or what in rare, what


@pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(200, id="small"), pytest.param(2_000, id="full", marks=pytest.mark.battery)],
)
def test_overload(num_requests: int, mode: str, overlap: bool, battery_counts: Counter[str]) -> None:
    """As many requests at once as the pool has room for in a hundred rounds. All of the same length, so the order of
    their ends is that of their arrival: no request is overtaken by more than those that run beside it."""
    block_size, length, seats = 4, 16, 25
    scheduler = make_scheduler(
        20 * length // block_size,
        prefix_caching=True,
        num_swap_blocks=40,
        arguments={"preemption_mode": mode},
        max_num_seqs=seats,
        max_num_batched_tokens=64,
        block_size=block_size,
        token_bucket_sizes=(64,),
    )
    watch = Watch(FakeEngine(scheduler, overlap=overlap))
    requests = [make_request(f"{i}", length // 2, length // 2) for i in range(num_requests)]
    for request in requests:
        watch.add(request)
    pool_bytes = []
    while watch.unfinished:
        watch.step()
        if len(watch.ends) >= (len(pool_bytes) + 1) * num_requests / 10:
            pool_bytes.append(len(pickle.dumps(scheduler.pool)))
    watch.check_ends()
    watch.count(battery_counts)

    places = {request: place for place, request in enumerate(watch.ends)}
    assert max(abs(places[request] - arrival) for arrival, request in enumerate(requests)) < seats
    assert all(request.finish_reason == "length" for request in requests)
    assert requests[0].num_preemptions == 0
    assert scheduler.num_preemptions > 0
    # Flat, but for how many blocks happen to be published: what the pool keeps does not grow with the requests served.
    middle = len(pool_bytes) // 2
    assert max(pool_bytes[middle:]) <= 1.3 * max(pool_bytes[:middle])
    assert sum(map(len, scheduler.waiting._heaps.values())) <= 64, "the queue keeps those that are gone"
