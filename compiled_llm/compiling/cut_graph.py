"""A traced graph, cut at its ops: a program that calls the ops, and what lies between them as pieces for the compiler.

Almost all of a step is calls of the project's ops, into which a compiler cannot look. Between two of them there is
nothing, a view, or some plain torch. A view costs one call, and plain torch is a *piece*, which is compiled by itself.
Pieces that are alike, as those of a model's layers, are one. So what a step costs to compile grows with its layers in
tracing alone.

The program does what the graph does, in the same order::

    def call(s0, a0, a1, ...):
        b0, b1 = piece_0([a0, a1])
        b2 = torch.ops.compiled_llm.rms_norm.default(b0, a2, 1e-06)
        b3 = reinterpret_tensor(b2, (s0, 8, 128), (4096, 128, 1), 3072)
        ...
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from compiled_llm.ops.torch_private_graphs import (
    as_named,
    is_op,
    may_be_view,
    op_name,
    size_names,
    size_text,
    storage_of,
    writes_argument,
)


class Piece(NamedTuple):
    """A graph between two ops. It returns a tuple. ``inputs`` are fake tensors and symbolic sizes like its own."""

    graph: fx.GraphModule
    inputs: list[Any]


class CutGraph(NamedTuple):
    """A program in Python, whose ``call`` takes the graph's inputs, and the pieces that it calls, by their names.

    The program needs the names ``torch``, ``device``, ``reinterpret_tensor``, and for each piece a function of that
    name. It takes a list of inputs, which it may empty.
    """

    source: str
    pieces: dict[str, Piece]


def cut_graph(module: fx.GraphModule) -> CutGraph:
    """Cut what Dynamo has traced."""
    return _Cutter(module).cut()


class _Line(NamedTuple):
    results: list[str]  # the variables that it makes
    text: str
    uses: list[str]


class _Cutter:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._variables: dict[fx.Node, str] = {}  # of what the program has
        self._lines: list[_Line] = []
        self._pieces: dict[tuple, tuple[str, Piece]] = {}  # by all that decides about their code
        self._arguments: list[str] = []
        self._sizes_given: dict[str, fx.Node] = {}  # arguments that are sizes, by the compiler's names for them

    def cut(self) -> CutGraph:
        between: list[fx.Node] = []
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._add_argument(node)
            elif is_op(node) or node.op == "output":
                self._add_piece(between)
                between = []
                self._add_call(node)
            elif not _is_free(node):
                between.append(node)
        return CutGraph(self._source(), dict(self._pieces.values()))

    # -- The program

    def _add_argument(self, node: fx.Node) -> None:
        """A tensor, or a size, which is called as in the texts of other sizes."""
        if isinstance(_value(node), torch.SymInt):
            node.meta["example_value"] = as_named(_value(node))
        name = size_text(_value(node)) if isinstance(_value(node), torch.SymInt) else ""
        if not name.isidentifier() or name in self._arguments:  # a size that another argument gives as well
            name = f"a{len(self._arguments)}"
        else:
            self._sizes_given[name] = node
        self._variables[node] = name
        self._arguments.append(name)

    def _add_call(self, node: fx.Node) -> None:
        """A call of an op, or the end."""
        uses: list[str] = []
        arguments = [self._text(value, uses) for value in node.args]
        if node.op == "output":
            self._lines.append(_Line([], f"return {arguments[0]}", uses))
            return
        arguments += [f"{name}={self._text(value, uses)}" for name, value in node.kwargs.items()]
        result = self._new(node)
        self._lines.append(_Line([result], f"{result} = torch.ops.{op_name(node)}({', '.join(arguments)})", uses))
        for pick in node.users:  # at once: a result that is used late would keep the others
            if _is_pick(pick) and pick.users:
                part = self._new(pick)
                self._lines.append(_Line([part], f"{part} = {result}[{pick.args[1]}]", [result]))

    def _text(self, value: Any, uses: list[str]) -> str:
        """An argument. ``uses`` gets the variables in it."""
        if isinstance(value, fx.Node):
            if _is_size(_value(value)):
                return self._size_text(_value(value))
            uses.append(self._variable(value))
            return uses[-1]
        if isinstance(value, tuple | list):
            return f"({''.join(f'{self._text(item, uses)}, ' for item in value)})"
        return f"float('{value}')" if isinstance(value, float) and value - value != 0 else repr(value)

    def _variable(self, node: fx.Node) -> str:
        """The variable that has a tensor; a view is made when it is first used."""
        node = _written(node)
        if node not in self._variables:
            base, view = _base_of(node), _value(node)
            assert base is not node, f"{node} is used before it is there"
            offset = view.storage_offset() - _value(base).storage_offset()
            sizes, strides = self._size_text(view.shape), self._size_text(view.stride())
            of = self._variable(base)
            text = f"reinterpret_tensor({of}, {sizes}, {strides}, {size_text(offset)})"
            result = self._new(node)
            self._lines.append(_Line([result], f"{result} = {text}", [of]))
        return self._variables[node]

    def _size_text(self, value: Any) -> str:
        """A size, or a tuple of sizes."""
        if isinstance(value, tuple):
            return f"({''.join(f'{self._size_text(size)}, ' for size in value)})"
        return size_text(value)

    def _new(self, node: fx.Node) -> str:
        return self._variables.setdefault(node, f"b{len(self._variables)}")

    def _source(self) -> str:
        """With each variable deleted after its last use, so that its memory is free."""
        used: set[str] = set()
        lines: list[str] = []
        for line in reversed(self._lines):
            done = dict.fromkeys(name for name in (*line.results, *line.uses) if name not in used)
            used.update(done)
            if done and not line.text.startswith("return"):
                lines.append(f"del {', '.join(done)}")
            lines.append(line.text)
        body = "".join(f"    {line}\n" for line in reversed(lines))
        return f"def call({', '.join(self._arguments)}):\n{body}"

    # -- Pieces

    def _add_piece(self, between: Sequence[fx.Node]) -> None:
        """What lies between two ops, ``between``: all of it that is no view."""
        if not between:
            return
        outputs = [node for node in between if not writes_argument(node) and _is_used_besides(node, set(between))]
        graph, inputs = _own_graph(between, outputs, self._sizes_given)
        module = fx.GraphModule(self._module, graph)
        examples = [_value(node) for node in inputs]
        key = (module.code, _described(examples))
        name, _ = self._pieces.setdefault(key, (f"piece_{len(self._pieces)}", Piece(module, examples)))
        uses: list[str] = []
        arguments = ", ".join(self._text(node, uses) for node in inputs)
        results = [self._new(node) for node in outputs]
        made = f"{', '.join(results)}, = " if results else ""
        self._lines.append(_Line(results, f"{made}{name}([{arguments}])", uses))


def _own_graph(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], sizes: Mapping[str, fx.Node]
) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of these nodes alone, with the views that they use, and what it takes of the graph around it.

    ``sizes``: by their names. It takes those that the shapes of its other inputs are made of.
    """
    graph, inputs = fx.Graph(), list[fx.Node]()
    own: dict[fx.Node, fx.Node] = {}

    def argument(node: fx.Node) -> fx.Node:
        node = _written(node)
        if node not in own:
            if node.op != "placeholder" and not _is_pick(node) and _is_free(node):
                own[node] = copied(node)
            else:
                own[node] = graph.placeholder(f"input_{len(inputs)}")
                own[node].meta = dict(node.meta)
                inputs.append(node)
        return own[node]

    def copied(node: fx.Node) -> fx.Node:
        arguments = fx.map_arg(node.args, argument), fx.map_arg(node.kwargs, argument)
        copy = graph.create_node(node.op, node.target, *arguments)
        copy.meta = dict(node.meta)
        return copy

    for node in nodes:
        own[node] = copied(node)
    graph.output(tuple(own[node] for node in outputs))
    shapes = [
        size for node in inputs for tensor in _tensors(_value(node)) for size in (*tensor.shape, *tensor.stride())
    ]
    for name in sorted(set().union(*map(size_names, shapes))):
        if sizes[name] not in inputs:
            with graph.inserting_before(next(iter(graph.nodes))):
                graph.placeholder(f"of_{name}").meta = dict(sizes[name].meta)
            inputs.insert(0, sizes[name])
    return graph, inputs


# -- Nodes


def _value(node: fx.Node) -> Any:
    """What Dynamo traced a node with: fake tensors and symbolic sizes. None: nothing."""
    return node.meta.get("example_value")


def _first(node: fx.Node) -> Any:
    """Its first argument."""
    return node.args[0]


def _written(node: fx.Node) -> fx.Node:
    """The node that an operation in place gives back, written to; any other node is itself."""
    while writes_argument(node):
        node = _first(node)
    return node


def _is_pick(node: fx.Node) -> bool:
    """Whether it is one of an op's results."""
    return node.target is operator.getitem and is_op(_first(node)) and isinstance(node.args[1], int)


def _is_free(node: fx.Node) -> bool:
    """Whether nothing is to be computed: a size, an op's result, a view, a constant tensor."""
    if writes_argument(node):
        return False
    return (
        _is_size(_value(node)) or node.op in ("placeholder", "get_attr") or _is_pick(node) or _viewed(node) is not None
    )


def _is_size(value: Any) -> bool:
    """Whether it is a number, or a tuple of them as of a shape."""
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_size, value))
    return isinstance(value, int | float | torch.SymInt)


def _viewed(node: fx.Node) -> fx.Node | None:
    """The input that a node gives other views of, and nothing else; None if it is no view."""
    if not may_be_view(node) or _is_pick(node) or not isinstance(node.args[0], fx.Node):
        return None
    other, storages = _first(node), _storages(_value(node))
    is_part = isinstance(_value(other), tuple | list) and _viewed(other) is None  # of what a function computed
    shares = bool(storages) and storages <= _storages(_value(other)) and _dtypes(_value(node)) == _dtypes(_value(other))
    return _written(other) if shares and not is_part else None


def _base_of(node: fx.Node) -> fx.Node:
    """What has the memory that a view shows."""
    while (other := _viewed(node)) is not None:
        node = other
    return node


def _is_used_besides(node: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether something besides ``nodes`` uses what a node gives, or a view of it."""
    return any(
        _is_used_besides(user, nodes)
        if _is_free(user) or (writes_argument(user) and user.args[0] is node)
        else user not in nodes
        for user in node.users
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _storages(value: Any) -> set[int]:
    return set(map(storage_of, _tensors(value)))


def _dtypes(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in _tensors(value)}


def _described(values: Sequence[Any]) -> str:
    """All that code depends on of inputs; sizes without names are numbered in the order in which they occur."""
    described = [
        f"{value.dtype} {value.device} {[*map(size_text, value.shape)]} {[*map(size_text, value.stride())]}"
        if isinstance(value, Tensor)
        else size_text(value)
        for value in values
    ]
    numbers: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda found: numbers.setdefault(found[0], f"size {len(numbers)}"), "; ".join(described))
