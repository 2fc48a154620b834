"""WorkerDrafts: what a network drafted behind a step, until the next step asks for it."""

from compiled_llm import SamplingParams
from compiled_llm.scheduling.output_builder import SchedulerOutputBuilder
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.scheduling.scheduler_output import StartedRequest
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


def test_what_is_known_is_told_once_and_anew_after_steps_that_told_nothing_or_an_admission() -> None:
    source, one, other, without = WorkerDrafts(3, adapts=False), request("a"), request("b"), request("c")
    without.takes_drafts = False

    def told(*admitted: Request) -> list[tuple[int, int, tuple[int, ...]]]:
        output = SchedulerOutputBuilder()
        output.admissions = [StartedRequest(each.request_id, each.sampling_params, 0, (), ()) for each in admitted]
        source.tell([one, without, other], output)
        return output.known_tokens

    one.output_token_ids.append(7)
    assert told(one, other, without) == [(0, 0, (5, 6, 7)), (2, 0, (5, 6))]
    one.output_token_ids += [8, 9]
    assert told() == [(0, 3, (8, 9)), (2, 2, ())]
    assert told(one) == [(0, 0, (5, 6, 7, 8, 9)), (2, 2, ())]
    source.tell_nothing()
    assert told() == [(0, 0, (5, 6, 7, 8, 9)), (2, 0, (5, 6))]
