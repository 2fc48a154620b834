"""The only file that says torch.compile. Compiles a function once per bucket, guards it, and reports on it.

Each bucket gets its own copy of the function, with a code object of its own. Dynamo keeps its compiled versions by code
object, so every bucket has exactly one, found at once, and a second one is a recompile that can be counted.
"""

import dataclasses
import os
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compiled_llm.compiling.ahead import (
    from_bytes,
    libraries_built_since,
    to_bytes,
    trust_vec_isa,
    unavailable,
    vec_isa,
)
from compiled_llm.compiling.argument_specs import ArgumentCheck
from compiled_llm.compiling.cache import CompileCache, Entry
from compiled_llm.compiling.cuda_graphs import CapturedFunction, GraphPool
from compiled_llm.ops.native import cache_directory
from compiled_llm.ops.trusted_paths import check_trusted, make_directory

# What a CUDA graph needs before it replays: a plain run, and a run that records.
_WARM_UP_CALLS = {"cuda": 3, "cpu": 1}


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """What compiling one function for one bucket gave.

    Attributes:
        graphs: graphs captured; 1 means that the whole function is one graph. 0 without compiling.
        graph_breaks: places where capture broke off.
        recompiles: versions compiled since the warm-up ended, and calls refused because they asked for one.
        compile_seconds: wall time of the warm-up calls, and of recording CUDA graphs again.
        cache: "hit" or "miss" of the code kept on disk, "off" where it was not asked, "eager" uncompiled.
        reason: why the code on disk could not be used; empty where it was, or where torch's own cache was asked.
        cuda_graph_bytes: device memory that warming up and recording took: CUDA graphs, the activations in them,
            kernels and their workspaces; 0 on a CPU. Other processes on the device can disturb it.
    """

    name: str
    graphs: int
    graph_breaks: int
    recompiles: int
    compile_seconds: float
    cache: str
    cuda_graph_bytes: int
    reason: str = ""


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
        return sum(report.cache == outcome for report in self.reports)

    def __str__(self) -> str:
        titles = ("graph", "graphs", "breaks", "recompiles", "seconds", "cache", "CUDA graph MiB")
        rows = [
            [
                r.name,
                r.graphs,
                r.graph_breaks,
                r.recompiles,
                f"{r.compile_seconds:.2f}",
                r.cache,
                r.cuda_graph_bytes >> 20,
            ]
            for r in self.reports
        ]
        table = [titles, *([str(cell) for cell in row] for row in rows)]
        widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join([*lines, *self._misses()])

    def _misses(self) -> list[str]:
        """Why something had to be compiled: a line for each reason."""
        names: dict[str, list[str]] = {}
        for report in self.reports:
            if report.reason:
                names.setdefault(report.reason, []).append(report.name)
        return [f"compile cache: miss, because {reason} ({', '.join(of)})" for reason, of in names.items()]


class CompiledFunction:
    """A pure function for one bucket. The first call must be ``warm_up``; after that a recompile is an error.

    On a GPU a call replays a CUDA graph: one of the compiler's own, or with ``graph_pool`` one captured by hand.
    On a CPU the function is compiled ahead of time, and kept in ``cache`` if one is given; where torch cannot do that
    (``compile_ahead.unavailable``), it is compiled at the first call, with torch's own guards and cache.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        device: torch.device,
        enforce_eager: bool,
        graph_pool: GraphPool | None = None,
        cache: CompileCache | None = None,
    ) -> None:
        self.name = name
        self.device = device
        self._copy = _own_copy(function, name)
        self._ahead = device.type == "cpu" and not enforce_eager and graph_pool is None and not unavailable()
        self._cache = cache
        self._check: ArgumentCheck | None = None
        self._call = (
            self._copy if enforce_eager or self._ahead else _compile(self._copy, cuda_graphs=graph_pool is None)
        )
        self._captured = None if graph_pool is None else CapturedFunction(graph_pool)
        self._eager = enforce_eager
        self._refused = 0
        self._report: GraphReport | None = None

    def warm_up(self, make_args: Callable[[], tuple]) -> None:
        """Compile for what ``make_args`` gives, which stands for all later arguments; on a GPU, record the CUDA graph.

        ``make_args`` is asked anew for each call: tensors that another graph returned live until the next step only.
        """
        if self._ahead:
            self._warm_up_ahead(make_args())
            return
        before = _snapshot(self.device)
        started = time.perf_counter()
        with torch.no_grad():
            self._call_until_recorded(self._call, make_args)
        seconds = time.perf_counter() - started
        after = _snapshot(self.device)
        gained = {key: after[key] - before[key] for key in after}
        if self._eager:
            cache = "eager"
        elif gained["hits"]:
            cache = "hit"
        else:
            cache = "miss" if gained["misses"] else "off"
        self._report = GraphReport(
            name=self.name,
            graphs=gained["graphs"],
            graph_breaks=gained["breaks"],
            recompiles=0,
            compile_seconds=seconds,
            cache=cache,
            cuda_graph_bytes=max(0, gained["device_bytes"]),
        )

    def _warm_up_ahead(self, args: tuple) -> None:
        """Take the code from disk or compile it, and call it once."""
        started, moment, waited, facts = time.perf_counter(), time.time(), 0.0, {}
        outcome, reason = "off", ""
        if self._cache is not None:
            key = self._cache.key_of(self.name, self._copy, args)
            found = self._cache.find(key)
            outcome, reason = "miss", found if isinstance(found, str) else ""
            if isinstance(found, Entry):
                try:
                    trust_vec_isa(found.facts["vec_isa"])
                    self._call, facts = from_bytes(found.payload, self._copy), dict(found.facts)
                except Exception as error:  # whatever it is: made anew, the code raises it again or does without
                    reason = f"the stored code does not load: {type(error).__name__}: {error}"
                else:
                    gone = libraries_built_since(moment)
                    outcome = "miss" if gone else "hit"
                    reason = f"built again, since it was gone from torch's cache: {', '.join(gone)}" if gone else ""
        if not facts:
            ahead, facts = build(self._copy, self.name, args)
            self._call = ahead.fn
            if self._cache is not None:
                self._cache.store(key, to_bytes(ahead), facts)
        built = self._cache.built.get(self.name) if self._cache is not None else None
        if built is not None:  # by another process of this start
            outcome, (reason, waited) = "miss", built
        self._check = ArgumentCheck(args)
        with torch.no_grad():
            self._call(*args)
        self._report = GraphReport(
            name=self.name,
            graphs=facts["graphs"],
            graph_breaks=facts["graph_breaks"],
            recompiles=0,
            compile_seconds=waited + time.perf_counter() - started,
            cache=outcome,
            cuda_graph_bytes=0,
            reason=reason,
        )

    def record_again(self, make_args: Callable[[], tuple]) -> None:
        """Record the CUDA graph again without compiling; nothing to do on a CPU.

        For arguments at other addresses or with another size of a dynamic dimension, and behind another graph, which
        ``make_args`` runs: CUDA graph trees replay a graph only behind the one that it was recorded behind, and a graph
        captured by hand reads what the one before it returned.
        """
        if self._captured is None and self.device.type != "cuda":
            return
        assert self._report is not None, f"{self.name} was not warmed up"
        before = _snapshot(self.device)
        started = time.perf_counter()
        self._call_until_recorded(self._call_guarded, make_args)
        taken = _snapshot(self.device)["device_bytes"] - before["device_bytes"]
        self._report = dataclasses.replace(
            self._report,
            compile_seconds=self._report.compile_seconds + time.perf_counter() - started,
            cuda_graph_bytes=max(0, self._report.cuda_graph_bytes + taken),
        )

    def _call_until_recorded(self, call: Callable, make_args: Callable[[], tuple]) -> None:
        if self._captured is not None:
            self._captured.capture(call, make_args())
            return
        for _ in range(_WARM_UP_CALLS[self.device.type]):
            if self.device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            call(*make_args())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, *args: Any) -> Any:
        """Run the compiled version. ``RuntimeError`` where torch would compile another one."""
        assert self._report is not None, f"{self.name} was not warmed up"
        return self._call_guarded(*args) if self._captured is None else self._captured(*args)

    def _call_guarded(self, *args: Any) -> Any:
        if self._check is not None:
            return self._call_checked(self._check, args)
        with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
            try:
                return self._call(*args)
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                self._refused += 1
                raise RuntimeError(
                    f"{self.name} would have to be compiled again: something that it was compiled for has changed "
                    "since the start, such as torch's number of threads, default dtype or autocast"
                ) from error

    def _call_checked(self, check: ArgumentCheck, args: tuple) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            difference = check.difference(args)
            if difference is None:
                return self._call(*args)
        self._refused += 1
        raise RuntimeError(f"{self.name} would have to be compiled again: {difference}")

    def report(self) -> GraphReport:
        """What the warm-up gave, with the versions compiled since counted now."""
        assert self._report is not None, f"{self.name} was not warmed up"
        versions = len(_debug_get_cache_entry_list(self._copy.__code__))
        return dataclasses.replace(self._report, recompiles=max(0, versions - 1) + self._refused)


def use_own_cache_directory() -> None:
    """Keep compiled code in the user's own cache directory, unless ``TORCHINDUCTOR_CACHE_DIR`` says where.

    torch's default is a directory under /tmp that other users can foresee; it writes that into the environment when it
    is imported, so a default found there is nobody's wish. ``ValueError`` if others may write to either of them.
    """
    own = cache_directory()
    check_trusted(own)
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        if os.access(own, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / "inductor")
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled_llm_")
            warnings.warn(f"{own} may not be written to: compiled code goes to a temporary directory", stacklevel=3)
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    make_directory(inductor)
    if own not in inductor.parents:
        check_trusted(inductor, "TORCHINDUCTOR_CACHE_DIR")


def _compile(function: Callable, cuda_graphs: bool) -> Callable:
    """``cuda_graphs``: whether the compiler makes CUDA graphs of its own, where there is a GPU."""
    return torch.compile(function, fullgraph=True, dynamic=False, options={"triton.cudagraphs": cuda_graphs})


def build(function: Callable, name: str, args: tuple) -> tuple[Any, dict[str, Any]]:
    """Compile ahead of time for a CPU: an ``AOTCompiledFunction``, which ``to_bytes`` takes, and facts about it."""
    before = _snapshot(torch.device("cpu"))
    with torch.no_grad():
        options: dict[str, Any] = {"triton.cudagraphs": False, "guard_filter_fn": _drop_all, "size_asserts": False}
        compiled: Any = torch.compile(_own_copy(function, name), fullgraph=True, dynamic=False, options=options)
        ahead = compiled.aot_compile((args, {}))
    after = _snapshot(torch.device("cpu"))
    facts = {
        "graphs": after["graphs"] - before["graphs"],
        "graph_breaks": after["breaks"] - before["breaks"],
        "vec_isa": vec_isa(),
    }
    return ahead, facts


def _drop_all(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)  # ArgumentCheck stands in their place


def _own_copy(function: Callable, name: str) -> Any:
    """``function`` with a code object of its own, called ``name`` in profiles and error messages."""
    code = function.__code__.replace(co_name=name, co_qualname=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _snapshot(device: torch.device) -> dict[str, int]:
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "hits": inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        "misses": inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
        "device_bytes": _used_bytes(device) if device.type == "cuda" else 0,
    }


def _used_bytes(device: torch.device) -> int:
    """Device memory in use by all, so that what CUDA graphs take beside torch's allocator counts."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free
