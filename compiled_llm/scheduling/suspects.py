"""Suspects: which requests make steps fail. Plain Python.

After a step failed, its requests go back to the queue and are tried: they run, while all other requests wait, until
each of them has computed the tokens at which the step failed, and one more. First all of them are tried together, as
the fault may not come again. If it does, the requests of the step that failed are tried in halves, and so on, until a
request fails alone: it is the cause, and ends. A group of n requests takes about ``2 * log2(n)`` tries where one of
them is the cause, and at most ``2 * n`` where all of them are.

Requests may fail together of which none fails alone. The engine then goes on with all of them, and the fault may come
again. So a request ends as well when its step fails after ``MOST_UNEXPLAINED`` faults that had no cause.
"""

from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.running_set import RunningSet

# After so many faults without a cause in its steps, a request ends with the next one.
MOST_UNEXPLAINED = 3


class Suspects:
    """The requests of steps that failed, and the order in which they are tried."""

    def __init__(self, running_set: RunningSet) -> None:
        self.running_set = running_set
        self._groups: list[list[Request]] = []  # to be tried one after another, the last one first
        self._on_trial: dict[Request, int] = {}  # requests that run now -> tokens to compute until they have passed
        self._targets: dict[Request, int] = {}  # tokens to compute, of all requests of the step that failed first
        self._has_cause = False  # whether some request turned out to be the cause

    @property
    def is_searching(self) -> bool:
        """Whether a cause is being looked for. No two steps may be in flight then."""
        return bool(self._targets)

    def take(self, requests: list[Request]) -> list[Request]:
        """``requests`` were in steps that failed. Returns the requests that are to end; ``try_next`` tries the others.

        They still count the tokens of these steps as computed.
        """
        if not self.is_searching:
            ended = [request for request in requests if request.num_unexplained_faults >= MOST_UNEXPLAINED]
            self._groups = [[request for request in requests if request not in ended]]
        else:
            ended = requests if len(requests) == 1 else []
            half = len(requests) // 2
            others = [request for request in self._on_trial if request not in requests]
            self._groups += [others, requests[half:], requests[:half]]
        for request in requests:
            # One that was preempted while the step ran has lost its tokens already.
            computed = max(request.num_computed_tokens, request.num_lost_tokens)
            self._targets[request] = max(self._targets.get(request, 0), computed + 1)
        self._on_trial = {}
        self._has_cause |= bool(ended)
        return ended

    def try_next(self) -> None:
        """Let the next group run when all requests of this one have passed; after the last one, all requests.

        No step may be in flight.
        """
        self._on_trial = _unfinished(self._on_trial)
        while not self._on_trial and self._groups:
            group = self._groups.pop()
            self._on_trial = {r: self._targets[r] for r in group if r.status is not Status.FINISHED}
            if self._on_trial:
                self._run_alone(set(self._on_trial))
        if not self._on_trial:
            self._end()

    def check_invariants(self) -> None:
        """Assert that a trial's requests run by themselves, and that none waits for a trial when there is none."""
        waiting = self.running_set.waiting
        assert self.is_searching or not waiting.num_aside, "a request waits for a trial, and there is none"
        for request in self.running_set.running if self._on_trial else ():
            assert request in self._targets, f"{request.request_id} runs in the trial of others"

    def _run_alone(self, group: set[Request]) -> None:
        running_set = self.running_set
        running_set.waiting.serve_only(group)
        while running_set.running:
            running_set.preempt(running_set.running.pop(), may_swap=False)

    def _end(self) -> None:
        may_have_left = any(request.finish_reason == "abort" for request in self._targets)
        if not self._has_cause and not may_have_left:
            self.running_set.counts.num_unexplained_faults += 1
            for request in self._targets:
                request.num_unexplained_faults += 1
        self._targets, self._has_cause = {}, False
        self.running_set.waiting.serve_only(None)


def _unfinished(on_trial: dict[Request, int]) -> dict[Request, int]:
    """The requests that have not passed yet."""
    return {
        request: target
        for request, target in on_trial.items()
        if request.status is not Status.FINISHED and request.num_computed_tokens < target
    }
