"""No rank reads a piece before it is written or after it is overwritten: a model, whose ranks run in any order.

What the kernels do themselves is run in ``test_triton_reductions.py``. That GPUs order memory as the model has it is
what their manual says, and no test here shows it.
"""

import dataclasses
import random

import pytest

from tests.ops.parallel.protocol import Rules, run_in_every_order, run_in_some_order

FAULTS = {
    "one slot": {"slots": 1},
    "a flag before the data": {"data_before_flag": False},
    "nobody waits": {"waits": False},
    "some wait for some": {"waits_for_all": False},
    "two meetings of one number": {"meetings_apart": False},
    "sums over the piece": {"sums_behind": False},
}


def some_runs(rules: Rules, size: int, count: int) -> list[str]:
    """Of ranks with pieces that are two-shot or not, what was wrong."""
    rng = random.Random(size)
    pieces = [[rng.random() < 0.5 for _ in range(rng.randint(1, 9))] for _ in range(count)]
    return [wrong for two_shots in pieces if (wrong := run_in_some_order(size, two_shots, rules, rng))]


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(8, marks=pytest.mark.battery)])
def test_pieces_are_there_when_they_are_read(size: int) -> None:
    assert not some_runs(Rules(), size, 160 // size)


def test_two_ranks_in_every_order() -> None:
    for two_shots in ([False] * 4, [True, True], [False, True, False], [True, False, False]):
        states, wrong = run_in_every_order(2, two_shots, Rules())
        assert not wrong, two_shots
        assert states > 1000


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    assert some_runs(dataclasses.replace(Rules(), **FAULTS[fault]), 4, 60)
