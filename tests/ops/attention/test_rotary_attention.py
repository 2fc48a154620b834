"""Rotary attention: on a GPU one op that computes what its two ops compute one after the other, to the bit."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops import Keys, Turn, paged_attention, rope, rotary_attention
from compiled_llm.ops.attention import triton_attention, triton_exact
from compiled_llm.ops.attention.paged_attention import paged_attention_reference
from compiled_llm.ops.rowwise import triton_rowwise
from compiled_llm.ops.rowwise.reference import rms_norm_reference, rope_reference
from tests.drawn import marked
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.attention.attention_cases import CACHES, KV_DTYPES, AttentionCase, make_case, same_caches, step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
STEP = step([3, 1, 1, 20], [140, 130, 0, 20], padding_query_lens=[0, 1], trailing_rows=2)


def turning(
    case: AttentionCase, norm_dtype: torch.dtype | None, scaled: bool, values: str = "plain"
) -> tuple[Tensor | None, ...]:
    """``qkv``, norms and so on for the queries, keys and values of a case, in the order of the ops.

    ``values``: "plain", "normed", or "keys" where they are those that the keys are made of, normed.
    """
    rows, _, head_dim = case.q.shape
    qkv = torch.cat([case.q, case.k, *([] if values == "keys" else [case.v])], dim=1).flatten(1)
    radians = torch.arange(rows)[:, None] * torch.linspace(0, 1, head_dim // 2)
    norms = [None if norm_dtype is None else torch.linspace(a, 1.5, head_dim).to(norm_dtype) for a in (0.5, 0.7)]
    scale = (1 + torch.arange(rows)[:, None] / 8).to(qkv.dtype) if scaled else None
    v_norm = None if values == "plain" else torch.linspace(0.6, 1.4, head_dim)
    return qkv, torch.cat([radians.cos(), radians.sin()], dim=1), *norms, v_norm, scale


def in_two_ops(rope_op, attention_op, case: AttentionCase, turn: tuple) -> tuple[Tensor, dict[str, Tensor | None]]:
    qkv, cos_sin, q_norm, k_norm, v_norm, scale = turn
    values = case.values()
    if qkv.shape[1] == (case.q.shape[1] + case.k.shape[1]) * case.q.shape[2]:
        values["v"] = case.k
    if v_norm is not None:
        values["v"] = rms_norm_reference(values["v"], v_norm, EPS)
    q, k = rope_op(qkv, cos_sin, q_norm, k_norm, case.q.shape[1], case.k.shape[1], EPS)
    values |= {"q": q if scale is None else q * scale[:, None], "k": k}
    return attention_op(*values.values()), {name: values[name] for name in CACHES}


def in_one(op, case: AttentionCase, turn: tuple) -> tuple[Tensor, dict[str, Tensor | None]]:
    values = case.values()
    rest = list(values.values())[3:12]
    out = op(*turn, *rest, case.q.shape[1], EPS, case.sm_scale, case.max_query_len, case.window, case.soft_cap)
    return out, {name: values[name] for name in CACHES}


def same(case: AttentionCase, module, norm_dtype: torch.dtype | None, scaled: bool, values: str) -> None:
    """The two Triton kernels' bits; and the references' numbers, from caches whose last bits may differ.

    Norms of values are the reference's in both, so there the last bits may differ, too.
    """
    turn = turning(case, norm_dtype, scaled, values)
    out, caches = in_one(module.rotary_attention, case, turn)
    expected, expected_caches = in_two_ops(triton_rowwise.rope, module.paged_attention, case, turn)
    if values != "plain":
        torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
        written = caches["v_cache"][1:], expected_caches["v_cache"][1:]
        torch.testing.assert_close(*written, atol=case.tolerance, rtol=case.tolerance, equal_nan=True)
        assert torch.equal(caches["k_cache"][1:].view(torch.uint8), expected_caches["k_cache"][1:].view(torch.uint8))
        return
    assert torch.equal(out, expected)
    same_caches(caches, expected_caches)
    reference, _ = in_two_ops(rope_reference, paged_attention_reference, case, turn)
    torch.testing.assert_close(out, reference, atol=2 * case.tolerance, rtol=2 * case.tolerance)


MODULES = {"triton_attention": triton_attention, "triton_exact": triton_exact}


def run(
    kernels: str = "triton_attention", norm_dtype=None, scaled: bool = False, values: str = "plain", **kwargs
) -> None:
    same(make_case(**{**STEP, **kwargs}), MODULES[kernels], norm_dtype, scaled, values)


def reads_what_another_layer_wrote(kernels: str, **kwargs) -> None:
    """Queries alone see the keys of the step that are in the cache, and nothing is written."""
    op, case = MODULES[kernels].rotary_attention, make_case(**{**STEP, **kwargs})
    qkv, cos_sin, q_norm, k_norm, *rest = turning(case, FP32, False)
    expected, caches = in_one(op, case, (qkv, cos_sin, q_norm, k_norm, *rest))
    assert qkv is not None
    queries = qkv[:, : case.q.shape[1] * case.q.shape[2]]
    out, after = in_one(op, replace(case, **caches), (queries, cos_sin, q_norm, None, *rest))
    assert torch.equal(out, expected)
    same_caches(after, caches)


def a_decode(**kwargs) -> None:
    run(query_lens=[1] * 3, context_lens=[140, 0, 33], padding_query_lens=[1], trailing_rows=0, **kwargs)


INTERPRETED = {
    "plain": functools.partial(run, dtype=BF16),
    "norms": functools.partial(run, dtype=BF16, norm_dtype=BF16, num_heads=12),
    "float32-norms-h80": functools.partial(run, dtype=FP16, norm_dtype=FP32, head_dim=80),
    "scaled-queries": functools.partial(run, dtype=BF16, scaled=True, head_dim=40, num_heads=6, num_kv_heads=3),
    "float32": functools.partial(a_decode, dtype=FP32, norm_dtype=FP32, scaled=True),
    "normed-values": functools.partial(run, dtype=BF16, norm_dtype=FP32, values="normed", head_dim=48),
    "keys-are-values": functools.partial(run, dtype=FP16, norm_dtype=FP32, values="keys", num_heads=2, num_kv_heads=1),
    "exact-keys-are-values": functools.partial(
        a_decode, dtype=BF16, norm_dtype=FP32, values="keys", kernels="triton_exact"
    ),
    "shared": functools.partial(reads_what_another_layer_wrote, "triton_attention", dtype=BF16, num_heads=12),
    "shared-int8": functools.partial(
        reads_what_another_layer_wrote, "triton_attention", dtype=BF16, kv_dtype=torch.int8
    ),
    "shared-exact": functools.partial(reads_what_another_layer_wrote, "triton_exact", dtype=BF16, head_dim=40),
    "exact": functools.partial(a_decode, dtype=BF16, norm_dtype=BF16, kernels="triton_exact"),
}
for name, kv_dtype in KV_DTYPES.items():
    scaled = {"norm_dtype": BF16, "scaled": True, "num_heads": 6}
    INTERPRETED[f"{name}-h96"] = functools.partial(a_decode, dtype=BF16, kv_dtype=kv_dtype, head_dim=96)
    INTERPRETED[f"{name}-scaled"] = functools.partial(a_decode, dtype=BF16, kv_dtype=kv_dtype, **scaled)


# ``new``: values are "plain" or "normed", or there are "none", nor keys: the cache has another layer's.
WRITES = {
    f"sm_{10 * capability[0]}-h{head_dim}-{new}-{kv_dtype}": (capability, head_dim, new, kv_dtype)
    for capability in ahead_of_time.SM_MEMORY
    for head_dim in (128, 256, 512)
    for new in ("plain", "normed", "none")
    for kv_dtype in (None, torch.int8)
}
SOME_WRITES = ["sm_90-h128-plain-torch.int8", "sm_80-h128-none-None", "sm_100-h128-normed-None"]


@pytest.mark.parametrize("name", marked(WRITES, SOME_WRITES))
def test_compiles_without_spills(name: str) -> None:
    capability, head_dim, new, kv_dtype = WRITES[name]
    caches = [empty(1024, 8, 16, head_dim, dtype=kv_dtype or BF16) for _ in range(2)]
    scales = [floats(1024, 8, 16) if kv_dtype else None for _ in range(2)]
    norm, cos_sin = empty(head_dim, dtype=BF16 if new == "plain" else FP32), floats(32, head_dim)
    v_norm = floats(head_dim) if new == "normed" else None
    qkv, k_norm = empty(32, (32 if new == "none" else 48) * head_dim), None if new == "none" else norm
    turn, k, v = triton_attention.to_turn(qkv, cos_sin, norm, k_norm, v_norm, None, 32, 8, head_dim, EPS)
    assert (k is None) == (v is None) == (new == "none")
    with ahead_of_time.recorded(capability, triton_attention) as recorded:
        indices = integers(32), integers(33)
        triton_attention.write_new_rows(k, v, *caches, *scales, *indices, turn.q, integers(32 * 8), turn)
    (launch,) = recorded
    ahead_of_time.without_spills(launch, capability)


# ---- on the CPU, and what is refused --------------------------------------------------------------------------------


def on_cpu(case: AttentionCase, turn: tuple, **changed) -> Tensor:
    values = case.values()
    keys = Keys(**{name: values[name] for name in Keys._fields})
    given = {name: values[name] for name in ("max_query_len", "window", "soft_cap")} | changed
    kind = AttentionSpec(case.q.shape[1], case.k.shape[1], case.q.shape[2], values["sm_scale"], **given)
    return rotary_attention(turn[0], Turn(*turn[1:], EPS), keys, kind)


@pytest.mark.parametrize("scaled", [False, True])
def test_on_a_cpu_it_is_its_two_ops(scaled: bool) -> None:
    # Nothing is in the cache yet: the kernel's order of elements in a block is its own.
    case = make_case([3, 1, 17], [0, 0, 0], trailing_rows=2, dtype=BF16)
    turn = turning(case, BF16, scaled)

    def attention(*args) -> Tensor:
        sm_scale, max_query_len, window, soft_cap, _ = args[12:]
        return paged_attention(
            *args[:11], sm_scale=sm_scale, max_query_len=max_query_len, window=window, soft_cap=soft_cap
        )

    assert torch.equal(on_cpu(case, turn), in_two_ops(rope, attention, case, turn)[0])


def test_tensors_of_other_shapes_are_refused() -> None:
    case = make_case([1, 1], [3, 4], dtype=BF16)
    qkv, cos_sin, q_norm, k_norm, v_norm, scale = turning(case, BF16, True, "normed")

    def refused(match: str, *turn) -> None:
        with pytest.raises(ValueError, match=match):
            triton_attention.to_turn(*turn, 4, 2, 64, EPS)

    refused("columns", qkv[:, :-64], cos_sin, q_norm, k_norm, v_norm, scale)
    refused("cos_sin must be", qkv, cos_sin[:1], q_norm, k_norm, v_norm, scale)
    refused("both be tensors", qkv, cos_sin, q_norm, None, v_norm, scale)
    refused("must be None where qkv has no keys", qkv[:, : 4 * 64], cos_sin, q_norm, None, v_norm, scale)
    refused("query_scale must be", qkv, cos_sin, q_norm, k_norm, v_norm, scale.float())


ORDINARY = ["float32", "keys-are-values", "exact", "fp8-scaled"]
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
