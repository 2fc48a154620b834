"""Where the time of a start and of the steps went, for reports."""

import dataclasses

from compiled_llm.compiling.report import CompileReport


@dataclasses.dataclass
class StartTimes:
    """Seconds that the parts of a start took.

    Attributes:
        device: making the device ready, and starting processes that compile.
        weights: reading or making the weights, and packing them.
        build: waiting for functions that other processes compile.
        kernels: waiting for C++ kernels that were still being built when the first step had to run, and loading them.
        load: taking compiled functions from disk, compiling those that are left, calling each once, and on a GPU
            recording it.
        pool: measuring memory, making the KV pool, and on a GPU recording all functions on it.
    """

    device: float = 0.0
    weights: float = 0.0
    build: float = 0.0
    kernels: float = 0.0
    load: float = 0.0
    pool: float = 0.0

    @property
    def compile(self) -> float:
        """Until each compiled function has run once."""
        return self.build + self.load

    def describe(self, report: CompileReport) -> str:
        """A part of a line. ``report``: of the functions that the start compiled."""
        made, found = report.cache_count("miss") + report.cache_count("off"), report.cache_count("hit")
        graphs = [f"{made} graphs compiled" if made else "", f"{found} graphs from disk" if found else ""]
        compiled = " and ".join(filter(None, graphs)) or "nothing compiled (eager)"
        compiled += f" in {self.compile:.1f} s"
        if pending := report.cache_count("pending"):
            compiled = f"uncompiled until {pending} graphs are loaded or compiled"
        return f"weights {self.weights:.1f} s, C++ kernels {self.kernels:.1f} s, {compiled}"


@dataclasses.dataclass
class RunnerTimes:
    """Seconds since the engine was made, and rows of steps that held no token.

    Attributes:
        prepare_seconds: filling buffers.
        launch_seconds: handing steps to the device; 0 on a CPU, which is the device.
        execute_seconds: launching, and waiting for the tokens; profiling not counted.
        disk_bytes: of mapped weights that do not fit into memory: read from disk for steps.
        disk_bytes_per_second: what the disk gave as many readers at the start; 0: all weights fit, or it is unknown.
    """

    prepare_seconds: float = 0.0
    launch_seconds: float = 0.0
    execute_seconds: float = 0.0
    num_padding_tokens: int = 0
    disk_bytes: int = 0
    disk_bytes_per_second: float = 0.0
