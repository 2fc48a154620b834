"""Tiles of the attention kernels that are fast on this GPU.

For each shape, a head_dim and a dtype of the cache, the search starts from the tiles in use and treats one kind of step
after the other: decodes, queries of a few tokens, prompts. A candidate must give the same output up to rounding and be
2% faster over all steps of the kind. The file, ``ops/tiles/<GPU>.json`` or another, is used by every engine that is
started after that.
"""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention import tiles as attention_tiles
from compiled_llm.ops.attention.tiles import TileConfig
from compiled_llm.tuning.search import Gpu, graph_seconds, search

KV_DTYPES = {"auto": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Fields of the tiles that are searched together. STEPS: the steps that they are timed on, as (requests, query length,
# tokens before the query).
KINDS: dict[str, dict[str, Sequence[int]]] = {
    "decode tiles": {"decode_block_n": (16, 32, 64, 128), "decode_warps": (1, 2, 4, 8), "decode_stages": (2, 3, 4, 5)},
    "decode programs": {"decode_programs_per_sm": (1, 2, 3, 4, 5, 6, 8)},
    "alone tiles": {"alone_block_n": (32, 64, 128), "alone_warps": (2, 4, 8)},
    "short tiles": {"split_block_n": (16, 32, 64, 128), "split_warps": (2, 4, 8), "split_stages": (2, 3, 4, 5)},
    "short programs": {"split_programs_per_sm": (1, 2, 3, 4, 5, 6, 8)},
    "short splits": {"split_tokens": (64, 128, 256)},
    "short rows": {"short_block_m": (16, 32, 64, 128)},
    "prefill tiles": {
        "prefill_block_m": (64, 128),
        "prefill_block_n": (32, 64, 128),
        "prefill_warps": (4, 8),
        "prefill_stages": (2, 3, 4),
    },
    "prefill programs": {"prefill_programs_per_sm": (0, 1, 2, 3)},
}
STEPS = {
    "decode": ((8, 1, 1023), (8, 1, 8191), (64, 1, 1023)),
    "alone": ((1, 1, 1023), (1, 1, 32767)),
    "short": ((1, 16, 16384), (16, 8, 4096)),
    "prefill": ((1, 2048, 0), (1, 512, 8192)),
}
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
CACHE_BYTES = 512 << 20  # keys and values of the layers of one measurement: more than any GPU's L2 cache


def candidates(start: TileConfig, kind: str, head_dim: int, cache_bytes: int, shared_memory: int) -> list[TileConfig]:
    """The tiles of one kind that may fit, the closest to ``start`` first. What does not fit will fail to launch."""
    choices = KINDS[kind]
    found = []
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        block_n = next((value for name, value in changes.items() if name.endswith("block_n")), 0)
        stages = next((value for name, value in changes.items() if name.endswith("stages")), 1)
        loads = 2 * (stages - 1) * block_n * head_dim * cache_bytes  # keys and values on their way
        if loads <= shared_memory and replace(start, **changes) != start:
            found.append((sum(getattr(start, name) != value for name, value in changes.items()), changes))
    return [replace(start, **changes) for _, changes in sorted(found, key=lambda pair: pair[0])]


class Step:
    """One kind of call over the caches of several layers, as one CUDA graph."""

    def __init__(
        self,
        num_requests: int,
        query_len: int,
        context_len: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: str = "cuda",
    ) -> None:
        from compiled_llm.ops.attention.triton_decode import Turning

        on: dict[str, Any] = {"device": device}
        seq_len = query_len + context_len
        width = -(-seq_len // BLOCK_SIZE)
        num_blocks = num_requests * width
        layer_bytes = 2 * num_blocks * NUM_KV_HEADS * BLOCK_SIZE * head_dim * kv_dtype.itemsize
        tokens = num_requests * query_len
        qkv = torch.randn(tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, dtype=torch.bfloat16, **on)
        table = torch.randperm(num_blocks, **on).int().view(num_requests, width)
        positions = torch.arange(context_len, seq_len, **on)
        slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.inputs = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        self.lengths = (
            slots.flatten().int(),
            table,
            torch.arange(num_requests + 1, dtype=torch.int32, **on) * query_len,
            torch.full((num_requests,), seq_len, dtype=torch.int32, **on),
        )
        self.query_len, self.scores = query_len, (None, head_dim**-0.5)
        # Of a decode: what its heads are turned with, and the plan of the tiles that are tried.
        norm = torch.ones(head_dim, dtype=torch.bfloat16, **on)
        self.turning = Turning(torch.ones(tokens, head_dim, **on), norm, norm, None, None)
        self.plan: tuple[Tensor, Tensor] | None = None
        shape = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, head_dim)
        self.caches = [_cache(shape, kv_dtype, device) for _ in range(max(1, -(-CACHE_BYTES // layer_bytes)))]
        self.expected: Tensor | None = None

    def run(self, layer: int, tiles: TileConfig) -> Tensor:
        from compiled_llm.ops.attention.triton_attention import paged_attention
        from compiled_llm.ops.attention.triton_decode import decode_attention

        (q, k, v), caches, (sinks, scale) = self.inputs, self.caches[layer], self.scores
        if self.plan is None:
            return paged_attention(q, k, v, *caches, *self.lengths, sinks, scale, self.query_len, 0, 0.0, None, tiles)
        turned, (tasks, counters) = (self.turning, 1e-6), self.plan
        return decode_attention(
            q, k, v, *turned, *caches, self.lengths[1], tasks, counters, sinks, scale, 0, 0.0, tiles
        )  # fmt: skip

    def make_plan(self, tiles: TileConfig) -> None:
        """Which a step makes once for all layers."""
        from compiled_llm.ops.attention import triton_decode_plan

        slots, table, starts, seq_lens = self.lengths
        cache = self.caches[0][0]
        _, num_kv_heads, _, head_dim = cache.shape
        sizes = table.shape[1] * BLOCK_SIZE, 0, num_kv_heads, head_dim, 2, cache.itemsize, False
        self.plan = triton_decode_plan.decode_plan(slots, None, starts, seq_lens, *sizes, tiles=tiles)

    def seconds(self, tiles: TileConfig) -> float:
        """Median time of one call; infinite if the tiles do not fit, or give another output than the first ones did."""
        from triton.runtime.errors import OutOfResources

        if self.query_len == 1:
            self.make_plan(tiles)
        try:
            out = self.run(0, tiles)
        except OutOfResources:
            return math.inf
        if self.expected is None:
            self.expected = out
        if not torch.allclose(out, self.expected, atol=2e-2, rtol=2e-2):
            return math.inf
        return graph_seconds(lambda layer: self.run(layer, tiles), len(self.caches))


def _cache(shape: tuple[int, ...], kv_dtype: torch.dtype, device: str) -> tuple[Any, Any, Any, Any]:
    """Keys and values of random numbers, and their scales or None."""
    k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    if not kv_quant.is_quantised(kv_dtype):
        return k, v, None, None
    (k, k_scale), (v, v_scale) = kv_quant.quantise(k, kv_dtype), kv_quant.quantise(v, kv_dtype)
    return k, v, k_scale, v_scale


def tune(head_dim: int, kv_dtype: torch.dtype, start: TileConfig, seconds: float, shared_memory: int) -> TileConfig:
    """All kinds of steps in turn, each with an even share of the time that is left."""
    end = time.perf_counter() + seconds
    config = start
    for index, kind in enumerate(KINDS):
        steps = [Step(*step, head_dim, kv_dtype) for step in STEPS[kind.split()[0]]]

        def cost(tiles: TileConfig, steps: list[Step] = steps) -> float:
            return math.exp(statistics.fmean(math.log(step.seconds(tiles)) for step in steps))

        share = (end - time.perf_counter()) / (len(KINDS) - index)
        tried = candidates(config, kind, head_dim, kv_dtype.itemsize, shared_memory)
        config, ratio, count = search(config, tried, cost, share)
        chosen = ", ".join(f"{name} {getattr(config, name)}" for name in KINDS[kind])
        print(f"  {kind:16}{ratio:7.1%} of the time before, {count} of {len(tried)} tried: {chosen}", flush=True)
    return config


def tune_file(path: Path, gpu: Gpu, head_dims: Sequence[int], kv_cache_dtypes: Sequence[str], seconds: float) -> None:
    """Tune every shape and write its tiles to ``path``, which keeps those of other shapes.

    Args:
        kv_cache_dtypes: names of ``KV_DTYPES``.
        seconds: for all shapes together.

    Raises:
        ValueError: the GPU has no such dtype, or the file is none of tiles.
    """
    for name in kv_cache_dtypes:
        kv_quant.check_capability(KV_DTYPES[name], gpu.capability)
    configs = dict(attention_tiles.load(path))
    shapes = list(itertools.product(head_dims, kv_cache_dtypes))
    torch.manual_seed(0)
    for head_dim, name in shapes:
        kv_dtype = KV_DTYPES[name]
        print(f"head_dim {head_dim}, kv_cache_dtype {name}", flush=True)
        default = attention_tiles.default_config(head_dim, 2, kv_dtype.itemsize, gpu.capability)
        key = attention_tiles.key(head_dim, 2, kv_dtype.itemsize)
        start = configs.get(key, default)
        configs[key] = tune(head_dim, kv_dtype, start, seconds / len(shapes), gpu.shared_memory)
        attention_tiles.save(path, gpu.name, configs)
