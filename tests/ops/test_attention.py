"""Paged attention: the reference against plain attention, and the CPU kernel against the reference."""

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.attention import paged_attention, paged_attention_reference
from tests.ops.attention_cases import TOLERANCE, AttentionCase, check, grid, make_case

CASES = dict(grid())
MIXED = {"query_lens": [1, 40, 1], "context_lens": [700, 33, 0], "num_heads": 8, "padding_query_lens": [1, 2]}
# One of each kind of shape: few rows, many, head_dim that fills no register, padding; long enough to be cut in pieces.
EVERY_SET = [
    "decode-gqa1-h64",
    "decode-gqa4-h128",
    "decode-gqa7-h256",
    "mixed-gqa5-h64",
    "mixed-h40",
    "mixed-h80",
    "decode-block16",
    "prompt2000-block16",
    "everything",
    "everything-scaled",
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    module = native.load("attention_cpu")
    if module is None:
        pytest.skip("no C++ compiler")
    return module


@pytest.fixture
def instruction_set(kernels: ModuleType, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in kernels.instruction_sets():
        pytest.skip(f"this machine has no {request.param}")
    kernels.select_instruction_set(request.param)
    yield request.param
    kernels.select_instruction_set(kernels.instruction_sets()[0])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def plain_attention(case: AttentionCase) -> Tensor:
    """By F.scaled_dot_product_attention, in float64, request by request and slot by slot: no code of ours."""
    block_size = case.k_cache.shape[2]
    flat = [cache.double().transpose(1, 2).flatten(0, 1) for cache in (case.k_cache, case.v_cache)]
    for cache, new in zip(flat, (case.k, case.v), strict=True):
        cache[case.slot_mapping.long()] = new.double()
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        rows = case.rows(request)
        if seq_len == 0:
            continue
        slots = [int(case.block_table[request, p // block_size]) * block_size + p % block_size for p in range(seq_len)]
        keys, values = (cache[slots].transpose(0, 1) for cache in flat)
        query_len = rows.stop - rows.start
        mask = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        attended = F.scaled_dot_product_attention(
            case.q[rows].double().transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=case.sm_scale,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("name", CASES)
def test_reference_is_attention(name: str) -> None:
    case = make_case(**CASES[name])
    expected = plain_attention(case)
    torch.testing.assert_close(paged_attention_reference(*case.args()).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str, dtype: torch.dtype) -> None:
    check(make_case(**CASES[name], dtype=dtype), torch.ops.compiled_llm.paged_attention)


@pytest.mark.parametrize("instruction_set", ["avx512", "avx2", "portable"], indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", EVERY_SET)
def test_every_instruction_set(name: str, dtype: torch.dtype, instruction_set: str) -> None:
    check(make_case(**CASES[name], dtype=dtype), torch.ops.compiled_llm.paged_attention)


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(kernels: ModuleType, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    requests, kv_heads = draw(1, 6), draw(1, 3)
    case = make_case(
        [draw(1, 3) if draw(0, 1) else draw(1, 90) for _ in range(requests)],
        [draw(0, 1200) if draw(0, 3) == 0 else draw(0, 70) for _ in range(requests)],
        num_heads=kv_heads * draw(1, 9),
        num_kv_heads=kv_heads,
        head_dim=8 * draw(1, 20),
        block_size=draw(1, 33),
        dtype=list(TOLERANCE)[seed % 3],
        padding_query_lens=[1] * draw(0, 2),
        trailing_rows=draw(0, 3),
        fused_qkv=bool(draw(0, 1)),
        seed=seed,
    )
    check(case, kernels.paged_attention)


def test_unused_table_entries_are_not_read(kernels: ModuleType) -> None:
    check(make_case(**MIXED, unused_table_entry=2**30), kernels.paged_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_neighbours_change_no_bit(kernels: ModuleType, kind: str, dtype: torch.dtype) -> None:
    query_lens, context_lens = (
        ([1] * 4, [1300, 5, 511, 60]) if kind == "decode" else ([1, 70, 1, 9], [1300, 513, 64, 0])
    )
    case = make_case(query_lens, context_lens, num_heads=8, head_dim=128, dtype=dtype, trailing_rows=3)
    together = kernels.paged_attention(*case.args())
    for request in range(len(query_lens)):
        rows = case.rows(request)
        alone = replace(
            case,
            q=case.q[rows],
            k=case.k[rows],
            v=case.v[rows],
            slot_mapping=case.slot_mapping[rows],
            block_table=case.block_table[request : request + 1],
            query_start_loc=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            seq_lens=case.seq_lens[request : request + 1],
        )
        assert torch.equal(kernels.paged_attention(*alone.args()), together[rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 2, 5])
def test_chunking_changes_no_bit(kernels: ModuleType, group: int, dtype: torch.dtype) -> None:
    """A prompt in one step, in chunks, or token by token at its end: the same output for every token."""
    case = make_case([700], [0], num_heads=2 * group, head_dim=64, dtype=dtype)
    whole = kernels.paged_attention(*case.args())
    caches = case.k_cache.clone(), case.v_cache.clone()
    start, parts = 0, []
    for length in (1, 510, 65, 120, 1, 1, 2):
        rows = slice(start, start + length)
        chunk = replace(
            case,
            q=case.q[rows],
            k=case.k[rows],
            v=case.v[rows],
            slot_mapping=case.slot_mapping[rows],
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([start + length], dtype=torch.int32),
        )
        args = list(chunk.args())
        args[3:5] = caches
        parts.append(kernels.paged_attention(*args))
        start += length
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["decode-block16", "decode-fused-padding", "everything", "prompt2000-block16"])
def test_threads_change_no_bit(kernels: ModuleType, name: str, dtype: torch.dtype) -> None:
    case = make_case(**CASES[name], dtype=dtype)
    with_two = check(case, kernels.paged_attention)
    torch.set_num_threads(1)
    assert torch.equal(check(case, kernels.paged_attention), with_two)


@pytest.mark.parametrize("name", ["decode-gqa4-h64", "everything"])
def test_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.compiled_llm.paged_attention.default, make_case(**CASES[name]).args())


def test_public_function_and_op_agree() -> None:
    case = make_case(**MIXED)
    *tensors, sm_scale, max_query_len = case.args()
    out = paged_attention(*tensors, sm_scale=sm_scale, max_query_len=max_query_len)
    assert torch.equal(out, torch.ops.compiled_llm.paged_attention(*case.args()))


def test_no_requests(kernels: ModuleType) -> None:
    check(make_case([], [], trailing_rows=2), kernels.paged_attention)
    check(make_case([], []), kernels.paged_attention)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(45, 8, 64, dtype=torch.float64)}, ValueError, "float32, bfloat16 or float16"),
        ({"k": torch.zeros(45, 2, 64, dtype=torch.bfloat16)}, ValueError, "k must have the dtype of q"),
        ({"v": torch.zeros(45, 2, 32)}, ValueError, "v must have shape"),
        ({"q": torch.zeros(45, 7, 64)}, ValueError, "multiple of the number of KV heads"),
        ({"q": torch.zeros(45, 8, 128)[..., ::2]}, ValueError, "last stride of q"),
        ({"seq_lens": torch.zeros(5, dtype=torch.int64)}, ValueError, "seq_lens must be int32"),
        ({"slot_mapping": torch.full((45,), -1, dtype=torch.int32)}, IndexError, "slot_mapping"),
        ({"seq_lens": torch.full((5,), 10**6, dtype=torch.int32)}, IndexError, "room for"),
        ({"block_table": torch.full((5, 46), 10**6, dtype=torch.int32)}, IndexError, "block_table"),
        ({"query_start_loc": torch.arange(1, 7, dtype=torch.int32)}, IndexError, "start at 0"),
    ],
)
def test_bad_arguments_are_refused(
    kernels: ModuleType, change: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    case = make_case(**MIXED)
    with pytest.raises(error, match=message):
        kernels.paged_attention(*replace(case, **change).args())


def test_unknown_instruction_set(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="not one of this machine's"):
        kernels.select_instruction_set("mmx")
