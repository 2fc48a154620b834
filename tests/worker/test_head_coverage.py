"""HeadCoverage: which rows of a head lack a token's follower, or have another one than a request goes on with."""

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

    def admit(self, prompt: list[int], blocks: list[int], start: int = 0, moves: dict | None = None) -> int:
        """A request that computes all its prompt but for the first ``start`` tokens. Returns its row."""
        name, self._names = RequestId(str(self._names)), self._names + 1
        admission = StartedRequest(name, SamplingParams(), 0, tuple(prompt), ())
        output = SchedulerOutput(
            request_ids=(name,), num_scheduled_tokens=(len(prompt) - start,), num_computed_tokens=(start,),
            num_samples=(1,), feedback=(-1,), token_ids=tuple(prompt[start:]), admissions=(admission,),
            table_updates=((name, 0, tuple(blocks)),), **(moves or {}),
        )  # fmt: skip
        rows = self.store.update(output)
        self.coverage.begin_step(output, rows, self.store)
        return int(rows[0])

    def compute(self, row: int, start: int, end: int) -> None:
        """The model has tokens up to ``end``, and the head their rows."""
        self.coverage.cover(row, start, end - 1, self.store)
        self.coverage.end_step(np.array([row]), np.array([start]), np.array([end]), np.array([True]), self.store)

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
    found = run.coverage.tokens(row, 0, 12)
    assert found is not None
    assert found.tolist() == PROMPT[1:]
    assert run.coverage.tokens(row, 0, 13) is None


def test_rows_that_are_lacking_are_not_outdated_besides() -> None:
    run = Run()
    first = run.admit(PROMPT, [1, 2, 3, 4])
    columns = np.array([first]), np.array([0]), np.array([13]), np.array([False])
    run.coverage.end_step(*columns, run.store)  # the model alone
    again = run.admit(PROMPT, [1, 2, 3, 5], start=12)
    assert run.outdated(again) == []
    assert run.coverage.num_covered(np.array([again]), np.array([12]), run.store).tolist() == [0]
