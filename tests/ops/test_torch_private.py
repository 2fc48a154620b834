"""Torch's private names: all that this torch lacks, in one message; and that a few files alone use them."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# quick_start.py decides how torch is imported, so it cannot import a file that imports torch.
PRIVATE = [*sorted((ROOT / "ops").glob("torch_private*.py")), ROOT / "compiled_llm" / "system" / "quick_start.py"]
ENGINE = [path for room in ("compiled_llm", "models", "ops", "scripts") for path in (ROOT / room).rglob("*.py")]


# Of a file that has a private name: to parse the others would take most of the time.
MAY_HAVE_ONE = re.compile(r"\btorch[\w.\s]*\._[a-zA-Z]|\bfrom\s+torch[\w.]*\s+import\b[^)]*?\b_[a-zA-Z]")


def private_names(source: str) -> Iterator[str]:
    """Dotted names of torch with a part that begins with one underscore: those imported, and those written out."""
    if not MAY_HAVE_ONE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and _begins_with_torch(node):
            names = [ast.unparse(node)]
        for name in names:
            first, *parts = name.split(".")
            if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def _begins_with_torch(node: ast.expr) -> bool:
    """``torch.a.b``, and not the result of a call: other nodes take most of the time to write out."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def is_there(name: str) -> bool:
    """Whether a dotted name can be imported, as a module or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        return bool(module) and is_there(module) and hasattr(resolved(module), attribute)
    return True


def resolved(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return getattr(resolved(module), attribute)


def test_this_torch_has_every_private_name() -> None:
    """Those of the engine, and those that its tests use."""
    sources = [path.read_text() for path in (*PRIVATE, *(ROOT / "tests").rglob("*.py"))]
    names = {name for source in sources for name in private_names(source)}
    assert "torch._dynamo.mark_dynamic" in names
    if torch.version.cuda is None or not torch.cuda.is_available():
        names = {name for name in names if not name.startswith(("torch._C._cuda", "torch.cuda."))}
    assert not sorted(name for name in names if not is_there(name)), f"torch {torch.__version__} lacks these"


def test_what_is_missing_is_seen() -> None:
    source = "import torch\nfrom torch._gone import name\ntorch._dynamo.gone_too(torch._dynamo.mark_dynamic)"
    assert sorted(name for name in set(private_names(source)) if not is_there(name)) == [
        "torch._dynamo.gone_too",
        "torch._gone.name",
    ]


def test_private_names_are_used_in_these_files_alone() -> None:
    for path in ENGINE:
        source = path.read_text()
        if path not in PRIVATE:
            assert not set(private_names(source)), path
            assert not any(f'"_{module}' in source for module in ("dynamo", "inductor", "functorch")), path
