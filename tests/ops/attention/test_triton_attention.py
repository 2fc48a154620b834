"""Paged attention in Triton without a GPU: interpreted against the reference, and compiled ahead of time."""

import functools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from compiled_llm.ops.attention import kv_quant, triton_attention, triton_exact
from compiled_llm.ops.attention.tiles import default_config
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.attention.attention_cases import KV_DTYPES, alone, check, grid, in_chunks, make_case, step
from tests.ops.attention.tree_cases import make_tree_case, random_parents

OP = triton_attention.paged_attention
BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn

# ---- interpreted ----------------------------------------------------------------------------------------------------

ONE_HEAD = {"num_heads": 1, "num_kv_heads": 1}
TWO_HEADS = {"num_heads": 2, "num_kv_heads": 1}
MIXED = {"padding_query_lens": [0, 1], "trailing_rows": 2, "fused_qkv": True}
EXTRA: dict[str, dict[str, Any]] = {
    "many-splits": step([1, 1, 1, 1], [255, 256, 257, 1023], num_heads=6),
    "more-than-64-splits": step([1], [16500], head_dim=16, **ONE_HEAD),
    "short-query-of-more-than-8-splits": step([9], [2200], head_dim=16, **ONE_HEAD),
    "splits-in-a-mixed-step": step([3, 1, 2, 1], [300, 700, 0, 20], **MIXED),
    # 16 rows of 8 heads take two of the largest row tiles; of 1 head they fit in the smallest.
    "row-tiles-gqa8": step([16, 3], [300, 5], num_heads=8, num_kv_heads=1),
    "row-tiles-gqa1": step([16, 3], [300, 5], **ONE_HEAD),
    "a-window-that-starts-in-the-prompt": step([90, 17, 5], [0, 400, 40], window=20, sinks=True),
    # Tiles of keys begin inside of blocks, or lie in one block; elsewhere they have whole blocks.
    "blocks-of-24": step([40, 1, 20], [300, 50, 0], block_size=24, window=150),
    "blocks-of-256": step([150, 20], [10, 400], block_size=256),
    "a-sink-above-all-scores": step([1, 20], [300, 5], sm_scale=1e-3, sinks=True),
}
SLOW = r".*2000.*|decode-fused-padding|loose-max-query-len|everything"  # each has a shorter sister
# Which cases also run in other dtypes than bfloat16. The float32 tiles are small, so it takes longer.
ALSO = {
    ("float32", None): r"(decode|mixed)-gqa[58]-h64|mixed-h\d+|prompt33.*|chunk-after33.*|only-.*|.*splits.*step",
    ("float16", None): r"mixed-gqa4.*|many-splits|window-soft-cap-sinks-h80",
    ("bfloat16", "int8"): r"(decode|mixed)-gqa4.*|mixed-(gqa7-h128|h80|h96|h512)|chunk-after3.*|only-.*|row-tiles.*"
    r"|short-query-of.*|.*splits.*step|window-soft-cap-sinks-h(64|128|256)|blocks-of.*",
    ("bfloat16", "fp8"): r"mixed-(gqa[58]-h(64|256)|h40|h80|h96|h512)|decode-gqa1-h128|many-splits"
    r"|window-soft-cap-sinks-h96",
    ("float16", "int8"): r"mixed-gqa5-h128|many-splits",
    ("float16", "fp8"): r"mixed-gqa5-h64",
    ("float32", "int8"): r"mixed-gqa4-h64|mixed-h80|many-splits|window-soft-cap-sinks-h64",
    ("float32", "fp8"): r"mixed-gqa5-h64",
}


def interpreted_cases() -> Iterator[tuple[str, dict]]:
    """The grid but for what takes an interpreter minutes, and parts of it in other dtypes."""
    for name, kwargs in (*grid(), *EXTRA.items()):
        if re.fullmatch(SLOW, name):
            continue
        yield f"bfloat16-{name}", {**kwargs, "dtype": torch.bfloat16}
        for (dtype, kv_dtype), pattern in ALSO.items():
            if re.fullmatch(pattern, name):
                others = {"dtype": getattr(torch, dtype), "kv_dtype": kv_dtype and KV_DTYPES[kv_dtype]}
                yield f"{dtype}-{kv_dtype or 'same'}-{name}", {**kwargs, **others}


def neighbours_change_nothing(**kwargs) -> None:
    query_lens, context_lens = [1, 20, 1, 1, 9, 4], [600, 0, 300, 12, 300, 513]
    case = make_case(query_lens, context_lens, padding_query_lens=[1], trailing_rows=2, dtype=torch.bfloat16, **kwargs)
    out = check(case, OP)
    for request in range(len(query_lens)):
        assert torch.equal(check(alone(case, request), OP), out[case.rows(request)])


def any_program_may_be_the_last(**kwargs) -> None:
    """Other numbers of programs have other ones finish a tile's last split."""
    case = make_case([1, 3, 1], [600, 300, 1500], dtype=torch.bfloat16, num_heads=12, **kwargs)
    tiles = default_config(64, 2, case.k_cache.itemsize, (9, 0))
    outs = [OP(*case.args(), tiles=replace(tiles, split_programs_per_sm=count)) for count in (1, 3, 5)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    for split_tokens in (64, 256):
        check(case, functools.partial(OP, tiles=replace(tiles, split_tokens=split_tokens)))


def chunks_build_one_cache(**kwargs) -> None:
    """A prompt in several calls: each reads what those before it have quantised, and agrees with the reference."""
    case = make_case([60], [0], dtype=torch.bfloat16, **kwargs)
    out = in_chunks(case, (20, 1, 16, 3, 20), OP)
    torch.testing.assert_close(out, check(case, OP), atol=case.tolerance, rtol=case.tolerance)


def a_bad_key_is_its_own_requests_affair(**kwargs) -> None:
    """NaN or infinity in a new key or value spoils the rows that see it, and no other request or KV head."""
    clean = make_case([1, 30, 1, 4], [30, 20, 40, 300], **kwargs)
    for name, value in (("k", float("nan")), ("v", float("inf"))):
        bad = getattr(clean, name).clone()
        bad[35, 1, 3] = value  # the last row of the last request
        case = replace(clean, **{name: bad})
        out, expected = OP(*case.args()), OP(*clean.args())
        assert not torch.isfinite(out[35, 2:, 3]).any(), "heads 2 and 3 belong to KV head 1"
        assert torch.equal(out[:32], expected[:32])
        assert torch.equal(out[32:, :2], expected[32:, :2])


def quantised_rows_are_those_of_kv_quant(dtype: torch.dtype, kv_dtype: torch.dtype, device: str = "cpu") -> None:
    """Written bit for bit, over all sizes and with odd rows: zeros, denormals, the largest numbers, NaN, infinities."""
    shape = (24, 4, 80)
    smallest, largest = (-6, 4) if dtype == torch.float16 else (-37, 37)
    sizes = 10 ** (smallest + (largest - smallest) * torch.rand(*shape[:2], 1))
    rows = (torch.randn(shape) * sizes).to(dtype)
    info = torch.finfo(dtype)
    for token, value in enumerate((0.0, -0.0, info.tiny / 8, info.tiny, info.max, info.min)):
        rows[token] = value
    for token, value in enumerate((float("nan"), float("inf"), -float("inf"), info.max, info.tiny)):
        rows[10 + token, :, token] = value
    case = make_case([24], [0], dtype=dtype, kv_dtype=kv_dtype, num_kv_heads=4, head_dim=80, device=device)
    args = replace(case, k=rows.to(device), v=rows.flip(0).to(device)).args()
    OP(*args)
    slots = case.slot_mapping.long().cpu()
    blocks, offsets = slots // 16, slots % 16
    for new, cache, scale in ((rows, args[3], args[5]), (rows.flip(0), args[4], args[6])):
        codes, scales = kv_quant.quantise(new, kv_dtype)
        assert torch.equal(cache.cpu().view(torch.int8)[blocks, :, offsets], codes.view(torch.int8))
        assert torch.equal(scale.cpu().view(torch.int32)[blocks, :, offsets], scales.view(torch.int32))


def huge_values(**kwargs) -> None:
    """Keys and values of 1e30 among ordinary ones, in float32, under queries whose scores are ordinary all the same."""
    case = make_case([1, 20, 1], [70, 33, 0], dtype=torch.float32, **kwargs)
    case.q.mul_(1e-30)
    case.k[3].mul_(1e30)
    case.k[21].mul_(-1e30)
    case.v[5].mul_(1e30)
    check(case, OP)


MORE: dict[str, tuple[Callable, dict[str, Any]]] = {
    "neighbours": (neighbours_change_nothing, {}),
    "neighbours-int8-window-sinks": (neighbours_change_nothing, {"kv_dtype": INT8, "window": 290, "sinks": True}),
    "any-program-last": (any_program_may_be_the_last, {}),
    "any-program-last-int8": (any_program_may_be_the_last, {"kv_dtype": INT8, "sinks": True}),
    "bad-key": (a_bad_key_is_its_own_requests_affair, {"dtype": torch.float32}),
    "bad-key-int8": (a_bad_key_is_its_own_requests_affair, {"dtype": BF16, "kv_dtype": INT8}),
    "huge": (huge_values, {}),
}
for name, kv_dtype in KV_DTYPES.items():
    MORE[f"chunks-{name}"] = chunks_build_one_cache, {"kv_dtype": kv_dtype}
    MORE[f"huge-{name}"] = huge_values, {"kv_dtype": kv_dtype}
    for dtype in (torch.float32, torch.bfloat16):
        MORE[f"rows-{name}-{dtype}"] = quantised_rows_are_those_of_kv_quant, {"dtype": dtype, "kv_dtype": kv_dtype}


def agrees_with_the_reference(**kwargs) -> None:
    check(make_case(**kwargs), OP)


def trees_agree_with_the_reference(rows: int = 64, **kwargs) -> None:
    """Two trees beside a decode, a chain of masks and, by the prefill kernel, a prompt; some across splits."""
    rng = random.Random(5)
    trees = [random_parents(rows, rng), 1, random_parents(7, rng), [0, 1, 2], 70]
    check(make_tree_case(trees, [300, 20, 129, 5, 3], **kwargs), OP)


MORE |= {
    "tree": (trees_agree_with_the_reference, {"dtype": BF16, "num_heads": 8, "trailing_rows": 2}),
    "tree-int8-window": (trees_agree_with_the_reference, {"dtype": BF16, "kv_dtype": INT8, "window": 70, **TWO_HEADS}),
    "tree-fp8": (trees_agree_with_the_reference, {"dtype": FP16, "kv_dtype": FP8, "soft_cap": 2.0, "sinks": True}),
    "tree-float32-window": (
        trees_agree_with_the_reference,
        {"dtype": torch.float32, "window": 16, "head_dim": 40, "rows": 16},
    ),
}
INTERPRETED = {
    **{name: functools.partial(agrees_with_the_reference, **kwargs) for name, kwargs in interpreted_cases()},
    **{name: functools.partial(function, **kwargs) for name, (function, kwargs) in MORE.items()},
}


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launches(
    capability: tuple[int, int], head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None,
    features: bool = False, group: int = 4, num_requests: int = 32, max_query_len: int = 512, trees: bool = False,
) -> list[ahead_of_time.Launch]:  # fmt: skip
    """What a step, mixed by default, launches on a GPU of that capability."""
    num_tokens, num_heads = max(num_requests, max_query_len), group * 8
    qkv = empty(num_tokens, num_heads + 2 * 8, head_dim, dtype=dtype)
    caches = [empty(1024, 8, 16, head_dim, dtype=kv_dtype or dtype) for _ in range(2)]
    scales = [floats(1024, 8, 16) if kv_dtype else None for _ in range(2)]
    indices = integers(num_tokens), integers(num_requests, 2048), integers(num_requests + 1), integers(num_requests)
    window, soft_cap, sinks = (1024, 30.0, floats(num_heads)) if features else (0, 0.0, None)
    scores = sinks, head_dim**-0.5, max_query_len, window, soft_cap, integers(num_tokens).long() if trees else None
    with ahead_of_time.recorded(capability, triton_attention) as recorded:
        OP(*qkv.split([num_heads, 8, 8], dim=1), *caches, *scales, *indices, *scores)
    return recorded


# Capability, head_dim, dtype, KV dtype, whether with window, soft cap and sinks. Head dims 80 and 96 take the tiles of
# 128. Not all products, since each is ten seconds of compilation. By default they are interpreted.
SM_80, SM_90 = (8, 0), (9, 0)
COMPILED = [
    (SM_90, 64, BF16, None, False), (SM_90, 64, FP16, INT8, True), (SM_80, 128, BF16, None, False),
    (SM_80, 80, BF16, None, False),
    (SM_80, 128, BF16, None, True), (SM_90, 96, FP16, None, False), (SM_90, 256, BF16, FP8, False),
    (SM_80, 512, BF16, None, False), (SM_80, 256, BF16, None, False), (SM_80, 128, BF16, INT8, False),
    (SM_90, 128, BF16, None, False), (SM_90, 128, BF16, INT8, False),
    (SM_90, 256, BF16, None, True), (SM_80, 512, BF16, INT8, True), (SM_90, 512, BF16, None, True),
    (SM_90, 512, BF16, FP8, True),
]  # fmt: skip


@pytest.mark.battery
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_without_spills(case: tuple) -> None:
    capability, head_dim, _, kv_dtype, features = case
    recorded = launches(*case)
    names = [kernel.__name__ for kernel, _, _ in recorded]
    splits = 1 if (capability, head_dim) == (SM_80, 512) else 2  # there short queries have the tiles of decodes
    assert names == ["write_kernel", *["split_kernel"] * splits, "prefill_kernel"]
    for launch in recorded:
        # All programs of a persistent grid run at once; not where masks and features take registers beyond the tuned.
        name, tiles = launch[0].__name__, default_config(head_dim, 2, 1 if kv_dtype else 2, capability)
        programs = 1
        if name == "split_kernel" and launch[2]["MIN_QUERY"] == 1 and not features and head_dim not in (80, 96):
            programs = tiles.split_programs_per_sm
        elif name == "prefill_kernel" and not features:
            programs = max(1, tiles.prefill_programs_per_sm)
        # Triton 3.7, that of torch 2.13, takes more registers for the largest tiles; half the tile would cost more.
        spilled = 64 if triton.__version__.startswith("3.7.") else 0
        ahead_of_time.without_spills(launch, capability, programs, spilled)


TREES = [(SM_90, 128, BF16, None), (SM_80, 128, BF16, None), (SM_90, 128, BF16, INT8), (SM_80, 64, BF16, INT8)]


@pytest.mark.battery
@pytest.mark.parametrize("case", TREES, ids=str)
def test_trees_compile_without_spills(case: tuple) -> None:
    """What a step of trees of up to 64 rows launches."""
    capability = case[0]
    for launch in launches(*case, num_requests=8, max_query_len=64, trees=True):
        ahead_of_time.without_spills(launch, capability, 1)


def test_trees_that_the_kernels_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="window must be 0 or at least 16"):
        OP(*make_tree_case([[0, 0]], [40], window=15).args())
    with pytest.raises(ValueError, match="ancestors must be None"):
        triton_exact.paged_attention(*make_tree_case([[0, 0]], [40]).args())


# A decode of 8 requests: capability, head_dim, query heads of a KV head, KV dtype. Heads of 512 are Gemma 4's.
DECODES = {
    f"sm_{10 * capability[0]}-h{head_dim}-gqa{group}-{name}": (capability, head_dim, group, kv_dtype)
    for capability in ahead_of_time.SM_MEMORY
    for head_dim in (64, 128, 256, 512)
    for group in ((1, 2, 4, 5, 7, 8) if head_dim < 512 else (2, 4, 8))
    for name, kv_dtype in {"bf16": None, **KV_DTYPES}.items()
    if kv_dtype != FP8 or capability != SM_80
}


@pytest.mark.parametrize("name", marked(DECODES, ["sm_80-h64-gqa8-bf16"]))
def test_decodes_compile_without_spills(name: str) -> None:
    """And all programs of the grid run at once."""
    capability, head_dim, group, kv_dtype = DECODES[name]
    _, launch = launches(capability, head_dim, BF16, kv_dtype, group=group, num_requests=8, max_query_len=1)
    tiles = default_config(head_dim, 2, 1 if kv_dtype else 2, capability)
    ahead_of_time.without_spills(launch, capability, tiles.split_programs_per_sm)


@pytest.mark.battery
@pytest.mark.parametrize("head_dim", [256, 512])
def test_float32_fits_shared_memory(head_dim: int) -> None:
    """The largest tiles of float32; its speed, and so a few spilled bytes, are of no interest."""
    for launch in launches((8, 0), head_dim, torch.float32):
        assert ahead_of_time.compiled(launch, (8, 0)).metadata.shared < 99 * 1024


# ---- refused --------------------------------------------------------------------------------------------------------


def test_a_head_dim_without_tiles_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 1024"):
        default_config(1024, 2, 2, (9, 0))


def test_fp8_is_refused_where_the_gpu_has_none() -> None:
    with pytest.raises(ValueError, match=r"given one of 8\.0: use 'int8'"):
        launches((8, 0), 128, torch.bfloat16, torch.float8_e4m3fn)


ORDINARY = [
    "bfloat16-decode-gqa4-h128", "float32-same-mixed-h40", "bfloat16-splits-in-a-mixed-step",
    "bfloat16-window-of-one", "bfloat16-a-sink-above-all-scores", "bfloat16-int8-chunk-after31-block32",
    "bfloat16-int8-row-tiles-gqa8", "bfloat16-int8-only-padding",
    "float32-int8-window-soft-cap-sinks-h64", "float16-fp8-mixed-gqa5-h64", "huge", "rows-fp8-torch.bfloat16",
    "tree-int8-window",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
