"""The wheel carries what an installation needs, and the pinned versions are ones that the package allows."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_the_wheel_is_complete_and_holds_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", tmp_path]
    subprocess.run([*command, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "compiled_llm").rglob("*.py")}
    for room in ("ops", "models"):
        paths = [path for path in (ROOT / room).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        assert paths
        expected |= {f"compiled_llm/{path.relative_to(ROOT)}" for path in paths}
    expected |= {f"compiled_llm/demo_model/{path.name}" for path in (ROOT / "compiled_llm" / "demo_model").iterdir()}
    expected.add("compiled_llm/py.typed")
    installed = {name for name in names if ".dist-info/" not in name}
    assert installed == expected


def test_each_dependency_is_pinned_to_one_version_that_pyproject_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    allowed = list(map(Requirement, [*project["dependencies"], *(line for lines in extras for line in lines)]))
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {name: version for name, _, version in (line.partition("==") for line in lines if line)}
    for requirement in allowed:
        if requirement.name != "triton":  # each torch build for GPUs requires a version of its own
            assert pinned[requirement.name] in requirement.specifier, requirement
    assert "triton" not in pinned
