"""Cases for the paged attention kernels, shared by the tests of every device.

A case is one call of the op: random requests in a randomly scattered cache whose every unused slot is poisoned with NaN
and infinities, so that a kernel which reads (or multiplies by zero) what it should not shows it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.paged_attention import paged_attention_reference

PADDING_BLOCK = 0  # padding tokens are written here; no request reads it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
# Over the same codes, whose numbers go up to 30; some kernels take a float32 query and the weights in 16 bits there.
QUANTISED_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 5e-3}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
ALL_KV_DTYPES = {"plain": None, **KV_DTYPES}
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


class Call:
    """What cases of paged and of latent attention have in common; their fields are the arguments in the op's order."""

    OF_TOKENS: ClassVar[tuple[str, ...]]
    """Arguments with a row for each token; the first one is queries."""
    REFERENCE: ClassVar[Callable[..., Tensor]]

    def values(self) -> dict[str, Any]:
        """The arguments by name, with fresh copies of the caches."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {name: None if values[name] is None else values[name].clone() for name in CACHES}

    def args(self) -> tuple:
        return tuple(self.values().values())

    @property
    def queries(self) -> Tensor:
        return getattr(self, self.OF_TOKENS[0])

    @property
    def tolerance(self) -> float:
        return (TOLERANCE if self.k_scale is None else QUANTISED_TOLERANCE)[self.queries.dtype]

    def rows(self, request: int) -> slice:
        """The rows of queries that belong to one request."""
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))

    def padding_rows(self) -> Tensor:
        """``[T]`` bool: rows of requests with no keys, and rows past the last request."""
        padding = torch.ones(len(self.queries), dtype=torch.bool, device=self.queries.device)
        for request, seq_len in enumerate(self.seq_lens.tolist()):
            padding[self.rows(request)] = seq_len == 0
        return padding


@dataclass(frozen=True)
class AttentionCase(Call):
    """All arguments of one call."""

    OF_TOKENS: ClassVar = ("q", "k", "v", "slot_mapping")
    REFERENCE: ClassVar = staticmethod(paged_attention_reference)

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sinks: Tensor | None
    sm_scale: float
    max_query_len: int
    window: int = 0
    soft_cap: float = 0.0
    ancestors: Tensor | None = None


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    sm_scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    poison_before_window: bool = True,
    max_query_len: int | None = None,
    padding_query_lens: Sequence[int] = (),
    trailing_rows: int = 0,
    fused_qkv: bool = False,
    unused_table_entry: int | None = None,
    seed: int = 0,
) -> AttentionCase:
    """A random call of the op.

    Args:
        query_lens: tokens of each request in this step.
        context_lens: tokens of each request already in the cache; its ``seq_lens`` is the sum of both.
        kv_dtype: ``dtype`` if not given, or int8 or float8_e4m3fn. Quantised rows then have sizes from 0.01 to 10, so
            that a scale that is lost or swapped shows.
        sm_scale: ``head_dim ** -0.5`` if not given.
        window, soft_cap: of the op.
        sinks: whether the heads have attention sinks.
        poison_before_window: whether the keys that no query sees any more are poison too.
        max_query_len: the longest of the queries if not given.
        padding_query_lens: rows of requests with ``seq_lens`` 0, which follow the real ones.
        trailing_rows: rows after ``query_start_loc[R]``.
        fused_qkv: ``q``, ``k``, ``v`` are views of one ``[T, (N + 2K) * H]`` tensor.
        unused_table_entry: the entries of ``block_table`` past a request's length: a poisoned block if not given.
        seed: everything is drawn on the CPU from this seed, so a case is the same on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    all_query_lens = [*query_lens, *padding_query_lens]
    seq_lens = [*(q + c for q, c in zip(query_lens, context_lens, strict=True)), *(0 for _ in padding_query_lens)]
    num_tokens = sum(all_query_lens) + trailing_rows

    # Every request gets its own blocks, scattered; as many blocks again, and some, stay free.
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = 2 * sum(blocks_of) + 4
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    free_block = order.pop()
    width = max(blocks_of, default=0) + 2
    unused = free_block if unused_table_entry is None else unused_table_entry
    block_table = torch.full((len(seq_lens), width), unused, dtype=torch.int32)
    for request, count in enumerate(blocks_of):
        block_table[request, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)

    poison = torch.tensor([float("nan"), float("inf"), float("-inf")])
    kv_dtype = kv_dtype or dtype
    quantised = kv_quant.is_quantised(kv_dtype)
    row_size = (lambda n: 10 ** (3 * torch.rand(n, num_kv_heads, 1, generator=generator) - 2)) if quantised else None
    caches: dict[str, Tensor | None] = dict.fromkeys(CACHES)
    slot_of = [
        block_table[request].long().repeat_interleave(block_size) * block_size + torch.arange(block_size).repeat(width)
        for request in range(len(seq_lens))
    ]
    for name in "kv":
        slots = poison[torch.randint(3, (num_blocks * block_size, 1, 1), generator=generator)]
        slots = slots.repeat(1, num_kv_heads, head_dim)
        for request, context_len in enumerate(context_lens):
            first = max(context_len - window + 1, 0) if window and poison_before_window else 0
            old = slot_of[request][first:context_len]
            slots[old] = torch.randn(len(old), num_kv_heads, head_dim, generator=generator)
            if row_size:
                slots[old] *= row_size(len(old))
        blocks = slots.view(num_blocks, block_size, num_kv_heads, head_dim).transpose(1, 2)
        if quantised:  # poison becomes codes of 0 under a scale of NaN: random codes, NaN among those of fp8, are worse
            codes, scale = kv_quant.quantise(blocks, kv_dtype)
            noise = torch.randint(256, codes.shape, dtype=torch.uint8, generator=generator)
            codes = torch.where(scale.isnan()[..., None], noise, codes.view(torch.uint8)).view(kv_dtype)
            caches[f"{name}_cache"], caches[f"{name}_scale"] = codes.to(device), scale.to(device)
        else:
            caches[f"{name}_cache"] = blocks.to(dtype).contiguous().to(device)

    slot_mapping = torch.full((num_tokens,), PADDING_BLOCK * block_size, dtype=torch.int32)
    starts = torch.tensor([0, *all_query_lens]).cumsum(0)
    for request, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        new = slot_of[request][context_len : context_len + query_len]
        slot_mapping[starts[request] : starts[request + 1]] = new.int()

    heads = [num_heads, num_kv_heads, num_kv_heads]
    qkv = torch.randn(num_tokens, sum(heads), head_dim, generator=generator)
    if row_size:
        qkv[:, num_heads:] *= torch.cat([row_size(num_tokens), row_size(num_tokens)], dim=1)
    q, k, v = qkv.to(dtype).to(device).split(heads, dim=1)
    if not fused_qkv:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return AttentionCase(
        q=q,
        k=k,
        v=v,
        **caches,
        slot_mapping=slot_mapping.to(device),
        block_table=block_table.to(device),
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        sinks=torch.randn(num_heads, generator=generator).to(device) if sinks else None,
        max_query_len=max(all_query_lens, default=1) if max_query_len is None else max_query_len,
        window=window,
        soft_cap=soft_cap,
    )


def step(query_lens: Sequence[int], context_lens: Sequence[int], **options: Any) -> dict[str, Any]:
    """Arguments of ``make_case``."""
    return {"query_lens": query_lens, "context_lens": context_lens, **options}


def grid() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and ``make_case`` arguments (all but dtype, device and seed) that every kernel must pass."""
    for group in (1, 4, 5, 7, 8):
        for head_dim in (64, 128, 256):
            heads = {"num_heads": 2 * group, "head_dim": head_dim}
            yield f"decode-gqa{group}-h{head_dim}", step([1, 1, 1], [0, 33, 130], **heads)
            yield f"mixed-gqa{group}-h{head_dim}", step([1, 19, 7], [47, 64, 0], **heads)
    for head_dim in (16, 40, 80, 96, 512):
        yield f"mixed-h{head_dim}", step([1, 37, 1], [70, 11, 0], head_dim=head_dim)
    for block_size in (1, 16, 32):
        lengths = sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 2000})
        ends = {"block_size": block_size, "padding_query_lens": [1, 1]}
        yield f"decode-block{block_size}", step([1] * len(lengths), [n - 1 for n in lengths], **ends)
        for length in lengths:
            yield f"prompt{length}-block{block_size}", step([length], [0], num_heads=2, block_size=block_size)
            chunk = step([block_size + 3], [length], block_size=block_size)
            yield f"chunk-after{length}-block{block_size}", chunk
    everything = step([1, 65, 1, 130, 2], [700, 0, 5, 530, 64], num_heads=8)
    yield "everything", {**everything, "padding_query_lens": [1, 3], "trailing_rows": 5, "fused_qkv": True}
    yield "everything-scaled", {**everything, "sm_scale": 0.3, "head_dim": 80, "fused_qkv": True}
    yield "loose-max-query-len", {**everything, "max_query_len": 512, "trailing_rows": 3}
    yield "decode-loose-max-query-len", step([1, 1], [40, 3], max_query_len=64)
    heads = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
    yield "decode-fused-padding", step([1, 1], [600, 1500], padding_query_lens=[1] * 6, fused_qkv=True, **heads)
    for head_dim in (64, 80, 96, 128, 256):
        for name, extra in (
            ("window", {"window": 70}),
            ("soft-cap", {"soft_cap": 1.5}),
            ("sinks", {"sinks": True}),
            ("window-soft-cap-sinks", {"window": 300, "soft_cap": 3.0, "sinks": True}),
        ):
            if head_dim in (64, 128) or name.endswith("cap-sinks"):
                sizes = {"head_dim": head_dim, "trailing_rows": 1}
                yield f"{name}-h{head_dim}", step([1, 9, 70, 1], [600, 290, 100, 20], **sizes, **extra)
    yield "window-of-one", step([1, 40], [530, 30], window=1, num_heads=8)
    yield "short-queries", step([2, 16, 3, 1, 8], [700, 1000, 255, 511, 0], num_heads=8)
    yield "only-padding", step([], [], padding_query_lens=[1, 1, 1], trailing_rows=2)


Case = TypeVar("Case", bound=Call)


def alone(case: Case, request: int) -> Case:
    """One request of a case by itself, its table no wider than it must be."""
    rows = case.rows(request)
    blocks = max(1, -(-int(case.seq_lens[request]) // case.k_cache.shape[2]))
    return replace(
        case,
        **{name: getattr(case, name)[rows] for name in case.OF_TOKENS},
        block_table=case.block_table[request : request + 1, :blocks].contiguous(),
        query_start_loc=case.query_start_loc[request : request + 2] - case.query_start_loc[request],
        seq_lens=case.seq_lens[request : request + 1],
        max_query_len=rows.stop - rows.start,
    )


def one_chunk(case: Case, start: int, length: int, **changes: Any) -> Case:
    """Some tokens of the only request of a case, which begins with it."""
    return replace(
        case,
        **{name: getattr(case, name)[start : start + length] for name in case.OF_TOKENS},
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=case.seq_lens.device),
        seq_lens=torch.tensor([start + length], dtype=torch.int32, device=case.seq_lens.device),
        **{"max_query_len": length, **changes},
    )


def in_chunks(case: Case, lengths: Sequence[int], op: Callable[..., Tensor]) -> Tensor:
    """The only request of a case in steps of so many tokens, each of which reads what those before it wrote."""
    caches, start, parts = {name: case.values()[name] for name in CACHES}, 0, []
    for length in lengths:
        parts.append(op(*(one_chunk(case, start, length).values() | caches).values()))
        start += length
    assert start == len(case.queries)
    return torch.cat(parts)


def with_shared_prefixes(case: Case, shared: Sequence[tuple[int, int, int]]) -> Case:
    """With the first tokens of a request's table those of another one's: (request, the other, tokens) each."""
    table = case.block_table.clone()
    for request, other, tokens in shared:
        blocks = tokens // case.k_cache.shape[2]
        table[request, :blocks] = table[other, :blocks]
    return replace(case, block_table=table)


def same_caches(given: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None]) -> None:
    """Bit for bit, so that the poison compares too. The padding block may have anything."""
    for name in CACHES:
        one, other = given[name], wanted[name]
        if one is not None:
            assert torch.equal(one[1:].view(torch.uint8), other[1:].view(torch.uint8)), f"{name} differs"


def check(case: Call, op: Callable[..., Tensor]) -> Tensor:
    """Run ``op`` (the arguments by position) and compare output and caches with the reference; returns the output."""
    given, wanted = case.values(), case.values()
    out, expected = op(*given.values()), case.REFERENCE(*wanted.values())
    assert out.dtype == case.queries.dtype
    assert out.shape == case.queries.shape
    assert out.is_contiguous()
    assert not out[case.padding_rows()].any(), "padding rows are not zero"
    torch.testing.assert_close(out, expected, atol=case.tolerance, rtol=case.tolerance)
    same_caches(given, wanted)
    return out
