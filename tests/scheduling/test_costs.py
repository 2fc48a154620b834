"""StepCosts: moving averages and the two choices made by them."""

import math

import pytest

from compiled_llm.scheduling.costs import StepCosts


def test_a_measurement_moves_the_average_of_its_bucket_alone() -> None:
    costs = StepCosts({16: 1.0, 64: 3.0})
    costs.record_step(16, 1.5)
    assert costs.bucket_seconds == {16: pytest.approx(1.05), 64: 3.0}


def test_the_average_arrives_where_measurements_stay() -> None:
    costs = StepCosts({16: 1.0})
    for _ in range(200):
        costs.record_step(16, 0.1)
    assert costs.bucket_seconds[16] == pytest.approx(0.1, rel=0.01)


def test_a_hiccup_counts_as_twice_the_average_at_most() -> None:
    costs = StepCosts({16: 1.0})
    costs.record_step(16, 1000.0)
    assert costs.bucket_seconds[16] == pytest.approx(1.1)


def test_a_hiccup_in_a_bucket_that_was_not_measured_says_little_of_smaller_ones() -> None:
    costs = StepCosts({16: 0.01})
    costs.record_step(64, 10.0)
    assert costs.bucket_seconds == {16: pytest.approx(0.011), 64: pytest.approx(0.044)}


def test_a_bucket_that_a_hiccup_ruled_out_is_tried_again() -> None:
    costs = StepCosts({16: 0.03, 64: 0.095})
    costs.record_step(64, 1.0)
    assert costs.largest_within(0.1, (16, 64)) == 16
    for _ in range(300):
        costs.record_step(16, 0.03)
    assert costs.largest_within(0.1, (16, 64)) == 64


def test_what_was_not_measured_follows_from_smaller_steps_or_else_from_larger_ones() -> None:
    costs = StepCosts()
    assert costs.expected(16) == math.inf
    costs.record_step(64, 1.0)
    assert [costs.expected(size) for size in (16, 64, 256)] == [0.25, 1.0, 4.0]
    costs.record_step(32, 0.75)
    assert [costs.expected(size) for size in (16, 32, 64, 256)] == [0.375, 0.75, 1.0, 4.0]


def test_what_contradicts_the_last_step_is_moved_as_far_as_that_says() -> None:
    costs = StepCosts({16: 1.0, 64: 4.0, 256: 16.0})  # before steps were compiled
    for _ in range(100):
        costs.record_step(64, 1.0)
    now = costs.bucket_seconds[64]
    assert now == pytest.approx(1.0, rel=0.01)
    assert costs.bucket_seconds[256] == pytest.approx(4 * now)
    assert now / 4 <= costs.bucket_seconds[16] <= 1.0
    for _ in range(100):
        costs.record_step(64, 8.0)  # other programs have come
    assert costs.bucket_seconds[16] == pytest.approx(costs.bucket_seconds[64] / 4)


@pytest.mark.parametrize("per_token", [0.002, 0.02])
def test_prompts_beside_decodes_find_their_bucket_without_being_measured_before(per_token: float) -> None:
    """From the first step on, also where that was a slow one; and it is left for no other."""
    sizes, costs, target = (16, 32, 64, 128), StepCosts(), 0.25
    costs.record_step(128, 5 * (0.02 + 128 * per_token))
    chosen = []
    for _ in range(200):
        chosen.append(costs.largest_within(target, sizes))
        costs.record_step(chosen[-1], 0.02 + chosen[-1] * per_token)
    right = max((size for size in sizes if 0.02 + size * per_token <= target), default=16)
    assert set(chosen[50:]) == {right}


def test_the_largest_bucket_within_a_time_is_at_least_one_that_takes_little_longer_than_the_smallest() -> None:
    sizes, costs = (16, 64, 256), StepCosts({16: 0.02, 64: 0.035, 256: 0.05})
    assert [costs.largest_within(seconds, sizes) for seconds in (0.009, 0.02, 0.045, 1.0)] == [64, 64, 64, 256]
    assert costs.largest_within(1.0, sizes[:2]) == 64
    assert StepCosts({16: 0.01, 64: 0.02}).largest_within(0.009, sizes) == 16
    assert StepCosts().largest_within(1.0, sizes) == 16


def test_swapping_costs_two_copies_of_each_block_computing_a_share_of_the_largest_bucket() -> None:
    # 100 tokens cost 100 / 200 of 1.0 s to compute again; 10 blocks cost 20 copies.
    costs = StepCosts({50: 1.0, 200: 1.0}, swap_seconds=0.024)
    assert costs.swap_is_cheaper(100, 10)
    costs.swap_seconds = 0.026
    assert not costs.swap_is_cheaper(100, 10)


def test_without_measurements_nothing_is_swapped() -> None:
    assert not StepCosts(swap_seconds=1e-9).swap_is_cheaper(1000, 1)
    costs = StepCosts()
    costs.record_step(16, 1.0)
    assert not costs.swap_is_cheaper(1000, 1), "a copy was not measured"


def test_where_nothing_pads_a_step_says_what_a_full_one_takes_at_most() -> None:
    """Half a bucket in half the time makes neither this bucket cheaper nor the larger ones."""
    measured = {16: 0.2, 64: 0.8, 256: 3.2}
    costs = StepCosts(dict(measured), pads=False)
    for _ in range(100):
        costs.record_step(64, 0.4, 32)
        costs.record_step(16, 0.03, 1)
    assert costs.bucket_seconds == pytest.approx(measured)
    for _ in range(100):
        costs.record_step(64, 0.6, 64)
    assert costs.bucket_seconds[64] == pytest.approx(0.6, rel=0.01)
    padded = StepCosts(dict(measured))
    padded.record_step(64, 0.4, 32)
    assert padded.bucket_seconds[64] == pytest.approx(0.76)
