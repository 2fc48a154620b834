"""A missing compiler is a clear warning and a slower run, not a traceback; a broken build is an error."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compiled_llm.ops import native
from compiled_llm.ops.kernel_build import DIGESTS, OPS, Library, isas_of, shipped, texts, write_digests

ROOT = Path(__file__).parents[2]


def test_missing_compiler_warns_and_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(native.MissingCompilerWarning, match=r"no-such-compiler.*apt install g\+\+"):
        assert native.load.__wrapped__("attention_cpu") is None


def test_kernels_are_built_into_the_users_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    path = native.cache_directory()
    assert path == tmp_path / "cache"
    assert path.stat().st_mode & 0o777 == 0o700


SOURCE = """
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""


def library_of(directory: Path, answer: int) -> Library:
    source = directory / "tiny.cpp"
    source.write_text(SOURCE.replace("ANSWER", str(answer)))
    return Library("tiny", source)


def answer_of(library: Library) -> int:
    opened = native.open_library(library)
    assert opened is not None
    return opened.answer()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are built."""
    built: list[str] = []
    build = Library.build
    monkeypatch.setattr(Library, "build", lambda *args: built.append(args[3]) or build(*args))
    return built


def test_built_once_and_again_when_changed_or_corrupt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, builds: list[str]
) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    assert native.must_be_built(library_of(tmp_path, 42))
    for _ in range(2):
        assert answer_of(library_of(tmp_path, 42)) == 42
    assert len(builds) == 1
    assert not native.must_be_built(library_of(tmp_path, 42))
    (library,) = native.kernel_directory().iterdir()
    assert (library.name, library.stat().st_mode & 0o777) == (builds[0], 0o755)

    assert answer_of(library_of(tmp_path, 43)) == 43
    assert len(builds) == 2

    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "other"))
    native.cache_directory()
    native.kernel_directory().mkdir()
    (native.kernel_directory() / library.name).write_bytes(b"cut off")
    with pytest.warns(UserWarning, match="does not load, so it is built again"):
        assert answer_of(library_of(tmp_path, 42)) == 42
    assert len(builds) == 3
    whole = library.read_bytes()
    for length in (0, 40, len(whole) // 2, len(whole) - 1):
        (native.kernel_directory() / library.name).unlink()  # what this process has loaded of it stays
        (native.kernel_directory() / library.name).write_bytes(whole[:length])
        assert native.must_be_built(library_of(tmp_path, 42))
    with pytest.warns(UserWarning, match="does not load, so it is built again: it is cut off"):
        assert answer_of(library_of(tmp_path, 42)) == 42
    assert len(builds) == 4


def test_a_library_of_the_package_is_taken_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, builds: list[str]
) -> None:
    library, compiler = library_of(tmp_path, 7), native.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    shipped = tmp_path / "libraries"
    shipped.mkdir()
    library.build(compiler, shipped, library.file_name())
    write_digests(shipped)
    monkeypatch.setattr(native, "_SHIPPED", shipped)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    assert not native.must_be_built(library)
    assert answer_of(library) == 7
    assert not (tmp_path / "cache").exists()
    assert native.open_library(library_of(tmp_path, 8)) is None, "it is of other sources"

    monkeypatch.setenv("CXX", compiler)
    foreign = library_of(tmp_path, 9)
    (shipped / foreign.file_name()).write_bytes(b"for another system")
    write_digests(shipped)
    with pytest.warns(UserWarning, match="came with the package and does not load here"):
        assert answer_of(foreign) == 9
    changed = library_of(tmp_path, 10)
    changed.build(compiler, shipped, changed.file_name())  # whole, and not what was packed
    with pytest.warns(UserWarning, match="is not what the package brought, so it is left alone"):
        assert answer_of(changed) == 10
    (shipped / DIGESTS).unlink()
    unknown = library_of(tmp_path, 11)
    unknown.build(compiler, shipped, unknown.file_name())
    with pytest.warns(UserWarning, match="is not what the package brought, so it is left alone"):
        assert answer_of(unknown) == 11
    assert len(builds) == 6, "what was not loaded was built for this machine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("planted", ["cache", "kernels", "library"])
def test_a_library_that_another_user_could_have_planted_is_not_run(
    planted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    tiny = library_of(tmp_path, 42)
    native.build(tiny)
    (library,) = (tmp_path / "cache" / "kernels").iterdir()
    place = {"cache": tmp_path / "cache", "kernels": library.parent, "library": library}[planted]
    os.chown(place, 4321, 4321)
    place.chmod(0o777)
    monkeypatch.setattr(native.ctypes, "CDLL", lambda path: pytest.fail(f"{path} was loaded"))
    monkeypatch.setattr(Library, "build", lambda *args: pytest.fail("it was built there"))
    for use in (native.open_library, native.build):
        with pytest.raises(ValueError, match=f"code is not loaded from .*kernels: .*{place.name} belongs to user 4321"):
            use(tiny)


def test_a_broken_source_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.cpp").write_text("this is no C++")
    with pytest.raises(RuntimeError, match=r"building broken failed: (.*\n)+.*error: "):
        native.open_library(Library("broken", tmp_path / "broken.cpp"))
    assert list(native.kernel_directory().iterdir()) == []


@pytest.fixture(scope="module")
def kernels() -> native.Kernels:
    module = native.load("sampling_cpu")
    if module is None:
        pytest.skip("no C++ compiler")
    return module


def test_a_set_is_chosen_for_one_call(kernels: native.Kernels) -> None:
    """Of the calling thread alone, and only while it runs. Its library is looked for once."""
    opened: list[str] = []
    kernels = native.load.__wrapped__("sampling_cpu")
    with pytest.MonkeyPatch.context() as patch:
        load = native.open_library
        patch.setattr(native, "open_library", lambda library: opened.append(library.name) or load(library))
        for _ in range(2):
            assert kernels.run("greedy_tokens", torch.tensor([[1.0, 3.0, 2.0]]), isa="portable").tolist() == [1]
        assert kernels.run("greedy_tokens", torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
    assert opened.count("sampling_cpu.portable") == 1
    with pytest.raises(ValueError, match=r"isa 'mmx' is unknown or not supported by this CPU, which has \['"):
        kernels.run("greedy_tokens", torch.zeros(1, 1), isa="mmx")


def test_a_start_needs_the_libraries_of_one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("COMPILED_LLM_ISA", "portable")
    assert native.best_isa() == "portable"
    assert native.load.__wrapped__("compressed_linear_cpu") is None, "no kernels for this set, of which nothing is said"
    assert [library.name for library in native.libraries_of("linear_cpu")] == ["linear_cpu", "linear_cpu.portable"]
    assert native.is_available("linear_cpu")
    names = {library.name for library in shipped()}
    for op in OPS:
        assert {f"{op}.{isa}" for isa in isas_of(op)} - names <= {f"{op}.amx_in_software"}, "a wheel has all"


HEADERS = sorted((ROOT / "ops").rglob("*.h"))


@pytest.mark.battery
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_headers_compile_alone(header: Path) -> None:
    compiler = native.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-fsyntax-only", "-std=c++20", "-Wno-psabi", "-x", "c++", "-Wall", "-Wno-unused-function"]
    if header.name == "op.h":  # it comes after an op's types
        command += ["-Wno-unused-variable", "-include", str(ROOT / "ops" / "rowwise" / "rowwise_cpu_types.h")]
    done = subprocess.run([*command, "-include", str(header), os.devnull], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_header_is_a_new_build(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text('#include <vector>\n#include "b.h"\n#include "d/../c.h"\n')
    (tmp_path / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "c.h").write_text("// c\n")
    (tmp_path / "d.h").write_text("// d\n")
    first_lines = [text.splitlines()[0] for text in texts(source, [tmp_path / "d.h"])]
    assert first_lines == ["#include <vector>", "// d", '#include "c.h"', "// c"]
    library = Library("a", source, ('-DKERNELS="d.h"', "-DLEVEL=1"))
    names = {library.file_name(), library.file_name("g++"), dataclasses.replace(library, defines=()).file_name()}
    (tmp_path / "d.h").write_text("// changed\n")
    assert len(names | {library.file_name()}) == 4


def test_the_environment_limits_the_instruction_set() -> None:
    """Read when a library is first used, so in a process of its own."""
    code = """
import itertools
import os
from compiled_llm.ops import native
os.environ["COMPILED_LLM_ISA"] = "portable"
print(native.load("sampling_cpu").supported_isas())
os.environ["COMPILED_LLM_ISA"] = "sse9"
try:
    native.load("linear_cpu")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()[:2]
    assert first == "['portable']"
    assert second.startswith("COMPILED_LLM_ISA must be amx, avx512_bf16, avx512, avx2 or portable, given 'sse9'")


def test_small_tensors_share_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, each zeroed and of its own memory; a new mapping begins where one is full."""
    monkeypatch.setattr(native, "_PAGES", native._Pages())
    made = [native.huge_zeros((5, 1000), torch.float32) for _ in range(3)]
    starts = [tensor.data_ptr() for tensor in made]
    assert [later - start for start, later in itertools.pairwise(starts)] == [20_096] * 2
    made[0].fill_(1)
    assert not made[1].any()
    many = [native.huge_zeros((1_000_000,), torch.uint8) for _ in range(20)]
    assert len({tensor.data_ptr() for tensor in many}) == 20
    assert not any(tensor.any() for tensor in many)
    large = native.huge_zeros((3 << 20,), torch.uint8)
    assert large.data_ptr() % (2 << 20) == 0
    weights = [native.huge_zeros((3 << 20,), torch.uint8, is_weight=True) for _ in range(3)]
    assert weights[2].data_ptr() - weights[1].data_ptr() == 3 << 20
    assert native.huge_zeros((16 << 20,), torch.uint8, is_weight=True).data_ptr() % (2 << 20) == 0


def test_a_weight_that_does_not_fit_leaves_the_rest_to_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_PAGES", native._Pages())
    made = [native.huge_zeros((size << 20,), torch.uint8, is_weight=True) for size in (15, 2, 15, 2)]
    assert made[3].data_ptr() - made[1].data_ptr() == 2 << 20
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 3
    assert not any(tensor.any() for tensor in made)


def test_tensors_in_rows_lie_side_by_side() -> None:
    """A row has an element of each, and those of other rows are no part of it."""
    kinds = [((2, 4), torch.bfloat16), ((10,), torch.int8), ((3, 5), torch.float32), ((3,), torch.float8_e4m3fn)]
    made = native.huge_zeros_in_rows(3, kinds)
    assert [tensor.dtype for tensor in made] == [dtype for _, dtype in kinds]
    assert [tuple(tensor.shape) for tensor in made] == [(3, 2, 4), (3, 10), (3, 3, 5), (3, 3)]
    assert [tensor.stride() for tensor in made] == [(64, 4, 1), (128, 1), (32, 5, 1), (128, 1)], "whole cache lines"
    assert [tensor.data_ptr() - made[0].data_ptr() for tensor in made] == [0, 16, 28, 88]
    assert made[0].data_ptr() % (2 << 20) == 0
    for number, tensor in enumerate(made):
        tensor.copy_(torch.full(tensor.shape, number + 1.0))
    assert all((tensor.float() == number + 1).all() for number, tensor in enumerate(made))
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 4, "torch would copy them"
