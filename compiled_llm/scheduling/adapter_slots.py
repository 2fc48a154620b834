"""AdapterSlots: which adapters lie in the worker's slots, and which requests wait for one. Plain Python.

A request of an adapter runs only while the adapter has a slot. One that comes in when all slots are in use is held back
until a slot is free; requests of other adapters and of none pass it meanwhile. So that the adapters in use cannot keep
their slots for ever, the one with the fewest running requests takes no later ones while others wait: its slot is free
when these have ended.

So that an adapter's flood cannot keep others waiting within the slots, adapters take turns, and so do requests of none
among them (start-time fair queueing: Goyal et al., SIGCOMM 1996). An adapter's requests come in one a turn, the first
of them in the turn after that of the last request that was admitted.

Adapters with whole matrices, whose digests end in ``WHOLE``, run in the first slots alone, as only these have room for
them; others take those last.
"""

from collections import Counter

from compiled_llm.api.lora_request import WHOLE
from compiled_llm.scheduling.request import Request

_LEAST_TURNS = 64  # that are kept


class AdapterSlots:
    """Slots from 1 to ``num_slots``, the first ``num_whole`` for any adapter. They are known by digests, "" is none.

    Attributes:
        loads: (slot, adapter) pairs that the next step copies before it runs, in this order.
    """

    def __init__(self, num_slots: int, num_whole: int = 0) -> None:
        self.num_slots, self._num_whole = num_slots, num_whole
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
        whole, others = self._free()
        return whole > 0 or (others > 0 and not adapter.endswith(WHOLE))

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
        idle = {slot: other for other, slot in self._slots.items() if not self._users[other]}
        fitting = (slot for slot in (*reversed(self._empty), *idle) if slot <= self._last_slot(adapter))
        slot = max(fitting, key=lambda slot: slot > self._num_whole)  # the first of these
        if slot in idle:
            del self._slots[idle[slot]]
        else:
            self._empty.remove(slot)
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
        whole, others = self._free()
        resumed: list[Request] = []
        for adapter in sorted(self._held_back, key=lambda adapter: min(r.rank for r in self._held_back[adapter])):
            if self._users[adapter] and adapter != self._leaving:
                resumed += self._held_back.pop(adapter)
            elif others and not adapter.endswith(WHOLE):
                others -= 1
                resumed += self._held_back.pop(adapter)
            elif whole:
                whole -= 1
                resumed += self._held_back.pop(adapter)
        first = min(self.held_back(), key=lambda request: request.rank, default=None)
        last = 0 if first is None else self._last_slot(first.adapter)
        used = [adapter for adapter, slot in self._slots.items() if self._users[adapter] and slot <= last]
        self._leaving = min(used, key=self._users.__getitem__, default="")
        self._first = min((request.rank for request in self.held_back()), default=(0, 0))
        return resumed

    def _free(self) -> tuple[int, int]:
        """Slots that no running request uses: those for any adapter, and the others."""
        used = sum(self._slots[adapter] <= self._num_whole for adapter in self._users) if self._num_whole else 0
        return self._num_whole - used, self.num_slots - self._num_whole - len(self._users) + used

    def _last_slot(self, adapter: str) -> int:
        return self._num_whole if adapter.endswith(WHOLE) else self.num_slots

    def check_invariants(self, running: list[Request]) -> None:
        """Assert that each running request's adapter has a slot of its own."""
        users = Counter(request.adapter for request in running if request.adapter)
        assert self._users == users, "running requests are counted wrong"
        assert users.keys() <= self._slots.keys(), "a request runs without its adapter"
        assert sorted([*self._slots.values(), *self._empty]) == list(range(1, self.num_slots + 1))
        for adapter, group in self._held_back.items():
            assert group, "nobody is held back"
            assert all(request.adapter == adapter for request in group)
