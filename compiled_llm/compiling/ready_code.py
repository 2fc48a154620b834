"""Compiled functions in a form that loads without torch's compiler, whose import takes longer than a whole warm start.

What torch makes of a function has three parts: Dynamo's bytecode, which takes the graph's inputs from the arguments;
Inductor's program in Python, which allocates and calls; and its kernels, for a CPU in libraries, for a GPU as the
source of Triton kernels, whose machine code is in Triton's cache. Between the first two are layers for gradients, for
aliases among inputs and outputs, and for tensors made of others. A step needs none of them. ``ready_code`` makes sure
of that, and keeps the three parts alone. Where it cannot, torch's own form serves.
"""

import ast
import contextlib
import dis
import importlib
import itertools
import marshal
import operator
import pickle
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.compiling.native_pieces import NativePiece, native_piece
from compiled_llm.compiling.native_runs import NativeRuns, packed, unpacked
from compiled_llm.ops.native_program import BoundRun, Program, Run, prepare
from compiled_llm.ops.torch_private import (
    aot_result,
    cache_dir,
    inductor_module,
    is_profiling,
    kernel_address,
    load_kernel,
    op_without_python,
    reinterpret_tensor,
)
from compiled_llm.ops.torch_private_builds import ExternKernels, triton_kernel

_ALIGNMENT = 16  # bytes, that Inductor's code for a GPU counts on
# The program where Inductor has compiled a graph whole.
_WHOLE = """
def call(*inputs):
    return piece(list(inputs))  # it empties the list, to free what it no longer needs
"""


class _Helpers:
    """In the place of the compiler's module whose functions Dynamo's bytecode calls."""

    @staticmethod
    def call_size(tensor: Tensor, dimension: int) -> int:
        return tensor.size(dimension)

    @staticmethod
    def call_stride(tensor: Tensor, dimension: int) -> int:
        return tensor.stride(dimension)

    # These two only show the bytecode in torch's profiler.

    @staticmethod
    def record_pregraph_bytecode_enter() -> None: ...

    @staticmethod
    def record_pregraph_bytecode_exit(record: None) -> None: ...

    # From torch 2.14 on these two keep the current stream for graphs that name streams. None here does.

    @staticmethod
    def get_current_stream(device: torch.device) -> None: ...

    @staticmethod
    def store_user_object_weakrefs(*objects: Any) -> None: ...


def ready_code(ahead: Any) -> bytes | None:
    """The parts of an ``AOTCompiledFunction``, as ``load_ready`` takes them; None if it is more than these."""
    environment, compiled = ahead._artifacts.runtime_env, aot_result(ahead)
    source, results = getattr(compiled, "source", _WHOLE), getattr(compiled, "results", {"piece": compiled})
    modules = _modules(environment)
    pieces = {name: _piece(result) for name, result in results.items()}
    if modules is None or None in pieces.values():
        return None
    closed_over = [cell.cell_contents for cell in environment.closure or ()]
    bytecode = environment.bytecode
    values = (bytecode.co_consts, closed_over, environment.used_globals, environment.argdefs, environment.kwdefaults)
    try:
        pickled = pickle.dumps(values)
    except (pickle.PicklingError, AttributeError, TypeError):  # whatever a user's function closes over
        return None
    bytecode = bytecode.replace(co_consts=())  # where Dynamo also puts what marshal cannot write
    return marshal.dumps(
        (
            _program(source),
            _packed(getattr(compiled, "native", None)),
            pieces,
            bytecode,
            ahead._artifacts.backend_id,
            modules,
            pickled,
        )
    )


def load_ready(
    code: bytes, function_globals: dict[str, Any], load_triton: Callable[[str, str], Any] = triton_kernel
) -> "ReadyFunction":
    """The function. Runs what ``code`` holds: only for what this user's cache holds.

    ``ImportError`` if one of its libraries is gone or cut off.

    ``load_triton``: (name, source) of a Triton kernel -> what has ``run``.
    """
    program, native, pieces, bytecode, graph_name, modules, pickled = marshal.loads(code)
    loaded = {name: _load_piece(name, load_triton, *parts) for name, parts in pieces.items()}
    libraries = {f"{name}.{kernel}": path for name, parts in pieces.items() for kernel, path in parts[1].items()}
    graph = run_program(program, loaded, None if native is None else (native[0], unpacked(native[1])), libraries)
    constants, closed_over, used_globals, defaults, keyword_defaults = pickle.loads(pickled)
    imported = {alias: importlib.import_module(name) if name else _Helpers for alias, name in modules.items()}
    known = {**imported, **used_globals, **function_globals, graph_name: graph}
    cells = tuple(types.CellType(value) for value in closed_over)
    function = types.FunctionType(bytecode.replace(co_consts=constants), known, argdefs=defaults, closure=cells)
    function.__kwdefaults__ = keyword_defaults
    return ReadyFunction(function, graph, known, graph_name)


class ReadyFunction:
    """A loaded function.

    Args:
        function: Dynamo's bytecode, whose globals ``known`` have the graph as ``name``.
    """

    def __init__(self, function: Callable, graph: "GraphCall", known: dict[str, Any], name: str) -> None:
        self._function, self._graph, self._known, self._name = function, graph, known, name

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def bind(self, *args: Any) -> tuple[Any, "BoundCall | None"]:
        """The result, and what does the same again with the same tensors, whose contents may be others by then.

        A step has hundreds of weights: to find them among the arguments and to hand them on takes a tenth of a small
        model's step. None where not all results are the graph's own.
        """
        given: list[Any] = []
        made: list[Any] = []

        def once(*inputs: Any) -> Any:
            given.extend(inputs)
            made.extend(self._graph(*inputs))
            return tuple(made)

        self._known[self._name] = once
        try:
            result = self._function(*args)
        finally:
            self._known[self._name] = self._graph
        pick = _pick(result, made)
        return result, None if pick is None else self._graph.bound(given, pick)


def _pick(result: Any, outputs: list[Tensor]) -> Callable[[Any], Any] | None:
    """What makes a result of a graph's outputs, as this one was made of ``outputs``; None if there is more in it."""
    if isinstance(result, tuple):
        picks = [_pick(part, outputs) for part in result]
        make: Callable = type(result)._make if hasattr(result, "_fields") else tuple  # type: ignore[attr-defined]
        return None if None in picks else lambda made: make([pick(made) for pick in picks])  # type: ignore[misc]
    if isinstance(result, Tensor):
        places = [place for place, output in enumerate(outputs) if output is result]
        return operator.itemgetter(places[0]) if places else None
    return (lambda made: None) if result is None else None


def run_program(
    program: str | types.CodeType,
    pieces: Mapping[str, Callable],
    native: tuple[str | types.CodeType, Mapping[str, Program]] | None,
    libraries: Mapping[str, str],
) -> "GraphCall":
    """The ``call`` of the program of a ``CutGraph``.

    Args:
        pieces: what its own names call, which takes a list.
        native: ``NativeRuns`` of the program. It does without where there is no C++ compiler.
        libraries: of the kernels of its pieces, by their names there, below torch's cache directory.
    """
    names: dict[str, Any] = {
        "torch": torch, "device": torch.device, "reinterpret_tensor": reinterpret_tensor(),
        "op_without_python": op_without_python, **pieces,
    }  # fmt: skip
    runs = {} if native is None else {name: prepare(run, _addresses(run, libraries)) for name, run in native[1].items()}
    ready = {name: run for name, run in runs.items() if run is not None}
    return GraphCall(program, names, None if native is None or len(ready) < len(runs) else (native[0], ready))


def _addresses(program: Program, libraries: Mapping[str, str]) -> dict[str, int]:
    """Of the kernels of torch's compiler that a program calls, which are loaded already."""
    return {op: kernel_address(Path(cache_dir(), libraries[op])) for op, *_ in program.steps if op in libraries}


class GraphCall:
    """(inputs) -> outputs. While torch's profiler looks at ops it calls them one by one."""

    def __init__(
        self,
        program: str | types.CodeType,
        names: dict[str, Any],
        native: tuple[str | types.CodeType, Mapping[str, Run]] | None,
    ) -> None:
        self._names, self._native = names, native
        self.by_ops = _call_of(program, names)
        self._by_runs = self.by_ops if native is None else _call_of(native[0], {**names, **native[1]})

    def __call__(self, *inputs: Any) -> Any:
        return self.by_ops(*inputs) if is_profiling() else self._by_runs(*inputs)

    def bound(self, inputs: list[Any], pick: Callable[[Any], Any]) -> "BoundCall | None":
        """The call with these inputs, and ``pick`` of what it gives; None without native programs."""
        if self._native is None:
            return None
        source, runs = self._native
        bound = {name: run.bound() for name, run in runs.items()}
        return BoundCall(self, _call_of(source, {**self._names, **bound}), list(bound.values()), inputs, pick)


class BoundCall:
    """A graph's call with inputs that are always the same tensors. ``GraphCall.bound`` makes it."""

    def __init__(
        self, graph: GraphCall, by_runs: Callable, runs: list[BoundRun], inputs: list[Any], pick: Callable[[Any], Any]
    ) -> None:
        self._graph, self._by_runs, self._runs, self._inputs, self._pick = graph, by_runs, runs, inputs, pick

    def __call__(self) -> Any:
        return self._pick((self._graph.by_ops if is_profiling() else self._by_runs)(*self._inputs))

    def held(self) -> list[Tensor]:
        """Inputs whose memory the runs look at themselves: they refuse another one than at their first call."""
        return [tensor for run in self._runs for tensor in run.held]


def _call_of(program: str | types.CodeType, names: Mapping[str, Any]) -> Callable:
    namespace = dict(names)
    exec(program, namespace)
    return namespace.pop("call")  # or the function would be among its own globals: a circle, which lives on


def _packed(native: NativeRuns | None) -> tuple[types.CodeType, dict[str, tuple]] | None:
    return None if native is None else (_program(native.source), packed(native.runs))


def _load_piece(
    name: str,
    load_triton: Callable[[str, str], Any],
    program: types.CodeType,
    kernels: dict[str, str],
    triton_kernels: dict[str, str],
    aligned: tuple[int, ...],
) -> Callable:
    """What runs Inductor's program: (list of inputs) -> results."""
    namespace: dict[str, Any] = {"__name__": name, "op_without_python": op_without_python}
    namespace["extern_kernels"] = ExternKernels()
    namespace |= {name: load_kernel(Path(cache_dir(), library)) for name, library in kernels.items()}
    namespace |= {name: load_triton(name, source) for name, source in triton_kernels.items()}
    exec(program, namespace)
    run = namespace["call"]

    def run_aligned(inputs: list[Any]) -> Any:
        for place in aligned:
            assert inputs[place].data_ptr() % _ALIGNMENT == 0, f"input {place} must lie at a multiple of {_ALIGNMENT}"
        return run(inputs)

    return run_aligned if aligned else run


def _piece(result: Any) -> tuple[types.CodeType, dict[str, str], dict[str, str], tuple[int, ...]] | None:
    """What ``_load_piece`` takes, of what torch keeps of a graph; None if it is more."""
    found = _inductor_program(result.compiled_fw.result) if _is_plain(result) else None
    return None if found is None else (*found, tuple(result.compiled_fw.result.inputs_to_check))


def native_piece_of(result: Any) -> tuple[NativePiece, dict[str, str]] | None:
    """Of what torch keeps of a piece: as a native program computes it, and its kernels' libraries; None: it cannot."""
    found = _piece(result)
    if found is None:
        return None
    _, libraries, triton_kernels, aligned = found
    piece = native_piece(result.compiled_fw.result.source_code)
    return None if piece is None or triton_kernels or aligned else (piece, libraries)


def _is_plain(result: Any) -> bool:
    """Whether to run the graph is all there is to do: what torch would do around it is nothing."""
    metadata, graph = result.runtime_metadata, result.compiled_fw.result
    around = (
        result.compiled_bw,
        result.maybe_subclass_meta,
        result.indices_of_inps_to_detach,
        [wrapper for wrapper in result.dispatch_wrappers if wrapper.needs_post_compile],
        metadata.num_outputs_aliased,
        metadata.num_intermediate_bases,
        metadata.num_mutated_inp_runtime_indices,  # others than those that the graph writes itself
        metadata.is_rng_op_functionalized,
        metadata.tokens,
        graph.constants,
        graph.frozen_param_names,
        graph.torchbind_constants,
        graph.opaque_value_type_classes,
        graph.partition_maps,
        graph._wrap_compiled_regions,
        torch.is_autocast_enabled("cpu"),
    )
    return not any(around)


def _modules(environment: Any) -> dict[str, str] | None:
    """The modules that the bytecode uses, by the names that it has for them; "" for ``_Helpers``.

    None if it uses one of the compiler's in another way.
    """
    code = list(dis.get_instructions(environment.bytecode))
    used: dict[str, str] = {}
    for instruction, following in itertools.pairwise(code):
        name = instruction.argval
        if instruction.opname != "LOAD_GLOBAL" or name not in environment.import_sources:
            continue
        used[name] = environment.import_sources[name]
        if used[name].startswith("torch._"):
            if not hasattr(_Helpers, str(following.argval)):
                return None
            used[name] = ""
    return used


def _inductor_program(graph: Any) -> tuple[types.CodeType, dict[str, str], dict[str, str]] | None:
    """Inductor's program without its kernels and what built them, and the kernels; None for another kind.

    Names of a CPU's kernels -> their libraries, below torch's cache directory; of Triton kernels -> their source.
    """
    module, kernels, triton_kernels, kept = inductor_module(graph.cache_key), {}, {}, []
    if module is None:
        return None
    for statement in ast.parse(graph.source_code).body:
        built = isinstance(statement, ast.Assign) and _called(statement.value)
        if built == "async_compile.cpp_pybinding":
            name = statement.targets[0].id
            with contextlib.suppress(ValueError):
                library = Path(getattr(module, name).__self__.__file__)
                kernels[name] = str(library.resolve().relative_to(Path(cache_dir()).resolve()))
                continue
            return None
        if built == "async_compile.triton":
            name, source = (ast.literal_eval(argument) for argument in statement.value.args)
            triton_kernels[name] = source
            continue
        if "async_compile" not in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}:
            kept.append(statement)
        elif built not in (False, "AsyncCompile") or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return None  # a kernel of another kind
    return _program([statement for statement in map(_Needed(kept).visit, kept) if statement]), kernels, triton_kernels


def _program(source: str | list[ast.stmt]) -> types.CodeType:
    """Code that defines what ``source`` defines, and names its ops first."""
    ops = _Ops()
    statements = ast.parse(source).body if isinstance(source, str) else source
    statements = [ops.visit(statement) for statement in statements]
    first = next(i for i, statement in enumerate(statements) if isinstance(statement, ast.FunctionDef | ast.ClassDef))
    program = ast.fix_missing_locations(ast.Module([*statements[:first], *ops.names(), *statements[first:]], []))
    return compile(program, "<compiled graph>", "exec")


class _Needed(ast.NodeTransformer):
    """Leaves out imports of names that the program does not use: Inductor writes the same ones into every program.

    ``extern_kernels`` comes from ``load_ready``, since its import takes a second.
    """

    def __init__(self, statements: list[ast.stmt]) -> None:
        nodes = [node for statement in statements for node in ast.walk(statement)]
        self._used = {node.id for node in nodes if isinstance(node, ast.Name)} - {"extern_kernels"}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        node.names = [alias for alias in node.names if (alias.asname or alias.name) in self._used]
        return node if node.names else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node  # its imports are made when it is called


class _Ops(ast.NodeTransformer):
    """Ops are called by names of the program's own.

    To look one up by four names, in each call of each step, takes as long as some ops do.
    """

    def __init__(self) -> None:
        self._named: dict[str, str] = {}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called.startswith("torch.ops.") and called.count(".") == 4:
            self._named[called] = called.replace(".", "_")
            node.func = ast.Name(self._named[called], ast.Load())
        return self.generic_visit(node)

    def names(self) -> list[ast.stmt]:
        return [ast.parse(f"{name} = op_without_python({op})").body[0] for op, name in self._named.items()]


def _called(value: ast.expr) -> str | None:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else None
