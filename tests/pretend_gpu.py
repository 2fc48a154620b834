"""A GPU that is not there: tensors of the CPU that say they are on "cuda", and a host that may not wait for it.

Everything really is computed, by the CPU's kernels. While ``PretendGpu.serving`` is set, whatever would make a host
wait for a real GPU is an error: reading a number, copies without ``non_blocking``, copies from memory that is not
pinned. A pinned tensor must keep its content until the host has waited for an event after the copy.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from compiled_llm.checkpoint import reader as checkpoint_reader
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops.attention.arguments import Keys, Turn
from compiled_llm.ops.attention.rotary_attention import rotary_attention
from compiled_llm.ops.attention.rotary_latent_attention import rotary_latent_attention

GPU = torch.device("cuda", 0)
_OF_BOTH = ("compiled_llm::swap", "compiled_llm::fetch")  # ops with tensors of the host and of the GPU
_NUMBERS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")


class OnGpu(Tensor):
    """A tensor on the pretended GPU; ``inner`` has its content."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
        )
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise AssertionError(f"{function} of a tensor on the pretended GPU, outside of it")


class WaitError(AssertionError):
    """The host would have waited for the GPU."""


class PretendGpu(TorchDispatchMode):
    """While it is entered, "cuda" is the pretended GPU.

    Attributes:
        serving: whether waiting is an error.
        num_sent, num_waits: copies to the GPU while serving, and waits for events.
    """

    def __init__(self) -> None:
        super().__init__()
        self.serving = False
        self.num_sent = self.num_waits = 0
        self.pinned: dict[int, Tensor] = {}  # by the address of the memory
        self._under_way: list[tuple[Tensor, Tensor]] = []  # pinned tensors that are being copied, and their content

    def pin(self, tensor: Tensor) -> Tensor:
        """``tensor``, in pinned memory."""
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def wait(self) -> None:
        """The host waits for all that the GPU was given."""
        self.num_waits += 1
        for source, content in self._under_way:
            assert torch.equal(source, content), "pinned memory was written while a copy from it was under way"
        self._under_way.clear()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name, on_gpu = function._schema.name, any(isinstance(one, OnGpu) for one in _tensors((args, kwargs)))
        device, is_pinned = kwargs.get("device"), bool(kwargs.pop("pin_memory", False))
        if device is not None:
            # Torch makes numbers beside a tensor where it takes the tensor to be.
            to_gpu = torch.device(device).type == "cuda" or name == "aten::scalar_tensor"
            kwargs["device"] = "cpu" if to_gpu else device
        else:
            to_gpu = on_gpu
        if self.serving:
            self._check(name, args, kwargs, to_gpu)
        arguments = tree_map(_inner, args)
        in_one = {"rotary_attention": _rotary, "rotary_latent_attention": _rotary_latent}
        as_several = in_one.get(name.removeprefix("compiled_llm::").removesuffix("_exact"))  # ops of a CPU
        if as_several is not None:
            names = [argument.name for argument in function._schema.arguments]
            output = as_several(dict(zip(names, arguments, strict=True)) | {"exact": name.endswith("_exact")})
        else:
            output = function(*arguments, **tree_map(_inner, kwargs))
        if name in ("aten::_to_copy", "aten::clone") and not to_gpu:
            self.pin(output)  # as torch does for copies that the host does not wait for
        if is_pinned:
            self.pin(output)
        if isinstance(output, Tensor) and args and _inner(args[0]) is output:  # an op in place
            return args[0]
        return tree_map(lambda one: OnGpu(one) if isinstance(one, Tensor) else one, output) if to_gpu else output

    def _check(self, name: str, args: tuple, kwargs: dict, to_gpu: bool) -> None:
        tensors = _tensors((args, kwargs))
        if name in _NUMBERS and any(isinstance(one, OnGpu) for one in tensors):
            raise WaitError(f"{name} reads a number of the GPU")
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[0] if name == "aten::_to_copy" else args[1]
            target_on_gpu = to_gpu if name == "aten::_to_copy" else isinstance(args[0], OnGpu)
            if isinstance(source, OnGpu) == target_on_gpu:
                return
            if not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])):
                raise WaitError(f"{name} without non_blocking, {tuple(source.shape)}")
            host = source if target_on_gpu else args[0]
            if not isinstance(host, OnGpu) and not self.is_pinned(host):
                raise WaitError(f"{name} of memory that is not pinned, {tuple(host.shape)}")
            if target_on_gpu:
                self.num_sent += 1
                self._under_way.append((source, source.clone()))
        elif any(isinstance(one, OnGpu) for one in tensors) and not name.startswith(_OF_BOTH):
            mixed = [one for one in tensors if not isinstance(one, OnGpu) and (one.dim() or name == "aten::index_put_")]
            if mixed:
                raise WaitError(f"{name} of tensors of both, {[tuple(one.shape) for one in mixed]}")


class PretendEvent:
    """Stands for torch.cuda.Event."""

    gpu: PretendGpu

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.gpu.wait()

    def elapsed_time(self, other: "PretendEvent") -> float:
        return 1.0


@contextlib.contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, memory: int = 2**31) -> Iterator[PretendGpu]:
    """A GPU of ``memory`` bytes, none of which is ever in use."""
    gpu = PretendGpu()
    monkeypatch.setattr(PretendEvent, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: gpu.pin(tensor.clone()))
    monkeypatch.setattr(torch.Tensor, "is_pinned", gpu.is_pinned)
    # A mode is one thread's, so no other may read weights.
    monkeypatch.setattr(checkpoint_reader, "ThreadPoolExecutor", _InThisThread)
    make = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda data, dtype=None, device=None: make(data, dtype=dtype).to(device or "cpu")
    )
    cuda = {
        "Event": PretendEvent,
        "_lazy_init": lambda: None,
        "device": lambda device: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (memory, memory),
        "memory_reserved": lambda device=None: 0,
        "synchronize": lambda device=None: gpu.wait(),
        "empty_cache": lambda: None,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with gpu:
        yield gpu


class _InThisThread:
    """Stands for an executor with threads."""

    def __init__(self, *arguments: object) -> None:
        pass

    def map(self, function: Callable, values: Iterable) -> Iterator:
        return map(function, values)

    def shutdown(self, **how: bool) -> None:
        pass


def _rotary(given: dict[str, Any]) -> Tensor:
    turn, keys = (part(**{name: given[name] for name in part._fields}) for part in (Turn, Keys))
    return rotary_attention(given["qkv"], turn, keys, _kind(given), given["sinks"], given["ancestors"])


def _rotary_latent(given: dict[str, Any]) -> Tensor:
    own = ("q_latent", "q_turned", "k_turned", "latent", "cos_sin", "norm", "query_scale", "eps")
    keys = Keys(**{name: given[name] for name in Keys._fields})
    return rotary_latent_attention(*(given[name] for name in own), keys, _kind(given), given["ancestors"])


def _kind(given: dict[str, Any]) -> AttentionSpec:
    """The arguments of an op that are a layer's own."""
    return AttentionSpec(
        given.get("num_heads", 0), 0, 0, given["sm_scale"], given["window"], soft_cap=given.get("soft_cap", 0.0),
        exact=given["exact"], max_query_len=given["max_query_len"],
    )  # fmt: skip


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for one in values for tensor in _tensors(one)]
