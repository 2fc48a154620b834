"""Memory of a GPU that other processes of the machine can map: the CUDA driver's calls for that (CUDA IPC), by ctypes.

These calls are as they are since CUDA 4.1, take no files, names or sockets, and let two processes of one GPU share its
memory, too. ``torch.distributed._symmetric_memory`` would do the same for GPUs that differ: by private names, sockets
in a shared directory and a process group for the meeting. Tensors that torch shares leave files in shared memory when
their process is killed.

All work on torch's current GPU, whose context this thread must have. CUDA Driver API, "Memory Management" and "Peer
Context Memory Access".
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"  # the driver's, which is there wherever a GPU is
_BLOCK = 2 << 20  # what a handle gives to others: whole blocks of this size
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_ACCESS, _ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


_ADDRESS, _INT = ctypes.c_uint64, ctypes.c_int
_ARGUMENTS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuMemAlloc_v2": [ctypes.POINTER(_ADDRESS), ctypes.c_size_t],
    "cuMemsetD8_v2": [_ADDRESS, ctypes.c_ubyte, ctypes.c_size_t],
    "cuCtxSynchronize": [],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_ADDRESS],
    "cuDeviceGetP2PAttribute": [ctypes.POINTER(_INT), _INT, _INT, _INT],
    "cuGetErrorName": [_INT, ctypes.POINTER(ctypes.c_char_p)],
}


def allocate(nbytes: int) -> int:
    """The address of so many bytes of the current GPU's memory, zeros; they are the process's until it ends."""
    address, whole = _ADDRESS(), -(-nbytes // _BLOCK) * _BLOCK
    _call("cuMemAlloc_v2", ctypes.byref(address), whole)
    _call("cuMemsetD8_v2", address, 0, whole)
    _call("cuCtxSynchronize")
    return address.value


def handle_of(address: int) -> bytes:
    """What another process opens the memory with that ``allocate`` gave."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle.data)


def open_memory(handle: bytes) -> int:
    """The address, for kernels of the current GPU, of memory of another process. It must live longer than this use."""
    address = _ADDRESS()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
    return address.value


def close_memory(address: int) -> None:
    """End what ``open_memory`` gave."""
    _call("cuIpcCloseMemHandle", address)


def reaches(own: int, other: int) -> bool:
    """Whether the GPU ``own`` reads and writes the memory of ``other``, with atomics; numbers as torch counts GPUs."""
    return own == other or all(_of_link(what, own, other) for what in (_ACCESS, _ATOMICS))


def tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """``[nbytes]`` uint8 on the GPU ``device``, which do not own their memory."""
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


class _Bytes:
    """What torch takes as memory of a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 2}


def _of_link(what: int, own: int, other: int) -> bool:
    value = _INT()
    _call("cuDeviceGetP2PAttribute", ctypes.byref(value), what, own, other)
    return bool(value.value)


def _call(name: str, *args: Any) -> None:
    """``RuntimeError`` with the driver's name for what went wrong."""
    if status := getattr(_driver(), name)(*args):
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({status})")


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL(_LIBRARY)
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cuInit(0)
    return library
