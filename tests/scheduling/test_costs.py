"""StepCosts: moving averages and the two choices made by them."""

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


def test_a_bucket_that_a_hiccup_ruled_out_is_tried_again() -> None:
    costs = StepCosts({16: 0.03, 64: 0.095})
    costs.record_step(64, 1.0)
    assert costs.largest_within(0.1) == 16
    for _ in range(300):
        costs.record_step(16, 0.03)
    assert costs.largest_within(0.1) == 64


def test_what_was_not_measured_at_start_is_passed_over() -> None:
    costs = StepCosts({16: 1.0})
    costs.record_step(64, 1.0)
    assert costs == StepCosts({16: 1.0})


def test_the_largest_bucket_within_a_time() -> None:
    costs = StepCosts({16: 0.01, 64: 0.02, 256: 0.05})
    assert [costs.largest_within(seconds) for seconds in (0.009, 0.01, 0.03, 1.0)] == [None, 16, 64, 256]
    assert StepCosts().largest_within(1.0) is None


def test_swapping_costs_two_copies_of_each_block_computing_a_share_of_the_largest_bucket() -> None:
    # 100 tokens cost 100 / 200 of 1.0 s to compute again; 10 blocks cost 20 copies.
    costs = StepCosts({50: 1.0, 200: 1.0}, swap_seconds=0.024)
    assert costs.swap_is_cheaper(100, 10)
    costs.swap_seconds = 0.026
    assert not costs.swap_is_cheaper(100, 10)


def test_without_measurements_nothing_is_swapped() -> None:
    assert not StepCosts(swap_seconds=1e-9).swap_is_cheaper(1000, 1)
