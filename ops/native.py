"""What the ops on a CPU need: their C++ libraries, and memory in huge pages.

A library (``kernel_build.py``) is taken from the package, where a wheel has it ready built, else from the user's own
cache directory, where it is built once by the user's C++ compiler. The instruction set is the best one that the CPU
has. The environment variable ``COMPILED_LLM_ISA`` names the best that may be used (amx, avx512_bf16, avx512, avx2,
portable; on ARM neon_bf16, neon_dot, portable), for checks and comparisons: the CPU then counts as one that has no
better.
"""

import ctypes
import functools
import hashlib
import math
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.ops.kernel_build import (
    CALLED,
    DIGESTS,
    ROOT,
    Library,
    features_library,
    isas_of,
    kernel_library,
    levels,
    op_library,
)
from compiled_llm.ops.shared_library import is_whole
from compiled_llm.ops.trusted_paths import check_trusted, make_directory
from compiled_llm.ops.user_warnings import warn

_HUGE_PAGE = 2 << 20
_SMALL = 2**12  # bytes, below which a tensor is left to torch
_LINE = 64  # bytes of a cache line
_LINES = 2 * _LINE  # which a processor fetches together
_SHARED = 8 * _HUGE_PAGE
_SHIPPED = ROOT / "libraries"  # in a wheel


class MissingCompilerWarning(UserWarning):
    """No C++ compiler was found: steps run uncompiled, or CPU kernels in their plain-torch versions."""


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


def kernel_directory() -> Path:
    """Where libraries are kept that were built on this machine."""
    return cache_directory() / "kernels"


# -- Libraries


def open_library(library: Library) -> ctypes.CDLL | None:
    """Load it, built first if it is nowhere; None without a compiler.

    Raises:
        RuntimeError: the compiler is there and the build failed.
        ValueError: others may write to the cache directory, see ``check_trusted``.
    """
    shipped = _shipped(library)
    if shipped is not None:
        return shipped
    found = compiler()
    if found is None:
        return None
    directory, name = kernel_directory(), library.file_name(found)
    make_directory(directory)
    check_trusted(directory)
    if (directory / name).exists():
        try:
            if not is_whole(directory / name):
                raise OSError("it is cut off")
            return ctypes.CDLL(str(directory / name))
        except OSError as error:  # a file that does not load is built again
            warn(f"{name} does not load, so it is built again: {error}")
    return ctypes.CDLL(str(library.build(found, directory, name)))


def build(library: Library) -> None:
    """Build what ``must_be_built``, and load nothing. Raises as ``open_library``."""
    found = compiler()
    assert found is not None
    make_directory(kernel_directory())
    check_trusted(kernel_directory())
    library.build(found, kernel_directory(), library.file_name(found))


def must_be_built(library: Library) -> bool:
    """Whether ``open_library`` will build it, which takes seconds."""
    found = compiler()
    if _shipped(library) is not None or found is None:
        return False
    path = kernel_directory() / library.file_name(found)
    return not (path.exists() and is_whole(path))


def _shipped(library: Library) -> ctypes.CDLL | None:
    """The library that the package brought, if it is of these sources and loads here."""
    return _open_shipped(_SHIPPED / library.file_name())


@functools.cache
def _open_shipped(path: Path) -> ctypes.CDLL | None:
    if not path.exists():
        return None
    digest, digests = hashlib.sha256(path.read_bytes()).hexdigest(), path.with_name(DIGESTS)
    if not digests.exists() or f"{digest}  {path.name}" not in digests.read_text().splitlines():
        warn(f"{path} is not what the package brought, so it is left alone: install compiled-llm again")
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        warn(f"{path} came with the package and does not load here: {error}")
        return None


# -- Kernels


class Kernels:
    """The kernels of an op: its ops run on the best instruction set that this CPU has."""

    def __init__(self, op: str, library: ctypes.CDLL, best: ctypes.CDLL) -> None:
        self._op, self._library, self._isas = op, library, _isas(op)
        self._kernels: dict[str, int] = {}  # of the sets that ``run`` was asked for: where they lie
        library.use_kernels.argtypes = ctypes.c_void_p, ctypes.c_bool
        library.use_kernels(_kernels_of(best), True)

    def supported_isas(self) -> list[str]:
        """The sets that there are kernels for and that this CPU has, best first."""
        return list(self._isas)

    def address_of(self, name: str) -> int:
        """Of the function that computes an op, as a ``native_program`` calls it."""
        self._library.find_op.argtypes, self._library.find_op.restype = (ctypes.c_char_p,), ctypes.c_void_p
        return self._library.find_op(name.encode())

    def let_call(self, name: str, address: int) -> None:
        """Its ops may call the op ``name`` of another library, which is at ``address``; it has its own best set."""
        use = getattr(self._library, f"use_{name}")
        use.argtypes, use.restype = (ctypes.c_void_p,), None
        use(address)

    def rest(self) -> None:
        """The threads of this process sleep until they are needed, also those that would spin for the next op.

        For a process that shares its cores with another, which computes now.
        """
        self._library.rest_threads()

    def run(self, name: str, *args: Any, isa: str | None = None) -> Any:
        """The op ``name`` on the set ``isa``, which is built if need be; without one on the best, as torch runs it."""
        function = getattr(torch.ops.compiled_llm, name)
        if isa is None:
            return function(*args)
        if isa not in self._isas:
            raise ValueError(f"isa {isa!r} is unknown or not supported by this CPU, which has {self._isas}")
        if isa not in self._kernels:
            self._kernels[isa] = _kernels_of(open_library(kernel_library(self._op, isa)))
        self._library.use_kernels(self._kernels[isa], False)
        try:
            return function(*args)
        finally:
            self._library.use_kernels(None, False)


def _kernels_of(library: ctypes.CDLL | None) -> int:
    assert library is not None
    library.kernels.restype = ctypes.c_void_p
    return library.kernels()


@functools.cache
def load(op: str) -> Kernels | None:
    """The kernels of an op, built if need be (seconds), registered with torch; or None without.

    That is without a compiler, of which a warning tells, or where the op has none for this CPU.

    Raises:
        RuntimeError, ValueError: as ``open_library``; and for a ``COMPILED_LLM_ISA`` that there is not.
    """
    if not _isas(op) and _level() is not None:
        return None  # it has kernels for other CPUs alone
    opened = [found for found in map(open_library, libraries_of(op)) if found is not None]
    if len(opened) < 2:
        warn_of_missing_compiler(f"{op} runs as plain torch, many times slower")
        return None
    # Before the ops are registered: from then on they may be called.
    others = {name: load(file) for name, file in called_by(op).items()}
    kernels = Kernels(op, *opened)
    for name, other in others.items():
        if other is not None:
            kernels.let_call(name, other.address_of(name))
    return kernels


def called_by(op: str) -> dict[str, str]:
    """What an op calls of others on this machine: op -> the file that has it."""
    return CALLED.get(op, {}) if _isas(op)[:1] == ["amx"] else {}


def warn_of_missing_compiler(cost: str) -> None:
    """``cost``: what runs otherwise now, and how."""
    warn(
        f"no C++ compiler found (looked for {os.environ.get('CXX', 'g++')!r}): {cost}. Install one (Debian, Ubuntu: "
        "apt install g++) or point CXX at it.",
        MissingCompilerWarning,
    )


def is_available(op: str) -> bool:
    """Whether ``load`` gives its kernels. Builds nothing that takes long."""
    return bool(libraries_of(op)) and all(compiler() or _shipped(library) for library in libraries_of(op))


def libraries_of(op: str) -> list[Library]:
    """What ``load`` needs on this machine; nothing if it has no compiler and the package brought no libraries."""
    isas = _isas(op)
    return [op_library(op), kernel_library(op, isas[0])] if isas else []


def _isas(op: str) -> list[str]:
    level = _level()
    if level is None:
        return []
    has = set(levels()[: level + 1])
    has |= {"amx_in_software"} if "avx512_bf16" in has else set()
    return [isa for isa in isas_of(op) if isa in has]


def best_isa() -> str | None:
    """The best set that may be used, or None where ``load`` gives nothing. Raises as ``load``."""
    level = _level()
    return None if level is None else levels()[level]


def _level() -> int | None:
    """The number of the best set that may be used."""
    sets = levels()
    asked = os.environ.get("COMPILED_LLM_ISA", sets[-1])
    if asked not in sets:
        allowed = " or ".join(filter(None, (", ".join(sets[:0:-1]), sets[0])))
        raise ValueError(f"COMPILED_LLM_ISA must be {allowed}, given {asked!r}")
    best = _best_level(compiler(), kernel_directory())
    return None if best is None else min(best, sets.index(asked))


@functools.cache
def _best_level(found: str | None, directory: Path) -> int | None:
    """That the CPU has. ``found``, ``directory``: where ``open_library`` finds what asks the CPU; looked up once."""
    features = open_library(features_library())
    return None if features is None else features.best_level()


# -- Memory


def huge_zeros(shape: Sequence[int], dtype: torch.dtype, *, is_weight: bool = False) -> torch.Tensor:
    """A zeroed CPU tensor in huge pages where the system has them: large ones stream up to 1.4 times as fast.

    Memory is taken as it is first written, so a tensor costs nothing before it is used. torch would write zeros on all
    its threads, and wait for those that other work holds. Tensors smaller than a page share some, and so do weights
    below 16 MiB: one of 2.6 MiB by itself takes 4. Such memory is given back when the last of them is gone.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    own = size >= (_SHARED if is_weight else _HUGE_PAGE)
    return (_huge(size) if own else _PAGES.take(size)).view(dtype).view(shape)


def zeros_on(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``huge_zeros`` on a CPU, on any other device torch's own."""
    return huge_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def huge_zeros_in_rows(count: int, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """``[count, *shape]`` for each shape and dtype of ``kinds``, zeroed, in huge pages that they share.

    The memory is ``count`` rows, each of which has an element of every tensor, one after the other. A row is whole
    cache lines, so that the strides of all tensors are multiples of 8 and more. To torch the tensors have nothing in
    common: what it compiles would copy views of one tensor that it writes to.
    """
    assert count > 0
    starts, end = [], 0
    for shape, dtype in kinds:
        starts.append(-(-end // dtype.itemsize) * dtype.itemsize)
        end = starts[-1] + math.prod(shape) * dtype.itemsize
    row = -(-end // _LINE) * _LINE
    memory, first = _huge_memory(count * row)
    tensors = []
    for (shape, dtype), start in zip(kinds, starts, strict=True):
        stride = row // dtype.itemsize
        inner = torch.empty(shape, dtype=dtype, device="meta").stride()
        size = (count - 1) * stride + math.prod(shape)
        all_of_it = torch.frombuffer(memory, dtype=dtype, offset=first + start, count=size)
        tensors.append(all_of_it.as_strided((count, *shape), (stride, *inner)))
    return tensors


def _huge(size: int) -> torch.Tensor:
    """So many zeros in huge pages of their own."""
    memory, start = _huge_memory(size)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)  # keeps the memory alive


def _huge_memory(size: int) -> tuple[mmap.mmap, int]:
    """Zeros, and where so many of them begin that are in huge pages of their own."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE


class _Pages:
    """Huge pages that tensors share. They live as long as one of these."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many zeros, whose memory no other tensor had before."""
        used = -(-size // _LINES) * _LINES
        with self._lock:
            is_new = len(self._left) < used
            memory = _huge(_SHARED) if is_new else self._left
            left = memory[used:]
            if not is_new or len(left) > len(self._left):  # the larger rest is kept
                self._left = left
        return memory[:size]


_PAGES = _Pages()
