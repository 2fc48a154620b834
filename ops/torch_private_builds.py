"""Torch's and Triton's private names that it takes to compile kernels without running them: in processes of their own.

``build_without_gpu`` changes this process for good. What it makes is found by processes that have the GPU.
"""

import contextlib
import functools
import subprocess
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACE = "compiled_llm"
_COPIES_BESIDE = ("fetch", "await_fetched")  # ops of streams, which launch no kernel


def triton_kernel(name: str, source: str) -> Any:
    """Inductor's Triton kernel of this name: compiled, or found in Triton's cache, and loaded onto the GPU."""
    kernel = _with_one_configuration(name, source)
    kernel.precompile()
    return kernel


def _with_one_configuration(name: str, source: str) -> Any:
    """Inductor's Triton kernel, not compiled yet, with the first of the configurations that it would try out.

    To choose among several by running them would take time at a start, and their sums could have another order after
    each start.
    """
    from torch._inductor.async_compile import _load_triton_kernel_from_source

    kernel = _load_triton_kernel_from_source(name, source)
    if kernel.configs is not None:  # else it is compiled already, for another function
        kernel.configs = kernel.configs[:1]
    return kernel


class ExternKernels:
    """Torch's own kernels as Inductor's programs call them: the usual ones without the compiler's import."""

    mm, addmm = staticmethod(torch.mm), staticmethod(torch.addmm)
    bmm, baddbmm = staticmethod(torch.bmm), staticmethod(torch.baddbmm)

    def __getattr__(self, name: str) -> Callable:
        import torch._inductor.lowering  # which registers them
        from torch._inductor.select_algorithm import extern_kernels

        return getattr(extern_kernels, name)


def build_without_gpu(capability: tuple[int, int]) -> None:
    """From now on Triton compiles for a GPU of this ``capability``, and neither loads nor launches anything.

    After ``pretend_gpu``. What is compiled goes to Triton's cache.
    """
    import torch._inductor.async_compile as async_compile
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_Driver(capability))
    triton_helpers.set_driver_to_gpu = lambda: None
    async_compile.AsyncCompile.triton = _compiled  # type: ignore[method-assign, assignment]
    run, launched = JITFunction.run, set[str]()

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs = {name: _described(value) for name, value in kwargs.items()}
        kernel = run(self, *map(_described, args), grid=grid, warmup=True, **kwargs)
        if kernel is not None and kernel.hash not in launched:
            launched.add(kernel.hash)
            _build_launcher(kernel)

    JITFunction.run = compile_alone
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = _empty_strided  # type: ignore[attr-defined]
    guards._reinterpret_tensor = _reinterpret  # type: ignore[attr-defined]


@functools.cache
def same_keys_in_any_order() -> None:
    """From now on Triton's key of a kernel, by which its code is kept, does not depend on what has a key already.

    In Triton 3.6 a function that calls another takes over the globals that this one is known to use before it looks for
    them: it lacks them if the other has no key yet. So a process that compiles one of the engine's functions and one
    that loads all of them had other keys for the same kernel, and the second compiled it again.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def update_when_known(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 # finds the names
        update(self, function)

    DependenciesFinder._update_hash = update_when_known


def _build_launcher(kernel: Any) -> None:
    """Build what launches a kernel, which Triton 3.6 compiles from C, for each kind of arguments anew.

    It needs the driver's library, though no GPU. Where it cannot be built, the process with the GPU does it, at the
    kernel's first launch.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):  # from Triton 3.7 on there is one for all
        with contextlib.suppress(AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError):
            driver.CudaLauncher(kernel.src, kernel.metadata)


class _Driver:
    """Stands for Triton's: it knows what to compile for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Described:
    """A tensor as Triton specialises code for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._offset = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset  # memory itself is aligned

    def ptr_range(self) -> int:
        return 0


def _described(value: Any) -> Any:
    return _Described(value) if isinstance(value, Tensor) else value


class _Unloaded:
    """A kernel of Inductor's that was compiled."""

    def run(self, *args: Any, **kwargs: Any) -> None: ...


def _compiled(self: Any, name: str, source: str, device_str: str = "cuda") -> _Unloaded:
    return compiled_kernel(name, source)


def compiled_kernel(name: str, source: str) -> _Unloaded:
    """In the place of ``triton_kernel`` where there is no GPU: it is compiled alone."""
    _with_one_configuration(name, source).precompile(warm_cache_only=True)
    return _Unloaded()


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _AsOnGpu(TorchDispatchMode):
    """The project's ops run what a GPU would run for them: their launch code, which compiles its kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != _NAMESPACE or func.overloadpacket.__name__ in _COPIES_BESIDE:
            return func(*args, **(kwargs or {}))
        from compiled_llm.ops.torch_private_gpu import on_cuda

        with self:  # it is off while it handles an op
            return on_cuda(func, args, kwargs or {})


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors that are made within have no data, and may say that they are on the GPU."""
    from compiled_llm.ops.torch_private_gpu import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def rehearse(function: Callable, args: tuple) -> None:
    """Call ``function`` on fake tensors, so that all Triton kernels that it launches are compiled."""
    with torch.no_grad(), _AsOnGpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # it is 0: aligned
        function(*args)


@contextlib.contextmanager
def builds_for_others() -> Iterator[None]:
    """Inductor makes code by itself, tries nothing out on the GPU, and looks for nothing that it made before."""
    import torch._inductor.config

    names = "shape_padding", "joint_graph_constant_folding", "fx_graph_cache", "triton.autotune_pointwise"
    settings = {**dict.fromkeys(names, False), "deterministic": True, "compile_threads": 1}
    with torch._inductor.config.patch(settings):
        yield


@contextlib.contextmanager
def without_sources() -> Iterator[None]:
    """``aot_compile`` does not look up the source of all functions that it traced.

    Ready code has no use for it, and a seventh of the time went there.
    """
    from torch._dynamo.package import SourceInfo

    add_code = SourceInfo.add_code
    SourceInfo.add_code = lambda self, code: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        SourceInfo.add_code = add_code  # type: ignore[method-assign]


@contextlib.contextmanager
def aot_compile_on() -> Iterator[None]:
    """Before torch 2.13 ``aot_compile`` is there only if it is asked for."""
    import torch._dynamo.config

    if not hasattr(torch._dynamo.config, "enable_aot_compile"):
        yield
        return
    with torch._dynamo.config.patch(enable_aot_compile=True):
        yield
