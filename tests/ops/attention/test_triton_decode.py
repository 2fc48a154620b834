"""Attention of a decode in one launch: its plan and its kernel, interpreted and compiled ahead of time."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops import Turn, decode_attention, rms_norm, rope, rotary_decode_attention
from compiled_llm.ops.attention import triton_attention, triton_decode, triton_decode_plan
from compiled_llm.ops.attention.decode_plan import DecodePlan, decode_plan_reference, splits_of
from compiled_llm.ops.attention.heads import heads_of
from compiled_llm.ops.attention.tiles import (
    MOST_SPLITS,
    TASK_COLUMNS,
    Splits,
    TileConfig,
    decode_splits,
    decode_tile,
    default_config,
)
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.attention.attention_cases import CACHES, KV_DTYPES, AttentionCase, check, make_case, same_caches
from tests.ops.attention.latent_cases import LatentCase
from tests.ops.attention.test_rotary_attention import EPS, turning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = KV_DTYPES["int8"], KV_DTYPES["fp8"]
KINDS = {"bf16": None, **KV_DTYPES}


def decode_case(context_lens: list[int], *, without_row: int = 0, make: Callable = make_case, **kwargs) -> Any:
    """One query a request, and requests without one, whose rows come last."""
    empty = {"padding_query_lens": [0] * without_row, "trailing_rows": without_row}
    return make([1] * len(context_lens), context_lens, **empty, **kwargs)


def plan_of(
    case: AttentionCase | LatentCase, table_rows: Tensor | None = None, op: Callable = triton_decode_plan.decode_plan
) -> tuple[Tensor, Tensor]:
    if isinstance(case, LatentCase):
        q, num_heads = case.q_latent, case.q_latent.shape[1]
    else:
        q, num_heads = case.q, case.k.shape[1]
    table_tokens = case.block_table.shape[1] * case.k_cache.shape[2]
    lengths = case.slot_mapping, table_rows, case.query_start_loc, case.seq_lens, table_tokens
    sizes = num_heads, q.shape[2], q.element_size(), case.k_cache.element_size(), isinstance(case, LatentCase)
    return op(*lengths, case.window, *sizes)


def in_a_larger_table(case: AttentionCase | LatentCase) -> tuple[Tensor, Tensor]:
    """Where the case's requests are in the table of more requests, and that table."""
    requests = len(case.seq_lens)
    rows = torch.randperm(requests + 3)[:requests].int()
    table = torch.full((requests + 3, case.block_table.shape[1]), 2**30, dtype=torch.int32)
    table[rows.long()] = case.block_table
    return rows, table


def attended(case: AttentionCase, plan: tuple, turn: tuple | None = None, table: Tensor | None = None, **kwargs):
    """The kernel's output, and its caches."""
    values = case.values()
    q, k, v = values["q"], values["k"], values["v"]
    turning = None
    if turn is not None:
        turning = triton_decode.Turning(*turn[1:])
        q, k, v = heads_of(turn[0], case.q.shape[1], case.k.shape[1], case.q.shape[2])
    caches = {name: values[name] for name in CACHES}
    table = case.block_table if table is None else table
    scores = (case.sinks, case.sm_scale, case.window, case.soft_cap)
    out = triton_decode.decode_attention(q, k, v, turning, EPS, *caches.values(), table, *plan, *scores, **kwargs)
    return out, caches


def same_plan(case: AttentionCase | LatentCase, table_rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kernel's plan, which is the reference's."""
    (tasks, counters), (expected, zeros) = plan_of(case, table_rows), plan_of(case, table_rows, decode_plan_reference)
    count = int(expected[0, 0])
    assert int(tasks[0, 0]) == count
    assert torch.equal(tasks[1 : 1 + count, :7], expected[1 : 1 + count, :7])
    assert tasks.shape == expected.shape
    assert torch.equal(counters, zeros)
    return tasks, counters


def plain(context_lens: list[int], **kwargs) -> None:
    """Heads that are as they are: against the reference, caches to the bit."""
    case = decode_case(context_lens, **kwargs)
    plan = same_plan(case)

    def op(*args) -> Tensor:
        given = dict(zip(case.values(), args, strict=True))
        caches, scores = (given[name] for name in CACHES), (case.sinks, case.sm_scale, case.window, case.soft_cap)
        new = given["q"], given["k"], given["v"], None, 0.0
        return triton_decode.decode_attention(*new, *caches, case.block_table, *plan, *scores)

    check(case, op)
    assert not plan[1].any(), "the next layer finds counters that are zero"


def turned(context_lens: list[int], norm_dtype=None, scaled: bool = False, new_values: str = "plain", **kwargs) -> None:
    """As what two launches give, to the bit but for norms of queries and splits; by the tables of more requests.

    And the same once more from queries alone, of a cache that has the new keys.
    """
    case = decode_case(context_lens, fused_qkv=True, **kwargs)
    turn = turning(case, norm_dtype, scaled, new_values)
    rows, table = in_a_larger_table(case)
    plan = same_plan(case, rows)
    out, caches = attended(case, plan, turn, table)
    assert not plan[1].any(), "the next layer finds counters that are zero"
    values = case.values()
    expected = triton_attention.rotary_attention(
        *turn, *(values[name] for name in (*CACHES, "slot_mapping", "block_table", "query_start_loc", "seq_lens")),
        case.sinks, case.q.shape[1], EPS, case.sm_scale, 1, case.window, case.soft_cap,
    )  # fmt: skip
    alone = len(context_lens) == 1  # whose sums begin with the new key
    if max(context_lens) < 128 and norm_dtype is None and not alone:  # longer ones may be cut otherwise
        assert torch.equal(out, expected)
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
    same_caches(caches, values)
    qkv, cos_sin, q_norm, _, _, scale = turn
    queries = qkv[:, : case.q.shape[1] * case.q.shape[2]], cos_sin, q_norm, None, None, scale
    again, after = attended(replace(case, **caches), plan, queries, table)
    torch.testing.assert_close(again, out, atol=case.tolerance if alone else 0, rtol=0)
    same_caches(after, caches)


def any_program_may_be_the_last() -> None:
    case = decode_case([600, 300, 1500], dtype=BF16, num_heads=12, fused_qkv=True)
    plan, turn, tiles = plan_of(case), turning(case, BF16, False), default_config(64, 2, 2, (9, 0))
    outs = [attended(case, plan, turn, tiles=replace(tiles, decode_programs_per_sm=n))[0] for n in (1, 3, 5)]
    assert all(torch.equal(out, outs[0]) for out in outs)


def a_bad_key_alone(kv_dtype) -> None:
    """Also where it is the only one."""
    case = decode_case([0], dtype=BF16, kv_dtype=kv_dtype, num_heads=4, num_kv_heads=2)
    case.k[0, 1, 3] = float("nan")
    out, _ = attended(case, plan_of(case))
    assert not torch.isfinite(out[0, 2:]).any()
    assert torch.isfinite(out[0, :2]).all()


def a_bad_key_is_its_own_requests_affair(kv_dtype) -> None:
    clean = decode_case([30, 200, 40], dtype=BF16, kv_dtype=kv_dtype, num_heads=4, num_kv_heads=2)
    plan = plan_of(clean)
    bad_key = clean.k.clone()
    bad_key[1, 1, 3] = float("nan")
    (out, _), (expected, _) = (attended(one, plan) for one in (replace(clean, k=bad_key), clean))
    assert not torch.isfinite(out[1, 2:]).any(), "heads 2 and 3 belong to KV head 1"
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert torch.equal(out[1, :2], expected[1, :2])


LENGTHS = [0, 33, 300]
INTERPRETED = {
    "turned-scaled-float16": functools.partial(turned, LENGTHS, dtype=FP16, norm_dtype=FP32, scaled=True),
    "turned-float32-int8": functools.partial(turned, [0, 200], dtype=FP32, kv_dtype=INT8),
    "turned-normed-values": functools.partial(turned, LENGTHS, dtype=BF16, norm_dtype=FP32, new_values="normed"),
    "turned-keys-are-values": functools.partial(
        turned, [0, 140], dtype=BF16, norm_dtype=FP32, new_values="keys", head_dim=512, kv_dtype=INT8
    ),
    "turned-in-one-split": functools.partial(turned, [0, 33, 127], dtype=BF16, head_dim=128),  # tiles alike
    "turned-without-norms": functools.partial(turned, LENGTHS, dtype=BF16, without_row=3),
    "turned-alone-float16": functools.partial(turned, [100], dtype=FP16, norm_dtype=FP32, scaled=True),
    "plain-alone": functools.partial(plain, [200], dtype=BF16, head_dim=128, block_size=1),
    "turned-many": functools.partial(turned, [*range(1, 340, 17)], dtype=BF16, without_row=12, head_dim=16),
    "turned-window": functools.partial(turned, [300, 190, 100, 20], dtype=BF16, window=70, sinks=True, without_row=1),
    "turned-window-int8": functools.partial(turned, [600, 290], dtype=BF16, window=300, soft_cap=3.0, kv_dtype=INT8),
    "turned-more-than-64-splits": functools.partial(
        turned, [16500, 8200], dtype=BF16, num_heads=1, num_kv_heads=1, head_dim=16
    ),
    "plain-alone-int8-soft-cap": functools.partial(plain, [1500], dtype=BF16, kv_dtype=INT8, soft_cap=2.0),
    "plain-window-of-one": functools.partial(plain, [530, 30], dtype=BF16, window=1),
    "plain-only-padding": functools.partial(plain, [], dtype=BF16, without_row=3, sinks=True),
    "plain-blocks-of-one": functools.partial(plain, [1, 15, 200], dtype=BF16, block_size=1),
    "any-program-last": any_program_may_be_the_last,
    "bad-key": functools.partial(a_bad_key_is_its_own_requests_affair, None),
    "bad-key-alone": functools.partial(a_bad_key_alone, None),
    "bad-key-alone-int8": functools.partial(a_bad_key_alone, INT8),
    "bad-key-fp8": functools.partial(a_bad_key_is_its_own_requests_affair, FP8),
}
ALONE: list[tuple[int, int, int, dict[str, Any]]] = [
    (64, 4, 1200, {"norm_dtype": BF16}),
    (128, 1, 64, {"sinks": True}),
    (128, 5, 130, {"norm_dtype": FP32, "scaled": True}),
    (64, 16, 65, {"window": 70, "soft_cap": 3.0}),
    (64, 2, 0, {"norm_dtype": BF16, "without_row": 0}),
    (80, 2, 90, {}),
]
for name, kv_dtype in KINDS.items():
    kind = {"dtype": BF16, "kv_dtype": kv_dtype}
    for size, group in ((64, 1), (80, 4), (96, 5), (128, 8), (256, 2), (512, 4)):
        case = functools.partial(plain, [0, 300], head_dim=size, num_heads=2 * group, **kind)
        INTERPRETED[f"plain-h{size}-gqa{group}-{name}"] = case
    for size, group in ((64, 2), (64, 7), (80, 4), (96, 16), (128, 1), (256, 4), (512, 2)):
        case = functools.partial(turned, LENGTHS, head_dim=size, num_heads=2 * group, norm_dtype=BF16, **kind)
        INTERPRETED[f"turned-h{size}-gqa{group}-{name}"] = case
    for size, group, length, rest in ALONE:
        case = functools.partial(turned, [length], head_dim=size, num_heads=2 * group, **kind, **rest)
        INTERPRETED[f"turned-alone-h{size}-gqa{group}-{name}"] = case
    # A split of more tiles than come through registers.
    far = functools.partial(turned, [2600], num_heads=2, num_kv_heads=1, **kind)
    INTERPRETED[f"turned-alone-far-{name}"] = far


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launch(
    capability: tuple[int, int], head_dim: int, group: int, kv_dtype: torch.dtype | None, requests: int = 8,
    new: str = "plain", window: int = 0,
) -> ahead_of_time.Launch:  # fmt: skip
    """What a decode launches. ``new``: its values are "plain" or "normed", or "none"."""
    sizes = [8 * group, 8, 8]
    q, k, v = empty(requests, sum(sizes), head_dim).split(sizes, dim=1)
    caches = [empty(1024, 8, 16, head_dim, dtype=kv_dtype or BF16) for _ in range(2)]
    scales = [floats(1024, 8, 16) if kv_dtype else None for _ in range(2)]
    norm = empty(head_dim, dtype=BF16 if new == "plain" else FP32)
    v_norm = floats(head_dim) if new == "normed" else None
    turning = triton_decode.Turning(floats(requests, head_dim), norm, norm, v_norm, None)
    if new == "none":
        k, v, turning = None, None, turning._replace(k_norm=None)
    plan = integers(1 + requests * MOST_SPLITS, TASK_COLUMNS), integers(8 * requests)
    scores = None, head_dim**-0.5, window, 0.0
    with ahead_of_time.recorded(capability, triton_decode) as recorded:
        triton_decode.decode_attention(q, k, v, turning, EPS, *caches, *scales, integers(64, 2048), *plan, *scores)
    return recorded[0]


DECODES = {
    f"sm_{10 * capability[0]}-h{head_dim}-gqa{group}-{name}{end}": (capability, head_dim, group, kv_dtype, requests)
    for capability in ahead_of_time.SM_MEMORY
    for head_dim in (64, 96, 128, 256, 512)
    for group in ((1, 2, 4, 5, 7, 8, 16) if head_dim < 512 else (2, 4, 8))
    for name, kv_dtype in KINDS.items()
    for requests, end in ((8, ""), (1, "-alone"))
    if (kv_dtype != FP8 or capability != (8, 0))
    and (
        requests > 1
        or (head_dim in triton_decode.ALONE_HEAD_DIMS and default_config(head_dim, 2, 2, capability).alone_warps)
    )
}
# Gemma 4's: values have norms, and some layers have no new keys but another's cache. Norms are in float32; heads of 256
# have windows.
DECODES |= {
    f"sm_{10 * capability[0]}-h{head_dim}-gqa{group}-{name}-{new}": (
        capability, head_dim, group, kv_dtype, 8, new, window,
    )
    for capability in ahead_of_time.SM_MEMORY
    for new, head_dim, window, groups in (
        ("normed", 256, 1024, (2, 4, 8)), ("normed", 512, 0, (4, 8, 16)), ("none", 256, 512, (4, 8)),
        ("none", 512, 0, (4, 8)),
    )
    for group in groups
    for name, kv_dtype in KINDS.items()
    if kv_dtype != FP8 or capability != (8, 0)
}  # fmt: skip


@pytest.mark.parametrize("name", marked(DECODES, ["sm_90-h64-gqa4-bf16"]))
def test_decodes_compile_without_spills(name: str) -> None:
    """And all programs of the grid run at once."""
    capability, head_dim, group, kv_dtype, requests, *new = DECODES[name]
    made = launch(capability, head_dim, group, kv_dtype, requests, *new)
    programs = 2  # of the kernel for one request, see decode_splits
    if made[0] is triton_decode.decode_kernel:
        programs = decode_tile(default_config(head_dim, 2, 1 if kv_dtype else 2, capability)).programs_per_sm
    ahead_of_time.without_spills(made, capability, programs)


# ---- on the CPU -----------------------------------------------------------------------------------------------------


def test_a_request_alone_is_cut_into_no_more_splits_than_run_at_once_or_are_joined_soon() -> None:
    tiles: TileConfig = default_config(128, 2, 2, (9, 0))
    assert decode_splits(tiles, 1, 8, 132) == Splits(64, 32)
    assert decode_splits(tiles, 1, 16, 132) == Splits(64, 132 * 2 // 16)
    assert decode_splits(tiles, 1, 64, 132) == Splits(64, 8)


def test_requests_of_1024_keys_have_as_many_splits_as_run_at_once() -> None:
    tiles = replace(default_config(128, 2, 2, (9, 0)), decode_programs_per_sm=2)
    for requests, tokens in ((2, 64), (8, 256), (16, 512), (32, 1024), (256, 1024)):
        assert decode_splits(tiles, requests, 8, 132) == Splits(tokens, 64)


def test_splits_are_alike_and_no_few_keys_are_one_of_their_own() -> None:
    for splits in (Splits(64, 32), Splits(256, 64), Splits(1024, 64)):
        for old in (*range(1, 4 * splits.tokens), 70_000, 131_071):
            size, count = splits_of(old + 1, splits)
            assert size % 64 == 0
            assert (count - 1) * size < old <= count * size
            assert count <= min(splits.most, -(-old // splits.tokens))
            assert size <= max(splits.tokens * 3 // 2, -(-old // (splits.most * 64)) * 64)
    assert [splits_of(1 + old, Splits(1024, 64)) for old in (0, 1024, 1033, 1537, 8192)] == [
        (64, 1), (1024, 1), (1088, 1), (832, 2), (1024, 8),
    ]  # fmt: skip


@pytest.mark.parametrize("rotary", [False, True])
def test_the_reference_is_the_ops_of_a_cpu(rotary: bool) -> None:
    """The ops that a CPU has, from lengths that are in the plan alone."""
    case = decode_case([0, 0, 0], without_row=1, dtype=BF16, fused_qkv=True)
    plan = DecodePlan(case.block_table, *plan_of(case, None, decode_plan_reference))
    values, own = case.values(), [case.values()[name] for name in CACHES]
    scores = {"sinks": None, "sm_scale": case.sm_scale, "window": 0, "soft_cap": 0.0}
    if rotary:
        qkv, cos_sin, q_norm, k_norm, v_norm, scale = turning(case, BF16, True, "normed")
        turn, kind = Turn(cos_sin, q_norm, k_norm, v_norm, scale, EPS), AttentionSpec(4, 2, 64, case.sm_scale)
        out = rotary_decode_attention(qkv, turn, own, plan, kind)
        q, values["k"] = rope(qkv, cos_sin, q_norm, k_norm, 4, 2, EPS)
        values["v"] = rms_norm(case.v.reshape(-1, 64), v_norm, EPS).view(case.v.shape)
        values["q"] = q * scale[:, None]
    else:
        out = decode_attention(case.q, case.k, case.v, *own, plan, **scores)
    expected = torch.ops.compiled_llm.paged_attention(*values.values())
    assert torch.equal(out[:3], expected[:3])
    assert not out[3:].any()
    assert torch.equal(own[0][1:].view(torch.int16), values["k_cache"][1:].view(torch.int16))
    if rotary:  # from queries alone, of a cache that has the new keys
        turn = turn._replace(k_norm=None, v_norm=None)
        assert torch.equal(rotary_decode_attention(qkv[:, : 4 * 64], turn, own, plan, kind), out)


ORDINARY = [
    "plain-h80-gqa4-fp8", "plain-only-padding", "turned-keys-are-values", "turned-window",
    "bad-key", "turned-alone-far-int8", "bad-key-alone",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
