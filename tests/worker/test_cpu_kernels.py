"""Kernels are built beside the rest of a start: this machine's set, of what the model calls. Then they are there."""

import io
import threading
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import OPS, Library
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.cpu_kernels import KernelBuild

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")


def test_what_is_missing_is_built_until_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.best_isa()
    monkeypatch.setenv("COMPILED_LLM_ISA", "avx2")
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path))
    built: list[str] = []
    loaded: list[str] = []
    may_end = threading.Event()

    def build(library: Library) -> None:
        may_end.wait(60)
        built.append(library.name)

    monkeypatch.setattr(native, "best_isa", lambda: "avx2")
    monkeypatch.setattr(native, "libraries_of", lambda op: [Library(op, Path("a")), Library(f"{op}.avx2", Path("a"))])
    monkeypatch.setattr(native, "must_be_built", lambda library: library.name != "sampling_cpu.avx2")
    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(native, "load", loaded.append)
    stream = io.StringIO()
    kernels = KernelBuild(StartProgress("lines", stream), OPS)
    line = stream.getvalue()
    beginning = f"compiled-llm: building C++ kernels for avx2: {2 * len(OPS) - 1} libraries"
    assert line == f"{beginning}, beside what follows; kept in {tmp_path / 'kernels'}\n"
    assert (built, loaded) == ([], [])
    may_end.set()
    kernels.finish()
    kernels_built = [f"{op}.avx2" for op in OPS if op != "sampling_cpu"]
    assert sorted(built) == sorted([*OPS, *kernels_built])
    assert loaded == list(OPS)
    assert kernels.seconds_waited > 0


def test_a_build_that_fails_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "must_be_built", lambda library: library.name == "linear_cpu")
    monkeypatch.setattr(native, "build", lambda library: (_ for _ in ()).throw(RuntimeError("building it failed")))
    with pytest.raises(RuntimeError, match="building it failed"):
        KernelBuild(StartProgress(), OPS).finish()


def test_nothing_is_said_where_all_is_there() -> None:
    KernelBuild(StartProgress(), OPS).finish()
    stream = io.StringIO()
    kernels = KernelBuild(StartProgress("lines", stream), OPS)
    kernels.finish()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("quantization", "of_linears"),
    [
        (None, {"linear_cpu"}),
        ("int4", {"linear_cpu", "quantized_linear_cpu"}),
        ("int4_w4a8", {"linear_cpu", "quantized_linear_a8_cpu"}),
    ],
)
def test_a_start_builds_the_kernels_of_the_models_linear_layers_alone(
    quantization: str | None, of_linears: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers.0 skipped there are plain layers too."""
    built: list[str] = []
    loaded: list[str] = []
    load = native.load
    monkeypatch.setattr(native, "must_be_built", lambda library: True)
    monkeypatch.setattr(native, "build", lambda library: built.append(library.name))
    monkeypatch.setattr(native, "load", lambda op: loaded.append(op) or load(op))
    skipped = {} if quantization is None else {"quantization": quantization, "quantization_skip": ("layers.0",)}
    eager = {"enforce_eager": True, "num_kv_blocks": 8, "bucket_sizes": (1,), "max_model_len": 64}
    with CompiledEngine(**eager, **skipped, progress="off"):
        pass
    expected = {"attention_cpu", "rowwise_cpu", "sampling_cpu", *of_linears}
    assert {name.partition(".")[0] for name in built} == expected
    assert set(loaded) == expected
