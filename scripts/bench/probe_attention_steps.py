"""The tensors of probe_attention.py's steps, what they should give, and what runs on them."""

import functools
from typing import Any

import torch
from torch import Tensor

from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.heads import heads_of

BLOCK, HEAD_DIM, KV_HEADS, EPS = 16, 128, 8, 1e-6
BF16 = torch.bfloat16
CACHES = {"bf16": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


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

    def engine(self) -> Any:
        from compiled_llm.ops.attention import triton_decode as td
        from compiled_llm.ops.attention import triton_decode_plan

        size = (self.table.shape[1] * BLOCK, 0, KV_HEADS, HEAD_DIM, 2, self.caches[0].element_size())
        plan = triton_decode_plan.decode_plan(self.slots, None, self.starts, self.seq_lens, *size)
        turning = td.Turning(self.cos_sin, self.norm, self.norm, None, None)
        q, k, v = heads_of(self.qkv, self.heads, KV_HEADS, HEAD_DIM)
        rest = (*self.caches, *self.scales, self.table, *plan, None, HEAD_DIM**-0.5, 0, 0.0)
        return functools.partial(td.decode_attention, q, k, v, turning, EPS, *rest)

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

    def engine(self) -> Any:
        from compiled_llm.ops.attention import triton_attention as ta

        turn, k, v = ta.to_turn(self.qkv, self.cos_sin, None, None, None, None, self.heads, KV_HEADS, HEAD_DIM, EPS)
        where = (self.slots, self.table, self.starts, self.seq_lens, None, HEAD_DIM**-0.5, self.tokens, 0, 0.0)
        return lambda: ta.paged_attention(turn.q, k, v, *self.caches, None, None, *where, turn=turn)

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
