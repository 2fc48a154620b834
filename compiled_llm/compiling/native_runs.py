"""The program of a cut graph, with what lies between its pieces as native programs (``ops/native_program.py``).

A *run* is several statements, one after the other, that call ops with C++ kernels or make views, and pieces that are
made of such calls (``native_pieces.py``). It becomes one call, whose inputs are arguments of the graph, others, and
sizes::

    b7, b9, = run_0([a2, a3], [b0, b1], (s0, 8*s0))
"""

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from compiled_llm.compiling.native_pieces import EMPTY as _EMPTY
from compiled_llm.compiling.native_pieces import VIEW_OF as _VIEW
from compiled_llm.compiling.native_pieces import NativePiece, dtype_of, inlined
from compiled_llm.ops.library import CPU_KERNELS
from compiled_llm.ops.native_program import DTYPES, EMPTY, KINDS, VIEW, Program, Step

_OPS = "torch.ops.compiled_llm."


class NativeRuns(NamedTuple):
    """``source``: the program of a ``CutGraph``, in which each run is a call of a name in ``runs``.

    Steps that call a kernel of a piece have the names of both, with a dot between.
    """

    source: str
    runs: dict[str, Program]


def native_runs(source: str, pieces: Mapping[str, NativePiece] = MappingProxyType({})) -> NativeRuns | None:
    """None if ``source`` has no run. ``pieces``: those of its pieces that a run may have in it."""
    module = ast.parse(source)
    (function,) = (statement for statement in module.body if isinstance(statement, ast.FunctionDef))
    kernels = {f"{name}.{kernel}": kinds for name, piece in pieces.items() for kernel, kinds in piece.kernels.items()}
    function.body = [part for number, one in enumerate(function.body) for part in _with_inlined(one, pieces, number)]
    several = {
        one.targets[0].id  # type: ignore[attr-defined]
        for one in function.body
        if _is_call(one) and (_num_results(one.value) or 0) > 1  # type: ignore[attr-defined]
    }
    arguments = {argument.arg for argument in function.args.args}
    used_later: set[str] = set()
    body: list[ast.stmt] = []
    runs: dict[str, Program] = {}
    pending: list[ast.stmt] = []

    def end_run() -> None:
        """Of statements that are gathered from the last one to the first."""
        nonlocal body
        statements = pending[::-1]
        begin = next((place for place, one in enumerate(statements) if _is_call(one)), len(statements))
        if sum(map(_is_call, statements)) > 1 or any(map(_is_of_piece, statements)):
            name = f"run_{len(runs)}"
            run = _Run(statements[begin:], used_later, arguments, kernels)
            runs[name] = run.program
            statements[begin:] = ast.parse(run.text(name)).body
        for statement in pending:
            used_later.update(_names(statement))
        body = [*statements, *body]
        pending.clear()

    for statement in reversed(function.body):
        if isinstance(statement, ast.Delete) or _is_native(statement, several, kernels):
            pending.append(statement)
        else:
            end_run()
            used_later.update(_names(statement))
            body = [statement, *body]
    end_run()
    function.body = body
    return NativeRuns(ast.unparse(ast.fix_missing_locations(module)), runs) if runs else None


def _with_inlined(statement: ast.stmt, pieces: Mapping[str, NativePiece], number: int) -> list[ast.stmt]:
    """``statement``, or what takes the place of a piece's call."""
    if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call):
        name = ast.unparse(statement.value.func)
        if name in pieces:
            return inlined(name, pieces[name], statement, number)
    return [statement]


def _names(statement: ast.stmt) -> set[str]:
    """What a statement uses; what it deletes is no use."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _is_call(statement: ast.stmt) -> bool:
    """Among statements of a run: it is no ``del``, and does not pick one of an op's results."""
    return isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call)


def _num_results(call: ast.Call) -> int | None:
    """Of an op that a native program can call; None: of another function."""
    if not ast.unparse(call.func).startswith(_OPS) or _arguments(call) is None:
        return None
    return len(getattr(torch.ops.compiled_llm, _op_of(call)).default._schema.returns)


def _is_of_piece(statement: ast.stmt) -> bool:
    """Among statements of a run: whether Python could not run it by itself."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) == _EMPTY
    return isinstance(statement, ast.Expr)


def _is_native(statement: ast.stmt, several: set[str], kernels: Mapping[str, Any]) -> bool:
    """``several``: variables that are all results of an op which has several."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and ast.unparse(statement.value.func) in kernels
    if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
        return False
    value = statement.value
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name) and value.value.id in several
    if not isinstance(value, ast.Call):
        return False
    return ast.unparse(value.func) in (_VIEW, _EMPTY) or _num_results(value) is not None


def _arguments(call: ast.Call) -> list[tuple[str, ast.expr]] | None:
    """(kind, expression) of each argument of an op; None if a native program cannot call it."""
    name = _op_of(call)
    if name not in CPU_KERNELS or call.keywords:
        return None
    schema = getattr(torch.ops.compiled_llm, name).default._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    if len(kinds) != len(call.args) or not set(kinds) <= set(KINDS):
        return None
    return list(zip(kinds, call.args, strict=True))


def _op_of(call: ast.Call) -> str:
    return ast.unparse(call.func).removeprefix(_OPS).split(".")[0]


class _Run:
    """Statements as a program.

    Args:
        used_later: names that are used after them.
        arguments: names of the graph's arguments.
        kernels: as in a ``NativePiece``, with the piece's name before theirs.
    """

    def __init__(
        self,
        statements: list[ast.stmt],
        used_later: set[str],
        arguments: set[str],
        kernels: Mapping[str, tuple[bool, ...]],
    ) -> None:
        self._kernels = kernels
        made = {one.targets[0].id for one in statements if isinstance(one, ast.Assign)}  # type: ignore[attr-defined]
        tensors = list[str]()
        self._sizes: list[str] = []
        self._gone = [
            target.id
            for one in statements
            if isinstance(one, ast.Delete)
            for target in one.targets
            if isinstance(target, ast.Name) and target.id not in made
        ]
        self._slots: dict[str, int] = {}
        calls = [one for one in statements if isinstance(one, ast.Assign | ast.Expr) and _is_call(one)]
        for call in calls:
            assert isinstance(call.value, ast.Call)
            for kind, expression in self._described(call.value):
                if kind.endswith(("Tensor", "Tensor]")) and isinstance(expression, ast.Name):
                    name = expression.id
                    if name not in made and name not in tensors:
                        tensors.append(name)
        self._arguments = [name for name in tensors if name in arguments]
        self._others = [name for name in tensors if name not in arguments]
        self._slots = {name: slot for slot, name in enumerate([*self._arguments, *self._others])}
        self._count = len(tensors)
        steps = [self._step(call, statements) for call in calls]
        self._outputs = [name for name in self._slots if name in used_later and name in made]
        outputs = tuple(self._slots[name] for name in self._outputs)
        self.program = Program(self._count, len(tensors), len(self._arguments), outputs, _with_last(steps, outputs))

    def _described(self, call: ast.Call) -> list[tuple[str, ast.expr]]:
        called = ast.unparse(call.func)
        if called == _VIEW:
            base, sizes, strides, offset = call.args
            values = [*sizes.elts, *strides.elts, offset]  # type: ignore[attr-defined]
            return [("Tensor", base), *(("int", value) for value in values)]
        if called == _EMPTY:
            sizes, strides, _ = call.args
            dtype = ast.Constant(DTYPES.index(dtype_of(call)))
            return [("int", value) for value in (dtype, *sizes.elts, *strides.elts)]  # type: ignore[attr-defined]
        if called in self._kernels:
            kinds = ["Tensor" if is_tensor else "int" for is_tensor in self._kernels[called]]
            return list(zip(kinds, call.args, strict=True))
        found = _arguments(call)
        assert found is not None
        return found

    def _step(self, statement: ast.Assign | ast.Expr, statements: list[ast.stmt]) -> Step:
        call = statement.value
        assert isinstance(call, ast.Call)
        arguments = tuple(self._argument(kind, expression) for kind, expression in self._described(call))
        called = ast.unparse(call.func)
        if isinstance(statement, ast.Expr):
            return Step(called, arguments, (), ())
        name = statement.targets[0].id  # type: ignore[attr-defined]
        if called in (_VIEW, _EMPTY):
            return Step(VIEW if called == _VIEW else EMPTY, arguments, (self._new(name),), ())
        op = _op_of(call)
        count = _num_results(call)
        assert count is not None
        if count == 1:
            return Step(op, arguments, (self._new(name),), ())
        picked = {
            one.value.slice.value: one.targets[0].id  # type: ignore[attr-defined]
            for one in statements
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Subscript) and one.value.value.id == name  # type: ignore[attr-defined]
        }
        return Step(op, arguments, tuple(self._new(picked.get(place, "")) for place in range(count)), ())

    def _new(self, name: str) -> int:
        """The slot of a tensor that a step makes; "": nothing uses it."""
        slot = self._count
        self._count += 1
        if name:
            self._slots[name] = slot
        return slot

    def _argument(self, kind: str, expression: ast.expr) -> tuple[str, Any]:
        if kind in ("Tensor", "Optional[Tensor]"):
            assert isinstance(expression, ast.Name) or kind != "Tensor"
            return kind, self._slots[expression.id] if isinstance(expression, ast.Name) else -1
        try:
            value = ast.literal_eval(expression)
        except ValueError:
            text = ast.unparse(expression)
            if kind == "float":  # float('inf')
                return kind, float(ast.literal_eval(expression.args[0]))  # type: ignore[attr-defined]
            if text not in self._sizes:
                self._sizes.append(text)
            return "size", self._sizes.index(text)
        return kind, value

    def text(self, name: str) -> str:
        """The statements that take the place of all these."""
        made = f"{', '.join(self._outputs)}, = " if self._outputs else ""
        sizes = "".join(f"{size}, " for size in self._sizes)
        lines = [f"{made}{name}([{', '.join(self._arguments)}], [{', '.join(self._others)}], ({sizes}))"]
        return "\n".join([*lines, *([f"del {', '.join(self._gone)}"] if self._gone else [])])


def _with_last(steps: list[Step], outputs: tuple[int, ...]) -> tuple[Step, ...]:
    kept = set(outputs)
    done: list[Step] = []
    for step in reversed(steps):
        used = {value for kind, value in step.arguments if kind in ("Tensor", "Optional[Tensor]") and value >= 0}
        last = sorted({*used, *step.results} - kept)
        kept.update(used, step.results)
        done.append(step._replace(last=tuple(last)))
    return tuple(reversed(done))


def packed(runs: Mapping[str, Program]) -> dict[str, tuple]:
    """In plain tuples, which ``marshal`` writes."""
    return {name: (*run[:-1], tuple(tuple(step) for step in run.steps)) for name, run in runs.items()}


def unpacked(runs: Mapping[str, tuple]) -> dict[str, Program]:
    """What ``packed`` was given."""
    return {
        name: Program(slots, inputs, arguments, outputs, tuple(Step(*step) for step in steps))
        for name, (slots, inputs, arguments, outputs, steps) in runs.items()
    }
