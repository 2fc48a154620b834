"""AdapterSlots: which adapters lie in the worker's slots, and which requests wait for one. Plain Python.

A request of an adapter runs only while the adapter has a slot. One that comes in when all slots are in use is held back
until a slot is free; requests of other adapters and of none pass it meanwhile. So that the adapters in use cannot keep
their slots for ever, the one with the fewest running requests takes no later ones while others wait: its slot is free
when these have ended.

So that an adapter's flood cannot keep others waiting within the slots, adapters take turns, and so do requests of none
among them (start-time fair queueing: Goyal et al., SIGCOMM 1996). An adapter's requests come in one a turn, the first
of them in the turn after that of the last request that was admitted.
"""

from collections import Counter

from compiled_llm.scheduling.request import Request

_LEAST_TURNS = 64  # that are kept


class AdapterSlots:
    """Slots from 1 to ``num_slots``. Adapters are known by their digests, "" is none.

    Attributes:
        loads: (slot, adapter) pairs that the next step copies before it runs, in this order.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.loads: list[tuple[int, str]] = []
        self._slots: dict[str, int] = {}  # the least recently used adapter first
        self._empty = list(range(num_slots, 0, -1))
        self._users: Counter[str] = Counter()  # running requests, of those that have some
        self._held_back: dict[str, dict[Request, None]] = {}
        self._first: tuple[int, ...] = (0, 0)  # rank of the first that is held back
        self._leaving = ""  # the adapter that takes no later requests
        self._turn = 0  # of the requests that were admitted, the largest
        self._turns: dict[str, int] = {}  # of each adapter's last request, where it is larger
        self._most_turns = _LEAST_TURNS

    def turn_of(self, adapter: str) -> int:
        """The turn of a request that comes in now: its rank among those of one priority."""
        self._turns[adapter] = turn = max(self._turns.get(adapter, 0), self._turn) + 1
        if len(self._turns) > self._most_turns:
            self._turns = {name: last for name, last in self._turns.items() if last > self._turn}
            self._most_turns = _LEAST_TURNS + 2 * len(self._turns)
        return turn

    def may_enter(self, request: Request) -> bool:
        """Whether its adapter has a slot, or one is free for it."""
        adapter = request.adapter
        if not adapter:
            return True
        if adapter in self._slots:
            return adapter != self._leaving or request.rank < self._first
        return self._num_free > 0

    def enter(self, request: Request) -> int:
        """``request``, which may enter, runs from now on. Returns its slot; 0: it has no adapter."""
        adapter = request.adapter
        self._turn = max(self._turn, request.rank[1])
        if not adapter:
            return 0
        self._users[adapter] += 1
        if adapter in self._slots:
            self._slots[adapter] = slot = self._slots.pop(adapter)
            return slot
        if not self._empty:
            self._empty.append(self._slots.pop(next(other for other in self._slots if not self._users[other])))
        slot = self._empty.pop()
        self._slots[adapter] = slot
        self.loads.append((slot, adapter))
        return slot

    def leave(self, request: Request) -> None:
        """``request`` runs no more."""
        adapter = request.adapter
        if not adapter:
            return
        self._users[adapter] -= 1
        if self._users[adapter]:
            return
        del self._users[adapter]
        load = (self._slots[adapter], adapter)
        if load in self.loads:  # no step was made of it: nobody need hold the adapter now
            self.loads.remove(load)
            self._empty.append(self._slots.pop(adapter))

    def start_over(self) -> list[Request]:
        """Steps broke, and nothing runs: what the slots hold is not known. Returns all requests held back."""
        assert not self._users.total()
        resumed = self.held_back()
        self._slots.clear()
        self._empty = list(range(self.num_slots, 0, -1))
        self._held_back.clear()
        self.loads = []
        return resumed

    @property
    def in_use(self) -> bool:
        """Whether a running request has an adapter."""
        return bool(self._users)

    # -- Requests held back

    @property
    def num_held_back(self) -> int:
        return sum(map(len, self._held_back.values()))

    def held_back(self) -> list[Request]:
        return [request for group in self._held_back.values() for request in group]

    def hold_back(self, request: Request) -> None:
        """``request`` waits until ``next_turn`` returns it."""
        self._held_back.setdefault(request.adapter, {})[request] = None

    def forget(self, request: Request) -> bool:
        """A request has ended. Returns whether it was held back."""
        group = self._held_back.get(request.adapter, {})
        if request not in group:
            return False
        del group[request]
        if not group:
            del self._held_back[request.adapter]
        return True

    def next_turn(self) -> list[Request]:
        """Before each step: the requests held back that may try to enter now, those of an adapter all at once."""
        if not self._held_back:
            self._leaving = ""
            return []
        free = self._num_free
        resumed: list[Request] = []
        for adapter in sorted(self._held_back, key=lambda adapter: min(r.rank for r in self._held_back[adapter])):
            if self._users[adapter] and adapter != self._leaving:
                resumed += self._held_back.pop(adapter)
            elif free:
                free -= 1
                resumed += self._held_back.pop(adapter)
        used = [adapter for adapter in self._slots if self._users[adapter]]
        self._leaving = min(used, key=self._users.__getitem__, default="") if self._held_back else ""
        self._first = min((request.rank for request in self.held_back()), default=(0, 0))
        return resumed

    @property
    def _num_free(self) -> int:
        """Slots that no running request uses."""
        return self.num_slots - len(self._users)

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that each running request's adapter has a slot of its own."""
        users = Counter(request.adapter for request in running if request.adapter)
        assert self._users == users, "running requests are counted wrong"
        assert users.keys() <= self._slots.keys(), "a request runs without its adapter"
        assert sorted([*self._slots.values(), *self._empty]) == list(range(1, self.num_slots + 1))
        for adapter, group in self._held_back.items():
            assert group, "nobody is held back"
            assert all(request.adapter == adapter for request in group)
