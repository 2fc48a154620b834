"""FieldBuffers: named arrays that the host fills and a graph reads, in one piece of memory at fixed addresses.

The host fills them with numpy, and one copy takes all fields to a GPU. While a GPU runs a step, the host prepares the
next one, and the first may not have been copied yet: so there are two host arrays, used in turns. In the place of the
copy, a graph may begin with a kernel that takes what is new (``ops/triton_pinned.py``).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.pinned import take
from compiled_llm.ops.torch_private import mark_static_address

_ALIGNMENT = 64  # bytes; Inductor copies inputs that are not aligned to 16

_TURNS = 1 << 30  # as in ops/triton_pinned.py

Arrays = dict[Any, np.ndarray]
Fields = dict[Any, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


class FieldBuffers:
    """A zeroed tensor for each field, ``name -> (shape, dtype)``.

    Args:
        is_apart: whether the device has a memory of its own; None: a GPU has.

    Attributes:
        tensors: views on the device at fixed addresses.
        offsets: of each field, in bytes.
        is_taken: whether graphs take what is new.
    """

    def __init__(self, fields: Fields, device: torch.device, is_apart: bool | None = None) -> None:
        self.offsets = offsets = dict[Any, int]()
        size = 0
        for name, (shape, dtype) in fields.items():
            offsets[name] = size
            size += -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

        on_gpu = device.type == "cuda"
        is_apart = on_gpu if is_apart is None else is_apart
        self._hosts = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=True) if on_gpu else native.huge_zeros((size,), torch.uint8)
            for _ in range(2 if is_apart else 1)
        ]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if is_apart else self._hosts[0]
        self._in_order = tuple(self._hosts)
        self.is_taken = False
        self._turn, self._waits = 0, False  # the last one; whether no graph was started for it yet

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
        if not self._waits:  # else a step failed before its graph was started
            self._hosts.reverse()
            self._arrays.reverse()
        return self._arrays[0]

    def copy(self) -> None:
        """Copy to the device, in the order of its stream; or have the next graph take it."""
        if self.is_taken:
            if not self._waits:
                self._turn, self._waits = self._turn % _TURNS + 1, True
            self._arrays[0]["header"][0] = self._turn  # at the end: a graph that runs looks at it
        elif self._device is not self._hosts[0]:
            self._device.copy_(self._hosts[0], non_blocking=True)

    def begin_graph(self, chosen: Tensor, tables: Tensor) -> None:
        """The first launch of a graph: it takes what is new. The first field is ``header``, [3] int32.

        For the others see ``take``; the changes of tables are in ``changed_places`` and ``changed_entries``.
        """
        self.is_taken = True
        places, entries = self.offsets["changed_places"], self.offsets["changed_entries"]
        first, second = self._in_order
        take((first, second), self._device, chosen, tables, places, entries)

    def start_graph(self) -> None:
        """A graph that takes what is new is about to be started."""
        self._waits = False
