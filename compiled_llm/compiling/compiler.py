"""What is asked of torch's compiler. The only file that calls torch.compile.

A function is compiled ahead of time, from its arguments: the result is bytes that can be kept, and that include what
tracing found. Such a result has no guards: ``ArgumentCheck`` takes their place. Where torch is to record CUDA graphs, a
function is compiled at its first call, with torch's own guards and cache.
"""

import contextlib
import gc
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from compiled_llm.compiling.argument_specs import examples_of, tensors_in
from compiled_llm.compiling.costs import CostMeter
from compiled_llm.compiling.cut_graph import cut_graph
from compiled_llm.compiling.native_runs import native_runs
from compiled_llm.compiling.ready_code import native_piece_of, run_program
from compiled_llm.ops.torch_private import (
    compiler_counters,
    cpp_seconds,
    lower_as_ops,
    sizes_of_one,
    tell_compiler,
    with_caches,
)
from compiled_llm.ops.torch_private_builds import aot_compile_on, without_sources
from compiled_llm.ops.torch_private_cpp import headers_in_cache, plain_vectors, whole_libraries
from compiled_llm.ops.torch_private_graphs import compile_part

_OLDEST_FOR_CPUS = (2, 13)  # whose AOTCompiledFunction is the one that _unguarded extends


def check_torch(device: torch.device, enforce_eager: bool) -> None:
    """``ValueError`` for a CPU if this torch is too old to compile ahead of time."""
    if device.type == "cpu" and not enforce_eager:
        version = tuple(map(int, torch.__version__.split(".")[:2]))
        if version < _OLDEST_FOR_CPUS:
            needed = ".".join(map(str, _OLDEST_FOR_CPUS))
            raise ValueError(
                f"device='cpu' must have torch {needed} or later, given torch {torch.__version__}: pip install "
                f"'torch>={needed}'. enforce_eager=True runs without compiling"
            )


def own_copy(function: Callable, name: str) -> Any:
    """``function`` with a code object of its own, called ``name`` in profiles and error messages.

    Dynamo keeps compiled versions by code object: so each copy has one, and a second one is a recompile.
    """
    code = function.__code__.replace(co_name=name, co_qualname=name)
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_at_first_call(function: Callable, cuda_graphs: bool) -> Callable:
    """``cuda_graphs``: whether the compiler makes CUDA graphs of its own, where there is a GPU.

    Its kernels never start before the launch before has ended, whatever TORCHINDUCTOR_ENABLE_PDL says: some would not
    wait for it, and then our own that follow would not know of it (``programmatic_launch.py``).
    """
    lower_as_ops("compiled_llm")
    options: dict[str, Any] = {"triton.cudagraphs": cuda_graphs, "triton.enable_pdl": False}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


# On a GPU the engine captures the CUDA graphs, and kernels are as in compile_at_first_call. A CPU's ops have threads of
# their own, and those of OpenMP would spin beside them.
_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False, "triton.enable_pdl": False, "size_asserts": False, "cpp.threads": 1
}  # fmt: skip


def compile_ahead(function: Callable, name: str, args: tuple) -> tuple[Any, dict[str, Any]]:
    """Compile for arguments like ``args``: an ``AOTCompiledFunction``, and facts about it as JSON values.

    Its ``fn`` is to be called, and ``ready_code`` takes it. It is right for all dynamic sizes. Arguments on a GPU have
    to be fake tensors, in a process that ``build_worker.py`` prepared.

    For a CPU the graph is cut at its ops (``cut_graph.py``). For a GPU Inductor gets it whole.
    """
    before = compile_counts()
    examples = examples_of(args)
    tell_compiler(tensors_in(examples))
    options: dict[str, Any] = {"guard_filter_fn": _no_guards}
    if any(tensor.is_cuda for tensor in tensors_in(examples)):
        backend: Any = "inductor"
        options |= _OPTIONS
    else:
        backend = CutFunction
    meter = CostMeter()
    with contextlib.ExitStack() as settings, warnings.catch_warnings():
        # Of kernels that read scales of float16: that is meant.
        warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed in the scheduler node")
        for setting in _SETTINGS_AHEAD:
            settings.enter_context(setting())
        copy = own_copy(function, name)
        compiled: Any = torch.compile(copy, fullgraph=True, dynamic=False, backend=backend, options=options)
        with whole_libraries() as builds:
            ahead = compiled.aot_compile((examples, {}))
    after = compile_counts()
    facts = {key: round(after[key] - before[key], 2) for key in ("graphs", "graph_breaks", "cpp_seconds")}
    return ahead, facts | {"cost": list(meter.cost(builds.libraries, builds.header_seconds))}


class CutFunction:
    """What the compiler makes of a traced graph for a CPU: a backend of ``torch.compile``.

    Attributes:
        source: of the program, see ``CutGraph``.
        native: its ``NativeRuns``.
        results: of its pieces, by name: what torch keeps of each.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        cut = cut_graph(module)
        compiled = {name: compile_part(*piece, _OPTIONS) for name, piece in cut.pieces.items()}
        self.source, self.results = cut.source, {name: result for name, (_, result) in compiled.items()}
        native = {name: found for name, result in self.results.items() if (found := native_piece_of(result))}
        self.native = native_runs(self.source, {name: piece for name, (piece, _) in native.items()})
        pieces = {name: _of_list(function) for name, (function, _) in compiled.items()}
        libraries = {f"{name}.{kernel}": path for name, (_, paths) in native.items() for kernel, path in paths.items()}
        self._call = run_program(self.source, pieces, self.native, libraries)

    def __call__(self, *inputs: Any) -> Any:
        return self._call(*inputs)

    def serialize(self) -> "CutFunction":
        """What torch asks for of the result of a backend."""
        return self


def _of_list(function: Callable) -> Callable:
    return lambda inputs: function(*inputs)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Look for no garbage in cycles meanwhile: a quarter of the time went there, and most objects live to the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Within which compile_ahead compiles.
_SETTINGS_AHEAD: tuple[Callable[[], AbstractContextManager], ...] = (
    torch.no_grad, with_caches, sizes_of_one, plain_vectors, headers_in_cache, aot_compile_on, without_sources,
    _without_collecting,
)  # fmt: skip


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def compile_counts() -> dict[str, float]:
    """What torch's compiler has counted in this process."""
    counters = compiler_counters()
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "hits": inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"],
        "misses": inductor["fxgraph_cache_miss"] + autograd["autograd_cache_miss"],
        "cpp_seconds": cpp_seconds(),
    }
