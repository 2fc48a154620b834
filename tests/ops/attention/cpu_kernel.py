"""The CPU's attention kernels on caches in the reference's order, for tests that compare both."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import native
from tests.ops.in_rows import InRows
from tests.ops.instruction_sets import by_set

Attend = Callable[..., Tensor]
every_set = pytest.mark.parametrize("attend", by_set("attention_cpu"), indirect=True)


def reordered(cache: Tensor, is_key: bool, to_cpu: bool) -> Tensor:
    """A cache of the reference's order, ``[S, H]`` in each block and KV head, in the CPU kernel's; or the other way."""
    blocks, kv_heads, size, head_dim = cache.shape
    width = {torch.bfloat16: 2, torch.int8: 4, torch.float8_e4m3fn: 2}.get(cache.dtype, 1)
    split = head_dim if is_key else size
    parts = (split // width, width) if split % width == 0 else (split, 1)
    x = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    if is_key:  # [S, H / W, W] <-> [H / W, S, W]
        x = x.view(blocks, kv_heads, *((size, *parts) if to_cpu else (parts[0], size, parts[1]))).transpose(2, 3)
    else:  # [S / W, W, H] <-> [S / W, H, W]
        x = x.view(blocks, kv_heads, parts[0], *((parts[1], head_dim) if to_cpu else (head_dim, parts[1])))
        x = x.transpose(3, 4)
    return x.clone(memory_format=torch.contiguous_format).view(cache.shape).view(cache.dtype)


def attend_on(kernels: native.Kernels, isa: str | None = None, *, latent: bool = False, in_rows: bool = True) -> Attend:
    """The CPU kernel for caches in the reference's order: of the best instruction set, or the one named.

    It gets them where an engine has them, or as contiguous tensors without ``in_rows``.
    """
    name, place = ("latent_attention", 4) if latent else ("paged_attention", 3)

    def op(*args) -> Tensor:
        caches, scales = args[place : place + 2], args[place + 2 : place + 4]
        ordered = [reordered(cache, latent or i == 0, True) for i, cache in enumerate(caches)]
        held = [*ordered, *(scale for scale in scales if scale is not None)]
        rows = InRows(held)
        k, v, *given = rows.copies if in_rows else held
        out = kernels.run(name, *args[:place], k, v, *(given or scales), *args[place + 4 :], isa=isa)
        if in_rows:
            rows.put_back(held)
        for i, cache in enumerate(caches):
            cache.copy_(reordered(ordered[i], latent or i == 0, False))
        return out

    return op
