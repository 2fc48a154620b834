"""The ops of ``reductions.py`` on GPUs: what they refuse, and how large their launches are."""

import torch
import triton
from torch import Tensor

from compiled_llm.ops.parallel.carried_reductions import carried_join, carried_sum, in_order
from compiled_llm.ops.parallel.rank_group import MOST_RANKS
from compiled_llm.ops.parallel.reductions import TREE_LEAVES, join_parts_reference, tree_of
from compiled_llm.ops.parallel.triton_exchange import CHANNELS, HEADER_BYTES
from compiled_llm.ops.parallel.triton_kernels import rank_gather_kernel, rank_sum_kernel
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, refuse

_ALIGNED = 128  # bytes of slots and what is in them
_LEAST_SLOT = 1024  # in which there is room for a two-shot piece and its sums
_WARPS = 8
_REGISTERS = 128  # at most; by itself the assembler takes 32 or 64 and spills
_BLOCK_BYTES = _WARPS * 32 * 16  # of the elements that a program has in its registers: 16 of a thread
# Two ranks read as much either way. Of more, one-shot is the faster one for small sums: as vLLM's custom all-reduce has
# it, up to 512 KB for four ranks and 256 KB for eight. Not measured here.
_ONE_SHOT_BYTES = 1 << 21  # of all ranks
_MOST_ELEMENTS = 1 << 30  # so that no place fits into int32 only just: programs count on to behind their last piece
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_on_gpu(slot: int = 1 << 18) -> int:
    """Of memory with slots of ``slot`` bytes; all ranks must have as much. A sum has as many pieces as it needs."""
    return HEADER_BYTES.value + 2 * CHANNELS.value * -(-slot // _ALIGNED) * _ALIGNED


def all_reduce(x: Tensor, place: Tensor, memory: Tensor) -> Tensor:
    """As ``reductions.all_reduce``."""
    if x.dim() != 2 or not x.is_contiguous() or x.dtype not in DTYPES:
        refuse("all_reduce", "x", x, "a contiguous [T, D] of float32, bfloat16 or float16")
    size = _size_of(place, memory, x, "all_reduce")
    if size == 1:
        return x.clone()
    if not memory.numel():
        return carried_sum(x, size, x.dtype, in_order)
    return _sum(x[None], place, memory, x.dtype, "all_reduce")


def join_parts(parts: Tensor, place: Tensor, memory: Tensor, size: int, dtype: str) -> Tensor:
    """As ``reductions.join_parts``."""
    if parts.dim() != 3 or not parts.is_contiguous() or parts.dtype != torch.float32:
        refuse("join_parts", "parts", parts, "a contiguous [P, T, D] of float32")
    _check_size(_size_of(place, memory, parts, "join_parts"), size, "join_parts")
    if size == 1 or len(parts) * size != TREE_LEAVES:
        return join_parts_reference(parts, place, memory, size, dtype)
    rounded = getattr(torch, dtype, None)
    if rounded not in DTYPES:
        raise ValueError(f"join_parts: dtype must be float32, bfloat16 or float16, got {dtype}")
    if not memory.numel():
        return carried_sum(tree_of(parts.unbind()), size, rounded, tree_of)
    return _sum(parts, place, memory, rounded, "join_parts")


def all_gather(x: Tensor, place: Tensor, memory: Tensor, size: int) -> Tensor:
    """As ``reductions.all_gather``."""
    if x.dim() != 2 or not x.is_contiguous() or x.itemsize not in _INTEGERS:
        refuse("all_gather", "x", x, "a contiguous [T, n] of elements of 1, 2, 4 or 8 bytes")
    _check_size(_size_of(place, memory, x, "all_gather"), size, "all_gather")
    if size == 1:
        return x.clone()
    out = x.new_empty(x.shape[0], size * x.shape[1])
    if not x.numel():
        return out
    if not memory.numel():
        return carried_join(x, size)
    integer, slot = _INTEGERS[x.itemsize], _slot_of(memory)
    block = _BLOCK_BYTES // x.itemsize
    programs, run = _shares(x.numel(), block, "all_gather")
    rank_gather_kernel[(programs,)](
        x.view(integer),
        out.view(integer),
        place,
        memory,
        x.numel(),
        run,
        x.shape[1],
        PIECE=slot // x.itemsize,
        SLOT=slot,
        RANKS=size,
        LANES=triton.next_power_of_2(size),
        BLOCK=block,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
        **launch_options(x.shape[0]),
    )
    return out


def _sum(x: Tensor, place: Tensor, memory: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """Of all parts ``[P, T, D]`` of all ranks: ``[T, D]``."""
    out, size = x.new_empty(x.shape[1:], dtype=dtype), len(place) - 1
    if not out.numel():
        return out
    block, slot = _BLOCK_BYTES // x.itemsize, _slot_of(memory)
    programs, run = _shares(out.numel(), block, op)
    is_two_shot = size > 2 and size * out.numel() * x.itemsize > _ONE_SHOT_BYTES
    # Two-shot the sums of a section, of up to 16 elements more than an equal share, lie behind the piece.
    piece = (slot - 2 * _ALIGNED) * size // (size * x.itemsize + dtype.itemsize) if is_two_shot else slot // x.itemsize
    piece = piece * x.itemsize // _ALIGNED * _ALIGNED // x.itemsize
    rank_sum_kernel[(programs,)](
        x,
        out,
        place,
        memory,
        out.numel(),
        run,
        PIECE=piece,
        SUMS=piece * x.itemsize,
        SLOT=slot,
        RANKS=size,
        LANES=triton.next_power_of_2(size),
        PARTS=len(x),
        TREE=op == "join_parts",
        TWO_SHOT=is_two_shot,
        BLOCK=block,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        enable_fp_fusion=False,
        **launch_options(x.shape[1]),
    )
    return out


def _shares(size: int, block: int, op: str) -> tuple[int, int]:
    """Programs, and elements of each: whole blocks."""
    if size > _MOST_ELEMENTS:
        raise ValueError(f"{op}: a tensor must have at most {_MOST_ELEMENTS} elements, got {size}")
    blocks = -(-size // block)
    run = -(-blocks // CHANNELS.value) * block
    return -(-size // run), run


def _size_of(place: Tensor, memory: Tensor, x: Tensor, op: str) -> int:
    """The number of ranks, of a group on the GPU of ``x``."""
    size = place.numel() - 1
    check_contiguous(op, "place", place, [place.numel()], x.device, torch.int64)
    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"{op}: place must be a rank and the addresses of 1 to {MOST_RANKS} ranks, got {size}")
    if size > 1:
        check_contiguous(op, "memory", memory, [memory.numel()], x.device, torch.uint8)
        least = bytes_on_gpu(_LEAST_SLOT)
        if 0 < memory.numel() < least:
            raise ValueError(
                f"{op}: memory must have at least {least} bytes, or none where NCCL carries, got {memory.numel()}"
            )
    return size


def _check_size(size: int, given: int, op: str) -> None:
    if size != given:
        raise ValueError(f"{op}: size must be that of the group, {size}, got {given}")


def _slot_of(memory: Tensor) -> int:
    return (memory.numel() - HEADER_BYTES.value) // (2 * CHANNELS.value) // _ALIGNED * _ALIGNED
