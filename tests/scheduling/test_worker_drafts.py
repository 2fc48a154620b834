"""WorkerDrafts: what a network drafted behind a step, until the next step asks for it."""

import pytest

from compiled_llm import SamplingParams
from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.methods import network_source
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler_output import StartedRequest
from compiled_llm.scheduling.worker_drafts import WorkerDrafts


def request(name: str) -> Request:
    made = Request(RequestId(name), [5, 6], SamplingParams(), 0, frozenset(), 20, 0.0)
    made.takes_drafts = True
    return made


def test_drafts_are_given_once_as_many_as_are_asked_for() -> None:
    source, one, other = WorkerDrafts(3, adapts=False, reads_tokens=True), request("a"), request("b")
    source.take([one, other], [(7, 8, 9), (4,)])
    assert source.propose([one, other], [2, 3]) == [(7, 8), (4,)]
    assert source.propose([one, other], [2, 3]) == [(), ()]


def test_drafts_after_other_tokens_are_lost() -> None:
    source, one = WorkerDrafts(3, adapts=False, reads_tokens=True), request("a")
    source.take([one], [(7, 8, 9)])
    one.output_token_ids.append(3)
    assert source.propose([one], [3]) == [()]


def test_a_request_that_has_ended_or_takes_none_has_none() -> None:
    source, ended, without, gone = (
        WorkerDrafts(3, adapts=False, reads_tokens=True),
        request("a"),
        request("b"),
        request("c"),
    )
    ended.end("stop", None)
    without.takes_drafts = False
    source.take([ended, without, gone], [(7,), (8,), (9,)])
    source.end(gone)
    assert source.propose([ended, without, gone], [3, 3, 3]) == [(), (), ()]
    source.end(ended)


def test_what_was_told_or_found_in_the_cache_need_not_be_read() -> None:
    source, one, other = WorkerDrafts(3, False, reads_tokens=True), request("a"), request("b")
    one.output_token_ids.extend([7, 8, 9])
    assert source.num_unread([one, other]) == 7
    one.num_cached_tokens = 4
    assert source.num_unread([one, other]) == 3
    source.tell([other], SchedulerOutputBuilder())
    assert source.num_unread([one, other]) == 1
    assert WorkerDrafts(3, False, reads_tokens=False).num_unread([one, other]) == 0


def test_what_is_known_is_told_once_and_anew_after_an_admission() -> None:
    source, one, other, without = WorkerDrafts(3, False, reads_tokens=True), request("a"), request("b"), request("c")
    without.takes_drafts = False

    def told(*requests: Request) -> list[tuple[int, int, tuple[int, ...]]]:
        output = SchedulerOutputBuilder()
        source.tell(requests, output)
        return output.known_tokens

    one.output_token_ids.append(7)
    assert told(one, without, other) == [(0, 0, (5, 6, 7)), (2, 0, (5, 6))]
    assert told(other) == [(0, 2, ())]
    one.output_token_ids += [8, 9]
    assert told(one, without, other) == [(0, 3, (8, 9)), (2, 2, ())]
    source.admit([StartedRequest(one.request_id, one.sampling_params, 0, (), ())])
    assert told(one, other) == [(0, 0, (5, 6, 7, 8, 9)), (1, 2, ())]
    source.end(other)
    assert told(other) == [(0, 0, (5, 6))]


def test_what_reads_no_tokens_is_told_none() -> None:
    source, output = WorkerDrafts(3, adapts=False, reads_tokens=False), SchedulerOutputBuilder()
    source.tell([request("a")], output)
    assert output.known_tokens == []


@pytest.mark.parametrize("tree", [None, "auto"])
@pytest.mark.parametrize(
    ("method", "reads"),
    [("draft_model", True), ("eagle3", True), ("mtp", True), ("medusa", False), ("layer_skip", False)],
)
def test_which_networks_read_tokens(method: str, reads: bool, tree: str | None) -> None:
    if tree is not None and method in ("mtp", "layer_skip"):
        pytest.skip("has no trees")
    model = {"model": "m"} if method in ("draft_model", "eagle3", "medusa") else {}
    source = network_source(
        SpeculativeConfig(method=method, num_speculative_tokens=4, speculative_token_tree=tree, **model)
    )
    output = SchedulerOutputBuilder()
    source.tell([request("a")], output)
    assert bool(output.known_tokens) == reads
