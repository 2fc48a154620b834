"""What a step has come from host memory beside its launches (``cpu_offload_gb``), and how long it waits for that.

A copy begins when the launches before it have ended and the copy before it has: all share one bus. A launch behind an
``await_fetched`` begins when the copy to that buffer has ended.
"""

from collections.abc import Sequence
from typing import NamedTuple

from compiled_llm.gpu_step.launches import Transfer

BUS_SHARE = 0.8  # of the data sheet's bandwidth from host to device: assumed, not measured


class Timeline(NamedTuple):
    """A step and its copies.

    Attributes:
        copies: how many, of ``nbytes`` together.
        bus_seconds: that they take, one after the other.
        waiting_seconds: of the step, in which no launch can run.
        seconds: of the step.
    """

    copies: int
    nbytes: int
    bus_seconds: float
    waiting_seconds: float
    seconds: float


def timeline(launches: Sequence[float], transfers: Sequence[Transfer], bus: float) -> Timeline:
    """Of a step whose ``launches`` take so many seconds each, the gap behind each included.

    Args:
        transfers: in their order.
        bus: bytes a second of the data sheet.
    """
    now = free = waiting = busy = 0.0  # free: when the last copy will have ended
    arrival: dict[int, float] = {}  # by the buffer
    done = 0
    for transfer in transfers:
        now += sum(launches[done : transfer.place])
        done = transfer.place
        if transfer.nbytes:
            seconds = transfer.nbytes / (bus * BUS_SHARE)
            busy += seconds
            free = arrival[transfer.buffer] = max(now, free) + seconds
        else:
            wait = max(0.0, arrival[transfer.buffer] - now)
            now, waiting = now + wait, waiting + wait
    copied = [transfer.nbytes for transfer in transfers if transfer.nbytes]
    return Timeline(len(copied), sum(copied), busy, waiting, now + sum(launches[done:]))
