"""Paged attention: the reference against plain attention, and the CPU kernel against the reference."""

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from compiled_llm.ops import native
from compiled_llm.ops.attention.paged_attention import paged_attention, paged_attention_reference
from compiled_llm.ops.kernel_build import isas_of
from tests.drawn import cases, drawn, marked, parts_of
from tests.ops.attention.attention_cases import (
    ALL_KV_DTYPES,
    KV_DTYPES,
    TOLERANCE,
    AttentionCase,
    check,
    grid,
    make_case,
)
from tests.ops.attention.cpu_kernel import Attend, every_set
from tests.ops.instruction_sets import ordinary_sets

OP = "attention_cpu"
CASES = dict(grid())
MIXED = {"query_lens": [1, 40, 1], "context_lens": [700, 33, 0], "num_heads": 8, "padding_query_lens": [1, 2]}
# One of each kind of shape: few rows, many, head_dim that fills no register, padding; long enough to be cut in pieces.
EVERY_SET = [
    "decode-gqa1-h64", "decode-gqa4-h128", "decode-gqa7-h256", "mixed-gqa5-h64", "mixed-h40", "mixed-h80",
    "decode-block16", "prompt2000-block16", "everything", "everything-scaled", "sinks-h64",
    "window-soft-cap-sinks-h80", "window-soft-cap-sinks-h128", "short-queries",
]  # fmt: skip


def plain_attention(case: AttentionCase) -> Tensor:
    """By torch, or for soft caps and sinks by transformers, in float64, request by request: no code of ours."""
    block_size = case.k_cache.shape[2]
    flat = [cache.double().transpose(1, 2).flatten(0, 1) for cache in (case.k_cache, case.v_cache)]
    for cache, new in zip(flat, (case.k, case.v), strict=True):
        cache[case.slot_mapping.long()] = new.double()
    group = case.q.shape[1] // case.k.shape[1]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        rows = case.rows(request)
        if seq_len == 0:
            continue
        slots = [int(case.block_table[request, p // block_size]) * block_size + p % block_size for p in range(seq_len)]
        keys, values = (cache[slots].transpose(0, 1)[None] for cache in flat)
        queries = case.q[rows].double().transpose(0, 1)[None]
        query_len = rows.stop - rows.start
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        if case.window:
            mask &= ~mask.tril(-case.window + seq_len - query_len)
        bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)[None, None]
        module = SimpleNamespace(num_key_value_groups=group, training=False, sinks=case.sinks)
        if case.sinks is not None:
            eager = modeling_gpt_oss.eager_attention_forward
            attended = eager(module, queries, keys, values, bias, case.sm_scale)[0].transpose(1, 2)
        elif case.soft_cap:
            eager = modeling_gemma2.eager_attention_forward
            options = {"scaling": case.sm_scale, "softcap": case.soft_cap}
            attended = eager(module, queries, keys, values, bias, **options)[0].transpose(1, 2)
        else:
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=case.sm_scale, enable_gqa=True
            )
        out[rows] = attended[0].transpose(0, 1)
    return out


_PLAIN = [name for name in CASES if "cap-sinks" not in name]  # what others compute too


@pytest.mark.parametrize("name", marked(_PLAIN, drawn(parts_of(_PLAIN), 20)))
def test_reference_is_attention(name: str) -> None:
    case = make_case(**CASES[name], poison_before_window=False)
    expected = plain_attention(case)
    torch.testing.assert_close(paged_attention_reference(*case.args()).double(), expected, atol=1e-5, rtol=1e-5)


_KERNEL = {f"{name}-{dtype}": (name, dtype, None) for name in CASES for dtype in TOLERANCE}
_KERNEL |= {
    f"{name}-{kv}": (name, torch.bfloat16, KV_DTYPES[kv]) for name in CASES for kv in KV_DTYPES if "2000" not in name
}
_KERNEL_VALUES = {key: (name, f"{dtype} {kv_dtype}") for key, (name, dtype, kv_dtype) in _KERNEL.items()}


@pytest.mark.parametrize(("name", "dtype", "kv_dtype"), cases(_KERNEL_VALUES, 50, _KERNEL))
def test_kernel(attend: Attend, name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    check(make_case(**CASES[name], dtype=dtype, kv_dtype=kv_dtype), attend)


_SETS = {
    "-".join(map(str, arguments)): arguments
    for arguments in itertools.product(EVERY_SET, TOLERANCE, isas_of(OP), ALL_KV_DTYPES)
}
# Each shape, and each instruction set with each pair of dtypes.
_SET_VALUES = {
    key: (name, f"{dtype} {isa} {kv}") for key, (name, dtype, isa, kv) in _SETS.items() if isa in ordinary_sets(OP)
}
_SOME = drawn(_SET_VALUES, 24)


@pytest.mark.parametrize(
    ("name", "dtype", "attend", "kv_dtype"),
    [pytest.param(*_SETS[key], id=key, marks=() if key in _SOME else pytest.mark.battery) for key in _SETS],
    indirect=["attend"],
)
def test_every_instruction_set(attend: Attend, name: str, dtype: torch.dtype, kv_dtype: str) -> None:
    check(make_case(**CASES[name], dtype=dtype, kv_dtype=ALL_KV_DTYPES[kv_dtype]), attend)


@pytest.mark.parametrize("seed", marked(map(str, range(36)), [*map(str, range(6))]))
def test_random_shapes(attend: Attend, seed: str) -> None:
    number = int(seed)
    generator = torch.Generator().manual_seed(number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    requests, kv_heads = draw(1, 6), draw(1, 3)
    case = make_case(
        [draw(1, 3) if draw(0, 1) else draw(1, 90) for _ in range(requests)],
        [draw(0, 1200) if draw(0, 3) == 0 else draw(0, 70) for _ in range(requests)],
        num_heads=kv_heads * draw(1, 9),
        num_kv_heads=kv_heads,
        head_dim=8 * draw(1, 20),
        block_size=16 * draw(1, 3) if draw(0, 1) else draw(1, 33),
        dtype=list(TOLERANCE)[number % 3],
        kv_dtype=list(ALL_KV_DTYPES.values())[number // 3 % 3],
        window=draw(1, 700) if draw(0, 2) == 0 else 0,
        soft_cap=float(draw(1, 30)) if draw(0, 2) == 0 else 0.0,
        sinks=draw(0, 2) == 0,
        padding_query_lens=[1] * draw(0, 2),
        trailing_rows=draw(0, 3),
        fused_qkv=bool(draw(0, 1)),
        seed=number,
    )
    check(case, attend)


LONG = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}


@functools.cache
def long_prompt(dtype: torch.dtype) -> tuple[AttentionCase, Tensor]:
    """And what attention in float32 makes of it."""
    exact = make_case([1024], [0], **LONG, dtype=dtype)
    names = ("q", "k", "v", "k_cache", "v_cache")
    wide = replace(exact, **{name: getattr(exact, name).float() for name in names})
    return exact, paged_attention_reference(*wide.args())


@pytest.mark.parametrize(("kv_dtype", "bar"), [("float32", 1e-6), ("bfloat16", 0.003), ("int8", 0.010), ("fp8", 0.04)])
@pytest.mark.parametrize("query_len", [pytest.param(1, marks=pytest.mark.battery), 64])
def test_error_against_attention_in_float32(attend: Attend, kv_dtype: str, bar: float, query_len: int) -> None:
    """Relative error, over normal data, of the whole way through the cache: a prompt written by the op, then read."""
    dtype = torch.float32 if kv_dtype == "float32" else torch.bfloat16
    exact, expected = long_prompt(dtype)
    case = make_case([1024], [0], **LONG, dtype=dtype, kv_dtype=KV_DTYPES.get(kv_dtype, dtype))
    case = replace(case, q=exact.q, k=exact.k, v=exact.v)
    last = {"q": case.q[-query_len:], "query_start_loc": torch.tensor([0, query_len], dtype=torch.int32)}
    args = case.args()
    attend(*args)  # writes all
    read = replace(
        case, **last, k=case.k[-query_len:], v=case.v[-query_len:], slot_mapping=case.slot_mapping[-query_len:]
    )
    out = attend(*read.args()[:3], *args[3:7], *read.args()[7:]).float()
    expected = expected[-query_len:]
    error = (out - expected).norm() / expected.norm()
    assert error < bar


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_odd_data(attend: Attend, kv_dtype: str) -> None:
    """Zeros and huge values are ordinary; what is no number spoils its own request alone, as without quantisation."""
    case = make_case([1, 20, 1], [40, 30, 100], kv_dtype=KV_DTYPES[kv_dtype])
    k, v = case.k.clone(), case.v.clone()
    k[0], v[3], v[21] = 0, 0, 1e30
    check(replace(case, k=k, v=v), attend)
    clean = attend(*replace(case, k=k, v=v).args())
    k[10, 0, 5], v[21, 1, 7] = float("nan"), float("inf")
    spoilt = replace(case, k=k, v=v)
    args = spoilt.args()
    out = attend(*args)
    assert torch.equal(out[0], clean[0])
    group = case.q.shape[1] // 2
    assert out[10:21, :group].isnan().all()  # the queries that see the key, in its KV head
    assert torch.equal(out[1:21, group:], clean[1:21, group:])
    assert out[21, group:].isnan().all()
    assert torch.equal(out[21, :group], clean[21, :group])
    for scale, token in ((args[5], 10), (args[6], 21)):
        block, offset = divmod(int(case.slot_mapping[token]), 16)
        assert scale[block, :, offset].isnan().sum() == 1


@every_set
def test_numbers_at_the_edges(attend: Attend) -> None:
    case = make_case([70], [0], head_dim=16, sm_scale=1.0)
    overflowing, nan, huge_cap = case.k.clone(), case.k.clone(), replace(case, soft_cap=1e6)
    overflowing[:64] = -3e38  # scores of -inf in the whole first tile
    first = replace(case, q=case.q.abs() + 1, k=overflowing)
    expected = paged_attention_reference(*first.args())
    torch.testing.assert_close(attend(*first.args())[64:], expected[64:], atol=1e-5, rtol=1e-5)
    nan[5].view(torch.int32).fill_(0x7FFFFFFF)  # a NaN with all bits set
    assert attend(*replace(case, k=nan).args())[5:].isnan().all()
    check(huge_cap, attend)


def test_unused_table_entries_are_not_read(attend: Attend) -> None:
    check(make_case(**MIXED, unused_table_entry=2**30), attend)


@pytest.mark.parametrize("query_lens", [[1], [20]])
def test_scores_of_minus_infinity_leave_all_weight_to_the_sink(attend: Attend, query_lens: list[int]) -> None:
    case = make_case(query_lens, [1200], dtype=torch.bfloat16, num_heads=8, sinks=True)
    case = replace(case, q=case.q.abs() + 0.1, k=torch.full_like(case.k, -torch.inf))
    case.k_cache.fill_(-torch.inf)
    assert torch.equal(attend(*case.args()), torch.zeros_like(case.q))


# opcheck itself cannot compare fp8
@pytest.mark.parametrize(("name", "kv_dtype"), [("decode-gqa4-h64", None), ("everything", torch.int8)])
def test_opcheck(name: str, kv_dtype: torch.dtype | None) -> None:
    case = make_case(**CASES[name], kv_dtype=kv_dtype)
    # In the CPU kernel's order the poison lies among the keys, and NaN is unequal to itself: it goes.
    names = ("k_cache", "v_cache") if kv_dtype is None else ("k_scale", "v_scale")
    case = replace(case, **{name: torch.nan_to_num(getattr(case, name), 1.0, 1.0, 1.0) for name in names})
    torch.library.opcheck(torch.ops.compiled_llm.paged_attention.default, case.args())


def test_public_function_and_op_agree() -> None:
    case = make_case(**MIXED, kv_dtype=torch.int8, window=50, soft_cap=3.0, sinks=True)
    *tensors, sinks, sm_scale, max_query_len, window, soft_cap, _ = case.args()
    options = {"sinks": sinks, "sm_scale": sm_scale, "window": window, "soft_cap": soft_cap}
    out = paged_attention(*tensors, max_query_len=max_query_len, **options)
    assert torch.equal(out, torch.ops.compiled_llm.paged_attention(*case.args()))


def test_no_requests(attend: Attend) -> None:
    check(make_case([], [], trailing_rows=2), attend)
    check(make_case([], []), attend)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(45, 8, 64, dtype=torch.float64)}, ValueError, "float32, bfloat16 or float16"),
        ({"k": torch.zeros(45, 2, 64, dtype=torch.bfloat16)}, ValueError, "k must have dtype float32"),
        ({"v": torch.zeros(45, 2, 32)}, ValueError, "v must have shape"),
        ({"q": torch.zeros(45, 7, 64)}, ValueError, "multiple of the number of KV heads"),
        ({"q": torch.zeros(45, 8, 128)[..., ::2]}, ValueError, "last stride of q"),
        ({"k_cache": torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16)}, ValueError, "k_cache must have the dtype of q"),
        ({"k_scale": torch.zeros(1)}, ValueError, "k_scale must be None"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have shape"),
        ({"window": -1}, ValueError, "window and soft_cap"),
        ({"sm_scale": 0.0}, ValueError, "sm_scale must be positive"),
        ({"seq_lens": torch.zeros(5, dtype=torch.int64)}, ValueError, "seq_lens must be int32"),
        ({"slot_mapping": torch.full((45,), -1, dtype=torch.int32)}, IndexError, "slot_mapping"),
        ({"seq_lens": torch.full((5,), 10**6, dtype=torch.int32)}, IndexError, "room for"),
        ({"block_table": torch.full((5, 46), 10**6, dtype=torch.int32)}, IndexError, "block_table"),
        ({"query_start_loc": torch.arange(1, 7, dtype=torch.int32)}, IndexError, "start at 0"),
    ],
)
def test_bad_arguments_are_refused(
    kernels: native.Kernels, change: dict[str, object], error: type[Exception], message: str
) -> None:
    case = make_case(**MIXED)
    with pytest.raises(error, match=message):
        kernels.run("paged_attention", *replace(case, **change).args())


def test_a_quantised_cache_needs_its_scales(kernels: native.Kernels) -> None:
    with pytest.raises(ValueError, match="v_scale is needed"):
        kernels.run("paged_attention", *replace(make_case(**MIXED, kv_dtype=torch.int8), v_scale=None).args())


def test_unknown_instruction_set(kernels: native.Kernels) -> None:
    with pytest.raises(ValueError, match="isa 'mmx' is unknown"):
        kernels.run("paged_attention", *make_case(**MIXED).args(), isa="mmx")
