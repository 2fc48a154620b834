"""Steps of requests with states of a fixed size, and arguments of the ops, shared by the tests of every device."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.recurrent.gated_delta_rule import gated_delta_rule_reference
from compiled_llm.ops.recurrent.mamba2_scan import mamba2_scan_reference
from compiled_llm.ops.recurrent.short_convolution import short_convolution_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = 12


class Request(NamedTuple):
    """One request of a step."""

    tokens: int
    before: int = 0
    """Tokens that it had before; None of them: it starts from zeros."""
    read: int = 0
    writes: tuple[tuple[int, int], ...] = ()
    """(after so many tokens, slot)."""
    padding: bool = False
    """Its tokens belong to nobody."""


# Decodes in their own slot, a chunk with writes on its way, one from zeros, one without tokens, a fork of a slot that
# another reads, padding.
MIXED = (
    Request(1, 5, 3, ((1, 3),)),
    Request(7, 4, 1, ((2, 4), (7, 1), (5, 6))),
    Request(5, 0, 8, ((5, 8),)),
    Request(0, 3, 5),
    Request(3, 9, 9, ((1, 7), (3, 11))),
    Request(2, 9, 9, ((2, 10),)),
    Request(2, padding=True),
)
DECODES = (*(Request(1, 3, slot, ((1, slot),)) for slot in (4, 2, 7)), Request(1, padding=True))
ONE = (Request(1, 0, 2, ((1, 2),)),)
CHUNK = (Request(100, 31, 5, ((64, 4), (33, 2), (100, 5))),)


def step(requests: Sequence[Request], past_the_end: int = 2) -> tuple[int, tuple[Tensor, ...]]:
    """Tokens of the step, and query_start_loc, seq_lens, read_slot, write_slot, write_after."""
    width = max(1, *(len(request.writes) for request in requests))
    starts = torch.tensor([0, *(request.tokens for request in requests)]).cumsum(0)
    lengths = [0 if request.padding else request.before + request.tokens for request in requests]
    writes = [(*request.writes, *[(0, 0)] * (width - len(request.writes))) for request in requests]
    values = (
        starts,
        torch.tensor(lengths),
        torch.tensor([request.read for request in requests]),
        torch.tensor([[slot for _, slot in row] for row in writes]),
        torch.tensor([[after for after, _ in row] for row in writes]),
    )
    return int(starts[-1]) + past_the_end, tuple(value.int() for value in values)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


class Case(NamedTuple):
    """Arguments of an op: ``inputs`` have a row for each token, ``state`` is written to."""

    name: str
    reference: Callable[..., Tensor]
    inputs: dict[str, Any]
    weights: dict[str, Any]
    state: Tensor
    after: dict[str, Any]

    def arguments(self, indices: Sequence[Tensor], state: Tensor, tokens: slice | Tensor = slice(None)) -> list:
        """In the order of the schema, for some of the tokens."""
        given = {name: None if x is None else x[tokens] for name, x in self.inputs.items()} | self.weights
        given |= {"state": state} | dict(zip(INDICES, indices, strict=True)) | self.after
        return [given[name] for name in self.order()]

    def order(self) -> list[str]:
        schema = getattr(torch.ops.compiled_llm, self.name).default._schema
        return [argument.name for argument in schema.arguments]

    def run(self, function: Callable[..., Tensor], indices: Sequence[Tensor], **cut: Any) -> tuple[Tensor, Tensor]:
        """(the output, the states afterwards)."""
        state = self.state.clone()
        return function(*self.arguments(indices, state, **cut)), state


INDICES = ("query_start_loc", "seq_lens", "read_slot", "write_slot", "write_after")


def convolution(
    dtype: torch.dtype, tokens: int, channels: int = 40, width: int = 4, *, silu: bool = True, bias: bool = False,
    gates: bool = False,
) -> Case:  # fmt: skip
    """The inputs are parts of one wider tensor, as of a product of linear layers."""
    wide = numbers(tokens, 3 * channels + 5, seed=channels, dtype=dtype)
    x, before, after = wide[:, : 3 * channels].split(channels, dim=1)
    inputs = {"x": x, "gate_before": before if gates else None, "gate_after": after if gates else None}
    weights = {"weight": numbers(channels, width, seed=1, dtype=dtype)}
    weights |= {"bias": numbers(channels, seed=2, dtype=dtype) if bias else None}
    state = numbers(SLOTS, width - 1, channels, seed=3, dtype=dtype)
    return Case("short_convolution", short_convolution_reference, inputs, weights, state, {"silu": silu})


def gated_delta(
    dtype: torch.dtype, tokens: int, key_heads: int = 1, heads: int = 2, dk: int = 16, dv: int = 32
) -> Case:
    """Queries, keys and values are parts of one tensor, as of a convolution's output."""
    sizes = [key_heads * dk, key_heads * dk, heads * dv]
    mixed = numbers(tokens, sum(sizes), seed=dk + dv, dtype=dtype)
    q, k, v = mixed.split(sizes, dim=1)
    inputs = {"q": q.unflatten(1, (-1, dk)), "k": k.unflatten(1, (-1, dk)), "v": v.unflatten(1, (-1, dv))}
    b, a = numbers(tokens, 2 * heads, seed=5, dtype=dtype, scale=2.0).chunk(2, dim=1)
    inputs |= {"a": a, "b": b}
    weights = {"A_log": torch.linspace(-4, 2, heads), "dt_bias": torch.linspace(-3, 1, heads)}
    state = numbers(SLOTS, heads, dk, dv, seed=6, scale=0.5)
    after = {"eps": 1e-6, "max_query_len": tokens}
    return Case("gated_delta_rule", gated_delta_rule_reference, inputs, weights, state, after)


def mamba2(
    dtype: torch.dtype, tokens: int, heads: int = 2, head_dim: int = 8, groups: int = 1, size: int = 16,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Case:  # fmt: skip
    """x, B and C are parts of one tensor, as of a convolution's output."""
    sizes = [heads * head_dim, groups * size, groups * size]
    x, b, c = numbers(tokens, sum(sizes), seed=head_dim + size, dtype=dtype).split(sizes, dim=1)
    inputs = {"x": x.unflatten(1, (-1, head_dim)), "B": b.unflatten(1, (-1, size)), "C": c.unflatten(1, (-1, size))}
    inputs |= {"dt": numbers(tokens, 2 * heads, seed=8, dtype=dtype)[:, :heads]}
    weights = {"A_log": torch.linspace(-2, 2.7, heads), "D": torch.linspace(-1, 2, heads)}
    weights |= {"dt_bias": torch.linspace(-5, 1, heads)}
    state = numbers(SLOTS, heads, head_dim, size, seed=9, scale=0.5)
    after = {"dt_min": limits[0], "dt_max": limits[1], "max_query_len": tokens}
    return Case("mamba2_scan", mamba2_scan_reference, inputs, weights, state, after)


CASES: dict[str, Callable[[torch.dtype, int], Case]] = {
    "convolution": lambda dtype, tokens: convolution(dtype, tokens),
    "convolution of 150 channels, bias": lambda dtype, tokens: convolution(dtype, tokens, 150, bias=True),
    "convolution over 3, gates": lambda dtype, tokens: convolution(dtype, tokens, 64, 3, silu=False, gates=True),
    "convolution over 2": lambda dtype, tokens: convolution(dtype, tokens, 33, 2, silu=False),
    "convolution over 8": lambda dtype, tokens: convolution(dtype, tokens, 128, 8, gates=True, bias=True),
    "delta rule": lambda dtype, tokens: gated_delta(dtype, tokens),
    "delta rule, 4 heads of 64": lambda dtype, tokens: gated_delta(dtype, tokens, 2, 4, 64, 64),
    "delta rule, odd sizes": lambda dtype, tokens: gated_delta(dtype, tokens, 1, 3, 21, 45),
    "scan": lambda dtype, tokens: mamba2(dtype, tokens),
    "scan of 64 by 128, limits": lambda dtype, tokens: mamba2(dtype, tokens, 2, 64, 1, 128, (0.02, 0.5)),
    "scan of 2 groups, odd sizes": lambda dtype, tokens: mamba2(dtype, tokens, 4, 37, 2, 21),
}


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype, states: float = 1e-5) -> None:
    """Outputs and states of a kernel against those of the reference. Small numbers may be differences of large ones."""
    assert got[0].is_contiguous()
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        tolerance = {torch.float32: states, torch.bfloat16: 2.1 * 2**-8, torch.float16: 2.1 * 2**-11}[g.dtype]
        largest = max(1.0, float(w.double().nan_to_num().abs().max()))
        torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=tolerance * largest)
