"""Compiled functions that load without torch's compiler: they do what the compiler's result does."""

import contextlib
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.compiling.argument_specs import ArgumentCheck
from compiled_llm.compiling.compiler import compile_ahead
from compiled_llm.compiling.libraries import use_own_cache_directory
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.ops.native_program import EMPTY
from compiled_llm.ops.torch_private import DynamicSize, aot_result, compiler_settings, mark_dynamic_size

ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def scaled(pair: Pair, counts: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Reads a nested tuple, writes an argument, and has kernels of its own."""
    counts.add_(pair.second.shape[0])
    return (pair.first.softmax(-1) * factor).relu(), pair.second.cumsum(0)


def arguments() -> tuple[Pair, Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    second = torch.randn(5, 3, generator=generator)
    mark_dynamic_size(second, 0, DynamicSize("rows", 5))
    return Pair(torch.randn(8, 64, generator=generator), second), torch.zeros(4), 0.5


@pytest.fixture(scope="module")
def ahead() -> Any:
    use_own_cache_directory()
    return compile_ahead(scaled, "scaled", arguments())[0]


@pytest.fixture(scope="module")
def payload(ahead: Any) -> bytes:
    code = ready_code(ahead)
    assert code is not None
    return code


def outputs(function: Callable, rows: int = 5) -> list[Tensor]:
    pair, counts, factor = arguments()
    made = function(pair._replace(second=pair.second[:rows]), counts, factor)
    return [*made, counts]


def test_equals_what_the_compiler_gave(ahead: Any, payload: bytes) -> None:
    ready = load_ready(payload, scaled.__globals__)
    for rows in (5, 2):
        with torch.no_grad():
            pairs = zip(outputs(ready, rows), outputs(ahead.fn, rows), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_calls_ops_without_a_python_frame(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = load_ready(payload, scaled.__globals__)
    monkeypatch.setattr(type(torch.ops.aten.cumsum.default), "__call__", None)  # the compiled program calls this op
    with torch.no_grad():
        assert len(outputs(ready)) == 3


def test_loads_without_the_compiler(payload: bytes, tmp_path: Path) -> None:
    """Nor do an engine's modules import it, nor the look at the shapes of a model of any family."""
    from tests.models.ranks import SHARED, config_of  # which imports it

    path, configs = tmp_path / "payload", tmp_path / "configs"
    path.write_bytes(payload)
    configs.write_bytes(pickle.dumps([config_of(name) for name in SHARED]))
    script = f"""
import pickle, sys, torch
import compiled_llm.engine.engine
from pathlib import Path
from compiled_llm.compiling.libraries import use_own_cache_directory
from compiled_llm.compiling.ready_code import load_ready
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import family
from compiled_llm.ops.torch_private import compiler_settings, keeps_compiled_code
from tests.compiling.test_ready_code import outputs, scaled
for config in pickle.loads(Path({str(configs)!r}).read_bytes()):
    family(config.architecture).describe(config, torch.bfloat16, Packed)
    assert "torch._dynamo" not in sys.modules, config.architecture
use_own_cache_directory()
with torch.no_grad():
    torch.save(outputs(load_ready(Path({str(path)!r}).read_bytes(), scaled.__globals__)), {str(tmp_path / "made")!r})
assert keeps_compiled_code()
print(compiler_settings(), *(name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(compiler_settings()), done.stderr
    with torch.no_grad():
        expected = outputs(load_ready(payload, scaled.__globals__))
    made = torch.load(tmp_path / "made")
    assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))


def normed(weights: Pair, x: Tensor, counts: Tensor) -> tuple[Tensor, None, Pair]:
    """Calls ops one after the other, has a kernel of its own, and writes an argument."""
    counts.add_(1)
    first = ops.rms_norm(x * 2, weights.first, 1e-6)
    total, second = ops.add_rms_norm(first, x, weights.second, 1e-6)
    return second, None, Pair(total, counts + x.sum())


def test_it_is_bound_to_tensors_whose_contents_change() -> None:
    """Results and what is written are those of a plain call, also those that an argument is among, also profiled."""
    weights, x, counts = Pair(torch.rand(8), torch.rand(8)), torch.randn(3, 8), torch.zeros(2)
    code = ready_code(compile_ahead(normed, "normed", (weights, x, counts))[0])
    assert code is not None
    ready = load_ready(code, normed.__globals__)
    again: Any = None
    for number in range(5):
        x.copy_(torch.randn(3, 8))
        weights.second.add_(1)
        expected = normed(weights, x, counts.clone())
        with torch.no_grad(), torch.profiler.profile() if number == 3 else contextlib.nullcontext():
            result, again = ready.bind(weights, x, counts) if number == 0 else (again(), again)
        assert type(result) is tuple
        assert type(result[2]) is Pair
        torch.testing.assert_close(result, expected)
        assert counts.tolist() == [number + 1] * 2
    held = {id(tensor) for tensor in again.held()}
    assert held >= {id(tensor) for tensor in (*weights, x, counts)}


def looked_up(weights: Pair, x: Tensor, ids: Tensor) -> Tensor:
    """A kernel between two ops that refuses an index behind the end."""
    first = ops.rms_norm(x, weights.first, 1e-6)
    return ops.rms_norm(first[ids] * 2, weights.second, 1e-6)


def test_pieces_between_ops_are_native_and_what_they_refuse_is_an_error() -> None:
    """After which the next call is as the ones before."""
    weights, x, ids = Pair(torch.rand(8), torch.rand(8)), torch.randn(3, 8), torch.tensor([2, 0, 0])
    ahead = compile_ahead(looked_up, "looked_up", (weights, x, ids))[0]
    native = aot_result(ahead).native
    assert native is not None
    assert [step.op.split(".")[0] for step in native.runs["run_0"].steps] == ["rms_norm", EMPTY, "piece_0", "rms_norm"]
    code = ready_code(ahead)
    assert code is not None
    ready = load_ready(code, looked_up.__globals__)
    with torch.no_grad():
        result, again = ready.bind(weights, x, ids)
        assert again is not None
        for wrong in (7, -9):
            torch.testing.assert_close(result, looked_up(weights, x, ids))
            assert torch.equal(again(), result)
            ids[1] = wrong
            for call in (again, lambda: ready(weights, x, ids)):
                with pytest.raises((RuntimeError, IndexError), match="index out of bounds"):
                    call()
            ids[1] = 1
            result = again()


def test_what_is_bound_frees_its_tensors_at_once() -> None:
    """Not when garbage is next collected, which a program may put off for good: they are weights and a KV pool."""
    args = Pair(torch.rand(8), torch.rand(8)), torch.randn(3, 8), torch.zeros(2)
    code = ready_code(compile_ahead(normed, "normed", args)[0])
    assert code is not None
    check, function = ArgumentCheck(args), load_ready(code, normed.__globals__)
    for _ in range(4):
        assert check.difference(args) is None
        assert check.last is not None
        with torch.no_grad():
            check.last.call(function)
    end, was_on = weakref.ref(args[0].first), gc.isenabled()
    gc.disable()
    try:
        del args
        assert end() is not None
        check.forget()
        assert end() is None
    finally:
        if was_on:
            gc.enable()


def test_results_that_are_arguments_are_not_bound() -> None:
    def same(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, ops.rms_norm(ops.rms_norm(x, y, 1e-6), y, 1e-6)

    x, y = torch.randn(3, 8), torch.rand(8)
    code = ready_code(compile_ahead(same, "same", (x, y))[0])
    if code is not None:
        result, again = load_ready(code, {"ops": ops}).bind(x, y)
        assert result[0] is x
        assert again is None


def test_what_torch_has_to_prepare_is_not_kept() -> None:
    """An output that a piece does not make itself is made by what torch runs around the piece."""

    def bits(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(torch.int32), x + 1

    ahead, _ = compile_ahead(bits, "bits", (torch.ones(4),))
    assert ready_code(ahead) is None
    x = torch.arange(4.0)
    assert ahead.fn(x)[0].data_ptr() == x.data_ptr()


def test_settings_are_seen_whether_changed_by_programs_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = compiler_settings()
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert compiler_settings() != usual
    assert compiler_settings() == usual
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert compiler_settings() != usual
