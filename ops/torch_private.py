"""Every private name of torch that the project uses: another version of torch may lack or change it.

torch's compiler is imported when something is compiled, by the functions here: that takes longer than all the rest of a
start that finds everything compiled.

``pytest --noconftest tests/ops/test_torch_private.py`` names all that the installed torch lacks.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import random
import shlex
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_versions
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_llm.ops.shared_library import is_whole
from compiled_llm.ops.user_warnings import warn

F = TypeVar("F", bound=Callable[..., Any])
_SETTINGS = ("torch._inductor.config", "torch._functorch.config", "torch.compiler.config")

# -- Loading what was compiled


def load_kernel(library: Path) -> Callable:
    """The function of a library that Inductor has built, as Inductor loads it. ``ImportError`` if it is not whole."""
    if not library.exists():  # Python loads it from memory where this process had it before
        raise ImportError(f"{library} is gone")
    if not is_whole(library):
        raise ImportError(f"{library} is cut off")
    data_ptr = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_ptr)
    spec = importlib.util.spec_from_file_location(f"{library.stem}.kernel", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def kernel_address(library: Path) -> int:
    """Of the C++ function in a library that ``load_kernel`` has loaded, which takes pointers and sizes."""
    address = ctypes.cast(ctypes.CDLL(str(library)).kernel, ctypes.c_void_p).value
    assert address is not None
    return address


def op_without_python(overload: Any) -> Callable:
    """What ``torch.ops.library.name.overload`` calls: the op itself, less a Python frame a call."""
    return overload._op


def is_profiling() -> bool:
    """Whether torch's profiler is on, which sees the calls of ops that go through torch."""
    return torch.autograd._profiler_enabled()


def reinterpret_tensor() -> Callable:
    """(tensor, sizes, strides, offset) -> a view of its memory that begins ``offset`` elements behind its own."""
    return torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]


def cache_dir() -> str:
    """Where torch keeps compiled code."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if chosen is None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return cache_dir()
    return chosen


def default_cache_dir() -> str:
    """Where torch keeps compiled code unless it is told otherwise."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


# -- Settings


def compiler_settings() -> dict[str, str]:
    """The compiler's settings that environment variables (``TORCHINDUCTOR_...``) and programs have changed, by name.

    While the compiler is not imported, no program has changed them.
    """
    loaded = [sys.modules[name] for name in _SETTINGS if name in sys.modules]
    changed = {name: value for module in loaded for name, value in _changed_settings(module).items()}
    return changed | {f"${name}": value for name, value in _environment_settings()}


def _changed_settings(module: Any) -> dict[str, str]:
    """Those with other values than they had when the module was imported: their names with the module's, and texts."""

    def at_import(name: str) -> tuple[Any, ...]:
        entry = module._config[name]
        return entry.default, entry.env_value_default, entry.env_value_force

    settings, prefix = module.save_config_portable().items(), module.__name__.removeprefix("torch.")
    return {f"{prefix}.{name}": repr(value) for name, value in settings if value not in at_import(name)}


def _environment_settings() -> list[tuple[str, str]]:
    """The environment variables that the compiler's settings are read from, except for those that change no code."""
    text = "".join(_settings_file(name).read_text() for name in _SETTINGS)
    found = {name: value for name, value in os.environ.items() if f'"{name}"' in text}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "CI"):  # in CI a warning about ops is an error: the code is the same
        found.pop(name, None)
    return sorted(found.items())


def _settings_file(module: str) -> Path:
    return Path(torch.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")


def keeps_compiled_code() -> bool:
    """Whether torch may keep compiled code on disk: unless the user has turned that off."""
    if "torch._inductor.config" not in sys.modules and not _environment_settings():
        return True
    import torch._inductor.config

    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


@contextlib.contextmanager
def with_caches() -> Iterator[None]:
    """Allow what ``TORCHINDUCTOR_FORCE_DISABLE_CACHES`` forbids and ``aot_compile`` requires. Nothing is reused then.

    torch's caches know code that they may not reuse by a number from Python's random generator. In a program that seeds
    it, that is the number of other code that an earlier run left on disk, which torch would run: so it gets other ones.
    """
    import torch._inductor.config
    import torch.compiler.config

    state = random.getstate()
    random.seed()
    setting = torch.compiler.config._config["force_disable_caches"]  # type: ignore[attr-defined]
    given, off = setting.env_value_force, torch._inductor.config.force_disable_caches
    try:
        if not off:
            yield
            return
        setting.env_value_force = False  # over what the environment says and what a program has set
        with torch._inductor.config.patch(fx_graph_cache=False):
            yield
    finally:
        setting.env_value_force = given
        random.setstate(state)


# -- Tensors as the compiler sees them


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Note that code must serve any size of a dimension; ``tell_compiler`` passes that on."""
    tensor._noted_dynamic = {*getattr(tensor, "_noted_dynamic", ()), dimension}  # type: ignore[attr-defined]


def mark_static_address(tensor: Tensor, guard: bool = False) -> None:
    """Note that a tensor stays at its address, on which code depends with ``guard``. ``tell_compiler`` passes it on."""
    tensor._noted_static = "guarded" if guard else "unguarded"  # type: ignore[attr-defined]


def constant_in_graphs(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which imports the compiler: what it gives is a graph's constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def tell_compiler(tensors: Iterable[Tensor]) -> None:
    """Pass on what was noted of tensors: before they are first given to a function that is compiled when called."""
    import torch._dynamo

    for tensor in tensors:
        for dimension in getattr(tensor, "_noted_dynamic", ()):
            torch._dynamo.mark_dynamic(tensor, dimension)
        static = getattr(tensor, "_noted_static", None)
        if static is not None:
            torch._dynamo.mark_static_address(tensor, guard=static == "guarded")


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
    return getattr(tensor, "_noted_static", None) or getattr(tensor, "_dynamo_static_input_type", None)


# -- Products


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of int8 ``[T, K]`` and ``[K, N]``: the exact sums, int32 (cuBLASLt's on a GPU).

    There T is more than 16, K and N are multiples of 8, and the columns of ``b`` are contiguous; other sizes are a
    ``RuntimeError``.
    """
    return torch._int_mm(a, b)


def int4_packed(codes: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 ``[N, K]`` on a GPU, in the order that ``int4_mm`` reads. K is a multiple of 128, N of 8."""
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)


def int4_mm(x: Tensor, packed: Tensor, group_size: int, scales_and_zeros: Tensor) -> Tensor:
    """``x`` bfloat16 ``[T, K]`` by weights ``(code - 8) * scale + zero``; these two are ``[K / group_size, N, 2]``."""
    return torch.ops.aten._weight_int4pack_mm(x, packed, group_size, scales_and_zeros)


# -- Recording


def recorded_checks() -> tuple[Any, ...]:
    """The ops by which ``torch.export`` records what it took for granted of tensors and numbers."""
    return torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default


# -- Compiling


def import_compiler() -> None:
    """Import what compiling takes, which needs over two seconds: before the first function is there."""
    import torch._dynamo
    import torch._inductor.compile_fx


def aot_result(ahead: Any) -> Any:
    """What the ``serialize`` of a backend's result gives, of an ``AOTCompiledFunction``.

    Of Inductor that is what AOTAutograd keeps: Inductor's graph, and what is to be done around it.
    """
    import torch._functorch.config

    with torch._functorch.config.patch("bundled_autograd_cache", True):
        return ahead._artifacts.compiled_fn.compiled_fn.serialize()


def inductor_module(cache_key: str) -> ModuleType | None:
    """The module that Inductor has written for a graph, if this process has loaded it."""
    from torch._inductor.codecache import PyCodeCache

    return next((module for module in PyCodeCache.modules if module.__name__.endswith(f".{cache_key}")), None)


def compiler_counters() -> Any:
    """What torch's compiler counts in this process."""
    from torch._dynamo.utils import counters

    return counters


def cpp_seconds() -> float:
    """How long this process has waited for the C++ compiler."""
    from torch._dynamo.utils import compilation_time_metrics

    return sum(compilation_time_metrics.get("async_compile.wait", ()))


def sizes_of_one() -> contextlib.AbstractContextManager:
    """Compile code whose dynamic sizes may be any, 1 and 0 too: else torch takes these two for constants."""
    import torch.fx.experimental._config

    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream. Only torch builds with CUDA have it."""
    torch._C._cuda_clearCublasWorkspaces()


def use_cuda_graph_trees() -> None:
    """Let this thread record and replay with torch's CUDA graph trees.

    Before torch 2.13 only the thread that imported them could, and those that autograd starts: any other failed an
    assertion (pytorch #123177). Here each thread gets trees of its own, as it does in 2.13.
    """
    from torch._inductor import cudagraph_trees

    names = ("tree_manager_containers", "tree_manager_locks")
    values: tuple[Any, Any] = ({}, defaultdict(threading.Lock))
    if hasattr(cudagraph_trees.local, names[0]) or torch._C._is_key_in_tls(names[0]):
        return
    for name, value in zip(names, values, strict=True):
        setattr(cudagraph_trees.local, name, value)
        torch._C._stash_obj_in_tls(name, value)


def lower_as_ops(namespace: str) -> None:
    """Tell Inductor to call the ops of ``namespace`` as they are, with inputs laid out as in the traced graph.

    It does so by itself, but torch 2.11 then makes the text of a log line, even if nobody logs. That text has each
    operand with all that it is computed from, and grows without bounds with the layers: a deep model compiles for ever.
    """
    from torch._inductor import lowering
    from torch._library.utils import get_layout_constraint_tag

    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{namespace}::"):
            packet, _, overload = name.partition("::")[2].partition(".")
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            if op not in lowering.lowerings:
                constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
                lowering.make_fallback(op, constraint, warn=False)
