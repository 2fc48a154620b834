"""Slots of adapters: who gets one, who waits, and for whom. Whole schedules at random are in ``tests/battery``."""

from compiled_llm.api.lora_request import WHOLE
from compiled_llm.scheduling.request import Status
from tests.fake_engine import add_request, both_loops, check_result, finishing_order, make_engine, names_of

SIZES = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "token_bucket_sizes": (32,)}


def loads(engine) -> list[str]:
    """The adapters that were loaded, in their order."""
    return [adapter for output in engine.outputs for _, adapter in output.adapter_loads]


@both_loops
def test_an_adapter_in_use_keeps_its_slot_however_long_ago_it_came(overlap: bool) -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2, overlap=overlap)
    first = add_request(scheduler, "first", 3, 30, adapter="a")
    engine.step()
    for adapter in "bc":
        other = add_request(scheduler, f"of {adapter}", 3, 3, adapter=adapter)
        while other.status is not Status.FINISHED:
            engine.step()
    assert first.status is Status.RUNNING
    engine.run()
    copied = [load for output in engine.outputs for load in output.adapter_loads]
    assert copied == [(1, "a"), (2, "b"), (2, "c")]


@both_loops
def test_requests_share_slots_and_the_least_recently_used_adapter_goes(overlap: bool) -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2, prefix_caching=True, overlap=overlap)
    requests = []
    for adapter in ("a", "b", "", "a", "c", "a", "b"):
        requests.append(add_request(scheduler, f"{len(requests)}", [5] * 9, 3, adapter=adapter))
        engine.run()
    assert loads(engine) == ["a", "b", "c", "b"]
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 8, 0, 8, 8]
    for request in requests:
        check_result(request)


def test_a_request_without_a_slot_waits_and_others_pass_it() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=1)
    for name, adapter in (("first", "a"), ("second", "b"), ("third", ""), ("fourth", "a")):
        add_request(scheduler, name, 3, 6, adapter=adapter)
    output = engine.step()
    assert output is not None
    assert names_of(output) == ["first", "third", "fourth"]
    assert (scheduler.num_waiting, scheduler.running_set.adapters.num_held_back) == (1, 1)
    engine.run()
    assert loads(engine) == ["a", "b"]


def test_an_adapter_in_use_takes_no_later_requests_while_another_waits() -> None:
    """Else a flood of one adapter would keep the others from their slot for ever."""
    scheduler, engine = make_engine(**SIZES, max_loras=1)
    requests = [add_request(scheduler, f"a{i}", 3, 6, adapter="a") for i in range(2)]
    requests.append(add_request(scheduler, "b", 3, 6, adapter="b"))
    engine.step()
    for i in range(2, 9):
        requests.append(add_request(scheduler, f"a{i}", 3, 6, adapter="a"))
        engine.step()
    assert finishing_order(engine, requests)[:3] == ["a0", "a1", "b"]
    assert loads(engine) == ["a", "b", "a"]


def test_of_adapters_in_use_the_one_with_the_fewest_requests_gives_way() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2)
    for name, adapter, count in (("a0", "a", 9), ("a1", "a", 9), ("b0", "b", 3), ("c", "c", 3), ("a2", "a", 3)):
        add_request(scheduler, name, 3, count, adapter=adapter)
    engine.step()
    add_request(scheduler, "b1", 3, 3, adapter="b")
    engine.run()
    assert loads(engine) == ["a", "b", "c", "b"]


def test_a_request_that_is_held_back_may_be_aborted() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=1)
    first, second, third = (add_request(scheduler, name, 3, 6, adapter=name) for name in "abc")
    engine.step()
    assert scheduler.running_set.adapters.num_held_back == 2
    scheduler.finish(second, "abort")
    engine.run()
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("length", "abort", "length")
    assert loads(engine) == ["a", "c"]


def test_after_broken_steps_adapters_are_loaded_again() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2)
    requests = [add_request(scheduler, name, 3, 6, adapter=name) for name in "abc"]
    engine.step()
    engine.fail_steps("the reason")
    engine.run()
    assert sorted(loads(engine)) == ["a", "a", "b", "b", "c"]
    for request in requests:
        check_result(request)


def test_a_request_that_leaves_before_its_step_takes_its_adapter_along() -> None:
    """Nobody need hold an adapter that no request has: what was to be copied is copied no more."""
    scheduler, _ = make_engine(**SIZES, max_loras=2)
    slots = scheduler.running_set.adapters
    one, other = (add_request(scheduler, name, 3, 6, adapter="a") for name in ("one", "other"))
    assert slots.enter(one) == slots.enter(other) == 1
    slots.leave(one)
    assert slots.loads == [(1, "a")]
    slots.leave(other)
    assert slots.loads == []
    assert slots.enter(one) == 1
    assert slots.loads == [(1, "a")]


def test_an_urgent_request_without_a_slot_preempts_nobody() -> None:
    scheduler, engine = make_engine(**SIZES | {"max_num_seqs": 1}, max_loras=1, arguments={"policy": "priority"})
    first = add_request(scheduler, "first", 3, 6, adapter="a", priority=1)
    engine.step()
    add_request(scheduler, "urgent", 3, 6, adapter="b", priority=0)
    engine.run()
    assert first.num_preemptions == 0


def test_a_flood_of_one_adapter_keeps_no_other_waiting() -> None:
    """1,000 requests of one are there; five of another, and one without, come in with the next ones to be admitted."""
    scheduler, engine = make_engine(**SIZES, max_loras=2)
    flood = [add_request(scheduler, f"a{i}", 3, 4, adapter="a") for i in range(1000)]
    for _ in range(6):
        engine.step()
    others = [add_request(scheduler, f"b{i}", 3, 4, adapter="b") for i in range(5)]
    others.append(add_request(scheduler, "none", 3, 4))
    waiting, ended = set(others), dict[str, int]()  # how many of the flood had ended when it ended
    before = sum(request.status is Status.FINISHED for request in flood)
    while waiting:
        engine.step()
        for request in [request for request in waiting if request.status is Status.FINISHED]:
            waiting.remove(request)
            ended[request.request_id.name] = sum(one.status is Status.FINISHED for one in flood) - before
    assert before < 12
    assert ended["none"] <= 12, "four run already"
    assert all(ended[f"b{turn}"] <= 12 + 2 * turn for turn in range(5))


def test_turns_of_adapters_that_are_gone_are_forgotten() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2)
    for i in range(300):
        add_request(scheduler, f"{i}", 3, 2, adapter=f"{i}")
        engine.run()
    assert len(scheduler.running_set.adapters._turns) <= 66


def test_adapters_with_whole_matrices_run_in_the_first_slots_alone() -> None:
    """Others take those last, and leave them to one that waits."""
    scheduler, engine = make_engine(**SIZES, max_loras=2, whole_loras=1)
    for name, adapter in (("1", "a"), ("2", f"b{WHOLE}"), ("3", f"c{WHOLE}"), ("4", "d")):
        add_request(scheduler, name, 3, 6, adapter=adapter)
    output = engine.step()
    assert output is not None
    assert list(output.adapter_loads) == [(2, "a"), (1, f"b{WHOLE}")]
    assert names_of(output) == ["1", "2"]
    engine.run()
    slots = {adapter: slot for output in engine.outputs for slot, adapter in output.adapter_loads}
    assert slots[f"c{WHOLE}"] == 1
    assert sorted(loads(engine)[2:]) == [f"c{WHOLE}", "d"]


def test_a_slot_with_room_for_matrices_stays_free_while_another_is_idle() -> None:
    scheduler, engine = make_engine(**SIZES, max_loras=2, whole_loras=1)
    add_request(scheduler, "1", 3, 2, adapter="a")
    engine.run()
    for name, adapter in (("2", "d"), ("3", f"b{WHOLE}")):
        add_request(scheduler, name, 3, 2, adapter=adapter)
    output = engine.step()
    assert output is not None
    assert list(output.adapter_loads) == [(2, "d"), (1, f"b{WHOLE}")]
    engine.run()
