"""Steps that a drafter's account enters all at once, beside one that enters each of them."""

import random

import numpy as np
import pytest

from compiled_llm import SamplingParams
from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.worker import draft_coverage
from compiled_llm.worker.draft_coverage import DraftCoverage
from compiled_llm.worker.head_coverage import HeadCoverage
from compiled_llm.worker.request_rows import RequestRows

SIZE, PROMPT, LENGTH = 4, 6, 30
LIMITS = EngineLimits(32, 3, 16, SIZE, (3,), (16,), True)


class Account:
    """A coverage that is told of steps; ``skips``: as the worker does it."""

    def __init__(self, kind: type[DraftCoverage], skips: bool) -> None:
        self.coverage, self.store, self.skips = kind(LIMITS, 40, 4), RequestRows(LIMITS, 100), skips
        self.num_entered = 0

    def step(self, output: SchedulerOutput, learned: list[int]) -> list[tuple[int, list[int] | None]]:
        """What is covered of each request, and its tokens; only where the step is to be drafted behind."""
        coverage, is_skipped = self.coverage, self.skips and self.coverage.skip(output, self.store)
        rows, found = self.store.update(output), []
        coverage.learn(learned)
        if is_skipped:
            return []
        self.num_entered += 1
        coverage.begin_step(output, rows, self.store)
        starts, counts = np.array(output.num_computed_tokens), np.array(output.num_scheduled_tokens)
        if output.drafts_next:
            covered = coverage.num_covered(rows, starts, self.store).tolist()
            for row, first, start in zip(rows.tolist(), covered, starts.tolist(), strict=True):
                tokens = coverage.tokens(row, 0, start)
                found.append((first, None if tokens is None else tokens.tolist()))
                coverage.cover(row, first, start, self.store)
        coverage.end_step(rows, starts, starts + counts, np.full(len(rows), output.drafts_next), self.store)
        return found


@pytest.mark.parametrize("kind", [DraftCoverage, HeadCoverage])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_lacking_is_the_same(kind: type[DraftCoverage], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(draft_coverage, "_MOST_SKIPPED", 3)
    rng, each, at_once = random.Random(seed), Account(kind, skips=False), Account(kind, skips=True)
    tokens = {RequestId(str(n)): [rng.randrange(100) for _ in range(LENGTH + 1)] for n in range(6)}
    waiting, running = list(tokens), dict[RequestId, int]()
    free, blocks = list(range(1, 41)), dict[RequestId, list[int]]()
    previous: list[RequestId] = []  # of the step before
    sampled, learned, num_steps = list[int](), list[int](), 0
    ended: tuple[RequestId, ...] = ()
    compared = 0
    while waiting or running:
        admissions = []
        while waiting and len(running) < 3 and (rng.random() < 0.1 or not running):
            name = waiting.pop(0)
            admissions.append(StartedRequest(name, SamplingParams(), 0, tuple(tokens[name][:PROMPT]), ()))
            running[name], blocks[name] = 0, []
        updates = []
        for name, start in running.items():
            needed = -(-(start + (PROMPT if start == 0 else 1)) // SIZE)
            if needed > len(blocks[name]):
                new = [free.pop(rng.randrange(len(free))) for _ in range(needed - len(blocks[name]))]
                updates.append((name, len(blocks[name]), tuple(new)))
                blocks[name] += new
        counts = [PROMPT if start == 0 else 1 for start in running.values()]
        overlaps = rng.random() < 0.7
        feedback, sent = [], []
        for (name, start), count in zip(running.items(), counts, strict=True):
            is_taken = overlaps and start > 0 and name in previous
            feedback.append(previous.index(name) if is_taken else -1)
            sent += [0] if is_taken else tokens[name][start : start + count]
        copies: tuple[tuple[int, int], ...] = ()
        if rng.random() < 0.05 and not updates:
            copies = ((blocks[next(iter(running))][0], 40 if 40 in free else free[0]),)
        output = SchedulerOutput(
            request_ids=tuple(running), num_scheduled_tokens=tuple(counts), copies=copies,
            num_computed_tokens=tuple(running.values()), num_samples=(1,) * len(counts), feedback=tuple(feedback),
            token_ids=tuple(sent), admissions=tuple(admissions), table_updates=tuple(updates),
            released_request_ids=ended, drafts_next=rng.random() < 0.15,
        )  # fmt: skip
        found = at_once.step(output, learned)
        assert found == each.step(output, learned)
        compared += len(found)
        num_steps += 1
        previous = list(running)
        learned = sampled
        for (name, start), count in zip(list(running.items()), counts, strict=True):
            running[name] = start + count
        sampled = [tokens[name][end] for name, end in running.items()]
        ended = tuple(name for name, end in running.items() if end == LENGTH)
        for name in ended:
            free += blocks.pop(name)
            del running[name]
    assert compared > 5
    assert at_once.num_entered < 0.85 * num_steps


def test_a_step_that_was_given_up_leaves_tokens_unknown() -> None:
    """And one that does not go on where the last one ended is entered apart."""
    account, name = Account(DraftCoverage, skips=True), RequestId("a")

    def step(start: int, feedback: int, learned: list[int], drafts: bool = False) -> list:
        first = start == 0
        return account.step(
            SchedulerOutput(
                request_ids=(name,), num_computed_tokens=(start,), num_scheduled_tokens=(1,), num_samples=(1,),
                feedback=(feedback,), token_ids=(0 if feedback >= 0 else 50 + start,), drafts_next=drafts,
                admissions=(StartedRequest(name, SamplingParams(), 0, (50,), ()),) if first else (),
                table_updates=((name, 0, (1, 2)),) if first else (),
            ),
            learned,
        )  # fmt: skip

    for start, feedback, learned in ((0, -1, []), (1, 0, []), (2, 0, [71]), (3, 0, []), (2, -1, []), (3, -1, [])):
        step(start, feedback, learned)
    assert account.num_entered == 1
    assert step(4, -1, [], drafts=True) == [(0, [50, 71, 52, 53])]
