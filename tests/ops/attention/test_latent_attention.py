"""Latent attention: the reference against attention over expanded heads, and the CPU kernel against the reference."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from compiled_llm.ops import native
from compiled_llm.ops.attention.latent_attention import latent_attention, latent_attention_reference
from compiled_llm.ops.kernel_build import isas_of
from tests.drawn import cases, drawn
from tests.ops.attention.attention_cases import (
    ALL_KV_DTYPES,
    CACHES,
    TOLERANCE,
    alone,
    check,
    in_chunks,
    with_shared_prefixes,
)
from tests.ops.attention.cpu_kernel import Attend, attend_on
from tests.ops.attention.latent_cases import GRID, make_case
from tests.ops.instruction_sets import ordinary_sets, skip_without

OP = "latent_attention_cpu"
EXACT = pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window"),
    [
        (torch.float32, None, 0),
        (torch.float32, torch.int8, 0),
        (torch.bfloat16, None, 0),
        (torch.bfloat16, None, 100),
        (torch.bfloat16, torch.int8, 0),
        (torch.bfloat16, torch.float8_e4m3fn, 0),
        (torch.float16, None, 0),
    ],
    ids=str,
)


def test_reference_is_attention_over_expanded_heads() -> None:
    """Keys and values made from the latents, head by head, in float64 by torch."""
    heads, latent_dim, turned_dim, key_dim, value_dim, length = 3, 24, 8, 10, 7, 33
    case = make_case([length], [0], num_heads=heads, latent_dim=latent_dim, turned_dim=turned_dim)
    up_k, up_v = torch.randn(heads, latent_dim, key_dim).double(), torch.randn(heads, value_dim, latent_dim).double()
    q = torch.randn(length, heads, key_dim).double()
    latents, turned = case.latent[:, 0].double(), case.k_turned.double()
    keys = torch.cat([torch.einsum("tc,nck->tnk", latents, up_k), turned.expand(-1, heads, -1)], -1)
    values = torch.einsum("tc,nvc->tnv", latents, up_v)
    queries = torch.cat([q, case.q_turned.double()], -1)
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (queries, keys, values)), is_causal=True, scale=case.sm_scale
    )[0].transpose(0, 1)
    args = list(case.args())
    args[0] = torch.einsum("tnk,nck->tnc", q, up_k).float()
    out = torch.einsum("tnc,nvc->tnv", latent_attention_reference(*args).double(), up_v)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


_KERNEL = {f"{name}-{kv_dtype}": (name, kv_dtype) for name in GRID for kv_dtype in ALL_KV_DTYPES}


@pytest.mark.parametrize(("name", "kv_dtype"), cases(_KERNEL, 24, _KERNEL))
def test_kernel(attend: Attend, name: str, kv_dtype: str) -> None:
    check(make_case(**GRID[name], dtype=torch.bfloat16, kv_dtype=ALL_KV_DTYPES[kv_dtype]), attend)


_SETS = {"-".join(map(str, given)): given for given in itertools.product(GRID, TOLERANCE, isas_of(OP), ALL_KV_DTYPES)}
_SET_VALUES = {
    key: (name, f"{dtype} {isa} {kv}") for key, (name, dtype, isa, kv) in _SETS.items() if isa in ordinary_sets(OP)
}
_SOME = drawn(_SET_VALUES, 30)


@pytest.mark.parametrize(
    ("name", "dtype", "isa", "kv_dtype"),
    [pytest.param(*_SETS[key], id=key, marks=() if key in _SOME else pytest.mark.battery) for key in _SETS],
)
def test_every_instruction_set(kernels: native.Kernels, name: str, dtype: torch.dtype, isa: str, kv_dtype: str) -> None:
    skip_without(kernels, isa)
    check(make_case(**GRID[name], dtype=dtype, kv_dtype=ALL_KV_DTYPES[kv_dtype]), attend_on(kernels, isa, latent=True))


@EXACT
@pytest.mark.parametrize("name", ["mixed", "odd-sizes"])
def test_blocks_that_lie_apart_change_no_bit(
    kernels: native.Kernels, name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int
) -> None:
    case, found = make_case(**GRID[name], dtype=dtype, kv_dtype=kv_dtype, window=window), []
    for in_rows in (False, True):
        values = case.values()
        attend = attend_on(kernels, latent=True, in_rows=in_rows)
        found.append([attend(*values.values()), *(values[name] for name in CACHES)])
    for apart, together in zip(*found, strict=True):
        assert (apart is together is None) or torch.equal(apart.view(torch.uint8), together.view(torch.uint8))


@EXACT
@pytest.mark.usefixtures("two_threads")
def test_neighbours_and_shared_prefixes_change_no_bit(
    attend: Attend, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int
) -> None:
    """The first two requests share two partitions, the third one."""
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "window": window, "num_heads": 16, "latent_dim": 64}
    case = make_case([1, 3, 1, 9], [1100, 1090, 600, 60], poison_before_window=False, **options)
    case = with_shared_prefixes(case, ((1, 0, 1024), (2, 0, 512)))
    together = check(case, attend)
    for request in range(4):
        assert torch.equal(attend(*alone(case, request).args()), together[case.rows(request)])


@EXACT
@pytest.mark.usefixtures("two_threads")
def test_chunks_and_threads_change_no_bit(
    attend: Attend, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int
) -> None:
    case = make_case([600], [0], num_heads=5, latent_dim=64, dtype=dtype, kv_dtype=kv_dtype, window=window)
    whole = attend(*case.args())
    torch.set_num_threads(1)
    assert torch.equal(in_chunks(case, (1, 480, 30, 65, 21, 1, 2), attend), whole)


def test_op_has_a_schema_that_holds() -> None:
    args = make_case(**GRID["mixed"]).args()
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.compiled_llm.latent_attention.default, args, test_utils=tests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_turned": torch.zeros(3, 16, 30)}, "k_turned must have shape"),
        ({"latent": torch.zeros(3, 2, 128)}, "latent must have shape"),
        ({"sm_scale": 0.0}, "sm_scale must be positive"),
        ({"slot_mapping": torch.tensor([0, 1, 10**6], dtype=torch.int32)}, "outside the cache"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_bad_arguments_are_refused(change: dict, message: str) -> None:
    case = replace(make_case(**GRID["decode"]), **change)
    *tensors, sm_scale, max_query_len, window, _ = case.args()
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        latent_attention(*tensors, sm_scale=sm_scale, max_query_len=max_query_len, window=window)
