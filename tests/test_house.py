"""The rules of the house: who may import whom, no torch in the scheduler, short files; test_security.py has others."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

import pytest

from scripts.rooms import FILES, ROOT, imports, module_of, nodes, room_of

pytestmark = pytest.mark.usefixtures("without_garbage_collection")  # all files are parsed, and their trees kept
PACKAGE = ROOT / "compiled_llm"
# Loaded by programs that have no use for torch, and by the scheduler.
WITHOUT_TORCH = ("planning", "routing", "scheduling", "drafting", "constraints", "parsing", "api", "system")
LOADS_TORCH = {"compiled_llm.system.hardware", "compiled_llm.planning.model_facts"}


@cache
def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it may import: the table of docs/design.md, whose order is that of the imports."""
    text = (ROOT / "docs" / "design.md").read_text().split("## Rooms", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\S+?)/?` \|.*\|(.*)\|$", text, re.MULTILINE)
    names = [name for name, _ in rows]
    return {
        name: set(names[index + 1 :]) if may.strip() == "all below" else set(re.findall(r"`(\S+?)/?`", may))
        for index, (name, may) in enumerate(rows)
    }


def test_rooms_import_as_the_table_says() -> None:
    for path in FILES:
        own = room_of(module_of(path))
        assert own is not None, path
        for module in imports(path):
            assert module.split(".")[0] not in ("ops", "models", "scripts", "tests"), f"{path}: imports {module}"
            room = room_of(module)
            allowed = room in (None, own) or room in rooms()[own]
            assert allowed, f"{module_of(path)} imports {module}: see docs/design.md"


def test_the_table_has_every_room_and_points_downwards() -> None:
    assert set(rooms()) == {room_of(module_of(path)) for path in FILES}
    order = list(rooms())
    for room, below in rooms().items():
        assert below <= set(order[order.index(room) + 1 :]), room


def test_no_circle_of_imports() -> None:
    graph = {module_of(path): set(imports(path)) for path in FILES}
    packages = {module_of(path) for path in FILES if path.name == "__init__.py"}
    list(TopologicalSorter({name: below - packages - {name} for name, below in graph.items()}).static_order())


def test_the_scheduler_and_what_it_reads_never_load_torch() -> None:
    modules = {module_of(path) for path in FILES if room_of(module_of(path)) in WITHOUT_TORCH} - LOADS_TORCH
    code = (
        f"import importlib, sys; [*map(importlib.import_module, {sorted(modules)})]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_ops_loads_neither_transformers_nor_triton() -> None:
    code = "import compiled_llm.ops, sys; assert not {'transformers', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flags_of_all_scripts_are_written_out() -> None:
    """``argparse`` takes abbreviations unless it is told not to; ``FlagParser`` tells it."""
    parsers = []
    for path in FILES:
        for node in nodes(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert not called.endswith("ArgumentParser"), f"{path}: {called} takes abbreviated flags, use FlagParser"
            parsers += [path.name] * (called == "FlagParser")
    assert {"flags.py", "exact.py", "shapes.py"} < set(parsers)


def test_warnings_are_given_in_one_file() -> None:
    """Which finds the user's line. A number of frames, ``stacklevel``, is right for one way to the call alone."""
    callers = {path.name for path in FILES if re.search(r"warnings\.warn(_explicit)?\(|stacklevel", path.read_text())}
    assert callers == {"user_warnings.py"}


def test_torch_compile_is_called_in_one_file() -> None:
    """But for benchmarks, which compile what others do."""
    package = [path for path in FILES if room_of(module_of(path)) not in ("scripts", "bench")]
    assert {path.name for path in package if "torch.compile(" in path.read_text()} == {"compiler.py"}


def test_functions_of_triton_do_not_return_none_by_name() -> None:
    """Triton 3.6, that of torch 2.11, compiles "return" and not "return None"."""
    functions = [
        (path, node)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    ]
    assert len(functions) > 100
    for path, function in functions:
        for node in ast.walk(function):
            assert not (isinstance(node, ast.Return) and node.value and ast.unparse(node.value) == "None"), (
                f"{path}:{node.lineno}"
            )


def test_files_are_short() -> None:
    assert [path for path in FILES if len(path.read_text().splitlines()) >= 600] == []


def test_functions_of_the_engine_are_short() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    links = {PACKAGE / "models", PACKAGE / "ops"}
    for path in PACKAGE.glob("*/*.py"):
        if path.parent in links:
            continue
        for node in nodes(path):
            if isinstance(node, functions) and node.end_lineno is not None:
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name} has more than 80 lines"
