"""Which replica gets a prompt: by prefix, adapter and load, never much busier than the least busy one."""

import itertools
import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_llm.routing.router import RoutedPrompt, Router
from compiled_llm.scheduling.block_pool import BlockPool
from compiled_llm.scheduling.request import Request
from tests.fake_engine import cache_over, make_request

SIZE = 4
IDLE = {"a": 0, "b": 0, "c": 0}


def router(replicas: str = "abc", most_imbalance: int = 100, num_blocks: int = 1000, num_adapters: int = 2) -> Router:
    made = Router(SIZE, most_imbalance)
    for name in replicas:
        made.add(name, num_blocks, num_adapters)
    return made


def prompt(group: int, *own: int, length: int = 40, adapter: str = "", salt: str = "") -> RoutedPrompt:
    """One that begins as others of its group."""
    return RoutedPrompt.of([*range(1000 * group, 1000 * group + length), *own], SIZE, adapter, salt)


def test_a_prompt_follows_the_longest_prefix() -> None:
    routing = router()
    assert routing.send("b", prompt(1, length=20)) == 20
    assert routing.send("c", prompt(1)) == 40
    assert routing.choose(prompt(1, 5, 6, 7), IDLE) == "c"
    assert routing.send("c", prompt(1, 5, 6, 7)) == 43 - 36, "what is not known to be there is computed"
    assert routing.choose(prompt(1, salt="other"), IDLE) == "a", "a salt keeps blocks apart"


def test_a_prefix_of_less_than_half_does_not_decide() -> None:
    """Else the first engine would get all prompts of one system message, and the cache of no other were used."""
    routing = router()
    routing.send("a", prompt(1, length=20))
    assert routing.choose(prompt(1, *range(500, 540), length=20), IDLE) == "b"
    assert routing.choose(prompt(1, *range(500, 515), length=20), IDLE) == "a"


def test_an_adapter_is_followed_where_no_prefix_is_known() -> None:
    routing = router()
    routing.send("b", prompt(1, adapter="x"))
    assert routing.choose(prompt(2, adapter="x"), IDLE) == "b"
    assert routing.choose(prompt(2), IDLE) == "a"
    assert routing.choose(prompt(1), IDLE) == "a", "an adapter's keys are no others'"
    for name in ("y", "z"):
        routing.send("b", prompt(1, adapter=name))
    assert routing.choose(prompt(2, adapter="x"), IDLE) == "a", "it keeps two, and has had two others since"
    routing.send("c", prompt(3, adapter="y"))
    assert routing.choose(prompt(1, 7, adapter="y"), IDLE) == "b", "a prefix comes first"


def test_then_the_least_busy_one_and_of_idle_ones_that_with_more_room() -> None:
    routing = router()
    assert routing.choose(prompt(1), {"a": 5, "b": 4, "c": 6}) == "b"
    routing.send("a", prompt(1))
    routing.send("b", prompt(2, length=20))
    assert routing.choose(prompt(3), IDLE) == "c"
    routing.send("c", prompt(3))
    assert routing.choose(prompt(4), IDLE) == "b"
    full = router(num_blocks=0)
    turns = []
    for _ in range(6):
        turns.append(full.choose(prompt(1), IDLE))
        full.send(turns[-1], prompt(1))
    assert turns == [*"abcabc"], "without caches they take turns"


def test_one_that_is_too_busy_is_not_taken_whatever_it_holds() -> None:
    routing = router()
    routing.send("a", prompt(1, adapter="x"))
    again = prompt(1, 9, adapter="x")
    assert routing.choose(again, {"a": 150, "b": 50, "c": 60}) == "a"
    assert routing.choose(again, {"a": 151, "b": 50, "c": 60}) == "b"
    assert routing.choose(again, {"b": 7, "c": 6}) == "c", "one that may not be chosen is not"


def test_a_replica_in_the_place_of_another_holds_nothing() -> None:
    routing = router("ab")
    routing.send("a", prompt(1, adapter="x"))
    routing.add("a", 1000, 2)
    routing.send("b", prompt(2))
    assert routing.send("a", prompt(1, adapter="x")) == 40


@settings(max_examples=60, deadline=None)
@given(data=st.data(), most=st.sampled_from([0, 10, 100]))
def test_the_imbalance_is_bounded(data: st.DataObject, most: int) -> None:
    """Prompts come and end at any time, replicas go and come back; no choice is above the bound, and no sum strays."""
    routing, loads, running = router(most_imbalance=most, num_blocks=30), dict(IDLE), list[tuple[str, int]]()
    largest = 0
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["come", "come", "come", "end", "die"]))
        if action == "come":
            one = prompt(data.draw(st.integers(0, 3)), length=data.draw(st.integers(1, 40)),
                         adapter=data.draw(st.sampled_from(["", "x", "y", "z"])))  # fmt: skip
            able = data.draw(st.sets(st.sampled_from(sorted(loads)), min_size=1))
            name = routing.choose(one, {name: loads[name] for name in able})
            least = min(loads[other] for other in able)
            assert loads[name] <= least + most
            left = routing.send(name, one)
            assert 1 <= left <= one.num_tokens
            largest = max(largest, left)
            loads[name] += left
            if able == loads.keys():
                assert loads[name] <= least + most + largest
            running.append((name, left))
        elif running:
            at = data.draw(st.integers(0, len(running) - 1))
            ended = [running.pop(at)] if action == "end" else [one for one in running if one[0] == running[at][0]]
            running = [one for one in running if one not in ended] if action == "die" else running
            for name, left in ended:
                loads[name] -= left
            if action == "die":
                routing.add(ended[0][0], 30, 2)
    assert all(load >= 0 for load in loads.values())


# -- With the scheduler's own block pools and prefix caches


class Simulated:
    """Replicas with real block pools and prefix caches. A request is computed as it comes, and ends in its turn.

    Args:
        choose: (prompt, loads) -> the replica.

    Attributes:
        num_hits: tokens that were found in caches.
    """

    def __init__(self, num_blocks: int, choose: Callable[[RoutedPrompt, dict[int, int]], int]) -> None:
        self._caches = [cache_over(BlockPool(num_blocks), SIZE) for _ in range(2)]
        self._running: list[deque[Request]] = [deque(), deque()]
        self._choose, self.num_hits = choose, 0

    def serve(self, tokens: list[int]) -> None:
        loads = {number: sum(request.num_tokens for request in running) for number, running in enumerate(self._running)}
        number = self._choose(RoutedPrompt.of(tokens, SIZE), loads)
        cache, request = self._caches[number], make_request("any", tokens, 1)
        found, _ = cache.find(request)
        for block in found:
            cache.pool.share(block)
        new = cache.pool.allocate(-(-len(tokens) // SIZE) - len(found))
        assert new is not None
        request.block_ids = [*found, *new]
        request.num_published_blocks = len(found)
        cache.publish(request, len(tokens))
        self.num_hits += len(found) * SIZE
        self._running[number].append(request)

    def end_one(self, rng: random.Random) -> None:
        number = rng.choice([number for number, running in enumerate(self._running) if running])
        self._caches[number].pool.free(self._running[number].popleft().block_ids)

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running))


GROUPS, PREFIX, PROMPTS = 16, 60, 960  # a prefix is 15 blocks


def hits(seed: int, most_at_once: int, by_router: bool) -> int:
    """960 prompts of 16 groups, in random order, over two replicas whose caches hold 8 or 9 prefixes."""
    num_blocks = GROUPS // 2 * PREFIX // SIZE + 16  # and one that comes
    routing, turns = Router(SIZE, 300), itertools.cycle((0, 1))
    for number in range(2):
        routing.add(number, num_blocks)

    def choose(one: RoutedPrompt, loads: dict[int, int]) -> int:
        number = routing.choose(one, loads) if by_router else next(turns)
        routing.send(number, one)
        return number

    rng, replicas = random.Random(seed), Simulated(num_blocks, choose)
    for _ in range(PROMPTS):
        group = rng.randrange(GROUPS)
        replicas.serve([*range(1000 * group, 1000 * group + PREFIX), *(rng.randrange(10**6) for _ in range(4))])
        while replicas.num_running >= rng.randint(1, most_at_once):
            replicas.end_one(rng)
    return replicas.num_hits


@pytest.mark.parametrize("most_at_once", [1, 6])
def test_16_groups_over_2_replicas_have_more_hits_than_by_turns(most_at_once: int) -> None:
    by_turns, by_router = (hits(0, most_at_once, by_router) for by_router in (False, True))
    assert by_router >= 1.6 * by_turns, (by_router, by_turns)
    assert by_router > 0.9 * PREFIX * PROMPTS
