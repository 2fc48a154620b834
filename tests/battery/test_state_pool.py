"""B1 for states: StatePool against a naive model of lists and dicts."""

import random
from collections import Counter

import pytest

from compiled_llm.scheduling.state_pool import StatePool
from tests.battery import sized


class World:
    """The pool, and beside it the model; each operation is done to both, and the answers compared.

    Attributes:
        users: slot -> how many need it, if any. names: slot -> the name of its snapshot. lru: snapshots that nobody
            needs, least recently used first.
    """

    def __init__(self, num_slots: int) -> None:
        self.pool, self.num_slots = StatePool(num_slots), num_slots
        self.users: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}
        self.lru: list[int] = []

    def allocate(self) -> None:
        busy = {*self.users, *self.names}
        slot = self.pool.allocate()
        if len(busy) < self.num_slots:
            assert slot is not None
            assert slot not in busy
        elif self.lru:
            assert slot == self.lru.pop(0), "another than the least recently used is evicted"
            del self.names[slot]
        else:
            assert slot is None
            return
        assert 1 <= slot <= self.num_slots
        self.users[slot] = 1

    def find_and_share(self, name: bytes) -> None:
        slot = self.pool.lookup(name)
        assert slot == next((own for own, given in self.names.items() if given == name), None)
        if slot is not None:
            self.share(slot)

    def share(self, slot: int) -> None:
        self.pool.share(slot)
        self.users[slot] += 1
        if slot in self.lru:
            self.lru.remove(slot)

    def free(self, slot: int) -> None:
        self.pool.free(slot)
        self.users[slot] -= 1
        if not self.users[slot]:
            del self.users[slot]
            if slot in self.names:
                self.lru.append(slot)

    def publish(self, slot: int, name: bytes) -> None:
        self.pool.publish(slot, name)
        if slot not in self.names and name not in self.names.values():
            self.names[slot] = name

    def forget(self, name: bytes) -> None:
        self.pool.forget(name)
        for slot, given in list(self.names.items()):
            if given == name:
                del self.names[slot]
                self.lru = [other for other in self.lru if other != slot]

    def withdraw(self, slot: int) -> None:
        self.pool.withdraw(slot)
        del self.names[slot]

    def check(self) -> None:
        self.pool.check_invariants(self.users)
        assert self.pool.num_used == len(self.users)
        assert self.pool.num_free == self.num_slots - len(self.users)
        assert {slot for slot in range(1, self.num_slots + 1) if self.pool.is_snapshot(slot)} == self.names.keys()
        assert set(self.pool.digests()) == set(self.names.values())
        assert self.pool.empty_slots() == set(range(1, self.num_slots + 1)) - self.users.keys() - self.names.keys()


@pytest.mark.parametrize("num_slots", [1, 2, 9])
@sized("num_operations", 3_000, 100_000)
def test_random_operations(num_operations: int, num_slots: int, battery_counts: Counter[str]) -> None:
    rng, world = random.Random(num_slots), World(num_slots)
    for _ in range(num_operations):
        used, name = list(world.users), bytes([rng.randrange(12)])
        private = [slot for slot in world.names if world.users[slot] == 1]
        world.users = +world.users  # a Counter keeps what it was asked for
        operation = rng.choice(
            ("allocate", "find", "share", "free", "free", "publish", "publish", "forget", "withdraw")
        )
        if operation == "allocate":
            world.allocate()
        elif operation == "find":
            world.find_and_share(name)
        elif operation == "forget" and rng.random() < 0.5:
            world.forget(name)
        elif operation == "withdraw" and private:
            world.withdraw(rng.choice(private))
        elif operation in ("share", "free", "publish") and used:
            slot = rng.choice(used)
            if operation == "publish":
                world.publish(slot, name)
            else:
                (world.share if operation == "share" else world.free)(slot)
        else:
            continue
        battery_counts[operation] += 1
        world.check()
    battery_counts["evictions"] += world.pool.num_evictions
    assert all(battery_counts.values())
    for slot in list(world.users.elements()):
        world.free(slot)
    world.pool.forget_all()
    assert len(world.pool.empty_slots()) == num_slots
