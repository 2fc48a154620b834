"""DraftPlanner: what drafts of several requests are worth that came together, and of those that come and go."""

from collections.abc import Sequence

import pytest

from compiled_llm.scheduling.decode_costs import DecodeCosts
from compiled_llm.scheduling.draft_account import MOST, SETTLED, SHARE
from compiled_llm.scheduling.draft_gains import LEAST_OF_MEAN
from compiled_llm.scheduling.draft_lengths import Chances
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.worker_drafts import WorkerDrafts
from tests.fake_engine import make_request
from tests.scheduling.test_draft_planner import Server, _clock  # noqa: F401  (a fixture)


def server_of_four(drafting: float) -> Server:
    source = WorkerDrafts(3, adapts=True, reads_tokens=True)
    return Server(source, drafting=drafting, max_num_seqs=4, max_model_len=400)


def all_of_which_may_draft(server: Server, requests: list[Request]) -> list[Request]:
    assert all(server.drafts._may_draft(request) for request in requests)
    return requests


def forget_chances(server: Server, requests: Sequence[Request]) -> None:
    """From now on drafts of all are taken to be right as often."""
    server.drafts._of_all = Chances()
    for request in requests:
        history = server.drafts._histories[request]
        history.proposal, history.chances = (), Chances(server.drafts._of_all)


def seconds_lost(server: Server, num_right: Sequence[int], length: int = 120, rounds: int = 6) -> float:
    """By rounds of as many requests, each of which would take a second a token without drafts."""
    server.num_right = [*num_right] * rounds
    for _ in range(rounds):
        server.add(len(num_right), length)
        server.serve()
    return Server.now - rounds * length


def test_what_all_requests_but_the_last_gain_pays_for_less() -> None:
    server = server_of_four(1.5)
    lost = seconds_lost(server, (0, 3, 3, 3), length=380)
    assert server.drafts.account._steps[4, True].share < SHARE, "it was emptied; by the average gain it would be full"
    assert 0.0 < lost < 0.02 * 6 * 380


def test_what_the_last_request_gains_pays_for_all() -> None:
    server = server_of_four(0.75)
    assert seconds_lost(server, (1, 1, 1, 1)) < -6 * 10
    assert server.drafts.account._steps[4, True].balance > MOST - 1.0


def test_a_request_that_gains_nothing_does_not_take_much_from_the_others() -> None:
    """Each gains three tokens a step, a share of which pays for the network."""
    server = server_of_four(0.5)
    assert LEAST_OF_MEAN * 0.75 * 3 > 0.75
    server.num_right = (0, 3, 3, 3)
    requests = server.add(4, 380)
    while not requests[1].finish_reason:
        server.step()
    assert server.num_steps < 380 / 3


def test_what_others_gained_more_is_entered_when_the_slowest_ends() -> None:
    server = server_of_four(0.4)
    server.num_right = (0, 3, 3, 3)
    requests = server.add(4, 380)
    for _ in range(60):
        server.step()
    assert all(len(request.output_token_ids) > 100 for request in requests[1:])
    steps = server.drafts.account._steps[4, True]
    steps.balance = steps.with_reading = -5.0  # as if they had not paid
    server.step()
    server.scheduler.finish(requests[0], "abort")
    assert steps.balance == MOST
    steps.balance = steps.with_reading = -5.0
    server.scheduler.finish(requests[1], "abort")
    assert steps.balance < -4.0, "not twice"


def test_each_token_counts_alike_while_others_wait_or_come() -> None:
    server = server_of_four(0.4)
    server.num_right = (0, 3, 3, 3, 0)
    *_, last = server.add(5, 120)
    for _ in range(20):
        server.step()
    gained = server.drafts._gained
    assert gained(8, 4) == 2.0
    server.scheduler.finish(last, "abort")
    assert gained(8, 4) < 2.0
    server.scheduler.finish(server.scheduler.running[-1], "abort")
    server.add(1, 20)
    server.step()
    assert gained(8, 4) == 2.0, "another may come again"
    server.serve()
    server.add(4, 20)
    server.step()
    assert gained(8, 4) == pytest.approx(2.0 * LEAST_OF_MEAN), "of these the last one has gained nothing yet"


def test_a_fork_does_not_come_while_others_run() -> None:
    server = server_of_four(0.4)
    parent, *_ = server.add(2, 120)
    for _ in range(3):
        server.step()
    child = make_request("9", 3, 120)
    server.requests["9"] = child
    server.scheduler.fork(parent, child)
    server.step()
    assert server.drafts._gained(6, 3) < 2.0


def test_a_network_that_takes_long_has_more_of_its_drafts_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts behind each step as long as that pays: a step that verifies few pays as much for it."""
    server = server_of_four(0.4)
    requests = server.add(4, 120)
    for _ in range(SETTLED + 12):
        server.step()
    drafts, asked = server.drafts, all_of_which_may_draft(server, requests)
    drafts.costs = DecodeCosts([((4, 4), 1.0), ((4, 8), 1.4), ((4, 16), 2.4)], pads=False)
    chosen = []
    for network in (0.0, 2.0, 6.0):
        monkeypatch.setattr(drafts.account, "network", lambda kind, network=network: network)
        forget_chances(server, asked)
        chosen.append(sum(drafts._lengths(asked, [(1, 2, 3)] * 4, 12, beside_prompts=False)))
    assert chosen == [4, 8, 12]


@pytest.mark.parametrize("comes", [False, True])
def test_drafts_of_requests_that_are_behind_come_first_where_all_came_together(comes: bool) -> None:
    server = server_of_four(0.4)
    server.num_right = (0, 3, 3, 3)
    requests = server.add(3, 380)
    for _ in range(60):
        server.step()
    if comes:
        server.add(1, 380)
        server.step()
    asked = all_of_which_may_draft(server, requests)
    assert len(requests[0].output_token_ids) < 0.6 * len(requests[1].output_token_ids)
    forget_chances(server, asked)
    behind, *others = server.drafts._lengths(asked, [(1, 2, 3)] * 3, 5, beside_prompts=False)
    assert (behind == 3) is not comes
    assert sum(others) == 5 - behind
