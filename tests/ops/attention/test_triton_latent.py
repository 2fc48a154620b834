"""Latent attention in Triton: interpreted against the reference, and compiled ahead of time."""

import functools
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.attention import triton_latent
from compiled_llm.ops.attention.latent_tiles import LatentTile, latent_splits, latent_tiles
from compiled_llm.ops.rowwise import triton_rowwise
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.attention.attention_cases import (
    ALL_KV_DTYPES,
    CACHES,
    KV_DTYPES,
    alone,
    check,
    in_chunks,
    with_shared_prefixes,
)
from tests.ops.attention.latent_cases import GRID, LatentCase, make_case
from tests.ops.attention.test_triton_decode import decode_case, in_a_larger_table, same_plan
from tests.ops.attention.tree_cases import make_tree_case, random_parents

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = KV_DTYPES["int8"], KV_DTYPES["fp8"]
EPS = 1e-6
WAYS = {
    "fast": triton_latent.rotary_latent_attention,
    "exact": functools.partial(triton_latent.rotary_latent_attention, exact=True),
}


def attended(how: str, q_latent: Tensor, q_turned: Tensor, k_turned: Tensor, latent: Tensor, *rest: Any) -> Tensor:
    """The op on the arguments of a case, turned by no angle: for comparisons of a row's bits."""
    half = q_turned.new_ones(len(q_turned), q_turned.shape[2] // 2, dtype=torch.float32)
    norm = latent.new_ones(latent.shape[2])
    turn = torch.cat([half, 0 * half], dim=1), norm, None, EPS
    return WAYS[how](q_latent, q_turned, k_turned, latent, *turn, *rest)


OPS = {how: functools.partial(attended, how) for how in WAYS}


def turning(case: LatentCase, scaled: bool) -> triton_latent.ToTurn:
    """What is still to be done with the queries and keys of a case."""
    (rows, _, turned), device = case.q_turned.shape, case.latent.device
    numbers = torch.arange(rows, device=device)[:, None]
    radians = numbers * torch.linspace(0, 1, turned // 2, device=device)
    scale = (1 + numbers / 8).to(case.q_turned.dtype) if scaled else None
    norm = torch.linspace(0.5, 1.5, case.latent.shape[2], device=device).to(case.latent.dtype)
    return triton_latent.ToTurn(torch.cat([radians.cos(), radians.sin()], dim=1), norm, scale, EPS)


def turned_before(case: LatentCase, turn: triton_latent.ToTurn) -> LatentCase:
    """The case after the two ops that a CPU has before attention, by their Triton kernels."""
    heads = case.q_turned.shape[1]
    to_turn = torch.cat([case.q_turned.flatten(1), case.k_turned.flatten(1)], dim=1)
    q, k = triton_rowwise.rope(to_turn, turn.cos_sin, None, None, heads, 1, EPS)
    if turn.query_scale is not None:
        q = q * turn.query_scale[:, None]
    normed = triton_rowwise.rms_norm(case.latent[:, 0].contiguous(), turn.norm, EPS)
    return replace(case, q_turned=q, k_turned=k, latent=normed[:, None])


def turned(how: str, case: LatentCase, scaled: bool = False) -> None:
    """Against the reference after rope and norm, with the same bits in the cache."""
    turn, new = turning(case, scaled), (case.q_latent, case.q_turned, case.k_turned, case.latent)
    check(turned_before(case, turn), lambda *args: WAYS[how](*new, *turn, *args[4:]))


def of_the_grid(name: str, how: str, **types) -> None:
    turned(how, make_case(**GRID[name], **types))


def of_mixed_rows(how: str, scaled: bool = False, **kwargs) -> None:
    case = make_case([3, 1, 20, 1], [140, 90, 20, 0], padding_query_lens=[0, 1], trailing_rows=2, **kwargs)
    turned(how, case, scaled)


def of_trees(prompt: int = 70, **kwargs) -> None:
    """Two trees beside a decode, a chain of masks and a prompt of so many tokens; some across splits."""
    rng = random.Random(0)
    trees = [random_parents(64, rng), 1, random_parents(7, rng), [0, 1, 2], prompt]
    turned("fast", make_tree_case(trees, [300, 20, 129, 5, 3], make_case, latent_dim=64, **kwargs))


def decoded(case: LatentCase, turn: triton_latent.ToTurn, tile: LatentTile | None = None) -> tuple[Tensor, dict]:
    """By the kernel of decodes, whose requests have other places in the table; and the caches."""
    rows, table = in_a_larger_table(case)
    tasks, _ = same_plan(case, rows)
    values = case.values()
    caches = triton_latent.Caches(*(values[name] for name in CACHES))
    new = values["q_latent"], values["q_turned"], values["k_turned"], values["latent"]
    out = triton_latent.latent_decode_attention(*new, turn, caches, table, tasks, case.sm_scale, case.window, tile=tile)
    return out, values


def decode(context_lens: list[int], scaled: bool = False, **kwargs) -> None:
    """Against the reference after rope and norm, with the same bits in the cache."""
    case = decode_case(context_lens, make=make_case, **kwargs)
    turn = turning(case, scaled)
    before = turned_before(case, turn)

    def op(*args: Tensor) -> Tensor:
        out, values = decoded(case, turn)
        for name, given in zip(case.values(), args, strict=True):
            if name in CACHES and given is not None:
                given.copy_(values[name])
        return out

    check(before, op)


def any_number_of_programs(**kwargs) -> None:
    case = decode_case([600, 300, 1500], make=make_case, dtype=BF16, num_heads=40, latent_dim=64, **kwargs)
    turn, tile = turning(case, False), latent_tiles(64, 2, 2, (9, 0)).decode
    outs = []
    for count in (1, 3, 5):
        torch.manual_seed(0)
        outs.append(decoded(case, turn, tile._replace(programs_per_sm=count))[0])
    assert all(torch.equal(out, outs[0]) for out in outs)


def a_bad_latent_is_its_own_requests_affair(how: str, kv_dtype: torch.dtype | None) -> None:
    clean = make_case([1, 2, 1], [30, 700, 40], dtype=BF16, kv_dtype=kv_dtype, latent_dim=64)
    latent = clean.latent.clone()
    latent[1, 0, 3] = float("nan")
    expected = OPS[how](*clean.args())
    out = OPS[how](*replace(clean, latent=latent).args())
    assert torch.isnan(out[1:3]).any(-1).all()
    assert torch.equal(out[[0, 3]], expected[[0, 3]])


def neighbours_change_no_bit(how: str, **kwargs) -> None:
    """A request alone has the bits that it has among others; if not exact, in steps of one size."""
    case = make_case([1, 3, 1, 19], [1100, 1090, 600, 60], poison_before_window=False, latent_dim=64, **kwargs)
    case = with_shared_prefixes(case, ((1, 0, 1024), (2, 0, 512)))
    together = OPS[how](*case.args())
    for request in range(4):
        own = alone(case, request)
        if how == "fast":
            rest = replace(case, query_start_loc=torch.zeros_like(case.query_start_loc), seq_lens=case.seq_lens.clone())
            rest.query_start_loc[request + 1 :] = own.query_start_loc[1]
            own = replace(rest, **{name: getattr(own, name) for name in case.OF_TOKENS})
        rows = case.rows(request)
        assert torch.equal(OPS[how](*own.args())[: rows.stop - rows.start], together[rows])


def chunks_change_no_bit(**kwargs) -> None:
    case = make_case([560], [0], latent_dim=32, turned_dim=16, **kwargs)
    chunks = 1, 200, 30, 65, 21, 1, 2, 220, 1, 3, 16
    assert torch.equal(in_chunks(case, chunks, OPS["exact"]), OPS["exact"](*case.args()))


SOME = {"bf16": (BF16, None), "int8": (BF16, INT8), "fp8": (FP16, FP8), "fp32": (FP32, None), "fp32-int8": (FP32, INT8)}
LENGTHS = [0, 33, 700]
INTERPRETED = {
    "decode-scaled": functools.partial(decode, LENGTHS, scaled=True, dtype=BF16),
    "decode-alone": functools.partial(decode, [1800], dtype=BF16, num_heads=20),
    "decode-many": functools.partial(decode, [*range(1, 340, 17)], dtype=BF16, without_row=12, latent_dim=16),
    "decode-window": functools.partial(decode, [600, 290, 100, 20], dtype=BF16, window=70, without_row=1),
    "decode-window-int8": functools.partial(decode, [600, 290], dtype=BF16, window=300, kv_dtype=INT8),
    "decode-only-padding": functools.partial(decode, [], dtype=BF16, without_row=3),
    "decode-blocks-of-one": functools.partial(decode, [1, 15, 200], dtype=BF16, block_size=1),
    "any-number-of-programs": any_number_of_programs,
    "turned-fast-scaled": functools.partial(of_mixed_rows, "fast", scaled=True, dtype=BF16, num_heads=7),
    "turned-fast-wide": functools.partial(
        of_mixed_rows, "fast", dtype=BF16, num_heads=40, latent_dim=512, turned_dim=64
    ),
    "neighbours-exact-window": functools.partial(neighbours_change_no_bit, "exact", dtype=BF16, window=100),
    "chunks-window": functools.partial(chunks_change_no_bit, dtype=BF16, window=100),
    "chunks-heads": functools.partial(chunks_change_no_bit, dtype=BF16, num_heads=40),
    "tree-bf16": functools.partial(of_trees, dtype=BF16, trailing_rows=2),
    "tree-int8-window": functools.partial(of_trees, dtype=BF16, kv_dtype=INT8, window=70),
    "tree-int8-window-short": functools.partial(of_trees, prompt=5, dtype=BF16, kv_dtype=INT8, window=70, num_heads=2),
    "tree-fp8-heads": functools.partial(of_trees, dtype=FP16, kv_dtype=FP8, num_heads=20),
    "tree-float32-window": functools.partial(of_trees, dtype=FP32, window=64),
}
for kind, (dtype, kv_dtype) in SOME.items():
    types = {"dtype": dtype, "kv_dtype": kv_dtype}
    for size, turned_dim, heads in ((512, 64, 16), (64, 16, 128), (256, 64, 32), (40, 12, 5), (48, 16, 1)):
        sizes = {"latent_dim": size, "turned_dim": turned_dim, "num_heads": heads}
        INTERPRETED[f"decode-c{size}-n{heads}-{kind}"] = functools.partial(decode, LENGTHS, **sizes, **types)
    INTERPRETED[f"chunks-{kind}"] = functools.partial(chunks_change_no_bit, **types)
    for how in OPS:
        for name in GRID:
            INTERPRETED[f"{how}-{name}-{kind}"] = functools.partial(of_the_grid, name, how, **types)
        INTERPRETED[f"neighbours-{how}-{kind}"] = functools.partial(neighbours_change_no_bit, how, **types)
for how, (kind, kv_dtype) in itertools.product(OPS, ALL_KV_DTYPES.items()):
    bad = functools.partial(a_bad_latent_is_its_own_requests_affair, how, kv_dtype)
    INTERPRETED[f"bad-latent-{how}-{kind}"] = bad


@pytest.mark.gpu
@pytest.mark.parametrize("how", OPS)
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", GRID)
def test_on_a_gpu(name: str, kind: str, how: str) -> None:
    dtype, kv_dtype = SOME[kind]
    of_the_grid(name, how, dtype=dtype, kv_dtype=kv_dtype, device="cuda")


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launches(
    capability: tuple[int, int], kind: str, num_heads: int, latent_dim: int, kv_dtype: torch.dtype | None
) -> list[ahead_of_time.Launch]:
    """What a decode of 8 requests, a chunk of 512 tokens or trees of so many rows launch."""
    tokens, turned_dim = 8 if kind == "decode" else 512, 64
    heads, down = empty(tokens, num_heads, 128 + turned_dim), empty(tokens, 1, latent_dim + turned_dim)
    new = empty(tokens, num_heads, latent_dim), heads[..., 128:], down[..., latent_dim:], down[..., :latent_dim]
    turn = triton_latent.ToTurn(floats(tokens, turned_dim), empty(latent_dim), None, EPS)
    caches = [empty(1024, 1, 16, size, dtype=kv_dtype or BF16) for size in (turned_dim, latent_dim)]
    made = triton_latent.Caches(*caches, *(floats(1024, 1, 16) if kv_dtype else None for _ in range(2)))
    with ahead_of_time.recorded(capability, triton_latent) as recorded:
        if kind == "decode":
            plan = integers(64, 2048), integers(1 + 8 * 64, 8)
            triton_latent.latent_decode_attention(*new, turn, made, *plan, 0.1, 0)
        else:
            step = integers(tokens), integers(8, 2048), integers(9), integers(8)
            masks = integers(tokens).long() if kind == "tree" else None
            given = *new, *turn, *made, *step, 0.1, tokens, 0, masks
            triton_latent.rotary_latent_attention(*given, exact=kind == "exact")
    return recorded


COMPILED = {
    f"sm_{10 * capability[0]}-{kind}-n{heads}-c{size}-{name}": (capability, kind, heads, size, kv_dtype)
    for capability in ahead_of_time.SM_MEMORY
    for kind in ("decode", "chunk", "tree", "exact")
    for heads, size in ((16, 512), (128, 512), (32, 256))
    for name, kv_dtype in ALL_KV_DTYPES.items()
    if kv_dtype != FP8 or capability != (8, 0)
}


@pytest.mark.parametrize("name", marked(COMPILED, []))
def test_kernels_compile_without_spills(name: str) -> None:
    """And all programs of the grid run at once."""
    capability, kind, heads, size, kv_dtype = COMPILED[name]
    tiles = latent_tiles(size, 2, 1 if kv_dtype else 2, capability)
    programs = getattr(tiles, "chunk" if kind == "tree" else kind).programs_per_sm
    for launch in launches(capability, kind, heads, size, kv_dtype):
        attends = launch[0].__name__ in ("latent_attention_kernel", "latent_decode_attention_kernel")
        ahead_of_time.without_spills(launch, capability, programs if attends else 0)


# ---- on the CPU -----------------------------------------------------------------------------------------------------


def test_splits_follow_from_the_size_of_the_step() -> None:
    tile = LatentTile(64, 32, 8, 2, 1)
    assert latent_splits(tile, 1, 16, 132).most == 64
    assert latent_splits(tile, 1, 1024, 132).most == 8
    assert latent_splits(tile, 8, 128, 132) == (128, 33)
    assert latent_splits(tile, 256, 16, 132) == (128, 8)


def test_trees_that_the_kernels_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="window must be 0 or at least 16"):
        OPS["fast"](*make_tree_case([[0, 0]], [40], make_case, window=15).args())
    with pytest.raises(ValueError, match="ancestors must be None"):
        OPS["exact"](*make_tree_case([[0, 0]], [40], make_case).args())


def test_latents_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="latent_dim 513 is not supported by the GPU kernels: at most 512"):
        latent_tiles(513, 2, 2, (9, 0))


ORDINARY = [
    "fast-only-padding-bf16", "exact-mixed-bf16", "decode-c40-n5-int8",
    "turned-fast-scaled", "bad-latent-fast-int8",
    "tree-int8-window-short",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
