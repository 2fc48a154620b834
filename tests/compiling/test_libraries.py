"""Where compiled code goes: the user's own directory, or the one that is named, and none that others may write to."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from compiled_llm.compiling.libraries import use_own_cache_directory


def test_where_the_own_cache_may_not_be_written_to_a_temporary_directory_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.warns(UserWarning, match="own may not be written to: compiled code goes to a temporary directory"):
        use_own_cache_directory()
    chosen = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert Path(chosen).parent == tmp_path
    use_own_cache_directory()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == chosen
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(ValueError, match=r"others than its owner may write to .*own \(mode 777\).*COMPILED_LLM_CACHE"):
        use_own_cache_directory()
    (tmp_path / "own").chmod(0o700)
    (tmp_path / "wished").mkdir()
    (tmp_path / "wished").chmod(0o770)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "wished"))
    with pytest.raises(ValueError, match=r"may write to .*wished \(mode 770\).*or set TORCHINDUCTOR_CACHE_DIR to"):
        use_own_cache_directory()


@pytest.mark.battery
@pytest.mark.parametrize("wished", [None, "wished"])
def test_compiled_code_goes_to_the_users_own_cache_or_where_wished(wished: str | None, tmp_path: Path) -> None:
    """In a process of its own: torch writes its default into the environment when it is imported."""
    code = """
import compiled_llm.engine.engine, torch
from pathlib import Path
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.compiling.libraries import use_own_cache_directory
use_own_cache_directory()
cache = CompileCache(Path({graphs!r}), {{}})
function = CompiledFunction(lambda x: x * 3 + 1, "triple", torch.device("cpu"), enforce_eager=False, cache=cache)
function.warm_up(lambda: (torch.ones(4),))
assert function.report().cache == "miss"
""".format(graphs=str(tmp_path / "graphs"))
    environment = {**os.environ, "COMPILED_LLM_CACHE": str(tmp_path / "own")}
    environment["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # would take seconds in each empty directory
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if wished:
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / wished)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    expected = tmp_path / wished if wished else tmp_path / "own" / "inductor"
    assert list(expected.rglob("*.so"))
    assert not wished or not (tmp_path / "own" / "inductor").exists()
