"""CompiledFunction: a function that is compiled once, and then refuses to be compiled again."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from compiled_llm.compiling.argument_specs import ArgumentCheck, tensors_in
from compiled_llm.compiling.background import Finished
from compiled_llm.compiling.cache import CompileCache, Fields
from compiled_llm.compiling.compiler import (
    compile_ahead,
    compile_at_first_call,
    compile_counts,
    own_copy,
)
from compiled_llm.compiling.cuda_graphs import CapturedFunction, GraphPool, begin_step_of_trees
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.compiling.report import GraphReport
from compiled_llm.ops.torch_private import compiled_versions, sizes_of_one, tell_compiler
from compiled_llm.ops.user_warnings import warn

# What a CUDA graph needs before it replays: a plain run, and a run that records.
_WARM_UP_CALLS = {"cuda": 3, "cpu": 1}


class CompiledFunction:
    """A pure function. The first call must be ``warm_up``; after that a recompile is an error.

    On a GPU a call replays a CUDA graph: one of the compiler's own, or with ``graph_pool`` one captured by hand.
    On a CPU the function is compiled ahead of time, and kept in ``cache`` if one is given; ``depends`` is then the part
    of its key that ``CompileCache.key_of`` asks for. For graphs captured by hand, code that ``cache`` holds is loaded;
    what it does not hold is compiled at the first call.
    With ``is_awaited=False``, on a CPU, it runs uncompiled until ``take_over`` brings what was compiled meanwhile.
    Arguments are nested tuples (NamedTuples among them) of tensors, None and numbers.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        device: torch.device,
        enforce_eager: bool,
        graph_pool: GraphPool | None = None,
        cache: CompileCache | None = None,
        depends: Fields = MappingProxyType({}),
        is_awaited: bool = True,
    ) -> None:
        self.name = name
        self.device = device
        self._copy = own_copy(function, name)  # torch keeps compiled versions by code object
        self._call: Callable = self._copy
        self._captured = None if graph_pool is None else CapturedFunction(graph_pool)
        # Compiled ahead of the first call; or loaded from the cache, and compiled at the first call if it lacks them.
        self._ahead = device.type == "cpu" and not enforce_eager and graph_pool is None and is_awaited
        self._loads = graph_pool is not None and not enforce_eager and cache is not None
        if is_awaited and not (enforce_eager or self._ahead or self._loads):
            self._call = compile_at_first_call(self._copy, cuda_graphs=graph_pool is None)
        self._eager, self._is_awaited = enforce_eager or not is_awaited, is_awaited
        self._cache, self._depends = cache, depends
        self._check: ArgumentCheck | None = None
        self._refused = 0
        self._report: GraphReport | None = None

    def warm_up(self, make_args: Callable[[], tuple]) -> None:
        """Compile for arguments like those of ``make_args``; on a GPU, record the CUDA graph.

        ``make_args`` is called anew for each call: tensors that another graph returned live until the next step only.
        """
        if not self._is_awaited:
            self._report = GraphReport(self.name, 0, 0, 0, compile_seconds=0.0, cache="pending", cuda_graph_bytes=0)
            return
        used, started = _used_bytes(self.device), time.perf_counter()
        if self._ahead:
            args = make_args()
            facts, outcome, reason = self._load_or_compile(args)
            self._check = ArgumentCheck(args)
            with torch.no_grad():
                self._call(*args)
        elif self._loads:
            facts, outcome, reason = self._load_and_record(make_args)
        else:
            (facts, outcome), reason = self._compile_by_calls(make_args), ""
        seconds = time.perf_counter() - started
        if self._cache is not None and self.name in self._cache.built:  # by another process of this start
            outcome, (reason, waited) = "miss", self._cache.built[self.name]
            seconds += waited
        self._report = GraphReport(
            name=self.name,
            graphs=facts["graphs"],
            graph_breaks=facts["graph_breaks"],
            recompiles=0,
            compile_seconds=seconds,
            cache=outcome,
            cuda_graph_bytes=max(0, _used_bytes(self.device) - used),
            reason=reason,
            cpp_seconds=0.0 if outcome == "hit" else facts["cpp_seconds"],
        )

    def take_over(self, finished: Finished, seconds: float) -> None:
        """Run compiled code from the next call on. ``seconds``: after the engine was ready, for the report."""
        assert finished.call is not None
        self._call, self._check, self._eager = finished.call, ArgumentCheck(finished.job.args), False
        self._report = GraphReport(
            name=self.name,
            graphs=finished.facts["graphs"],
            graph_breaks=finished.facts["graph_breaks"],
            recompiles=0,
            compile_seconds=finished.seconds,
            cache=finished.cache,
            cuda_graph_bytes=0,
            reason=finished.reason,
            cpp_seconds=0.0 if finished.cache == "hit" else finished.facts["cpp_seconds"],
            took_over=seconds,
        )

    @property
    def is_pending(self) -> bool:
        """Whether ``take_over`` is still to come."""
        return not self._is_awaited and self._eager

    def _compile_by_calls(self, make_args: Callable[[], tuple]) -> tuple[Fields, str]:
        """Facts about the code, and ``cache`` for the report."""
        before = {} if self._eager else compile_counts()
        any_size = contextlib.nullcontext() if self._eager else sizes_of_one()  # 0 and 1 are no special cases
        with torch.no_grad(), any_size:
            self._call_until_recorded(self._call, make_args)
        if self._eager:
            return {"graphs": 0, "graph_breaks": 0, "cpp_seconds": 0.0}, "eager"
        gained = {key: count - before[key] for key, count in compile_counts().items()}
        return gained, "hit" if gained["hits"] else "miss" if gained["misses"] else "off"

    def _load_and_record(self, make_args: Callable[[], tuple]) -> tuple[Fields, str, str]:
        """Facts about the code, and ``cache`` and ``reason`` for the report."""
        facts, reason = self._load(args := make_args())
        if facts is not None:
            self._check = ArgumentCheck(args)
            try:
                with torch.no_grad():
                    self._call_until_recorded(self._call, make_args)
                return facts, "hit", reason
            except Exception as error:  # whatever it is: compiling anew raises it again or does without
                reason, self._check = f"the stored code does not run: {type(error).__name__}: {error}", None
                warn(f"{self.name} is compiled anew, which takes longer: {reason}")
        self._call = compile_at_first_call(self._copy, cuda_graphs=False)
        facts, _ = self._compile_by_calls(make_args)
        return facts, "miss", reason

    def _load_or_compile(self, args: tuple) -> tuple[Fields, str, str]:
        """Facts about the code, and ``cache`` and ``reason`` for the report."""
        facts, reason = (None, "") if self._cache is None else self._load(args)
        if facts is not None:
            return facts, "hit", ""
        ahead, facts = compile_ahead(self._copy, self.name, args)
        self._call = ahead.fn
        if self._cache is None:
            return facts, "off", ""
        code = ready_code(ahead)
        if code is None:
            warn(f"{self.name} is not kept, the next start compiles it again: it is more than a graph")
        else:
            self._cache.store(self._cache.key_of(self.name, self._copy, args, self._depends), code, facts)
            try:
                self._call = load_ready(code, self._copy.__globals__)
            except Exception as error:  # whatever it is: what was compiled serves all the same, but is bound to nothing
                warn(f"{self.name} takes longer a call: the kept code does not load: {type(error).__name__}: {error}")
        return facts, "miss", reason

    def _load(self, args: tuple) -> tuple[Fields | None, str]:
        """Take the code that the cache holds: facts about it, None if there is none, and what was wrong with it."""
        assert self._cache is not None
        found = self._cache.find(self._cache.key_of(self.name, self._copy, args, self._depends))
        if isinstance(found, str):
            return None, found
        try:
            self._call = load_ready(found.payload, self._copy.__globals__)
        except Exception as error:  # whatever it is: compiling anew raises it again or does without
            return None, f"the stored code does not load: {type(error).__name__}: {error}"
        return found.facts, ""

    def drop_graphs(self) -> None:
        """Free what graphs captured by hand hold, before all of them are recorded again."""
        if self._captured is not None:
            assert self._report is not None, f"{self.name} was not warmed up"
            self._captured.drop()
            self._report = dataclasses.replace(self._report, cuda_graph_bytes=0)

    def forget(self) -> None:
        """Keep none of the arguments of earlier calls."""
        if self._check is not None:
            self._check.forget()

    def record_again(self, make_args: Callable[[], tuple]) -> None:
        """Record the CUDA graph again without compiling; nothing to do on a CPU.

        For arguments at other addresses or with another size of a dynamic dimension, and to follow another graph, which
        ``make_args`` runs: CUDA graph trees replay a graph only after the one that it was recorded after, and a graph
        captured by hand reads what the one before it returned.
        """
        if self._captured is None and self.device.type != "cuda":
            self.forget()  # tensors that are exchanged can go
            return
        assert self._report is not None, f"{self.name} was not warmed up"
        used = _used_bytes(self.device)
        started = time.perf_counter()
        self._call_until_recorded(self._call_guarded, make_args)
        self.forget()  # the graph keeps what it needs
        taken = _used_bytes(self.device) - used
        self._report = dataclasses.replace(
            self._report,
            compile_seconds=self._report.compile_seconds + time.perf_counter() - started,
            cuda_graph_bytes=max(0, self._report.cuda_graph_bytes + taken),
        )

    def _call_until_recorded(self, call: Callable, make_args: Callable[[], tuple]) -> None:
        if self._captured is not None:
            self._captured.capture(call, self._told(make_args()))
            return
        for _ in range(_WARM_UP_CALLS[self.device.type]):
            if self.device.type == "cuda":
                begin_step_of_trees()
            call(*self._told(make_args()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _told(self, args: tuple) -> tuple:
        """``args``, after the compiler was told which of their sizes vary and which addresses stay."""
        if not self._eager and self._check is None:  # code that was loaded does not need the compiler
            tell_compiler(tensors_in(args))
        return args

    def __call__(self, *args: Any) -> Any:
        """Run the compiled version. ``RuntimeError`` where torch would compile another one."""
        assert self._report is not None, f"{self.name} was not warmed up"
        return self._call_guarded(*args) if self._captured is None else self._captured(*args)

    def _call_guarded(self, *args: Any) -> Any:
        if self._check is None and not self._eager:
            return self._call_with_guards(*args)
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # not within ``own_settings``
            with torch.inference_mode(False), torch.no_grad():
                return self._call_checked(*args)
        return self._call_checked(*args)

    def _call_checked(self, *args: Any) -> Any:
        if self._check is None:
            return self._call(*args)
        difference = self._check.difference(args)
        if difference is not None:
            raise self._refusal(difference)
        assert self._check.last is not None
        return self._check.last.call(self._call)

    def _call_with_guards(self, *args: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
            try:
                return self._call(*args)
            except RuntimeError as error:
                if "fail_on_recompile" not in str(error):
                    raise
                raise self._refusal(
                    "something that it was compiled for has changed since the start, such as torch's number of "
                    "threads, default dtype or autocast"
                ) from error

    def _refusal(self, reason: str) -> RuntimeError:
        self._refused += 1
        return RuntimeError(f"{self.name} would have to be compiled again: {reason}")

    def report(self) -> GraphReport:
        """What the warm-up gave, with the recompiles that were made or refused since."""
        assert self._report is not None, f"{self.name} was not warmed up"
        versions = len(compiled_versions(self._copy.__code__))
        return dataclasses.replace(self._report, recompiles=max(0, versions - 1) + self._refused)


def _used_bytes(device: torch.device) -> int:
    """Memory of a GPU that all use, so that what CUDA graphs take outside of torch's allocator counts; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free
