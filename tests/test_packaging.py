"""The wheel carries what an installation needs, and the pinned versions are ones that the package allows."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from compiled_llm.ops.kernel_build import DIGESTS, shipped

ROOT = Path(__file__).parents[1]


def build_wheel(directory: Path, **environment: str) -> Path:
    """A wheel of the repository, in ``directory``."""
    source = directory / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(directory)!r})"
    command = [sys.executable, "-c", build]  # what pip calls
    subprocess.run(command, cwd=source, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    (wheel,) = directory.glob("*.whl")
    return wheel


def expected_files() -> set[str]:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "compiled_llm").rglob("*.py")}
    for room in ("ops", "models"):
        paths = [path for path in (ROOT / room).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
        assert paths
        expected |= {f"compiled_llm/{path.relative_to(ROOT)}" for path in paths}
    static = ROOT / "compiled_llm" / "server" / "static"
    expected |= {str(path.relative_to(ROOT)) for path in static.iterdir()}
    for folder in ("demo_model", *(f"demo_drafters/{name}" for name in ("draft_model", "eagle3", "medusa"))):
        paths = [path for path in (ROOT / "compiled_llm" / folder).iterdir() if path.is_file()]
        expected |= {str(path.relative_to(ROOT)) for path in paths}
    return expected | {"compiled_llm/py.typed"}


def files_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.battery  # the next one builds such a wheel with libraries beside
def test_the_wheel_is_complete_and_holds_nothing_else(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert files_in(wheel) == expected_files()


def test_a_wheel_made_with_a_compiler_carries_the_libraries_of_all_sets(tmp_path: Path) -> None:
    """A compiler that writes empty files, since a real one takes a minute."""
    compiler = tmp_path / "empty-cxx"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done\n')
    compiler.chmod(0o755)
    wheel = build_wheel(tmp_path, CXX=str(compiler))
    assert "-py3-none-linux" in wheel.name
    libraries = {f"compiled_llm/ops/libraries/{library.file_name()}" for library in shipped()}
    assert len(libraries) == 59
    assert files_in(wheel) == expected_files() | libraries | {f"compiled_llm/ops/libraries/{DIGESTS}"}


@pytest.mark.battery
def test_a_cross_compiler_makes_a_wheel_for_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command of CONTRIBUTING.md; each library is one of ARM by its header."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("needs aarch64-linux-gnu-g++ (Debian's package g++-aarch64-linux-gnu)")
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
    wheel = build_wheel(tmp_path, CXX=compiler)
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    libraries = {f"compiled_llm/ops/libraries/{library.file_name()}" for library in shipped()}
    assert files_in(wheel) == expected_files() | libraries | {f"compiled_llm/ops/libraries/{DIGESTS}"}
    with zipfile.ZipFile(wheel) as archive:
        machines = {int.from_bytes(archive.read(name)[18:20], "little") for name in libraries}
    assert machines == {183}  # EM_AARCH64


SERVE = """
import sys
import warnings
from pathlib import Path
from compiled_llm import CompiledEngine, SamplingParams

if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CompiledEngine(bucket_sizes=(4,), progress="off", enforce_eager="eager" in sys.argv) as engine:
            found = engine.generate(["import os", "def f(x):"], SamplingParams(temperature=0, max_tokens=8, logprobs=1))
            print([(out.outputs[0].token_ids, repr(out.outputs[0].cumulative_logprob)) for out in found])
            print(engine.compile_report().cache_count("miss") > 0)
    maps = Path("/proc/self/maps").read_text().splitlines()
    print(sorted({line.split("/", 1)[1] for line in maps if "_cpu" in line and "torch" not in line}))
    print([str(warning.message) for warning in caught if "compiler" in str(warning.message)])
"""


@pytest.mark.battery
def test_a_wheel_serves_without_a_compiler(tmp_path: Path) -> None:
    """On its own libraries, with the bits that this repository gives; with a compiler it compiles its steps."""
    wheel = build_wheel(tmp_path)
    venv, script = tmp_path / "venv", tmp_path / "serve.py"
    script.write_text(SERVE)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # torch and all else

    def serve(python: Path | str, *words: str, **environment: str) -> list:
        env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environment}
        done = subprocess.run([python, script, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [ast.literal_eval(line) for line in done.stdout.splitlines()]

    expected, _, built, _ = serve(sys.executable, "eager", PYTHONPATH=str(ROOT))
    outputs, compiled, libraries, warned = serve(python, PATH=str(venv / "bin"))
    assert (outputs, compiled) == (expected, False)
    assert len(libraries) == len(built) == 9
    assert all("site-packages/compiled_llm/ops/libraries/" in name for name in libraries)
    assert len(warned) == 1
    assert "no C++ compiler found" in warned[0]
    assert "steps run uncompiled" in warned[0]
    outputs, compiled, libraries, warned = serve(python, COMPILED_LLM_CACHE=str(tmp_path / "cache"))
    assert (outputs, compiled, warned) == (expected, True, [])
    assert not (tmp_path / "cache" / "kernels").exists(), "nothing was built"


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
