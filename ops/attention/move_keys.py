"""Keys and values from slot to slot of a paged cache: what is kept of a tree of drafts goes where a chain has it."""

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import define_op

_WIDTHS = {torch.bfloat16: 2, torch.int8: 4, torch.float8_e4m3fn: 2}  # kCacheWidth of attention_cpu_types.h


def move_keys(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor, *, latent: bool
) -> None:
    """Copy keys and values, and their scales, from slot ``moves[:, 0]`` to slot ``moves[:, 1]``.

    All slots are read before one is written, so a slot may be both. Codes stay what they are: nothing is rounded again.

    Args:
        k_cache, v_cache, k_scale, v_scale: as ``paged_attention`` has them; written in place.
        latent: the caches are those of ``latent_attention``.
        moves: ``[n, 2]`` int64, block * block_size + offset each; no slot is written twice.
    """
    torch.ops.compiled_llm.move_keys(k_cache, v_cache, k_scale, v_scale, moves, latent)


def move_keys_reference(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor, latent: bool
) -> None:
    """The op in plain torch, for all devices."""
    size = k_cache.shape[2]
    (sources, targets), (from_offset, to_offset) = (moves // size).unbind(1), (moves % size).unbind(1)
    # The CPU's kernels have neighbours side by side; see attention_cpu.cpp.
    op = "latent_attention_cpu" if latent else "attention_cpu"
    in_lanes = k_cache.device.type == "cpu" and native.load(op) is not None
    width = _WIDTHS.get(k_cache.dtype, 1)
    keys, values = (cache.view(torch.uint8) if cache.itemsize == 1 else cache for cache in (k_cache, v_cache))
    if in_lanes:
        for cache in (keys, values) if latent else (keys,):  # latents are kept as keys
            k_width = width if cache.shape[3] % width == 0 else 1
            lanes = cache.view(*cache.shape[:2], cache.shape[3] // k_width, size, k_width)
            lanes[targets, :, :, to_offset] = lanes[sources, :, :, from_offset]
    if in_lanes and not latent:
        v_width = width if size % width == 0 else 1
        values = values.view(*values.shape[:2], size // v_width, values.shape[3], v_width)
        lanes = values[sources, :, from_offset // v_width, :, from_offset % v_width]
        values[targets, :, to_offset // v_width, :, to_offset % v_width] = lanes
    if not in_lanes:
        for cache in (keys, values):
            cache[targets, :, to_offset] = cache[sources, :, from_offset]
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale[targets, :, to_offset] = scale[sources, :, from_offset]


define_op(
    "move_keys(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor moves, "
    "bool latent) -> ()",
    reference=move_keys_reference,
    fake=lambda *args: None,
)
