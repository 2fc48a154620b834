"""Compile reports: what compiling each function gave, as figures and as a table."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """What compiling one function for one bucket gave.

    Attributes:
        graphs: graphs captured; 1 means that the whole function is one graph. 0 without compiling.
        graph_breaks: places where capture broke off.
        recompiles: versions compiled since the warm-up ended, and calls refused because they asked for one.
        compile_seconds: wall time of the warm-up calls, and of recording CUDA graphs again.
        cpp_seconds: of these, how long a CPU's code waited for the C++ compiler when the rest was done.
        cache: "hit" or "miss" of the code kept on disk, "off" where it was not asked, "eager" uncompiled, "pending"
            uncompiled until the code is there.
        cuda_graph_bytes: device memory that warming up and recording took: CUDA graphs, the activations in them,
            kernels and their workspaces; 0 on a CPU. Other processes on the device can disturb it.
        reason: why the code on disk could not be used; empty where it was, or where torch's own cache was asked.
        took_over: seconds after the start's end at which the code took the place of the uncompiled function; None
            where it was there before the first step, or is not there yet.
    """

    name: str
    graphs: int
    graph_breaks: int
    recompiles: int
    compile_seconds: float
    cache: str
    cuda_graph_bytes: int
    reason: str = ""
    cpp_seconds: float = 0.0
    took_over: float | None = None


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """A ``GraphReport`` for each compiled function. ``str()`` of it is a table."""

    reports: tuple[GraphReport, ...]

    @property
    def graphs(self) -> int:
        return sum(report.graphs for report in self.reports)

    @property
    def graph_breaks(self) -> int:
        return sum(report.graph_breaks for report in self.reports)

    @property
    def recompiles(self) -> int:
        return sum(report.recompiles for report in self.reports)

    @property
    def compile_seconds(self) -> float:
        return sum(report.compile_seconds for report in self.reports)

    def cache_count(self, outcome: str) -> int:
        """How many functions have ``outcome`` as their ``cache``."""
        return sum(report.cache == outcome for report in self.reports)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        titles = ("graph", "graphs", "breaks", "recompiles", "seconds", "of which C++", "cache", "CUDA graph MiB")
        table = [titles, *map(_cells, self.reports)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([*lines, *self._misses(), *self.change_overs()])

    def change_overs(self) -> list[str]:
        """What became of functions that began uncompiled, in lines: which are compiled by now, and which are not."""
        done = [f"{one.name} at {one.took_over:.1f} s" for one in self.reports if one.took_over is not None]
        left = [report.name for report in self.reports if report.cache == "pending"]
        lines = [f"compiled while the engine served: {', '.join(done)}"] if done else []
        return lines + ([f"not compiled yet, so uncompiled: {', '.join(left)}"] if left else [])

    def _misses(self) -> list[str]:
        """Why something had to be compiled: a line for each reason."""
        names: dict[str, list[str]] = {}
        for report in self.reports:
            if report.reason:
                names.setdefault(report.reason, []).append(report.name)
        return [f"compile cache: miss, because {reason} ({', '.join(of)})" for reason, of in names.items()]


def _cells(r: GraphReport) -> tuple[str, ...]:
    counts = map(str, (r.graphs, r.graph_breaks, r.recompiles))
    seconds = f"{r.compile_seconds:.2f}", f"{r.cpp_seconds:.2f}"
    return r.name, *counts, *seconds, r.cache, str(r.cuda_graph_bytes >> 20)
