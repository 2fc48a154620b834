"""The tensors of probe_attention.py's steps, what they should give, and what runs on them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.heads import heads_of
from compiled_llm.ops.attention.tiles import HOPPER
from compiled_llm.ops.programmatic_launch import programmatic_launches

BLOCK, HEAD_DIM, KV_HEADS, EPS = 16, 128, 8, 1e-6
BF16 = torch.bfloat16
CACHES = {"bf16": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Variant(NamedTuple):
    """Of the candidate kernel: its tile, splits of at least ``tokens`` keys and at most ``most``, and its switches."""

    n: int = 64
    warps: int = 4
    tokens: int = 64
    most: int = 16
    merge: int = 16
    in_turns: bool = False
    from_task: bool = True
    in_registers: bool = True
    early: bool = True
    loop: bool = True
    sem: str = "acq_rel"
    programmatic: bool = False
    before: bool = False
    programs: int = 0  # for all KV heads, which take tasks in turns; 0: one for each task


def turned(x: Tensor, cos_sin: Tensor, norm: Tensor | None) -> Tensor:
    """Heads ``[T, N, H]``, normalised and turned, by plain torch."""
    wide = x.float()
    cos, sin = cos_sin[:, None].split(HEAD_DIM // 2, -1)
    if norm is not None:
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + EPS)
        wide = (normed.to(BF16).float() * norm.float()).to(BF16).float()
    first, second = wide.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(BF16)


class Decode:
    """The tensors of a step of decodes, with as much of the cache as its requests have, in scattered blocks."""

    def __init__(self, lengths: list[int], cache: str, heads: int, normed: bool, device: str) -> None:
        torch.manual_seed(0)
        self.lengths, self.heads, self.device = lengths, heads, device
        count, width = len(lengths), -(-max(lengths) // BLOCK)
        blocks = [-(-length // BLOCK) for length in lengths]
        order = 1 + torch.randperm(sum(blocks))
        table = torch.zeros(count, max(64, width) if device == "cuda" else width, dtype=torch.int32)
        for row, part in zip(table, order.split(blocks), strict=True):
            row[: len(part)] = part
        positions = torch.tensor(lengths) - 1
        slots = table.gather(1, (positions // BLOCK)[:, None])[:, 0] * BLOCK + positions % BLOCK
        self.table, self.slots = table.to(device), slots.int().to(device)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        self.qkv = torch.randn(count, (heads + 2 * KV_HEADS) * HEAD_DIM, device=device).to(BF16)
        angles = positions[:, None] * 500000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float().to(device)
        self.norm = (1 + 0.1 * torch.randn(HEAD_DIM, device=device)).to(BF16) if normed else None
        shape = 1 + sum(blocks), KV_HEADS, BLOCK, HEAD_DIM
        dtype, self.scales = CACHES[cache], [None, None]
        self.caches: list[Tensor] = []
        for index in range(2):
            keys = torch.randn(shape, device=device).to(BF16)
            if kv_quant.is_quantised(dtype):
                codes, self.scales[index] = kv_quant.quantise(keys, dtype)
                keys = codes
            self.caches.append(keys)
        self.first_caches = [x.clone() for x in self.caches] if sum(lengths) < 100000 else None
        self.bytes = (
            2 * sum(lengths) * KV_HEADS * (HEAD_DIM * dtype.itemsize + (4 if self.scales[0] is not None else 0))
        )

    def new_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Turned queries and keys, and values, by plain torch."""
        q, k, v = heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)
        assert k is not None
        assert v is not None
        return turned(q, self.cos_sin, self.norm), turned(k, self.cos_sin, self.norm), v

    def expected(self) -> Tensor:
        """In float32; a cache that is quantised has the new row in codes."""
        q, *new = self.new_rows()
        outs = []
        for row, length in enumerate(self.lengths):
            parts = []
            for x, cache, scale in zip(new, self.caches, self.scales, strict=True):
                blocks = self.table[row, : -(-length // BLOCK)].long()
                old, last = cache[blocks].float(), x[row].float()
                if scale is not None:
                    old *= scale[blocks][..., None]
                    last = kv_quant.dequantise(*kv_quant.quantise(x[row], cache.dtype))
                keys = old.transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :length].clone()
                keys[:, -1] = last
                parts.append(keys)
            scores = q[row].float().view(KV_HEADS, -1, HEAD_DIM) @ parts[0].transpose(1, 2) * HEAD_DIM**-0.5
            outs.append((scores.softmax(-1) @ parts[1]).reshape(self.heads, HEAD_DIM))
        return torch.stack(outs)

    def engine(self, programmatic: bool = False) -> Any:
        from compiled_llm.ops.attention import triton_decode as td
        from compiled_llm.ops.attention import triton_decode_plan

        size = (self.table.shape[1] * BLOCK, 0, KV_HEADS, HEAD_DIM, 2, self.caches[0].element_size())
        plan = triton_decode_plan.decode_plan(self.slots, None, self.starts, self.seq_lens, *size)
        turning = td.Turning(self.cos_sin, self.norm, self.norm, None, None)
        q, k, v = heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)
        rest = (*self.caches, *self.scales, self.table, *plan, None, HEAD_DIM**-0.5, 0, 0.0)

        def run() -> Tensor:
            with programmatic_launches(programmatic):
                return td.decode_attention(q, k, v, turning, EPS, *rest)

        return run

    def engine_with(self, n: int, warps: int, stages: int, programs: int, tokens: int) -> Any:
        """The engine's kernel with another tile, and splits of at least ``tokens`` old keys."""
        from compiled_llm.ops.attention import triton_decode as td

        tiles = dataclasses.replace(
            HOPPER[HEAD_DIM], decode_block_n=n, decode_warps=warps, decode_stages=stages,
            decode_programs_per_sm=programs, alone_warps=0,
        )  # fmt: skip
        tasks, _ = self.tasks(Variant(n=n, tokens=tokens, most=64))
        plan = (
            tasks[:, :8].contiguous(),
            torch.zeros(self.slots.numel() * KV_HEADS, dtype=torch.int32, device=self.device),
        )
        turning = td.Turning(self.cos_sin, self.norm, self.norm, None, None)
        q, k, v = heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)
        rest = (*self.caches, *self.scales, self.table, *plan, None, HEAD_DIM**-0.5, 0, 0.0)
        return functools.partial(td.decode_attention, q, k, v, turning, EPS, *rest, tiles=tiles)

    def tasks(self, variant: Variant) -> tuple[Tensor, int]:
        """As the plan would be, with the block numbers of each split's first tile; splits count old keys alone."""
        rows, grain = [], variant.n // 8
        if not variant.loop:
            assert max(self.lengths) <= variant.n * variant.most
        for row, length in enumerate(self.lengths):
            old = length - 1 if variant.in_registers else length
            size = max(variant.tokens, -(-old // (variant.most * 64)) * 64)
            count = max(1, -(-old // size))
            for split in range(count):
                begin = split * size
                end = length if split == count - 1 else begin + size
                at = [min(begin + grain * i, length - 1) // BLOCK for i in range(8)]
                blocks = self.table[row, at].tolist()
                slot = int(self.slots[row]) if split == count - 1 else -1
                rows.append([row, row, begin, end, split, count, slot, 0, *blocks])
        grid = variant.most * len(self.lengths)  # as of a step that may have the longest requests
        tasks = torch.zeros(1 + grid, 16, dtype=torch.int32)
        tasks[:, 6] = -1
        tasks[: 1 + len(rows)] = torch.tensor([[len(rows)] + [0] * 15, *rows], dtype=torch.int32)
        return tasks.to(self.device), grid

    def candidate(self, variant: Variant) -> Any:
        import probe_attention_kernels

        q, k, v = heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)
        assert k is not None
        assert v is not None
        tasks, count = self.tasks(variant)
        if variant.programs:
            count = variant.programs // KV_HEADS
        counters = torch.zeros(len(self.lengths) * KV_HEADS, dtype=torch.int32, device=self.device)
        caches = [x.view(torch.int16) if x.element_size() == 1 else x for x in self.caches]
        parts = (len(self.lengths), self.heads, variant.most)

        def run() -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=self.device)
            partial = torch.empty((*parts, HEAD_DIM), device=self.device)
            maxima, sums = torch.empty((2, *parts), device=self.device)
            options: dict[str, Any] = {"launch_pdl": True} if variant.programmatic else {}
            probe_attention_kernels.few_kernel[(KV_HEADS, count)](
                q, k, v, self.cos_sin, self.norm, self.norm, *caches, *self.scales,
                self.table, tasks, counters, None, out, partial, maxima, sums,
                EPS, HEAD_DIM**-0.5, variant.most, self.table.stride(0), self.cos_sin.stride(0),
                *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                GROUP=self.heads // KV_HEADS, NUM_KV_HEADS=KV_HEADS, HEAD_DIM=HEAD_DIM, BLOCK_SIZE=BLOCK,
                CODE_MAX=kv_quant.CODE_MAX.get(self.caches[0].dtype, 0.0), SOFT_CAP=0.0,
                MERGE_HEADS=self.heads // KV_HEADS, MERGE_SPLITS=variant.merge, BLOCK_M=16, BLOCK_N=variant.n,
                FROM_TASK=variant.from_task, IN_REGISTERS=variant.in_registers, EARLY=variant.early,
                LOOP=variant.loop, SEM=variant.sem, PROGRAMMATIC=variant.programmatic,
                BEFORE=variant.before, IN_TURNS=variant.in_turns, PERSISTENT=variant.programs > 0,
                num_warps=variant.warps, num_stages=1, enable_fp_fusion=False, **options,
            )  # fmt: skip
            return out

        return run

    def sdpa(self, name: str) -> Any:
        count = len(self.lengths)
        q = torch.randn(count, self.heads, 1, HEAD_DIM, device=self.device, dtype=BF16)
        k, v = (torch.randn(count, KV_HEADS, self.lengths[0], HEAD_DIM, device=self.device, dtype=BF16) for _ in "kv")
        return functools.partial(sdpa, name, q, k, v, False)

    def check(self, run: Any) -> dict[str, Any]:
        """The worst row's error; what of the new rows in the cache differs from plain torch; whether again alike."""
        if self.first_caches is not None:
            for cache, first in zip(self.caches, self.first_caches, strict=True):
                cache.copy_(first)
        right = self.expected()
        out = run()
        again = run()
        error = ((out.float() - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
        differing = 0
        for cache, row in zip(self.caches, self.new_rows()[1:], strict=True):
            want = kv_quant.quantise(row, cache.dtype)[0] if kv_quant.is_quantised(cache.dtype) else row
            slots = self.slots.long()
            have = cache[slots // BLOCK, :, slots % BLOCK]
            differing += int((have.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)).sum())
        result = {"error": error, "differing_bytes": differing, "same_again": bool(torch.equal(out, again))}
        limit = 0.03 if self.scales[0] is None else 0.05
        allowed = 0 if self.norm is None else self.slots.numel() * 40
        if not (error < limit and differing <= allowed and result["same_again"]):
            raise ValueError(f"wrong result: {result}")
        return result


def sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


class Prefill:
    """A request's last ``tokens`` tokens, with ``context`` before them in the cache."""

    def __init__(self, tokens: int, context: int, heads: int, device: str) -> None:
        torch.manual_seed(0)
        self.tokens, self.heads, self.device = tokens, heads, device
        length = tokens + context
        self.table = (1 + torch.randperm(-(-length // BLOCK), device=device)).int()[None]
        positions = torch.arange(context, length, device=device)
        self.slots = (self.table[0, positions // BLOCK] * BLOCK + positions % BLOCK).int()
        self.seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self.qkv = torch.randn(tokens, (heads + 2 * KV_HEADS) * HEAD_DIM, device=device).to(BF16)
        angles = positions[:, None] * 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
        shape = 1 + self.table.shape[1], KV_HEADS, BLOCK, HEAD_DIM
        self.caches = [torch.randn(shape, device=device).to(BF16) for _ in range(2)]
        self.flops = 4 * heads * HEAD_DIM * (tokens * length - tokens * (tokens - 1) // 2)

    def engine(self, m: int, n: int, warps: int, stages: int) -> Any:
        from compiled_llm.ops.attention import triton_attention as ta

        sizes = {"prefill_block_m": m, "prefill_block_n": n, "prefill_warps": warps, "prefill_stages": stages}
        if m == 64:
            sizes["prefill_programs_per_sm"] = 2
        tiles = dataclasses.replace(HOPPER[HEAD_DIM], **sizes)
        turn, k, v = ta.to_turn(self.qkv, self.cos_sin, None, None, None, None, self.heads, KV_HEADS, HEAD_DIM, EPS)
        where = (self.slots, self.table, self.starts, self.seq_lens, None, HEAD_DIM**-0.5, self.tokens, 0, 0.0)
        return lambda: ta.paged_attention(turn.q, k, v, *self.caches, None, None, *where, tiles=tiles, turn=turn)

    def sdpa(self, name: str) -> Any:
        q = torch.randn(1, self.heads, self.tokens, HEAD_DIM, device=self.device, dtype=BF16)
        k, v = (torch.randn(1, KV_HEADS, self.tokens, HEAD_DIM, device=self.device, dtype=BF16) for _ in "kv")
        return functools.partial(sdpa, name, q, k, v, True)

    def check(self, run: Any) -> dict[str, Any]:
        """Against FlashAttention over what the op left in the cache."""
        out = run()
        keys, values = (x[self.table[0].long()].transpose(0, 1).reshape(1, KV_HEADS, -1, HEAD_DIM) for x in self.caches)
        q = turned(heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)[0], self.cos_sin, None)
        all_q = torch.zeros(1, self.heads, keys.shape[2], HEAD_DIM, dtype=BF16, device=self.device)
        all_q[0, :, -self.tokens :] = q.transpose(0, 1)
        right = sdpa("flash", all_q, keys, values, True)[0, :, -self.tokens :].transpose(0, 1).float()
        error = ((out.float() - right).norm(dim=-1) / right.norm(dim=-1)).max().item()
        if not error < 0.03:
            raise ValueError(f"wrong result: error {error}")
        return {"error": error}
