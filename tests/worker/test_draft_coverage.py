"""DraftCoverage against an account of every slot, over random steps, copies and swaps, with and without drafts."""

import random

import numpy as np
import pytest

from compiled_llm import SamplingParams
from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.worker.draft_coverage import DraftCoverage
from compiled_llm.worker.request_rows import RequestRows

SIZE, BLOCKS, HOST_BLOCKS = 4, 12, 4
LIMITS = EngineLimits(32, 3, 16, SIZE, (3,), (16,), True)


def started(name: RequestId, prompt: list[int], output: list[int]) -> StartedRequest:
    return StartedRequest(name, SamplingParams(), 0, tuple(prompt), tuple(output))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lacking_is_known_slot_by_slot(seed: int) -> None:
    """A slot holds the tokens up to its own that its keys were made of, in the model's cache and in the drafter's."""
    rng, coverage, store = random.Random(seed), DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
    names = [RequestId(str(number)) for number in range(3)]
    tokens = {name: [rng.randrange(100) for _ in range(32)] for name in names}
    blocks = {name: list(range(1 + 4 * number, 5 + 4 * number)) for number, name in enumerate(names)}
    model: dict[tuple[int, int], tuple[int, ...]] = {}
    drafter: dict[tuple[int, int], tuple[int, ...]] = {}
    computed = dict.fromkeys(names, 0)

    def slots(name: RequestId, end: int) -> list[tuple[int, int]]:
        return [(blocks[name][place // SIZE], place % SIZE) for place in range(end)]

    admitted, taken = set[RequestId](), list[int]()
    for _ in range(40):
        coverage.learn(taken)  # the host knows by now what the last step took from the one before
        taken = []
        name = rng.choice(names)
        start, known = computed[name], tokens[name]
        count = min(rng.choice((1, 1, 3, 5)), 16 - start)
        swapped_out = swapped_in = copies = ()
        event = rng.random()
        if event < 0.1 and start:  # to the host and back, into the same blocks
            swapped_out = swapped_in = ((blocks[name][0], 1),)
        elif event < 0.3 and 0 < start <= SIZE:  # a fork: another request goes on from a copy of the first block
            other = rng.choice([one for one in names if one != name])
            copies = ((blocks[name][0], blocks[other][0]),)
            tokens[other][:start], computed[other] = known[:start], start
            admitted.discard(other)
            for offset in range(SIZE):
                for cache in (model, drafter):
                    cache[blocks[other][0], offset] = cache.get((blocks[name][0], offset), ())
        elif count <= 0:  # it ends; its blocks begin anew
            computed[name], tokens[name] = 0, [rng.randrange(100) for _ in range(32)]
            admitted.discard(name)
            continue
        count = max(count, 1)
        if start + count > 16:
            continue
        drafts, is_known = rng.random() < 0.7, rng.random() < 0.9
        fresh = () if name in admitted else (started(name, tokens[name][:16], []),)
        sent = known[start : start + count]
        if not is_known:
            taken, sent[-1] = sent[-1:], 0
        output = SchedulerOutput(
            request_ids=(name,), num_scheduled_tokens=(count,), num_computed_tokens=(start,), num_samples=(1,),
            feedback=(-1 if is_known else 0,), token_ids=tuple(sent),
            admissions=fresh, released_request_ids=(name,) if fresh and name in store._row_of else (),
            table_updates=((name, 0, tuple(blocks[name])),) if fresh else (),
            swapped_out=swapped_out, swapped_in=swapped_in, copies=copies,
        )  # fmt: skip
        admitted.add(name)
        rows = store.update(output)
        coverage.begin_step(output, rows, store)
        starts = np.array([start])
        found = int(coverage.num_covered(rows, starts, store)[0])
        wanted = next(
            (place for place, slot in enumerate(slots(name, start)) if drafter.get(slot) != model[slot]), start
        )
        assert found == wanted
        is_covered = False
        if drafts:
            lacking = coverage.tokens(int(rows[0]), found, start)
            assert lacking is not None
            assert lacking.tolist() == tokens[name][found:start]
            end = start if rng.random() < 0.7 else rng.randint(found, start)  # there is not always room for all
            coverage.cover(int(rows[0]), found, end, store)
            for place, slot in enumerate(slots(name, end)):
                drafter[slot] = tuple(tokens[name][: place + 1])
            is_covered = is_known and end == start
        for place, slot in list(enumerate(slots(name, start + count)))[start:]:
            model[slot] = tuple(tokens[name][: place + 1])
            drafter[slot] = model[slot] if is_covered else ()
        coverage.end_step(rows, starts, starts + count, np.array([is_covered]), store)
        computed[name] = start + count


def test_a_token_that_the_device_alone_has_is_not_known_before_the_host_reads_it() -> None:
    coverage, store, name = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100), RequestId("a")
    first = {"admissions": (started(name, [5, 6], []),), "table_updates": ((name, 0, (1,)),)}
    for start, count, feedback, others in ((0, 2, -1, first), (2, 1, 0, {}), (3, 1, 0, {})):
        output = SchedulerOutput(
            request_ids=(name,), num_scheduled_tokens=(count,), num_computed_tokens=(start,), num_samples=(1,),
            feedback=(feedback,), token_ids=(5, 6)[:count] if feedback < 0 else (0,), **others,
        )  # fmt: skip
        coverage.learn([start + 10] if start == 3 else [])
        coverage.begin_step(output, store.update(output), store)
    known = coverage.tokens(0, 0, 3)
    assert known is not None
    assert known.tolist() == [5, 6, 13]
    assert coverage.tokens(0, 0, 4) is None


def test_nothing_is_looked_up_while_the_drafter_has_all() -> None:
    coverage, store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
    starts = np.array([7, 9])
    assert coverage.num_covered(np.array([0, 1]), starts, store) is starts


def test_tokens_of_a_tree_go_where_their_keys_go() -> None:
    """Of the rows 5, 6, 7 after the last known token, 4, the path 4, 6, 7 counts; then 8 comes."""
    coverage, store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
    name, place = RequestId("a"), 4  # of the token 4, the first of the second block
    step = SchedulerOutput(
        request_ids=(name,), num_computed_tokens=(place,), num_scheduled_tokens=(4,), num_samples=(4,), feedback=(-1,),
        token_ids=(4, 5, 6, 7), trees=((0, (0, 0, 2)),), admissions=(started(name, [0, 1, 2, 3], [4]),),
        table_updates=((name, 0, (3, 5)),),
    )  # fmt: skip
    coverage.begin_step(step, store.update(step), store)
    first = 5 * SIZE
    later = SchedulerOutput(
        request_ids=(name,), num_computed_tokens=(7,), num_scheduled_tokens=(1,), num_samples=(1,), feedback=(-1,),
        token_ids=(8,), moved_keys=((first + 2, first + 1), (first + 3, first + 2)),
    )  # fmt: skip
    rows = store.update(later)
    coverage.begin_step(later, rows, store)
    assert list(coverage.tokens(int(rows[0]), 0, 8)) == [0, 1, 2, 3, 4, 6, 7, 8]  # type: ignore[arg-type]


@pytest.mark.parametrize("moves_a_block", [False, True])
def test_steps_that_are_skipped_until_something_else_happens_are_entered_as_one_by_one(moves_a_block: bool) -> None:
    """Also those in which a request gets its next block; not one that has another block for tokens that it has."""
    names, prompts = (RequestId("a"), RequestId("b")), ([1, 2, 3], [4, 5, 6, 7, 8])
    blocks = [1, 2, 3, 4], [5, 6, 7, 8]
    found = []
    for skips in (True, False):
        coverage, store = DraftCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
        num_skipped = 0
        for number in range(10):
            first = number == 0
            counts = tuple(map(len, prompts)) if first else (1, 1)
            starts = (0, 0) if first else tuple(len(prompt) + number - 1 for prompt in prompts)
            sent = [tuple(own[: -(-len(prompt) // SIZE)]) for own, prompt in zip(blocks, prompts, strict=True)]
            updates = [(name, 0, own) for name, own in zip(names, sent, strict=True)] if first else []
            for name, own, start in zip(names, blocks, starts, strict=True):
                if not first and start % SIZE == 0:
                    updates.append((name, start // SIZE, (own[start // SIZE],)))
            if moves_a_block and number == 4:
                updates.append((names[0], 1, (9,)))  # where its token at position 4 is
            output = SchedulerOutput(
                request_ids=names, num_scheduled_tokens=counts, num_computed_tokens=starts, num_samples=(1, 1),
                feedback=(-1, -1), token_ids=(*prompts[0], *prompts[1]) if first else (10 + number, 20 + number),
                admissions=tuple(map(started, names, prompts, ([], []))) if first else (),
                table_updates=tuple(updates), drafts_next=number == 9,
            )  # fmt: skip
            is_skipped = skips and coverage.skip(output, store)
            num_skipped += is_skipped
            rows = store.update(output)
            if not is_skipped:
                coverage.begin_step(output, rows, store)
                ends = np.array(starts) + counts
                if number == 9:
                    covered = coverage.num_covered(rows, np.array(starts), store)
                    texts = [coverage.tokens(int(row), 0, start) for row, start in zip(rows, starts, strict=True)]
                    found.append((covered.tolist(), [text.tolist() for text in texts if text is not None]))
                coverage.end_step(rows, np.array(starts), ends, np.array([first, first]), store)
        assert num_skipped == (0 if not skips else 7 if moves_a_block else 8)
    assert found[0] == found[1]
    assert found[0][1] == [[1, 2, 3, *range(11, 19)], [4, 5, 6, 7, 8, *range(21, 29)]]
