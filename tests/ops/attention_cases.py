"""Cases for the paged attention kernels, shared by the tests of every device.

A case is one call of the op: random requests in a randomly scattered cache whose every unused slot is poisoned with NaN
and infinities, so that a kernel which reads (or multiplies by zero) what it should not shows it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from compiled_llm.ops.attention import paged_attention_reference

PADDING_BLOCK = 0  # padding tokens are written here; no request reads it
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class AttentionCase:
    """All arguments of one call, in the op's order. ``args()`` gives them with fresh copies of the caches."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sm_scale: float
    max_query_len: int

    def args(self) -> tuple:
        fresh = replace(self, k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())
        return tuple(getattr(fresh, field.name) for field in fields(fresh))

    def rows(self, request: int) -> slice:
        """The rows of ``q`` that belong to one request."""
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))

    def padding_rows(self) -> Tensor:
        """``[T]`` bool: rows of requests with no keys, and rows past the last request."""
        padding = torch.ones(self.q.shape[0], dtype=torch.bool, device=self.q.device)
        for request, seq_len in enumerate(self.seq_lens.tolist()):
            padding[self.rows(request)] = seq_len == 0
        return padding


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    sm_scale: float | None = None,
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
        sm_scale: ``head_dim ** -0.5`` if not given.
        max_query_len: the longest of the queries if not given.
        padding_query_lens: rows of requests with ``seq_lens`` 0, which follow the real ones.
        trailing_rows: rows after ``query_start_loc[R]``.
        fused_qkv: ``q``, ``k``, ``v`` are views of one ``[T, (N + 2K) * H]`` tensor.
        unused_table_entry: what stands in ``block_table`` past a request's length: a poisoned block if not given.
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
    caches = []
    slot_of = [
        block_table[request].long().repeat_interleave(block_size) * block_size + torch.arange(block_size).repeat(width)
        for request in range(len(seq_lens))
    ]
    for _ in range(2):
        slots = poison[torch.randint(3, (num_blocks * block_size, 1, 1), generator=generator)]
        slots = slots.repeat(1, num_kv_heads, head_dim)
        for request, context_len in enumerate(context_lens):
            old = slot_of[request][:context_len]
            slots[old] = torch.randn(context_len, num_kv_heads, head_dim, generator=generator)
        caches.append(slots.view(num_blocks, block_size, num_kv_heads, head_dim).transpose(1, 2).to(dtype).contiguous())

    slot_mapping = torch.full((num_tokens,), PADDING_BLOCK * block_size, dtype=torch.int32)
    starts = torch.tensor([0, *all_query_lens]).cumsum(0)
    for request, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        new = slot_of[request][context_len : context_len + query_len]
        slot_mapping[starts[request] : starts[request + 1]] = new.int()

    heads = [num_heads, num_kv_heads, num_kv_heads]
    qkv = torch.randn(num_tokens, sum(heads) * head_dim, generator=generator).to(dtype).to(device)
    q, k, v = qkv.view(num_tokens, sum(heads), head_dim).split(heads, dim=1)
    if not fused_qkv:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return AttentionCase(
        q=q,
        k=k,
        v=v,
        k_cache=caches[0].to(device),
        v_cache=caches[1].to(device),
        slot_mapping=slot_mapping.to(device),
        block_table=block_table.to(device),
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        max_query_len=max(all_query_lens, default=1) if max_query_len is None else max_query_len,
    )


def grid() -> Iterator[tuple[str, dict]]:
    """Names and ``make_case`` arguments (all but dtype, device and seed) that every kernel must pass."""
    for group in (1, 4, 5, 7, 8):
        for head_dim in (64, 128, 256):
            for kind, query_lens, context_lens in (
                ("decode", [1, 1, 1], [0, 33, 130]),
                ("mixed", [1, 19, 7], [47, 64, 0]),
            ):
                yield (
                    f"{kind}-gqa{group}-h{head_dim}",
                    {
                        "query_lens": query_lens,
                        "context_lens": context_lens,
                        "num_heads": 2 * group,
                        "head_dim": head_dim,
                    },
                )
    for head_dim in (16, 40, 80, 96):
        yield f"mixed-h{head_dim}", {"query_lens": [1, 37, 1], "context_lens": [70, 11, 0], "head_dim": head_dim}
    for block_size in (1, 16, 32):
        lengths = sorted({1, max(block_size - 1, 1), block_size, block_size + 1, 2000})
        yield (
            f"decode-block{block_size}",
            {
                "query_lens": [1] * len(lengths),
                "context_lens": [n - 1 for n in lengths],
                "block_size": block_size,
                "padding_query_lens": [1, 1],
            },
        )
        for length in lengths:
            yield (
                f"prompt{length}-block{block_size}",
                {"query_lens": [length], "context_lens": [0], "num_heads": 2, "block_size": block_size},
            )
            yield (
                f"chunk-after{length}-block{block_size}",
                {"query_lens": [block_size + 3], "context_lens": [length], "block_size": block_size},
            )
    everything = {"query_lens": [1, 65, 1, 130, 2], "context_lens": [700, 0, 5, 530, 64], "num_heads": 8}
    yield "everything", {**everything, "padding_query_lens": [1, 3], "trailing_rows": 5, "fused_qkv": True}
    yield "everything-scaled", {**everything, "sm_scale": 0.3, "head_dim": 80, "fused_qkv": True}
    yield "loose-max-query-len", {**everything, "max_query_len": 512, "trailing_rows": 3}
    yield "decode-loose-max-query-len", {"query_lens": [1, 1], "context_lens": [40, 3], "max_query_len": 64}
    yield (
        "decode-fused-padding",
        {
            "query_lens": [1, 1],
            "context_lens": [600, 1500],
            "num_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
            "padding_query_lens": [1] * 6,
            "fused_qkv": True,
        },
    )
    yield "only-padding", {"query_lens": [], "context_lens": [], "padding_query_lens": [1, 1, 1], "trailing_rows": 2}


def check(case: AttentionCase, op: Callable[..., Tensor]) -> Tensor:
    """Run ``op`` (the arguments by position) and compare output and caches with the reference; returns the output."""
    args, expected_args = case.args(), case.args()
    out, expected = op(*args), paged_attention_reference(*expected_args)
    assert out.dtype == case.q.dtype
    assert out.shape == case.q.shape
    assert out.is_contiguous()
    padding = case.padding_rows()
    assert not out[padding].any(), "padding rows are not zero"
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    for written, wanted in ((args[3], expected_args[3]), (args[4], expected_args[4])):
        # Bit for bit, so that the poison compares too. What stands in the padding block is nobody's business.
        integer = torch.int32 if written.dtype == torch.float32 else torch.int16
        assert torch.equal(written[1:].view(integer), wanted[1:].view(integer)), "the cache differs"
    return out
