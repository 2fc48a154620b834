"""HeadCoverage: which rows of a head lack a token's follower, or have another one than a request goes on with."""

from typing import Any

import numpy as np

from compiled_llm import SamplingParams
from compiled_llm.api.config import EngineLimits
from compiled_llm.scheduling.request import RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StartedRequest
from compiled_llm.worker.head_coverage import HeadCoverage
from compiled_llm.worker.request_rows import RequestRows

SIZE, BLOCKS, HOST_BLOCKS = 4, 12, 4
LIMITS = EngineLimits(32, 3, 16, SIZE, (3,), (16,), True)
PROMPT = list(range(20, 33))  # three blocks and a token


class Run:
    """Steps of requests, of which the coverage is told what the model computed and the head with it."""

    def __init__(self) -> None:
        self.coverage, self.store = HeadCoverage(LIMITS, BLOCKS, HOST_BLOCKS), RequestRows(LIMITS, 100)
        self._names = 0

    def admit(
        self, prompt: list[int], blocks: list[int], start: int = 0, moves: dict | None = None, drafts_next: bool = True
    ) -> int:
        """A request that computes all its prompt but for the first ``start`` tokens. Returns its row."""
        name, self._names = RequestId(str(self._names)), self._names + 1
        admission = StartedRequest(name, SamplingParams(), 0, tuple(prompt), ())
        output = SchedulerOutput(
            request_ids=(name,), num_scheduled_tokens=(len(prompt) - start,), num_computed_tokens=(start,),
            num_samples=(1,), feedback=(-1,), token_ids=tuple(prompt[start:]), admissions=(admission,),
            table_updates=((name, 0, tuple(blocks)),), drafts_next=drafts_next,
            known_tokens=((0, 0, tuple(prompt)),) if drafts_next else (),
            **(moves or {}),
        )  # fmt: skip
        self.coverage.expect(output)
        rows = self.store.update(output)
        if drafts_next:
            self.coverage.begin_step(output, rows, self.store)
        self.output = output
        return int(rows[0])

    def go_on(self, row: int, start: int, count: int = 1, drafts_next: bool = True, **others: Any) -> None:
        """The last request computes ``count`` tokens more."""
        self.output = SchedulerOutput(
            request_ids=self.output.request_ids, num_scheduled_tokens=(count,), num_computed_tokens=(start,),
            num_samples=(count,), feedback=(-1,), token_ids=(0,) * count, drafts_next=drafts_next, **others,
        )  # fmt: skip
        self.coverage.expect(self.output)
        rows = self.store.update(self.output)
        assert rows.tolist() == [row]
        if drafts_next:
            self.coverage.begin_step(self.output, rows, self.store)

    def compute(self, row: int, start: int, end: int) -> None:
        """The model has tokens up to ``end``, all of them of the last step, and the head their rows."""
        self.coverage.cover(row, start, end - 1, self.store)
        self.coverage.end_step(self.output, np.array([row]), np.array([True]), self.store)

    def outdated(self, row: int) -> list[tuple[int, int, list[int]]]:
        found = self.coverage.outdated([row], 16, self.store)
        return [(one.row, one.start, one.token_ids.tolist()) for one in found]


def test_a_block_that_another_token_follows_is_told_once() -> None:
    run = Run()
    first = run.admit(PROMPT, [1, 2, 3, 4])
    run.compute(first, 0, 13)
    again = run.admit(PROMPT, [1, 2, 3, 5], start=12)
    assert run.outdated(again) == []
    other = run.admit([*PROMPT[:8], 77, 78], [1, 2, 6], start=8)
    assert run.outdated(other) == [(other, 7, [77])]
    assert run.outdated(other) == []


def test_who_goes_on_with_the_first_token_has_the_row_again() -> None:
    run = Run()
    run.compute(run.admit(PROMPT, [1, 2, 3, 4]), 0, 13)
    other = run.admit([*PROMPT[:8], 77, 78], [1, 2, 6], start=8)
    run.outdated(other)
    third = run.admit([*PROMPT[:8], 77, 79], [1, 2, 7], start=8)
    assert run.outdated(third) == []
    run = Run()
    run.compute(run.admit(PROMPT, [1, 2, 3, 4]), 0, 13)
    run.outdated(run.admit([*PROMPT[:8], 77, 78], [1, 2, 6], start=8))
    back = run.admit(PROMPT, [1, 2, 3, 8], start=12)
    assert run.outdated(back) == [(back, 7, [PROMPT[8]])]


def test_followers_move_with_blocks_that_are_swapped() -> None:
    run = Run()
    run.compute(run.admit(PROMPT, [1, 2, 3, 4]), 0, 13)
    assert run.outdated(run.admit(PROMPT, [1, 2, 3, 5], start=12, moves={"swapped_out": ((2, 3),)})) == []
    back = run.admit([*PROMPT[:8], 91], [1, 10, 11], start=8, moves={"swapped_in": ((10, 3),)})
    assert run.outdated(back) == [(back, 7, [91])]
    assert run.coverage._followers[10] == 91


def test_followers_move_with_blocks_that_are_copied() -> None:
    """In a step that swaps none."""
    run = Run()
    run.compute(run.admit(PROMPT, [1, 2, 3, 4]), 0, 13)
    assert run.outdated(run.admit(PROMPT, [1, 2, 9, 5], start=12, moves={"copies": ((3, 9),)})) == []
    assert run.coverage._followers[9] == PROMPT[12]


def test_a_row_whose_follower_is_not_known_cannot_be_computed() -> None:
    run = Run()
    row = run.admit(PROMPT, [1, 2, 3, 4])
    found = run.coverage.tokens(run.output.request_ids[0], row, 0, 12)
    assert found is not None
    assert found.tolist() == PROMPT[1:]
    assert run.coverage.tokens(run.output.request_ids[0], row, 0, 13) is None


def test_rows_that_are_lacking_are_not_outdated_besides() -> None:
    run = Run()
    first = run.admit(PROMPT, [1, 2, 3, 4])
    run.coverage.end_step(run.output, np.array([first]), np.array([False]), run.store)  # the model alone
    again = run.admit(PROMPT, [1, 2, 3, 5], start=12)
    assert run.outdated(again) == []
    assert run.coverage.num_covered(run.output.request_ids[0], again, 12, run.store) == 0


def test_a_prefix_that_was_found_while_nothing_was_drafted_is_looked_at_once_tokens_are_known() -> None:
    run = Run()
    run.compute(run.admit(PROMPT, [1, 2, 3, 4]), 0, 13)
    prompt = [*PROMPT[:8], 77, 78]
    other = run.admit(prompt, [1, 2, 6], start=8, drafts_next=False)
    assert run.outdated(other) == []
    run.go_on(other, 10, drafts_next=False)
    assert run.outdated(other) == []
    run.go_on(other, 11, known_tokens=((0, 0, (*prompt, 79, 80)),))
    assert run.outdated(other) == [(other, 7, [77])]


def test_right_drafts_are_followed_by_what_came_after_them() -> None:
    """Rows of a request that lacks nothing, whose tokens are told a step later."""
    run = Run()
    first = run.admit(PROMPT, [1, 2, 3, 4])
    run.compute(first, 0, 13)
    more = ((run.output.request_ids[0], 4, (5,)),)
    run.go_on(first, 13, 4, known_tokens=((0, 13, (50,)),), table_updates=more)
    run.coverage.end_step(run.output, np.array([first]), np.array([True]), run.store)
    run.go_on(first, 17, known_tokens=((0, 14, (51, 52, 53, 54)),))
    assert run.coverage._followers[4] == 53
    assert run.coverage._followers[5] == -1


def test_a_request_may_be_admitted_before_a_step_has_it() -> None:
    """Of states there may be none left for its first tokens."""
    run = Run()
    first = run.admit(PROMPT, [1, 2, 3, 4])
    run.compute(first, 0, 13)
    name = RequestId("later")
    output = SchedulerOutput(
        request_ids=run.output.request_ids, num_scheduled_tokens=(1,), num_computed_tokens=(13,), num_samples=(1,),
        feedback=(-1,), token_ids=(0,), admissions=(StartedRequest(name, SamplingParams(), 0, (), ()),),
    )  # fmt: skip
    assert not run.coverage.expect(output)
    run.store.update(output)
    run.coverage.end_step(output, np.array([first]), np.array([False]), run.store)
    prompt = (*PROMPT[:8], 77, 78)
    output = SchedulerOutput(
        request_ids=(name,), num_scheduled_tokens=(2,), num_computed_tokens=(8,), num_samples=(1,), feedback=(-1,),
        token_ids=(0, 0), table_updates=((name, 0, (1, 2, 6)),), drafts_next=True, known_tokens=((0, 0, prompt),),
    )  # fmt: skip
    run.coverage.expect(output)
    rows = run.store.update(output)
    run.coverage.begin_step(output, rows, run.store)
    assert run.outdated(int(rows[0])) == [(int(rows[0]), 7, [77])]
