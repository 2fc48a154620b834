"""Times layers with a state of a fixed size on a CPU: a decode against a plain sum of a large tensor, and a chunk.

    compiled-llm bench recurrent --threads 2

The layers are those of published models. A decode reads and writes the states of its requests, in other slots than in
the rounds before, so that these come from memory; GB/s counts what is read and written. In every round it takes turns
with the sum, whose rate is that of reading alone. A chunk is one request from its start, in microseconds for each token
and head (channels of a convolution: for 128 of them).
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser
from compiled_llm.bench.harness import CACHED_BYTES, finish, in_turns, limit_runs, seconds_of
from compiled_llm.ops import gated_delta_rule, mamba2_scan, native, short_convolution
from compiled_llm.ops.recurrent.state_rows import StateRows


class Layer(NamedTuple):
    """``sizes``: channels and width; or key heads, heads, dk and dv; or heads, P, groups and N."""

    name: str
    op: str
    sizes: tuple[int, ...]


LAYERS = [
    Layer("qwen3-next delta rule", "gated_delta_rule", (16, 32, 128, 128)),
    Layer("qwen3-next convolution", "short_convolution", (8192, 4)),
    Layer("granite-4.0-h-small scan", "mamba2_scan", (128, 64, 1, 128)),
    Layer("lfm2-1.2b convolution", "short_convolution", (2048, 3)),
]


def rows_of(length: int, before: int, slots: list[int]) -> tuple[Tensor, ...]:
    """Requests of so many tokens each, which read and write their slots."""
    starts = torch.arange(len(slots) + 1).int() * length
    slot = torch.tensor(slots).int()
    after = torch.full((len(slots), 1), length).int()
    return starts, torch.full((len(slots),), before + length).int(), *StateRows(slot, slot[:, None], after)


def shape_of(layer: Layer) -> tuple[tuple[int, ...], torch.dtype, int]:
    """Of a slot: its shape, its dtype, and its heads or groups of 128 channels."""
    if layer.op == "short_convolution":
        channels, width = layer.sizes
        return (width - 1, channels), torch.bfloat16, channels // 128
    if layer.op == "gated_delta_rule":
        _, heads, dk, dv = layer.sizes
        return (heads, dk, dv), torch.float32, heads
    heads, head_dim, _, size = layer.sizes
    return (heads, head_dim, size), torch.float32, heads


def call_of(layer: Layer, tokens: int, state: Tensor) -> Callable[..., Tensor]:
    """The op of the layer for some rows, on inputs in bfloat16."""

    def numbers(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape).bfloat16()

    if layer.op == "short_convolution":
        channels, width = layer.sizes
        given = numbers(channels), torch.randn(channels, width).bfloat16(), None, state
        return lambda *rows: short_convolution(*given, *rows, silu=width == 4)
    if layer.op == "gated_delta_rule":
        key_heads, heads, dk, dv = layer.sizes
        inputs: tuple[Any, ...] = (
            numbers(key_heads, dk),
            numbers(key_heads, dk),
            numbers(heads, dv),
            numbers(heads),
            numbers(heads),
        )
        weights: tuple[Any, ...] = torch.zeros(heads), torch.zeros(heads)
        given = (*inputs, *weights, state)
        return lambda *rows: gated_delta_rule(*given, *rows, max_query_len=tokens)  # type: ignore[arg-type]
    heads, head_dim, groups, size = layer.sizes
    inputs = numbers(heads, head_dim), numbers(heads), numbers(groups, size), numbers(groups, size)
    weights = torch.zeros(heads), torch.ones(heads), torch.zeros(heads)
    return lambda *rows: mamba2_scan(*inputs, *weights, state, *rows, max_query_len=tokens)


def measure(layer: Layer, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the table."""
    shape, dtype, heads = shape_of(layer)
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    slots = max(2 * args.batch_size, CACHED_BYTES // nbytes)
    state = native.huge_zeros((slots, *shape), dtype).normal_()
    decode, chunk = call_of(layer, args.batch_size, state), call_of(layer, args.tokens, state)
    read, read_bytes = limit_runs("cpu", torch.float32, 16)["memory"]
    first = 0

    def decode_seconds() -> float:
        nonlocal first
        rows = rows_of(1, 5, [(first + j) % slots for j in range(args.batch_size)])
        first += args.batch_size
        return seconds_of(lambda: decode(*rows))

    runs = {
        "read": lambda: seconds_of(lambda: read(0)),
        "decode": decode_seconds,
        "chunk": lambda: seconds_of(lambda: chunk(*rows_of(args.tokens, 0, [1]))),
    }
    times = in_turns(runs, rounds=args.rounds, seconds=args.seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    moved, rate = 2 * nbytes * args.batch_size / medians["decode"] / 1e9, read_bytes / medians["read"] / 1e9
    return {
        "layer": layer.name,
        "state_kb": nbytes / 1e3,
        "decode_us": medians["decode"] * 1e6,
        "decode_gb_per_s": moved,
        "read_gb_per_s": rate,
        "of_read": moved / rate,
        "chunk_us_per_token_and_head": medians["chunk"] * 1e6 / args.tokens / heads,
        "rounds": len(times["read"]),
    }


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Layers with a state of a fixed size, on a CPU.")
    names = [layer.name for layer in LAYERS]
    made.add_argument("--layers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    made.add_argument("--batch-size", type=int, default=1, help="requests of a decode (default: 1)")
    made.add_argument("--tokens", type=int, default=512, help="of a chunk (default: 512)")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    made.add_argument("--rounds", type=int, default=100, help="calls of each, at most (default: 100)")
    made.add_argument("--seconds", type=float, default=5.0, help="for a layer, about (default: 5)")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    least = {"threads": 1, "rounds": 1, "seconds": 0, "tokens": 1, "batch_size": 1}
    args = parser(program).parse_checked(None, arguments, **least)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = native.load("recurrent_cpu")
    layers = [layer for layer in LAYERS if layer.name in args.layers]
    rows = [measure(layer, args) for layer in tqdm(layers, disable=None, leave=False)]
    print(f"activations in bfloat16, states as the layer has them\n{tables.text_table(rows)}")
    facts = {"dtype": "bfloat16", "results": rows, "threads": args.threads, "tokens": args.tokens}
    facts |= {"batch_size": args.batch_size, "kernels": kernels.supported_isas()[0] if kernels else "plain torch"}
    finish("recurrent", facts, args.json)
    return 0
