"""Every program of scripts/ starts in a plain checkout: the package is not installed, and the directory is another."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PROGRAMS = [path for path in sorted(SCRIPTS.rglob("*.py")) if 'if __name__ == "__main__"' in path.read_text()]
DRAWN = ("gpu_validate.py",)


def modules(path: Path) -> Iterator[str]:
    """What a file imports when it is loaded, in its order."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def in_order(path: Path) -> Iterator[str]:
    """All modules that are loaded with a program, files beside it included, in their order."""
    for name in modules(path):
        beside = path.parent / f"{name.replace('.', '/')}.py"
        if beside.is_file():
            yield from in_order(beside)
        yield name


def name_of(path: Path) -> str:
    return str(path.relative_to(SCRIPTS))


@pytest.mark.parametrize("path", PROGRAMS, ids=name_of)
def test_the_checkout_is_found_before_the_package_is_loaded(path: Path) -> None:
    own = "own_checkout"
    names = list(in_order(path))
    assert own in names
    before = names[: names.index(own)]
    assert [name for name in before if name.split(".")[0] == "compiled_llm"] == []


def cases() -> list[object]:
    assert {path.name for path in PROGRAMS} >= set(DRAWN)
    return [
        pytest.param(path, id=name_of(path), marks=() if path.name in DRAWN else pytest.mark.battery)
        for path in PROGRAMS
    ]


@pytest.mark.parametrize("path", cases())
def test_a_program_says_how_it_is_used(path: Path, tmp_path: Path) -> None:
    """With an interpreter that has all packages but this one."""
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import sys\n"
        f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in str(finder).lower()]\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert "No module named 'compiled_llm'" in run("-c", "import compiled_llm").stderr
    done = run(str(path), "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: ")
