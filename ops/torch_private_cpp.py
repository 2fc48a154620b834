"""Private names of torch's compiler for C++ on CPUs: what it builds, where, and by which rules."""

import contextlib
import functools
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.ops.shared_library import is_whole
from compiled_llm.ops.torch_private import cache_dir
from compiled_llm.ops.user_warnings import warn


@contextlib.contextmanager
def plain_vectors() -> Iterator[None]:
    """Let Inductor's code for an x86 CPU use AVX512 or else AVX2, as the CPU says that it has them.

    By itself Inductor tries out for ten seconds what compiles, also instructions for matrices, which our graphs leave
    to ops. What it compiles elsewhere in the process stays as it is.
    """
    import torch._inductor.cpu_vec_isa

    isas, find = torch._inductor.cpu_vec_isa, torch._inductor.cpu_vec_isa.valid_vec_isa_list
    has, trusted = isas.x86_isa_checker(), {"__bool__": lambda self: True}
    kinds = [type(kind.__name__, (kind,), trusted) for kind in (isas.VecAVX512, isas.VecAVX2)]
    chosen = [kind() for kind in kinds if str(kind()) in has]
    if chosen:
        isas.valid_vec_isa_list = functools.cache(lambda: chosen)
    try:
        yield
    finally:
        isas.valid_vec_isa_list = find


@contextlib.contextmanager
def headers_in_cache() -> Iterator[None]:
    """Let Inductor keep its precompiled headers beside its libraries, and not in a place that others can guess.

    It names them by a digest that the program openssl makes: where there is none, it does without such headers.
    """
    import torch._inductor.codecache  # takes a second, so only when something is compiled

    settings = torch._inductor.config
    precompiles = settings.cpp_cache_precompile_headers and shutil.which("openssl") is not None
    before = torch._inductor.codecache._HEADER_DIR, torch._inductor.codecache._HEADER_LOCK_DIR
    directory = os.path.join(cache_dir(), "precompiled_headers")
    torch._inductor.codecache._HEADER_DIR = directory
    torch._inductor.codecache._HEADER_LOCK_DIR = os.path.join(directory, "locks")
    try:
        with settings.patch(cpp_cache_precompile_headers=precompiles):
            yield
    finally:
        torch._inductor.codecache._HEADER_DIR, torch._inductor.codecache._HEADER_LOCK_DIR = before


class CppBuilds:
    """What the C++ compiler has built: ``libraries``, and how many CPU seconds a header took."""

    libraries: int = 0
    header_seconds: float = 0.0


@contextlib.contextmanager
def whole_libraries() -> Iterator[CppBuilds]:
    """Let what Inductor builds appear whole or not at all, build again what is cut off, and count what is built.

    By itself it lets the compiler write to where it looks for a library. When a build was killed there, each later
    start finds the file, and fails to load it.
    """
    import torch._inductor.codecache  # takes a second, so only when something is compiled
    import torch._inductor.cpp_builder
    from torch.utils._filelock import FileLock

    builder: Any = torch._inductor.cpp_builder
    cache: Any = torch._inductor.codecache
    before, builds = (builder.run_compile_cmd, cache._worker_compile_cpp), CppBuilds()

    def run(command: str, cwd: str) -> None:
        words = shlex.split(command)
        target = words[words.index("-o") + 1]
        words[words.index("-o") + 1] = part = f"{target}.part"
        children = sum(os.times()[2:4])
        before[0](shlex.join(words), cwd)
        os.replace(Path(cwd, part), Path(cwd, target))
        if "c++-header" in words:  # it comes first, so no other compiler of this process ran beside it
            builds.header_seconds += sum(os.times()[2:4]) - children
        builds.libraries += "-shared" in words

    def build(lock: str, builders: Sequence[Any]) -> None:
        with FileLock(lock, timeout=cache.LOCK_TIMEOUT):
            for path in [Path(one.get_target_file_path()) for one in builders]:
                if path.suffix in (".so", ".o") and path.exists() and not is_whole(path):
                    warn(f"{path} is cut off, so it is built again")
                    path.unlink()
        before[1](lock, builders)

    builder.run_compile_cmd, cache._worker_compile_cpp = run, build
    try:
        yield builds
    finally:
        builder.run_compile_cmd, cache._worker_compile_cpp = before
