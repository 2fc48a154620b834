"""DraftCoverage against an account of every slot, over random steps, copies and swaps, with and without drafts."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from compiled_llm import SamplingParams
from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.worker import draft_coverage
from compiled_llm.worker.draft_coverage import DraftCoverage
from compiled_llm.worker.request_rows import RequestRows

SIZE, BLOCKS, HOST_BLOCKS, PROMPT, LENGTH = 4, 30, 12, 11, 26
LIMITS = EngineLimits(32, 3, 16, SIZE, (3,), (16,), True)

Slot = tuple[int, int]  # of a block


class Requests:
    """Requests that run, fork, find prefixes and are swapped out, and what each slot really has.

    A slot holds the tokens up to its own that its keys were made of, in the model's cache and in the drafter's.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.coverage, self.store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
        self.model = dict[Slot, tuple[int, ...]]()
        self.drafter = dict[Slot, tuple[int, ...]]()
        self.on_host = dict[Slot, tuple[int, ...]]()  # of the drafter's
        self.free, self.free_on_host = list(range(1, BLOCKS + 1)), list(range(1, HOST_BLOCKS + 1))
        self.tokens, self.blocks = dict[RequestId, list[int]](), dict[RequestId, list[int]]()
        self.computed = dict[RequestId, int]()  # of running requests
        self.swapped = dict[RequestId, tuple[int, list[int]]]()  # tokens computed, and host blocks
        self.num_told = dict[RequestId, int]()
        self.num_started = self.num_checked = self.num_lacking = self.num_shared = self.num_short = 0
        self.num_with_all = 0
        self.columns: dict[str, list[Any]] = {}

    def take(self) -> int:
        """A block, in which nothing counts as computed from now on."""
        block = self.free.pop(self.rng.randrange(len(self.free)))
        for offset in range(SIZE):
            self.drafter[block, offset] = ()
        return block

    def slots(self, name: RequestId, start: int, end: int) -> list[Slot]:
        return [(self.blocks[name][place // SIZE], place % SIZE) for place in range(start, end)]

    def admit(self, name: RequestId, computed: int) -> None:
        self.computed[name] = computed
        self.columns["admissions"].append(StartedRequest(name, SamplingParams(), 0, (), ()))
        self.columns["table_updates"].append((name, 0, tuple(self.blocks[name])))

    def start(self) -> None:
        """A new request; it may go on from another's whole blocks, or from a copy of its last one, too."""
        name, self.num_started = RequestId(str(self.num_started)), self.num_started + 1
        self.tokens[name], self.blocks[name] = [self.rng.randrange(100) for _ in range(LENGTH)], []
        others, how = [one for one in self.computed if self.computed[one] > 0], self.rng.random()
        if not others or how < 0.3:
            return self.admit(name, 0)
        other = self.rng.choice(others)
        found = self.computed[other] if how > 0.6 else self.computed[other] // SIZE * SIZE
        same = LENGTH if self.rng.random() < 0.4 else found
        self.tokens[name][:same] = self.tokens[other][:same]
        self.blocks[name] = self.blocks[other][: found // SIZE]
        if found % SIZE:
            source, own = self.blocks[other][found // SIZE], self.take()
            self.columns["copies"].append((source, own))
            for cache in (self.model, self.drafter):
                for offset in range(SIZE):
                    cache[own, offset] = cache.get((source, offset), ())
            self.blocks[name].append(own)
        self.admit(name, found)

    def leave(self, name: RequestId, *, swaps: bool) -> None:
        """It ends, or is swapped out with what it has computed."""
        computed = self.computed.pop(name)
        blocks = self.blocks.pop(name)
        self.columns["released_request_ids"].append(name)
        if swaps:
            host = [self.free_on_host.pop() for _ in blocks[: -(-computed // SIZE)]]
            for block, row in zip(blocks, host, strict=False):
                self.columns["swapped_out"].append((block, row))
                for offset in range(SIZE):
                    self.on_host[row, offset] = self.drafter.get((block, offset), ())
            self.swapped[name] = computed, host
        held = {block for others in self.blocks.values() for block in others}
        self.free += [block for block in blocks if block not in held]

    def come_back(self, name: RequestId) -> None:
        computed, host = self.swapped.pop(name)
        self.blocks[name] = [self.take() for _ in host]
        for block, row in zip(self.blocks[name], host, strict=True):
            self.columns["swapped_in"].append((block, row))
            for offset in range(SIZE):
                self.drafter[block, offset] = self.on_host[row, offset]
        for place, slot in enumerate(self.slots(name, 0, computed)):
            self.model[slot] = tuple(self.tokens[name][: place + 1])
        self.free_on_host += host
        self.admit(name, computed)

    def share(self, admitted: set[RequestId]) -> None:
        """A request that has computed a whole block as another has takes the other's, and gives its own back."""
        for name, other in itertools.permutations(set(self.computed) - admitted, 2):
            for index in range(min(self.computed[name], self.computed[other]) // SIZE):
                own, block, end = self.blocks[name][index], self.blocks[other][index], (index + 1) * SIZE
                if own != block and self.tokens[name][:end] == self.tokens[other][:end]:
                    self.blocks[name][index] = block
                    if not any(own in blocks for blocks in self.blocks.values()):
                        self.free.append(own)
                    self.columns["table_updates"].append((name, index, tuple(self.blocks[name][index:])))
                    self.num_shared += 1
                    return

    def step(self, drafts_next: bool) -> None:
        """A step of the requests that run, which may verify drafts, after some came and went."""
        rng = self.rng
        columns = self.columns = {
            name: []
            for name in ("admissions", "table_updates", "released_request_ids", "swapped_out", "swapped_in", "copies")
        }
        for name in list(self.computed):
            if self.computed[name] > LENGTH - 5:
                self.leave(name, swaps=False)
            elif rng.random() < 0.05 and not columns["swapped_out"] and len(self.free_on_host) >= 6:
                self.leave(name, swaps=True)
        came_back = False
        if self.swapped and len(self.computed) < 3 and not columns["swapped_out"] and rng.random() < 0.5:
            self.come_back(rng.choice(list(self.swapped)))
            came_back = True
        if len(self.computed) < 3 and not came_back and (rng.random() < 0.2 or not self.computed):
            self.start()
        names, starts = tuple(self.computed), tuple(self.computed.values())
        admitted = {admission.request_id for admission in columns["admissions"]}
        if rng.random() < 0.3:
            self.share(admitted)
        counts, right = [], []
        for start in starts:
            is_prompt = start < PROMPT
            num_drafts = 0 if is_prompt else rng.choice((0, 0, 2, 4))
            counts.append(rng.randint(1, PROMPT - start) if is_prompt else 1 + num_drafts)
            right.append(counts[-1] if is_prompt else 1 + rng.randint(0, num_drafts))
        for name, start, count in zip(names, starts, counts, strict=True):
            first, ahead = len(self.blocks[name]), rng.random() < 0.2
            needed = min(-(-(start + count) // SIZE) + ahead, LIMITS.blocks_per_request)
            self.blocks[name] += [self.take() for _ in range(needed - first)]
            if needed > first:
                columns["table_updates"].append((name, first, tuple(self.blocks[name][first:])))
        known_tokens = []
        for name in admitted:
            self.num_told.pop(name, None)
        for place, (name, start) in enumerate(zip(names, starts, strict=True)):
            if drafts_next and rng.random() < 0.95:
                first, end = self.num_told.get(name, 0), max(PROMPT, start + 1)
                known_tokens.append((place, first, tuple(self.tokens[name][first:end])))
                self.num_told[name] = end
        filled: dict[str, Any] = {name: tuple(values) for name, values in columns.items()}
        output = SchedulerOutput(
            request_ids=names, num_scheduled_tokens=tuple(counts), num_computed_tokens=starts,
            num_samples=tuple(
                count if start >= PROMPT else int(start + count == PROMPT)
                for start, count in zip(starts, counts, strict=True)
            ),
            feedback=(-1,) * len(names), token_ids=(0,) * sum(counts), known_tokens=tuple(known_tokens),
            drafts_next=drafts_next, **filled,
        )  # fmt: skip
        covered = self.run(output)
        for name, start, count, num_right, has_all in zip(names, starts, counts, right, covered, strict=True):
            for place, slot in enumerate(self.slots(name, start, start + count), start):
                is_right = place < start + num_right
                self.model[slot] = tuple(self.tokens[name][: place + 1]) if is_right else (-1,)
                self.drafter[slot] = self.model[slot] if has_all else self.drafter.get(slot, ())
            self.computed[name] = start + num_right

    def run(self, output: SchedulerOutput) -> Sequence[bool]:
        """Tell the coverage of it. Returns of which requests the drafter has all then."""
        coverage, is_done = self.coverage, self.coverage.expect(output)
        rows, covered = self.store.update(output), [False] * len(output.request_ids)
        assert not (is_done and output.drafts_next)
        assert coverage._complete <= set(self.computed)
        if is_done:
            return covered
        if output.drafts_next:
            has_all_of_all = coverage.has_all_of(output)
            self.num_with_all += has_all_of_all
            coverage.begin_step(output, rows, self.store)
            for name, row, start in zip(output.request_ids, rows.tolist(), output.num_computed_tokens, strict=True):
                found = coverage.num_covered(name, row, start, self.store)
                slots = enumerate(self.slots(name, 0, start))
                wanted = next((p for p, slot in slots if self.drafter.get(slot, ()) != self.model[slot]), start)
                assert found <= wanted
                assert found == start or not has_all_of_all
                self.num_short += found < wanted  # of a block that was filled behind a gap, the end may be forgotten
                self.num_checked += 1
                self.num_lacking += found < start
                tokens, known = coverage.tokens(name, row, found, start), self.num_told.get(name, 0)
                assert (tokens is None) == (start > known)
                if tokens is None:
                    continue
                assert tokens.tolist() == self.tokens[name][found:start]
                assert coverage.tokens(name, row, found, known + 1) is None
                end, how = start, self.rng.random()
                if how < 0.3:  # there is not always room for all
                    end = self.rng.randint(found, start) if how < 0.1 else max(found, start // SIZE * SIZE)
                coverage.cover(row, found, end, self.store)
                for p, slot in enumerate(self.slots(name, 0, end)):
                    self.drafter[slot] = tuple(self.tokens[name][: p + 1])
                covered[output.request_ids.index(name)] = end == start and self.rng.random() < 0.9
        coverage.end_step(output, rows, np.array(covered, dtype=bool), self.store)
        return covered


@pytest.mark.parametrize("seed", range(10))
def test_what_is_forgotten_is_not_taken_for_computed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Behind three steps in a row without drafts, so that requests run on, come and go meanwhile."""
    monkeypatch.setattr(draft_coverage, "_MOST_IDLE", 3)
    requests, drafts = Requests(seed), False
    for _ in range(500):
        drafts ^= requests.rng.random() < 0.3
        requests.step(drafts)
    assert requests.num_checked > 150
    assert requests.num_short > 0.03 * requests.num_checked


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lacking_is_known_slot_by_slot(seed: int) -> None:
    requests, drafts = Requests(seed), False
    for _ in range(500):
        drafts ^= requests.rng.random() < (0.3, 0.1)[seed % 2]
        requests.step(drafts)
    assert requests.num_checked > 150
    assert requests.num_lacking > 25
    assert requests.num_with_all > 10
    assert requests.num_shared > 0
    assert requests.num_short < 0.02 * requests.num_checked


def step(name: str, start: int, count: int, **others: Any) -> SchedulerOutput:
    return SchedulerOutput(
        request_ids=(RequestId(name),), num_scheduled_tokens=(count,), num_computed_tokens=(start,), num_samples=(1,),
        feedback=(-1,), token_ids=(0,) * count, **others,
    )  # fmt: skip


def test_who_has_all_is_told_of_and_decodes_tokens_that_are_known() -> None:
    """Else a step goes the long way, which finds out what is lacking."""
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    first = step("a", 0, 6, drafts_next=True, admissions=(admission,), table_updates=((name, 0, (3, 5)),))
    assert not coverage.expect(first)
    next_one = step("a", 6, 1, drafts_next=True, known_tokens=((0, 0, (1,) * 7),))
    assert not coverage.has_all_of(next_one), "it has nothing yet"
    coverage.end_step(first, store.update(first), np.array([True]), store)
    assert coverage.has_all_of(next_one)
    assert not coverage.has_all_of(next_one._replace(known_tokens=()))
    assert not coverage.has_all_of(next_one._replace(feedback=(0,)))
    assert not coverage.has_all_of(next_one._replace(num_scheduled_tokens=(2,)))
    others = {"request_ids": (name, RequestId("b")), "num_scheduled_tokens": (1, 1), "num_samples": (1, 1)}
    known = ((0, 0, (1,)), (1, 0, (1,)))
    assert not coverage.has_all_of(next_one._replace(**others, feedback=(-1, -1), known_tokens=known))


def test_steps_that_are_not_drafted_behind_need_not_be_entered() -> None:
    """But for the first of them, after which it is known which drafts were right; and blocks, whatever step it is."""
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    first = step("a", 0, 6, drafts_next=True, admissions=(admission,), table_updates=((name, 0, (3, 5)),))
    assert not coverage.expect(first)
    rows = store.update(first)
    coverage.end_step(first, rows, np.array([True]), store)
    entered = []
    for start in range(6, 12):
        updates = {"table_updates": ((name, 2, (7,)),)} if start == 8 else {}
        output = step("a", start, 1, **updates)
        entered.append(not coverage.expect(output))
        assert store.update(output) is rows
        if entered[-1]:
            coverage.end_step(output, rows, np.array([False]), store)
    assert entered == [True, False, False, False, False, False]
    assert coverage.num_covered(name, int(rows[0]), 12, store) == 6


def test_what_drafts_were_written_to_is_lacking_behind_a_gap() -> None:
    """A step with drafts reaches into the next block, and all are wrong. Behind the next step nothing drafts."""
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    first = step("a", 0, 6, drafts_next=True, admissions=(admission,), table_updates=((name, 0, (3, 5, 7)),))
    assert not coverage.expect(first)
    rows = store.update(first)
    coverage.end_step(first, rows, np.array([True]), store)
    second = step("a", 6, 5, drafts_next=True)
    assert not coverage.expect(second)
    coverage.end_step(second, store.update(second), np.array([True]), store)
    third = step("a", 7, 1)
    assert not coverage.expect(third)
    coverage.end_step(third, store.update(third), np.array([False]), store)
    assert [int(coverage._first_lacking[block]) for block in (3, 5, 7)] == [SIZE, 3, 0]


def test_a_block_that_a_resting_step_gives_away_has_nothing_wherever_it_goes() -> None:
    coverage, store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
    one, other = RequestId("a"), RequestId("b")
    admissions = [StartedRequest(name, SamplingParams(), 0, (), ()) for name in (one, other)]
    first = step("a", 0, 8, drafts_next=True, admissions=(admissions[0],), table_updates=((one, 0, (3, 5)),))
    assert not coverage.expect(first)
    coverage.end_step(first, store.update(first), np.array([True]), store)
    given = step("b", 0, 2, admissions=(admissions[1],), table_updates=((other, 0, (3,)),), released_request_ids=(one,))
    assert coverage.expect(given)
    assert coverage._first_lacking[3] == 0
    assert coverage.expect(step("b", 2, 1, swapped_out=((3, 2), (5, 4)), swapped_in=((8, 2), (9, 4))))
    assert [int(coverage._first_lacking[block]) for block in (3, 8, 9)] == [0, 0, SIZE]
    assert coverage.expect(step("b", 4, 1, table_updates=((other, 1, (9,)),)))
    assert coverage._first_lacking[9] == 0


def test_behind_many_steps_without_drafts_nothing_is_entered_and_nothing_is_relied_on() -> None:
    coverage, store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
    one, other = RequestId("a"), RequestId("b")
    admissions = [StartedRequest(name, SamplingParams(), 0, (), ()) for name in (one, other)]
    entered = list[SchedulerOutput]()
    enter = coverage._enter
    coverage._enter = lambda output: (entered.append(output), enter(output))[1]  # type: ignore[method-assign]
    known = ((0, 0, tuple(range(9))),)
    updates = {"admissions": (admissions[0],), "table_updates": ((one, 0, (3, 5)),)}
    first = step("a", 0, 8, drafts_next=True, known_tokens=known, **updates)
    assert not coverage.expect(first)
    rows = store.update(first)
    coverage.begin_step(first, rows, store)
    coverage.end_step(first, rows, np.array([True]), store)
    for _ in range(draft_coverage._MOST_IDLE):
        coverage.expect(SchedulerOutput(request_ids=(other,)))
    assert len(entered) == draft_coverage._MOST_IDLE
    assert coverage.expect(step("b", 0, 3, admissions=(admissions[1],), table_updates=((other, 0, (9,)),)))
    assert len(entered) == draft_coverage._MOST_IDLE
    again = step("a", 8, 1, drafts_next=True, table_updates=((one, 2, (7,)),))
    assert not coverage.expect(again)
    row = int(store.update(again)[0])
    assert coverage.num_covered(one, row, 8, store) == 0
    assert list(coverage.tokens(one, row, 0, 8)) == list(range(8)), "they are told of once"
    for _ in range(draft_coverage._MOST_IDLE):
        coverage.expect(SchedulerOutput())
    coverage.expect(SchedulerOutput(released_request_ids=(one,)))
    assert coverage.tokens(one, row, 0, 8) is None


def test_files_come_to_the_host_behind_what_was_there() -> None:
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    first = step("a", 0, 4, drafts_next=True, admissions=(admission,), table_updates=((name, 0, (3,)),))
    assert not coverage.expect(first)
    coverage.end_step(first, store.update(first), np.array([True]), store)
    assert coverage.expect(SchedulerOutput(released_request_ids=(name,)))
    assert coverage.expect(SchedulerOutput(swapped_out=((3, 2),)))
    coverage.lack_on_host([2])
    assert coverage.expect(SchedulerOutput(swapped_in=((9, 2),)))
    assert [int(coverage._first_lacking[block]) for block in (3, 9)] == [SIZE, 0]


def test_who_is_admitted_anew_after_a_failure_has_nothing() -> None:
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    admitted: dict[str, Any] = {"admissions": (admission,), "table_updates": ((name, 0, (3, 5)),)}
    first = step("a", 0, 6, drafts_next=True, **admitted)
    coverage.expect(first)
    coverage.end_step(first, store.update(first), np.array([True]), store)
    again = step("a", 0, 6, resets=True, **admitted)
    assert coverage.expect(again)
    assert coverage.num_covered(name, int(store.update(again)[0]), 6, store) == 0


def test_a_step_without_requests_moves_blocks() -> None:
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    admission = StartedRequest(name, SamplingParams(), 0, (), ())
    first = step("a", 0, 8, drafts_next=True, admissions=(admission,), table_updates=((name, 0, (3, 5)),))
    coverage.expect(first)
    coverage.end_step(first, store.update(first), np.array([True]), store)
    assert coverage.expect(SchedulerOutput(swapped_out=((3, 1), (5, 2)), released_request_ids=(name,)))
    store.clear()
    back = step("a", 8, 1, admissions=(admission,), table_updates=((name, 0, (8, 9, 10)),), swapped_in=((8, 1), (9, 2)))
    assert coverage.expect(back)
    row = int(store.update(back)[0])
    assert coverage.num_covered(name, row, 8, store) == 8
    coverage.lack_on_host([2])
    assert coverage.expect(SchedulerOutput(swapped_in=((9, 2),)))
    assert coverage.num_covered(name, row, 8, store) == 4
