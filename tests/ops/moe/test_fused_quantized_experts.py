"""Experts on quantised weights with a gate or a sum behind them: the bits of the single ops, in Triton's interpreter;
compiled ahead of time; registered, refused.
"""

import functools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import quantized_layouts, triton_quantize_rows
from compiled_llm.ops.linear.quantized_tiles import INT8, Choice
from compiled_llm.ops.linear.quantized_weight import WeightFormat, quantize
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu
from compiled_llm.ops.moe import fused_quantized_experts as registered
from compiled_llm.ops.moe import triton_quantized_grouped as grouped
from compiled_llm.ops.moe import triton_routing
from compiled_llm.ops.moe.routing import routed_rows_reference
from compiled_llm.ops.rowwise import triton_rowwise
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import PROGRAM_MEMORY, empty, floats, integers
from tests.ops.linear.test_triton_quantized import packed

EXPERTS, TOP_K, INPUTS = 5, 2, 100
FORMS = {
    "int8": WeightFormat("int8"),
    "int8-128-zeros": WeightFormat("int8", 128, True),
    "int4-32": WeightFormat("int4", 32, scale_dtype="bfloat16"),
    "int4-64-zeros": WeightFormat("int4", 64, True),
    "int4-128": WeightFormat("int4", 128),
    "fp8-128": WeightFormat("fp8", 128),
    "mxfp4": WeightFormat("fp4", 32, scale_dtype="bfloat16"),
}
KINDS = (
    *((name, "model") for name in FORMS),
    *((name, "int8") for name in FORMS if name.startswith("int")),
    *((name, "int8_groups") for name in FORMS if name.startswith("int") and FORMS[name].group_size),
)
"""Forms, and how activations are kept."""
IN_TWO_LAUNCHES = Choice(INT8[1].m, "triton", INT8[1])  # rows are quantised before


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing(tokens: int, real: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, places, tokens and starts of ``tokens`` tokens, of which ``real`` are no padding."""
    used, logits = torch.zeros(1, dtype=torch.int64), drawn(tokens, EXPERTS, seed=1)
    count = torch.tensor([real], dtype=torch.int32)
    weights, places, rows, starts = routed_rows_reference(logits, None, None, count, used, TOP_K, "softmax", 1.0, 1, 1)
    return weights, places, rows, starts


def product(
    name: str, activations: str, x: Tensor, weight: tuple, rows: Tensor | None, starts: Tensor, outputs: int
) -> Tensor:
    form = FORMS[name].element, FORMS[name].group_size, outputs
    if activations != "model":
        by_groups = activations == "int8_groups"
        return grouped.grouped_quantized_linear_a8(
            x, *weight, None, rows, starts, by_groups, *form, choice=IN_TWO_LAUNCHES
        )  # fmt: skip
    return grouped.grouped_quantized_linear(x, *weight, rows, starts, *form)


def gates_have_the_bits_of_single_ops(name: str, activations: str, activation: str) -> None:
    outputs = 2 * 21
    codes, _ = packed(FORMS[name], outputs, INPUTS, EXPERTS)
    weight = *codes, drawn(EXPERTS, outputs, seed=2).bfloat16()
    for tokens in (1, 9):
        _, _, rows, starts = routing(tokens, tokens)
        x = drawn(tokens, INPUTS, seed=3).bfloat16()
        form = FORMS[name].element, FORMS[name].group_size, outputs, activations
        got = grouped.gated_quantized_experts(x, *weight, rows, starts, *form, activation, 1.7, 0.9)
        y = product(name, activations, x, weight, rows, starts, outputs)
        if activation == "clamped_swiglu":
            want = triton_rowwise.clamped_swiglu(y, 1.7, 0.9)
        else:
            want = triton_rowwise.gated_activation(y, activation)
        assert got.isfinite().all()
        assert torch.equal(got, want)


def sums_have_the_bits_of_single_ops(name: str, activations: str) -> None:
    """With padding, of which all is zero but what is added; counters are zero again."""
    outputs, counters = 37, torch.zeros(4096, dtype=torch.int32)
    codes, _ = packed(FORMS[name], outputs, INPUTS, EXPERTS)
    weight = *codes, drawn(EXPERTS, outputs, seed=2).bfloat16()
    for tokens, real in ((1, 1), (9, 6)):
        weights, places, rows, starts = routing(tokens, real)
        x = drawn(tokens * TOP_K, INPUTS, seed=3).bfloat16()
        beside, residual = (drawn(tokens, outputs, seed=seed).bfloat16() for seed in (4, 5))
        form = FORMS[name].element, FORMS[name].group_size, outputs, activations
        got = grouped.summed_quantized_experts(
            x, *weight, rows, starts, *form, places, weights, beside, residual, counters
        )  # fmt: skip
        y = product(name, activations, x, weight, None, starts, outputs)
        assert torch.equal(got, triton_routing.weighted_sum(y, places, weights, beside, residual))
        assert not counters.any()


INTERPRETED = {
    **{
        f"gate-{name}-{kept}": functools.partial(gates_have_the_bits_of_single_ops, name, kept, "silu")
        for name, kept in KINDS
    },
    "gate-mxfp4-clamped": functools.partial(
        gates_have_the_bits_of_single_ops, "mxfp4", "model", "clamped_swiglu"
    ),
    **{
        f"sum-{name}-{kept}": functools.partial(sums_have_the_bits_of_single_ops, name, kept)
        for name, kept in KINDS
    },
}  # fmt: skip


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

LAYERS = {  # outputs, inputs, experts, of which a token uses, activation: of Qwen3-30B-A3B, gpt-oss and Mixtral
    "qwen3-gate": (1536, 2048, 128, 8, "silu"),
    "qwen3-down": (2048, 768, 128, 8, ""),
    "gpt-oss-gate": (5760, 2880, 32, 4, "clamped_swiglu"),
    "gpt-oss-down": (2880, 2880, 32, 4, ""),
    "mixtral-gate": (28672, 4096, 8, 2, "silu"),
    "mixtral-down": (4096, 14336, 8, 2, ""),
}
CASES = [
    (layer, *kind, tokens, capability)
    for layer in LAYERS
    for kind in KINDS
    for tokens in (1, 8, 32)
    for capability in ((8, 0), (9, 0), (10, 0))
    if capability[0] != 8 or not kind[0].startswith("fp8")
]
SOME = [("qwen3-gate", "int4-128", "int8", 32, (9, 0))]


@pytest.mark.parametrize(
    ("layer", "name", "activations", "tokens", "capability"),
    [pytest.param(*case, marks=() if case in SOME else pytest.mark.battery) for case in CASES],
    ids=str,
)
def test_compiles_without_spills(
    layer: str, name: str, activations: str, tokens: int, capability: tuple[int, int]
) -> None:
    outputs, inputs, experts, top_k, activation = LAYERS[layer]
    weight = empty_quantized_gpu(FORMS[name], outputs, inputs, torch.device("meta"), experts)
    rows, starts = integers(tokens * top_k), integers(experts + 1)
    form = FORMS[name].element, FORMS[name].group_size, outputs, activations
    with ahead_of_time.recorded(capability, grouped, triton_quantize_rows) as recorded:
        if activation:
            x = empty(tokens, inputs)
            grouped.gated_quantized_experts(x, *weight, None, rows, starts, *form, activation, 1.7, 7.0)
        else:
            x, added = empty(tokens * top_k, inputs), (integers(tokens, top_k), floats(tokens, top_k), None)
            counters = empty(tokens, outputs), integers(2**17)
            grouped.summed_quantized_experts(x, *weight, None, rows, starts, *form, *added, *counters)
    binary, registers = ahead_of_time.without_spills(recorded[-1], capability)
    print(f"| {layer} {name} {activations} {tokens} {capability} | {len(recorded)} | {registers} |")
    assert binary.metadata.shared <= PROGRAM_MEMORY[capability]


# ---- registered, refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["model", "int8", "int8_groups"])
def test_the_ops_are_registered_as_torch_expects(activations: str) -> None:
    form = WeightFormat("int8", 32)
    weight = quantized_layouts.empty_quantized(form, 12, 32, torch.device("cpu"), EXPERTS)
    plain = drawn(EXPERTS, 12, 32, seed=1)
    for expert in range(EXPERTS):
        quantized_layouts.pack_quantized_rows(weight.expert(expert), 0, quantize(plain[expert], form), form)
    weights, places, rows, starts = routing(3, 3)
    experts = *weight, None, rows, starts, "int8", 32, 12, activations
    x, hidden = drawn(3, 32, seed=2).bfloat16(), drawn(6, 32, seed=3).bfloat16()
    ops, utils = torch.ops.compiled_llm, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.gated_quantized_experts, (x, *experts, "silu", 0.0, 0.0), test_utils=utils)
    counters, residual = torch.zeros(64, dtype=torch.int32), drawn(3, 12, seed=4).bfloat16()
    added = places, weights, None, residual, counters
    torch.library.opcheck(ops.summed_quantized_experts, (hidden, *experts, *added), test_utils=utils)
    got = registered.summed_quantized_experts(hidden, experts, *added)
    owner = torch.repeat_interleave(torch.arange(EXPERTS), starts.diff())
    y = torch.einsum("rk,rnk->rn", hidden.float(), plain[owner])
    want = residual + sum(weights[:, j, None] * y[places[:, j].long()] for j in range(TOP_K))
    torch.testing.assert_close(got.float(), want, atol=0.2, rtol=0.1)
    assert registered.gated_quantized_experts(x, experts, "silu").shape == (6, 6)


def test_refuses_by_name() -> None:
    form, (weights, places, rows, starts) = FORMS["int8"], routing(3, 3)
    weight = empty_quantized_gpu(form, 12, 64, torch.device("cpu"), EXPERTS)
    experts, x = (*weight, None, rows, starts, "int8", 0, 12, "model"), torch.ones(3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="activation must be silu or"):
        grouped.gated_quantized_experts(x, *experts, "relu", 0.0, 0.0)
    counters = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"x must be \[6, K\] of bfloat16"):
        grouped.summed_quantized_experts(x, *experts, places, weights, None, None, counters)
    with pytest.raises(ValueError, match=r"counters must be \[3\] of torch.int32"):
        grouped.summed_quantized_experts(x.repeat(2, 1), *experts, places, weights, None, None, counters)


ORDINARY = [
    "gate-int8-model", "gate-mxfp4-clamped", "gate-int4-64-zeros-int8_groups", "sum-fp8-128-model", "sum-int4-128-int8",
]  # fmt: skip
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
