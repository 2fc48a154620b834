"""A missing compiler is a clear warning and a slower run, not a traceback; a broken build is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from compiled_llm.ops import native

ROOT = Path(__file__).parents[2]


def test_missing_compiler_warns_and_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(native.MissingCompilerWarning, match=r"no-such-compiler.*apt install g\+\+"):
        assert native.load_source(ROOT / "ops" / "attention" / "attention_cpu.cpp") is None


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


SOURCE = """
#include <Python.h>
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, 0, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  PyObject* m = PyModule_Create(&module);
  PyModule_AddIntConstant(m, "answer", ANSWER);
  return m;
}
"""


def test_built_once_and_again_when_changed_or_corrupt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    builds = []
    build = native._build
    monkeypatch.setattr(native, "_build", lambda *args: builds.append(args) or build(*args))
    source = tmp_path / "tiny.cpp"

    source.write_text(SOURCE.replace("ANSWER", "42"))
    for _ in range(2):
        module = native.load_source(source)
        assert module is not None
        assert module.answer == 42
    assert len(builds) == 1
    (library,) = (tmp_path / "cache" / "kernels").iterdir()

    source.write_text(SOURCE.replace("ANSWER", "43"))
    module = native.load_source(source)
    assert module is not None
    assert (module.answer, len(builds)) == (43, 2)

    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "other"))
    source.write_text(SOURCE.replace("ANSWER", "42"))
    (native.cache_directory() / "kernels").mkdir()
    (native.cache_directory() / "kernels" / library.name).write_bytes(b"cut off")
    module = native.load_source(source)
    assert module is not None
    assert (module.answer, len(builds)) == (42, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("planted", ["cache", "kernels", "library"])
def test_a_library_that_another_user_could_have_planted_is_not_run(
    planted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.cpp"
    source.write_text(SOURCE.replace("ANSWER", "42"))
    native.load_source(source)
    (library,) = (tmp_path / "cache" / "kernels").iterdir()
    place = {"cache": tmp_path / "cache", "kernels": library.parent, "library": library}[planted]
    os.chown(place, 4321, 4321)
    place.chmod(0o777)
    monkeypatch.setattr(native, "_import", lambda path: pytest.fail(f"{path} was loaded"))
    monkeypatch.setattr(native, "_build", lambda *args: pytest.fail("it was built there"))
    with pytest.raises(ValueError, match=f"code is not loaded from .*kernels: .*{place.name} belongs to user 4321"):
        native.load_source(source)


def test_a_changed_header_is_a_new_build(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text('#include <vector>\n#include "b.h"\n#include "d/../c.h"\n#define KERNELS "d.h"\n')
    (tmp_path / "b.h").write_text('#include "c.h"\n')
    (tmp_path / "c.h").write_text("// c\n")
    (tmp_path / "d.h").write_text("// d\n")
    first_lines = [text.splitlines()[0] for text in native._texts(source)]
    assert first_lines == ["#include <vector>", '#include "c.h"', "// c", "// d"]


HEADERS = sorted((ROOT / "ops").rglob("*.h"))


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_headers_compile_alone(header: Path) -> None:
    compiler = native.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-fsyntax-only", "-x", "c++", *native._FLAGS, "-Wall", "-Wno-unused-function"]
    command += [f"-isystem{path}" for path in include_paths()] + ["-include", str(header), os.devnull]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_broken_source_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPILED_LLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.cpp").write_text("this is no C++")
    with pytest.raises(RuntimeError, match="broken"):
        native.load_source(tmp_path / "broken.cpp")


def test_the_environment_limits_the_instruction_set() -> None:
    """Read when a library is first used, so in a process of its own."""
    code = """
import os
from compiled_llm.ops import native
os.environ["COMPILED_LLM_ISA"] = "portable"
print(native.load("sampling_cpu").supported_isas())
os.environ["COMPILED_LLM_ISA"] = "sse9"
try:
    native.load("linear_cpu").supported_isas()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()[:2]
    assert first == "['portable']"
    assert second.startswith("COMPILED_LLM_ISA must be amx, avx512_bf16, avx512, avx2 or portable, given 'sse9'")
