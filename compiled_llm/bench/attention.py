"""Paged attention: time, bandwidth and arithmetic rate of the op, compared with the machine's limits and alternatives.

    compiled-llm bench attention                                    # a default grid, some minutes on a CPU
    compiled-llm bench attention --device cuda
    compiled-llm bench attention --decode 1x4096 1x8192,31x256 --prefill 512+1024 8x4+4096 --block-size 16 64

A case is BATCHxCONTEXT for decode (CONTEXT keys, the new one included) and [BATCHx]TOKENS+CONTEXT for prefill. Commas
join groups of requests into one step: 1x8192,31x256 is one long request and thirty-one short ones. It should take as
long as 32x504, which has as many keys.

Everything of a case is timed in turns:

    op        compiled_llm::paged_attention, the cache write included; a row for each KV dtype and block size. With
              --turned it is the op of a step, which turns queries and keys by their positions before
    gather    every request's blocks gathered into contiguous keys and values, then F.scaled_dot_product_attention
    sdpa      F.scaled_dot_product_attention on keys and values that are contiguous already (no paging at all); on a
              GPU cudnn and flash are two of its backends
    flex      compiled FlexAttention on the same contiguous keys and values
    limits    memory: a sum over a large tensor on a CPU, a copy on a GPU (read and written); a large matrix product

gather, sdpa and flex run once for each group of requests. No alternative has a quantised cache: they run in the model's
dtype (gather with the first block size), and their columns are their times divided by that of the op in
that row. /model is the op's time relative to its own with a cache in the model's dtype. GB/s counts keys, values and
scales, each read once, TFLOP/s the two products over the visible keys. `of limit` is the time that these bytes or these
operations, whichever takes longer, would need at the machine's limits, over the time taken.

The caches of several layers are used in turns, so that none is in the processor's cache; with --hot it is one layer.
The op's are laid out as an engine's, for a model of so many layers: on a CPU a block of all layers is one piece.
Before it is timed, the op must agree with SDPA on the keys and values of its cache, or the exit status is 1. An
alternative must agree with the op, or it is left out and the reason is printed. On a GPU the kernels of all cases are
compiled first, in parallel processes, for --compile-seconds; cases that --limit leaves no time for are left out.
Shape letters as in docs/design.md.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.bench.harness import (
    STATISTICS,
    TORCH_DTYPES,
    Row,
    Run,
    WrongResultError,
    add_case_flags,
    call_seconds,
    copies_of,
    finish,
    has_gpu,
    limit_runs,
    reason_of,
    run_cases,
    zeros,
)
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.inputs import LayerCache
from compiled_llm.models.layers.attention import AttentionSpec
from compiled_llm.ops import paged_attention
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.arguments import Keys, Turn
from compiled_llm.ops.attention.rotary_attention import rotary_attention
from compiled_llm.step.kv_cache import allocate
from compiled_llm.system import hardware

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


def caches_of(step: Step, dtype: torch.dtype, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Zeroed caches of the step's layers, as an engine lays out those of a model with so many layers."""
    sizes = {"num_attention_heads": step.heads, "num_key_value_heads": step.kv_heads, "head_dim": step.head_dim}
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    config = parse_config(model | sizes | {"num_hidden_layers": step.num_layers})
    caches = allocate(config, [dtype] * step.num_layers, num_blocks, block_size, torch.device(step.device))
    return [cache for cache in caches if isinstance(cache, LayerCache)]


def op(step: Step, dtype: torch.dtype, block_size: int, turned: bool = False) -> Attend:
    """Ours, over caches of ``dtype`` that it has filled itself. On a CPU a block's layers lie side by side in them.

    Args:
        turned: it turns queries and keys first, as in a step; by an angle of 0, so that the result is the same.
    """
    table, slots, num_blocks = step.place(block_size)
    scale = step.head_dim**-0.5
    slot_mapping, max_query_len = step.new_slots(slots), max(group.query_len for group in step.groups)
    nothing = step.ints([0, 0]), step.ints([0])
    caches = caches_of(step, dtype, num_blocks, block_size)
    for cache, layer in zip(caches, step.layers, strict=True):
        for (keys, values), group_slots in zip(layer, slots, strict=True):
            for key, value, row in zip(keys.transpose(1, 2), values.transpose(1, 2), group_slots, strict=True):
                for start in range(0, len(row), WRITE_TOKENS):
                    k, v, piece = (part[start : start + WRITE_TOKENS] for part in (key, value, row))
                    q = step.q.new_zeros(len(piece), step.heads, step.head_dim)
                    # As padding: the op writes it, and no query attends to it.
                    lengths = piece, table[:1, :1], *nothing
                    paged_attention(q, k, v, *cache, *lengths, sm_scale=scale, max_query_len=1)
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


# ---- timing ----------------------------------------------------------------------------------------------------------

Limits = dict[str, tuple[Run, float]]
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CASES = {
    ("decode", "cpu"): ["1x1024", "1x4096", "8x1024", "32x1024", "1x8192,31x256", "32x504"],
    ("prefill", "cpu"): ["512+0", "2048+0", "512+1024", "512+4096", "8x4+4096"],
    ("decode", "cuda"): ["1x8192", "8x8192", "32x8192", "32x1024", "1x131072", "1x131072,31x4096"],
    ("prefill", "cuda"): ["512+0", "2048+0", "2048+6144", "8192+0", "8x4+8192"],
}


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Paged attention beside the machine's limits and alternatives.")
    add = made.add_argument
    decode, prefill = (functools.partial(parse_case, kind) for kind in ("decode", "prefill"))
    add("--decode", nargs="*", type=decode, metavar="CASE", help="BATCHxCONTEXT[,...] (default: a grid)")
    add("--prefill", nargs="*", type=prefill, metavar="CASE", help="[BATCHx]TOKENS+CONTEXT[,...] (default: a grid)")
    add("--kv-dtype", nargs="*", choices=KV_DTYPES, default=list(KV_DTYPES), help="of further caches (default: both)")
    add("--block-size", nargs="+", type=int, default=[16], metavar="S", help="(default: 16)")
    add("--heads", type=int, default=16, help="of queries (default: 16)")
    add("--kv-heads", type=int, default=8, help="(default: 8)")
    add("--head-dim", type=int, default=128, help="(default: 128)")
    add("--skip", nargs="+", choices=ALTERNATIVES, default=[], help="alternatives to leave out")
    add("--turned", action="store_true", help="the op turns queries and keys first, as in a step")
    add("--hot", action="store_true", help="one layer again and again, whose keys may be in a cache")
    add_case_flags(made, 5)
    return made


def check_arguments(args: argparse.Namespace) -> None:
    """Fills in the cases. ``ValueError`` for what cannot be measured."""
    if args.seconds == float("inf"):
        raise ValueError("--seconds must be finite, given inf")
    if args.heads % args.kv_heads:
        raise ValueError(f"--heads must be a multiple of --kv-heads, given {args.heads} and {args.kv_heads}")
    if args.head_dim % 2:
        raise ValueError(f"--head-dim must be even, as of every model with rotary embeddings, given {args.head_dim}")
    for kind in ("decode", "prefill"):
        if getattr(args, kind) is None:
            setattr(args, kind, [parse_case(kind, text) for text in CASES[kind, args.device]])
    if not args.decode + args.prefill:
        raise ValueError("nothing to measure: --decode and --prefill are both empty")


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(args.heads, args.kv_heads, args.head_dim, args.block_size[0], TORCH_DTYPES[args.dtype])


def variants_of(args: argparse.Namespace) -> dict[tuple[str, int], torch.dtype]:
    """(name of a KV dtype, block size) -> the KV dtype."""
    kv_dtypes = {args.dtype: TORCH_DTYPES[args.dtype]} | {name: KV_DTYPES[name] for name in args.kv_dtype}
    return {key: kv_dtypes[key[0]] for key in itertools.product(kv_dtypes, args.block_size)}


def compile_case(job: tuple[Case, argparse.Namespace]) -> None:
    """In a process of its own: run the op once in each of its variants, so that its kernels lie compiled on disk."""
    case, args = job
    step = Step(case, shape_of(args), args.device, 1)
    with torch.inference_mode():
        for (_, block_size), dtype in variants_of(args).items():
            op(step, dtype, block_size, args.turned)(0)


def alternatives(step: Step, ours: torch.Tensor, skip: Sequence[str]) -> tuple[dict[str, Run], dict[str, str]]:
    """Alternatives that run and agree with the op, and for the others the reason to leave them out."""
    runs: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    for name in names_of(step.device, skip):
        try:
            attend = ALTERNATIVES[name](step)
            check(name, attend(0), ours)
            runs[name] = attend
        except WrongResultError as error:
            left_out[name] = str(error)
        except Exception as error:  # in foreign code, of any version: no reason to stop
            left_out[name] = f"does not {'compile' if name == 'flex' else 'run'}: {reason_of(error)}"
    return runs, left_out


def names_of(device: str, skip: Sequence[str]) -> list[str]:
    return [name for name in ALTERNATIVES if name not in skip and (device == "cuda" or name not in ON_GPU)]


def rates_of(limits: Limits, seconds: Mapping[Any, float]) -> dict[str, float]:
    """Bytes or operations a second."""
    return {name: amount / seconds[name] for name, (_, amount) in limits.items()}


def measure(
    case: Case, args: argparse.Namespace, limits: Limits, rates: dict[str, float] | None
) -> list[dict[str, Any]]:
    """A row for each KV dtype and block size, measured in the same rounds, ``limits`` too without ``rates``."""
    shape, variants = shape_of(args), variants_of(args)
    num_layers = 1 if args.hot else copies_of(case.num_bytes(shape, shape.dtype))
    step = Step(case, shape, args.device, num_layers)
    runs: dict[Any, Run] = {} if rates else {name: run for name, (run, _) in limits.items()}
    outputs: dict[tuple[str, int], torch.Tensor] = {}
    for key, dtype in variants.items():
        runs[key] = attend = op(step, dtype, key[1], args.turned)
        outputs[key] = attend(0)
        check(f"the op ({key[0]})", outputs[key], expected(step, dtype))
    others, left_out = alternatives(step, outputs[args.dtype, shape.block_size], args.skip)
    found = call_seconds(runs | others, num_layers, args.device, seconds=args.seconds, left_out=left_out)
    seconds = {name: STATISTICS[args.statistic](values) for name, values in found.items()}

    rates = rates or rates_of(limits, seconds)
    rows = []
    for (name, block_size), dtype in variants.items():
        num_bytes, num_flops = case.num_bytes(shape, dtype), case.num_flops(shape)
        ideal = {"memory": num_bytes / rates["memory"], "matmul": num_flops / rates["matmul"]}
        limit = max(ideal, key=lambda key: ideal[key])
        taken = seconds[name, block_size]
        row: dict[str, Any] = {"case": case.name, "kv_dtype": name, "block_size": block_size}
        row |= {"seconds": {"op": taken} | {other: seconds[other] for other in others if other in seconds}}
        row |= {"bytes": num_bytes, "flops": num_flops, "gb_per_s": num_bytes / taken / 1e9}
        row |= {"tflop_per_s": num_flops / taken / 1e12, "limit": limit, "share_of_limit": ideal[limit] / taken}
        row |= {"memory_limit_gb_per_s": rates["memory"] / 1e9, "matmul_limit_tflop_per_s": rates["matmul"] / 1e12}
        rows.append(row | {"to_model_dtype": taken / seconds[args.dtype, block_size], "left_out": left_out})
    return rows


def table_row(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A row of the table for people."""
    seconds = row["seconds"]
    shown = {"case": row["case"], "KV": row["kv_dtype"], "S": row["block_size"], "op us": seconds["op"] * 1e6}
    shown |= {"GB/s": row["gb_per_s"], "TFLOP/s": row["tflop_per_s"]}
    shown |= {"of limit": f"{row['share_of_limit']:.0%} {row['limit']}", "/model": row["to_model_dtype"]}
    return shown | {name: f"{seconds[name] / seconds['op']:.2f}x" if name in seconds else "-" for name in names}


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"block_size": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "seconds": 0, "threads": 1}
    args = parser(program).parse_checked(check_arguments, arguments, **least)
    if not has_gpu(program, args.device):
        return 2
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    facts = hardware.describe(torch.device(args.device))
    names = names_of(args.device, args.skip)
    sizes = f"N={args.heads} K={args.kv_heads} H={args.head_dim}, model and alternatives in {args.dtype}"
    print(f"{facts.get('gpu', facts['cpu'])}\n{sizes}", flush=True)
    rows: list[Row] = []
    record: dict[str, Any] = {"statistic": args.statistic, "rows": rows, "turned": args.turned, "hot": args.hot}
    record["model"] = {key: getattr(args, key) for key in ("heads", "kv_heads", "head_dim", "dtype")}
    limits, rates = limit_runs(args.device, TORCH_DTYPES[args.dtype]), None
    if args.device == "cuda":  # nobody else uses it
        found = call_seconds({name: run for name, (run, _) in limits.items()}, 1, "cuda", seconds=0.1)
        rates = rates_of(limits, {name: min(values) for name, values in found.items()})
    cases = {case.name: case for case in args.decode + args.prefill}
    with errors_end(program, (WrongResultError,), status=1):
        for new in run_cases(args, cases, compile_case, lambda case: measure(case, args, limits, rates)):
            print(tables.text_table([table_row(row, names) for row in new]), flush=True)
            rows += new
            if args.json:  # after each case: a run that is cut off keeps what was done
                args.json.write_text(json.dumps(record | {"machine": facts}) + "\n")
    finish("attention", record, args.json, device=args.device)
    return 0
