"""Copies from host to device that the host does not wait for.

From pageable memory a copy to a GPU waits until the device has done all that was given to it before. From pinned memory
it does not: torch keeps the memory until the copy is done, and takes it for others only then.
"""

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the host, on ``device`` in the order of its stream; on a CPU the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def take(
    hosts: tuple[Tensor, Tensor], target: Tensor, chosen: Tensor, tables: Tensor, places: int, entries: int
) -> None:
    """On a GPU: as ``triton_pinned.take``."""
    from compiled_llm.ops import triton_pinned  # the first call on a GPU loads Triton, not the import

    triton_pinned.take(hosts, target, chosen, tables, places, entries)


def give(tokens: Tensor, hosts: tuple[Tensor, Tensor], chosen: Tensor) -> None:
    """On a GPU: as ``triton_pinned.give``."""
    from compiled_llm.ops import triton_pinned

    triton_pinned.give(tokens, hosts, chosen)
