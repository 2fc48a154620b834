"""What drafts may cost: an account of steps, on a pretended clock."""

import math
import random

import pytest

from compiled_llm.scheduling.draft_account import (
    LEAST_SHARE,
    MEASURED,
    MOST,
    MOST_RESTED,
    SETTLED,
    SHARE,
    DoneStep,
    DraftAccount,
    Kind,
)

ONE: Kind = (1, False)
ALIKE = (0, 0)
PLAIN = 0.5  # seconds
FIRST = SETTLED + MEASURED - 1  # plain steps, before anything is looked for: those that settle are worth one measured
BREAKS = (64, 128, 256, 512, 1024)  # steps with drafts, until as many plain ones are measured again


class Run:
    """Steps of a method that is asked for drafts as often as the account says.

    Attributes:
        seconds, plain_seconds: that all steps took, and would have taken without drafts for as many tokens.
        looked: of each step, whether there was a look.
        pace: by how much all steps are slower than those of ``PLAIN``.
    """

    def __init__(self, account: DraftAccount | None = None, kind: Kind = ONE, noise: float = 0.0) -> None:
        self.account, self.kind = account or DraftAccount(one_graph=True), kind
        self.rng, self.noise = random.Random(0), noise
        self.seconds = self.plain_seconds = 0.0
        self.pace = 1.0
        self.looked: list[bool] = []

    def steps(self, count: int, *, look: float = 0.0, drafts: float = 0.0, gained: float = 0.0) -> list[bool]:
        """So many steps, of which those with a look take ``look + drafts`` longer and gain so many tokens."""
        start = len(self.looked)
        while len(self.looked) < start + count:
            looks = self.account.looks(self.kind, goes_on=True)
            if not looks and (rest := self.account.rest(self.kind)):
                self.account.enter_rest(self.kind, rest, self.pace * PLAIN)
                self.looked += [False] * rest
                self.seconds += self.pace * PLAIN * rest
                self.plain_seconds += self.pace * PLAIN * rest
                continue
            took = self.pace * PLAIN * self.rng.lognormvariate(0.0, self.noise)
            step = DoneStep(self.kind, 1, ALIKE, has_drafts=False, seconds=took)
            if looks:
                step = step._replace(
                    has_drafts=True, seconds=took + self.pace * drafts, looked=self.pace * look, gained=gained
                )
            self.account.enter(step)
            self.seconds += step.seconds + step.looked
            self.plain_seconds += self.pace * PLAIN * (1.0 + step.gained)
            self.looked.append(looks)
        return self.looked[start:]

    @property
    def lost(self) -> float:
        """Plain steps."""
        return (self.seconds - self.plain_seconds) / PLAIN


def rested(account: DraftAccount, seconds: float = PLAIN) -> int:
    """How many steps rest now: they do, and take ``seconds`` each."""
    count = account.rest(ONE)
    if count:
        account.enter_rest(ONE, count, seconds)
    return count


def test_drafts_come_back_soon_after_they_were_slow_for_a_while() -> None:
    """A machine that was slow while every step had drafts is fast again when plain steps are measured."""
    run = Run()
    run.steps(600, look=0.01, drafts=0.2, gained=1.5)
    assert sum(run.looked) > 500, "all but plain steps that are measured now and then"
    run.pace = 5.0
    while run.looked[-1]:
        run.steps(1, look=0.01, drafts=0.2, gained=1.5)
    run.pace = 1.0
    start = len(run.looked)
    run.steps(2000, look=0.01, drafts=0.2, gained=1.5)
    assert sum(run.looked[start:]) > 600, "and not as many thousand steps later as the average of slow ones takes"


@pytest.mark.parametrize(("look", "drafts"), [(0.01, 0.0), (0.02, 0.2), (2.0, 0.5)])
def test_what_never_pays_loses_the_share_and_what_there_was_at_the_start(look: float, drafts: float) -> None:
    run = Run()
    run.steps(4000, look=look, drafts=drafts)
    of_one, unknown = (look + drafts) / PLAIN, 3 * drafts / PLAIN  # at first such steps are taken for faster ones
    first = MOST / (of_one - SHARE)  # steps until the account is empty
    halved = (SHARE / 2 - LEAST_SHARE) * of_one / (SHARE / 2)  # until the next try, which costs as much
    most = MOST + SHARE * first + halved + LEAST_SHARE * 4000 + 2 * of_one + unknown
    assert run.lost <= most, "then half of it is lost, and soon a quarter"
    assert run.lost >= 0.9 * LEAST_SHARE * 4000, "what may be lost is used to find out whether it pays by now"


def test_what_pays_is_looked_for_in_every_step_but_one_of_many() -> None:
    run = Run()
    looked = run.steps(1000, look=0.02, drafts=0.1, gained=0.5)
    assert not any(looked[:FIRST]), "nothing is known yet"
    assert sum(looked) == 1000 - FIRST * (1 + 3)
    breaks = [place for place in range(FIRST, 1000) if looked[place - 1] and not looked[place]]
    assert breaks == [FIRST * count + sum(BREAKS[:count]) for count in range(1, 4)]
    assert run.lost < -200


def test_a_method_that_pays_is_not_kept_from_it_by_noise() -> None:
    run = Run(noise=0.3)
    looked = run.steps(2000, look=0.01, drafts=0.05, gained=0.4)
    assert sum(looked) >= 2000 - 2 * FIRST - FIRST * len(BREAKS)


def test_what_stopped_paying_is_soon_left_and_what_began_to_pay_is_found() -> None:
    run = Run()
    run.steps(500, look=0.02, drafts=0.1, gained=1.0)
    before = run.lost
    looked = run.steps(400, look=0.02, drafts=0.1)
    assert run.lost - before <= MOST + SHARE * 400 + 0.3
    assert sum(looked[100:]) < 20
    again = run.steps(300, look=0.02, drafts=0.1, gained=1.0)
    assert again.index(True) < 60
    assert sum(again[80:]) >= 220 - FIRST


def test_a_single_slow_step_does_not_matter_much() -> None:
    run = Run()
    run.steps(50)
    account = run.account
    slow = DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=100 * PLAIN, looked=0.01, gained=0.0)
    account.enter(slow)
    assert account.looks(ONE, goes_on=True), "it counts as the average, which it moved by a tenth"
    for _ in range(20):
        account.enter(slow)
    assert not account.looks(ONE, goes_on=True), "but many do"


def test_a_slow_plain_step_makes_no_step_with_drafts_a_saving_one() -> None:
    run = Run()
    run.steps(50)
    run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=100 * PLAIN))
    looked = run.steps(400, look=0.02, drafts=0.1)
    assert sum(looked[200:]) < 20


def test_where_nothing_is_gained_nothing_is_saved_however_fast_such_steps_are() -> None:
    run = Run()
    run.steps(50)
    for _ in range(400):
        run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN / 2, looked=0.1 * PLAIN))
    assert not run.account.looks(ONE, goes_on=True)


def test_steps_of_another_kind_have_an_account_of_their_own() -> None:
    run = Run()
    run.steps(300, look=0.5)
    other = Run(run.account, (4, True))
    assert other.steps(FIRST + 32, look=0.02, gained=1.0)[FIRST:] == [True] * 32
    assert not run.account.looks(ONE, goes_on=True)


def test_a_network_that_was_not_worth_reading_a_prompt_reads_no_other_for_long() -> None:
    run = Run()
    run.steps(FIRST)
    account = run.account
    assert account.looks(ONE, goes_on=False)
    network = DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, network=0.1, gained=0.3)
    account.enter(network)
    account.enter(network._replace(network=0.1 + 20 * PLAIN, reads=True))
    assert not account.looks(ONE, goes_on=False)
    assert account.looks(ONE, goes_on=True), "it has read this one, and saves more than it takes"
    num_rested = 0
    while not account.looks(ONE, goes_on=False):
        if not (count := rested(account)):
            account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN))
        num_rested += count or 1
    assert num_rested == pytest.approx((20 - MOST) / SHARE, rel=0.05)


def test_what_a_network_takes_is_known_once_it_has_drafted_for_tokens_that_it_had_read() -> None:
    run = Run()
    run.steps(FIRST)
    assert run.account.network(ONE) == run.account.network((4, False)) == 0.0
    step = DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, network=3.0, reads=True)
    run.account.enter(step)
    assert run.account.network(ONE) == 0.0, "it read a prompt"
    run.account.enter(step._replace(network=0.2, reads=False))
    assert run.account.network(ONE) == 0.2


def test_what_turns_out_to_have_been_gained_opens_an_account_again() -> None:
    run = Run()
    run.steps(FIRST)
    assert run.account.looks(ONE, goes_on=True)
    run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN, looked=9 * PLAIN))
    assert not run.account.looks(ONE, goes_on=True)
    run.account.gain((4, False), 3.0)
    assert not run.account.looks(ONE, goes_on=True), "another account, which there is not yet"
    run.account.gain(ONE, 3.0)
    run.account.rest(ONE)
    run.account.enter_rest(ONE, 16, PLAIN)
    assert run.account.looks(ONE, goes_on=True)


def test_a_network_that_was_worth_it_reads_the_next_prompt() -> None:
    run = Run()
    run.steps(FIRST)
    account = run.account
    network = DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, network=0.1, gained=0.8)
    account.enter(network)
    for _ in range(3):
        account.enter_reading(ONE, 20 * PLAIN)
        assert not account.looks(ONE, goes_on=False)
        for _ in range(50):
            if account.looks(ONE, goes_on=True):
                account.enter(network)
            else:
                assert rested(account), "some plain steps are measured"
        assert account.looks(ONE, goes_on=False)


def test_a_wrong_network_is_left_though_it_has_read_the_prompt() -> None:
    run = Run()
    run.steps(FIRST)
    num_steps = 0
    while run.account.looks(ONE, goes_on=True):
        run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, network=PLAIN))
        num_steps += 1
    assert num_steps == pytest.approx(MOST, abs=1)


def test_steps_that_rest_are_as_many_as_the_account_lacks() -> None:
    run = Run()
    account = run.account
    assert account.rest(ONE) == 0, "nothing is known"
    run.steps(FIRST)
    assert account.rest(ONE) == 0, "it may look"
    plain = DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN)
    account.enter(plain._replace(has_drafts=True, looked=(MOST + (SETTLED + MOST_RESTED + 30 + 3.5) * SHARE) * PLAIN))
    assert [rested(account) for _ in range(3)] == [SETTLED, MOST_RESTED, 32]
    assert rested(account) == 0, "less than a share is lacking"
    account.enter(plain)
    assert account.looks(ONE, goes_on=True)


def test_steps_are_measured_together_once_they_have_settled() -> None:
    """Not the first ones behind drafts, or behind prompts."""
    run = Run()
    run.steps(FIRST)
    account = run.account
    steps = account._steps[ONE]
    for looked, unsettle in ((20 * PLAIN, lambda: None), (0.0, account.unsettle)):
        if looked:
            account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, looked=looked))
        unsettle()
        before = steps.plain
        assert rested(account, 2 * PLAIN) == SETTLED
        assert steps.plain == before
        assert rested(account, 1.1 * before) == MOST_RESTED
        assert steps.plain == pytest.approx((8 + 64 * 1.1) / 72 * before)


def test_a_pause_of_the_machine_makes_plain_steps_no_slower_by_much() -> None:
    """The less, the fewer they are; and others are soon measured again. Faster ones are believed nearly at once."""
    run = Run()
    run.steps(FIRST)
    steps = run.account._steps[ONE]
    for count, most in ((8, 1.25), (16, 1.5), (64, 2.0)):
        steps.plain, steps.interval = PLAIN, 1024
        steps.enter_together(count, 100 * PLAIN)
        assert steps.plain == pytest.approx((8 + count * most) / (8 + count) * PLAIN)
        assert steps.interval == BREAKS[0]
    steps.plain, steps.interval = PLAIN, 1024
    steps.enter_together(8, 0.8 * PLAIN)
    assert steps.plain == pytest.approx(0.84 * PLAIN)
    assert steps.interval == 1024


def test_few_steps_are_not_measured_together() -> None:
    run = Run()
    run.steps(FIRST)
    account = run.account
    account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=PLAIN, looked=20 * PLAIN))
    rested(account)
    for count, is_measured in ((3, False), (4, True)):
        left = account.rest(ONE) - count
        account.end_rest(ONE, left)
        account.enter_rest(ONE, count, 1.2 * PLAIN)
        assert (account._steps[ONE].plain > PLAIN) is is_measured


def test_requests_that_come_and_go_keep_nothing_from_being_looked_for() -> None:
    """Though no steps settle, so that none are measured: then the least of what they took is all that is known."""
    account, num_steps = DraftAccount(one_graph=True), 0
    account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=2 * PLAIN))
    while not account.looks(ONE, goes_on=True):
        account.unsettle()
        left = account.rest(ONE) - 2
        account.end_rest(ONE, left)
        account.enter_rest(ONE, 2, (1 + num_steps % 3 / 10) * PLAIN)
        num_steps += 2
    assert num_steps == 32
    assert account._steps[ONE].plain == PLAIN


def test_what_does_not_rest_after_all_enters_nothing() -> None:
    run = Run()
    run.steps(FIRST)
    account = run.account
    plain = DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN)
    account.enter(plain._replace(looked=2 * MOST * PLAIN))
    before = account._steps[ONE].balance
    assert account.rest(ONE) == MOST_RESTED
    account.end_rest(ONE, 10)
    assert account._steps[ONE].balance == pytest.approx(before + SHARE * (MOST_RESTED - 10))


def test_a_rest_that_ends_early_is_no_try_that_paid_nothing() -> None:
    """Though rounding has left the account a little above 0: here by the shares of 33 steps."""
    run = Run()
    run.steps(FIRST)
    steps = run.account._steps[ONE]
    steps.add(-2 * MOST)
    steps.balance = steps.with_reading = -math.nextafter(33 * SHARE, 0.0)
    assert run.account.rest(ONE) == 33
    assert 0.0 < steps.left < 1e-15
    run.account.end_rest(ONE, 10)
    assert steps.share == SHARE, "it was emptied once"
    assert steps.balance < 0.0


@pytest.mark.parametrize(
    ("pays", "slower", "num_without"), [(1.1, 1.5, 49), (1.5, 1.5, 0), (1.2, 2.0, 63), (1.3, 3.0, 101)]
)
def test_a_machine_that_becomes_slower_keeps_away_no_drafts_that_pay(
    pays: float, slower: float, num_without: int
) -> None:
    """Beside what plain steps took before, steps with drafts look like losses. Then plain ones are measured again."""
    run, gained = Run(), pays * 1.24 - 1.0
    run.steps(500, look=0.04 * PLAIN, drafts=0.2 * PLAIN, gained=gained)
    run.pace = slower
    looked = run.steps(600, look=0.04 * PLAIN, drafts=0.2 * PLAIN, gained=gained)
    assert looked[:200].count(False) == pytest.approx(num_without, abs=5)
    assert sum(looked[200:]) >= 370, "all but some that are measured"


@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0])
def test_what_never_pays_loses_little_more_where_the_machine_changes(pace: float) -> None:
    run = Run()
    run.steps(1000, look=0.02 * PLAIN, drafts=0.3 * PLAIN)
    before, run.pace = run.seconds - run.plain_seconds, pace
    run.steps(2000, look=0.02 * PLAIN, drafts=0.3 * PLAIN)
    assert (run.seconds - run.plain_seconds - before) / (pace * PLAIN) <= MOST + SHARE * 2000


def test_first_steps_that_are_slow_make_nothing_look_cheap() -> None:
    account = DraftAccount(one_graph=False)
    account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=100 * PLAIN))
    run = Run(account)
    looked = run.steps(300, look=0.5 * PLAIN, drafts=0.5 * PLAIN)
    assert 0 < sum(looked) < 20


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_step_of_no_time_is_not_entered(seconds: float) -> None:
    account = DraftAccount(one_graph=True)
    account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=seconds))
    run = Run(account)
    run.steps(50, look=2 * PLAIN)
    account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=seconds, looked=1.0, gained=5.0))
    assert not account.looks(ONE, goes_on=True)


@pytest.mark.parametrize(("num_tries", "least", "most"), [(1, 4_000, 4_500), (2, 8_000, 9_000), (3, 16_500, 17_600)])
def test_what_was_lost_is_bounded(num_tries: int, least: int, most: int) -> None:
    """However much it was: 32 plain steps, by shares that are half as large after each try that has paid nothing."""
    run = Run()
    run.steps(FIRST)
    while num_tries > 1:
        run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN, looked=(MOST + 1) * PLAIN))
        num_tries -= 1
        while not run.account.looks(ONE, goes_on=False):
            if not rested(run.account):
                run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN))
    for _ in range(1000):
        run.account.enter_reading(ONE, 20 * PLAIN)
    num_rested = 0
    while not run.account.looks(ONE, goes_on=False):
        if not (count := rested(run.account)):
            run.account.enter(DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN))
        num_rested += count or 1
    assert least < num_rested < most


@pytest.mark.parametrize(("reading", "num_tokens", "gained"), [(40, 100, 0.8), (60, 200, 0.6), (100, 250, 0.6)])
def test_reading_that_does_not_pay_is_not_forgiven(reading: int, num_tokens: int, gained: float) -> None:
    """Of long prompts, in plain steps. What drafts save behind it pays for all of it, or others are not read."""
    account, plain = DraftAccount(one_graph=True), DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN)
    seconds = num_read = 0.0
    for _ in range(200):  # requests
        left, was_read = float(num_tokens), False
        while left > 0.0:
            if account.looks(ONE, goes_on=was_read):
                step = plain._replace(has_drafts=True, network=0.17 * PLAIN, gained=gained, reads=not was_read)
                step = step._replace(network=step.network + reading * PLAIN * (not was_read))
                num_read, was_read = num_read + (not was_read), True
            elif rest := account.rest(ONE):
                count = min(rest, math.ceil(left))
                account.end_rest(ONE, rest - count)
                account.enter_rest(ONE, count, PLAIN)
                left, seconds = left - count, seconds + count * PLAIN
                continue
            else:
                step = plain
            account.enter(step)
            left, seconds = left - 1.0 - step.gained, seconds + step.seconds + step.network
    assert num_read < 20
    assert seconds <= 1.03 * 200 * num_tokens * PLAIN, "the first tries, and a share"


def test_one_step_by_itself_says_nothing_of_plain_ones() -> None:
    """The first behind drafts take longer, and each seems longer than it is, as it is measured."""
    run = Run()
    run.steps(FIRST)
    plain = DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=1.5 * PLAIN)
    for step in (plain._replace(has_drafts=True, gained=1.2), *[plain] * 20, plain._replace(looked=1e-6)):
        run.account.enter(step)
    assert run.account._steps[ONE].plain == PLAIN


def test_the_first_step_behind_a_prompt_says_nothing_of_drafts() -> None:
    """It takes twice as long, and so does a plain one."""
    run = Run()
    run.steps(FIRST)
    step = DoneStep(ONE, 1, ALIKE, has_drafts=True, seconds=1.2 * PLAIN, gained=0.5)
    run.account.enter(step)
    before = dict(run.account._steps[ONE].others)
    assert before
    run.account.enter(step._replace(seconds=3 * PLAIN, is_first=True))
    assert run.account._steps[ONE].others == before
    run.account.enter(step._replace(seconds=3 * PLAIN))
    assert run.account._steps[ONE].others != before


def test_where_all_steps_follow_prompts_drafts_are_not_taken_to_cost_nothing() -> None:
    account = DraftAccount(one_graph=True)
    step, num_drafted = DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN, is_first=True), 0
    for _ in range(1000):
        account.unsettle()
        if account.looks(ONE, goes_on=True):
            account.enter(step._replace(has_drafts=True, seconds=3 * PLAIN, gained=0.3))
            num_drafted += 1
        elif count := account.rest(ONE):
            account.end_rest(ONE, count - 1)
            account.enter_rest(ONE, 1, PLAIN)
        else:
            account.enter(step)
    assert 0 < num_drafted < 80


def test_what_paid_for_no_number_of_requests_is_tried_less_for_the_next() -> None:
    run = Run()
    run.steps(1000, look=0.5 * PLAIN)
    for size, samples, most in ((2, False, 2.0), (4, False, 2.0), (2, True, 8.0)):
        other = Run(run.account, (size, samples))
        other.steps(FIRST)
        assert other.account._steps[size, samples].left == pytest.approx(min(MOST, most + FIRST * SHARE))
        other.steps(200, look=0.5 * PLAIN)
    paying = Run()
    paying.steps(300, look=0.1 * PLAIN, gained=1.0)
    other = Run(paying.account, (2, False))
    other.steps(1)
    assert other.account._steps[2, False].balance == MOST


def test_what_plain_steps_took_at_the_start_is_soon_measured_again() -> None:
    """An engine's first steps are slow: drafts that cost 1.3 plain ones and save 1.1 must not seem to pay for long."""
    run = Run()
    run.pace = 1.3
    run.steps(FIRST)
    run.pace = 1.0
    looked = run.steps(600, look=0.1 * PLAIN, drafts=1.2 * PLAIN, gained=1.1)
    assert any(looked[:40])
    assert sum(looked[200:]) < 45


@pytest.mark.parametrize("one_graph", [True, False])
def test_a_look_that_found_nothing_is_no_step_with_drafts_but_on_a_gpu_keeps_the_next_from_starting(
    one_graph: bool,
) -> None:
    run = Run(DraftAccount(one_graph=one_graph))
    run.steps(FIRST)
    account, plain = run.account, DoneStep(ONE, 1, ALIKE, has_drafts=False, seconds=PLAIN)
    account.enter(plain._replace(has_drafts=True))
    for _ in range(SETTLED):
        account.enter(plain._replace(looked=20 * PLAIN))
    assert account.rest(ONE) == (MOST_RESTED if one_graph else SETTLED)
