"""Compiling Triton kernels for a GPU that is not there, and what the compiled kernels use of it."""

import re
import subprocess
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
import triton

from compiled_llm.ops.attention.triton_attention import Device
from compiled_llm.ops.linear import triton_linear

REGISTERS = 65536  # of an SM, given out to each warp in multiples of 256
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Recorder:
    """Replaces a kernel and keeps what it is launched with, instead of launching it."""

    def __init__(self, kernel: "triton.JITFunction", launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> FunctionType:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def recorded(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *modules: ModuleType) -> list[tuple]:
    """Has the kernels of ``modules`` recorded instead of launched: (kernel, args, kwargs), as from a GPU so capable."""
    launches: list[tuple] = []
    for module in modules:
        for name, kernel in [*vars(module).items()]:
            if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                monkeypatch.setattr(module, name, Recorder(kernel, launches))
        if hasattr(module, "device_facts"):
            monkeypatch.setattr(module, "device_facts", lambda device: Device("", capability, 132))
    monkeypatch.setattr(triton_linear, "_capability", lambda device: capability)
    return launches


def specialisation(args: tuple) -> tuple:
    """What Triton compiles a launch's arguments for: dtypes and alignment of tensors, ones and multiples of numbers."""

    def of(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

    return tuple(map(of, args))


def compiled(kernel: "triton.JITFunction", args: tuple, kwargs: dict, capability: tuple[int, int]):
    """The launch compiled for a GPU that is not there, specialised as a launch on one would be."""
    from triton.backends.compiler import GPUTarget

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
            tensor = isinstance(value, torch.Tensor)
            signature[name] = f"*{TYPES[value.dtype]}" if tensor else "i32"
            if tensor or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32), options=options)


def without_spills(launch: tuple, capability: tuple[int, int], directory: Path):
    """The launch compiled, and its registers; it may keep nothing in local memory."""
    binary = compiled(*launch, capability)
    usage = resources(binary.asm["cubin"], directory / "kernel.cubin")
    assert usage["STACK"] == usage["LOCAL"] == 0, (launch[0].__name__, usage)
    return binary, usage["REG"]


def resources(cubin: bytes, path: Path) -> dict[str, int]:
    """Registers, stack and local memory of a compiled kernel."""
    path.write_bytes(cubin)
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [disassembler, "--dump-resource-usage", path]
    dump = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout)}
