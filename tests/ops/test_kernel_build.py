"""Libraries for another kind of processor than this one: a cross compiler takes them, an emulator runs them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from compiled_llm.ops import kernel_build
from compiled_llm.ops.kernel_build import Library, features_library, kernel_library, levels, op_library, shipped

ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.fixture
def for_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")


def compile_for_arm(library: Library) -> None:
    """Every warning is an error; what is checked is all but the making of machine code."""
    if shutil.which(CROSS) is None:
        pytest.skip(f"needs {CROSS} (Debian's package g++-aarch64-linux-gnu)")
    flags = [flag for flag in kernel_build._FLAGS if flag != "-shared"]
    command = [CROSS, *flags, *library.defines, "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-function"]
    command += ["-Wno-ignored-attributes", str(library.source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_kind_of_processor_has_libraries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names, sets = [], []
    for platform in ("linux-x86_64", "linux-aarch64", "linux-riscv64"):
        monkeypatch.setenv("_PYTHON_HOST_PLATFORM", platform)
        names.append({library.file_name() for library in shipped()})
        sets.append({library.name.rpartition(".")[2] for library in shipped() if "." in library.name})
        assert sets[-1] == set(levels())
    assert sets[1:] == [{"portable", "neon_dot", "neon_bf16"}, {"portable"}]
    assert not names[0] & names[1] | names[1] & names[2]


@pytest.mark.usefixtures("for_arm")
def test_a_sample_of_the_sources_compiles_for_arm() -> None:
    compile_for_arm(features_library())
    compile_for_arm(kernel_library("linear_cpu", "neon_bf16"))


@pytest.mark.battery
@pytest.mark.usefixtures("for_arm")
def test_all_sources_compile_for_arm() -> None:
    for library in [*shipped(), op_library("limits_cpu")]:
        compile_for_arm(library)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("header", "part", "cpu"),
    [
        ("cpu/vectors.h", "HALVES", "neoverse-n1"),
        ("linear/linear_cpu_kernels.h", "LINEAR", "max"),
        ("linear/quantized_linear_a8_cpu_kernels.h", "BYTES", "max"),
        ("linear/quantized_linear_a8_cpu_kernels.h", "BYTES", "neoverse-n1"),
        ("attention/attention_cpu_products.h", "ATTENTION", "max"),
    ],
)
def test_what_is_written_for_arm(header: str, part: str, cpu: str, tmp_path: Path) -> None:
    """Under an emulator, without torch: ``arm_check.cpp``."""
    if shutil.which(CROSS) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {CROSS} and {EMULATOR} (Debian's packages g++-aarch64-linux-gnu and qemu-user-static)")
    flags = [*kernel_build._FLAGS[:4], "-O1", "-static", "-Wno-ignored-attributes", f"-D{part}"]
    flags += [f'-DKERNELS="{ROOT / "ops" / header}"', f"-DLEVEL={2 if cpu == 'max' else 1}"]
    source, program = ROOT / "tests" / "ops" / "cpu" / "arm_check.cpp", tmp_path / "check"
    subprocess.run([CROSS, *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([EMULATOR, "-cpu", cpu, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
