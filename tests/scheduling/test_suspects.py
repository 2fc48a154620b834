"""Which requests end when steps break: those that break them, found by trying fewer and fewer together."""

import math
from collections.abc import Callable

import pytest

from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.scheduling.suspects import MOST_UNEXPLAINED
from tests.fake_engine import (
    FREE_SWAPS,
    FakeEngine,
    add,
    both_loops,
    check_result,
    drafters,
    make_child,
    make_request,
    make_scheduler,
    names_of,
    work_of,
)

NAMES = "abcdefgh"


def make_engine(overlap: bool, breaks: Callable[[SchedulerOutput], bool], num_seqs: int = 8) -> FakeEngine:
    scheduler = make_scheduler(100, max_num_seqs=num_seqs, max_num_batched_tokens=64, token_bucket_sizes=(64,))
    return FakeEngine(scheduler, overlap=overlap, breaks=breaks)


def add_requests(scheduler: Scheduler, max_tokens: int = 8) -> dict[str, Request]:
    return {name: add(scheduler, make_request(name, 4, max_tokens))[0] for name in NAMES}


def computes(output: SchedulerOutput, name: str, position: int) -> bool:
    """Whether a step computes the token at ``position`` of a request."""
    if name not in names_of(output):
        return False
    index = names_of(output).index(name)
    start = output.num_computed_tokens[index]
    return start <= position < start + output.num_scheduled_tokens[index]


def check_ends(requests: dict[str, Request], failed: str) -> None:
    """Those named have failed, and all others have all their tokens."""
    for name, request in requests.items():
        check_result(request)
        assert request.finish_reason == ("error" if name in failed else "length")
        assert request.stop_reason == ("the reason" if name in failed else None)


@both_loops
@pytest.mark.parametrize("position", [0, 3, 4, 8])
@pytest.mark.parametrize("cause", NAMES)
def test_one_cause_ends_alone_after_few_tries(cause: str, position: int, overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: computes(output, cause, position))
    requests = add_requests(engine.scheduler)
    engine.run()
    check_ends(requests, cause)
    assert len(requests[cause].output_token_ids) == max(0, position - 3)
    assert len(engine.broken) <= 2 + math.log2(len(NAMES))
    assert engine.scheduler.counts.num_unexplained_faults == 0


@both_loops
@pytest.mark.parametrize("causes", ["ab", "ah", "de", "bcg", "aceg", NAMES])
def test_every_cause_ends(causes: str, overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: any(computes(output, name, 6) for name in causes))
    requests = add_requests(engine.scheduler)
    engine.run()
    check_ends(requests, causes)
    assert len(engine.broken) <= 2 * len(NAMES)


@both_loops
def test_a_device_that_always_breaks_ends_all_that_come_to_it(overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: True)
    requests = add_requests(engine.scheduler)
    engine.run()
    check_ends(requests, NAMES)
    assert len(engine.broken) == 2 * len(NAMES), "all of them twice, then 4 and 4, 2 and 2, and each alone"


@both_loops
def test_a_fault_that_does_not_come_again_ends_nobody(overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: not engine.broken and computes(output, "c", 5), num_seqs=4)
    requests = add_requests(engine.scheduler)
    engine.run()
    check_ends(requests, "")
    assert len(engine.broken) == 1
    assert engine.scheduler.counts.num_unexplained_faults == 1
    assert [request.num_preemptions for request in requests.values()] == [1] * 4 + [0] * 4


@both_loops
def test_while_some_are_tried_nobody_else_runs_and_steps_do_not_overlap(overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: computes(output, "b", 6), num_seqs=4)
    scheduler = engine.scheduler
    requests = add_requests(scheduler)
    tried: list[set[str]] = []
    while scheduler.has_unfinished_requests():
        is_searching = scheduler.suspects.is_searching
        output = engine.launch()
        if is_searching and scheduler.suspects.is_searching and output is not None:
            tried.append(set(names_of(output)))
            assert len(engine._launched) <= 1
            assert not any(output.feedback[index] >= 0 for index in range(len(output.request_ids)))
        if "late" not in requests and len(engine.broken) == 2:
            requests["late"] = make_request("late", 4, 2)
            scheduler.add(requests["late"])
            assert requests["late"] in scheduler.waiting
        while engine._launched and (output is None or not overlap or len(engine._launched) == 2):
            engine.collect()
    check_ends(requests, "b")
    assert all(names <= set("abcd") for names in tried)
    groups = [names for index, names in enumerate(tried) if index == 0 or tried[index - 1] != names]
    assert groups == [set("abcd"), set("ab"), set("a"), set("b"), set("cd")]


@both_loops
def test_requests_that_break_steps_only_together_end_after_some_faults(overlap: bool) -> None:
    """Nobody can say which of them is the cause."""
    engine = make_engine(overlap, lambda output: {"a", "b"} <= set(names_of(output)) and output.num_tokens <= 8)
    requests = add_requests(engine.scheduler, max_tokens=40)
    engine.run()
    assert engine.scheduler.counts.num_unexplained_faults == MOST_UNEXPLAINED
    check_ends(requests, "".join(name for name in NAMES if requests[name].finish_reason == "error"))
    assert requests["a"].finish_reason == requests["b"].finish_reason == "error"
    (late,) = add(engine.scheduler, make_request("late", 4, 4))
    engine.run()
    assert late.finish_reason == "length"


@both_loops
@pytest.mark.parametrize("num_broken", [1, 2, 3])
def test_suspects_can_be_aborted(num_broken: int, overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: computes(output, "b", 6), num_seqs=4)
    scheduler = engine.scheduler
    requests = add_requests(scheduler)
    while len(engine.broken) < num_broken:
        engine.step()
    for name in "abcd":
        scheduler.finish(requests[name], "abort")
    assert scheduler.num_waiting == 4
    engine.run()
    for name in "efgh":
        assert requests[name].finish_reason == "length"
    assert not scheduler.suspects.is_searching
    assert scheduler.counts.num_unexplained_faults == 0, "an aborted one may have been the cause"
    assert scheduler.pool.num_used == 0


@both_loops
def test_when_all_are_aborted_the_next_request_is_served(overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: not engine.broken)
    requests = add_requests(engine.scheduler)
    engine.step()
    for request in requests.values():
        engine.scheduler.finish(request, "abort")
    assert not engine.scheduler.has_unfinished_requests()
    (late,) = add(engine.scheduler, make_request("late", 4, 4))
    engine.run()
    assert late.finish_reason == "length"


@both_loops
def test_continuations_of_a_suspect_wait_until_the_cause_is_found(overlap: bool) -> None:
    engine = make_engine(overlap, lambda output: computes(output, "a", 5), num_seqs=2)
    scheduler = engine.scheduler
    a, parent = add(scheduler, make_request("a", 4, 8), make_request("parent", 10, 8, keeps_blocks=True))
    while not engine.broken:
        engine.step()
    children = [make_child(parent, f"{n}", 4, num_shared=10) for n in range(2)]
    for child in children:
        scheduler.fork(parent, child)
    assert scheduler.waiting.num_aside == 0 or all(child in scheduler.waiting for child in children)
    scheduler.end_forking(parent)
    engine.run()
    assert a.finish_reason == "error"
    for request in (parent, *children):
        assert request.finish_reason == "length"
        check_result(request)
    assert scheduler.pool.num_used == 0


@both_loops
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_blocks": 14, "num_swap_blocks": 40, "arguments": {"preemption_mode": "swap", "costs": FREE_SWAPS}},
        {"num_blocks": 14, "prefix_caching": True},
        {"num_blocks": 60, "num_state_slots": 10, "prefix_caching": True},
        {"num_blocks": 60, "drafter": drafters(3)["half right"]},
        {"num_blocks": 60, "windows": [(6, None)]},
    ],
    ids=["swap", "too few blocks", "states", "drafts", "a window"],
)
def test_the_others_have_their_tokens_with(arguments: dict, overlap: bool) -> None:
    breaks: Callable[[SchedulerOutput], bool] = lambda output: computes(output, "c", 9)  # noqa: E731
    engine = FakeEngine(make_scheduler(**arguments), overlap=overlap, breaks=breaks)
    requests = {name: add(engine.scheduler, make_request(name, 6, 12))[0] for name in NAMES}
    engine.run()
    check_ends(requests, "c")
    assert engine.scheduler.pool.num_used == engine.scheduler.swap_pool.num_used == 0


def test_one_preempted_while_its_step_runs_is_tried_until_the_same_token() -> None:
    """It is computed again in chunks of 16 tokens."""
    scheduler = make_scheduler(40)
    engine = FakeEngine(scheduler, overlap=True, breaks=lambda output: computes(output, "last", 32))
    first, last = add(scheduler, make_request("first", 4, 20), make_request("last", 30, 20))
    while last.num_computed_tokens < 32:
        engine.step()
    engine.breaks, breaks = None, engine.breaks
    engine.launch()
    assert scheduler.running.pop() is last
    scheduler.running_set.preempt(last, may_swap=False)
    engine.breaks = breaks
    assert engine.fail_steps("the reason") == []
    engine.run()
    assert (first.finish_reason, last.finish_reason) == ("length", "error")
    assert scheduler.counts.num_unexplained_faults == 0, "it was found in one search"


def test_the_first_step_of_a_search_has_what_the_broken_one_had() -> None:
    engine = make_engine(False, lambda output: not engine.broken and computes(output, "d", 6), num_seqs=4)
    requests = add_requests(engine.scheduler)
    while not engine.broken:
        engine.step()
    assert all(request.status is Status.WAITING for request in requests.values())
    assert work_of(engine.step()) == dict.fromkeys("abcd", 7), "their prompts, and three tokens each"
