"""Copies from host to device that the host does not wait for.

From pageable memory a copy to a GPU waits until the device has done all that was given to it before. From pinned memory
it does not: torch keeps the memory until the copy is done, and takes it for others only then.
"""

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, of the host, on ``device`` in the order of its stream; on a CPU the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
