"""The wheel carries what an installation needs: kernels' sources, the demo model, both linked packages."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
