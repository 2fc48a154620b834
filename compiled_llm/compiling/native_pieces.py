"""What Inductor made of a piece of a cut graph, as calls that a native program makes itself.

Inductor's program for a CPU makes empty tensors, and hands their memory to C++ functions, with sizes behind it::

    buf0 = empty_strided_cpu((s52, 256), (256, 1), torch.bfloat16)
    cpp_fused_add_0(arg2_1, arg3_1, buf0, s52)
    return (buf0, )

To run that in Python takes 5 to 20 us, and a graph that drafts has a dozen of them. Where there is nothing else in it,
these calls take the place of the piece, and the ops before and behind are in one native program with them.
"""

import ast
import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from compiled_llm.ops.native_program import DTYPES, MOST_ARGUMENTS

EMPTY, VIEW_OF = "empty_strided_cpu", "reinterpret_tensor"
_DTYPE = "torch."  # before the name of one
_NUMBERS = ("int64_t", "const int64_t")  # what a kernel takes besides pointers
_MOST_DIMENSIONS = 8  # of tensors in a native program


class NativePiece(NamedTuple):
    """A piece, by the names that Inductor's program has.

    Attributes:
        parameters: of its inputs, tensors and sizes.
        statements: empty tensors, views and calls of kernels.
        results: those of its outputs.
        kernels: by name, of each argument whether it is a tensor; else it is a size.
    """

    parameters: tuple[str, ...]
    statements: tuple[ast.stmt, ...]
    results: tuple[str, ...]
    kernels: dict[str, tuple[bool, ...]]


def native_piece(source: str) -> NativePiece | None:
    """``source``: of Inductor's program. None if it has more in it than such calls."""
    body, kernels = ast.parse(source).body, dict[str, tuple[bool, ...]]()
    for statement in body:
        if isinstance(statement, ast.Assign) and _called(statement.value) == "async_compile.cpp_pybinding":
            assert isinstance(statement.value, ast.Call)
            kinds: list[str] = ast.literal_eval(statement.value.args[0])
            if len(kinds) > MOST_ARGUMENTS or not all(kind.endswith("*") or kind in _NUMBERS for kind in kinds):
                return None
            kernels[ast.unparse(statement.targets[0])] = tuple(kind.endswith("*") for kind in kinds)
    functions = [node for part in body for node in ast.walk(part) if isinstance(node, ast.FunctionDef)]
    call = next((function for function in functions if function.name == "call"), None)
    return None if call is None else _Reader(kernels).read(call.body)


class _Reader:
    """Takes the statements of a program's ``call`` one after the other."""

    def __init__(self, kernels: dict[str, tuple[bool, ...]]) -> None:
        self._kernels = kernels
        self._parameters: tuple[str, ...] = ()
        self._same: dict[str, ast.expr] = {}  # names for what has a name already
        self._made: set[str] = set()
        self._tensors: set[str] = set()  # that kernels take
        self._statements: list[ast.stmt] = []

    def read(self, body: Sequence[ast.stmt]) -> NativePiece | None:
        *others, last = body
        if not all(map(self._take, others)) or not isinstance(last, ast.Return):
            return None
        returned = last.value.elts if isinstance(last.value, ast.Tuple) else []
        results = tuple(ast.unparse(self._known(result)) for result in returned)
        if last.value is None or not set(results) <= self._made or len(set(results)) < len(results):
            return None
        if self._tensors.isdisjoint(self._parameters):  # torch finds a native program by a tensor
            return None
        return NativePiece(self._parameters, tuple(self._statements), results, self._kernels)

    def _known(self, node: ast.expr) -> ast.expr:
        return _Renamed(self._same).visit(copy.deepcopy(node))

    def _take(self, statement: ast.stmt) -> bool:
        """False if it is something else than it may be."""
        if isinstance(statement, ast.Delete):
            return True  # who inlines it knows itself when a tensor is used no more
        if isinstance(statement, ast.Expr):
            return self._take_call(statement.value)
        if not isinstance(statement, ast.Assign):
            return False
        if len(statement.targets) > 1:
            return False
        (target,), value = statement.targets, statement.value
        if isinstance(target, ast.Tuple):
            self._parameters = tuple(map(ast.unparse, target.elts))
            return ast.unparse(value) == "args"
        if isinstance(value, ast.Name):
            self._same[ast.unparse(target)] = self._known(value)
            return True
        known = self._known(value)
        if not isinstance(known, ast.Call) or not self._is_tensor(known):
            return False
        self._made.add(ast.unparse(target))
        self._statements.append(ast.fix_missing_locations(ast.Assign([target], known)))
        return True

    def _take_call(self, call: ast.expr) -> bool:
        if ast.unparse(call) == "args.clear()":
            return True
        known, kinds = self._known(call), self._kernels.get(_called(call) or "")
        if kinds is None or not isinstance(known, ast.Call) or len(known.args) != len(kinds):
            return False
        self._statements.append(ast.fix_missing_locations(ast.Expr(known)))
        pairs = list(zip(known.args, kinds, strict=True))
        self._tensors.update(ast.unparse(value) for value, is_tensor in pairs if is_tensor)
        return all(isinstance(value, ast.Name) if is_tensor else _is_size(value) for value, is_tensor in pairs)

    @staticmethod
    def _is_tensor(call: ast.Call) -> bool:
        """Whether it makes an empty tensor or a view."""
        sizes = [value for part in call.args if isinstance(part, ast.Tuple) for value in part.elts]
        if len(sizes) > 2 * _MOST_DIMENSIONS:
            return False
        if _called(call) == EMPTY:
            dtype = ast.unparse(call.args[2])
            is_known = dtype.startswith(_DTYPE) and dtype.removeprefix(_DTYPE) in DTYPES
            return len(call.args) == 3 and is_known and all(map(_is_size, sizes))
        is_view = _called(call) == VIEW_OF and len(call.args) == 4 and isinstance(call.args[0], ast.Name)
        return is_view and all(map(_is_size, (*sizes, call.args[3])))


def dtype_of(empty: ast.Call) -> str:
    """Of the tensor that a call of ``EMPTY`` makes."""
    return ast.unparse(empty.args[2]).removeprefix(_DTYPE)


def inlined(name: str, piece: NativePiece, call: ast.Assign | ast.Expr, number: int) -> list[ast.stmt]:
    """What takes the place of ``b0, = piece_0([...])``. ``number``: another one for each call of a graph."""
    assert isinstance(call.value, ast.Call)
    (given,) = call.value.args
    assert isinstance(given, ast.List)
    names: dict[str, ast.expr] = dict(zip(piece.parameters, given.elts, strict=True))
    for statement in piece.statements:
        if isinstance(statement, ast.Assign):
            made = ast.unparse(statement.targets[0])
            names[made] = ast.Name(f"p{number}_{made}", ast.Load())
    if isinstance(call, ast.Assign):
        (target,) = call.targets
        assert isinstance(target, ast.Tuple)
        for result, outer in zip(piece.results, target.elts, strict=True):
            names[result] = ast.Name(ast.unparse(outer), ast.Load())
    for kernel in piece.kernels:
        names[kernel] = ast.Name(f"{name}.{kernel}", ast.Load())
    return [_Renamed(names).visit(copy.deepcopy(statement)) for statement in piece.statements]


class _Renamed(ast.NodeTransformer):
    """With what ``names`` has in the place of its names."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._names.get(node.id)
        if found is None:
            return node
        return ast.Name(found.id, node.ctx) if isinstance(found, ast.Name) else found


def _is_size(value: ast.expr) -> bool:
    """Whether it is made of whole numbers and names, without a call."""
    allowed = ast.Name | ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.expr_context
    nodes = list(ast.walk(value))
    numbers = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return all(isinstance(node, allowed) for node in nodes) and all(isinstance(number, int) for number in numbers)


def _called(value: ast.expr) -> str | None:
    return ast.unparse(value.func) if isinstance(value, ast.Call) else None
