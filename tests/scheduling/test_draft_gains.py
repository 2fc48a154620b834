"""What right drafts of requests that run beside each other are worth."""

import random

import pytest

from compiled_llm.scheduling.draft_gains import MOST_BEHIND, Gains, weights
from compiled_llm.scheduling.request import Request
from tests.fake_engine import make_request

FOUR = 4, True


def requests_of(count: int) -> list[Request]:
    return [make_request(f"{number}", 3, 20) for number in range(count)]


def test_what_all_have_gained_is_gained_and_no_more() -> None:
    gains, (one, two, three) = Gains(), requests_of(3)
    running = [one, two, three]
    assert gains.take_least(running) == 0
    for request, count in ((one, 3), (two, 2), (one, 3)):
        gains.accept(request, count, FOUR)
    assert gains.take_least(running) == 0, "the third has gained nothing"
    gains.accept(three, 5, FOUR)
    assert gains.take_least(running) == 2, "what the second has"
    assert gains.take_least(running) == 0, "not twice"
    gains.accept(two, 2, FOUR)
    assert gains.take_least(running) == 2


def test_once_the_slowest_has_ended_what_others_have_gained_more_counts() -> None:
    gains, (slow, fast, faster) = Gains(), requests_of(3)
    for request, count in ((slow, 1), (fast, 5), (faster, 9)):
        gains.accept(request, count, FOUR)
    assert gains.take_least([slow, fast, faster]) == 1
    gains.end(slow, some_run=True)
    assert gains.take_least([fast, faster]) == 4
    gains.end(faster, some_run=True)
    assert gains.take_least([fast]) == 0, "it had gained less than the one that ended"


@pytest.mark.parametrize("seed", range(4))
def test_all_that_is_taken_is_what_the_last_request_has_gained(seed: int) -> None:
    """Whichever that is: lengths and chances are random, and nothing is said of them."""
    rng = random.Random(seed)
    gains, running = Gains(), requests_of(6)
    left = {request: rng.randint(1, 60) for request in running}
    chance = {request: rng.random() for request in running}
    taken, num_gained = gains.take_least(running), dict.fromkeys(running, 0)
    while running:
        for request in list(running):
            left[request] -= 1
            if rng.random() < chance[request]:
                gains.accept(request, 2, FOUR)
                num_gained[request] += 2
                left[request] -= 2
            if left[request] <= 0 and len(running) > 1:
                running.remove(request)
                gains.end(request, some_run=True)
                taken += gains.take_least(running)
        taken += gains.take_least(running)
        assert taken == min(num_gained[request] for request in running)
        if left[running[0]] <= 0 and len(running) == 1:
            break
    assert taken == num_gained[running[0]]


def test_what_was_gained_in_steps_of_another_account_is_not_entered_in_this_one() -> None:
    gains, running = Gains(), requests_of(2)
    for request in running:
        gains.accept(request, 5, FOUR)
    for request in running:
        gains.accept(request, 3, (2, True))
    assert gains.kind == (2, True)
    assert gains.take_least(running) == 3


def test_who_was_held_back_has_gained_less_and_nothing_is_taken_back() -> None:
    """All begins anew with it: what was credited of the others stays."""
    gains, (one, two, late) = Gains(), requests_of(3)
    for request in (one, two):
        gains.accept(request, 9, FOUR)
    assert gains.take_least([one, two]) == 9
    assert gains.take_least([one, two, late]) == 0
    for request in (one, two, late):
        gains.accept(request, 2, FOUR)
    assert gains.take_least([one, two, late]) == 2


def test_requests_came_together_unless_one_came_long_after_others_until_none_runs() -> None:
    gains, (one, two) = Gains(), requests_of(2)
    gains.come([])
    gains.come([0])
    gains.come([MOST_BEHIND, 3])
    assert gains.came_together, "as those of several calls at once"
    gains.accept(one, 4, FOUR)
    gains.come([MOST_BEHIND + 1, 3])
    gains.come([])
    assert not gains.came_together
    assert gains.take_least([one]) == 0, "what was gained before is no gain of who came"
    gains.accept(one, 7, FOUR)
    gains.accept(two, 7, FOUR)
    gains.end(one, some_run=True)
    assert not gains.came_together
    gains.end(two, some_run=False)
    assert gains.came_together
    assert gains.take_least([one, two]) == 0


def test_a_token_of_a_request_that_is_behind_is_worth_more() -> None:
    assert weights([0, 0]) == pytest.approx([1.0, 1.0])
    assert weights([100] * 3) == pytest.approx([1.0] * 3)
    behind, ahead, far_ahead = weights([40, 80, 500])
    assert behind > 1.5 > ahead > far_ahead > 0.25, "users of the others wait, too"
    assert behind + ahead + far_ahead == pytest.approx(3.0)
    assert weights([0, 1])[0] < 1.3, "the first tokens do not decide"
