"""What compiled code depends on of a GPU: enough for a process that never uses it to compile for it."""

import dataclasses
import json
from typing import NamedTuple

import torch


@dataclasses.dataclass(frozen=True)
class GpuProperties:
    """As ``torch.cuda.get_device_properties`` has them."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    regs_per_multiprocessor: int
    max_threads_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 48 << 10
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""

    @classmethod
    def of(cls, device: torch.device) -> "GpuProperties":
        """Those of a GPU that is there."""
        found = torch.cuda.get_device_properties(device)
        fields = (field for field in dataclasses.fields(cls) if hasattr(found, field.name))
        return cls(**{field.name: getattr(found, field.name) for field in fields})

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


class GpuTarget(NamedTuple):
    """What to compile for. ``programmatic``: as ``GraphPool`` has it, for it decides which kernels are launched."""

    properties: GpuProperties
    programmatic: bool

    def as_text(self) -> str:
        return json.dumps([dataclasses.asdict(self.properties), self.programmatic])

    @classmethod
    def of_text(cls, text: str) -> "GpuTarget":
        properties, programmatic = json.loads(text)
        return cls(GpuProperties(**properties), programmatic)
