"""How long a launch should take on a GPU, from its work and its code.

A launch takes some time to start and to end, longer the more instructions it has, which are not in the caches of the
SMs yet. Between these it takes the longest of four times, then that of joining if there is any:

- memory: its bytes at the bandwidth that can be had. Where few are in flight, what is behind the first ones comes in
  rounds: a latency for each (Little's law: bandwidth times latency are the bytes in flight; Little, 1961).
- issue: instructions of all warps, one in a cycle by each of an SM's four schedulers; at least those of the program
  that has most, one in a cycle by each of its warps. Each part of the code counts as often as it runs.
- matrix: operations on matrix units, whole tiles, at the rate that can be had.
- chain: the trips of the main loop of the program that has most, each a barrier and one matrix instruction behind the
  other, since all add to the same sums.
- join: where a program joins what others computed, round trips to the L2 cache that the last one makes one after the
  other when all others have ended, and its instructions for that.

The constants are fitted to the launches of four decodes on an H200 (docs/gpu_step.md has them beside their estimates).
Left out: caches (what a step wrote last is read from memory here), conflicts of banks, cuBLAS's own choices of tiles,
programs of unequal lengths.
"""

import dataclasses
from typing import NamedTuple

from compiled_llm.gpu_step.amounts import Work
from compiled_llm.gpu_step.flow import BESIDES
from compiled_llm.gpu_step.gpus import Gpu
from compiled_llm.gpu_step.kernels import Compiled
from compiled_llm.gpu_step.launches import Launch

# Seen on an H200, torch 2.11 and Triton 3.6: docs/results/gpu. Of the data sheet's 4.8 TB/s reads reach 0.92, streaming
# kernels with a start of their own 0.9; bf16 products reach 781 of 989 TFLOP/s. The least launches take 1.2 to 1.7 us.
BANDWIDTH_SHARE = 0.9
MATRIX_SHARE = 0.79
GAP_SECONDS = 0.1e-6  # between two launches of a CUDA graph
START_SECONDS = 1.5e-6  # of a launch: its start, the first bytes, and its end
COLD_SECONDS = 1.5e-9  # an instruction that runs, once
LATENCY_SECONDS = 0.3e-6  # of a round of loads behind the first
L2_SECONDS = 0.3e-6  # of a round trip to the L2 cache
TRIP_SECONDS = 75e-9  # of a main loop's trip, without its matrix instructions
STEP_SECONDS = 22e-9  # of a matrix instruction that waits for the one before
_LIBRARY_CODE = 500  # instructions of a kernel whose code is not known
_SCHEDULERS = 4  # of an SM


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds by each limit; ``in_flight``: bytes of an SM, ``wanted`` those of Little's law; None where unknown."""

    memory: float
    issue: float
    matrix: float
    join: float = 0.0
    chain: float = 0.0
    start: float = 0.0
    in_flight: float | None = None
    wanted: float | None = None

    @property
    def seconds(self) -> float:
        """Without the gap."""
        return self.start + max(self.memory, self.issue, self.matrix, self.chain) + self.join

    @property
    def bound_by(self) -> str:
        return max(("memory", "issue", "matrix", "chain"), key=lambda name: getattr(self, name))


def estimate(launch: Launch, work: Work, compiled: Compiled | None, gpu: Gpu) -> Estimate:
    """``compiled``: a Triton kernel's code for ``gpu``; None for others."""
    memory = (work.read + work.written) / (gpu.bandwidth * BANDWIDTH_SHARE)
    matrix = work.padded_flops / (gpu.matrix_rate(work.bits) * MATRIX_SHARE) if work.bits else 0.0
    join = work.round_trips * L2_SECONDS
    if compiled is None or launch.triton is None:
        return Estimate(memory, 0.0, matrix, join, start=START_SECONDS + _LIBRARY_CODE * COLD_SECONDS)
    check_loops(launch.name, work, compiled)
    programs = launch.triton.programs
    busy = programs if work.entries is None else min(programs, work.entries)  # others find no task
    at_once = min(busy, compiled.programs_per_sm * gpu.num_sms)
    wanted = gpu.bandwidth * BANDWIDTH_SHARE * LATENCY_SECONDS
    in_flight = at_once * compiled.bytes_in_flight
    if work.read and in_flight:
        memory = max(memory, max(0.0, work.read / in_flight - 1) * LATENCY_SECONDS)
    sms = min(busy or programs, gpu.num_sms)  # where there is no task, all look for one
    counted = instructions(work, compiled, programs)
    share = max(1.0, compiled.num_warps / _SCHEDULERS)  # of a cycle that an instruction of a program takes
    issue = max(
        counted.all * compiled.num_warps / (sms * _SCHEDULERS * gpu.clock), counted.longest * share / gpu.clock
    )  # fmt: skip
    join += counted.last * share / gpu.clock
    matrix *= gpu.num_sms / sms
    chain = -(-(work.trips or 0) // (busy or programs)) * (TRIP_SECONDS + work.steps * STEP_SECONDS)
    start = START_SECONDS + counted.code * COLD_SECONDS
    return Estimate(memory, issue, matrix, join, chain, start, in_flight / gpu.num_sms, wanted / gpu.num_sms)


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
    """Of a warp: over ``all`` programs, of the one with most, and of the last one when all others have ended.

    ``code``: those that run at all, each once.
    """

    all: float
    longest: float
    last: float
    code: int


def instructions(work: Work, compiled: Compiled, programs: int) -> Instructions:
    """A main loop of unknown length counts once an entry."""
    parts = compiled.flow.parts
    entries = programs if work.entries is None else work.entries
    trips = entries if work.trips is None else work.trips
    # Where no loop is around the main one, a program has one task.
    once = programs if any(part.place == "task" for part in parts) else max(programs, entries)
    every, longest, last, code = 0.0, 0.0, 0.0, 0
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
        code += part.code.size if runs else 0
    return Instructions(every, longest, last, code)
