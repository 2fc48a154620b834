"""The launches of a generated step, in their order: found by running its code on tensors without data.

Inductor's kernels, torch's and those of the project's ops are replaced by what notes their names and arguments. An op
is run as a GPU would run it, so what its launch code decides from shapes and the device is decided.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.gpu_step.fake_step import FakeStep
from compiled_llm.ops.programmatic_launch import programmatic_launches
from compiled_llm.ops.torch_private import TorchDispatchMode
from compiled_llm.ops.torch_private_gpu import GeneratedKernel, generated_kernel, imported, on_cuda, storage_of

_PROJECT = "compiled_llm"
_COPIES = ("copy_", "clone", "_to_copy", "constant_pad_nd")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_weight_int4pack_mm")
_ATTENTION = (
    "paged_attention", "rotary_attention", "decode_attention", "rotary_decode_attention",
    "rotary_latent_attention", "rotary_latent_decode_attention",
)  # fmt: skip
_STATES = ("short_convolution", "gated_delta_rule", "mamba2_scan")
_ALLOCATES = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel as it is launched: the function and what it is specialised for."""

    function: Any
    arguments: dict[str, Any]  # by name, constants too
    options: dict[str, Any]
    grid: tuple[int, ...]
    generated: GeneratedKernel | None = None  # if Inductor wrote it

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel on the device.

    Attributes:
        kind: "op" (a Triton kernel of the project's ops), "generated" (a Triton kernel of Inductor's), "product"
            (cuBLAS), "copy", or "torch" (another kernel of torch's).
        op: the op of the project that launches it; "" for none.
        read, written: the tensors, as the launch sees them.
    """

    name: str
    kind: str
    op: str
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]
    triton: TritonKernel | None = None

    @property
    def is_programmatic(self) -> bool:
        """Whether it may start while the one before still runs, see ``programmatic_launch.py``."""
        return self.triton is not None and bool(self.triton.options.get("launch_pdl"))

    @property
    def is_attention(self) -> bool:
        """Part of an attention op, with what it does besides: rope, norms, the write to the cache."""
        return self.op.removesuffix("_exact") in _ATTENTION

    @property
    def is_mixer(self) -> bool:
        """Part of what brings a layer's tokens together: of attention, or of what has its place."""
        return self.is_attention or self.op.removesuffix("_exact") in _STATES

    @property
    def is_addmm_with_matrix(self) -> bool:
        """A product that adds a matrix: it is read besides, where an addition could have been fused elsewhere."""
        return self.name == "addmm" and self.read[0].dim() == 2 and self.read[0].shape[0] > 1


class Transfer(NamedTuple):
    """Weights that begin to come from host memory (``ops/fetch.py``), or that the launch behind waits for.

    Attributes:
        place: of the launch behind it.
        buffer: its storage.
        nbytes: that come; 0: it waits for those that the buffer was sent last.
    """

    place: int
    buffer: int
    nbytes: int = 0


def launches_of(step: FakeStep) -> list[Launch]:
    """All launches of a step."""
    return run_on_fakes(step)[0]


def run_on_fakes(step: FakeStep) -> tuple[list[Launch], list[Transfer]]:
    """All launches of a step, and what comes from host memory beside them."""
    with tempfile.TemporaryDirectory(prefix="compiled-llm-gpu-step-") as directory:
        recorder = _Recorder(Path(directory))
        path = Path(directory) / f"{next(_NAMES)}.py"
        module = imported(step.generated.code, path, recorder.generated, _ExternKernels(recorder))
        allowed = programmatic_launches(step.programmatic)
        with step.mode, torch.no_grad(), recorded_kernels(recorder.triton), recorder, allowed:
            module.call(list(step.generated.inputs))
        return recorder.launches, recorder.transfers


def spans_of(launches: list[Launch]) -> tuple[slice, ...]:
    """From the attention (or what has its place) of each layer to that of the next: a layer, from its middle on."""
    starts = [n for n, launch in enumerate(launches) if launch.is_mixer and (n == 0 or not launches[n - 1].is_mixer)]
    return tuple(slice(start, end) for start, end in itertools.pairwise(starts))


_NAMES = (f"compiled_llm_generated_{n}" for n in itertools.count())  # of modules: each is another one


@contextlib.contextmanager
def recorded_kernels(record: Callable[[Any, tuple, dict], None]) -> Iterator[None]:
    """Triton kernels are not launched: ``record`` gets each with its arguments and its grid."""
    from triton.runtime.jit import JITFunction

    before = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        record(self, args, {"grid": grid, **kwargs})

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = before


class _Recorder(TorchDispatchMode):
    """Notes every launch while it is active."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.transfers: list[Transfer] = []
        self._directory = directory
        self._op, self._mutated = "", set[int]()
        self._fresh: dict[int, Tensor] = {}  # made by an op and not written yet, by their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == _PROJECT:
            return self._run_op(func, args, kwargs)
        if func.namespace == "prim":  # asks a tensor for its device, and such
            return func(*args, **kwargs)
        with self:  # one that a GPU runs as several kernels
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        outputs = _tensors_of(result)
        if name in _ALLOCATES:
            self._fresh |= {storage_of(tensor): tensor for tensor in outputs}
        elif not func.is_view and name not in ("detach", "_unsafe_view", "lift_fresh"):
            inputs = _tensors_of((args, kwargs))
            on_gpu = any(tensor.device.type == "cuda" for tensor in (*inputs, *outputs))
            if on_gpu:
                self.add(name, inputs, outputs)
        return result

    def add(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A kernel of torch's."""
        kind = "copy" if name in _COPIES else "product" if name in _PRODUCTS else "torch"
        written = {id(tensor) for tensor in outputs}
        read = tuple(tensor for tensor in inputs if id(tensor) not in written)
        self.launches.append(Launch(name, kind, self._op, read, tuple(outputs)))

    def _run_op(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.overloadpacket.__name__ == "fetch":
            self.transfers.append(Transfer(len(self.launches), storage_of(args[2]), args[1].nbytes))
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ == "await_fetched":
            self.transfers.append(Transfer(len(self.launches), storage_of(args[1])))
            return func(*args, **kwargs)
        before = self._op, self._mutated, self._fresh
        self._op = func.overloadpacket.__name__
        pairs = zip(func._schema.arguments, args, strict=False)
        self._mutated = {
            storage_of(value)
            for argument, value in pairs
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        }
        self._fresh = {}
        try:
            with self:  # it is off while it handles an op
                return on_cuda(func, args, kwargs)
        finally:
            self._op, self._mutated, self._fresh = before

    def triton(self, function: Any, args: tuple, kwargs: dict) -> None:
        """A kernel of the project's: what an op made is written by the first kernel that gets it, then read."""
        grid = kwargs.pop("grid")
        named = dict(zip(function.arg_names, args, strict=False))
        named |= {name: value for name, value in kwargs.items() if name in function.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in function.arg_names}
        read: list[Tensor] = []
        written: list[Tensor] = []
        for tensor in _tensors_of(tuple(named.values())):
            storage = storage_of(tensor)
            is_new = self._fresh.pop(storage, None) is not None
            (written if is_new or storage in self._mutated else read).append(tensor)
        kernel = TritonKernel(function, named, options, tuple(grid(named) if callable(grid) else grid))
        self.launches.append(Launch(function.__name__, "op", self._op, tuple(read), tuple(written), kernel))

    def generated(self, name: str, source: str) -> "_GeneratedKernel":
        """For Inductor's module."""
        kernel = generated_kernel(name, source, self._directory / f"{next(_NAMES)}.py")
        return _GeneratedKernel(self, name, kernel)


class _GeneratedKernel:
    """Stands in for a Triton kernel of Inductor's."""

    def __init__(self, recorder: _Recorder, name: str, kernel: GeneratedKernel) -> None:
        self._recorder, self._name, self._kernel = recorder, name, kernel

    def run(self, *args: Any, stream: Any = None) -> None:
        kernel = self._kernel
        names = [name for name in kernel.signature if not name.isupper()]  # a size of 1 is a constant that is passed
        named = dict(zip(names, args, strict=True))
        blocks = {name: kernel.constants.get(f"{name[0].upper()}BLOCK") for name in named if name.endswith("numel")}
        grid = [-(-named[name] // block) for name, block in blocks.items() if block and name[0] in "xyz"]
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        read = tuple(value for name, value in tensors.items() if name.startswith("in"))
        written = tuple(value for name, value in tensors.items() if "out_ptr" in name)
        triton = TritonKernel(kernel.function, named | kernel.constants, kernel.options, tuple(grid), kernel)
        self._recorder.launches.append(Launch(self._name, "generated", "", read, written, triton))


class _ExternKernels:
    """Stands in for torch's kernels that Inductor's module calls."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Callable:
        def call(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
            self._recorder.add(name, _tensors_of((args, kwargs)), [out])
            return out

        return call


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in _tensors_of(item)] if isinstance(value, tuple | list) else []
