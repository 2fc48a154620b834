"""A fake model for tests of the scheduler: no tensors, and every KV slot remembers what was written to it.

The token at a position is a function of the tokens before it, so requests that begin alike go on alike, and a key that
stands in the wrong slot is seen at once.
"""

import dataclasses
import hashlib
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from compiled_llm.api.config import EngineLimits
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.block_pool import SINK_BLOCK, BlockPool
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.draft_trees import DraftTree
from compiled_llm.scheduling.drafter import CheckedDrafter, Drafter, DraftSource
from compiled_llm.scheduling.invariants import check_scheduler, check_step
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request, RequestId, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, WindowOutput
from compiled_llm.scheduling.state_pool import StatePool, StateSlots
from compiled_llm.scheduling.window_places import WindowPlaces
from compiled_llm.scheduling.window_pool import WindowPool, most_places, useful_places
from compiled_llm.scheduling.worker import FileResult, LogprobColumns, StepResult

VOCABULARY = 1000
LIMITS = EngineLimits(
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    block_size=4,
    decode_bucket_sizes=(1, 4),
    token_bucket_sizes=(16,),
    chunked_prefill=True,
)


class FakeDrafter:
    """Knows what the fake model generates, and is right for as many tokens as ``num_right`` says each time.

    Args:
        num_right: at most ``num_tokens``; the tokens after these are wrong.
    """

    def __init__(self, num_tokens: int, num_right: Callable[[], int]) -> None:
        self.num_tokens = num_tokens
        self.num_right = num_right

    def propose(self, request_id: RequestId, token_ids: Sequence[int]) -> list[int]:
        tokens, right = expected_tokens(list(token_ids), self.num_tokens), self.num_right()
        return [*tokens[:right], *((token + 1) % VOCABULARY for token in tokens[right:])]


class FakeTrees:
    """A ``DraftSource`` of random trees, in which what the fake model generates is somewhere, or its beginning."""

    adapts = False

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        self.num_tokens, self._rng = num_tokens, random.Random(seed)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[DraftTree]:
        return [
            self._tree(expected_tokens(request.prompt_token_ids + request.output_token_ids, count), count)
            for request, count in zip(requests, most, strict=True)
        ]

    def end(self, request: Request) -> None:
        pass

    def _tree(self, right: list[int], count: int) -> DraftTree:
        tokens, parents, path = list[int](), list[int](), [0]
        while len(tokens) < count:
            if self._rng.random() < 0.4:
                tokens.append(right[len(path) - 1])
                parents.append(path[-1])
                path.append(len(tokens))
            else:  # no sibling has the same, and none is right
                parents.append(self._rng.randint(0, len(tokens)))
                tokens.append(VOCABULARY + len(tokens))
        return DraftTree(tokens, parents)


def drafters(num_tokens: int, seed: int = 0) -> dict[str, FakeDrafter]:
    """A drafter that is right, one that is wrong, and one that is right for some random tokens."""
    rng = random.Random(seed)
    return {
        "right": FakeDrafter(num_tokens, lambda: num_tokens),
        "wrong": FakeDrafter(num_tokens, lambda: 0),
        "half right": FakeDrafter(num_tokens, lambda: rng.randint(0, num_tokens)),
    }


def make_scheduler(
    num_blocks: int,
    *,
    prefix_caching: bool = False,
    num_swap_blocks: int = 0,
    arguments: dict | None = None,
    windows: Sequence[tuple[int, int | None]] = (),
    num_state_slots: int = 0,
    num_swap_slots: int = 0,
    num_tier_blocks: int = 0,
    num_tier_slots: int = 0,
    disk: "dict[bytes, Any] | None" = None,
    drafter: Drafter | None = None,
    source: DraftSource | None = None,
    one_graph: bool = True,
    **sizes,
) -> Scheduler:
    """A scheduler over ``num_blocks`` blocks. ``sizes`` change ``LIMITS``, ``arguments`` go to the Scheduler.

    ``windows``: the keys that layers of a kind see, and their places; None: what an engine gives; else at least this.
    ``num_tier_blocks``, ``num_tier_slots``, ``disk``: of host memory below the prefix cache, and the ``FakeFiles.disk``
    below that.
    ``num_state_slots``: of layers with a state; 0: there are none. ``source``: in the place of a ``drafter``.
    """
    limits = dataclasses.replace(LIMITS, num_state_slots=num_state_slots, **sizes)
    limits = dataclasses.replace(limits, decode_bucket_sizes=tuple(sorted({1, limits.max_num_seqs})))
    if drafter is not None:
        source = CheckedDrafter(drafter, VOCABULARY)
    if source is not None:
        has_trees = isinstance(source, FakeTrees)
        limits = limits.with_drafts(source.num_tokens, one_graph=one_graph, has_trees=has_trees)
    pools = []
    for window, count in windows:
        least = most_places(window, limits)  # of one request
        places = min(num_blocks, useful_places(window, limits) if count is None else max(least, count))
        pools.append(WindowPool(window, places, limits))
    pool = BlockPool(num_blocks, pools, StatePool(num_state_slots))
    return Scheduler(
        limits,
        pool,
        prefix_caching=prefix_caching,
        swap_pool=BlockPool(num_swap_blocks, states=StatePool(num_swap_slots)),
        tier_rows=range(num_swap_blocks + 1, num_swap_blocks + num_tier_blocks + 1),
        tier_slots=range(num_swap_slots + 1, num_swap_slots + num_tier_slots + 1),
        on_disk=disk,
        drafter=source,
        **({"costs": StepCosts(pads=not one_graph)} | (arguments or {})),
    )


def cache_over(pool: BlockPool, block_size: int, **arguments: Any) -> PrefixCache:
    """A prefix cache without a scheduler."""
    return PrefixCache(pool, WindowPlaces(pool), StateSlots(pool.states, block_size, True), block_size, **arguments)


def make_request(
    name: str,
    prompt: list[int] | int,
    max_tokens: int,
    stop: frozenset[int] = frozenset(),
    priority: int = 0,
    cache_salt: str = "",
    keeps_blocks: bool = False,
    most_cached_tokens: int | None = None,
    adapter: str = "",
) -> Request:
    """A request for the fake model. A number as ``prompt`` stands for that many tokens that no other request has.

    With ``max_tokens=0`` it ends with its prompt.
    """
    token_ids = [hash_of(f"{name}/{i}") for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=max(1, max_tokens)),
        seed=0,
        stop_token_ids=stop,
        max_num_tokens=len(token_ids) + max_tokens,
        arrival_time=0.0,
        priority=priority,
        cache_salt=cache_salt,
        adapter=adapter,
        scored_token_ids=() if most_cached_tokens is None else token_ids,
        num_scored=0 if most_cached_tokens is None else most_cached_tokens + 1,
        keeps_blocks=keeps_blocks,
    )


def make_child(
    parent: Request,
    name: str,
    max_tokens: int,
    *,
    own: Sequence[int] = (),
    num_shared: int | None = None,
    stop: frozenset[int] = frozenset(),
    keeps_blocks: bool = False,
) -> Request:
    """A request to be forked from ``parent``: ``num_shared`` of its known tokens, or all, and tokens of its own."""
    known = parent.prompt_token_ids + parent.output_token_ids
    computed = min(parent.num_computed_tokens, len(known))
    assert not own or num_shared is None or num_shared >= computed, "it has other tokens computed"
    prompt = [*known[:num_shared], *own]
    of_parent = parent.priority, parent.cache_salt
    return make_request(name, prompt, max_tokens, stop, *of_parent, keeps_blocks, adapter=parent.adapter)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % VOCABULARY


class Context:
    """The tokens up to a position, as a chain of hashes: equal exactly where all tokens before are equal.

    And where the same adapter has computed them.
    """

    @staticmethod
    def after(before: int, token_id: int, adapter: str = "") -> int:
        return hash((before, token_id, hash_of(adapter))) if adapter else hash((before, token_id))

    @staticmethod
    def next_token(context: int) -> int:
        return context % VOCABULARY


def contexts_of(tokens: list[int], adapter: str = "") -> list[int]:
    """The context at each of the first tokens of a text."""
    contexts: list[int] = []
    for token_id in tokens:
        contexts.append(Context.after(contexts[-1] if contexts else 0, token_id, adapter))
    return contexts


def expected_tokens(prompt: list[int], count: int, adapter: str = "") -> list[int]:
    """What the fake model generates after ``prompt``."""
    context = 0
    for token_id in prompt:
        context = Context.after(context, token_id, adapter)
    tokens = []
    for _ in range(count):
        tokens.append(Context.next_token(context))
        context = Context.after(context, tokens[-1], adapter)
    return tokens


class FakeWindow:
    """What layers with a window of ``window`` keys keep: the context of each slot of a place."""

    def __init__(self, pool: WindowPool) -> None:
        self.window, self.size, self.stream = pool.window, pool.block_size, pool.stream
        self.num_dropped: dict[RequestId, int] = {}  # by request: where its sink tokens stand
        self.slots: dict[tuple[int, int], int] = {}
        self.host: dict[int, dict[int, int]] = {}
        self.tables: dict[RequestId, dict[int, int]] = {}  # index -> place, as the last update has it
        self.written: deque[set[tuple[int, int]]] = deque()

    def update(self, output: SchedulerOutput, told: WindowOutput) -> None:
        size = self.size
        self.written.append(set())
        self.fresh: set[tuple[int, int]] = set()  # slots that tokens of this step were written to
        _move(self.slots, told.moved_keys, size, self.written[-1])
        for place, host in told.swapped_out:
            self.host[host] = {i: self.slots[place, i] for i in range(size) if (place, i) in self.slots}
        for place, host in told.swapped_in:
            self._overwrite(place, self.host[host])
        sources, targets = ({pair[side] for pair in told.copies} for side in (0, 1))
        assert not sources & targets
        assert len(targets) == len(told.copies)
        assert not sources & {place for place, _ in told.swapped_in}, "a place is overwritten before it is copied"
        for source, target in told.copies:
            self._overwrite(target, {i: self.slots[source, i] for i in range(size) if (source, i) in self.slots})
            self.written[-1] |= {(target, i) for i in range(size)}
        if output.resets:
            self.tables.clear()
        for request_id in output.released_request_ids:
            del self.tables[request_id]
        for request_id, *_ in output.admissions:
            self.tables[request_id] = {}
            self.num_dropped[request_id] = 0
        for request_id, start, places in told.table_updates:
            assert SINK_BLOCK not in places
            self.tables[request_id] |= dict(enumerate(places, start))

    def write(self, request_id: RequestId, start: int, contexts: list[int]) -> None:
        for position in range(start, len(contexts)):
            slot = self._slot(request_id, position)
            assert slot not in self.fresh, "two tokens are written to one slot of a window"
            self.fresh.add(slot)
            self.written[-1].add(slot)
            self.slots[slot] = contexts[position]

    def compute_sinks(self, request_id: RequestId, tokens: list[int], num_dropped: int, adapter: str) -> None:
        assert self.stream is not None
        assert len(tokens) == self.stream.sink_tokens
        self.num_dropped[request_id] = num_dropped
        self.write(request_id, 0, contexts_of(tokens, adapter))

    def check(self, request_id: RequestId, start: int, contexts: list[int]) -> None:
        seen = range(max(0, start - self.window + 1), len(contexts))
        if self.stream is not None:
            sinks, dropped = self.stream.sink_tokens, self.stream.num_dropped(start)
            assert self.num_dropped[request_id] == dropped == self.stream.num_dropped(len(contexts) - 1)
            seen = [p for p in range(len(contexts)) if not sinks <= p < sinks + dropped]
            assert len(seen) <= self.stream.capacity
        for position in seen:
            assert self.slots.get(self._slot(request_id, position)) == contexts[position], "a foreign key is seen"

    def forget(self, rows: set[int]) -> None:
        """``rows``: of the host, of which nobody knows what stands there."""
        for slot in set().union(*self.written):
            self.slots.pop(slot, None)
        self.written.clear()
        for row in rows:
            self.host.pop(row, None)

    def _slot(self, request_id: RequestId, position: int) -> tuple[int, int]:
        return self.tables[request_id][position // self.size], position % self.size

    def _overwrite(self, place: int, content: dict[int, int]) -> None:
        for i in range(self.size):
            self.slots.pop((place, i), None)
        self.slots |= {(place, i): context for i, context in content.items()}


class FakeStates:
    """What layers with a state keep: of each slot, of how many tokens it is, and their context."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slots: dict[int, tuple[int, int]] = {}
        self.host: dict[int, tuple[int, int]] = {}
        self.written: deque[set[int]] = deque()
        self.rows_written: deque[set[int]] = deque()
        self.num_swap_slots = 0

    def update(self, output: SchedulerOutput, contexts: dict[RequestId, list[int]]) -> None:
        """``contexts``: at each position of each request of the step."""
        told = output.states
        self.rows_written.append({host for _, host in told.swapped_out})
        assert len(self.rows_written[-1]) == len(told.swapped_out), "two states are copied to one row"
        for slot, host in told.swapped_out:
            self.host[host] = self.slots[slot]
        for slot, host in told.swapped_in:
            self.slots[slot] = self.host[host]
        assert len(told.reads) == len(told.writes) == len(output.request_ids)
        written: dict[int, tuple[int, int]] = {}
        read_by_others = set(told.reads)
        for index, request_id in enumerate(output.request_ids):
            start, count = output.num_computed_tokens[index], output.num_scheduled_tokens[index]
            chain, read, writes = contexts[request_id], told.reads[index], told.writes[index]
            expected = (start, chain[start - 1]) if start else None
            assert (self.slots.get(read) if read else None) == expected, "a foreign state is read"
            ends = [after for _, after in writes]
            num_drafts = max(0, output.num_samples[index] - 1)
            assert count in ends, "the state is lost"
            assert set(range(count - num_drafts, count + 1)) <= set(ends) <= set(range(1, count + 1))
            for slot, after in writes:
                assert 0 < slot not in written, "two states are written to one slot"
                assert slot not in read_by_others or (told.reads.count(slot) == 1 and slot == read), "others read it"
                assert not self.pool.is_snapshot(slot), "a snapshot is written to"
                written[slot] = start + after, chain[start + after - 1]
        self.slots |= written
        self.written.append(set(written))

    def forget(self) -> None:
        for slot in set().union(*self.written):
            self.slots.pop(slot, None)
        self.written.clear()
        for host in {host for host in self.host if host <= self.num_swap_slots}.union(*self.rows_written):
            self.host.pop(host, None)
        self.rows_written.clear()


class FakeRunner:
    """Keeps the context of every KV slot, as the real cache keeps keys, and checks all that a step reads and writes."""

    def __init__(
        self, limits: EngineLimits, windows: Sequence[WindowPool] = (), states: StatePool | None = None
    ) -> None:
        self.limits = limits
        self.states = FakeStates(states) if states is not None and states.num_slots else None
        self.windows = [FakeWindow(window) for window in windows]
        self.slots: dict[tuple[int, int], int] = {}
        self.host: dict[int, dict[int, int]] = {}
        self.tables: dict[RequestId, list[int]] = {}
        self.sampled: list[int] = []
        self.adapters: dict[int, str] = {0: ""}  # by slot
        self.slot_of: dict[RequestId, int] = {}
        self.written: deque[set[tuple[int, int]]] = deque()  # slots, by each step whose results are not in
        self.rows_written: deque[set[int]] = deque()  # on the host, as those
        self.num_swap_blocks = 0
        self.files = FakeFiles(self, {}, 0)

    def execute(self, output: SchedulerOutput) -> StepResult:
        output = pickle.loads(pickle.dumps(output))  # as to a worker in another process
        limits, size = self.limits, self.limits.block_size
        assert 0 < output.num_tokens <= limits.max_num_batched_tokens or output.files.wait_seconds
        self.rows_written.append({row for _, row in output.swapped_out})
        assert len(self.rows_written[-1]) == len(output.swapped_out), "two blocks are copied to one row"
        assert output.num_tokens == sum(output.num_scheduled_tokens)
        assert len(output.request_ids) == len(set(output.request_ids)) <= limits.max_num_seqs
        moved: set[tuple[int, int]] = set()
        _move(self.slots, output.moved_keys, size, moved)
        self._copy(output)
        for window, told in zip(self.windows, output.windows, strict=True):
            window.update(output, told)
        if output.resets:
            self.tables.clear()
        for request_id in output.released_request_ids:
            del self.tables[request_id]
        self.adapters |= dict(output.adapter_loads)
        for request_id, *_, slot in output.admissions:
            assert request_id not in self.tables
            self.tables[request_id] = []
            self.slot_of[request_id] = slot
        for request_id, start, blocks in output.table_updates:
            assert start <= len(self.tables[request_id])
            assert SINK_BLOCK not in blocks
            self.tables[request_id][start:] = blocks

        # As in a layer: all keys of the step are written, and then anyone reads.
        step, taken, written = [], 0, set[tuple[int, int]]()
        for index, request_id in enumerate(output.request_ids):
            count, start = output.num_scheduled_tokens[index], output.num_computed_tokens[index]
            tokens = list(output.token_ids[taken : taken + count])
            taken += count
            if output.feedback[index] >= 0:
                tokens[-1] = self.sampled[output.feedback[index]]
            if index in dict(output.moved_sinks):
                adapter = self.adapters[self.slot_of[request_id]]
                for window in self.windows:
                    window.compute_sinks(request_id, tokens, dict(output.moved_sinks)[index], adapter)
                continue
            step.append((request_id, start, tokens))
            for position in range(start, start + count):
                slot = (self.tables[request_id][position // size], position % size)
                assert slot not in written, "two tokens are written to one slot"
                written.add(slot)
        copied = [(target, i) for _, target in output.copies for i in range(size)]
        self.written.append(written.union(copied, moved))
        trees = {output.request_ids[index]: parents for index, parents in output.trees}
        contexts = self._contexts(step, trees)
        if self.states is not None:
            self.states.update(output, contexts)
        for request_id, start, tokens in step:
            for position in range(start, start + len(tokens)):
                slot = (self.tables[request_id][position // size], position % size)
                self.slots[slot] = contexts[request_id][position]
            for window in self.windows:
                window.write(request_id, start, contexts[request_id])
        sampled: list[int] = []
        found: list[int] = []
        rows_of = {request_id: (start, tokens) for request_id, start, tokens in step}
        for request_id in output.request_ids:
            if request_id not in rows_of:  # sink tokens
                sampled.append(0)
                found.append(-1)
                continue
            start, tokens = rows_of[request_id]
            end = start + len(tokens)
            for position in range(end):
                slot = (self.tables[request_id][position // size], position % size)
                assert self.slots.get(slot) == contexts[request_id][position], "a foreign key stands in the slot"
            num_samples = output.num_samples[output.request_ids.index(request_id)]
            for window in self.windows:
                window.check(request_id, start, contexts[request_id])
            rows = contexts[request_id][end - max(1, num_samples) : end]
            sampled += [Context.next_token(context) for context in rows]
            found += [token if num_samples else -1 for token in sampled[-len(rows) :]]
        self.sampled = sampled
        num_targets = sum(len(token_ids) for _, _, token_ids in output.prompt_targets)
        result = dataclasses.replace(result_of(found, num_targets), files=self.files.work(output))
        return pickle.loads(pickle.dumps(result))

    def forget(self) -> None:
        """The steps in flight are lost: nobody knows what stands in the slots that they wrote to, or on the host."""
        for slot in set().union(*self.written):
            self.slots.pop(slot, None)
        self.written.clear()
        lost = {row for row in self.host if row <= self.num_swap_blocks}.union(*self.rows_written)
        self.rows_written.clear()
        for row in lost:
            self.host.pop(row, None)
        self.adapters = {0: ""}
        for window in self.windows:
            window.forget(lost)
        if self.states is not None:
            self.states.forget()

    def _contexts(
        self, step: list[tuple[RequestId, int, list[int]]], trees: dict[RequestId, tuple[int, ...]]
    ) -> dict[RequestId, list[int]]:
        """The context at each slot of each request of the step, from what was computed before and its new tokens.

        ``trees``: parents of a request's rows after the first, as ``DraftTree`` has them.

        What was computed before may be what another request of this very step computes: those are known first.
        """
        size = self.limits.block_size
        contexts: dict[RequestId, list[int]] = {}
        fresh: dict[tuple[int, int], int] = {}
        todo = deque(step)
        for _ in range(len(step) ** 2 + 1):
            if not todo:
                break
            request_id, start, tokens = todo.popleft()
            table = self.tables[request_id]
            slots = [(table[position // size], position % size) for position in range(start)]
            being_written = {
                (self.tables[name][p // size], p % size) for name, s, t in todo for p in range(s, s + len(t))
            }
            if any(slot in being_written for slot in slots):
                todo.append((request_id, start, tokens))
                continue
            found = [fresh.get(slot, self.slots.get(slot)) for slot in slots]
            assert None not in found, "a slot is read that nobody wrote to"
            chain: list[int] = found  # type: ignore[assignment]
            for row, token_id in enumerate(tokens):
                before = start + trees[request_id][row - 1] if row and request_id in trees else len(chain) - 1
                adapter = self.adapters[self.slot_of[request_id]]
                chain.append(Context.after(chain[before] if chain else 0, token_id, adapter))
            contexts[request_id] = chain
            for position in range(start, start + len(tokens)):
                fresh[table[position // size], position % size] = chain[position]
        assert not todo, "requests of one step wait for each other's blocks"
        return contexts

    def _copy(self, output: SchedulerOutput) -> None:
        size = self.limits.block_size
        assert len({host for _, host in output.swapped_out}) == len(output.swapped_out)
        for block, host in output.swapped_out:
            self.host[host] = {i: self.slots[block, i] for i in range(size) if (block, i) in self.slots}
        for block, host in output.swapped_in:
            for i in range(size):
                self.slots.pop((block, i), None)
            self.slots |= {(block, i): context for i, context in self.host[host].items()}
        sources, targets = {source for source, _ in output.copies}, {target for _, target in output.copies}
        assert len(targets) == len(output.copies), "two blocks are copied to one"
        assert not sources & targets, "a block is copied to and from"
        assert not sources & {block for block, _ in output.swapped_in}, "a block is overwritten before it is copied"
        for source, target in output.copies:
            for i in range(size):
                self.slots.pop((target, i), None)
            self.slots |= {(target, i): self.slots[source, i] for i in range(size) if (source, i) in self.slots}


def _move(
    slots: dict[tuple[int, int], int], moves: Sequence[tuple[int, int]], size: int, written: set[tuple[int, int]]
) -> None:
    """Of the step before the keys that a tree has elsewhere than a chain."""
    assert len({target for _, target in moves}) == len(moves), "two keys are moved to one slot"
    content = [slots.get(divmod(source, size)) for source, _ in moves]
    for (_, target), context in zip(moves, content, strict=True):
        written.add(divmod(target, size))
        slots.pop(divmod(target, size), None)
        if context is not None:
            slots[divmod(target, size)] = context


def result_of(sampled_token_ids: Iterable[int], num_targets: int = 0) -> StepResult:
    """Of a step whose time is of no interest, and which scored so many tokens of prompts."""
    scores = LogprobColumns(*((value,) * num_targets for value in (-1.0, 1, (), ()))) if num_targets else None
    return StepResult(Bucket("decode", 1, 1), tuple(sampled_token_ids), prompt_logprobs=scores)


class FakeFiles:
    """Files of blocks, and a thread that takes its time: what it reads and writes is known when a job ends.

    Attributes:
        disk: digest -> the file: what the block holds, and by window; None: it is damaged.
    """

    def __init__(self, runner: "FakeRunner", disk: dict[bytes, Any], seed: int) -> None:
        self.runner, self.disk, self._rng = runner, disk, random.Random(seed)
        self._reads: list[tuple[bytes, int, object]] = []
        self._writes: list[tuple[bytes, int, tuple[int, ...]]] = []

    def work(self, output: SchedulerOutput) -> FileResult:
        """Take on what a step asks for, and end some of it: one job at least where the step waits for that."""
        if output.files.resets:
            self._reads, self._writes = [], []
        self._reads += output.files.reads
        self._writes += output.files.writes
        host, windows = self.runner.host, self.runner.windows
        read, written, lost = [], [], []
        for digest, row, _ in self._some(self._reads, bool(output.files.wait_seconds)):
            file = self.disk.get(digest)
            if row < 0:
                states = self.runner.states
                assert states is not None
                assert -row > states.num_swap_slots
                states.host.pop(-row, None)
                if file is not None:
                    states.host[-row] = file[0]
                else:
                    self.disk.pop(digest, None)
                read.append((digest, None if file is None else (), 1e-4))
                continue
            assert row > self.runner.num_swap_blocks
            host.pop(row, None)
            for window in windows:
                window.host.pop(row, None)
            if file is not None:
                host[row], of_windows = dict(file[0]), file[1]
                for number, content in of_windows.items():
                    windows[number].host[row] = dict(content)
            else:
                self.disk.pop(digest, None)
            read.append((digest, None if file is None else tuple(file[1]), 1e-4))
        for digest, row, numbers in self._some(self._writes, False):
            is_written = self._rng.random() < 0.9
            if is_written and row < 0:
                assert self.runner.states is not None
                self.disk[digest] = self.runner.states.host[-row], {}
            elif is_written:
                self.disk[digest] = dict(host[row]), {number: dict(windows[number].host[row]) for number in numbers}
            written.append((digest, is_written))
        if self.disk and self._rng.random() < 0.1:  # another engine removes a file, or one is damaged
            digest = self._rng.choice(list(self.disk))
            if self._rng.random() < 0.5:
                del self.disk[digest]
                lost.append(digest)
            else:
                self.disk[digest] = None
        return FileResult(tuple(read), tuple(written), (), tuple(lost))

    def _some(self, jobs: list, at_least_one: bool) -> list:
        count = max(self._rng.randint(0, len(jobs)), at_least_one)
        done = jobs[:count]
        del jobs[:count]
        return done


class FakeEngine:
    """The engine's loop around a fake runner, with every invariant checked after every step.

    Args:
        breaks: whether the device breaks in this step, on which it has worked.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        overlap: bool = False,
        breaks: Callable[[SchedulerOutput], bool] | None = None,
        disk: dict[bytes, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.breaks = breaks
        self.broken: list[SchedulerOutput] = []  # steps in which the device broke
        self.runner = FakeRunner(scheduler.limits, scheduler.pool.windows, scheduler.pool.states)
        self.runner.files = FakeFiles(self.runner, {} if disk is None else disk, seed)
        self.runner.num_swap_blocks = scheduler.swap_pool.num_blocks
        if self.runner.states is not None:
            self.runner.states.num_swap_slots = scheduler.swap_pool.states.num_slots
        self.outputs: list[SchedulerOutput] = []  # of all steps
        self._launched: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self._most_launched = 2 if overlap else 1

    def step(self) -> SchedulerOutput | None:
        """Run a step; returns what was scheduled, or None where all that can run is in flight."""
        output = self.launch()
        if len(self._launched) == self._most_launched or output is None:
            self.collect()
        check_scheduler(self.scheduler)
        return output

    def launch(self) -> SchedulerOutput | None:
        """The first half of a step; its results wait in line."""
        output = self.scheduler.schedule()
        check_step(self.scheduler, output)
        if not output.request_ids and not output.files.wait_seconds:
            return None
        self.outputs.append(output)
        self._launched.append((output, self.runner.execute(output)))
        if self.breaks is not None and self.breaks(output):
            self.broken.append(output)
            self.fail_steps("the reason")
        return output

    def collect(self) -> None:
        """The second half: the results of the step that was launched first."""
        self.scheduler.update(*self._launched.popleft())
        self.runner.written.popleft()
        self.runner.rows_written.popleft()
        for window in self.runner.windows:
            window.written.popleft()
        if self.runner.states is not None:
            self.runner.states.written.popleft()
            self.runner.states.rows_written.popleft()

    def fail_steps(self, reason: str) -> list[Request]:
        """The steps in flight broke, as the device may do; returns the requests that this ended."""
        self._launched.clear()
        self.runner.forget()
        failed = self.scheduler.fail_steps_in_flight(reason)
        check_scheduler(self.scheduler)
        return failed

    def run(self, most_steps: int = 10_000) -> None:
        """Step until all requests are finished."""
        for _ in range(most_steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"requests are stuck after {most_steps} steps")


def check_result(request: Request) -> None:
    """The tokens of a finished request are the fake model's, as many as its finish reason says."""
    count = len(request.output_token_ids)
    assert request.output_token_ids == expected_tokens(request.prompt_token_ids, count, request.adapter)
    if request.finish_reason == "length":
        assert len(request.prompt_token_ids) + count == request.max_num_tokens
    elif request.finish_reason == "stop":
        assert request.output_token_ids[-1] in request.stop_token_ids
    assert not request.stop_token_ids & set(request.output_token_ids[:-1])


def add(scheduler: Scheduler, *requests: Request) -> tuple[Request, ...]:
    for request in requests:
        scheduler.add(request)
    return requests


def make_engine(num_blocks: int, *, overlap: bool = False, **arguments: Any) -> tuple[Scheduler, FakeEngine]:
    """A scheduler of these arguments of ``make_scheduler``, and the loop around it."""
    scheduler = make_scheduler(num_blocks, **arguments)
    return scheduler, FakeEngine(scheduler, overlap=overlap)


def add_request(scheduler: Scheduler, *arguments: Any, **named: Any) -> Request:
    """Make a request by ``make_request``, and add it."""
    return add(scheduler, make_request(*arguments, **named))[0]


def names_of(output: SchedulerOutput) -> list[str]:
    """Of the requests of a step."""
    return [request_id.name for request_id in output.request_ids]


def work_of(output: SchedulerOutput | None) -> dict[str, int]:
    """Name of a request -> its tokens in the step."""
    assert output is not None
    return dict(zip(names_of(output), output.num_scheduled_tokens, strict=True))


def computed_tokens(engine: FakeEngine) -> int:
    return sum(output.num_tokens for output in engine.outputs)


def finishing_order(engine: FakeEngine, requests: list[Request]) -> list[str]:
    finished: list[str] = []
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        ended = [request.request_id.name for request in requests if request.status is Status.FINISHED]
        finished += [name for name in ended if name not in finished]
    return finished


both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turns", "overlapping"])
FREE_SWAPS = StepCosts(bucket_seconds={16: 1.0}, swap_seconds=1e-9)
