"""The compiler's requirements: which torch is refused. And what is compiled where nothing may be kept."""

import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compiled_llm.ops  # noqa: F401  (all of them are defined)
from compiled_llm.compiling.compiler import check_torch, compile_ahead, compile_at_first_call
from compiled_llm.ops.torch_private_cpp import headers_in_cache


def test_a_torch_that_cannot_compile_ahead_of_time_is_refused_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    check_torch(cpu, enforce_eager=False)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(
        ValueError, match=r"torch 2\.13 or later, given torch 2\.12\.1\+cpu: pip install 'torch>=2\.13'"
    ):
        check_torch(cpu, enforce_eager=False)
    check_torch(cpu, enforce_eager=True)
    check_torch(torch.device("cuda"), enforce_eager=False)


def test_ops_are_no_surprise_where_functions_are_compiled_at_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch 2.11 writes out what each one is given, which no deep model survives. Layouts are as usual."""
    from torch._inductor import graph, lowering
    from torch._library.utils import get_layout_constraint_tag

    said: list[str] = []
    monkeypatch.setattr(graph.log, "info", lambda text, *arguments: said.append(text))
    normed = compile_at_first_call(lambda x, weight: torch.ops.compiled_llm.rms_norm(x, weight, 1e-6), False)
    x = torch.randn(3, 64)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        assert torch.equal(normed(x, x[0]), torch.ops.compiled_llm.rms_norm(x, x[0], 1e-6))
    assert not [text for text in said if "implicit fallback" in text]
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("compiled_llm::")]
    assert len(names) > 50
    for name in names:
        op = getattr(torch.ops.compiled_llm, name).default
        default = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
        assert op in lowering.lowerings
        assert lowering.maybe_layout_constraints(op) is default


def test_programs_with_the_same_seed_share_no_code() -> None:
    """Nor does compiling draw from a program's generator."""
    x = torch.ones(4)
    with torch._inductor.config.patch(fx_graph_cache=False), torch.no_grad():
        for function in (lambda x: x * 2, lambda x: x * 3):
            random.seed(0)
            ahead, _ = compile_ahead(function, "scaled", (x,))
            assert random.random() == random.Random(0).random()
            assert torch.equal(ahead.fn(x), function(x))


@pytest.mark.battery
@pytest.mark.parametrize("name", ["TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FX_GRAPH_CACHE"])
def test_compiles_where_the_environment_disables_the_caches(name: str) -> None:
    script = """
import torch
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.ops.torch_private import keeps_compiled_code
assert not keeps_compiled_code()
with torch.no_grad():
    print(compile_ahead(lambda x: x * 2, "double", (torch.ones(4),))[0].fn(torch.full((4,), 3.0)).tolist())
assert not keeps_compiled_code()
"""
    environment = {**os.environ, name: str(int("DISABLE" in name))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[6.0, 6.0, 6.0, 6.0]\n", done.stderr


def test_where_there_is_no_openssl_no_header_is_precompiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch would call it for a digest, and fail."""
    with headers_in_cache():
        assert torch._inductor.config.cpp_cache_precompile_headers == (shutil.which("openssl") is not None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with headers_in_cache():
        assert not torch._inductor.config.cpp_cache_precompile_headers
    assert torch._inductor.config.cpp_cache_precompile_headers


COMPILE = """
import os, shutil, torch
from compiled_llm.compiling.compiler import compile_ahead
assert shutil.which("openssl") is None
ahead, facts = compile_ahead(lambda x: x.sin() + 1, "sine", (torch.zeros(40),))
assert (ahead.fn(torch.zeros(40)) == 1).all()
"""


@pytest.mark.battery
def test_a_machine_without_openssl_compiles(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for path in Path(place).iterdir() if Path(place).is_dir() else ():
            if path.name != "openssl" and not (programs / path.name).exists():
                (programs / path.name).symlink_to(path)
    env = {**os.environ, "PATH": str(programs), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    subprocess.run([sys.executable, "-c", COMPILE], env=env, check=True)


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_compiling_collects_no_garbage_and_leaves_the_collector_as_it_was() -> None:
    x = torch.ones(3, 3)
    collections = sum(generation["collections"] for generation in gc.get_stats())
    compile_ahead(product, "product", (x,))
    assert sum(generation["collections"] for generation in gc.get_stats()) - collections < 10
    assert gc.isenabled()
    gc.disable()
    try:
        compile_ahead(product, "product", (x,))
        assert not gc.isenabled()
    finally:
        gc.enable()
