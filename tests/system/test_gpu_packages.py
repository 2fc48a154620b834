"""Triton is for GPUs alone: an installation without it, and without a C++ compiler, serves and reports."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.system.gpu_packages import check_triton

ROOT = Path(__file__).parents[2]
# Programs and commands that look at code for GPUs, with the arguments that they require.
PROGRAMS = (("gpu_step_tables.py",),)
COMMANDS = ("report gpu-step", "tune attention", "tune linear --kind int8")


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed, in this process."""
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.usefixtures("no_triton")
@pytest.mark.parametrize("words", PROGRAMS, ids=lambda words: words[0])
def test_a_program_that_needs_it_says_so_before_anything_else(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = ROOT / "scripts" / words[0]
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), *words[1:]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{path.name} needs Triton" in said
    assert "pip install -e '.[gpu]'" in said


@pytest.mark.usefixtures("no_triton")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_that_needs_it_says_so_before_anything_else(words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    said = capsys.readouterr().err
    assert f"compiled-llm {words.split(' --')[0]} needs Triton" in said
    assert "pip install -e '.[gpu]'" in said


def test_what_is_installed_is_not_asked_for() -> None:
    check_triton("this test")


def without_triton(directory: Path) -> Path:
    """The Python of an environment that has every package of this one but Triton."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"], check=True)
    packages = directory / "packages"
    packages.mkdir()
    for place in map(Path, sys.path):
        for path in place.iterdir() if place.name == "site-packages" else ():
            link = packages / path.name
            if not path.name.startswith(("triton", "__")) and path.suffix != ".pth" and not link.exists():
                link.symlink_to(path)
    (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{ROOT}\n{packages}\n")
    return directory / "venv" / "bin" / "python"


def run(python: Path, *words: str, **environment: str) -> tuple[str, str]:
    """What it printed. Nothing of this process's environment reaches it but where programs are."""
    env = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run([python, *words], env=env, cwd=python.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


SERVE = """
import importlib.util
import torch
from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.system import hardware

assert importlib.util.find_spec("triton") is None
with CompiledEngine(bucket_sizes=(2,), progress="off") as engine:
    (out,) = engine.generate("import os", SamplingParams(temperature=0, max_tokens=4))
    assert len(out.outputs[0].token_ids) == 4
    engine.report(measure_limits=False)
    print(engine.compile_report(), engine.runner.describe_start())
assert "triton" not in hardware.describe(torch.device("cpu"))
"""


def test_without_it_and_without_a_compiler_an_engine_serves_and_reports(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVE)
    kernels = {"COMPILED_LLM_CACHE": os.environ["COMPILED_LLM_CACHE"]} if "COMPILED_LLM_CACHE" in os.environ else {}
    home = {"HOME": os.environ["HOME"]}  # where else the kernels are
    no_compiler = {"CXX": "no-such-compiler"}
    printed, said = run(without_triton(tmp_path), str(tmp_path / "serve.py"), **home, **kernels, **no_compiler)
    assert "eager" in printed
    assert "nothing compiled" in printed
    assert "no C++ compiler found" in said


@pytest.mark.battery
def test_the_first_command_of_the_readme_without_it(tmp_path: Path) -> None:
    """In an environment and a home of its own: everything is built and compiled, and the next start finds it."""
    python, program = without_triton(tmp_path), str(ROOT / "scripts" / "serve_offline.py")
    for made in ("5 graphs compiled", "5 graphs from disk"):
        command = [python, program, "--bucket-sizes", "1,8,32"]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert made in done.stderr
