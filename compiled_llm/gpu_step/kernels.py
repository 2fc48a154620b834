"""Triton's kernels compiled for a GPU that is not there, and what the compiled code uses of it."""

import dataclasses
import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from compiled_llm.gpu_step.flow import Flow, read_flow
from compiled_llm.gpu_step.gpus import Gpu
from compiled_llm.gpu_step.launches import TritonKernel
from compiled_llm.gpu_step.sass import Code, read_sass

TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
_WARP = 32
_RESERVED = 1 << 10  # bytes of shared memory that each program takes besides its own


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for one GPU.

    Attributes:
        registers: of a thread; shared: bytes of a program; spilled: bytes of a thread, 0 where all fits.
        programs_per_sm: that fit at once.
        cubin: the machine code.
    """

    registers: int
    shared: int
    spilled: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    cubin: bytes = dataclasses.field(repr=False)

    @property
    def code(self) -> Code:
        """All of it."""
        return self.flow.code

    @property
    def loop(self) -> Code | None:
        """The main loop; None without one."""
        return self.flow.loop

    @property
    def flow(self) -> Flow:
        """Its parts."""
        return _disassembled(self.cubin)

    @property
    def bytes_in_flight(self) -> int:
        """Of a program: what it has asked memory for before it has to wait for some of it."""
        threads = self.num_warps * _WARP
        if self.loop is None or not self.loop.loads:
            return threads * self.code.bytes_loaded
        ahead = max(1, self.num_stages - 1) if self.loop.asynchronous else 1
        return threads * self.loop.bytes_loaded * ahead


class Compiler:
    """Compiles for ``gpu``; each kernel once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._known: dict[str, Compiled] = {}

    def compile(self, kernel: TritonKernel) -> Compiled:
        binary = compiled(kernel, self._gpu.capability)
        if binary.hash not in self._known:
            self._known[binary.hash] = self._facts(binary)
        return self._known[binary.hash]

    def _facts(self, binary: Any) -> Compiled:
        cubin, meta = binary.asm["cubin"], binary.metadata
        used = resources(cubin)
        fit = programs_per_sm(self._gpu, used["REG"], meta.shared, meta.num_warps)
        spilled = used["LOCAL"] + used["STACK"]
        return Compiled(used["REG"], meta.shared, spilled, meta.num_warps, meta.num_stages, fit, cubin)


def programs_per_sm(gpu: Gpu, registers: int, shared: int, num_warps: int) -> int:
    """How many programs of ``registers`` a thread and ``shared`` bytes an SM holds at once."""
    of_warp = -(-registers * _WARP // 256) * 256
    by_registers = gpu.registers // of_warp // num_warps
    by_memory = gpu.sm_bytes // (shared + _RESERVED)
    return min(by_registers, by_memory, gpu.threads // (num_warps * _WARP), gpu.programs)


def compiled(kernel: TritonKernel, capability: tuple[int, int]) -> Any:
    """Triton's result for the launch, specialised as a launch on such a GPU would be."""
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.generated is not None:
        made = kernel.generated
        signature, constants, attributes = made.signature, made.constants, made.attributes
        options = {**made.options, "debug": True, "sanitize_overflow": False}  # as Inductor compiles them
    else:
        signature, constants, attributes = _specialised(kernel)
        options = kernel.options
    source = triton.compiler.ASTSource(kernel.function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 10 * capability[0] + capability[1], _WARP), options=options)


def _specialised(kernel: TritonKernel) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list]]:
    """Types, constants, and what is a multiple of 16: tensors always are, as the engine makes them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for i, (name, parameter) in enumerate(zip(kernel.function.arg_names, kernel.function.params, strict=True)):
        value, special = kernel.arguments[name], not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = f"*{TYPES[value.dtype]}" if is_tensor else "i32"
            if is_tensor or (special and value % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def resources(cubin: bytes) -> dict[str, int]:
    """What a kernel uses: REG, STACK, SHARED, LOCAL."""
    usage = _run("cuobjdump", ("--dump-resource-usage",), cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


@functools.cache
def _disassembled(cubin: bytes) -> Flow:
    """It takes half a second, so only for those who ask, and once."""
    return read_flow(read_sass(_run("nvdisasm", ("--print-code", "--print-line-info-inline"), cubin)))


def _run(tool: str, flags: tuple[str, ...], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tools() / tool, *flags, file.name], capture_output=True, text=True, check=True).stdout


@functools.cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
