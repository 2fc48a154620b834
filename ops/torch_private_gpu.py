"""Torch's private names that it takes to compile for a GPU that is not there: the rest of ``torch_private.py``.

``pretend_gpu`` changes this process for good, so it is for programs of their own, and for one GPU each.
"""

import contextlib
import ctypes
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_CUDA, _META = 1, 14  # c10::DeviceType


def pretend_gpu(properties: Any) -> None:
    """From now on this process takes one GPU with ``properties`` (``torch.cuda.get_device_properties``) to be there.

    Tensors on it must be fake. Nothing can run on it.
    """
    import torch._inductor.config
    import torch._subclasses.fake_tensor
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    # What makes a device the current one. A build for CPUs has none for CUDA; that of "meta" does nothing.
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_META]
    capability = properties.major, properties.minor
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "set_device": None,
        "_exchange_device": -1,
        "_maybe_exchange_device": -1,
        "get_rng_state": torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    # Compiled code would ask for the current stream of a GPU; a build for CPUs has no accelerator, and asks for none.
    torch.accelerator.is_available = _always(False)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda._DeviceGuard = _NoGuard  # type: ignore[misc, assignment]
    answers["get_compute_capability"] = 10 * capability[0] + capability[1]
    for name in answers.keys() & vars(CudaInterface).keys():  # which took the functions when it was imported
        setattr(CudaInterface, name, staticmethod(_always(answers[name])))
    CudaInterface.Worker.current_device = staticmethod(_always(0))  # type: ignore[method-assign]
    CudaInterface.Worker.get_device_properties = staticmethod(_always(properties))  # type: ignore[method-assign]
    torch.utils._triton.has_triton = _always(True)  # type: ignore[assignment]
    torch._C._cuda_cudaCachingAllocator_is_enabled = _always(True)
    torch._C._cuda_getCurrentRawStream = _always(0)
    FakeTensorMode.avoid_device_init = property(_always(True))  # type: ignore[assignment]
    # A build with CUDA would make a tensor for the first fake one, to wake a driver that is not there.
    torch._subclasses.fake_tensor.init_gpu_context = _always(None)  # type: ignore[assignment]


def keep_nothing() -> None:
    """From now on Inductor keeps nothing: where kernels are pretended too, no process that has a GPU may find it."""
    import torch._inductor.config
    import torch.utils._triton

    torch.utils._triton.triton_hash_with_backend = _always("pretended")  # type: ignore[assignment]
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.shape_padding = False


def _always(answer: Any) -> Callable:
    return lambda *args, **kwargs: answer


class _NoGuard:
    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *args: Any) -> None: ...


# -- Generating code


class Generated(NamedTuple):
    """What Inductor made of a graph.

    Attributes:
        code: the module that it would run, whose ``call`` takes ``inputs`` as a list.
        inputs: fake tensors, and numbers.
        dynamic_inputs: the tensors among them, by their places, whose addresses are not static.
        skip_reasons: why no CUDA graph would be made of it.
    """

    code: str
    inputs: list[Any]
    dynamic_inputs: tuple[int, ...]
    skip_reasons: tuple[str, ...]


class _Done(BaseException):
    """Ends a compilation once the code is there."""


@contextlib.contextmanager
def without_constants_on_gpu() -> Iterator[None]:
    """The compiler makes no tensor of one value on the GPU to see what follows from it: there is none."""
    import torch._inductor.config as inductor

    with inductor.patch(joint_graph_constant_folding=False):
        yield


def generate(compiled: Callable, args: tuple, mode: FakeTensorMode) -> Generated:
    """The code of ``compiled``, a result of ``torch.compile``, for fake arguments of ``mode``."""
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor.cudagraph_utils import check_lowering_disable_cudagraph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    lowered: dict[str, Any] = {}
    kind: Any = compile_fx._InProcessFxCompile
    compile_whole = kind.codegen_and_compile

    def module(self: Any) -> Any:
        lowered["code"] = self.codegen()[0].value
        lowered["reasons"] = [check_lowering_disable_cudagraph(self.device_node_mapping)]
        return types.SimpleNamespace(call=None, runner=None)

    def compile_graph(self: Any, gm: Any, inputs: Sequence[Any], to_check: Sequence[int], kwargs: Any) -> Any:
        result = compile_whole(self, gm, inputs, to_check, kwargs)
        lowered["graph"], lowered["inputs"] = result, list(inputs)
        incompatible = get_first_incompatible_cudagraph_node(gm)
        lowered["reasons"].append(incompatible and f"incompatible op {incompatible.target}")
        lowered["static"] = set(kwargs.get("static_input_idxs") or ())
        raise _Done

    with _replaced(GraphLowering, "compile_to_module", module), _replaced(kind, "codegen_and_compile", compile_graph):
        _call_until_done(compiled, args, mode)
    graph, inputs = lowered["graph"], lowered["inputs"]
    reasons = [reason for reason in (graph.disabled_cudagraphs_reason, *lowered["reasons"]) if reason]
    dynamic = {n for n, one in enumerate(inputs) if isinstance(one, Tensor)} - lowered["static"]
    mutated = sorted(dynamic & set(graph.mutated_input_idxs))
    reasons += [f"mutated inputs without a static address: {mutated}"] if mutated else []
    with mode:
        inputs = [_plain(one) for one in inputs]
    return Generated(lowered["code"], inputs, tuple(sorted(dynamic)), tuple(dict.fromkeys(reasons)))


def trace(compiled: Callable, args: tuple, mode: FakeTensorMode) -> None:
    """Do what a first call of ``compiled`` does until Inductor makes code: what its cache does not spare."""
    import torch._inductor.compile_fx as compile_fx

    def done(*args: Any) -> None:
        raise _Done

    with _replaced(compile_fx._InProcessFxCompile, "codegen_and_compile", done):
        _call_until_done(compiled, args, mode)


def _call_until_done(compiled: Callable, args: tuple, mode: FakeTensorMode) -> None:
    with contextlib.suppress(_Done), mode, torch.no_grad():
        compiled(*args)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _plain(value: Any) -> Any:
    """A tensor without symbolic sizes, or a number."""
    if not isinstance(value, Tensor):
        return int(value)
    size, stride = map(int, value.shape), map(int, value.stride())
    return torch.empty_strided(tuple(size), tuple(stride), dtype=value.dtype, device=value.device)


# -- Running generated code on fake tensors


class GeneratedKernel(NamedTuple):
    """A Triton kernel that Inductor wrote, with the first of the configurations that it would try."""

    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list]
    options: dict[str, Any]
    heuristic: str
    num_configs: int


def imported(code: str, path: Path, on_kernel: Callable[[str, str], Any], extern_kernels: Any) -> Any:
    """Inductor's module, for fake tensors: it allocates, and calls what it is given for all else.

    Args:
        path: where it is written; it must not be there.
        on_kernel: (name, source) of a Triton kernel -> what has ``run``.
        extern_kernels: has what the module calls of torch's kernels.
    """
    import torch._inductor.async_compile as async_compile

    class Recorded:
        def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
            return on_kernel(name, source)

        def wait(self, scope: Any) -> None: ...

    with _replaced(async_compile, "AsyncCompile", Recorded):
        module = _load(code, path)
    nothing = _always(None)
    module.assert_size_stride = module.assert_alignment = nothing
    module.empty_strided_cuda = _empty_strided
    module.reinterpret_tensor = _reinterpret
    module.extern_kernels = extern_kernels
    return module


def _load(code: str, path: Path) -> Any:
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # Triton reads the source of its functions through it
    spec.loader.exec_module(module)
    return module


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def generated_kernel(name: str, source: str, path: Path) -> GeneratedKernel:
    """The kernel of this name and source, which is written to ``path``."""
    from torch._inductor.runtime import triton_helpers

    with _replaced(triton_helpers, "set_driver_to_gpu", _always(None)):
        tuner = getattr(_load(source, path), name)
    meta, config = tuner.triton_meta, tuner.configs[0]
    constants = {**meta["constants"], **config.kwargs}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    options["enable_fp_fusion"] = meta.get("enable_fp_fusion", True)
    kind = str(tuner.heuristic_type).rpartition(".")[2].lower()
    attributes = meta["configs"][0]
    return GeneratedKernel(tuner.fn, meta["signature"], constants, attributes, options, kind, len(tuner.configs))


def storage_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common, fake ones too."""
    return tensor.untyped_storage()._cdata


def on_cuda(op: Any, args: tuple, kwargs: dict) -> Any:
    """Run what ``op`` is on a GPU, whatever torch would choose for fake tensors."""
    from torch._C import DispatchKey, DispatchKeySet

    return op.redispatch(DispatchKeySet(DispatchKey.CUDA), *args, **kwargs)
