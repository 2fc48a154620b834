"""The GPUs that a step can be inspected for, by their public data sheets.

Sources: NVIDIA's data sheets of A100, H100, H200 and B200 (PCIe of generation 4 and 5, 16 lanes, one direction); the
architecture white papers "NVIDIA A100 Tensor Core GPU" (2020), "NVIDIA H100 Tensor Core GPU" (2022) and "NVIDIA
Blackwell" (2024); for memory, registers and threads of an SM the table of compute capabilities in the CUDA C++
Programming Guide. Clocks are those at which the FLOP/s hold.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Attributes:

    name: as ``torch.cuda.get_device_name`` gives it.
    sm_bytes: shared memory of an SM; ``block_bytes``: the most that a program can have of it.
    bandwidth: bytes a second of its memory; ``bus``: from the host's memory to it, over PCIe.
    bf16, fp8, int8: dense operations a second of its matrix units; 0: it has none for that type.
    clock: cycles a second.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    l2_bytes: int
    sm_bytes: int
    block_bytes: int
    bandwidth: float
    bf16: float
    fp8: float
    int8: float
    clock: float
    bus: float
    registers: int = 65536  # of an SM
    threads: int = 2048  # of an SM
    programs: int = 32  # of an SM

    def matrix_rate(self, bits: int) -> float:
        """Operations a second on elements of so many bits; 32: in TF32 there would be some, exactly there are none."""
        return {8: self.fp8 or self.int8 or self.bf16, 16: self.bf16}.get(bits, self.num_sms * 256 * self.clock)

    def runs_code_of(self, other: "Gpu") -> bool:
        """Whether both are alike but for their memory, as H100 and H200: then one's code is the other's."""
        return dataclasses.replace(
            self, name=other.name, memory_bytes=other.memory_bytes, bandwidth=other.bandwidth
        ) == other  # fmt: skip


_KB, _MB, _GB, _TERA = 1 << 10, 1 << 20, 1 << 30, 1e12

GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 * _GB, 40 * _MB, 164 * _KB, 163 * _KB,
        bandwidth=2.039e12, bf16=312 * _TERA, fp8=0.0, int8=624 * _TERA, clock=1.41e9, bus=32e9,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * _GB, 50 * _MB, 228 * _KB, 227 * _KB,
        bandwidth=3.35e12, bf16=989.4 * _TERA, fp8=1978.9 * _TERA, int8=1978.9 * _TERA, clock=1.83e9, bus=64e9,
    ),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 141 * _GB, 50 * _MB, 228 * _KB, 227 * _KB,
        bandwidth=4.8e12, bf16=989.4 * _TERA, fp8=1978.9 * _TERA, int8=1978.9 * _TERA, clock=1.83e9, bus=64e9,
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 180 * _GB, 126 * _MB, 228 * _KB, 227 * _KB,
        bandwidth=8.0e12, bf16=2250 * _TERA, fp8=4500 * _TERA, int8=4500 * _TERA, clock=1.855e9, bus=64e9,
    ),
}  # fmt: skip
