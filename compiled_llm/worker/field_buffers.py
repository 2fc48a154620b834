"""FieldBuffers: named arrays that the host fills and a graph reads, in one piece of memory at fixed addresses.

The host fills them with numpy, and one copy takes all fields to a GPU. While a GPU runs a step, the host prepares the
next one, and the first may not have been copied yet: so there are two host arrays, used in turns.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.ops.torch_private import mark_static_address

_ALIGNMENT = 64  # bytes; Inductor copies inputs that are not aligned to 16

Arrays = dict[Any, np.ndarray]
Fields = dict[Any, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


class FieldBuffers:
    """A zeroed tensor for each field, ``name -> (shape, dtype)``.

    Attributes:
        tensors: views on the device at fixed addresses.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2 if on_gpu else 1)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self._hosts[0]

        def view(memory: Tensor, name: Any) -> Tensor:
            shape, dtype = fields[name]
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            return memory[offsets[name] : offsets[name] + num_bytes].view(dtype).view(shape)

        self._arrays: list[Arrays] = [{name: view(host, name).numpy() for name in fields} for host in self._hosts]
        self.tensors = {name: view(self._device, name) for name in fields}
        for tensor in self.tensors.values():
            mark_static_address(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def all_arrays(self) -> list[Arrays]:
        """The arrays of every host buffer, for what all have to contain. Call ``copy`` afterwards."""
        return self._arrays

    def next_arrays(self) -> Arrays:
        """The arrays to fill for the next step. Call ``copy`` afterwards."""
        self._hosts.reverse()
        self._arrays.reverse()
        return self._arrays[0]

    def copy(self) -> None:
        """Copy to the device, in the order of its stream."""
        if self._device is not self._hosts[0]:
            self._device.copy_(self._hosts[0], non_blocking=True)
