"""Every Python snippet of the documents runs word for word, those of one document one after the other."""

import ast
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from tests.docs.markdown import DOCUMENTS, ROOT, Block, blocks, name_of

DEMO_MODEL = ROOT / "compiled_llm" / "demo_model"
NOT_RUN = {
    "docs/log.md": "needs xgrammar, and is no part of the engine",
    "docs/serving.md": "tests/server/test_documents.py runs it with a server",
    "compiled_llm/demo_model/README.md": "what the model wrote, not what a reader would type",
}
WITH_SNIPPETS = [path for path in DOCUMENTS if blocks(path, "python") and name_of(path) not in NOT_RUN]


@pytest.mark.parametrize("path", WITH_SNIPPETS, ids=name_of)
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's engines are compiled, those of other documents are not."""
    if path.name != "README.md":
        monkeypatch.setattr(CompiledEngine, "__init__", uncompiled(CompiledEngine.__init__))
    model = tmp_path / "path" / "or" / "hub-id"  # as the documents say
    model.parent.mkdir(parents=True)
    model.symlink_to(DEMO_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in blocks(path, "python"):
            exec(compiled(block), namespace)
    finally:
        for value in namespace.values():
            if isinstance(value, CompiledEngine):
                value.close()


def uncompiled(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(engine: CompiledEngine, *args: Any, **options: Any) -> None:
        init(engine, *args, **{"enforce_eager": True} | options)

    return make


def compiled(block: Block):  # type: ignore[no-untyped-def]
    """The code of a block; its errors name the document and the line."""
    return compile("\n" * (block.line - 1) + block.text, name_of(block.path), "exec")


def test_snippets_that_are_not_run_import_what_is_there() -> None:
    for block in blocks(ROOT / "docs" / "log.md", "python"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("tests", "compiled_llm"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
