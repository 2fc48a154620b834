"""How long a launch should take on a GPU that was never asked: estimates, no measurements.

A launch takes the longest of three times, then that of joining if there is any, and then the gap to the next one:

- memory: its bytes at the bandwidth that can be had. Where fewer bytes are in flight than Little's law asks for
  (bandwidth times latency; Little, 1961), the share of the bandwidth is that of these bytes.
- issue: instructions of all warps, one in a cycle by each of an SM's four schedulers.
- matrix: operations on matrix units, whole tiles, at the rate that can be had.
- join: round trips to the L2 cache that the last program makes one after the other, when all others have ended, where a
  program joins what others computed.

Left out: caches (what a step wrote last is read from memory here), conflicts of banks, waiting for results, cuBLAS's
own choices of tiles, the tail of the last wave. So an estimate is a lower bound that good kernels come near to.
"""

import dataclasses

from compiled_llm.report.gpu_step.gpus import Gpu
from compiled_llm.report.gpu_step.kernels import Compiled
from compiled_llm.report.gpu_step.launches import Launch
from compiled_llm.report.gpu_step.work import Work

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
    programs = launch.triton.programs
    at_once = min(programs, compiled.programs_per_sm * gpu.num_sms)
    wanted = gpu.bandwidth * BANDWIDTH_SHARE * LATENCY_SECONDS
    in_flight = at_once * compiled.bytes_in_flight
    if work.read and in_flight:
        memory /= min(1.0, in_flight / wanted)
    sms = min(programs, gpu.num_sms)
    issue = warp_instructions(work, compiled, programs) / (sms * _SCHEDULERS * gpu.clock)
    matrix *= gpu.num_sms / sms
    return Estimate(memory, issue, matrix, join, in_flight / gpu.num_sms, wanted / gpu.num_sms)


def warp_instructions(work: Work, compiled: Compiled, programs: int) -> float:
    """Of all warps of a launch. A main loop of unknown length counts once."""
    loop = 0 if compiled.loop is None or work.trips is None else compiled.loop.size
    entries = programs if work.entries is None else work.entries
    return compiled.num_warps * (entries * (compiled.code.size - loop) + loop * (work.trips or 0))
