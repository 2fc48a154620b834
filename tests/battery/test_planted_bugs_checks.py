"""What planted bugs showed to be checked by nothing else: turns that random schedules take too rarely."""

from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from tests.fake_engine import FakeEngine, add_request, check_result, make_engine, make_request, work_of


def engine_with_copies_due() -> tuple[Scheduler, FakeEngine, list[Request]]:
    """Of the last of three requests, which was preempted as a step was empty: it made none of these copies."""
    scheduler, engine = make_engine(
        6, num_swap_blocks=2, arguments={"policy": "priority", "preemption_mode": "swap"}, max_num_seqs=3, overlap=True
    )
    requests = [make_request(name, 3, count, priority=1) for name, count in (("a", 6), ("b", 6), ("last", 12))]
    for request in requests:
        scheduler.add(request)
    for _ in range(6):
        engine.step()
    assert engine.launch() is None, "the last tokens of two are in flight, and the third finds no block"
    assert len(requests[-1].host_block_ids) == 2
    return scheduler, engine, requests


def test_copies_that_an_empty_step_did_not_make_are_made_by_the_next_one() -> None:
    _, engine, requests = engine_with_copies_due()
    engine.run()
    assert requests[-1].num_preemptions == 1
    for request in requests:
        check_result(request)


def test_copies_of_an_aborted_request_are_not_made() -> None:
    """They were due, but the step was empty; and its host blocks are another's by the next one."""
    scheduler, engine, (a, b, aborted) = engine_with_copies_due()
    scheduler.finish(aborted, "abort")
    urgent = add_request(scheduler, "urgent", 3, 2)
    output = engine.launch()
    assert output is not None
    assert len(b.host_block_ids) == 2, "it made room for the urgent one"
    assert [host for _, host in output.swapped_out] == b.host_block_ids
    engine.run()
    for request in (a, b, urgent):
        check_result(request)


def test_when_a_step_breaks_only_what_the_steps_before_it_computed_can_be_found() -> None:
    scheduler, engine = make_engine(100, prefix_caching=True, overlap=True)
    prompt = list(range(40))
    broken = add_request(scheduler, "broken", prompt, 4)
    engine.step()
    engine.step()  # 16 tokens each; the results of the first are in
    engine.fail_steps("the reason")
    scheduler.finish(broken, "abort")
    again = add_request(scheduler, "again", prompt, 4)
    engine.run()
    assert again.num_cached_tokens == 16
    check_result(again)


def test_a_pool_that_ran_out_takes_in_nobody_else_either() -> None:
    """Beside a part of a long prompt there would be room for the last one, which would be preempted next."""
    scheduler, engine = make_engine(44, max_model_len=200)
    a, long, b = make_request("a", 4, 30), make_request("long", 150, 2), make_request("b", 6, 20)
    last = make_request("last", 1, 2)
    for request in (a, long, b, last):
        scheduler.add(request)
    while b.num_preemptions == 0:
        output = engine.step()
        assert output is not None
    assert work_of(output) == {"a": 1, "long": 15}
    assert scheduler.pool.num_free == 3, "as many as it takes"
    assert last.status is Status.WAITING
    engine.run()
    for request in (a, long, b, last):
        check_result(request)


def test_after_a_broken_step_the_runner_meets_its_requests_anew() -> None:
    """Also one that runs and had no part in the steps that broke."""
    scheduler, engine = make_engine(100, arguments={"policy": "priority"})
    less_urgent, urgent = make_request("less urgent", 60, 3, priority=1), make_request("urgent", 60, 3)
    scheduler.add(less_urgent)
    engine.step()
    scheduler.add(urgent)
    output = engine.launch()
    assert output is not None
    assert work_of(output).keys() == {"urgent"}
    assert less_urgent.status is Status.RUNNING
    engine.fail_steps("the reason")
    assert less_urgent.status is Status.WAITING
    engine.runner.tables.clear()
    engine.run()
    for request in (less_urgent, urgent):
        assert request.finish_reason == "length"
        check_result(request)
