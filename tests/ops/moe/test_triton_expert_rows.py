"""The choice of experts and their rows without a GPU: run in Triton's interpreter, and compiled ahead of time."""

import functools

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.moe import routing, triton_expert_rows
from tests.ops import ahead_of_time, interpreted
from tests.ops.ahead_of_time import empty, floats

RULES = {  # top k, scoring, scale, groups, top groups; biased, scaled: whether there is a choice_bias, an expert_scale
    "qwen3-moe": ((8, "softmax", 1.0, 1, 1), False, False),
    "mixtral": ((2, "softmax_of_chosen", 1.0, 1, 1), False, False),
    "glm4-moe": ((8, "sigmoid", 2.5, 1, 1), True, False),
    "groups": ((3, "sigmoid", 1.5, 4, 2), True, False),
    "groups of one": ((2, "sigmoid", 1.0, 8, 3), True, False),
    "groups by their best": ((3, "softmax", 1.5, 4, 2), False, False),
    "gemma4-moe": ((4, "softmax_of_chosen", 1.0, 1, 1), False, True),
}


def arguments(
    name: str, tokens: int, experts: int, real: int | None = None, dtype: torch.dtype = torch.float32,
    ties: bool = False,
) -> list:  # fmt: skip
    rule, biased, scaled = RULES[name]
    generator = torch.Generator().manual_seed(tokens * experts)
    logits = torch.randn(tokens, experts, generator=generator)
    if ties:
        logits = logits.round()
        logits[logits == 0] = -0.0
        logits[::2] = logits[::2].abs()
    bias = torch.randn(experts, generator=generator).round() / 4 if biased else None
    scale = torch.rand(experts, generator=generator) if scaled else None
    count = torch.tensor([tokens if real is None else real], dtype=torch.int32)
    return [logits.to(dtype), bias, scale, count, torch.tensor([100]), *rule]


def reference(logits: Tensor, bias: Tensor | None, scale: Tensor | None, num_tokens: Tensor, used: Tensor, *rule):
    weights, experts = routing.route_reference(logits, bias, *rule)
    if scale is not None:
        weights = weights * scale[experts]
    return weights, *routing.expert_rows_reference(experts, num_tokens, used, logits.shape[1])


def check(given: list) -> None:
    """Whoever makes ``used`` the same has counted the same experts."""
    (*_, used), rule = given[:5], given[5:]
    counted = used.clone()
    want = reference(*given[:4], counted, *rule)
    got = triton_expert_rows.routed_rows(*given)
    torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=1e-5)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[3], want[3])
    rows = int(want[3][-1])
    assert torch.equal(got[2][:rows], want[2][:rows])
    assert torch.equal(used, counted)


def agrees_with_the_reference(name: str) -> None:
    """One launch up to 32 tokens, two for more; with padding; with experts that are no power of two, or too many."""
    for tokens, real, experts in ((1, 1, 8), (2, 1, 24), (8, 8, 128), (32, 30, 24), (33, 33, 24)):
        check(arguments(name, tokens, experts, real))
        check(arguments(name, tokens, experts, real, dtype=torch.bfloat16, ties=True))
    if name in ("qwen3-moe", "groups"):
        check(arguments(name, 256, 120, 250))
        check(arguments(name, 12, 520, 10))
    check(arguments(name, 2, 16, 0))


def one_expert_has_all_rows() -> None:
    for tokens in (32, 100):
        given = arguments("mixtral", tokens, 8)
        given[0][:, 3], given[5] = 50.0, 1
        check(given)


def a_token_has_the_same_bits_in_every_batch(name: str) -> None:
    logits, bias, scale, _, used, *rule = arguments(name, 100, 24)

    def weights(first: int, end: int) -> Tensor:
        count = torch.tensor([end - first], dtype=torch.int32)
        return triton_expert_rows.routed_rows(logits[first:end].contiguous(), bias, scale, count, used, *rule)[0]

    whole = weights(0, 100)
    for rows in ((0, 1), (99, 100), (40, 47), (3, 35)):
        assert torch.equal(weights(*rows), whole[slice(*rows)])


def numbers_that_are_none_still_choose() -> None:
    nan, inf = float("nan"), float("inf")
    given = arguments("mixtral", 4, 5)
    given[0][:] = torch.tensor([[nan] * 5, [-inf] * 5, [inf, 0, 1, nan, 2], [1, inf, -inf, inf, nan]])
    given[5] = 4
    counted = given[4].clone()
    want, got = reference(*given[:4], counted, *given[5:]), triton_expert_rows.routed_rows(*given)
    for one, other in zip(got[1:], want[1:], strict=True):
        assert torch.equal(one, other)
    assert got[0].isnan().any(1).all()


INTERPRETED = {
    **{f"reference-{name}": functools.partial(agrees_with_the_reference, name) for name in RULES},
    "batch-qwen3-moe": functools.partial(a_token_has_the_same_bits_in_every_batch, "qwen3-moe"),
    "batch-groups": functools.partial(a_token_has_the_same_bits_in_every_batch, "groups"),
    "one-expert": one_expert_has_all_rows,
    "nan": numbers_that_are_none_still_choose,
}
CASES = [
    (name, capability, *shape)
    for name in ("qwen3-moe", "groups")
    for capability in ((8, 0), (9, 0), (10, 0))
    for shape in ((1, 8), (32, 128), (32, 256), (256, 128), (256, 512), (2048, 8))
]


@pytest.mark.parametrize(
    ("name", "capability", "tokens", "experts"),
    [
        pytest.param(*case, marks=() if case == ("qwen3-moe", (9, 0), 32, 128) else pytest.mark.battery)
        for case in CASES
    ],
    ids=str,
)
def test_nothing_spills(name: str, capability: tuple[int, int], tokens: int, experts: int) -> None:
    given = arguments(name, 1, 24, dtype=torch.bfloat16)
    others = [x.to("meta") if isinstance(x, Tensor) else x for x in given[2:]]
    with ahead_of_time.recorded(capability, triton_expert_rows) as recorded:
        bias = None if given[1] is None else floats(experts)
        triton_expert_rows.routed_rows(empty(tokens, experts), bias, *others)
    assert len(recorded) == (1 if tokens <= 32 else 2)
    for launch in recorded:
        binary, _ = ahead_of_time.without_spills(launch, capability)
        assert "fma.rn.f32" not in binary.asm["ptx"], "a product that is rounded with a sum has other bits"


GIVEN = arguments("groups", 4, 24)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, GIVEN[0].double(), r"logits must be a contiguous \[T, E\]"),
        (0, GIVEN[0].t(), r"logits must be a contiguous \[T, E\]"),
        (1, GIVEN[1][:5], r"choice_bias must be a contiguous \[24\] of torch.float32"),
        (2, GIVEN[1].double(), r"expert_scale must be a contiguous \[24\] of torch.float32"),
        (3, torch.ones(2, dtype=torch.int32), r"num_tokens must be a contiguous \[1\] of torch.int32"),
        (4, torch.ones(1, dtype=torch.int32), r"used must be a contiguous \[1\] of torch.int64"),
        (5, 13, "top_k=13"),
        (5, 0, "top_k=0"),
        (8, 5, "groups=5"),
        (9, 5, "top_groups=5"),
    ],
)
def test_refuses_by_name(place: int, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_expert_rows.routed_rows(*GIVEN[:place], value, *GIVEN[place + 1 :])


def test_the_op_is_registered_as_torch_expects() -> None:
    torch.library.opcheck(torch.ops.compiled_llm.routed_rows, tuple(arguments("gemma4-moe", 5, 24)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RULES)
def test_on_a_gpu(name: str) -> None:
    for tokens, experts in ((1, 128), (32, 128), (300, 128)):
        given = arguments(name, tokens, experts)
        moved = [x.cuda() if isinstance(x, Tensor) else x for x in given]
        counted = given[4].clone()
        want, got = reference(*given[:4], counted, *given[5:]), routing.routed_rows(*moved)
        torch.testing.assert_close(got[0].cpu(), want[0], atol=1e-6, rtol=1e-5)
        assert torch.equal(got[1].cpu(), want[1])
        assert torch.equal(moved[4].cpu(), counted)


ORDINARY = ["reference-qwen3-moe", "batch-groups", "one-expert", "nan"]
test_interpreted = interpreted.each_of(INTERPRETED, ORDINARY)
