"""A graph that is cut at its ops computes what the function does, in its order, on its memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.compiling.compiler import CutFunction, compile_ahead
from compiled_llm.compiling.ready_code import load_ready, ready_code
from compiled_llm.ops.torch_private import DynamicSize, aot_result, mark_dynamic_size


def layers(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Two kinds of layers, four times."""
    for place, weight in enumerate(weights):
        x = x + ops.rms_norm(x, weight, 1e-6).abs() * (1 + place % 2)
    return x


def views(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Of arguments, of what ops give and of what pieces give; one is used in two pieces."""
    heads = ops.rms_norm(x, weights[0], 1e-6).unflatten(1, (2, 4))
    first, second = heads.split([1, 1], dim=1)
    later = ops.rms_norm((first + second).flatten(1).repeat(1, 2).contiguous(), weights[1], 1e-6)
    return later[1:, 2:], second.flatten(1) * 2


def writes(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """In place, through views, before and after ops; ``&`` and ``|`` are not in place."""
    weights[2][:4] = x[0, :4]
    y = ops.rms_norm(x, weights[2], 1e-6)
    weights[2].narrow(0, 2, 4).copy_(y[0, 2:6])
    y = y.clone()
    y += 1
    z = ops.rms_norm(y, weights[2], 1e-6)
    y.mul_(2)
    bits = (x > 0) & (y > 1) | (z > 1)
    return ops.rms_norm(y, weights[3], 1e-6) + bits


def parts(x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Several results of an op and of a function, sizes that are computed, and a result that nobody uses."""
    total, normed = ops.add_rms_norm(x, x, weights[0], 1e-6)
    values, places = normed.topk(3, dim=1)
    ops.rms_norm(x, weights[1], 1e-6)
    rows = torch.arange(x.shape[0] * 2 - 1)
    return ops.rms_norm(total, weights[1], 1e-6), values, places, rows


def only_ops(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    return ops.rms_norm(ops.rms_norm(x, weights[0], 1e-6), weights[1], 1e-6)


def equal_sizes(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """A piece that sees nothing but a multiple of a size, which has two names: each is found equal to the other."""
    both = torch.cat((weights[4] + x, x + weights[4]), 1).view(-1, 8)
    return ops.rms_norm(ops.rms_norm(both, weights[0], 1e-6).abs() * 2, weights[1], 1e-6)


def indexed(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Rows of what an op gives, by their numbers, and columns: these are no results of its own."""
    normed = ops.rms_norm(x, weights[0], 1e-6)
    numbers = x.argmax(1) % x.shape[0]
    return ops.rms_norm(normed[numbers], weights[1], 1e-6) + normed[:, 2:3]


def arguments(rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(rows)
    x, weights = torch.randn(rows, 8, generator=generator), torch.rand(4, 8, generator=generator)
    others = torch.randn(rows, 8, generator=generator)
    for tensor in (x, others):
        mark_dynamic_size(tensor, 0, DynamicSize("rows", 3))
    return x, (*weights.clone(), others)


@pytest.mark.parametrize(
    ("function", "num_pieces"),
    [
        *(pytest.param(*case, marks=pytest.mark.battery) for case in ((layers, 2), (views, 2))),
        (writes, 4), (parts, 2), (only_ops, 0), (equal_sizes, 2), (indexed, 2),
    ],
)  # fmt: skip
def test_does_what_the_function_does(function: Callable[..., Any], num_pieces: int) -> None:
    """To the bit, also what it writes, for any number of rows; kept and not. Pieces that are alike are one."""
    ahead, facts = compile_ahead(function, function.__name__, arguments(3))
    assert (facts["graphs"], facts["graph_breaks"]) == (1, 0)
    cut = aot_result(ahead)
    assert isinstance(cut, CutFunction)
    assert len(cut.results) == num_pieces
    code = ready_code(ahead)
    assert code is not None
    for compiled in (ahead.fn, load_ready(code, function.__globals__)):
        for rows in (3, 1, 6):
            (x, weights), own = arguments(rows), arguments(rows)
            with torch.no_grad():
                expected, found = function(x, weights), compiled(*own)
            for one, other in zip((expected, x, *weights), (found, own[0], *own[1]), strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_variable_ends_with_its_last_use() -> None:
    """So that no activation of a layer is held until the step ends."""
    ahead, _ = compile_ahead(only_ops, "only_ops", arguments(3))
    lines = [line.strip() for line in aot_result(ahead).source.splitlines()]
    made = [line.split(" = ")[0] for line in lines if " = torch.ops" in line]
    assert f"del {made[0]}" in lines[lines.index(next(line for line in lines if line.startswith(made[1]))) + 1]
