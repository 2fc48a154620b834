"""DraftPlanner: what it measures of steps, and what it enters into the account, on a pretended clock."""

import dataclasses
import random
from collections.abc import Sequence

import pytest

from compiled_llm import SamplingParams
from compiled_llm.scheduling import draft_planner
from compiled_llm.scheduling.bucket import Bucket, buckets_of, choose_bucket
from compiled_llm.scheduling.draft_account import LEAST_SHARE, MOST, MOST_RESTED, SHARE
from compiled_llm.scheduling.draft_planner import DraftPlanner
from compiled_llm.scheduling.drafter import DraftSource
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.worker import StepResult
from compiled_llm.scheduling.worker_drafts import WorkerDrafts
from tests.fake_engine import FakeDrafter, FakeEngine, add, check_result, expected_tokens, make_request, make_scheduler


class Looks:
    """A source that finds nothing. A look takes ``seconds``."""

    num_tokens, adapts = 3, True

    def __init__(self, server: "type[Server]", seconds: float) -> None:
        self._server, self._seconds, self.num_looks = server, seconds, 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[tuple[int, ...]]:
        self.num_looks += 1
        self._server.now += self._seconds
        return [()] * len(requests)

    def end(self, request: Request) -> None:
        pass


class Guesses:
    """A source of what ``FakeDrafter`` guesses."""

    num_tokens, adapts = 3, True

    def __init__(self, drafter: FakeDrafter) -> None:
        self._drafter = drafter

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        known = [request.prompt_token_ids + request.output_token_ids for request in requests]
        Server.now += 0.2
        return [self._drafter.propose(r.request_id, k)[:n] for r, k, n in zip(requests, known, most, strict=True)]

    def end(self, request: Request) -> None:
        pass


class PaysFor:
    """A source whose drafts are all right, and which takes too long unless ``num_requests`` run."""

    num_tokens, adapts = 3, True

    def __init__(self, num_requests: int) -> None:
        self._guesses, self._num_requests = Guesses(FakeDrafter(3, lambda: 3)), num_requests
        self.running: list[Request] = []
        self.num_looks = 0

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        self.num_looks += 1
        if len(self.running) != self._num_requests:
            Server.now += 20.0
        return self._guesses.propose(requests, most)

    def end(self, request: Request) -> None:
        pass


class Server:
    """Serves requests. A decode step takes a second.

    Args:
        drafting, reading: seconds of a network behind a decode step, and behind one that computes prompts. All that it
            guesses is right, but for what ``num_right`` says.

    Attributes:
        num_right: of the first requests, how many of three guesses are right.
        drafts_next: of each step that computed a prompt, whether a network was to draft behind it.
        plans_between: whether another step is planned while one runs, in which nothing can run.
    """

    now = 0.0

    def __init__(
        self,
        source: DraftSource,
        drafting: float = 0.0,
        reading: float = 0.0,
        max_num_seqs: int = 1,
        one_graph: bool = True,
        max_model_len: int = 64,
    ) -> None:
        sizes = sorted({1, max_num_seqs})
        seconds = tuple(((size, size * n), 1.0) for size in sizes for n in (1, 2, 4))
        self.scheduler = make_scheduler(
            400,
            source=source,
            one_graph=one_graph,
            arguments={"decode_seconds": seconds},
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        assert self.scheduler.drafts is not None
        self.drafts: DraftPlanner = self.scheduler.drafts
        self.buckets, self.drafting, self.reading = buckets_of(self.scheduler.limits), drafting, reading
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.drafts_next: list[bool] = []
        self.plans_between = False
        self.num_right: Sequence[int] = ()

    def add(self, count: int = 1, length: int = 20, params: SamplingParams | None = None) -> list[Request]:
        requests = [make_request(f"{len(self.requests) + n}", 3, length) for n in range(count)]
        for request in requests:
            if params is not None:
                request.sampling_params = params
            self.requests[request.request_id.name] = request
        return add(self.scheduler, *requests)

    def step(self) -> None:
        output = self.scheduler.schedule()
        computes_prompts = 0 in output.num_computed_tokens
        bucket = Bucket("tokens", 16, 4) if computes_prompts else choose_bucket(self.buckets, output)
        sampled, drafts = list[int](), list[tuple[int, ...]]()
        for name, count in zip(output.request_ids, output.num_samples, strict=True):
            request = self.requests[name.name]
            first = len(request.output_token_ids)
            tokens = expected_tokens(request.prompt_token_ids, first + count + 3)
            sampled += tokens[first : first + count]
            right = self.num_right[int(name.name)] if int(name.name) < len(self.num_right) else 3
            after = tokens[first + min(count, 1 + right) :][:3]
            drafts.append(tuple(token if n < right else token + 1 for n, token in enumerate(after)))
        took = (self.reading if computes_prompts else self.drafting) * output.drafts_next
        if computes_prompts:
            self.drafts_next.append(output.drafts_next)
        if self.plans_between:
            assert not self.scheduler.schedule().request_ids
        Server.now += 1.0 + took
        self.num_steps += 1
        self.scheduler.update(
            output,
            StepResult(
                bucket,
                tuple(sampled),
                seconds=1.0 + took,
                draft_token_ids=tuple(drafts) if output.drafts_next else None,
                draft_seconds=took,
            ),
        )

    def serve(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "now", 0.0)
    monkeypatch.setattr(draft_planner.time, "perf_counter", lambda: Server.now)


def test_requests_one_after_another_do_not_get_shares_of_steps_that_did_not_rest() -> None:
    source = Looks(Server, 0.5)
    server = Server(source)
    for _ in range(300):
        server.add(length=8)
        server.serve()
    until_the_second_try = 100 * (SHARE - LEAST_SHARE)
    assert 0.5 * source.num_looks <= MOST + 1.05 * LEAST_SHARE * server.num_steps + until_the_second_try + 0.5
    assert 0.5 * source.num_looks >= MOST + 0.6 * LEAST_SHARE * server.num_steps, "and looks go on"


@pytest.mark.parametrize("ends", [False, True])
def test_a_rest_ends_when_other_requests_run(ends: bool) -> None:
    """One of two ends and drafts pay for one; or one comes that takes no drafts, and they pay for two."""
    source = PaysFor(1 if ends else 2)
    server = Server(source, max_num_seqs=2, max_model_len=400)
    source.running = server.scheduler.running
    for count in (1, 2):  # both accounts are known
        server.add(count)
        server.serve()
    first, *_ = server.add(1 + ends, length=380)
    while server.drafts._num_rests < 30:
        server.step()
    if ends:
        server.scheduler.finish(first, "abort")
    else:
        server.add(length=380, params=SamplingParams(max_tokens=380, num_speculative_tokens=0))
    before = source.num_looks
    for _ in range(4):
        server.step()
    assert source.num_looks >= before + 2


def rests_of(server: Server) -> list[float]:
    """What steps that rest take from now on, on average, as the account is told."""
    found, enter = list[float](), server.drafts.account.enter_rest

    def noting(kind: tuple[int, bool], count: int, seconds: float) -> None:
        found.append(seconds)
        enter(kind, count, seconds)

    server.drafts.account.enter_rest = noting  # type: ignore[method-assign]
    return found


def test_what_steps_that_rest_take_is_known_of_all_of_them_together() -> None:
    """To measure one of them takes as long as that step here: what it is said to take would be twice what it takes."""
    server = Server(Looks(Server, 20.0), max_model_len=1500)
    found, account = rests_of(server), server.drafts.account
    server.add(length=1480)
    while len(found) < 5:
        server.step()
    started = Server.now
    while len(found) < 10:
        server.step()
    assert Server.now == pytest.approx(started + 5 * MOST_RESTED), "no step is measured alone between"
    assert found == pytest.approx([1.0] * 10)
    assert account._steps[server.drafts._kind].plain == pytest.approx(1.0)


def test_a_rest_in_which_a_prompt_is_computed_says_nothing() -> None:
    """Such as that of a request which was preempted."""
    server = Server(Looks(Server, 20.0), max_model_len=1500)
    found = rests_of(server)
    server.add(length=1480)
    while len(found) < 3 or server.drafts._num_rests != 30:
        server.step()
    before = len(found)
    Server.now += 9.0
    prompt = SchedulerOutput(request_ids=(RequestId("another"),), num_scheduled_tokens=(4,))
    server.drafts.record(StepResult(Bucket("tokens", 16, 4), (1,), seconds=9.0), prompt)
    for _ in range(31):
        server.step()
    assert len(found) == before + 1, "those in which steps settle"
    for _ in range(2 * MOST_RESTED):
        server.step()
    assert len(found) > before + 1
    assert found == pytest.approx([1.0] * len(found))


@pytest.mark.parametrize("takes_drafts", [False, True])
def test_a_rest_that_others_have_ended_is_measured_as_far_as_it_went(takes_drafts: bool) -> None:
    """Without the step that computes their prompt, and those behind it."""
    server = Server(Looks(Server, 20.0), max_num_seqs=2, max_model_len=1500)
    found = rests_of(server)
    server.add(length=1480)
    while len(found) < 3:
        server.step()
    while server.drafts._num_rests != 30:
        server.step()
    params = None if takes_drafts else SamplingParams(max_tokens=380, num_speculative_tokens=0)
    server.add(length=380, params=params)
    assert server.drafts._rest is not None
    assert server.drafts._rest[1] == MOST_RESTED - 30
    for _ in range(40):
        server.step()
    assert len(found) > 3
    assert found == pytest.approx([1.0] * len(found))


@pytest.mark.parametrize("count", [1, 4])
def test_requests_of_few_tokens_that_leave_nothing_running_are_drafted_for(count: int) -> None:
    """Four steps that decode, behind a prompt: none of them settles, so that nothing is measured."""
    server = Server(Guesses(FakeDrafter(3, lambda: 3)), max_num_seqs=count)
    num_steps = list[int]()
    for _ in range(40):
        before = server.num_steps
        server.add(count, length=5)
        server.serve()
        num_steps.append(server.num_steps - before)
    assert num_steps[0] == 5
    assert num_steps[-1] == 2


def test_of_a_pipeline_a_step_takes_longer_than_from_one_to_the_next() -> None:
    server = Server(Looks(Server, 20.0), max_model_len=1500)
    server.drafts.limits = dataclasses.replace(server.drafts.limits, steps_at_once=2)
    found = rests_of(server)
    server.add(length=1480)
    while len(found) < 5:
        server.step()
    assert found == pytest.approx([2.0] * 5)


def test_a_rest_in_which_a_step_fails_says_nothing() -> None:
    server = Server(Looks(Server, 20.0), max_model_len=1500)
    server.add(length=1480)
    while server.drafts._num_rests != 30:
        server.step()
    account = server.drafts.account._steps[server.drafts._kind]
    account.due = 16.0
    server.scheduler.fail_steps_in_flight("it broke")
    assert (server.drafts._num_rests, server.drafts._rest) == (0, None)
    assert account.due == 16.0 - (MOST_RESTED - 30) / 4


@pytest.mark.parametrize("waits", [False, True])
def test_plans_without_a_step_do_not_rest(waits: bool) -> None:
    """Where the host has to know each token, every second plan finds that all requests are in flight."""
    source = Looks(Server, 0.5)
    scheduler = make_scheduler(
        400,
        source=source,
        one_graph=False,
        arguments={"decode_seconds": [((1, 1), 1.0), ((1, 4), 1.0)]},
        max_num_seqs=1,
        max_model_len=800,
    )
    engine = FakeEngine(scheduler, overlap=True)
    execute = engine.runner.execute

    def timed(output: SchedulerOutput) -> StepResult:
        Server.now += 1.0
        return dataclasses.replace(execute(output), bucket=Bucket("decode", 1, 1), seconds=1.0)

    engine.runner.execute = timed  # type: ignore[method-assign]
    request = make_request("x", 1, 700)
    request.waits_for_tokens = waits
    add(scheduler, request)
    engine.run()
    until_the_second_try = 100 * (SHARE - LEAST_SHARE)
    assert 0.5 * source.num_looks <= MOST + LEAST_SHARE * len(engine.outputs) + until_the_second_try + 0.5
    assert 0.5 * source.num_looks >= MOST + 0.9 * LEAST_SHARE * len(engine.outputs)
    num_overlapping = sum(any(row >= 0 for row in output.feedback) for output in engine.outputs)
    assert num_overlapping == 0 if waits else num_overlapping > 0.9 * len(engine.outputs)


def test_a_network_whose_first_drafts_were_right_goes_on_behind_the_step_that_verifies_them() -> None:
    """Though what it read before has not been saved yet: it lacks a token, and no prompt."""
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True), drafting=1.5)
    server.add(length=55)
    while not server.drafts._drafts_next:
        server.step()
    steps = server.drafts.account._steps[1, True]
    steps.balance, steps.with_reading, steps.network = 0.5, -20.0, 1.5
    drafted = list[bool]()
    for _ in range(3):
        server.step()
        drafted.append(server.drafts._drafts_next)
    assert drafted == [False, True, True]


@pytest.mark.parametrize("plans_between", [False, True])
def test_a_network_reads_a_prompt_that_was_computed_behind_its_last_drafts(plans_between: bool) -> None:
    """One request is on a try that ends at once. A second comes, and drafts for two are tried in the step after."""
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True), drafting=1.5, max_num_seqs=2)
    accounts = server.drafts.account._steps
    server.add(2)
    while (2, True) not in accounts or not accounts[2, True].network:
        server.step()
    server.serve()
    server.add(length=55)
    server.step()
    while not server.drafts._drafts_next:
        server.step()
    one, two = accounts[1, True], accounts[2, True]
    one.balance = one.with_reading = -MOST
    two.balance = two.with_reading = MOST
    two.due = 0.0
    server.plans_between = plans_between
    server.add(length=55)
    server.step()
    assert not server.drafts_next[-1], "behind the second prompt"
    server.drafting, before = 40.0, two.network
    server.step()
    assert server.drafts._done is not None
    assert server.drafts._done.network == 40.0
    assert server.drafts._done.reads
    server.drafting = 1.5
    server.step()
    assert two.network == before
    assert two.with_reading < -25.0 < 0.0 < two.balance


def test_a_network_whose_reading_does_not_pay_does_not_read_each_new_prompt() -> None:
    """Though its drafts do pay, once a prompt is read, and it had drafted behind the last step of all."""
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True), drafting=0.1, reading=40.0)
    for _ in range(60):
        server.add(length=20)
        server.serve()
    assert 0 < sum(server.drafts_next) < 6


def test_a_network_whose_reading_pays_reads_each_new_prompt() -> None:
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True), drafting=0.1, reading=4.0)
    for _ in range(60):
        server.add(length=20)
        server.serve()
    assert sum(server.drafts_next) > 50


def test_what_reading_prompts_of_many_costs_is_no_loss_of_single_requests() -> None:
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True), drafting=0.1, reading=2.0, max_num_seqs=4)
    for _ in range(8):
        server.add()
        server.serve()
    assert server.drafts_next[-1]
    server.reading, before = 200.0, server.drafts.account._steps[1, True].with_reading
    server.add(4)
    server.serve()
    assert server.drafts.account._steps[1, True].with_reading == pytest.approx(before, abs=1.0)
    server.reading = 2.0
    server.add()
    server.serve()
    assert server.drafts_next[-1]


@pytest.mark.parametrize("others_run", [False, True])
def test_what_goes_by_while_no_request_takes_drafts_is_no_time_of_a_step(others_run: bool) -> None:
    server = Server(Looks(Server, 0.01), max_num_seqs=4)
    (request,) = server.add()
    server.step()
    if others_run:
        server.add(params=SamplingParams(max_tokens=20, num_speculative_tokens=0))
        server.step()
    server.step()
    assert server.drafts._done is not None
    server.scheduler.finish(request, "abort")
    if others_run:
        server.step()
    Server.now += 1e6
    server.add()
    server.serve()
    assert server.drafts.costs.host(1, has_drafts=False) < 1.0
    assert all(steps.plain < 2.0 for steps in server.drafts.account._steps.values())


def test_what_a_network_took_counts_though_its_request_ended_meanwhile() -> None:
    server = Server(WorkerDrafts(3, adapts=True, reads_tokens=True))
    (request,) = server.add(length=55)
    while not server.drafts._drafts_next:
        server.step()
    output = server.scheduler.schedule()
    server.scheduler.finish(request, "abort")
    assert not server.scheduler.schedule().request_ids, "planned while the other step runs, and it rests"
    before = server.scheduler.counts.draft_seconds
    sampled = (0,) * output.num_rows
    result = StepResult(choose_bucket(server.buckets, output), sampled, seconds=3.0, draft_seconds=2.0)
    server.scheduler.update(output, result)
    assert server.scheduler.counts.draft_seconds == before + 2.0


@pytest.mark.parametrize("one_graph", [False, True])
def test_a_step_with_a_short_prompt_says_nothing_of_plain_ones(one_graph: bool) -> None:
    """A prompt of four tokens fits into a decode bucket with room for three drafts."""
    scheduler = make_scheduler(
        60,
        source=Looks(Server, 0.0),
        one_graph=one_graph,
        arguments={"decode_seconds": [((1, 1), 1.0), ((1, 2), 2.0), ((1, 4), 4.0)]},
        max_num_seqs=1,
    )
    engine, buckets, kinds = FakeEngine(scheduler), buckets_of(scheduler.limits), list[str]()
    execute = engine.runner.execute

    def timed(output: SchedulerOutput) -> StepResult:
        bucket = choose_bucket(buckets, output)
        kinds.append(bucket.kind)
        Server.now += output.num_tokens
        return dataclasses.replace(execute(output), bucket=bucket, seconds=float(output.num_tokens))

    engine.runner.execute = timed  # type: ignore[method-assign]
    for number in range(6):
        add(scheduler, make_request(f"{number}", 4, 3))
        engine.run()
    assert set(kinds) == {"decode"}
    assert scheduler.drafts is not None
    costs = scheduler.drafts.costs
    for drafts in (0, 3):
        found = costs.device(1, drafts, samples=False), costs.device(1, drafts, samples=True)
        assert found == pytest.approx((1.0 + drafts,) * 2, rel=0.05)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("one_graph", [False, True])
@pytest.mark.parametrize("network", [False, True])
def test_requests_of_all_kinds_get_their_tokens_whether_drafts_are_looked_for_or_not(
    overlap: bool, one_graph: bool, network: bool
) -> None:
    """Accounts open and close, as drafts are right for a while and wrong for another; pools run out; steps break."""
    rng = random.Random(4 * overlap + 2 * one_graph + network)
    is_right = False
    guesses = FakeDrafter(3, lambda: 3 if is_right else 0)
    source: DraftSource = WorkerDrafts(3, adapts=True, reads_tokens=True) if network else Guesses(guesses)
    seconds = [((size, size * n), 1.0 + 0.1 * n) for size in (1, 4) for n in (1, 2, 4)]
    scheduler = make_scheduler(24, source=source, one_graph=one_graph, arguments={"decode_seconds": seconds})
    engine, buckets = FakeEngine(scheduler, overlap=overlap), buckets_of(scheduler.limits)
    execute = engine.runner.execute

    def timed(output: SchedulerOutput) -> StepResult:
        tokens = choose_bucket(buckets, output) if output.num_tokens <= 16 else Bucket("tokens", 16, 4)
        took = rng.choice([0.0, 0.2, 1.0]) * output.drafts_next
        Server.now += 1.0 + took
        drafted = None
        if output.drafts_next:
            drafted = tuple(guesses.propose(name, after(requests[name.name])) for name in output.request_ids)
        return dataclasses.replace(
            execute(output), bucket=tokens, seconds=1.0 + took, draft_token_ids=drafted, draft_seconds=took
        )

    def after(request: Request) -> list[int]:
        """Its tokens once the step that is launched is done."""
        known = request.prompt_token_ids + request.output_token_ids
        drafts = request.draft_token_ids
        right = expected_tokens(known, 1 + len(drafts))
        count = next((n for n, draft in enumerate(drafts) if draft != right[n]), len(drafts))
        return known + right[: 1 + count]

    engine.runner.execute = timed  # type: ignore[method-assign]
    requests: dict[str, Request] = {}
    num_open, num_resting, drafts = 0, 0, scheduler.drafts
    assert drafts is not None
    for number in range(900):
        is_right = number // 150 % 2 == 1
        if number < 800 and scheduler.num_waiting < 2 and rng.random() < 0.15:
            request = make_request(f"{len(requests)}", rng.randint(1, 12), rng.randint(1, 40))
            kind = rng.random()
            if kind < 0.2:
                request.sampling_params = SamplingParams(max_tokens=40, num_speculative_tokens=rng.choice([0, 1]))
            elif kind < 0.4:
                request.waits_for_tokens = True
            requests[request.request_id.name] = request
            scheduler.add(request)
        if rng.random() < 0.01 and scheduler.running:
            scheduler.finish(rng.choice(scheduler.running), "abort")
        if rng.random() < 0.005:
            engine.fail_steps("the reason")
        if scheduler.has_unfinished_requests():
            engine.step()
        num_open += drafts._pays and not drafts._rests
        num_resting += drafts._rests
    engine.run()
    for request in requests.values():
        check_result(request)
    assert num_open > 50, num_open
    assert num_resting > 30
    assert not drafts.proposed
    assert not drafts._histories


def test_what_is_forgotten_at_rest_is_of_as_many_requests_as_rest() -> None:
    """Five of them may have a bucket of their own, though an account is that of five to eight."""
    source = WorkerDrafts(3, adapts=True, reads_tokens=True)
    server = Server(source, drafting=5.0, max_num_seqs=6, max_model_len=400)
    asked: list[int] = []
    rest = server.drafts.costs.rest
    server.drafts.costs.rest = lambda *found: (asked.append(found[0]), rest(*found))[1]  # type: ignore[method-assign, func-returns-value]
    server.add(5, 300)
    server.serve()
    assert asked
    assert set(asked) == {5}
