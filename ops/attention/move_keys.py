"""Keys and values from slot to slot of a paged cache: what is kept of a tree of drafts goes where a chain has it."""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op


def move_keys(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor, *, latent: bool
) -> None:
    """Copy keys and values, and their scales, from slot ``moves[:, 0]`` to slot ``moves[:, 1]``.

    All slots are read before one is written, so a slot may be both. Codes stay what they are: nothing is rounded again.

    Args:
        k_cache, v_cache, k_scale, v_scale: as ``paged_attention`` has them; written in place.
        latent: the caches are those of ``latent_attention``.
        moves: ``[n, 2]`` int64, block * block_size + offset each; no slot is written twice.

    Raises:
        ValueError: on a CPU, a tensor of another shape, dtype or layout.
        IndexError: on a CPU, a slot that there is not.
    """
    torch.ops.compiled_llm.move_keys(k_cache, v_cache, k_scale, v_scale, moves, latent)


def move_keys_reference(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, moves: Tensor, latent: bool
) -> None:
    """The op in plain torch. A CPU's kernels have another order of elements: see ``move_keys_cpu.h``."""
    size = k_cache.shape[2]
    (sources, targets), (from_offset, to_offset) = (moves // size).unbind(1), (moves % size).unbind(1)
    for cache in (k_cache, v_cache):
        codes = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        codes[targets, :, to_offset] = codes[sources, :, from_offset]
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale[targets, :, to_offset] = scale[sources, :, from_offset]


define_op(
    "move_keys(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor moves, "
    "bool latent) -> ()",
    reference=move_keys_reference,
    fake=lambda *args: None,
    cpu="rowwise_cpu",
)
