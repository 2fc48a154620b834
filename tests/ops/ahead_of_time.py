"""Compiling Triton kernels for a GPU that is not there, and what the compiled kernels use of it."""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from torch import Tensor

from compiled_llm.ops.attention.triton_attention import Device
from compiled_llm.ops.linear import triton_linear

Launch = tuple["triton.JITFunction", tuple, dict]
"""A kernel, its arguments in their order, and its named ones."""
REGISTERS = 65536  # of an SM, given out to each warp in multiples of 256
SM_MEMORY = {(8, 0): 164 * 1024, (9, 0): 228 * 1024, (10, 0): 228 * 1024}
"""Shared memory of an SM; a program takes 1 KB more than it asks for."""
PROGRAM_MEMORY = {(8, 0): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
"""Shared memory of a program; 99 KB on the GPUs between 8.0 and 9.0."""
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


class Recorder:
    """Replaces a kernel and keeps what it is launched with, instead of launching it."""

    def __init__(self, kernel: "triton.JITFunction", launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


@contextlib.contextmanager
def recorded(capability: tuple[int, int] | None, *modules: ModuleType) -> Iterator[list[Launch]]:
    """Within it the kernels of ``modules`` are recorded instead of launched, as on a GPU so capable."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, kernel in [*vars(module).items()]:
                if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                    patch.setattr(module, name, Recorder(kernel, launches))
            if hasattr(module, "device_facts"):
                patch.setattr(module, "device_facts", lambda device: Device("", capability, 132))
        patch.setattr(triton_linear, "_capability", lambda device: capability)
        yield launches


def specialisation(args: tuple) -> tuple:
    """What Triton compiles a launch's arguments for: dtypes and alignment of tensors, ones and multiples of numbers."""

    def of(value: object) -> object:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

    return tuple(map(of, args))


def compiled(launch: Launch, capability: tuple[int, int]):
    """The launch compiled for a GPU that is not there, specialised as a launch on one would be."""
    from triton.backends.compiler import GPUTarget

    kernel, args, kwargs = launch
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = values[name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            tensor = isinstance(value, Tensor)
            signature[name] = f"*{TYPES[value.dtype]}" if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def without_spills(launch: Launch, capability: tuple[int, int], programs: int = 0, spilled: int = 0):
    """The launch compiled, and its registers.

    It keeps nothing in local memory, but for ``spilled`` bytes. ``programs``: of so many an SM has room, if given.
    """
    binary, name = compiled(launch, capability), launch[0].__name__
    usage = resources(binary.asm["cubin"])
    assert usage["STACK"] <= spilled, (name, usage)
    assert usage["LOCAL"] <= spilled, (name, usage)
    assert binary.metadata.shared < SM_MEMORY[capability], name
    assert programs * (binary.metadata.shared + 1024) <= SM_MEMORY[capability], name
    assert programs * launch[2].get("num_warps", 4) * -(-usage["REG"] // 8) * 256 <= REGISTERS, (name, usage)
    return binary, usage["REG"]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of a compiled kernel."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [disassembler, "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}
