"""Exact copies of whole KV blocks: within the device's pool, and (swapping) between it and a pool in host memory.

The two ops that swap run outside the compiled step. The device's pool is all tensors of the KV cache (every layer's
keys and values, and their scales if they are quantised), of contiguous blocks, which are its first dimension. The
host's pool is one uint8 tensor. One of its rows has one block of all those tensors, in their order:

    host[row] = cat(caches[0][block] as bytes, caches[1][block] as bytes, ...)

So a block that is swapped out is one contiguous piece of memory, which a single copy moves over the bus. Elements are
copied as words of up to 16 bytes, whatever they mean, so a NaN keeps its payload.

Letters: B blocks of the device's pool, P rows of the host's pool, n blocks to copy.

On CUDA both ops are asynchronous, in the order of the current stream, and the host does not wait: whatever runs later
on that stream (the step that overwrites the freed blocks or reads the restored ones, the next swap) finds the copies
done. Another stream, or a host that reads ``host`` itself, has to synchronise first.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import define_op
from compiled_llm.ops.pinned import on_device

# Memory that a copy takes besides the pools, at least one block. On the CPU it should fit the processor's cache, and
# should not be smaller: each piece costs two calls for every cache tensor.
_CPU_STAGING_BYTES = 8 << 20
_CUDA_STAGING_BYTES = 64 << 20
# Nothing is calculated with the words, so those of 16 bytes may be complex numbers.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def swap_out(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    """Copy block ``device_blocks[i]`` of all cache tensors to row ``host_blocks[i]`` of the host's pool, for every i.

    Args:
        caches: all tensors of the KV cache, each ``[B, ...]`` of contiguous blocks, any dtypes, on one device.
        host: ``[P, bytes_per_block(caches)]`` uint8 contiguous on the CPU, pinned if the caches are on CUDA; written
            in place.
        device_blocks: ``[n]`` int64 on the CPU; 0 to B - 1.
        host_blocks: ``[n]`` int64 on the CPU; 0 to P - 1, each at most once.

    Raises:
        ValueError: an argument is not as described above. Nothing has been copied then.
    """
    torch.ops.compiled_llm.swap_out(caches, host, device_blocks, host_blocks)


def swap_in(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    """Copy row ``host_blocks[i]`` of the host's pool to block ``device_blocks[i]`` of all cache tensors, for every i.

    The arguments are those of ``swap_out``, but that ``caches`` are written in place and that ``device_blocks`` has
    each block at most once, while ``host_blocks`` may repeat one.

    Raises:
        ValueError: an argument is not as described there. Nothing has been copied then.
    """
    torch.ops.compiled_llm.swap_in(caches, host, device_blocks, host_blocks)


def copy_blocks(caches: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy block ``sources[i]`` to block ``targets[i]`` of all cache tensors, for every i; in the order of the stream.

    Args:
        caches: all tensors of the KV cache, each ``[B, ...]`` of contiguous blocks, any dtypes, on one device; written
            in place.
        sources: ``[n]`` int64; 0 to B - 1.
        targets: ``[n]`` int64; 0 to B - 1, each at most once, and none of them a source.
    """
    numbers = sources.tolist(), targets.tolist()
    assert len(set(numbers[1])) == len(numbers[1]), "two blocks are copied to one"
    assert not set(numbers[0]) & set(numbers[1]), "a block is copied to and from"
    device = caches[0].device
    sources, targets = on_device(torch.stack([sources, targets]), device)
    for cache in caches:
        blocks = cache.view(len(cache), -1).view(torch.uint8)  # torch cannot index fp8
        blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def bytes_per_block(caches: Sequence[Tensor]) -> int:
    """Bytes that one block takes in all the cache tensors ``[B, ...]`` together: a row of the host's pool."""
    return sum(cache[0].nbytes for cache in caches)


def host_pool(caches: Sequence[Tensor], num_blocks: int) -> Tensor:
    """A host pool for ``num_blocks`` blocks of these caches: ``[num_blocks, bytes_per_block(caches)]`` uint8, zeroed.

    It is pinned if the caches are on CUDA, so that copies are asynchronous. All of its memory is taken at once then,
    and torch rounds pinned memory up to a power of two; pageable memory is taken as it is first written.
    """
    shape = (num_blocks, bytes_per_block(caches))
    if caches[0].device.type == "cpu":
        return native.huge_zeros(shape, torch.uint8)
    return torch.zeros(shape, dtype=torch.uint8, pin_memory=True)


def _check(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor, written: str) -> None:
    """``ValueError`` for anything that would copy from or to the wrong memory; ``written`` names the indices written.

    A wrong block would be another request's, so this runs on every call. It takes some 0.1 ms.
    """
    if not caches:
        raise ValueError("caches must be all tensors of the KV cache, given none")
    num_blocks, device = len(caches[0]), caches[0].device
    for i, cache in enumerate(caches):
        if len(cache) != num_blocks or cache.device != device or not cache[:1].is_contiguous():
            raise ValueError(
                f"caches must be tensors with {num_blocks} contiguous blocks on {device}, as the first one has, given "
                f"caches[{i}] with shape {list(cache.shape)} and strides {cache.stride()} on {cache.device}"
            )
    block_bytes = bytes_per_block(caches)
    right_type = host.dtype == torch.uint8 and host.device.type == "cpu" and host.is_contiguous()
    if host.dim() != 2 or host.shape[1] != block_bytes or not right_type:
        raise ValueError(
            f"host must be a contiguous uint8 tensor [blocks, {block_bytes}] on the CPU, as host_pool makes it, given "
            f"{host.dtype} {list(host.shape)} with strides {host.stride()} on {host.device}"
        )
    if device.type == "cuda" and not host.is_pinned():
        raise ValueError(f"host must be pinned memory, as host_pool makes it, since the caches are on {device}")
    for name, blocks, end in (("device_blocks", device_blocks, num_blocks), ("host_blocks", host_blocks, len(host))):
        if blocks.dtype != torch.int64 or blocks.device.type != "cpu" or blocks.dim() != 1:
            raise ValueError(
                f"{name} must be an int64 tensor [n] on the CPU, given {blocks.dtype} {list(blocks.shape)} on "
                f"{blocks.device}"
            )
        numbers = blocks.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < end:
            outside = next(number for number in numbers if not 0 <= number < end)
            raise ValueError(f"{name} must be 0 to {end - 1}, given {outside}")
        if name == written and len(set(numbers)) < len(numbers):
            raise ValueError(f"{name} are written and must differ from each other, given {numbers}")
    if len(device_blocks) != len(host_blocks):
        raise ValueError(
            "device_blocks and host_blocks must have the same length, given "
            f"{len(device_blocks)} and {len(host_blocks)}"
        )


def _words(caches: Sequence[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each cache tensor: itself as ``[B, words]``, and its section of rows ``[P or n, bytes]`` as ``[.., words]``.

    Both are views of the widest words that are aligned in every row of both: wide words copy several times as fast.
    """
    start = 0
    for cache in caches:
        block_bytes = cache[0].nbytes
        section = rows.narrow(1, start, block_bytes)
        starts = [
            cache.data_ptr(),
            cache.storage_offset() * cache.itemsize,
            cache.stride(0) * cache.itemsize,
            section.data_ptr(),
            section.storage_offset(),
        ]
        word = _WORDS[math.gcd(max(_WORDS), block_bytes, rows.shape[1], *starts)]
        yield cache.view(len(cache), -1).view(word), section.view(word)
        start += block_bytes


def _cpu_swap_out(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    _check(caches, host, device_blocks, host_blocks, written="host_blocks")
    for cache, section in _words(caches, host):
        _copy_rows(cache, device_blocks, section, host_blocks)


def _cpu_swap_in(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    _check(caches, host, device_blocks, host_blocks, written="device_blocks")
    for cache, section in _words(caches, host):
        _copy_rows(section, host_blocks, cache, device_blocks)


def _copy_rows(source: Tensor, source_rows: Tensor, target: Tensor, target_rows: Tensor) -> None:
    """``target[target_rows] = source[source_rows]``, through pieces that stay in the processor's cache."""
    at_once = max(1, _CPU_STAGING_BYTES // source[0].nbytes)
    for some_source, some_target in zip(source_rows.split(at_once), target_rows.split(at_once), strict=True):
        target[some_target] = source.index_select(0, some_source)


def _staged_swap_out(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    """For caches on CUDA: gather whole rows into a buffer on the device, then send each run of rows in one copy.

    The buffer is filled anew for each piece, and given back to torch's allocator at the end, while copies from it may
    still be under way. Both are safe without waiting: all of it is in the order of one stream.
    """
    _check(caches, host, device_blocks, host_blocks, written="host_blocks")
    for staging, blocks, runs in _pieces(caches, device_blocks, host_blocks):
        for cache, section in _words(caches, staging):
            section.copy_(cache.index_select(0, blocks))
        for start, end, row in runs:
            host[row : row + end - start].copy_(staging[start:end], non_blocking=True)


def _staged_swap_in(caches: Sequence[Tensor], host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
    """For caches on CUDA: the same the other way."""
    _check(caches, host, device_blocks, host_blocks, written="device_blocks")
    for staging, blocks, runs in _pieces(caches, device_blocks, host_blocks):
        for start, end, row in runs:
            staging[start:end].copy_(host[row : row + end - start], non_blocking=True)
        for cache, section in _words(caches, staging):
            cache.index_copy_(0, blocks, section)


def _pieces(
    caches: Sequence[Tensor], device_blocks: Tensor, host_blocks: Tensor
) -> Iterator[tuple[Tensor, Tensor, list[tuple[int, int, int]]]]:
    """What to copy, in pieces of a bounded size and in the order of the host's rows, so that runs of them are long.

    Yields:
        A buffer ``[m, bytes per block]`` uint8 on the device, the same memory each time; the piece's device blocks
        ``[m]`` int64 on the device; and its runs of consecutive host rows as (start, end, row): the buffer's rows
        ``start:end`` go with the host's from ``row`` on.
    """
    if len(host_blocks) == 0:
        return
    device, block_bytes = caches[0].device, bytes_per_block(caches)
    at_once = max(1, _CUDA_STAGING_BYTES // block_bytes)
    rows, order = host_blocks.sort()
    blocks = device_blocks[order]
    blocks = on_device(blocks, device)
    staging = torch.empty(min(at_once, len(rows)), block_bytes, dtype=torch.uint8, device=device)
    for some_rows, some_blocks in zip(rows.split(at_once), blocks.split(at_once), strict=True):
        numbers = some_rows.tolist()
        # A run ends where the next row is not the next number.
        ends = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1] + [len(numbers)]
        starts = [0, *ends[:-1]]
        runs = [(start, end, numbers[start]) for start, end in zip(starts, ends, strict=True)]
        yield staging[: len(numbers)], some_blocks, runs


# CUDA goes before the CPU when an op has arguments of both, as these have.
define_op(
    "swap_out(Tensor[] caches, Tensor(a!) host, Tensor device_blocks, Tensor host_blocks) -> ()",
    reference=_cpu_swap_out,
    fake=lambda *args: None,
    gpu=_staged_swap_out,
)
define_op(
    "swap_in(Tensor(a!)[] caches, Tensor host, Tensor device_blocks, Tensor host_blocks) -> ()",
    reference=_cpu_swap_in,
    fake=lambda *args: None,
    gpu=_staged_swap_in,
)
