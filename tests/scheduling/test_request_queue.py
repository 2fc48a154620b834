"""RequestQueue: the first by rank, the first of the short ones, and removal from the middle."""

import random

import pytest

from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.request_queue import RequestQueue
from tests.fake_engine import make_request


def ranked(rank: int, lacking: int = 1, priority: int = 0) -> Request:
    request = make_request(f"{priority}/{rank}", lacking, 1)
    request.rank = (priority, rank)
    return request


def queue_of(*requests: Request) -> RequestQueue:
    queue = RequestQueue()
    for request in requests:
        queue.add(request)
    return queue


def test_the_first_is_that_of_the_lowest_rank_whatever_it_lacks() -> None:
    a, b, c = ranked(1, 50), ranked(2, 1), ranked(0, 7, priority=1)
    queue = queue_of(c, b, a)
    order = []
    while (request := queue.first()) is not None:
        order.append(request)
        queue.remove(request)
    assert order == [a, b, c]


def test_looking_does_not_take() -> None:
    queue = queue_of(ranked(0))
    assert queue.first() is queue.first()
    assert len(queue) == 1


def test_the_first_of_those_that_lack_no_more_than() -> None:
    long, short, shorter = ranked(0, 40), ranked(1, 9), ranked(2, 3)
    queue = queue_of(long, short, shorter)
    assert queue.first(40) is long
    assert queue.first(39) is short
    assert queue.first(9) is short
    assert queue.first(8) is shorter
    assert queue.first(3) is shorter
    assert queue.first(2) is None


def test_what_is_computed_already_is_not_lacking() -> None:
    request = ranked(0, 40)
    request.num_computed_tokens = 38  # swapped out
    assert queue_of(request).first(2) is request


def test_contains_len_and_iteration_are_of_those_queued() -> None:
    a, b, c = (ranked(n) for n in range(3))
    queue = queue_of(a, b, c)
    queue.remove(b)
    assert a in queue
    assert b not in queue
    assert len(queue) == 2
    assert set(queue) == {a, c}


def test_a_removed_request_can_be_added_again_and_counts_once() -> None:
    a, b = ranked(0), ranked(1)
    queue = queue_of(a, b)
    queue.remove(a)
    assert queue.first() is b
    queue.add(a)
    assert queue.first() is a
    queue.remove(a)
    assert queue.first() is b
    queue.remove(b)
    assert queue.first() is None
    assert len(queue) == 0


def test_twice_at_once_is_a_fault() -> None:
    a = ranked(0)
    queue = queue_of(a)
    with pytest.raises(AssertionError, match="queued already"):
        queue.add(a)
    with pytest.raises(KeyError):
        queue.remove(ranked(0))


def test_dead_entries_are_dropped_though_they_never_come_to_the_top() -> None:
    first = ranked(0)
    queue = queue_of(first)
    for n in range(1, 2000):
        queue.add(request := ranked(n))
        queue.remove(request)
    assert sum(map(len, queue._heaps.values())) < 100
    assert queue.first() is first


def test_those_set_aside_wait_unseen() -> None:
    a, b, c, late = ranked(0), ranked(1, 9), ranked(2), ranked(3)
    queue = queue_of(a, b, c)
    queue.serve_only({b, late})
    assert (queue.first(), queue.first(most_tokens=4), queue.num_aside) == (b, None, 2)
    assert (len(queue), set(queue), a in queue) == (3, {a, b, c}, True)
    queue.add(late)
    queue.remove(b)
    queue.remove(a)
    assert queue.first() is late
    queue.add(a)  # aside again
    assert (queue.first(), set(queue)) == (late, {a, c, late})
    queue.serve_only({a})
    assert (queue.first(), queue.num_aside) == (a, 2)
    queue.serve_only(None)
    assert (queue.first(), queue.num_aside, len(queue)) == (a, 0, 3)
    queue.remove(a)
    assert queue.first() is c
    with pytest.raises(AssertionError, match="is queued already"):
        queue.add(late)


def test_random_use_against_a_sorted_list() -> None:
    rng = random.Random(0)
    queue, expected = RequestQueue(), []
    removed = []
    for n in range(5000):
        if removed and rng.random() < 0.2:
            request = removed.pop()  # back in, as after a preemption
            queue.add(request)
            expected.append(request)
        elif not expected or rng.random() < 0.5:
            request = ranked(n, rng.randint(1, 64), priority=rng.randint(0, 2))
            queue.add(request)
            expected.append(request)
        else:
            request = queue.first() if rng.random() < 0.5 else rng.choice(expected)
            queue.remove(request)
            expected.remove(request)
            removed.append(request)
        expected.sort(key=lambda request: request.rank)
        assert queue.first() is (expected[0] if expected else None)
        assert len(queue) == len(expected)
        most = rng.choice([1, 3, 7, 15, 31, 63])  # the most that a heap can hold: nothing is hidden behind its first
        short = [request for request in expected if request.num_tokens <= most]
        assert queue.first(most) is (short[0] if short else None)
    assert set(queue) == set(expected)
