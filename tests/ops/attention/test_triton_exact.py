"""The exact attention kernels without a GPU: run in Triton's interpreter, and compiled ahead of time for two GPUs."""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from compiled_llm.ops.attention import triton_attention, triton_exact
from compiled_llm.ops.attention.tiles import exact_tile
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.attention.attention_cases import (
    CACHES,
    KV_DTYPES,
    AttentionCase,
    alone,
    check,
    grid,
    make_case,
    one_chunk,
)

OP = triton_exact.paged_attention
BF16, FP16, FP32, INT8, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn

# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(**kwargs) -> None:
    check(make_case(**kwargs), OP)


def steps_of(
    whole: AttentionCase, case: AttentionCase, start: int, plan: Sequence[int], loose: bool
) -> tuple[Tensor, AttentionCase]:
    """A prompt, which has a case to itself, from token ``start`` on in steps of so many tokens.

    Each step reads what those before it wrote to the caches, first those of ``case``. ``loose``: the steps say that
    they may have any number of tokens, as mixed ones do. Returns the rows, and the last step with the caches after it.
    """
    outs = []
    for length in plan:
        own = one_chunk(whole, start, length, max_query_len=2048 if loose else length)
        case = replace(own, **{name: getattr(case, name) for name in CACHES})
        values = case.values()
        outs.append(OP(*values.values()))
        case = replace(case, **{name: values[name] for name in CACHES})
        start += length
    return torch.cat(outs), case


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def chunks_change_no_bit(length: int = 522, device: str = "cpu", **kwargs) -> None:
    """One chunk, several, decodes, drafts; whether partitions are folded in registers or by the merge kernel."""
    case = make_case([length], [0], device=device, **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, **kwargs})
    case.v[-1].mul_(20)  # so its scale is far above the others, which no row before it may notice
    whole, before = check(case, OP), length - 22
    first, cached = steps_of(case, alone(case, 0), 0, (before,), False)
    assert torch.equal(bits(first), bits(whole[:before]))
    for plan, loose in (
        ((22,), False),
        ((16, *[1] * 6), False),  # drafts and decodes
        ((16, 4, 1, 1), True),  # the same folded in registers
    ):
        assert torch.equal(bits(steps_of(case, cached, before, plan, loose)[0]), bits(whole[before:])), (plan, loose)


def neighbours_change_no_bit(**kwargs) -> None:
    query_lens, context_lens = [1, 20, 1, 4], [300, 0, 12, 257]
    case = make_case(query_lens, context_lens, padding_query_lens=[1], trailing_rows=2, **kwargs)
    out = check(case, OP)
    for request in range(len(query_lens)):
        assert torch.equal(bits(OP(*alone(case, request).args())), bits(out[case.rows(request)]))


FEATURES = {"window": 290, "soft_cap": 3.0, "sinks": True}
GRID = dict(grid())
AGREES = [
    "mixed-gqa1-h64", "mixed-gqa5-h128", "mixed-gqa8-h256", "decode-gqa7-h64", "mixed-h40", "mixed-h80", "mixed-h512",
    "chunk-after17-block16", "window-of-one", "only-padding",
    "window-soft-cap-sinks-h96", "decode-loose-max-query-len",
]  # fmt: skip
CHUNKS: dict[str, dict[str, Any]] = {
    "chunks": {"dtype": BF16},
    "chunks-of-two-partitions": {"dtype": BF16, "length": 266, **FEATURES},
    "chunks-of-two-partitions-int8": {"dtype": FP16, "length": 266, "kv_dtype": INT8, "window": 12},
    "chunks-features": {"dtype": BF16, **FEATURES},
    "chunks-gqa8-h80": {"dtype": BF16, "num_heads": 8, "head_dim": 80},
    "chunks-gqa5": {"dtype": FP16, "num_heads": 5, "window": 100},
    "chunks-int8": {"dtype": BF16, "kv_dtype": INT8},
    "chunks-int8-features": {"dtype": FP16, "kv_dtype": INT8, **FEATURES},
    "chunks-fp8": {"dtype": BF16, "kv_dtype": FP8},
    "chunks-float32": {"dtype": FP32},
}
INTERPRETED = {
    **{f"agrees-{name}": functools.partial(agrees_with_the_reference, **GRID[name], dtype=BF16) for name in AGREES},
    **{
        f"agrees-{name}-{str(dtype)[6:]}-{kv_dtype}": functools.partial(
            agrees_with_the_reference, **GRID[name], dtype=dtype, kv_dtype=KV_DTYPES.get(kv_dtype)
        )
        for name, dtype, kv_dtype in (
            ("mixed-gqa4-h64", FP32, ""), ("mixed-gqa4-h64", FP32, "int8"), ("mixed-gqa4-h128", FP16, ""),
            ("mixed-gqa4-h64", FP16, "int8"), ("short-queries", BF16, "int8"), ("mixed-gqa5-h64", BF16, "fp8"),
        )
    },
    **{name: functools.partial(chunks_change_no_bit, **options) for name, options in CHUNKS.items()},
    "neighbours": functools.partial(neighbours_change_no_bit, dtype=BF16),
    "neighbours-int8-features": functools.partial(
        neighbours_change_no_bit, dtype=BF16, kv_dtype=INT8, num_heads=2, num_kv_heads=1, **FEATURES
    ),
}  # fmt: skip


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launches(
    capability: tuple[int, int], requests: int, tokens: int, head_dim: int, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, features: bool = False,
) -> list[ahead_of_time.Launch]:  # fmt: skip
    """What a step of so many requests and tokens launches; at least one has 17 rows."""
    qkv = empty(tokens, 32 + 2 * 8, head_dim, dtype=dtype)
    caches = [empty(1024, 8, 16, head_dim, dtype=kv_dtype or dtype) for _ in range(2)]
    scales = [floats(1024, 8, 16) if kv_dtype else None for _ in range(2)]
    indices = integers(tokens), integers(requests, 2048), integers(requests + 1), integers(requests)
    window, soft_cap, sinks = (1024, 30.0, floats(32)) if features else (0, 0.0, None)
    scores = sinks, head_dim**-0.5, tokens if tokens > requests else 1, window, soft_cap
    with ahead_of_time.recorded(capability, triton_attention, triton_exact) as recorded:
        OP(*qkv.split([32, 8, 8], dim=1), *caches, *scales, *indices, *scores)
    return [launch for launch in recorded if launch[0].__name__ != "write_kernel"]


def how_it_adds_up(binary: CompiledKernel) -> tuple[list[str], list[str]]:
    """The layouts of products, and their instructions with their sizes."""
    layouts = sorted(set(re.findall(r"#ttg\.nvidia_mma<\{.*?\}>|#ttg\.blocked<.*?>(?=.*tt\.dot)", binary.asm["ttgir"])))
    return layouts, sorted(set(re.findall(r"(?:wgmma\.mma_async|\bmma\.sync)\S+", binary.asm["ptx"])))


COMPILED = [
    ((9, 0), 64, {"dtype": BF16}), ((9, 0), 128, {"dtype": BF16}), ((8, 0), 128, {"dtype": BF16, "kv_dtype": INT8}),
    ((9, 0), 64, {"dtype": FP16, "kv_dtype": INT8, "features": True}),
    ((8, 0), 256, {"dtype": BF16, "features": True}), ((9, 0), 256, {"dtype": BF16, "kv_dtype": FP8}),
    ((8, 0), 512, {"dtype": BF16}), ((9, 0), 512, {"dtype": BF16, "kv_dtype": INT8}),
    ((9, 0), 512, {"dtype": BF16, "features": True}),
    *(((8, 0), head_dim, {"dtype": FP32}) for head_dim in (64, 128, 512)),
]  # fmt: skip


@pytest.mark.battery
@pytest.mark.parametrize(("capability", "head_dim", "options"), COMPILED, ids=str)
def test_every_launch_adds_up_alike(capability: tuple[int, int], head_dim: int, options: dict[str, Any]) -> None:
    """Decodes and chunks, of few requests and of many: tiles of one layout, instructions of one kind and size."""
    seen = []
    for requests, tokens in ((1, 1), (32, 512)):
        for launch in launches(capability, requests, tokens, head_dim, **options):
            # Of heads of 256 a prompt's tile, which has two states at a time, is a little more than registers hold.
            spilled = 128 if head_dim == 256 and launch[2].get("WHOLE") else 0
            binary, _ = ahead_of_time.without_spills(launch, capability, spilled=spilled)
            assert binary.metadata.shared < 99 * 1024
            if launch[0].__name__ == "exact_attention_kernel":
                seen.append(how_it_adds_up(binary))
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    if options["dtype"] != FP32:
        kind = "wgmma" if capability[0] == 9 and head_dim < 512 else "mma.sync"
        assert seen[0][1]
        assert all(kind in instruction for instruction in seen[0][1])


def test_a_head_dim_without_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 1024"):
        exact_tile(1024, 2, 2)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHUNKS)
def test_on_a_gpu_chunks_change_no_bit(name: str) -> None:
    kwargs = CHUNKS[name]
    chunks_change_no_bit(**kwargs, device="cuda")
    large = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **kwargs, "length": 3000}
    chunks_change_no_bit(**large, device="cuda")


ORDINARY = [
    "agrees-mixed-gqa1-h64", "agrees-decode-gqa7-h64", "agrees-mixed-h40", "agrees-chunk-after17-block16",
    "agrees-only-padding", "agrees-mixed-gqa4-h64-float32-int8", "agrees-mixed-gqa5-h64-bfloat16-fp8",
    "neighbours-int8-features",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
