"""What ``bench attention`` times: cases, their tensors, our op, and every alternative to it.

Shape letters as in docs/design.md. An implementation is built for a step and gives a function that runs one layer.
"""

import argparse
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from compiled_llm.bench.harness import WrongResultError, zeros
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops import paged_attention
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.arguments import Keys, Turn
from compiled_llm.ops.attention.rotary_attention import rotary_attention

WRITE_TOKENS = 8192  # a cache is filled in pieces of this many
TOLERANCE = 0.03  # of a row of the output, relative to its length; bfloat16 alone accounts for about 0.01

Attend = Callable[[int], Tensor]  # runs one layer, given its number; returns [T, N, H]


class Shape(NamedTuple):
    """One layer of a model, and the blocks of its cache."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Group:
    """Some requests of one shape; each one's queries are the last ``query_len`` of its ``seq_len`` tokens."""

    count: int
    query_len: int
    seq_len: int

    def visible(self, device: str) -> Tensor:
        """Which keys each query of a request sees: ``[query_len, seq_len]``."""
        positions = torch.arange(self.seq_len, device=device)
        return positions <= positions[self.seq_len - self.query_len :, None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: groups of requests, in the order of their rows."""

    name: str
    groups: tuple[Group, ...]

    @property
    def requests(self) -> list[Group]:
        return [group for group in self.groups for _ in range(group.count)]

    @property
    def num_keys(self) -> int:
        return sum(group.count * group.seq_len for group in self.groups)

    def num_bytes(self, shape: Shape, kv_dtype: torch.dtype) -> int:
        """Bytes of the keys, values and scales that must be read."""
        row = shape.head_dim * kv_dtype.itemsize + (4 if kv_quant.is_quantised(kv_dtype) else 0)
        return 2 * self.num_keys * shape.kv_heads * row

    def num_flops(self, shape: Shape) -> int:
        """Operations of the two products over the keys that each query sees."""
        pairs = sum(g.count * (g.query_len * g.seq_len - g.query_len * (g.query_len - 1) // 2) for g in self.groups)
        return 4 * shape.heads * shape.head_dim * pairs


def parse_case(kind: str, text: str) -> Case:
    """A case of the command line, for argparse."""
    groups = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)" if kind == "decode" else r"(?:(\d+)x)?(\d+)\+(\d+)", part)
        numbers = [int(number or 1) for number in match.groups()] if match else [0]
        if 0 in numbers[:2]:
            form = "BATCHxCONTEXT" if kind == "decode" else "TOKENS+CONTEXT or BATCHxTOKENS+CONTEXT"
            raise argparse.ArgumentTypeError(
                f"must be {form}, several with commas between, BATCH and what follows it at least 1, given {text!r}"
            )
        count, query_len, context_len = (numbers[0], 1, numbers[1] - 1) if kind == "decode" else numbers
        groups.append(Group(count, query_len, query_len + context_len))
    return Case(f"{kind} {text}", tuple(groups))


class Step:
    """A case's tensors over several layers, and where its keys lie in caches of each block size."""

    def __init__(self, case: Case, shape: Shape, device: str, num_layers: int) -> None:
        self.case, self.groups, self.device = case, case.groups, device
        self.heads, self.kv_heads, self.head_dim, self.block_size, self.dtype = shape
        self.num_layers = num_layers
        query_lens = [request.query_len for request in case.requests]
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = torch.randn(sum(query_lens), width, dtype=self.dtype, device=self.device)
        self.q, self.k, self.v = self.qkv.unflatten(1, (-1, self.head_dim)).split(
            [self.heads, self.kv_heads, self.kv_heads], dim=1
        )
        self.query_start_loc = self.ints([0, *itertools.accumulate(query_lens)])
        self.seq_lens = self.ints([request.seq_len for request in case.requests])
        self.queries = self.by_group(self.q)
        new_keys, new_values = self.by_group(self.k), self.by_group(self.v)
        # layer -> group -> keys and values, [count, K, seq_len, H]; the last ones are this step's
        self.layers: list[list[tuple[Tensor, Tensor]]] = []
        for _ in range(num_layers):
            self.layers.append([])
            for group, *new in zip(self.groups, new_keys, new_values, strict=True):
                sizes = (2, group.count, self.kv_heads, group.seq_len, self.head_dim)
                key, value = zeros(sizes, self.dtype, self.device).normal_()
                for old, last in zip((key, value), new, strict=True):
                    old[:, :, -group.query_len :] = last
                self.layers[-1].append((key, value))

    def ints(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def by_group(self, tokens: Tensor) -> list[Tensor]:
        """``[T, heads, H]`` as one ``[count, heads, query_len, H]`` for each group."""
        parts = tokens.split([group.count * group.query_len for group in self.groups])
        return [
            part.unflatten(0, (group.count, group.query_len)).transpose(1, 2)
            for part, group in zip(parts, self.groups, strict=True)
        ]

    @staticmethod
    def by_token(parts: list[Tensor]) -> Tensor:
        """The inverse of ``by_group``; a view where there is one group and one request or one token in it."""
        rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def place(self, block_size: int) -> tuple[Tensor, list[Tensor], int]:
        """A block table with blocks anywhere, the slots of every group's keys, ``[count, seq_len]``, and B."""
        widths = [-(-request.seq_len // block_size) for request in self.case.requests]
        num_blocks = sum(widths) + 1
        blocks = (torch.randperm(num_blocks - 1) + 1).int().to(self.device).split(widths)
        table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        slots = []
        for group, rows in zip(self.groups, table.split([group.count for group in self.groups]), strict=True):
            positions = torch.arange(group.seq_len, device=self.device)
            slots.append((rows[:, positions // block_size] * block_size + positions % block_size).int())
        return table, slots, num_blocks

    def new_slots(self, slots: list[Tensor]) -> Tensor:
        """The slots of this step's tokens, in their order."""
        parts = zip(slots, self.groups, strict=True)
        return torch.cat([part[:, -group.query_len :].flatten() for part, group in parts])


def op(step: Step, dtype: torch.dtype, block_size: int, turned: bool = False) -> Attend:
    """Ours, over caches of ``dtype`` that it has filled itself.

    Args:
        turned: it turns queries and keys first, as in a step; by an angle of 0, so that the result is the same.
    """
    table, slots, num_blocks = step.place(block_size)
    scale = step.head_dim**-0.5
    slot_mapping, max_query_len = step.new_slots(slots), max(group.query_len for group in step.groups)
    nothing = step.ints([0, 0]), step.ints([0])
    shape = (num_blocks, step.kv_heads, block_size, step.head_dim)
    caches: list[list[Tensor | None]] = []
    for layer in step.layers:
        cache: list[Tensor | None] = [zeros(shape, dtype, step.device) for _ in range(2)]
        quantised = kv_quant.is_quantised(dtype)
        cache += [zeros(shape[:3], torch.float32, step.device) if quantised else None for _ in range(2)]
        for (keys, values), group_slots in zip(layer, slots, strict=True):
            for key, value, row in zip(keys.transpose(1, 2), values.transpose(1, 2), group_slots, strict=True):
                for start in range(0, len(row), WRITE_TOKENS):
                    k, v, piece = (part[start : start + WRITE_TOKENS] for part in (key, value, row))
                    q = step.q.new_zeros(len(piece), step.heads, step.head_dim)
                    # As padding: the op writes it, and no query attends to it.
                    lengths = piece, table[:1, :1], *nothing
                    paged_attention(q, k, v, *cache, *lengths, sm_scale=scale, max_query_len=1)  # type: ignore
        caches.append(cache)
    inputs = slot_mapping, table, step.query_start_loc, step.seq_lens

    half, options = step.head_dim // 2, {"sm_scale": scale, "max_query_len": max_query_len}
    cos_sin = torch.cat([torch.ones(len(step.q), half), torch.zeros(len(step.q), half)], 1).to(step.device)

    turn = Turn(cos_sin, None, None, None, None, 1e-6)
    spec = AttentionSpec(step.heads, step.kv_heads, step.head_dim, scale, max_query_len=max_query_len)

    def attend(layer: int) -> Tensor:
        if turned:
            keys = Keys._make((*caches[layer], *inputs))
            return rotary_attention(step.qkv, turn, keys, spec)
        given = step.q, step.k, step.v, *caches[layer], *inputs
        return paged_attention(*given, **options)

    return attend


def expected(step: Step, dtype: torch.dtype) -> Tensor:
    """What the op must return for layer 0: attention over what a cache of ``dtype`` keeps, in SDPA's plainest form."""
    parts = []
    for group, query, pair in zip(step.groups, step.queries, step.layers[0], strict=True):
        if kv_quant.is_quantised(dtype):
            pair = [kv_quant.dequantise(*kv_quant.quantise(x, dtype)).to(step.dtype) for x in pair]  # type: ignore
        key, value = (x.repeat_interleave(step.heads // step.kv_heads, dim=1) for x in pair)
        parts.append(F.scaled_dot_product_attention(query, key, value, attn_mask=group.visible(step.device)))
    return step.by_token(parts)


def torch_sdpa(step: Step, keys_of: Callable[[int, int], tuple[Tensor, Tensor]]) -> Attend:
    """SDPA for each group, with the kind of mask that leaves it its fastest kernel; ``keys_of(layer, group)``."""
    options: list[dict[str, Any]] = []
    for group in step.groups:
        options.append({"enable_gqa": step.heads != step.kv_heads})
        if group.query_len == group.seq_len:
            options[-1]["is_causal"] = True
        elif group.query_len > 1 and step.device == "cuda":
            options[-1]["attn_mask"] = causal_lower_right(group.query_len, group.seq_len)
        elif group.query_len > 1:
            options[-1]["attn_mask"] = group.visible(step.device)

    def attend(layer: int) -> Tensor:
        inputs = enumerate(zip(step.queries, options, strict=True))
        parts = [F.scaled_dot_product_attention(query, *keys_of(layer, i), **kwargs) for i, (query, kwargs) in inputs]
        return step.by_token(parts)

    return attend


def sdpa(step: Step) -> Attend:
    return torch_sdpa(step, lambda layer, i: step.layers[layer][i])


def sdpa_by(backend: SDPBackend, step: Step) -> Attend:
    """SDPA by one of its backends."""
    attend = sdpa(step)

    def of_backend(layer: int) -> Tensor:
        with sdpa_kernel(backend):
            return attend(layer)

    return of_backend


def gather(step: Step) -> Attend:
    size = step.block_size
    table, slots, num_blocks = step.place(size)
    by_group = zip(table.long().split([group.count for group in step.groups]), step.groups, strict=True)
    tables = [rows[:, : -(-group.seq_len // size)].contiguous() for rows, group in by_group]
    caches = []
    for layer in step.layers:
        caches.append(zeros((2, num_blocks, step.kv_heads, size, step.head_dim), step.dtype, step.device))
        for pair, places in zip(layer, slots, strict=True):
            for cache, x in zip(caches[-1], pair, strict=True):
                cache[places.long() // size, :, places.long() % size] = x.transpose(1, 2)

    def keys_of(layer: int, i: int) -> tuple[Tensor, Tensor]:
        key, value = (
            cache[tables[i]].transpose(1, 2).flatten(2, 3)[:, :, : step.groups[i].seq_len] for cache in caches[layer]
        )
        return key, value

    return torch_sdpa(step, keys_of)


def flex(step: Step) -> Attend:
    torch.compiler.reset()  # its limit of recompiles is for a program, not for a grid of shapes
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def block_mask(group: Group) -> Any:
        if group.query_len == 1:
            return None
        context_len = group.seq_len - group.query_len
        return create_block_mask(
            lambda b, h, query, key: key <= query + context_len, None, None, group.query_len, group.seq_len, step.device
        )

    masks = [block_mask(group) for group in step.groups]

    def attend(layer: int) -> Tensor:
        inputs, gqa = zip(step.queries, step.layers[layer], masks, strict=True), step.heads != step.kv_heads
        return step.by_token([compiled(q, *pair, block_mask=mask, enable_gqa=gqa) for q, pair, mask in inputs])

    return attend


ALTERNATIVES: dict[str, Callable[[Step], Attend]] = {
    "gather": gather,
    "sdpa": sdpa,
    "cudnn": functools.partial(sdpa_by, SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(sdpa_by, SDPBackend.FLASH_ATTENTION),
    "flex": flex,
}
ON_GPU = ("cudnn", "flash")


def check(name: str, output: Tensor, right: Tensor) -> None:
    """Compare two outputs row by row, a row being one head of one token."""
    lengths = right.float().norm(dim=-1)
    error = ((output.float() - right.float()).norm(dim=-1) / lengths).max().item()
    if not error <= TOLERANCE:  # NaN must not pass
        raise WrongResultError(f"{name} gives another result: the worst row is off by {error:.3g} of its length")
