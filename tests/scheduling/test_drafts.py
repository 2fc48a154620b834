"""Drafts on a fake model: whatever is drafted, requests get the tokens of plain decoding, and only these are kept.

``LIMITS`` of the fake engine: 4 requests, 16 tokens a step, blocks of 4 tokens, requests of up to 64 tokens.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.scheduling.drafter import CheckedDrafter, draft_length
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.worker import StepResult
from tests.fake_engine import (
    VOCABULARY,
    FakeDrafter,
    FakeEngine,
    add,
    add_request,
    both_loops,
    check_result,
    drafters,
    expected_tokens,
    make_child,
    make_request,
    make_scheduler,
    work_of,
)

kinds = pytest.mark.parametrize("kind", ["right", "wrong", "half right"])


def drafting(num_blocks: int, kind: str, num_tokens: int = 3, **arguments) -> Scheduler:
    return make_scheduler(num_blocks, drafter=drafters(num_tokens)[kind], **arguments)


def steps_of(engine: FakeEngine, request: Request) -> list[int]:
    name = request.request_id.name
    return [work_of(output)[name] for output in engine.outputs if name in work_of(output)]


# -- Tokens


@both_loops
@pytest.mark.parametrize(
    ("kind", "steps"), [("right", [5, 4, 4, 3]), ("wrong", [5, *[4] * 8, 3, 2, 1]), ("half right", None)]
)
def test_tokens_are_those_of_plain_decoding(kind: str, steps: list[int] | None, overlap: bool) -> None:
    scheduler = drafting(20, kind)
    engine = FakeEngine(scheduler, overlap=overlap)
    request = add_request(scheduler, "x", 5, 12)
    engine.run()
    check_result(request)
    assert request.finish_reason == "length"
    found = steps_of(engine, request)
    assert found == steps or (steps is None and 4 < len(found) < 12)
    counts = scheduler.counts
    assert counts.num_accepted_draft_tokens == 12 - len(found)
    assert counts.num_draft_tokens == sum(found) - 5 - (len(found) - 1)


@both_loops
@kinds
def test_chunks_and_others_beside(kind: str, overlap: bool) -> None:
    scheduler = drafting(60, kind, max_num_seqs=3)
    engine = FakeEngine(scheduler, overlap=overlap)
    requests = [make_request(f"{n}", length, 9) for n, length in enumerate([40, 3, 17, 1, 30])]
    no_drafts = make_request("none", 6, 9)
    no_drafts.sampling_params = SamplingParams(max_tokens=9, num_speculative_tokens=0)
    add(scheduler, *requests, no_drafts)
    engine.run()
    for request in (*requests, no_drafts):
        check_result(request)
        assert len(request.output_token_ids) == 9
    assert set(steps_of(engine, no_drafts)[1:]) == {1}


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_nothing_follows_a_stop_token(index: int) -> None:
    """The stop token is the first, the second... of the tokens that one step accepts."""
    prompt = list(range(5))
    stop = frozenset(expected_tokens(prompt, 2 + index)[-1:])
    scheduler = drafting(20, "right")
    request = add_request(scheduler, "x", prompt, 20, stop)
    FakeEngine(scheduler).run()
    assert (len(request.output_token_ids), request.finish_reason) == (2 + index, "stop")
    check_result(request)


@kinds
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@both_loops
def test_preemption(mode: str, kind: str, overlap: bool) -> None:
    scheduler = drafting(14, kind, num_swap_blocks=40, arguments={"preemption_mode": mode})
    engine = FakeEngine(scheduler, overlap=overlap)
    requests = add(scheduler, *[make_request(f"{n}", 6, 25) for n in range(4)])
    engine.run()
    assert scheduler.num_preemptions > 0
    for request in requests:
        check_result(request)
        assert len(request.output_token_ids) == 25


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@kinds
def test_a_preemption_while_drafts_are_verified(kind: str, mode: str) -> None:
    scheduler = drafting(
        100, kind, num_swap_blocks=20, arguments={"preemption_mode": mode, "policy": "priority"}, max_num_seqs=1
    )
    engine = FakeEngine(scheduler, overlap=True)
    request = add_request(scheduler, "x", 3, 8, priority=1)
    while not request.draft_token_ids:
        engine.step()
    num_known = len(request.output_token_ids)
    add(scheduler, make_request("urgent", 3, 2))
    engine.step()
    assert request.status is Status.WAITING
    assert len(request.output_token_ids) == num_known + 1, "of the step in flight only the first token counts"
    engine.run()
    assert len(request.output_token_ids) == 8
    check_result(request)


@kinds
def test_children_of_a_parent_whose_drafts_are_verified(kind: str) -> None:
    for steps in range(1, 4):
        scheduler = drafting(60, kind)
        engine = FakeEngine(scheduler, overlap=True)
        parent = add_request(scheduler, "parent", 5, 12)
        for _ in range(2 * steps):
            engine.step()
        children = [make_child(parent, f"{steps}/{n}", 6) for n in range(2)]
        for child in children:
            scheduler.fork(parent, child)
        engine.run()
        for request in (parent, *children):
            check_result(request)


# -- Blocks


@both_loops
@kinds
def test_only_accepted_tokens_can_be_found(kind: str, overlap: bool) -> None:
    scheduler = drafting(60, kind, prefix_caching=True)
    engine = FakeEngine(scheduler, overlap=overlap)
    request = add_request(scheduler, "x", 6, 10)
    drafted = set()
    while scheduler.has_unfinished_requests():
        drafts, known = tuple(request.draft_token_ids), request.prompt_token_ids + request.output_token_ids
        if drafts:
            drafted.add((*known, *drafts))
        engine.step()
    tokens = request.prompt_token_ids + request.output_token_ids
    again = make_request("again", tokens, 2)
    assert len(scheduler.prefix_cache.find(again)[0]) == 15 // 4
    for sequence in drafted:
        right = next((i for i, (a, b) in enumerate(zip(sequence, tokens, strict=False)) if a != b), len(tokens))
        found = scheduler.prefix_cache.find(make_request("drafted", [*sequence, 0], 1))[0]
        assert len(found) <= min(right, len(tokens) - 1) // 4
    add(scheduler, again)
    engine.run()
    check_result(again)


def test_nobody_is_preempted_for_drafts() -> None:
    scheduler = drafting(6, "right", max_num_seqs=2)
    engine = FakeEngine(scheduler)
    requests = add(scheduler, make_request("a", 4, 8), make_request("b", 4, 8))
    engine.run()
    assert scheduler.num_preemptions == 0
    assert all(len(request.output_token_ids) == 8 for request in requests)


# -- The budget


def test_drafts_leave_half_of_the_step_to_prompts() -> None:
    scheduler = drafting(60, "wrong", 5, max_num_seqs=12)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("a", 3, 20), make_request("b", 3, 20))
    engine.step()
    assert work_of(engine.step()) == {"a": 6, "b": 6}
    add(scheduler, make_request("long", 40, 2))
    assert work_of(engine.step()) == {"a": 6, "b": 3, "long": 7}, "of 14 tokens that a and b leave, half"


def test_beside_prompts_drafts_take_the_logits_rows_that_requests_leave() -> None:
    scheduler = drafting(60, "wrong", 5, max_num_batched_tokens=40)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("a", 3, 20), make_request("b", 3, 20))
    engine.step()
    add(scheduler, make_request("long", 50, 2))
    assert work_of(engine.step()) == {"a": 2, "b": 1, "long": 37}, "a row of 4 is left"
    add(scheduler, make_request("another", 30, 2))
    assert work_of(engine.step()) == {"a": 1, "b": 1, "long": 13, "another": 25}


def test_without_chunks_drafts_leave_a_prompt_all_that_it_lacks() -> None:
    scheduler = drafting(60, "wrong", 5, chunked_prefill=False, max_num_batched_tokens=64, max_num_seqs=12)
    engine = FakeEngine(scheduler)
    add(scheduler, make_request("a", 3, 20))
    engine.step()
    assert work_of(engine.step()) == {"a": 6}
    add(scheduler, make_request("long", 60, 2))
    assert work_of(engine.step()) == {"a": 4, "long": 60}


def test_the_token_after_drafts_is_fed_back_from_its_row() -> None:
    """A request that takes no drafts runs beside one that does, in two steps at once."""
    scheduler = drafting(60, "right", 2)
    engine = FakeEngine(scheduler, overlap=True)
    plain = make_request("plain", 3, 9)
    plain.sampling_params = SamplingParams(max_tokens=9, num_speculative_tokens=0)
    drafted, _ = add(scheduler, make_request("drafted", 3, 9), plain)
    engine.run()
    assert any(output.feedback == (3,) or output.feedback == (-1, 3) for output in engine.outputs)
    check_result(drafted)
    check_result(plain)


# -- Ends


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_row_without_a_token_ends_the_request(index: int) -> None:
    """With the tokens before that row, as in plain decoding."""
    scheduler = drafting(20, "right")
    engine = FakeEngine(scheduler)
    request = add_request(scheduler, "x", 3, 20)
    engine.step()
    output = scheduler.schedule()
    sampled = list(engine.runner.execute(output).sampled_token_ids)
    sampled[index] = -1
    assert scheduler.update(output, StepResult(Bucket("decode", 4, 1), tuple(sampled))) == [request]
    assert request.finish_reason == "error"
    assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 1 + index)
    assert scheduler.pool.num_used == 0


@kinds
def test_aborts_and_broken_steps_while_drafts_are_verified(kind: str) -> None:
    for how in ("abort", "break"):
        scheduler = drafting(40, kind)
        engine = FakeEngine(scheduler, overlap=True)
        request, other = add(scheduler, make_request("x", 3, 20), make_request("other", 3, 20))
        while not request.draft_token_ids:
            engine.step()
        if how == "abort":
            scheduler.finish(request, "abort")
        else:
            assert engine.fail_steps("the reason") == []
            assert not request.draft_token_ids
        engine.run()
        assert (request.finish_reason, other.finish_reason) == ("abort" if how == "abort" else "length", "length")
        check_result(request)
        check_result(other)
        assert scheduler.pool.num_used == 0


# -- What a drafter may propose


@pytest.mark.parametrize("proposal", [[1, 2, 3], [VOCABULARY], [-1], [True], [1.0]])
def test_a_bad_proposal_is_refused_by_name(proposal: list) -> None:
    drafter = FakeDrafter(2, lambda: 0)
    drafter.propose = lambda request_id, token_ids: proposal  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the drafter must propose"):
        CheckedDrafter(drafter, VOCABULARY).propose([make_request("x", [1], 4)], [2])


@pytest.mark.parametrize("num_tokens", [0, 64, True, 2.0, None])
def test_a_drafter_of_a_wrong_length_is_refused_by_name(num_tokens: Any) -> None:
    with pytest.raises(ValueError, match="drafter must have num_tokens, an integer from 1 to 63"):
        draft_length(FakeDrafter(num_tokens, lambda: 0))


def test_what_is_no_drafter_is_refused_by_name() -> None:
    no_drafter: Any = SimpleNamespace(num_tokens=3)
    with pytest.raises(ValueError, match=r"propose\(request_id, token_ids\), given SimpleNamespace without it"):
        draft_length(no_drafter)
    assert draft_length(None) == 0
    assert draft_length(FakeDrafter(63, lambda: 0)) == 63


def test_a_request_of_one_token_takes_no_drafts() -> None:
    scheduler = drafting(20, "right")
    request = add_request(scheduler, "x", 3, 1)
    assert (request.takes_drafts, request.waits_for_tokens) == (False, False)


def test_drafts_in_flight_are_waited_for_though_looking_for_more_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    source = CheckedDrafter(drafters(3)["right"], VOCABULARY)
    source.adapts = True
    seconds = tuple(((size, size * length), 1.0) for size in (1, 2, 4) for length in (1, 2, 4))
    scheduler = make_scheduler(20, source=source, arguments={"decode_seconds": seconds})
    engine = FakeEngine(scheduler, overlap=True)
    request = add_request(scheduler, "x", 5, 24)
    while not request.draft_token_ids:
        engine.step()
    assert scheduler.drafts is not None
    monkeypatch.setattr(scheduler.drafts.account, "looks", lambda kind, goes_on: False)  # as where they do not pay
    engine.run()
    check_result(request)
    assert len(request.output_token_ids) == 24


# -- What is sampled behind wrong drafts


class Reading(CheckedDrafter):
    """Notes that it was told of every draft that counted, each at its position, and of no other."""

    num_told = 0

    def read_samples(self, request: Request, start: int, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        known = [*request.prompt_token_ids, *request.output_token_ids]
        right = len(known) - start - 1
        assert known[start:] == list(sampled[: right + 1])
        assert drafts[:right] == list(sampled[:right])
        assert right == len(drafts) or drafts[right] != sampled[right]
        # Behind a wrong draft: what follows it.
        for place in range(right, len(drafts)):
            assert [sampled[place + 1]] == expected_tokens([*known[:start], *drafts[: place + 1]], 1)
        self.num_told += len(drafts)


@both_loops
@kinds
def test_a_source_that_asks_for_them_is_told_what_steps_sampled(kind: str, overlap: bool) -> None:
    source = Reading(drafters(3)[kind], VOCABULARY)
    scheduler = make_scheduler(14, source=source)
    engine = FakeEngine(scheduler, overlap=overlap)
    requests = [add_request(scheduler, f"{n}", length, 14) for n, length in enumerate([5, 12, 9, 3])]
    engine.run()
    for request in requests:
        check_result(request)
    assert scheduler.num_preemptions > 0
    lost = scheduler.counts.num_draft_tokens - source.num_told
    assert lost == 0 or (overlap and lost < source.num_told)
