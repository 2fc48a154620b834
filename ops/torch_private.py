"""Every private name of torch that the project uses: another version of torch may lack or change it.

torch's compiler is imported when something is compiled, by the functions here: that takes longer than all the rest of a
start that finds everything compiled.

``pytest --noconftest tests/ops/test_torch_private.py`` names all that the installed torch lacks.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as compiled_versions
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import TorchDispatchMode

_SETTINGS = ("torch._inductor.config", "torch._functorch.config")

# -- Loading what was compiled


def load_kernel(library: Path) -> Callable:
    """The function of a library that Inductor has built, as Inductor loads it. ``ImportError`` if it is gone."""
    if not library.exists():  # Python loads it from memory where this process had it before
        raise ImportError(f"{library} is gone")
    data_ptr = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(data_ptr)
    spec = importlib.util.spec_from_file_location(f"{library.stem}.kernel", library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


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


def compiler_settings() -> str:
    """A digest of the compiler's settings, which environment variables (``TORCHINDUCTOR_...``) and programs change.

    While the compiler is not imported, no program has changed them.
    """
    loaded = [sys.modules[name] for name in _SETTINGS if name in sys.modules]
    changed = [line for module in loaded for line in _changed_settings(module)]
    return hashlib.sha256(repr((sorted(changed), _environment_settings())).encode()).hexdigest()[:16]


def _changed_settings(module: Any) -> list[str]:
    """Those with other values than they had when the module was imported."""

    def at_import(name: str) -> tuple[Any, ...]:
        entry = module._config[name]
        return entry.default, entry.env_value_default, entry.env_value_force

    settings = module.save_config_portable().items()
    return [f"{name}={value!r}" for name, value in settings if value not in at_import(name)]


def _environment_settings() -> list[tuple[str, str]]:
    """The environment variables that the compiler's settings are read from, except for where its cache is."""
    text = "".join(_settings_file(name).read_text() for name in _SETTINGS)
    found = {name: value for name, value in os.environ.items() if f'"{name}"' in text}
    found.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return sorted(found.items())


def _settings_file(module: str) -> Path:
    return Path(torch.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")


def keeps_compiled_code() -> bool:
    """Whether torch may keep compiled code on disk: unless the user has turned that off."""
    if "torch._inductor.config" not in sys.modules and not _environment_settings():
        return True
    import torch._inductor.config

    return torch._inductor.config.fx_graph_cache and not torch._inductor.config.force_disable_caches


def with_caches() -> contextlib.AbstractContextManager:
    """Allow what ``TORCHINDUCTOR_FORCE_DISABLE_CACHES`` forbids and ``aot_compile`` requires. Nothing is reused."""
    import torch._inductor.config

    if not torch._inductor.config.force_disable_caches:
        return contextlib.nullcontext()
    return torch._inductor.config.patch(force_disable_caches=False, fx_graph_cache=False)


# -- Tensors as the compiler sees them


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Note that code must serve any size of a dimension; ``tell_compiler`` passes that on."""
    tensor._noted_dynamic = {*dynamic_dimensions(tensor), dimension}  # type: ignore[attr-defined]


def mark_static_address(tensor: Tensor, guard: bool = False) -> None:
    """Note that a tensor stays at its address, on which code depends with ``guard``. ``tell_compiler`` passes it on."""
    tensor._noted_static = "guarded" if guard else "unguarded"  # type: ignore[attr-defined]


def tell_compiler(tensors: Iterable[Tensor]) -> None:
    """Pass on what was noted of tensors: before they are first given to a function that is compiled when called."""
    import torch._dynamo

    for tensor in tensors:
        for dimension in getattr(tensor, "_noted_dynamic", ()):
            torch._dynamo.mark_dynamic(tensor, dimension)
        static = getattr(tensor, "_noted_static", None)
        if static is not None:
            torch._dynamo.mark_static_address(tensor, guard=static == "guarded")


def dynamic_dimensions(tensor: Tensor) -> set[int]:
    """The dimensions that were marked as dynamic."""
    return getattr(tensor, "_noted_dynamic", set()) | getattr(tensor, "_dynamo_dynamic_indices", set())


def static_address_kind(tensor: Tensor) -> str | None:
    """How ``mark_static_address`` marked a tensor: "guarded", "unguarded", or None if it did not."""
    return getattr(tensor, "_noted_static", None) or getattr(tensor, "_dynamo_static_input_type", None)


# -- Compiling


def aot_compiled_function() -> Any:
    """The class of functions that were compiled ahead of time."""
    from torch._dynamo.aot_compile import AOTCompiledFunction

    return AOTCompiledFunction


def aot_result(ahead: Any) -> Any:
    """What AOTAutograd keeps of an ``AOTCompiledFunction``: Inductor's graph, and what is to be done around it."""
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


def clear_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream. Only torch builds with CUDA have it."""
    torch._C._cuda_clearCublasWorkspaces()


def vec_isa() -> dict[str, Any]:
    """The vector instructions that Inductor chose for this CPU by trying them out for seconds, as JSON values."""
    import torch._inductor.cpu_vec_isa

    chosen = torch._inductor.cpu_vec_isa.pick_vec_isa()
    attributes = {name: value for name, value in vars(chosen).items() if isinstance(value, str | bool)}
    return {"name": str(chosen), "attributes": attributes}


def trust_vec_isa(known: dict[str, Any]) -> None:
    """Let Inductor take ``known``, a result of ``vec_isa`` on the same kind of machine, and try nothing out."""
    import torch._inductor.cpu_vec_isa

    tried = torch._inductor.cpu_vec_isa.valid_vec_isa_list
    if tried.cache_info().currsize:
        return
    same = [isa for isa in torch._inductor.cpu_vec_isa.supported_vec_isa_list if str(isa) == known["name"]]
    if same:
        for name, value in known["attributes"].items():
            setattr(same[0], name, value)
        torch._inductor.cpu_vec_isa.valid_vec_isa_list = functools.cache(lambda: same)
        torch._inductor.cpu_vec_isa.valid_vec_isa_list()
