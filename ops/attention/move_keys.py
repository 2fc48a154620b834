"""Keys and values from slot to slot of a paged cache: what is kept of a tree of drafts goes where a chain has it."""

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import define_op

_WIDTHS = {torch.bfloat16: 2, torch.int8: 4, torch.float8_e4m3fn: 2}  # kCacheWidth of attention_cpu_types.h


def move_keys(k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor) -> None:
    """Copy keys and values, and their scales, from slot ``moves[:, 0]`` to slot ``moves[:, 1]``.

    All slots are read before one is written, so a slot may be both. Codes stay what they are: nothing is rounded again.

    Args:
        k_cache, v_cache, k_scale, v_scale: as ``paged_attention`` has them; written in place.
        moves: ``[n, 2]`` int64, block * block_size + offset each; no slot is written twice.
    """
    torch.ops.compiled_llm.move_keys(k_cache, v_cache, k_scale, v_scale, moves)


def move_keys_reference(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor
) -> None:
    """The op in plain torch, for all devices."""
    size, head_dim = k_cache.shape[2:]
    (sources, targets), (from_offset, to_offset) = (moves // size).unbind(1), (moves % size).unbind(1)
    # The CPU's kernels have neighbours side by side; see attention_cpu.cpp.
    in_lanes = k_cache.device.type == "cpu" and native.load("attention_cpu") is not None
    width = _WIDTHS.get(k_cache.dtype, 1) if in_lanes else 1
    k_width, v_width = (width if length % width == 0 else 1 for length in (head_dim, size))
    keys, values = (cache.view(torch.uint8) if cache.itemsize == 1 else cache for cache in (k_cache, v_cache))
    if in_lanes:
        keys = keys.view(*keys.shape[:2], head_dim // k_width, size, k_width)
        values = values.view(*values.shape[:2], size // v_width, head_dim, v_width)
        keys[targets, :, :, to_offset] = keys[sources, :, :, from_offset]
        lanes = values[sources, :, from_offset // v_width, :, from_offset % v_width]
        values[targets, :, to_offset // v_width, :, to_offset % v_width] = lanes
    else:
        for cache in (keys, values):
            cache[targets, :, to_offset] = cache[sources, :, from_offset]
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale[targets, :, to_offset] = scale[sources, :, from_offset]


define_op(
    "move_keys(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor moves) -> ()",
    reference=move_keys_reference,
    fake=lambda *args: None,
)
