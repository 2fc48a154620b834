"""What the ops on a CPU need: building and loading their C++ kernels, and memory in huge pages.

A source file ``NAME.cpp`` is compiled once with the user's C++ compiler, through ``torch.utils.cpp_extension``,
into the user's own cache directory, and loaded from there afterwards. The library's name has a hash of everything
that goes into the build, so an old binary is never loaded for a changed source or another torch.

The instruction set is chosen at run time (``cpu/each_isa.h``), so no ``-march`` flag is given and machines of different
kinds may share a build.
"""

import contextlib
import functools
import hashlib
import importlib.util
import math
import mmap
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from compiled_llm.ops.trusted_paths import check_trusted, make_directory

_HUGE_PAGE = 2 << 20
_FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]


class MissingCompilerWarning(UserWarning):
    """No C++ compiler was found: the plain-torch versions of the CPU kernels are used, many times slower."""


def compiler() -> str | None:
    """Path of the C++ compiler that torch uses, or None: ``$CXX`` if it is set, else g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


def cache_directory() -> Path:
    """The user's own cache directory, created with mode 0700: ``$COMPILED_LLM_CACHE`` or ``~/.cache/compiled_llm``."""
    root = os.environ.get("COMPILED_LLM_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(root) if root else base / "compiled_llm"
    make_directory(path)
    return path


@functools.cache
def load(name: str) -> ModuleType | None:
    """The module of ``<name>.cpp``, built if need be (once, up to half a minute), or None without a compiler.

    Raises:
        RuntimeError, ValueError: as ``load_source``.
    """
    return load_source(_source(name))


def must_be_built(name: str) -> bool:
    """Whether ``load`` will build ``<name>.cpp``, which takes up to half a minute."""
    found = compiler()
    return found is not None and not _library(_source(name), found).exists()


def _source(name: str) -> Path:
    (source,) = Path(__file__).resolve().parent.glob(f"**/{name}.cpp")
    return source


def load_source(source: Path) -> ModuleType | None:
    """The same for any source file; the paths of headers are relative to the file that includes them.

    Raises:
        RuntimeError: the compiler is there and the build failed.
        ValueError: others may write to the cache directory, see ``check_trusted``.
    """
    found = compiler()
    if found is None:
        warnings.warn(
            f"no C++ compiler found (looked for {os.environ.get('CXX', 'g++')!r}): {source.stem} runs as plain torch, "
            "many times slower. Install one (Debian, Ubuntu: apt install g++) or point CXX at it.",
            MissingCompilerWarning,
            stacklevel=3,
        )
        return None
    library = _library(source, found)
    make_directory(library.parent)
    check_trusted(library.parent)
    if library.exists():
        with contextlib.suppress(ImportError):  # a file that does not load is built again
            return _import(library)
    return _build(source, library)


def _library(source: Path, compiler: str) -> Path:
    """Where the library of ``source`` is kept."""
    key = hashlib.sha256("\n".join([*_texts(source), torch.__version__, sys.version, compiler, *_FLAGS]).encode())
    return cache_directory() / "kernels" / f"compiled_llm_{source.stem}_{key.hexdigest()[:16]}.so"


def _texts(source: Path) -> list[str]:
    """``source`` and all of the project's headers that it includes, directly or not: by ``#include "PATH"``, or as the
    ``KERNELS`` of ``cpu/each_isa.h``."""
    texts, found = [], [source]
    for path in found:
        texts.append(path.read_text())
        names = re.findall(r'^#(?:include|define KERNELS) "(.+)"', texts[-1], re.MULTILINE)
        headers = [(path.parent / name).resolve() for name in names]
        found += [header for header in headers if header not in found]
    return texts


def _import(library: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(source: Path, library: Path) -> ModuleType:
    from torch.utils import cpp_extension  # imports setuptools: only when needed

    # torch looks for ninja on PATH, where a virtual environment that is not activated does not put it.
    scripts = str(Path(sys.executable).parent)
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    # Built elsewhere and then moved into place, so that another process never loads half a file.
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        module = cpp_extension.load(
            name=library.stem,
            sources=[str(source)],
            extra_cflags=_FLAGS,
            extra_ldflags=["-fopenmp"],
            build_directory=directory,
        )
        os.chmod(module.__file__, 0o755)  # whatever the umask
        os.replace(module.__file__, library)
    return module


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor in huge pages where the system has them: large ones stream up to 1.4 times as fast.

    Memory is taken as it is first written, so a large tensor costs nothing before it is used.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive
    start = -buffer.data_ptr() % _HUGE_PAGE
    return buffer[start : start + size].view(dtype).view(shape)
