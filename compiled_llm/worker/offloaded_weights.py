"""Weights of a GPU that lie in host memory (``cpu_offload_gb``): which of them, and whether there is room."""

import dataclasses
from typing import Any

import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.offload import Offloading, PinnedMemory, chosen_layers, sizes_of_layer, with_fetches
from compiled_llm.models.registry import family_of
from compiled_llm.system.resources import free_memory

_DEVICES = ("cuda",)  # tests pass a CPU off as one, which computes the same


@dataclasses.dataclass
class OffloadedWeights:
    """Where the weights of an engine with ``cpu_offload_gb`` lie.

    Attributes:
        kind: of linear layers: puts those of chosen layers into host memory as they are made.
        memory: that host memory, which takes somewhat more than the weights.
        host_bytes, buffer_bytes: of weights there, and of what they come to on the device; 0 before ``over_buffers``.
    """

    kind: Offloading
    memory: PinnedMemory
    host_bytes: int = 0
    buffer_bytes: int = 0

    def over_buffers(self, weights: Any, device: torch.device) -> Any:
        """``weights`` as a step takes them. On the device "meta": of a description."""
        made, sizes = with_fetches(weights, self.kind.layers, device)
        self.host_bytes, self.buffer_bytes = sizes
        return made

    def check_room(self) -> None:
        """``ValueError`` where the host has too little memory, after ``over_buffers`` of a description."""
        needed = self.memory.foreseen_nbytes
        if needed > (free := free_memory()):
            raise ValueError(
                f"cpu_offload_gb must be less: {self.host_bytes >> 20} MiB of weights would lie in {needed >> 20} MiB "
                f"of host memory, of which {free >> 20} MiB are free"
            )


def offloaded(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, linears: LinearKind, dtype: torch.dtype
) -> OffloadedWeights | None:
    """What ``cpu_offload_gb`` asks for of a model with linear layers of the kind ``linears``; None: nothing.

    Raises:
        ValueError: the device, the model or the amount does not allow it.
    """
    gib = config.cpu_offload_gb
    if not gib:
        return None
    if device.type not in _DEVICES:
        raise ValueError(
            f"cpu_offload_gb must be 0 on {device} (weights are in host memory already; weights_path maps more than "
            f"there is room for), given {gib:g}"
        )
    if isinstance(model_config, TransformersConfig):
        raise ValueError(
            f"cpu_offload_gb must be 0 for {model_config.architecture}, which runs through transformers' modelling "
            f"code, given {gib:g}"
        )
    described = family_of(model_config).describe(model_config, dtype, linears)
    layers = chosen_layers(described.weights, gib, model_config.architecture)
    sizes = [size for number in layers for size in sizes_of_layer(described.weights.layers[number])]
    memory = PinnedMemory(sizes, pinned=device.type == "cuda")
    return OffloadedWeights(Offloading.of(linears, model_config, layers, memory.put), memory)
