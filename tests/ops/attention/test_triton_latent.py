"""Latent attention in Triton: interpreted against the reference, and compiled ahead of time.

As in ``test_triton_attention.py``, the interpreted cases run in one child process: this file as a program, with
TRITON_INTERPRET=1. It reads a line, a JSON list of names, and prints one JSON object: name of a case -> its traceback,
or an empty string.
"""

import functools
import itertools
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.attention.latent_tiles import LatentTile, latent_splits, latent_tiles
from compiled_llm.ops.attention.rotary_latent_attention import latent_decode_plan_reference
from tests.ops.attention.attention_cases import KV_DTYPES
from tests.ops.attention.latent_cases import CACHES, GRID, OF_TOKENS, LatentCase, alone, check, make_case, one_chunk

triton = pytest.importorskip("triton")

from compiled_llm.ops.attention import triton_latent  # noqa: E402
from compiled_llm.ops.rowwise import triton_rowwise  # noqa: E402
from tests.drawn import marked  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = KV_DTYPES["int8"], KV_DTYPES["fp8"]
ALL_KV_DTYPES = {"plain": None, **KV_DTYPES}
EPS = 1e-6
EXACT = functools.partial(triton_latent.latent_attention, exact=True)
OPS = {"fast": triton_latent.latent_attention, "exact": EXACT}


def against_reference(name: str, how: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    check(make_case(**GRID[name], dtype=dtype, kv_dtype=kv_dtype), OPS[how])


def values_of(case: LatentCase) -> dict:
    return dict(zip((field.name for field in fields(case)), case.args(), strict=True))


def turning(case: LatentCase, scaled: bool) -> triton_latent.ToTurn:
    """What is still to be done with the queries and keys of a case."""
    rows, _, turned = case.q_turned.shape
    radians = torch.arange(rows)[:, None] * torch.linspace(0, 1, turned // 2)
    scale = (1 + torch.arange(rows)[:, None] / 8).to(case.q_turned.dtype) if scaled else None
    norm = torch.linspace(0.5, 1.5, case.latent.shape[2]).to(case.latent.dtype)
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


def same_caches(case: LatentCase, one: dict, other: dict) -> None:
    for name in CACHES:
        if one[name] is not None:
            assert torch.equal(one[name][1:].view(torch.uint8), other[name][1:].view(torch.uint8)), name


def turned(how: str, scaled: bool = False, **kwargs) -> None:
    """As what three ops give, to the bit."""
    case = make_case([3, 1, 20, 1], [140, 300, 20, 0], padding_query_lens=[0, 1], trailing_rows=2, **kwargs)
    turn = turning(case, scaled)
    values, expected = values_of(case), values_of(turned_before(case, turn))
    out = OPS[how](*values.values(), turn=turn)
    assert torch.equal(out, OPS[how](*expected.values()))
    same_caches(case, values, expected)


def plan_of(case: LatentCase, table_rows: Tensor | None, op) -> tuple[Tensor, Tensor]:
    sizes = case.q_latent.shape[1], case.q_latent.shape[2], case.q_latent.element_size(), case.k_cache.element_size()
    table_tokens = case.block_table.shape[1] * case.k_cache.shape[2]
    return op(case.slot_mapping, table_rows, case.query_start_loc, case.seq_lens, table_tokens, case.window, *sizes)


def decode_case(context_lens: list[int], *, without_row: int = 0, **kwargs) -> LatentCase:
    """One query a request, and requests without one, whose rows come last."""
    empty = {"padding_query_lens": [0] * without_row, "trailing_rows": without_row}
    return make_case([1] * len(context_lens), context_lens, **empty, **kwargs)


def decoded(case: LatentCase, turn: triton_latent.ToTurn, tile: LatentTile | None = None) -> tuple[Tensor, dict]:
    """By the kernel of decodes, whose requests have other places in the table; and the caches."""
    requests = len(case.seq_lens)
    rows = torch.randperm(requests + 3)[:requests].int()
    table = torch.full((requests + 3, case.block_table.shape[1]), 2**30, dtype=torch.int32)
    table[rows.long()] = case.block_table
    tasks, expected = (
        plan_of(case, rows, op)[0] for op in (triton_latent.latent_decode_plan, latent_decode_plan_reference)
    )
    count = int(expected[0, 0])
    assert int(tasks[0, 0]) == count
    assert torch.equal(tasks[1 : 1 + count, :7], expected[1 : 1 + count, :7])
    values = values_of(case)
    caches = triton_latent.Caches(*(values[name] for name in CACHES))
    new = values["q_latent"], values["q_turned"], values["k_turned"], values["latent"]
    out = triton_latent.latent_decode_attention(*new, turn, caches, table, tasks, case.sm_scale, case.window, tile=tile)
    return out, values


def decode(context_lens: list[int], scaled: bool = False, **kwargs) -> None:
    """Against the reference after rope and norm, with the same bits in the cache."""
    case = decode_case(context_lens, **kwargs)
    turn = turning(case, scaled)
    before = turned_before(case, turn)
    found = []

    def op(*args: Tensor) -> Tensor:
        out, values = decoded(case, turn)
        found.append(values)
        for name, given in zip((field.name for field in fields(case)), args, strict=True):
            if name in CACHES and given is not None:
                given.copy_(values[name])
        return out

    check(before, op)


def any_number_of_programs(**kwargs) -> None:
    case = decode_case([600, 300, 1500], dtype=BF16, num_heads=40, latent_dim=64, **kwargs)
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
    table = case.block_table.clone()
    for request, tokens in ((1, 1024), (2, 512)):
        table[request, : tokens // 16] = table[0, : tokens // 16]
    case = replace(case, block_table=table)
    together = check(case, OPS[how])
    for request in range(4):
        own = alone(case, request)
        if how == "fast":
            rest = replace(case, query_start_loc=torch.zeros_like(case.query_start_loc), seq_lens=case.seq_lens.clone())
            rest.query_start_loc[request + 1 :] = own.query_start_loc[1]
            names = OF_TOKENS
            own = replace(rest, **{name: getattr(own, name) for name in names})
        assert torch.equal(OPS[how](*own.args())[: case.rows(request).stop - case.rows(request).start],
                           together[case.rows(request)])  # fmt: skip


def chunks_change_no_bit(**kwargs) -> None:
    case = make_case([560], [0], latent_dim=32, turned_dim=16, **kwargs)
    whole = EXACT(*case.args())
    caches, start, parts = case.args()[4:8], 0, []
    for length in (1, 200, 30, 65, 21, 1, 2, 220, 1, 3, 16):
        args = list(one_chunk(case, start, length).args())
        args[4:8] = caches
        parts.append(EXACT(*args))
        start += length
    assert start == 560
    assert torch.equal(torch.cat(parts), whole)


SOME = {"bf16": (BF16, None), "int8": (BF16, INT8), "fp8": (FP16, FP8), "fp32": (FP32, None), "fp32-int8": (FP32, INT8)}
LENGTHS = [0, 33, 700]
CASES = {
    **{
        f"{how}-{name}-{kind}": functools.partial(against_reference, name, how, *dtypes)
        for how, name, (kind, dtypes) in itertools.product(OPS, GRID, SOME.items())
    },
    **{
        f"decode-c{size}-n{heads}-{kind}": functools.partial(
            decode, LENGTHS, latent_dim=size, turned_dim=turned, num_heads=heads, dtype=dtypes[0], kv_dtype=dtypes[1]
        )
        for size, turned, heads in ((512, 64, 16), (64, 16, 128), (256, 64, 32), (40, 12, 5), (48, 16, 1))
        for kind, dtypes in SOME.items()
    },
    "decode-scaled": functools.partial(decode, LENGTHS, scaled=True, dtype=BF16),
    "decode-alone": functools.partial(decode, [1800], dtype=BF16, num_heads=20),
    "decode-many": functools.partial(decode, [*range(1, 340, 17)], dtype=BF16, without_row=12, latent_dim=16),
    "decode-window": functools.partial(decode, [600, 290, 100, 20], dtype=BF16, window=70, without_row=1),
    "decode-window-int8": functools.partial(decode, [600, 290], dtype=BF16, window=300, kv_dtype=INT8),
    "decode-only-padding": functools.partial(decode, [], dtype=BF16, without_row=3),
    "decode-blocks-of-one": functools.partial(decode, [1, 15, 200], dtype=BF16, block_size=1),
    "any-number-of-programs": any_number_of_programs,
    **{
        f"turned-{how}-{kind}": functools.partial(turned, how, dtype=dtypes[0], kv_dtype=dtypes[1])
        for how, (kind, dtypes) in itertools.product(OPS, SOME.items())
    },
    "turned-fast-scaled": functools.partial(turned, "fast", scaled=True, dtype=BF16, num_heads=7),
    "turned-fast-wide": functools.partial(turned, "fast", dtype=BF16, num_heads=40, latent_dim=512, turned_dim=64),
    **{
        f"bad-latent-{how}-{kind}": functools.partial(a_bad_latent_is_its_own_requests_affair, how, kv_dtype)
        for how, (kind, kv_dtype) in itertools.product(OPS, ALL_KV_DTYPES.items())
    },
    **{
        f"neighbours-{how}-{kind}": functools.partial(neighbours_change_no_bit, how, dtype=dtype, kv_dtype=kv_dtype)
        for how, (kind, (dtype, kv_dtype)) in itertools.product(OPS, SOME.items())
    },
    "neighbours-exact-window": functools.partial(neighbours_change_no_bit, "exact", dtype=BF16, window=100),
    **{
        f"chunks-{kind}": functools.partial(chunks_change_no_bit, dtype=dtypes[0], kv_dtype=dtypes[1])
        for kind, dtypes in SOME.items()
    },
    "chunks-window": functools.partial(chunks_change_no_bit, dtype=BF16, window=100),
    "chunks-heads": functools.partial(chunks_change_no_bit, dtype=BF16, num_heads=40),
}  # fmt: skip

# The others: battery.
ORDINARY = (
    "fast-mixed-int8", "fast-odd-sizes-fp8", "fast-only-padding-bf16", "exact-mixed-bf16", "decode-c40-n5-int8",
    "turned-fast-scaled", "bad-latent-fast-int8",
)  # fmt: skip


@pytest.mark.parametrize("name", marked(CASES, ORDINARY))
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


@pytest.mark.gpu
@pytest.mark.parametrize("how", OPS)
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("name", GRID)
def test_on_a_gpu(name: str, kind: str, how: str) -> None:
    dtype, kv_dtype = SOME[kind]
    check(make_case(**GRID[name], dtype=dtype, kv_dtype=kv_dtype, device="cuda"), OPS[how])


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


def launches(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kind: str, num_heads: int, latent_dim: int,
    kv_dtype: torch.dtype | None,
) -> list[tuple]:  # fmt: skip
    """What a decode of 8 requests or a chunk of 512 tokens launches, from tensors without storage."""
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_latent)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, turned_dim = 8 if kind == "decode" else 512, 64
    heads = empty(tokens, num_heads, 128 + turned_dim, dtype=BF16)
    down = empty(tokens, 1, latent_dim + turned_dim, dtype=BF16)
    new = (
        empty(tokens, num_heads, latent_dim, dtype=BF16),
        heads[..., 128:],
        down[..., latent_dim:],
        down[..., :latent_dim],
    )
    turn = triton_latent.ToTurn(empty(tokens, turned_dim, dtype=FP32), empty(latent_dim, dtype=BF16), None, EPS)
    caches = [empty(1024, 1, 16, size, dtype=kv_dtype or BF16) for size in (turned_dim, latent_dim)]
    scales = [empty(1024, 1, 16, dtype=FP32) if kv_dtype else None for _ in range(2)]
    if kind == "decode":
        made = triton_latent.Caches(*caches, *scales)
        triton_latent.latent_decode_attention(*new, turn, made, empty(64, 2048), empty(1 + 8 * 64, 8), 0.1, 0)
    else:
        step = empty(tokens), empty(8, 2048), empty(9), empty(8)
        options = {"exact": kind == "exact", "turn": turn}
        triton_latent.latent_attention(*new, *caches, *scales, *step, 0.1, tokens, 0, **options)
    monkeypatch.undo()
    return recorded


SHARED_MEMORY = {(8, 0): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
COMPILED = {
    f"sm_{10 * capability[0]}-{kind}-n{heads}-c{size}-{name}": (capability, kind, heads, size, kv_dtype)
    for capability in SHARED_MEMORY
    for kind in ("decode", "chunk", "exact")
    for heads, size in ((16, 512), (128, 512), (32, 256))
    for name, kv_dtype in ALL_KV_DTYPES.items()
    if kv_dtype != FP8 or capability != (8, 0)
}
SAMPLE = ("sm_90-decode-n16-c512-plain", "sm_90-chunk-n128-c512-plain")


@pytest.mark.parametrize("name", marked(COMPILED, SAMPLE))
def test_kernels_compile_without_spills(
    name: str, child: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And all programs of the grid run at once."""
    capability, kind, heads, size, kv_dtype = COMPILED[name]
    tiles = latent_tiles(size, 2, 1 if kv_dtype else 2, capability)
    for kernel, args, kwargs in launches(monkeypatch, capability, kind, heads, size, kv_dtype):
        binary, registers = ahead_of_time.without_spills((kernel, args, kwargs), capability, tmp_path)
        if kernel.__name__ in ("latent_attention_kernel", "latent_decode_attention_kernel"):
            programs = getattr(tiles, kind).programs_per_sm
            assert programs * (binary.metadata.shared + 1024) <= SHARED_MEMORY[capability] + 1024
            assert programs * kwargs["num_warps"] * -(-registers // 8) * 256 <= ahead_of_time.REGISTERS


# ---- on the CPU -----------------------------------------------------------------------------------------------------


def test_splits_follow_from_the_size_of_the_step() -> None:
    tile = LatentTile(64, 32, 8, 2, 1)
    assert latent_splits(tile, 1, 16, 132).most == 64
    assert latent_splits(tile, 1, 1024, 132).most == 8
    assert latent_splits(tile, 8, 128, 132) == (128, 33)
    assert latent_splits(tile, 256, 16, 132) == (128, 8)


def test_latents_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="latent_dim 513 is not supported by the GPU kernels: at most 512"):
        latent_tiles(513, 2, 2, (9, 0))


if __name__ == "__main__":
    torch.manual_seed(0)
    interpreted.run(CASES)
