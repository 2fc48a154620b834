"""The scheduler's rules one by one, on a fake model: order, budget and endings.

tests/battery/test_schedules.py has the random schedules.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.costs import StepCosts
from compiled_llm.scheduling.invariants import check_scheduler
from compiled_llm.scheduling.request import Status
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import (
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    expected_tokens,
    finishing_order,
    make_engine,
    make_request,
    make_scheduler,
    work_of,
)

# -- Order and budget


@both_loops
def test_first_come_first_served(overlap: bool) -> None:
    scheduler = make_scheduler(10, max_num_seqs=2)
    requests = [make_request(f"{i}", 4, 4) for i in range(6)]
    add(scheduler, *requests)
    assert finishing_order(FakeEngine(scheduler, overlap=overlap), requests) == ["0", "1", "2", "3", "4", "5"]


def test_a_step_decodes_before_anything_else_however_long_the_prompt_that_waits() -> None:
    scheduler, engine = make_engine(40)
    add(scheduler, make_request("a", 3, 20), make_request("b", 3, 20))
    engine.step()
    add(scheduler, make_request("long", 40, 2))
    work = [work_of(engine.step()) for _ in range(4)]
    assert work == [{"a": 1, "b": 1, "long": count} for count in (14, 14, 12, 1)]


def test_decodes_go_first_even_if_a_chunked_prompt_is_older() -> None:
    scheduler, engine = make_engine(40)
    add(scheduler, make_request("long", 60, 2), make_request("short", 2, 10))
    assert work_of(engine.step()) == {"short": 2, "long": 14}
    assert work_of(engine.step()) == {"short": 1, "long": 15}


def test_a_long_prompt_leaves_half_of_the_step_to_later_ones_that_fit() -> None:
    scheduler, engine = make_engine(60)
    add(scheduler, make_request("long", 60, 2), make_request("too long", 20, 2), make_request("fits", 8, 2))
    assert work_of(engine.step()) == {"fits": 8, "long": 8}


def test_a_long_prompt_takes_what_the_others_leave() -> None:
    scheduler, engine = make_engine(60)
    add(scheduler, make_request("long", 60, 2), make_request("a", 3, 2), make_request("b", 3, 2))
    assert work_of(engine.step()) == {"a": 3, "b": 3, "long": 10}


def test_a_short_prompt_behind_two_long_ones_starts_in_the_next_step() -> None:
    scheduler, engine = make_engine(60)
    add(scheduler, make_request("long 1", 60, 2), make_request("long 2", 60, 2))
    engine.step()
    short = add_request(scheduler, "short", 5, 2)
    assert work_of(engine.step()) == {"short": 5, "long 1": 11}
    assert len(short.output_token_ids) == 1


def test_of_two_long_prompts_the_second_starts_when_the_first_is_through() -> None:
    scheduler, engine = make_engine(60)
    add(scheduler, make_request("a", 24, 4), make_request("b", 24, 4))
    work = [work_of(engine.step()) for _ in range(4)]
    assert work == [{"a": 16}, {"a": 8, "b": 8}, {"a": 1, "b": 15}, {"a": 1, "b": 1}]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    scheduler, engine = make_engine(60, chunked_prefill=False, max_num_batched_tokens=64)
    add(scheduler, make_request("a", 40, 4), make_request("b", 40, 4), make_request("c", 4, 4))
    assert work_of(engine.step()) == {"a": 40}, "b does not fit, and c is behind it"
    assert work_of(engine.step()) == {"a": 1, "b": 40, "c": 4}


def test_without_chunked_prefill_a_prefix_that_is_found_need_not_fit() -> None:
    scheduler, engine = make_engine(60, prefix_caching=True, chunked_prefill=False, max_num_batched_tokens=64)
    common = list(range(32))
    add(scheduler, make_request("first", common, 8))
    engine.step()
    add(scheduler, make_request("b", 40, 8), make_request("c", [*common, 1, 2], 8))
    assert work_of(engine.step()) == {"first": 1, "b": 40, "c": 2}


def test_no_more_requests_run_than_there_are_seats() -> None:
    scheduler, engine = make_engine(100)
    add(scheduler, *[make_request(f"{i}", 1, 3) for i in range(6)])
    assert list(work_of(engine.step())) == ["0", "1", "2", "3"]
    assert (len(scheduler.running), scheduler.num_waiting) == (4, 2)


def test_a_request_waits_until_all_its_tokens_have_blocks_and_the_running_ones_room_to_grow() -> None:
    scheduler, engine = make_engine(5)
    add(scheduler, make_request("a", 7, 5), make_request("b", 10, 2))
    assert work_of(engine.step()) == {"a": 7}, "3 blocks are free: b takes them all, a may need one"
    while "a" in (work := work_of(engine.step())):
        assert work == {"a": 1}
    assert work == {"b": 10}


def test_capacity_is_the_smaller_of_model_and_pool() -> None:
    assert make_scheduler(3).request_capacity == 12
    assert make_scheduler(100).request_capacity == 64
    with pytest.raises(AssertionError):
        make_scheduler(3).add(make_request("x", 10, 3))


@both_loops
def test_a_prompt_of_one_token_and_an_output_of_one(overlap: bool) -> None:
    scheduler = make_scheduler(4)
    request = add_request(scheduler, "x", 1, 1)
    FakeEngine(scheduler, overlap=overlap).run()
    assert len(request.output_token_ids) == 1
    check_result(request)


@both_loops
@pytest.mark.parametrize("named", [True, False], ids=["named by the user", "of the model"])
def test_stop_tokens_and_their_reasons(named: bool, overlap: bool) -> None:
    scheduler = make_scheduler(10)
    token = expected_tokens(list(range(3)), 5)[-1]
    request = make_request("x", list(range(3)), 20, frozenset([token]))
    if named:
        request.sampling_params = SamplingParams(max_tokens=20, stop_token_ids=[token])
    add(scheduler, request)
    FakeEngine(scheduler, overlap=overlap).run()
    assert (request.finish_reason, request.stop_reason) == ("stop", token if named else None)
    assert request.output_token_ids == expected_tokens(list(range(3)), 5)


# -- A target for the time between tokens


def make_targeted(target_itl_ms: float, seconds: dict[int, float], **limits: int) -> Scheduler:
    return make_scheduler(
        100,
        arguments={"target_itl_ms": target_itl_ms, "costs": StepCosts(seconds)},
        max_num_batched_tokens=64,
        token_bucket_sizes=(8, 16, 32, 64),
        **limits,
    )


SECONDS = {8: 0.01, 16: 0.02, 32: 0.03, 64: 0.06}


@pytest.mark.parametrize(("target", "num_tokens"), [(60, 64), (59, 32), (30, 32), (29, 16), (10, 8), (1, 8)])
def test_while_something_decodes_a_step_is_the_largest_bucket_within_the_target(target: float, num_tokens: int) -> None:
    """Where no bucket meets it, the smallest: prompts progress whatever the target is."""
    scheduler = make_targeted(target, SECONDS)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("decoding", 2, 20))
    engine.step()
    add(scheduler, make_request("long", 60, 2), make_request("longer", 60, 2))
    assert sum(work_of(engine.step()).values()) == num_tokens


def test_while_nothing_decodes_the_target_is_nothing() -> None:
    scheduler = make_targeted(1, SECONDS)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("long", 60, 2))
    assert work_of(engine.step()) == {"long": 60}


def test_without_a_target_a_step_has_a_size_of_its_own_beside_decodes() -> None:
    scheduler, engine = make_engine(
        100, max_num_batched_tokens=64, max_tokens_beside_decodes=24, token_bucket_sizes=(64,)
    )
    add(scheduler, make_request("first", 40, 20))
    assert work_of(engine.step()) == {"first": 40}
    add(scheduler, make_request("long", 40, 2))
    assert work_of(engine.step()) == {"first": 1, "long": 23}


@pytest.mark.parametrize(("num_decodes", "num_tokens"), [(4, 12), (5, 27)])
def test_prompts_get_three_tokens_for_each_that_is_decoded(num_decodes: int, num_tokens: int) -> None:
    """Whatever the target is: they would come in more slowly than answers end."""
    scheduler = make_targeted(1, {8: 1.0, 16: 2.0, 32: 4.0}, max_num_seqs=6)
    engine = FakeEngine(scheduler)
    add(scheduler, *[make_request(f"{i}", 2, 10) for i in range(num_decodes)])
    engine.step()
    add(scheduler, make_request("long", 60, 2))
    assert work_of(engine.step())["long"] == num_tokens


def test_the_target_follows_what_is_measured() -> None:
    scheduler = make_targeted(30, dict(SECONDS))
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("decoding", 2, 30), make_request("long", 60, 2))
    engine.step()
    for _ in range(100):
        scheduler.costs.record_step(32, 0.04)
    add(scheduler, make_request("longer", 60, 2))
    assert sum(work_of(engine.step()).values()) == 16


# -- Endings


@both_loops
def test_a_finished_request_is_left_as_it_is(overlap: bool) -> None:
    scheduler = make_scheduler(20)
    request = add_request(scheduler, "x", 3, 2)
    FakeEngine(scheduler, overlap=overlap).run()
    scheduler.finish(request, "abort")
    assert request.finish_reason == "length"


def test_aborts_wherever_a_request_stands() -> None:
    scheduler, engine = make_engine(8, num_swap_blocks=20, arguments={"preemption_mode": "swap"}, max_model_len=24)
    requests = add(scheduler, *[make_request(f"{i}", 5, 15) for i in range(5)])
    while not any(request.host_block_ids for request in requests):
        engine.step()
    assert {request.status for request in requests} == {Status.RUNNING, Status.WAITING}
    for request in requests:
        scheduler.finish(request, "abort")
        check_scheduler(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert (scheduler.pool.num_used, scheduler.swap_pool.num_used) == (0, 0)


@both_loops
def test_when_steps_break_their_requests_go_on_by_themselves_and_then_the_others(overlap: bool) -> None:
    scheduler, engine = make_engine(100, max_num_seqs=2, overlap=overlap)
    a, b, waiting = add(scheduler, *[make_request(name, 4, 6) for name in ("a", "b", "waiting")])
    engine.step()
    scheduler.schedule()  # launched, and then the device broke
    assert engine.fail_steps("the reason") == []
    assert scheduler.pool.num_used == 0
    assert set(work_of(engine.step())) == {"a", "b"}
    engine.run()
    for request in (a, b, waiting):
        assert len(request.output_token_ids) == 6
        check_result(request)


def test_when_steps_break_what_they_computed_cannot_be_found() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True, overlap=True)
    prompt = list(range(16))
    broken = add_request(scheduler, "broken", prompt, 4)
    engine.step()
    engine.fail_steps("the reason")
    scheduler.finish(broken, "abort")
    again = add_request(scheduler, "again", prompt, 4)
    engine.run()
    assert again.num_cached_tokens == 0
    check_result(again)


def test_when_steps_break_what_was_swapped_out_is_computed_again() -> None:
    """It may not have arrived."""
    scheduler, engine = make_engine(8, num_swap_blocks=20, arguments={"preemption_mode": "swap"}, max_model_len=24)
    requests = add(scheduler, *[make_request(f"{i}", 5, 15) for i in range(3)])
    while not (swapped := [request for request in requests if request.host_block_ids]):
        engine.step()
    lost = swapped[0].num_computed_tokens
    scheduler.schedule()
    engine.runner.host.clear()
    engine.fail_steps("the reason")
    engine.run()
    assert scheduler.swap_pool.num_used == 0
    assert swapped[0].num_recomputed_tokens == lost
    assert len(swapped[0].output_token_ids) == 15
    check_result(swapped[0])


def test_no_progress_is_an_error_with_the_state() -> None:
    scheduler = make_scheduler(4)
    add(scheduler, make_request("stuck", 8, 4))
    scheduler.pool.allocate(4)  # blocks that nobody will give back: a planted leak
    with pytest.raises(RuntimeError, match=r"0 of 4 blocks free; stuck \(waiting: 0 of 8 tokens.*max_num_seqs=4"):
        scheduler.schedule()
