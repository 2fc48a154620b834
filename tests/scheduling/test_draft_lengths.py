"""How many drafts a step takes: what gives the most tokens a second, by measured acceptance and seconds."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from compiled_llm.scheduling import draft_planner
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.draft_lengths import Acceptance, Chances, History, lengths, lengths_beside_prompts
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import WorkerDrafts
from tests.fake_engine import FakeDrafter, FakeEngine, add, check_result, expected_tokens, make_request, make_scheduler

FREE = [1.0] * 100
BUCKETS = (4, 8, 16)  # tokens, of four requests


def in_buckets(seconds: Sequence[float], num_requests: int) -> Callable[[int], float]:
    """Of steps that take as long as the smallest of ``BUCKETS`` that holds them; the first has no room for drafts."""

    def of(num_drafts: int) -> float:
        fits = [index for index, tokens in enumerate(BUCKETS) if tokens >= num_requests + num_drafts]
        fits = [index for index in fits if index or not num_drafts]
        return seconds[fits[0]] if fits else math.inf

    return of


def by_row(num_requests: int) -> Callable[[int], float]:
    """Of steps that take as long as they have tokens."""
    return lambda num_drafts: float(num_requests + num_drafts)


def test_where_rows_cost_nothing_all_drafts_of_worth_are_taken() -> None:
    free = FREE.__getitem__
    assert lengths([0.9, 0.9], [3, 2], 2, free, 99) == [3, 2]
    assert lengths([0.9, 0.3], [3, 3], 2, free, 99) == [3, 2], "the third power of 0.3 is next to nothing"
    assert lengths([0.9, 0.9], [3, 2], 2, free, 4) == [2, 2]
    assert lengths([0.2], [1], 1, free, 99) == [1]
    assert lengths([0.04] * 4, [1] * 4, 4, free, 99) == [0] * 4


def test_where_each_row_costs_as_much_as_a_request_there_are_no_drafts() -> None:
    assert lengths([0.99] * 4, [7] * 4, 4, by_row(4), 99) == [0] * 4
    assert lengths([0.9, 0.5], [7, 7], 2, in_buckets(BUCKETS, 2), 99) == [6, 0], "half of the first is empty"


def test_as_many_drafts_as_give_the_most_tokens_a_second() -> None:
    for row in (0.05, 0.15):
        tokens = list(itertools.accumulate(0.8**n for n in range(11)))
        best = max(range(11), key=lambda n: tokens[n] / (1.0 + row * n))
        assert 3 < best < 10
        assert lengths([0.8], [12], 1, lambda n, row=row: 1.0 + row * n, 99) == [best]
    assert lengths([0.8], [12], 1, lambda n: 1.0 + 0.75 * n, 99) == [0], "a gain of less than a tenth is none"


def test_the_bucket_with_the_most_tokens_a_second_is_filled_and_a_small_gain_is_none() -> None:
    assert lengths([0.9] * 4, [7] * 4, 4, in_buckets((1.0, 1.3, 4.0), 4), 99) == [1, 1, 1, 1]
    assert lengths([0.3] * 4, [7] * 4, 4, in_buckets((1.0, 1.3, 4.0), 4), 99) == [0] * 4
    assert lengths([0.5] * 4, [7] * 4, 4, in_buckets((1.0, 1.49, 4.0), 4), 99) == [0] * 4


def test_no_other_choice_gives_more_tokens_a_second() -> None:
    rng = random.Random(0)
    for _ in range(60):
        num_requests = rng.randint(1, 4)
        seconds = in_buckets([rng.uniform(0.5, 1.0) * index for index in (1, 2, 3)], num_requests)
        chances = [rng.uniform(0.2, 0.95) for _ in range(num_requests)]
        available = [rng.randint(0, 3) for _ in range(num_requests)]

        def rate(counts: Sequence[int], chances: list[float] = chances, seconds: Callable = seconds) -> float:
            tokens = sum(1 + sum(c**place for place in range(1, n + 1)) for c, n in zip(chances, counts, strict=True))
            return tokens / seconds(sum(counts))

        chosen = lengths(chances, available, num_requests, seconds, 99)
        assert all(count <= most for count, most in zip(chosen, available, strict=True))
        best = max(rate(counts) for counts in itertools.product(*(range(n + 1) for n in available)))
        assert rate(chosen) >= best / 1.2, "gains below 10%, and drafts of next to no worth, are left out"
        assert rate(chosen) >= rate([0] * num_requests) * 0.999


def test_drafts_of_a_request_whose_tokens_are_worth_more_come_first() -> None:
    free = FREE.__getitem__
    assert lengths([0.6, 0.6], [3, 3], 2, free, 3, weights=[1.5, 0.5]) == [3, 0]
    assert lengths([0.9, 0.6], [3, 3], 2, free, 3, weights=[0.5, 1.5]) == [1, 2]
    assert lengths([0.9, 0.6], [3, 3], 2, free, 3) == [3, 0]
    dear = by_row(2)
    assert sum(lengths([0.3, 0.9], [3, 3], 2, dear, 99, weights=[1.9, 0.1])) == 0, "little is gained of what counts"
    nodes = [(0.5, 0.4, 0.1), (0.6, 0.5, 0.4)]
    assert lengths([0.0, 0.0], [3, 3], 2, free, 3, nodes=nodes, weights=[1.5, 0.5]) == [2, 1]


def test_beside_prompts_a_draft_has_to_be_likely() -> None:
    assert lengths_beside_prompts([0.9, 0.4, 0.75], [9, 9, 9], 99) == [6, 0, 2]
    assert lengths_beside_prompts([0.9, 0.9], [9, 2], 7) == [6, 1]


def test_acceptance_follows_the_last_drafts() -> None:
    of_all, own = Acceptance(), Acceptance(0.0, 0.0)
    assert own.chance(of_all) == pytest.approx(0.6)
    for _ in range(30):
        own.observe(3, ends_wrong=False)
    assert own.chance(of_all) > 0.95
    for _ in range(30):
        own.observe(0, ends_wrong=True)
    assert own.chance(of_all) < 0.2


def test_long_proposals_have_a_chance_of_their_own_and_a_new_request_that_of_all() -> None:
    of_all = Chances()
    own = Chances(of_all)
    assert own.chance(0) == 0.0
    assert [own.chance(length) for length in (1, 2, 7, 15, 64)] == pytest.approx([0.6] * 5)
    for _ in range(30):
        own[12].observe(12, ends_wrong=False)
        own[1].observe(0, ends_wrong=True)
    assert own.chance(8) > 0.95 > 0.6 > 0.2 > own.chance(1)
    assert own.chance(2) == own.chance(7) == pytest.approx(0.6)
    of_all[2].observe(100, ends_wrong=False)
    assert Chances(of_all).chance(3) == own.chance(3) > 0.95


def test_a_proposal_is_compared_with_what_comes_whether_it_was_verified_or_not() -> None:
    of_all = Chances()
    history, known = History(waits=False, chances=Chances(of_all)), of_all[3]
    right, tried = known.num_right, known.num_tried
    history.proposal, history.num_output_tokens = [5, 6, 7], 2
    history.compare([1, 2], of_all)
    assert (known.num_right, known.num_tried) == (right, tried), "nothing came yet"
    history.compare([1, 2, 5, 6, 9], of_all)
    assert (known.num_right, known.num_tried) == pytest.approx((0.99 * right + 2, 0.99 * tried + 3))
    assert (history.chances[2].num_right, history.chances[2].num_tried) == (2, 3)
    history.compare([1, 2, 5, 6, 9], of_all)
    assert history.chances[2].num_tried == 3, "once"
    history.proposal, history.num_output_tokens = [5, 6, 7], 5
    history.compare([1, 2, 5, 6, 9, 5], of_all)
    assert history.chances[2].num_tried == pytest.approx(0.85 * 3 + 1), "of the others nothing is known"


# -- In the scheduler


class Source:
    """A method that adapts, of what ``FakeDrafter`` guesses; it notes how often it is asked."""

    num_tokens, adapts = 3, True

    def __init__(self, num_right: int) -> None:
        self.drafter, self.num_asked, self.ended = FakeDrafter(3, lambda: num_right), 0, list[Request]()

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        self.num_asked += len(requests)
        known = [request.prompt_token_ids + request.output_token_ids for request in requests]
        return [self.drafter.propose(r.request_id, k)[:n] for r, k, n in zip(requests, known, most, strict=True)]

    def end(self, request: Request) -> None:
        self.ended.append(request)


class Clock:
    """Pretended: it goes on by what steps and looks take."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(draft_planner.time, "perf_counter", clock)
    return clock


def served(
    clock: Clock, num_right: int, per_row: float, overlap: bool = False, one_graph: bool = True, look: float = 0.0
) -> tuple[FakeEngine, Source]:
    """Four requests of 40 tokens, where a step of n rows takes 1 + n x ``per_row``, as measured."""
    source = Source(num_right)
    seconds = [((size, size * n), 1 + size * n * per_row) for size in (1, 4) for n in (1, 2, 4)]
    scheduler = make_scheduler(
        120, source=source, one_graph=one_graph, arguments={"decode_seconds": seconds}, max_num_batched_tokens=64
    )
    engine, buckets = FakeEngine(scheduler, overlap=overlap), buckets_of(scheduler.limits)
    execute, guess = engine.runner.execute, source.propose

    def timed(output: SchedulerOutput) -> StepResult:
        bucket = Bucket("tokens", 64, 4) if output.num_tokens > 16 else choose_bucket(buckets, output)
        taken = 1 + (output.num_tokens if one_graph else bucket.num_tokens) * per_row
        clock.now += taken
        return dataclasses.replace(execute(output), bucket=bucket, seconds=taken)

    def propose(requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        clock.now += look
        return guess(requests, most)

    engine.runner.execute = timed  # type: ignore[method-assign]
    source.propose = propose  # type: ignore[method-assign]
    requests = add(scheduler, *[make_request(f"{n}", 5, 40) for n in range(4)])
    engine.run()
    for request in requests:
        check_result(request)
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 40)
    assert set(source.ended) == set(requests)
    return engine, source


@pytest.mark.parametrize("overlap", [False, True])
def test_right_drafts_are_verified_where_rows_are_cheap_and_not_where_they_are_dear(
    clock: Clock, overlap: bool
) -> None:
    cheap, _ = served(clock, 3, 0.01, overlap)
    dear, _ = served(clock, 3, 10.0, overlap)
    assert len(cheap.outputs) < 25
    assert cheap.scheduler.counts.num_draft_tokens > 60
    assert dear.scheduler.counts.num_draft_tokens < 12


def test_wrong_drafts_are_soon_not_verified_any_more(clock: Clock) -> None:
    engine, source = served(clock, 0, 0.2)
    assert engine.scheduler.counts.num_draft_tokens < 30
    assert source.num_asked > 100, "looking costs nothing here"


def test_looks_that_cost_much_and_find_nothing_soon_end(clock: Clock) -> None:
    _, source = served(clock, 0, 0.2, look=2.0)
    assert source.num_asked < 40


def test_on_a_gpu_a_request_without_use_for_drafts_does_not_wait_for_its_tokens(clock: Clock) -> None:
    engine, source = served(clock, 0, 0.2, overlap=True, one_graph=False, look=2.0)
    assert 0 < source.num_asked < 40
    overlapping = sum(any(row >= 0 for row in output.feedback) for output in engine.outputs)
    assert overlapping > 20


def test_a_step_lasts_until_the_next_one_begins_without_looks_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(draft_planner.time, "perf_counter", lambda: now)
    source = Source(3)

    def propose(requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        nonlocal now
        now += 0.25  # a look
        return guess(requests, most)

    guess, source.propose = source.propose, propose  # type: ignore[method-assign]
    scheduler = make_scheduler(
        60,
        source=source,
        arguments={"decode_seconds": [((1, n), 1.0) for n in (1, 2, 4)]},
        max_num_seqs=1,
        max_model_len=200,
    )
    (request,) = add(scheduler, make_request("x", 5, 130))
    tokens, buckets = expected_tokens(request.prompt_token_ids, 160), buckets_of(scheduler.limits)
    num_drafted = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        num_drafted += output.num_rows == 4
        now += 3.0 + output.num_rows  # the device, and the host, which takes longer with drafts
        first = len(request.output_token_ids)
        result = StepResult(choose_bucket(buckets, output), tuple(tokens[first : first + output.num_rows]), seconds=3.0)
        scheduler.update(output, result)
    assert scheduler.drafts is not None
    assert num_drafted > 5
    assert scheduler.drafts.costs.host(1, has_drafts=True) == pytest.approx(4.0, rel=0.1)
    assert scheduler.counts.draft_seconds == pytest.approx(0.25 * source.num_asked)


@pytest.mark.parametrize(("length", "reads"), [(4, False), (40, True)])
def test_a_network_does_not_read_a_long_prompt_for_a_few_tokens(
    monkeypatch: pytest.MonkeyPatch, length: int, reads: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(draft_planner.time, "perf_counter", lambda: now)
    source, arguments = (
        WorkerDrafts(3, adapts=True, reads_tokens=True),
        {"decode_seconds": [((1, 1), 1.0), ((1, 4), 1.1)]},
    )
    scheduler = make_scheduler(400, source=source, arguments=arguments, max_num_seqs=1, max_model_len=400)
    buckets, num_read = buckets_of(scheduler.limits), 0
    for number in range(120 // length):
        add(scheduler, make_request(f"{number}", 300, length))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            bucket, drafts = choose_bucket(buckets, output), None
            if output.drafts_next:
                num_read, drafts = num_read + 1, ((),)
            now += 1.05
            samples = (7,) * output.num_rows
            result = StepResult(bucket, samples, seconds=1.0, draft_token_ids=drafts, draft_seconds=0.1 * bool(drafts))
            scheduler.update(output, result)
    assert (num_read > 0) is reads


@pytest.mark.parametrize(("length", "num_wrong", "num_right"), [(40, 12, 30), (100, 3, 8)])
def test_a_network_that_was_of_no_use_is_drafted_with_again_once_it_is_right(
    monkeypatch: pytest.MonkeyPatch, length: int, num_wrong: int, num_right: int
) -> None:
    """Requests one after another: what a network guesses is wrong for the first of them, and right for the others."""
    now = 0.0
    monkeypatch.setattr(draft_planner.time, "perf_counter", lambda: now)
    seconds = tuple(((size, size * n), 1.0 + 0.02 * (n - 1)) for size in (1, 2, 4) for n in (1, 2, 4))
    source, arguments = WorkerDrafts(3, adapts=True, reads_tokens=True), {"decode_seconds": seconds}
    scheduler = make_scheduler(400, source=source, arguments=arguments, max_num_seqs=1, max_model_len=128)
    buckets, num_steps = buckets_of(scheduler.limits), list[int]()
    for number in range(num_wrong + num_right):
        (request,) = add(scheduler, make_request(f"{number}", 5, length))
        tokens = expected_tokens(request.prompt_token_ids, length + 8)
        num_steps.append(0)
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            bucket, first = choose_bucket(buckets, output), len(request.output_token_ids)
            sampled = tuple(tokens[first : first + output.num_samples[0]])
            drafts, took, known = None, 0.0, first + 1
            if output.drafts_next:
                took = 1.2
                for draft, token in zip(output.token_ids[-len(sampled) :][1:], sampled, strict=False):
                    if draft != token:
                        break
                    known += 1
                guesses = tokens[known : known + 3]
                drafts = (tuple(guesses if number >= num_wrong else [guess + 1 for guess in guesses]),)
            spent = 1.0 + 0.02 * (bucket.num_tokens - 1) + took
            now += spent + 0.05
            num_steps[-1] += 1
            result = StepResult(bucket, sampled, seconds=spent, draft_token_ids=drafts, draft_seconds=took)
            scheduler.update(output, result)
    assert num_steps[num_wrong - 1] == length
    assert num_steps[-1] < 0.4 * length
