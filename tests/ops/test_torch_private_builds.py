"""Keys of Triton's kernels."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compiled_llm.ops.torch_private_builds import same_keys_in_any_order

jit = pytest.importorskip("triton.runtime.jit")

SOURCE = """
import triton
import triton.language as tl

FACTOR = tl.constexpr(3)

@triton.jit
def inner(x):
    return x * FACTOR

@triton.jit
def outer(x):
    tl.store(x, inner(tl.load(x)))
"""


def update_as_triton_36(self: Any, function: Any) -> None:
    self.used_global_vals.update(function.used_global_vals)
    self.hasher.update(function.cache_key.encode())


def loaded(path: Path) -> ModuleType:
    """Anew, without any key."""
    spec = importlib.util.spec_from_file_location("kernels_of_the_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keys(path: Path) -> tuple[str, str]:
    """Of ``outer``: before ``inner`` has one, and after."""
    first, second = loaded(path), loaded(path)
    assert second.inner.cache_key
    return first.outer.cache_key, second.outer.cache_key


def test_a_kernels_key_does_not_depend_on_what_has_a_key_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels_of_the_test.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(jit.DependenciesFinder, "_update_hash", update_as_triton_36)
    before, after = keys(path)
    assert before != after, "what Triton 3.6 did"
    same_keys_in_any_order.__wrapped__()
    before, after = keys(path)
    assert before == after
