"""Sampling on the GPU: the launch of the Triton kernels. ``reference.py`` says what they compute.

The kernels, each a fixed grid that follows from the shapes and the GPU alone. Nothing is read back, so a call can be
captured in a CUDA graph. Programs of a row that does not need a kernel leave it at once.

    maxima      every row           the largest logit of each chunk; with top-n-sigma, its moments
    narrow      top-k or top-p      a pass of the search, launched LEVELS times
    gather      top-k or top-p      the list of the depths still in question
    limit       all but greedy      the end of the search, min-p and top-n-sigma
    bounds      all but greedy      what the tokens of each block can reach with their noise
    draw        every row           the token
"""

import functools

import torch
import triton
from torch import Tensor

from compiled_llm.ops.sampling.triton_kernels import (
    BLOCK,
    CELLS,
    CHUNK,
    GROUPS,
    LEVELS,
    TILE,
    bounds_kernel,
    draw_kernel,
    gather_kernel,
    limit_kernel,
    maxima_kernel,
    narrow_kernel,
)

# No fused operation: a token's weight has the same bits in every kernel.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
MOST_LISTED = 4096  # depths in a row's list
PROGRAMS_PER_SM = 8
MOST_BOUNDS = 4096  # that the program of a row holds at a time
MOST_SPLITS = 128  # programs that share a pass over a row; each reads what all of them found in the pass before


@functools.cache
def _num_sms(device: torch.device) -> int:
    """On a CPU, where only the interpreter runs, one SM keeps tests short."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(logits: Tensor, **columns: tuple[Tensor, torch.dtype]) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or (logits.stride(1) != 1 and logits.shape[1] != 1):
        raise ValueError(
            "sample_tokens: logits must be [R, V] with V > 0 and the last stride 1, "
            f"got {list(logits.shape)} with strides {list(logits.stride())}"
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"sample_tokens: logits must be float32, bfloat16 or float16, got {logits.dtype}")
    for name, (column, dtype) in columns.items():
        given = (column.shape, column.dtype, column.device, column.is_contiguous())
        if given != (logits.shape[:1], dtype, logits.device, True):
            raise ValueError(
                f"sample_tokens: {name} must be a contiguous [{logits.shape[0]}] of {dtype} on {logits.device}, "
                f"got {list(column.shape)} of {column.dtype} on {column.device}"
            )


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_n_sigma: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    A ``top_k`` below 1 counts as 1: to refuse it, values would have to be read back.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    _check(
        logits,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
        top_n_sigma=(top_n_sigma, torch.float32),
        seed=(seed, torch.int64),
        position=(position, torch.int32),
    )
    rows, vocabulary = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    num_chunks = triton.cdiv(vocabulary, CHUNK.value)
    tiles = triton.cdiv(num_chunks, TILE.value)
    per_split = triton.cdiv(num_chunks, max(1, min(MOST_SPLITS, PROGRAMS_PER_SM * _num_sms(device) // rows)))
    splits = triton.cdiv(num_chunks, per_split)
    most_listed = min(MOST_LISTED, triton.next_power_of_2(vocabulary))

    maxima = torch.empty((rows, num_chunks), dtype=torch.float32, device=device)
    moments = torch.empty((rows, 3, num_chunks), dtype=torch.float32, device=device)
    num_blocks = num_chunks * (CHUNK.value // BLOCK.value)
    bounds = torch.empty((rows, num_blocks), dtype=torch.int32, device=device)
    partial = torch.empty((LEVELS.value, rows, splits, CELLS.value), dtype=torch.int64, device=device)
    found = torch.empty((rows, 3), dtype=torch.int32, device=device)
    listed = torch.empty((rows, most_listed), dtype=torch.int32, device=device)
    limits = torch.empty(rows, dtype=torch.int32, device=device)

    filters = (logits, temperature, top_k, top_p)
    shape = (logits.stride(0), vocabulary, num_chunks)
    unit = {"UNIT": 2.0 ** (62 - (vocabulary - 1).bit_length())}
    options = {"BLOCK_C": triton.next_power_of_2(num_chunks), **OPTIONS}
    together = max(GROUPS.value, min(MOST_BOUNDS, triton.next_power_of_2(num_blocks)))
    split = {"BLOCK_S": triton.next_power_of_2(splits), **options}
    with torch.cuda.device_of(logits):
        maxima_kernel[(rows, tiles)](logits, top_n_sigma, maxima, moments, found, *shape, **OPTIONS)
        for level in range(LEVELS.value):
            narrow_kernel[(rows, splits)](*filters, maxima, partial, *shape, per_split, LEVEL=level, **unit, **split)
        gather_kernel[(rows, splits)](
            *filters, maxima, partial, found, listed, *shape, per_split, LISTED=most_listed, **split
        )
        limit_kernel[(rows,)](
            *filters, min_p, top_n_sigma, maxima, moments, partial, found, listed, limits, *shape, splits,
            LISTED=most_listed, **unit, **split,
        )  # fmt: skip
        drawn = (logits, temperature, seed, position, maxima, limits, bounds)
        bounds_kernel[(rows, tiles)](*drawn, *shape, **options)
        draw_kernel[(rows,)](*drawn, out, *shape, TOGETHER=together, **options)
    return out
