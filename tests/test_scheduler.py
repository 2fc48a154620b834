"""The scheduler on a fake model: random schedules with invariants after every step, and the rules one by one."""

import random

import pytest

from compiled_llm.block_pool import SINK_BLOCK, BlockPool
from compiled_llm.config import Limits
from compiled_llm.request import Request, Status
from compiled_llm.sampling_params import SamplingParams
from compiled_llm.scheduler import Scheduler, SchedulerOutput


def make_scheduler(num_blocks: int, **changes) -> Scheduler:
    sizes = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "decode_bucket_sizes": (1, 4),
        "token_bucket_sizes": (16,),
        "chunked_prefill": True,
    }
    return Scheduler(Limits(**{**sizes, **changes}), BlockPool(num_blocks))


def make_request(name: str, prompt_len: int, max_tokens: int, stop: frozenset[int] = frozenset()) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[next_token(name, i) for i in range(prompt_len)],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=stop,
        max_num_tokens=prompt_len + max_tokens,
        arrival_time=0.0,
    )


def next_token(name: str, position: int) -> int:
    """The fake model: the token at a position of a request is a function of both."""
    return hash_of(f"{name}/{position}") % 1000


def hash_of(text: str) -> int:
    return random.Random(text).randrange(2**31)


class FakeRunner:
    """Keeps (request, position) of every KV slot, as the real cache keeps keys, and checks what a step reads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], tuple[str, int]] = {}
        self.tables: dict[str, list[int]] = {}

    def execute(self, output: SchedulerOutput) -> list[int]:
        limits = self.scheduler.limits
        assert 0 < output.num_tokens <= limits.max_num_batched_tokens
        assert output.num_tokens == sum(len(item.token_ids) for item in output.requests)
        assert output.max_query_len == max(len(item.token_ids) for item in output.requests)
        assert len(output.requests) <= limits.max_num_seqs
        for request_id in output.released_request_ids:
            del self.tables[request_id]
        written = set()
        for item in output.requests:
            assert (item.admission is not None) == (item.request_id not in self.tables)
            table = self.tables.setdefault(item.request_id, [])
            table += item.new_block_ids
            for position, token_id in enumerate(item.token_ids, item.num_computed_tokens):
                assert token_id == next_token(item.request_id, position)
                slot = (table[position // limits.block_size], position % limits.block_size)
                assert slot[0] != SINK_BLOCK
                assert slot not in written
                written.add(slot)
                self.slots[slot] = (item.request_id, position)
        sampled = []
        for item in output.requests:
            end = item.num_computed_tokens + len(item.token_ids)
            for position in range(end):
                slot = (self.tables[item.request_id][position // limits.block_size], position % limits.block_size)
                assert self.slots[slot] == (item.request_id, position), "a foreign key stands in the slot"
            sampled.append(next_token(item.request_id, end) if item.samples else -1)
        return sampled


def run_step(scheduler: Scheduler, runner: FakeRunner) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update(output, runner.execute(output))
    scheduler.check_invariants()
    return output


def check_result(request: Request) -> None:
    expected = [next_token(request.request_id, len(request.prompt_token_ids) + i) for i in range(64)]
    assert request.output_token_ids == expected[: len(request.output_token_ids)]
    if request.finish_reason == "length":
        assert request.num_tokens == request.max_num_tokens


@pytest.mark.parametrize("seed", range(200))
def test_random_schedules(seed: int) -> None:
    """Every request ends, its tokens are those of the fake model, nothing leaks; a fifth is aborted on the way."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    seqs = rng.choice([1, 2, 8])
    scheduler = make_scheduler(
        num_blocks=-(-rng.randint(24, 96) // block_size),
        max_model_len=24,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.randint(seqs, 40),
        block_size=block_size,
    )
    runner = FakeRunner(scheduler)
    requests = []
    for i in range(rng.randint(1, 24)):
        prompt_len = rng.randint(1, 23)
        stop = frozenset(rng.sample(range(1000), 20))
        requests.append(make_request(f"{seed}-{i}", prompt_len, rng.randint(1, 24 - prompt_len), stop))
    queue = list(requests)
    for _ in range(10_000):
        while queue and rng.random() < 0.5:
            scheduler.add(queue.pop(0))
        if rng.random() < 0.02:
            added = requests[: len(requests) - len(queue)]
            if added:
                scheduler.finish(rng.choice(added), "abort")
                scheduler.check_invariants()
        if scheduler.has_unfinished_requests():
            run_step(scheduler, runner)
        elif not queue:
            break
    assert all(request.status is Status.FINISHED for request in requests)
    assert scheduler.pool.num_used == 0
    for request in requests:
        check_result(request)


def test_random_schedules_do_preempt() -> None:
    """The test above means little unless blocks run out in it."""
    scheduler = make_scheduler(num_blocks=8, max_model_len=24)
    runner = FakeRunner(scheduler)
    requests = [make_request(f"p{i}", 10, 14) for i in range(8)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished_requests():
        run_step(scheduler, runner)
    assert scheduler.num_preemptions > 3
    assert sum(request.num_preemptions for request in requests) == scheduler.num_preemptions
    assert requests[0].num_preemptions == 0, "the oldest always progresses"
    for request in requests:
        check_result(request)
        assert len(request.output_token_ids) == 14


def test_a_long_prompt_is_chunked_beside_a_decode() -> None:
    scheduler = make_scheduler(num_blocks=40)
    runner = FakeRunner(scheduler)
    scheduler.add(make_request("short", 3, 20))
    run_step(scheduler, runner)
    scheduler.add(make_request("long", 40, 2))
    counts = []
    for _ in range(4):
        output = run_step(scheduler, runner)
        counts.append({item.request_id: len(item.token_ids) for item in output.requests})
    assert counts == [{"short": 1, "long": count} for count in (15, 15, 10, 1)]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    scheduler = make_scheduler(num_blocks=60, chunked_prefill=False, max_num_batched_tokens=64)
    runner = FakeRunner(scheduler)
    for name in ("a", "b"):
        scheduler.add(make_request(name, 40, 4))
    assert [len(item.token_ids) for item in run_step(scheduler, runner).requests] == [40]
    assert [len(item.token_ids) for item in run_step(scheduler, runner).requests] == [1, 40]


def test_first_come_first_served() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=2)
    runner = FakeRunner(scheduler)
    requests = [make_request(f"{i}", 4, 4) for i in range(6)]
    for request in requests:
        scheduler.add(request)
    finished: list[str] = []
    while scheduler.has_unfinished_requests():
        run_step(scheduler, runner)
        finished += [r.request_id for r in requests if r.status is Status.FINISHED and r.request_id not in finished]
    assert finished == [request.request_id for request in requests]


def test_stop_tokens_and_their_reasons() -> None:
    for named in (True, False):
        scheduler = make_scheduler(num_blocks=10)
        token = next_token("x", 5)
        request = make_request("x", 3, 20, frozenset([token]))
        if named:
            request.sampling_params = SamplingParams(max_tokens=20, stop_token_ids=[token])
        scheduler.add(request)
        runner = FakeRunner(scheduler)
        while scheduler.has_unfinished_requests():
            run_step(scheduler, runner)
        assert (request.finish_reason, request.stop_reason) == ("stop", token if named else None)
        assert request.output_token_ids[-1] == token


def test_no_progress_is_an_error_with_the_state() -> None:
    scheduler = make_scheduler(num_blocks=4)
    request = make_request("stuck", 8, 4)
    scheduler.add(request)
    scheduler.pool.allocate(4)  # blocks that nobody will give back: a planted leak
    with pytest.raises(RuntimeError, match=r"0 of 4 blocks free; stuck \(waiting: 0 of 8 tokens"):
        scheduler.schedule()


def test_capacity_is_the_smaller_of_model_and_pool() -> None:
    assert make_scheduler(num_blocks=3).request_capacity == 12
    assert make_scheduler(num_blocks=100).request_capacity == 64
