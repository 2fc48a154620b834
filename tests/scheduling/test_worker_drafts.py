"""WorkerDrafts: what a network drafted behind a step, until the next step asks for it."""

from compiled_llm import SamplingParams
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.worker_drafts import WorkerDrafts


def request(name: str) -> Request:
    made = Request(RequestId(name), [5, 6], SamplingParams(), 0, frozenset(), 20, 0.0)
    made.takes_drafts = True
    return made


def test_drafts_are_given_once_as_many_as_are_asked_for() -> None:
    source, one, other = WorkerDrafts(3, adapts=False), request("a"), request("b")
    source.take([one, other], [(7, 8, 9), (4,)])
    assert source.propose([one, other], [2, 3]) == [(7, 8), (4,)]
    assert source.propose([one, other], [2, 3]) == [(), ()]


def test_drafts_after_other_tokens_are_lost() -> None:
    source, one = WorkerDrafts(3, adapts=False), request("a")
    source.take([one], [(7, 8, 9)])
    one.output_token_ids.append(3)
    assert source.propose([one], [3]) == [()]


def test_a_request_that_has_ended_or_takes_none_has_none() -> None:
    source, ended, without, gone = WorkerDrafts(3, adapts=False), request("a"), request("b"), request("c")
    ended.end("stop", None)
    without.takes_drafts = False
    source.take([ended, without, gone], [(7,), (8,), (9,)])
    source.end(gone)
    assert source.propose([ended, without, gone], [3, 3, 3]) == [(), (), ()]
    source.end(ended)
