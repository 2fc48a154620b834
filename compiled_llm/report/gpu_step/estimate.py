"""How long a launch should take on a GPU that was never asked: estimates, no measurements.

A launch takes the longest of three times, then that of joining if there is any, and then the gap to the next one:

- memory: its bytes at the bandwidth that can be had. Where fewer bytes are in flight than Little's law asks for
  (bandwidth times latency; Little, 1961), the share of the bandwidth is that of these bytes.
- issue: instructions of all warps, one in a cycle by each of an SM's four schedulers; at least those of the program
  that has most, one in a cycle by each of its warps. Each part of the code counts as often as it runs.
- matrix: operations on matrix units, whole tiles, at the rate that can be had.
- join: where a program joins what others computed, round trips to the L2 cache that the last one makes one after the
  other when all others have ended, and its instructions for that.

Left out: caches (what a step wrote last is read from memory here), conflicts of banks, waiting for results, cuBLAS's
own choices of tiles, the tail of the last wave. So an estimate is a lower bound that good kernels come near to.
"""

import dataclasses
from typing import NamedTuple

from compiled_llm.report.gpu_step.amounts import Work
from compiled_llm.report.gpu_step.flow import BESIDES
from compiled_llm.report.gpu_step.gpus import Gpu
from compiled_llm.report.gpu_step.kernels import Compiled
from compiled_llm.report.gpu_step.launches import Launch

# Assumptions. The shares are those that copies (4.3 of 4.8 TB/s) and bf16 products (790 of 989 TFLOP/s) reached on an
# H200; the gap is that between kernels of a CUDA graph there. The latency is that of a load from a busy memory; from
# L2, in a GPU where little else runs, it is less than half.
BANDWIDTH_SHARE = 0.9
MATRIX_SHARE = 0.8
GAP_SECONDS = 1.3e-6
LATENCY_SECONDS = 0.8e-6
L2_SECONDS = 0.3e-6
_SCHEDULERS = 4  # of an SM


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds by each limit; ``in_flight``: bytes of an SM, ``wanted`` those of Little's law; None where unknown."""

    memory: float
    issue: float
    matrix: float
    join: float = 0.0
    in_flight: float | None = None
    wanted: float | None = None

    @property
    def seconds(self) -> float:
        """Without the gap."""
        return max(self.memory, self.issue, self.matrix) + self.join

    @property
    def bound_by(self) -> str:
        return max(("memory", "issue", "matrix"), key=lambda name: getattr(self, name))


def estimate(launch: Launch, work: Work, compiled: Compiled | None, gpu: Gpu) -> Estimate:
    """``compiled``: a Triton kernel's code for ``gpu``; None for others."""
    memory = (work.read + work.written) / (gpu.bandwidth * BANDWIDTH_SHARE)
    matrix = work.padded_flops / (gpu.matrix_rate(work.bits) * MATRIX_SHARE) if work.bits else 0.0
    join = work.round_trips * L2_SECONDS
    if compiled is None or launch.triton is None:
        return Estimate(memory, 0.0, matrix, join)
    check_loops(launch.name, work, compiled)
    programs = launch.triton.programs
    busy = programs if work.entries is None else min(programs, work.entries)  # others find no task
    at_once = min(busy, compiled.programs_per_sm * gpu.num_sms)
    wanted = gpu.bandwidth * BANDWIDTH_SHARE * LATENCY_SECONDS
    in_flight = at_once * compiled.bytes_in_flight
    if work.read and in_flight:
        memory /= min(1.0, in_flight / wanted)
    sms = min(busy or programs, gpu.num_sms)  # where there is no task, all look for one
    counted = instructions(work, compiled, programs)
    share = max(1.0, compiled.num_warps / _SCHEDULERS)  # of a cycle that an instruction of a program takes
    issue = max(
        counted.all * compiled.num_warps / (sms * _SCHEDULERS * gpu.clock), counted.longest * share / gpu.clock
    )  # fmt: skip
    join += counted.last * share / gpu.clock
    matrix *= gpu.num_sms / sms
    return Estimate(memory, issue, matrix, join, in_flight / gpu.num_sms, wanted / gpu.num_sms)


def check_loops(name: str, work: Work, compiled: Compiled) -> None:
    """``ValueError`` for a kernel with a loop of which nobody says how often it runs: it would count as once."""
    parts = compiled.flow.parts
    main = {function for part in parts if part.place == "main" for function in part.looping}
    for part in parts:
        counts = part.looping == main or bool(part.looping & work.single)
        is_known = part.place in ("main", "called") or not part.looped or counts
        if not is_known and not part.looping & BESIDES & work.shares.keys():
            others = ", ".join(sorted(part.looping ^ main))
            raise ValueError(
                f"{name}: beside its main loop, that of {', '.join(sorted(main))}, it has one in other functions "
                f"({others}): say in work.py how often that one runs (shares), and add it to BESIDES of flow.py"
            )


class Instructions(NamedTuple):
    """Of a warp: over ``all`` programs, of the one with most, and of the last one when all others have ended."""

    all: float
    longest: float
    last: float


def instructions(work: Work, compiled: Compiled, programs: int) -> Instructions:
    """A main loop of unknown length counts once an entry."""
    parts = compiled.flow.parts
    entries = programs if work.entries is None else work.entries
    trips = entries if work.trips is None else work.trips
    # Where no loop is around the main one, a program has one task.
    once = programs if any(part.place == "task" for part in parts) else max(programs, entries)
    every, longest, last = 0.0, 0.0, 0.0
    for part in parts:
        share = next((share for name, share in work.shares.items() if name in part.functions), None)
        if part.place == "called":
            continue
        if part.place == "main":
            runs, most = trips, -(-trips // programs)
        elif share is not None:
            most = share.turns if part.looped else 1
            runs = share.runs * most
            if share.is_last and share.runs:
                last += most * part.code.size
            most = 0 if share.is_last or not share.runs else most
        elif part.place == "task":
            runs, most = entries, -(-entries // programs)
        else:
            runs, most = once, 1
        every += runs * part.code.size
        longest += most * part.code.size
    return Instructions(every, longest, last)
