"""A missing compiler is a clear warning and a slower run, not a traceback; a broken build is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_llm.ops import native

ROOT = Path(__file__).parents[2]


def test_missing_compiler_warns_and_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(native.MissingCompilerWarning, match=r"no-such-compiler.*apt install g\+\+"):
        assert native.load.__wrapped__("attention_cpu") is None


def test_the_engine_serves_without_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("import os\ndef f(x):\n")
    command = [sys.executable, "scripts/serve_offline.py", "--max-tokens", "3", "--bucket-sizes", "4"]
    command += ["--input", str(tmp_path / "prompts.txt")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler found" in done.stderr
    assert "uncompiled" in done.stdout
    assert "Traceback" not in done.stderr


def test_kernels_are_built_into_the_users_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    path = native.cache_directory()
    assert path == tmp_path / "cache"
    assert path.stat().st_mode & 0o777 == 0o700
