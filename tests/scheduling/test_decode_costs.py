"""Seconds of steps with drafts and without: from those measured at the start, and from steps since."""

import math

import pytest

from compiled_llm.scheduling.decode_costs import DecodeCosts

BUCKETS = [((1, 1), 1.0), ((1, 4), 2.0), ((8, 8), 5.0)]


def test_costs_follow_the_steps_and_a_bucket_that_is_not_used_is_tried_again() -> None:
    costs = DecodeCosts(BUCKETS, [((1, 1), 0.5), ((1, 4), 1.0)])
    assert costs
    assert not DecodeCosts()
    assert not DecodeCosts(pads=False)
    assert [costs.device(*sizes, samples=True) for sizes in ((1, 0), (1, 1), (1, 3), (4, 0))] == [1.5, 3.0, 3.0, 5.0]
    assert costs.device(1, 4, samples=False) == costs.device(8, 1, samples=False) == math.inf, "there is no room"
    costs.record(1, 2, 2.6)
    for _ in range(100):
        costs.record(1, 0, 1.7)
    assert costs.device(1, 0, samples=False) == pytest.approx(1.7, rel=0.01)
    assert 2.06 < costs.device(1, 3, samples=False) < 2.2, "towards 0.8 of 1.7 times what was measured"
    assert costs.device(8, 0, samples=False) == 5.0
    costs.record(8, 1, 1.0)
    assert costs.device(8, 0, samples=False) == 5.0, "no such bucket"
    assert costs.device(1, 0, samples=True) == 1.5, "apart"
    costs.record(1, 3, 6.0, samples=True)
    assert costs.device(1, 1, samples=True) == pytest.approx(3.3)


def test_steps_that_were_not_seen_are_as_much_slower_as_those_with_fewer_drafts() -> None:
    costs = DecodeCosts([((1, 1), 1.0), ((1, 2), 2.0), ((1, 4), 3.0)])
    for _ in range(100):
        costs.record(1, 0, 1.5)
    assert costs.device(1, 1, samples=False) == pytest.approx(3.0, rel=0.03)
    for _ in range(100):
        costs.record(1, 1, 2.0)
    assert costs.device(1, 2, samples=False) == pytest.approx(3.0, rel=0.03)
    for _ in range(10_000):
        costs.record(1, 1, 2.0)
    assert costs.device(1, 2, samples=False) == pytest.approx(0.8 * 3.0, rel=0.01), "so that they are tried some day"


def test_a_step_of_its_own_size_is_on_the_line_between_those_measured() -> None:
    seconds = [((1, 1), 10.0), ((1, 2), 11.0), ((1, 4), 13.0), ((1, 8), 12.0), ((4, 4), 16.0), ((4, 12), 40.0)]
    seconds.append(((8, 8), 30.0))
    costs = DecodeCosts(seconds, pads=False)

    def device(num_requests: int, *drafts: int) -> list[float]:
        return [costs.device(num_requests, count, samples=False) for count in drafts]

    assert device(1, 0, 1, 2, 3, 5, 7) == [10.0, 11.0, 11.5, 12.0, 12.0, 12.0], "fewer tokens never take longer"
    assert device(3, 0, 3, 5) == [11.5, 12.0, 12.0], "on the curve of one request, as far as that goes"
    assert device(3, 7, 9, 10) == [26.0, 40.0, math.inf], "then on that of four"
    assert device(4, 0, 4) == [16.0, 28.0]
    assert device(6, 0) == [22.0]
    assert costs.device(1, 0, samples=True) == 10.0
    from_eight = DecodeCosts([((8, 8), 16.0), ((8, 16), 20.0)], pads=False)
    assert from_eight.device(3, 0, samples=False) == from_eight.device(8, 0, samples=False) == 16.0


def test_what_was_slow_by_chance_is_no_longer_than_larger_steps() -> None:
    """After the first slow step of a batch size, the start takes those of more drafts to last in proportion."""
    slow = [((1, 1), 1.0), ((1, 2), 2.0), ((1, 4), 4.0), ((1, 16), 16.0), ((8, 8), 1.5), ((8, 16), 2.0)]
    costs = DecodeCosts(slow, pads=False)
    found = {drafts: costs.device(1, drafts, samples=False) for drafts in (0, 1, 3, 15)}
    assert found == {0: 1.0, 1: 1.5, 3: 1.5, 15: 2.0}
    assert costs.device(4, 0, samples=False) == costs.device(8, 0, samples=False) == 1.5


def test_own_sizes_learn_from_those_that_are_about_as_large() -> None:
    costs = DecodeCosts([((1, n), 10.0 + n) for n in (1, 2, 4, 8, 16)] + [((8, 8), 30.0)], pads=False)
    for _ in range(20):  # of three requests and four
        costs.record(3, 0, 26.0)
        costs.record(4, 0, 28.0)
    assert costs.device(4, 0, samples=False) == pytest.approx(28.0, rel=0.01)
    assert costs.device(4, 3, samples=False) == pytest.approx(34.0, rel=0.02), "as much slower as without drafts"
    assert costs.device(2, 0, samples=False) == 12.0
    assert costs.device(5, 0, samples=False) == 15.0
    costs.record(4, 3, 200.0)
    assert costs.device(4, 3, samples=False) == pytest.approx(34.0, rel=0.02), "the first of its kind runs cold"
    costs.record(4, 3, 20.0)
    assert costs.device(4, 2, samples=False) == pytest.approx(16 * (2.0 + 20 / 17) / 2, rel=0.01), "half of the next"
    assert costs.device(4, 1, samples=False) == pytest.approx(30.0, rel=0.02)
    for _ in range(9):
        costs.record(4, 3, 2000.0)
    assert costs.device(4, 3, samples=False) < 20 * 2.0**4, "one slow step does not count for more than twice"


def test_what_is_known_of_few_steps_is_tried_again_sooner() -> None:
    seconds = []
    for num_slow in (2, 12):
        costs = DecodeCosts([((4, 4), 10.0), ((4, 16), 20.0)], pads=False)
        for _ in range(num_slow):
            costs.record(4, 12, 40.0)
        for _ in range(100):
            costs.record(4, 3, 12.5)
        seconds.append(costs.device(4, 12, samples=False))
    assert seconds[0] < 26.0, "it was 30 behind the one slow step that counted"
    assert seconds[1] > 32.0
    costs = DecodeCosts([((4, 4), 10.0), ((4, 16), 20.0)], pads=False)
    costs.record(4, 0, 12.0)
    for _ in range(100):
        costs.record(4, 3, 12.5)
    assert costs.device(4, 0, samples=False) > 10.7, "of 11; what drafts are compared with stays"


def test_what_was_slow_for_a_while_is_tried_again_once_steps_have_rested() -> None:
    """As soon as steps with drafts are measured again, what they take now counts."""
    costs = DecodeCosts([((1, 1), 1.0), ((1, 4), 1.0)], pads=False)
    for _ in range(400):
        costs.record(1, 3, 1.0)
        costs.record(1, 0, 1.0)
    for _ in range(40):
        costs.record(1, 3, 4.0)
    assert costs.device(1, 3, samples=False) > 3.5
    costs.rest(1, 64, samples=False)
    assert 2.4 < costs.device(1, 3, samples=False) < 2.7
    costs.rest(1, 400, samples=False)
    assert costs.device(1, 3, samples=False) == pytest.approx(0.8, rel=0.1), "a little less than a plain step"
    assert costs.device(1, 0, samples=False) == pytest.approx(1.0, rel=0.1)
    before = costs.device(1, 3, samples=False)
    costs.record(1, 3, 1.4)
    assert costs.device(1, 3, samples=False) == pytest.approx(before + (1.4 - before) / 5, rel=0.02), "not by a tenth"
    costs.rest(8, 10, samples=True)  # of which nothing is known


def test_what_is_alike() -> None:
    padded, own = DecodeCosts(BUCKETS), DecodeCosts(BUCKETS, pads=False)
    assert [padded.key(*sizes) for sizes in ((1, 0), (1, 1), (1, 3), (3, 0), (8, 0))] == [
        (1, 1),
        (1, 4),
        (1, 4),
        (8, 8),
        (8, 8),
    ]
    assert own.key(3, 0) == own.key(4, 0) != own.key(5, 0)
    assert own.key(4, 2) == own.key(4, 3) != own.key(4, 4)
    assert own.key(4, 0) != own.key(4, 1)


@pytest.mark.parametrize("pads", [False, True])
def test_the_share_of_a_step_that_is_no_requests_own_follows_from_more_requests(pads: bool) -> None:
    def shared(*seconds: float) -> float:
        costs = DecodeCosts([((size, size), value) for size, value in zip((1, 4), seconds, strict=True)], pads=pads)
        costs.record(4, 0, 9.0)
        return costs.shared(4, samples=False)

    assert shared(1.0, 1.0) == 1.0
    assert shared(1.0, 1.3) == pytest.approx(0.9 / 1.3)
    assert shared(1.0, 4.0) == 0.0
    assert shared(1.0, 9.0) == 0.0, "a request takes longer beside others"
    assert shared(1.2, 1.0) == 1.0, "measured in a slow moment"
    assert shared(0.0, 0.0) == 0.0


def test_what_the_host_takes_is_known_with_drafts_and_without() -> None:
    costs = DecodeCosts(BUCKETS)
    assert costs.host(1, has_drafts=True) == 0.0
    costs.record_host(1, has_drafts=False, seconds=0.2)
    assert costs.host(1, has_drafts=True) == 0.2, "as without, before anything is known"
    costs.record_host(1, has_drafts=True, seconds=0.4)
    assert costs.host(1, has_drafts=False) == 0.2
    assert 0.2 < (first := costs.host(1, has_drafts=True)) < 0.4, "one slow step is not all there is"
    assert costs.host(8, has_drafts=True) == 0.0
    for _ in range(20):
        costs.record_host(1, has_drafts=False, seconds=0.2)
    assert 0.2 < costs.host(1, has_drafts=True) < 0.2 + (first - 0.2) / 2, "steps with drafts are tried again"


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_host_that_took_no_time_at_first_is_not_taken_for_one_that_never_does(has_drafts: bool) -> None:
    costs = DecodeCosts([((1, 1), 1.0)])
    costs.record_host(1, has_drafts=False, seconds=0.0)
    costs.record_host(1, has_drafts, 0.2)
    assert 0.0 < costs.host(1, has_drafts) < 0.1
    for _ in range(60):
        costs.record_host(1, has_drafts, 0.2)
    assert costs.host(1, has_drafts) == pytest.approx(0.2, rel=0.05)
