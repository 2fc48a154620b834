"""Every torch that pyproject.toml allows compiles deep models for a GPU, in seconds; no GPU is needed.

Each version has an environment of its own: CUDA builds of some 5 GB, kept below the cache directory, or where
COMPILED_LLM_TORCH_ENVIRONMENTS says. A version that the package index lacks is skipped.
"""

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from compiled_llm.ops.native import cache_directory

pytestmark = pytest.mark.battery

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("torch_version_steps.py")
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
# Families whose layers differ; each step is of 32 layers.
SHAPES = ("llama-3.1-8b", "qwen3-4b", "qwen3-30b-a3b", "nemotron-h-8b", "granite-4.0-h-1b")
MOST_SECONDS = 60  # of the processor, for a step; alone each takes 10 to 20


def allowed_series() -> list[str]:
    """Such as 2.11, of all versions that pyproject.toml allows."""
    (bounds,) = (found for one in DEPENDENCIES if (found := re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", one)))
    return [f"2.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]


@functools.cache
def python_with(series: str) -> Path:
    """The interpreter of an environment with the newest torch of a series, for CUDA, and what else the engine needs."""
    parent = Path(os.environ.get("COMPILED_LLM_TORCH_ENVIRONMENTS", cache_directory() / "torch_environments"))
    python = parent / series / "bin" / "python"
    usable = [python, "-c", "import torch, triton, transformers, safetensors, psutil; assert torch.version.cuda"]
    if python.exists() and subprocess.run(usable, capture_output=True, check=False).returncode == 0:
        return python
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip(f"the package index does not answer: {listed.stderr.strip()[-200:]}")
    versions = re.findall(rf"(?<=[ (]){re.escape(series)}\.\d+(?=[,)\n])", listed.stdout)
    if not versions:
        pytest.skip(f"the package index has no torch {series}")
    newest = max(versions, key=lambda version: int(version.rpartition(".")[2]))
    subprocess.run([sys.executable, "-m", "venv", "--clear", parent / series], check=True)
    others = [one for one in DEPENDENCIES if not one.startswith("torch")]
    # ===: a build for CPUs, such as 2.13.0+cpu, is another version.
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch==={newest}", *others], check=True, timeout=1200)
    subprocess.run(usable, check=True)
    return python


def steps(series: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program with a torch of ``series``. It is killed with SIGXCPU when it takes too long."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_SECONDS, 2 * MOST_SECONDS + 5))

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [str(python_with(series)), str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=limit, check=False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("series", allowed_series())
def test_steps_of_32_layers_are_compiled_in_seconds(series: str, shape: str, tmp_path: Path) -> None:
    done = steps(series, tmp_path, shape, "decode_8", "tokens_2048")
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    decode, tokens = map(json.loads, done.stdout.splitlines())
    print(series, decode, tokens)
    assert decode["seconds"] < MOST_SECONDS
    assert tokens["seconds"] < MOST_SECONDS


def test_torch_2_11_does_not_come_to_an_end_where_it_looks_for_lowerings_itself(tmp_path: Path) -> None:
    """What ``lower_as_ops`` mends: without it the text of a log line grows without bounds with the layers."""
    done = steps("2.11", tmp_path, "--unmended", "llama-3.1-8b", "tokens_2048")
    assert done.returncode == -signal.SIGXCPU or "RecursionError" in done.stderr, done.stderr[-3000:]
    assert not done.stdout
