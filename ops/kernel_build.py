"""The C++ libraries of the ops: which there are, what they are called, and how one is compiled.

An op is two libraries. ``NAME`` is what torch calls: it checks the arguments and cuts the work. ``NAME.SET`` has the
kernels for one instruction set (``cpu/one_isa.cpp``), so a machine builds those of its own set alone. Neither needs
torch's headers, which take longer to compile than both, nor Python's: torch is called through its stable C interface
(``cpu/torch_c.h``). So a library serves every torch and every Python that the package allows, and may be shipped.

Nothing here needs torch: packaging (``setup.py``) builds the libraries of all sets with it.
"""

import dataclasses
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_in_software", "neon_dot", "neon_bf16")
"""The instruction sets, by their numbers in ``cpu/one_isa.cpp``. One is a model of AMX, for tests."""
_LEVELS = {"x86_64": ISAS[:5], "aarch64": ("portable", "neon_dot", "neon_bf16")}

DIGESTS = "SHA256SUMS"
"""The file beside shipped libraries with the SHA-256 of each, as the program sha256sum writes it."""
_FLAGS = ("-O3", "-std=c++20", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared", "-fvisibility=hidden")
# The ops that have kernels for products of bfloat16: set -> the set that multiplies all else.
_BASES = {
    "attention_cpu": {"amx": "avx512_bf16", "amx_in_software": "avx512_bf16"},
    "latent_attention_cpu": {},
    "linear_cpu": {"avx512_bf16": "avx512", "amx": "avx512", "amx_in_software": "avx512"},
    "quantized_linear_cpu": {"avx512_bf16": "avx512", "amx": "avx512", "amx_in_software": "avx512"},
}
# The ops with kernels for products of bytes, which an x86 CPU has where it has products of bfloat16.
_BYTES = ("quantized_linear_a8_cpu",)
# The ops that serve only where there are products of bfloat16.
_OF_BFLOAT16 = ("compressed_linear_cpu",)
CALLED = {"compressed_linear_cpu": {"packed_linear": "linear_cpu"}}
"""What ops call of others, with AMX: file -> {op: its file}. The library has a function ``use_OP`` for its address."""
# The ops with kernels of their own on ARM.
_NEON = {
    "attention_cpu": ("neon_bf16", "portable"),
    "linear_cpu": ("neon_bf16", "portable"),
    "quantized_linear_a8_cpu": ("neon_bf16", "neon_dot", "portable"),
}
OPS = (*_BASES, *_BYTES, *_OF_BFLOAT16, "lora_cpu", "parallel_cpu", "recurrent_cpu", "rowwise_cpu", "sampling_cpu")


@dataclasses.dataclass(frozen=True)
class Library:
    """What one call of the compiler makes of ``source``.

    ``defines``: further flags. ``torch``: whether it calls functions of torch.
    """

    name: str
    source: Path
    defines: tuple[str, ...] = ()
    torch: bool = False

    def file_name(self, compiler: str = "") -> str:
        """It has a hash of all that goes into the build, so a library is never loaded for other sources."""
        parts = [*texts(self.source, self._included()), *self.defines, *_FLAGS, machine(), compiler]
        return f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"

    def build(self, compiler: str, directory: Path, file_name: str) -> Path:
        """Compile it into ``directory``, in an instant: no other process ever loads half a file.

        Raises:
            RuntimeError: the compiler refuses it; the message has its output.
        """
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / "library.so"
            command = [compiler, *_FLAGS, *self.defines, str(self.source), "-o", str(made)]
            if self.torch:
                command += _link_with_torch(compiler, Path(scratch))
            _run(command, self.name)
            made.chmod(0o755)  # whatever the umask
            return Path(shutil.move(made, directory / file_name))

    def _included(self) -> list[Path]:
        return [self.source.parent / value.split('"')[1] for value in self.defines if '"' in value]


def _link_with_torch(compiler: str, scratch: Path) -> list[str]:
    """Flags that make a library find its functions in the ``libtorch_cpu.so`` of the process that loads it.

    The loader goes by the name alone, so an empty library of that name serves: torch need not be there.
    """
    name = "libtorch_cpu.so"
    empty = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c++", os.devnull, "-o", str(scratch / name)]
    _run([compiler, *empty], name)
    return [f"-L{scratch}", "-Wl,--no-as-needed", "-ltorch_cpu"]


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"building {name} failed: {' '.join(command)}\n{done.stderr}")


@functools.cache
def op_library(op: str) -> Library:
    """What torch calls for the ops of ``op.cpp``; any other source that calls torch as well."""
    (source,) = ROOT.glob(f"**/{op}.cpp")
    return Library(op, source, torch=True)


def kernel_library(op: str, isa: str) -> Library:
    """The kernels of an op for one of ``isas_of(op)``."""
    assert isa in isas_of(op)
    header = op_library(op).source.with_name(f"{op}_kernels.h")
    base = _BASES.get(op, {}).get(isa)
    values = {
        "KERNELS": f'"{os.path.relpath(header, ROOT / "cpu")}"',
        "NAME": isa,
        "LEVEL": ISAS.index(isa),
        "BASE": -1 if base is None else ISAS.index(base),
    }
    defines = tuple(f"-D{name}={value}" for name, value in values.items())
    return Library(f"{op}.{isa}", ROOT / "cpu" / "one_isa.cpp", defines)


def pack_library() -> Library:
    """What packs weights (``linear/packed_linear.py``)."""
    return Library("pack_cpu", ROOT / "linear" / "pack_cpu.cpp")


def compress_library() -> Library:
    """What compresses weights as they are loaded (``linear/compressed_linear.py``)."""
    return Library("compress_cpu", ROOT / "linear" / "compress_cpu.cpp")


def quantize_rows_library() -> Library:
    """What rounds weights as they are loaded (``linear/quantize_rows.py``)."""
    as_torch_rounds = ("-ffp-contract=off",)  # a product, then a sum
    return Library("quantize_rows_cpu", ROOT / "linear" / "quantize_rows_cpu.cpp", as_torch_rounds)


def decode_blocks_library() -> Library:
    """What reads the blocks of GGUF files (``linear/decode_blocks.py``)."""
    return Library("decode_blocks_cpu", ROOT / "linear" / "decode_blocks_cpu.cpp")


def features_library() -> Library:
    """What tells which sets a CPU has."""
    return Library("features", ROOT / "cpu" / "features.cpp")


def machine() -> str:
    """The kind of processor that libraries are for: Python's own, or what CPython's variable for cross builds names.

    That is ``_PYTHON_HOST_PLATFORM``, as in ``linux-aarch64``, which names a wheel's platform, too.
    """
    return sysconfig.get_platform().rpartition("-")[2]


def levels() -> tuple[str, ...]:
    """The sets of machines of this kind, by the numbers of ``best_level`` in ``cpu/features.cpp``."""
    return _LEVELS.get(machine(), ("portable",))


def isas_of(op: str) -> tuple[str, ...]:
    """The sets that an op has kernels for on machines of this kind, best first; ``amx_in_software`` is for tests."""
    if op in _OF_BFLOAT16:
        return ("amx", "avx512_bf16", "amx_in_software") if machine() == "x86_64" else ()
    if machine() == "aarch64":
        return _NEON.get(op, ("portable",))
    if machine() != "x86_64":
        return ("portable",)
    if op in _BYTES or "amx" in _BASES.get(op, {}):
        return ("amx", "avx512_bf16", "avx512", "avx2", "portable", "amx_in_software")
    return ("avx512_bf16", "avx512", "avx2", "portable") if op in _BASES else ("avx512", "avx2", "portable")


def shipped() -> Iterator[Library]:
    """All that a wheel carries."""
    yield features_library()
    yield pack_library()
    yield compress_library()
    yield quantize_rows_library()
    yield decode_blocks_library()
    for op in (*OPS, "limits_cpu", "program_cpu"):
        yield op_library(op)
    for op in OPS:
        yield from (kernel_library(op, isa) for isa in isas_of(op) if isa != "amx_in_software")


def write_digests(directory: Path) -> None:
    """Write ``DIGESTS`` of all libraries in a directory."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.so"))}
    (directory / DIGESTS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def texts(source: Path, also: list[Path]) -> list[str]:
    """``source`` and all of the project's headers that it includes, directly or not, by ``#include "PATH"``.

    The paths are relative to the file that includes them. ``also``: headers that it includes by a macro.
    """
    found, read = [source, *(path.resolve() for path in also)], []
    for path in found:
        status = path.stat()
        text, headers = _text_of(path, status.st_mtime_ns, status.st_size)
        read.append(text)
        found += [header for header in headers if header not in found]
    return read


@functools.cache
def _text_of(path: Path, changed: int, size: int) -> tuple[str, list[Path]]:
    """And the headers that it names. ``changed`` and ``size`` tell its versions apart."""
    text = path.read_text()
    names = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
    return text, [(path.parent / name).resolve() for name in names]
