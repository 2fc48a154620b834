"""Private names of torch that graphs traced by its compiler need: what a node does, and how a part is compiled."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket

_NAMESPACE = "compiled_llm"
# Methods and functions of torch whose result shares the memory of their first argument, or may.
_VIEWS = {
    "alias", "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "float",
    "getattr", "getitem", "movedim", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
    "squeeze", "swapaxes", "t", "tensor_split", "to", "transpose", "type_as", "unbind", "unflatten", "unfold",
    "unsqueeze", "view", "view_as",
}  # fmt: skip
_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.iand, operator.ior, operator.ixor,
}  # fmt: skip


def is_op(node: fx.Node) -> bool:
    """Whether a node calls one of the project's ops."""
    return node.op == "call_function" and op_name(node).startswith(f"{_NAMESPACE}.")


def op_name(node: fx.Node) -> str:
    """Which op a node calls, as "library.name.overload"; "" where it calls something else."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        return f"{target._qualified_op_name.replace('::', '.')}.default"
    return str(target) if isinstance(target, OpOverload) else ""


def writes_argument(node: fx.Node) -> bool:
    """Whether a node of plain torch writes to its first argument, which it gives back or nothing."""
    if node.op not in ("call_function", "call_method") or is_op(node):
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable
    if getattr(target, "__module__", "") == "_operator":  # whose ``and_`` and ``or_`` are not in place
        return target in _IN_PLACE
    name = _name(node)
    return name.endswith("_") and not name.endswith("__")


def may_be_view(node: fx.Node) -> bool:
    """Whether a node of plain torch does nothing else than to give another view of its first argument, if it can."""
    return node.op in ("call_function", "call_method") and not is_op(node) and _name(node) in _VIEWS


def _name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target).split(".")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def storage_of(tensor: Tensor) -> int:
    """What the tensors that share memory have in common, fake ones too."""
    return tensor.untyped_storage()._cdata


def size_text(size: Any) -> str:
    """A size in Python: a number, or a formula of the names that the compiler has for sizes."""
    if not isinstance(size, torch.SymInt):
        return repr(size)
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(size.node.expr)


def as_named(size: Any) -> Any:
    """A size that was found equal to another and is called as that one, so that Inductor makes its name from it."""
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.shape_env.create_symintnode(size.node.expr, hint=size.node.hint)


def size_names(size: Any) -> set[str]:
    """The names in ``size_text``."""
    return {str(name) for name in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()


def compile_part(graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> tuple[Callable, Any]:
    """Let Inductor compile a part of a traced graph, from within a backend: what to call, and what torch keeps of it.

    ``inputs``: fake tensors and symbolic sizes of the traced graph. ``graph`` may be changed.
    """
    import torch._inductor.config

    # What torch's cache finds may be for one size alone, and finding it makes a size of the whole trace that one.
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled: Any = torch._inductor.standalone_compile(
            graph,
            list(inputs),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": dict(options)},
            aot=True,
            donate_graph_module=True,
        )
    with torch._functorch.config.patch("bundled_autograd_cache", True):
        return compiled, compiled.inner_fn.compiled_fn.serialize()
