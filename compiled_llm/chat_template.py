"""ChatTemplate: a chat template of a checkpoint, checked and compiled once, rendered many times at a bounded cost."""

from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from compiled_llm.template_budget import Budget, check_integer
from compiled_llm.template_sandbox import Sandbox, TemplateRefusal

# Three times what the longest templates in use have.
MAX_TEMPLATE_CHARACTERS = 2**16
# What a rendering may cost: so much, and so much more for each value and each character that it is given. A step reads
# 64 characters, so that this is enough to read all of them 64 times, and to write them as often.
_STEPS, _STEPS_PER_VALUE, _STEPS_PER_CHARACTER = 500_000, 2_000, 1
_CHARACTERS, _CHARACTERS_PER_CHARACTER = 2**23, 64

# A template has no other templates beside it, and no blocks to fill in. What its values are is the caller's affair.
_REFUSED = (
    nodes.Block,
    nodes.Extends,
    nodes.FromImport,
    nodes.Import,
    nodes.Include,
    nodes.ScopedEvalContextModifier,
)


class ChatTemplate:
    """A Jinja template as ``transformers`` defines them for chat; it sees plain values only and cannot call Python.

    Attributes:
        names: of the variables that it reads, such as ``messages`` or ``enable_thinking``.
        literals: the strings that are written in it, and the names of the attributes that it reads.

    Raises:
        ValueError: it is too long, no template, or uses something that chat templates cannot.
    """

    def __init__(self, source: str) -> None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARACTERS:
            given = f"{len(source)} characters" if isinstance(source, str) else type(source).__name__
            most = MAX_TEMPLATE_CHARACTERS
            raise ValueError(f"the chat template must be a str of at most {most} characters, given {given}")
        self._sandbox = Sandbox()
        self._lock = Lock()
        try:
            tree = self._sandbox.parse(source)
            self.names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            self.literals = frozenset(_literals(tree))
            self._template = self._sandbox.from_string(_Guards().visit(tree))
        except Exception as error:  # jinja2's errors, and what Python says of nesting that is too deep
            raise ValueError(f"the chat template cannot be compiled: {_reason(error)}") from error

    def render(self, variables: Mapping[str, Any], max_characters: int, unescaped: str = "") -> str:
        """The text that it makes of ``variables``, whose values are those of JSON.

        Args:
            variables: by name: ``messages``, ``add_generation_prompt``, ``bos_token`` and so on.
            max_characters: of the text.
            unescaped: characters that ``tojson`` leaves as they are even where the template asks it for ASCII.

        Raises:
            ValueError: the template refuses the variables, does not know what to do with them, makes a longer text, or
                costs more than templates may. The message says which.
        """
        values, characters = _count(variables)
        steps = _STEPS + _STEPS_PER_VALUE * values + _STEPS_PER_CHARACTER * characters
        budget = Budget(steps, _CHARACTERS + _CHARACTERS_PER_CHARACTER * characters)
        pieces, length = [], 0
        try:
            with self._lock:
                self._sandbox.budget, self._sandbox.unescaped = budget, unescaped
                for piece in self._template.generate(variables):
                    length += len(piece)
                    if length > max_characters:
                        raise TemplateRuntimeError(f"it makes a text of more than {max_characters} characters")
                    pieces.append(piece)
        except TemplateRefusal as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # whatever the template does with values that it does not expect
            raise ValueError(f"the chat template failed: {_reason(error)}") from error
        return "".join(pieces)


class _Guards(NodeTransformer):
    """Rewrites a template so that whatever costs time or memory is a call of ``Sandbox``, or paid for by one."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED):
            raise TemplateSyntaxError(f"chat templates cannot use {type(node).__name__.lower()!r}", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        check_integer(node.value)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        charge = _charge(node, node)
        if node.test is not None:
            # It runs for each item, and the body for those alone that pass it.
            node.test = nodes.And(charge, node.test, lineno=node.lineno)
        return self._with_charge(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_charge(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_charge(node)

    def _with_charge(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        """A body pays for itself each time it runs. Inside it, loops that run pay for more than their share."""
        node.body.insert(0, nodes.ExprStmt(_charge(node, node), lineno=node.lineno))
        return self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        others = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _call("compare", [node.expr, *others], node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("key", [node.key], node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        limits = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("slice", [node.node, *(limit or nodes.Const(None) for limit in limits)], node)


def _call(method: str, args: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=node.lineno)
    return nodes.Call(function, args, [], None, None, lineno=node.lineno)


def _charge(body: nodes.Node, node: nodes.Node) -> nodes.Call:
    parts = list(body.find_all(nodes.Node))
    text = sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))
    return _call("charge", [nodes.Const(len(parts)), nodes.Const(text)], node)


def _literals(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Const, nodes.Getattr, nodes.TemplateData)):
        text = node.attr if isinstance(node, nodes.Getattr) else node.as_const()
        if isinstance(text, str):
            yield text


def _count(value: Any) -> tuple[int, int]:
    """(values, characters) in ``value``, a plain value."""
    if isinstance(value, str):
        return 1, len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        counts = [_count(item) for item in value]
        return 1 + sum(count for count, _ in counts), sum(count for _, count in counts)
    return 1, 0


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    return str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"[:1000]
