"""Every private name of torch that the project uses: another version of torch may lack or change it.

``pytest --noconftest tests/ops/test_torch_private.py`` names all that the installed torch lacks.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.cpu_vec_isa
import torch.fx.experimental._config
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo import mark_dynamic, mark_static_address
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_versions
from torch._dynamo.utils import compilation_time_metrics as compile_times
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir
from torch.utils._python_dispatch import TorchDispatchMode


def aot_compiled_function() -> Any:
    """The class of functions that were compiled ahead of time. Imported when asked for: a GPU never asks."""
    from torch._dynamo.aot_compile import AOTCompiledFunction

    return AOTCompiledFunction


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream. Only torch builds with CUDA have it."""
    torch._C._cuda_clearCublasWorkspaces()


def compiler_settings() -> str:
    """A digest of the compiler's settings, which environment variables (``TORCHINDUCTOR_...``) and programs change."""
    values = [torch._inductor.config.save_config_portable(), torch._functorch.config.save_config_portable()]
    return hashlib.sha256(repr([sorted(each.items()) for each in values]).encode()).hexdigest()[:16]


def keeps_compiled_code() -> bool:
    """Whether torch may keep compiled code on disk: unless the user has turned that off."""
    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def with_caches() -> contextlib.AbstractContextManager:
    """Allow what ``TORCHINDUCTOR_FORCE_DISABLE_CACHES`` forbids and ``aot_compile`` requires. Nothing is reused."""
    if not torch._inductor.config.force_disable_caches:
        return contextlib.nullcontext()
    return torch._inductor.config.patch(force_disable_caches=False, fx_graph_cache=False)


def sizes_of_one() -> contextlib.AbstractContextManager:
    """Compile code whose dynamic sizes may be any, 1 and 0 too: else torch takes these two for constants."""
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


class DynamicSize(NamedTuple):
    """A size that is another in each call of compiled code. Sizes of the same ``name`` are equal in a call.

    Attributes:
        example: a size that the code is compiled with, 2 or more. The code is right for others, and tuned for this.
    """

    name: str
    example: int


def mark_dynamic_size(tensor: Tensor, dimension: int, size: DynamicSize) -> None:
    """Let compiled code take tensors like ``tensor`` with any size in ``dimension``."""
    mark_dynamic(tensor, dimension)
    tensor._dynamic_sizes = dynamic_sizes(tensor) | {dimension: size}  # type: ignore[attr-defined]


def dynamic_sizes(tensor: Tensor) -> dict[int, DynamicSize]:
    """What ``mark_dynamic_size`` marked, by dimension."""
    return getattr(tensor, "_dynamic_sizes", {})


def static_address_kind(tensor: Tensor) -> str | None:
    """How ``mark_static_address`` marked a tensor: "guarded", "unguarded", or None if it did not."""
    return getattr(tensor, "_dynamo_static_input_type", None)


@contextlib.contextmanager
def plain_vectors() -> Iterator[None]:
    """Let Inductor's code for an x86 CPU use AVX512 or else AVX2, as the CPU says that it has them.

    By itself Inductor tries out for ten seconds what compiles, also instructions for matrices, which our graphs leave
    to ops. What it compiles elsewhere in the process stays as it is.
    """
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
    """Let Inductor keep its precompiled headers beside its libraries, and not in a place that others can guess."""
    import torch._inductor.codecache  # takes a second, so only when something is compiled

    before = torch._inductor.codecache._HEADER_DIR, torch._inductor.codecache._HEADER_LOCK_DIR
    directory = os.path.join(cache_dir(), "precompiled_headers")
    torch._inductor.codecache._HEADER_DIR = directory
    torch._inductor.codecache._HEADER_LOCK_DIR = os.path.join(directory, "locks")
    try:
        yield
    finally:
        torch._inductor.codecache._HEADER_DIR, torch._inductor.codecache._HEADER_LOCK_DIR = before
