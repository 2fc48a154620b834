"""The router with norm and choice without a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear import triton_lora
from compiled_llm.ops.linear.lora import Following, LoraRows
from compiled_llm.ops.linear.triton_adapted import NUM_FLAGS
from compiled_llm.ops.moe import triton_routed_linear
from compiled_llm.ops.moe.routed_linear import routed_linear_reference
from compiled_llm.ops.moe.routing import MAX_ROWS
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats, integers
from tests.ops.linear import test_lora

EPS = 1e-5
RULES: dict[str, dict[str, Any]] = {  # as RULES of test_triton_expert_rows.py
    "qwen3-moe": {"rule": (8, "softmax", 1.0, 1, 1)},
    "mixtral": {"rule": (2, "softmax_of_chosen", 1.0, 1, 1)},
    "gpt-oss": {"rule": (4, "softmax_of_chosen", 1.0, 1, 1), "bias": True},
    "glm4-moe": {"rule": (8, "sigmoid", 2.5, 1, 1), "choice_bias": True, "router": torch.float32},
    "groups": {"rule": (3, "sigmoid", 1.5, 4, 2), "choice_bias": True, "router": torch.float32},
    "gemma4-moe": {"rule": (4, "softmax_of_chosen", 1.0, 1, 1), "expert_scale": True, "multiplier": 0.3},
    "without a norm": {"rule": (4, "softmax_of_chosen", 1.0, 1, 1), "norm": None},
    "with a sum": {"rule": (8, "softmax", 1.0, 1, 1), "delta": True},
}


def arguments(name: str, rows: int, experts: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> list:
    kind, generator = RULES[name], torch.Generator().manual_seed(experts * inputs)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    router = kind.get("router", dtype)
    return [
        drawn(rows, inputs, dtype=dtype),
        drawn(rows, inputs, dtype=dtype) if kind.get("delta") else None,
        drawn(inputs, dtype=dtype) if kind.get("norm", True) else None,
        EPS,
        (drawn(experts, inputs) / inputs**0.5).to(router),
        drawn(experts, dtype=router) if kind.get("bias") else None,
        drawn(experts) / 4 if kind.get("choice_bias") else None,
        drawn(experts).abs() if kind.get("expert_scale") else None,
        torch.tensor([rows], dtype=torch.int32),
        torch.tensor([100]),
        torch.zeros(17, dtype=torch.int32),
        *kind["rule"],
        drawn(inputs, dtype=dtype) if kind.get("multiplier") else None,
        kind.get("multiplier", 1.0),
    ]


def apart(given: list) -> list:
    """The same with scores that are far from each other, so that sums in another order choose no other experts.

    The router's first inputs say which experts a row prefers, in steps that rounding leaves in order.
    """
    x, delta, norm, _, weight = given[:5]
    experts, steps = len(weight), torch.arange(len(weight)).float()
    weight.zero_()
    turns = torch.stack([(steps * (2 * place + 1)) % experts for place in range(4)], 1) / 8
    weight[:, :4] = turns.to(weight.dtype)
    x[:, :4] = 0.0
    x[torch.arange(len(x)), torch.arange(len(x)) % 4] = 1.0
    x[:, 4:] *= 1e-3
    if delta is not None:
        delta[:, :4] = x[:, :4]
        delta[:, 4:] *= 1e-3
    for weights in (norm, given[-2]):
        if weights is not None:
            weights.fill_(1.0)
    for bias in given[5:7]:
        if bias is not None:
            bias.zero_()
    return given


def agrees_with_the_reference(name: str) -> None:
    """Experts are exactly those where scores are apart; the weights of random ones are near."""
    bf16, f16 = torch.bfloat16, torch.float16
    sizes = ((1, 8, 64, bf16), (5, 24, 300, f16), (32, 24, 1100, bf16), (33, 24, 64, f16), (70, 40, 300, bf16))
    for rows, experts, inputs, dtype in sizes:
        given = apart(arguments(name, rows, experts, inputs, dtype))
        given[8] -= int(rows > 1)  # padding
        counted = given[9].clone()
        want = routed_linear_reference(*given[:9], counted, *given[10:])
        got = triton_routed_linear.routed_linear(*given)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], atol=1e-3, rtol=2**-7)
        torch.testing.assert_close(got[2], want[2], atol=2e-2, rtol=2**-6)
        assert torch.equal(got[3], want[3])
        assert torch.equal(got[5], want[5])
        assert torch.equal(got[4][: want[5][-1]], want[4][: want[5][-1]])
        assert torch.equal(given[9], counted)
        assert not given[10].any(), "counters are zero again"
    random = arguments(name, 7, 24, 300)
    want, got = routed_linear_reference(*random), triton_routed_linear.routed_linear(*random)
    same = (want[3].sort().values == got[3].sort().values).all(1)
    assert same.float().mean() >= 0.5


def a_row_has_the_same_bits_in_every_batch(name: str) -> None:
    given = arguments(name, 90, 24, 300)
    whole = triton_routed_linear.routed_linear(*given)
    for rows in (slice(0, 1), slice(31, 32), slice(15, 18), slice(3, 20), slice(50, 85)):
        delta = None if given[1] is None else given[1][rows]
        part = triton_routed_linear.routed_linear(given[0][rows], delta, *given[2:])
        assert torch.equal(part[2], whole[2][rows])
        if RULES[name].get("norm", True):
            assert torch.equal(part[1], whole[1][rows])


def sums_are_those_of_the_layer() -> None:
    """With one expert more than a tile, and inputs in several shares: all logits, by the weights of all experts."""
    given = arguments("mixtral", 4, 17, 1500, torch.float16)
    given[11] = 17
    got = triton_routed_linear.routed_linear(*given)
    normed = rms_norm_reference(given[0], given[2], EPS)
    assert (got[1] != normed).float().mean() < 0.02
    want = (normed.float() @ given[4].float().t()).half().float().softmax(-1)
    torch.testing.assert_close(got[2], want.sort(descending=True).values, atol=1e-3, rtol=1e-2)


def changed_sums_have_the_bits_of_a_launch_of_their_own() -> None:
    """Of rows with slots and without; flags and counters are zeros again."""
    w, flags = test_lora.weights((300,), 72, 20, torch.bfloat16, slots=3), torch.zeros(NUM_FLAGS, dtype=torch.int32)
    for rows in (5, 40):
        given = arguments("with a sum", rows, 24, 300)
        slots, changed_by = torch.arange(rows, dtype=torch.int32) % 4, torch.randn(rows, 72).bfloat16()
        delta = given[1].clone()
        triton_lora.lora_followed(delta, changed_by, *LoraRows(slots), *w, flags, *Following())
        given[9] = torch.zeros(1, dtype=torch.int64)
        want = triton_routed_linear.routed_linear(given[0], delta, *given[2:])
        assert not torch.equal(delta, given[1])
        got = triton_routed_linear.routed_linear(*given, (changed_by, slots, *w, flags))
        assert all(map(torch.equal, got, want))
        assert not flags.any()
        assert not given[10].any()


INTERPRETED = {
    "changed": changed_sums_have_the_bits_of_a_launch_of_their_own,
    **{f"reference-{name}": functools.partial(agrees_with_the_reference, name) for name in RULES},
    "batch-with a sum": functools.partial(a_row_has_the_same_bits_in_every_batch, "with a sum"),
    "batch-without a norm": functools.partial(a_row_has_the_same_bits_in_every_batch, "without a norm"),
    "sums": sums_are_those_of_the_layer,
}


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

LAYERS = {"qwen3-moe": (128, 2048), "mixtral": (8, 4096), "gpt-oss": (32, 2880), "glm4-moe": (160, 5120)}
LAYERS["groups"] = 128, 7168


CASES = [
    (name, capability, rows)
    for name in LAYERS
    for capability in ((8, 0), (9, 0), (10, 0))
    for rows in (1, 8, 32, 64, 256)
]


@pytest.mark.battery
@pytest.mark.parametrize("rank", [0, 16, 64])
@pytest.mark.parametrize(("name", "capability", "rows"), CASES, ids=str)
def test_nothing_spills(name: str, capability: tuple[int, int], rows: int, rank: int) -> None:
    """``rank``: of adapters that change what is added; 0: none do."""
    experts, inputs = LAYERS[name]
    lora: tuple[Tensor, ...] = ()
    if rank:
        a, b = empty(8, 1, rank, 4096), empty(8, inputs // 16, rank, 16)
        of_slots = integers(8, 1), floats(8, 1), integers(2), integers(NUM_FLAGS)
        lora = tuple(
            torch.empty_like(one, device="cpu") for one in (empty(rows, 4096), integers(rows), a, b, *of_slots)
        )
    given = arguments(name, 1, experts, inputs)
    given[0] = given[1] = torch.empty(rows, inputs, dtype=torch.bfloat16)
    with ahead_of_time.recorded(capability, triton_routed_linear) as recorded:
        triton_routed_linear.routed_linear(*given, lora)
    (launch,) = recorded
    binary, _ = ahead_of_time.without_spills(launch, capability, spilled=8 if rank else 0)
    assert binary.metadata.shared <= 99 * 1024
    assert ("fma.rn.f32" if given[4].dtype == torch.float32 else "mma.sync") in binary.asm["ptx"]
    assert "wgmma" not in binary.asm["ptx"]


# ---- registered, refused --------------------------------------------------------------------------------------------

GIVEN = arguments("groups", 4, 24, 64)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, GIVEN[0].float(), "dtype of x must be bfloat16 or float16"),
        (0, GIVEN[0].repeat(65, 1), "x must have 1 to 256 rows, got 260"),
        (1, GIVEN[0][1:], r"delta must be \[4, 64\] on cpu as x is, and come with a norm, got \[3, 64\]"),
        (2, GIVEN[2][:5], r"norm must be a contiguous \[64\] of torch.bfloat16 or torch.float32"),
        (4, GIVEN[4].half(), r"weight must be a contiguous \[24, 64\] of torch.bfloat16 or torch.float32"),
        (4, torch.zeros(129, 64), "at most 128 experts, got 129"),
        (5, GIVEN[2][:24], r"bias must be a contiguous \[24\] of torch.float32"),
        (10, GIVEN[10].long(), "counters must be a contiguous"),
        (10, GIVEN[10][:1], "counters must be more than 1, got 1"),
        (11, 13, "top_k=13"),
    ],
)
def test_refuses_by_name(place: int, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_routed_linear.routed_linear(*GIVEN[:place], value, *GIVEN[place + 1 :])


@pytest.mark.parametrize("name", ["groups", "gemma4-moe", "with a sum"])
def test_the_op_is_registered_as_torch_expects(name: str) -> None:
    torch.library.opcheck(
        torch.ops.compiled_llm.routed_linear, tuple(arguments(name, 3, 24, 64)),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_the_op_with_adapters_is_registered_as_torch_expects() -> None:
    """And its reference is that of ``routed_linear`` for the changed sum."""
    w = test_lora.weights((64,), 72, 20, torch.bfloat16, slots=3)
    lora = [torch.randn(4, 72).bfloat16(), torch.arange(4, dtype=torch.int32), *w, torch.zeros(2, dtype=torch.int32)]
    given = arguments("with a sum", 4, 24, 64)
    op = torch.ops.compiled_llm.changed_routed_linear
    torch.library.opcheck(op, (*given, lora), test_utils=("test_schema", "test_faketensor"))
    x, delta, *rest = given
    changed = delta.clone()
    torch.ops.compiled_llm.add_lora(changed, *lora[:-1])
    assert not torch.equal(changed, delta)
    want = torch.ops.compiled_llm.routed_linear(x, changed, *rest)
    assert all(map(torch.equal, op(x, delta.clone(), *rest, lora), want))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_on_a_gpu(name: str) -> None:
    for rows in (1, 8, 32, 64, MAX_ROWS):
        given = [x.cuda() if isinstance(x, Tensor) else x for x in apart(arguments(name, rows, 128, 2048))]
        want, got = routed_linear_reference(*given), triton_routed_linear.routed_linear(*given)
        assert torch.equal(got[3], want[3])
        assert torch.equal(got[5], want[5])
        torch.testing.assert_close(got[2], want[2], atol=2e-2, rtol=2**-6)
        assert not given[10].any()


test_interpreted = interpreted.each_of(INTERPRETED, ["reference-qwen3-moe", "batch-with a sum", "sums", "changed"])
