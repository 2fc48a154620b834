"""What one process exports, a fresh one with an empty cache imports, and then compiles nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.ops import native

ROOT = Path(__file__).parents[2]
ONE_BUCKET_EACH = ["--shape", "tiny", "--bucket-sizes", "1", "--token-bucket-sizes", "8"]
NAMES = ["step", "sample", "sample_changed", "logprobs", "prompt_logprobs"]
SMALL = [*ONE_BUCKET_EACH, "--max-num-batched-tokens", "8", "--max-model-len", "64", "--num-kv-blocks", "8"]


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMPILED_LLM_CACHE": str(cache)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-m", "compiled_llm", "compile", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.battery
def test_a_bundle_spares_another_cache_all_compiling(tmp_path: Path) -> None:
    for name in ("attention_cpu", "linear_cpu", "rowwise_cpu", "sampling_cpu"):
        native.load(name)
    shutil.copytree(native.cache_directory() / "kernels", tmp_path / "from" / "kernels")  # or they are built again
    bundle, report = tmp_path / "bundle", tmp_path / "report.json"
    exported = run(tmp_path / "from", *SMALL, "--export", str(bundle))
    assert exported.returncode == 0, exported.stderr
    result = json.loads(exported.stdout.splitlines()[-1])
    assert (result["hits"], result["misses"]) == (0, len(NAMES))
    reason = f"compile cache: miss, because nothing of that name is stored ({', '.join(NAMES)})"
    assert reason in exported.stdout

    imported = run(tmp_path / "to", *SMALL, "--import", str(bundle), "--json", str(report))
    assert imported.returncode == 0, imported.stderr
    assert "which is a program" in imported.stderr
    result = json.loads(report.read_text())
    assert json.loads(imported.stdout.splitlines()[-1]) == result
    assert (result["hits"], result["misses"]) == (len(NAMES), 0)
    assert {graph["name"] for graph in result["graphs"]} == set(NAMES)
    phases = result["phases"]
    assert set(phases) == {"imports", "device", "weights", "build", "kernels", "load", "pool", "other"}
    assert min(phases.values()) >= 0
    assert sum(phases.values()) - phases["imports"] == pytest.approx(result["seconds"], abs=0.01)
    # Nothing was built: all libraries are those of the bundle.
    libraries = {file.name for file in (tmp_path / "to").rglob("*.so")}
    assert libraries
    assert not [name for name in libraries if "quantize" in name], "the model is not quantised"
    assert libraries <= {file.name for file in (tmp_path / "from").rglob("*.so")}
    assert result["imported_files"] == len(libraries) + len(NAMES)

    other = run(tmp_path / "to", *SMALL, "--block-size", "32", "--max-num-seqs", "0")
    assert other.returncode == 2
    assert "compiled-llm compile: error: max_num_seqs" in other.stderr
