"""Sampling on the CPU: every instruction set against the reference, the distribution, the op's registration."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.sampling import token_sampling as sampling
from compiled_llm.ops.sampling.noise import HALVING, token_noise
from tests.ops.instruction_sets import by_set, ordinary_sets, skip_without
from tests.ops.sampling.sampling_cases import (
    DTYPES,
    OFF,
    SamplingCase,
    acceptable,
    check,
    chi_square_is_likely,
    expected,
    extreme_case,
    grid,
    make_case,
    probabilities,
)

Op = Callable[..., Tensor]
OP = "sampling_cpu"
VOCABULARIES = (1, 7, 257, 4096, 50000)


BEST = ordinary_sets(OP)[0]


@pytest.fixture(params=["op", *(isa for isa in by_set(OP) if isa.id != BEST)])
def run(request: pytest.FixtureRequest, kernels: native.Kernels) -> Op:
    """``sample_tokens`` as it is registered, on the best instruction set, or on another one."""
    if request.param == "op":
        return sampling.sample_tokens
    skip_without(kernels, request.param)
    return lambda *args: kernels.run("sample_tokens", *args, isa=request.param)


# ---- against the reference ------------------------------------------------------------------------------------------


@functools.cache
def cases(vocabulary: int) -> list[tuple[SamplingCase, Tensor]]:
    rows = 24 if vocabulary < 10_000 else 5
    made = [make_case(**kwargs, rows=rows) for _, kwargs in grid((vocabulary,))]
    return [(case, expected(case)) for case in made]


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES[:-1], pytest.param(VOCABULARIES[-1], marks=pytest.mark.battery)])
def test_grid(vocabulary: int, run: Op) -> None:
    for case, wanted in cases(vocabulary):
        check(case, run, wanted=wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 2, 255, 4096])
def test_extremes(vocabulary: int, dtype: torch.dtype, run: Op) -> None:
    check(extreme_case(vocabulary, dtype), run)


def test_many_top_ks(run: Op) -> None:
    """All the ends of a search: one token, a chunk, as many as there are chunks, all but one."""
    top_k = torch.tensor([*range(1, 40), *range(40, 4090, 31), *range(4090, 4100)], dtype=torch.int32)
    for pattern in ("normal", "few-values"):
        case = make_case(4096, pattern=pattern, rows=len(top_k), temperatures=(1.0,), min_ps=(0.0,))
        check(case._replace(top_k=top_k), run)


@pytest.mark.parametrize("vocabulary", [1, 257, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(vocabulary: int, dtype: torch.dtype, run: Op) -> None:
    """Rows of a wider tensor, whose other columns would change every token."""
    case = make_case(vocabulary, dtype=dtype)
    wide = torch.full((2 * len(case.logits), vocabulary + 37), math.inf, dtype=dtype)
    for strided in (wide[: len(case.logits), :vocabulary], wide[::2, 36 : 36 + vocabulary]):
        strided.copy_(case.logits)
        assert torch.equal(check(case._replace(logits=strided), run), run(*case))
        strided.fill_(math.inf)
    assert torch.equal(run(*case._replace(logits=case.logits[:1].expand_as(case.logits))), expected(
        case._replace(logits=case.logits[:1].repeat(len(case.logits), 1))
    ))  # fmt: skip


def test_a_row_alone_gives_the_same_token(run: Op) -> None:
    case = make_case(5000, dtype=torch.bfloat16, rows=40)
    together = run(*case)
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(torch.cat([run(*case.rows(slice(row, row + 1))) for row in range(40)]), together)
        order = torch.randperm(40)
        assert torch.equal(run(*case.rows(order)), together[order])


LOGIT = st.one_of(
    st.floats(-40, 40, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 5.0, 5.0000005, -1e4, 3e38, -3e38, -math.inf, -math.inf, math.nan]),
)
ROW = st.tuples(
    st.sampled_from([0.0, 1e-30, 0.5, 1.0, 1.7, 100.0]),
    st.one_of(st.integers(1, 40), st.just(OFF)),
    st.one_of(st.floats(1e-6, 1.0), st.just(1.0)),
    st.one_of(st.floats(0.0, 1.0), st.just(0.0)),
    st.one_of(st.floats(0.0, 4.0), st.just(0.0)),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**31 - 1),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 40).flatmap(lambda v: st.lists(st.lists(LOGIT, min_size=v, max_size=v), min_size=1)), st.data())
def test_any_rows(logits: list[list[float]], data: st.DataObject) -> None:
    params = [data.draw(ROW) for _ in logits]
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.float32, torch.int64, torch.int32)
    columns = [
        torch.tensor(column, dtype=dtype) for column, dtype in zip(zip(*params, strict=True), dtypes, strict=True)
    ]
    rows = torch.tensor(logits)
    check(SamplingCase(rows, *columns), sampling.sample_tokens, most_differences=len(logits))


# ---- the distribution -----------------------------------------------------------------------------------------------

OFFS = {"top_k": OFF, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0}
FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "top-k-top-p": {"top_k": 12, "top_p": 0.9},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.1, "top_n_sigma": 1.7},
}


def of_one_row(
    logits: Tensor, rows: int, temperature: float = 1.0, seed: int = 0, varies: str = "position", **filters: float
) -> SamplingCase:
    """The same logits and parameters for each position, or each seed."""
    given, numbers, fixed = OFFS | filters, torch.arange(rows), torch.full((rows,), seed)
    top_k = torch.full((rows,), int(given["top_k"]), dtype=torch.int32)
    others = [torch.full((rows,), given[name]) for name in ("top_p", "min_p", "top_n_sigma")]
    places = (fixed, numbers.int()) if varies == "position" else (numbers, fixed.int())
    return SamplingCase(logits.expand(rows, -1), torch.full((rows,), temperature), top_k, *others, *places)


def check_distribution(filters: dict[str, float], temperature: float, device: str = "cpu", **how: Any) -> None:
    """Chi-square of 100,000 samples against the exact distribution, p > 0.001."""
    count, logits = 100_000, torch.randn(300)
    case = of_one_row(logits, count, temperature, **filters, **how)
    counts = sampling.sample_tokens(*case.to(device)).cpu().bincount(minlength=300)
    assert chi_square_is_likely(counts, probabilities(logits, temperature, **{**OFFS, **filters}))


TEMPERATURES = (0.6, 1.0, 1.7)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, temperature, marks=() if name in ("plain", "top-k-top-p", "all") else pytest.mark.battery)
        for name, temperature in zip(FILTERS, itertools.cycle(TEMPERATURES), strict=False)
    ],
)
def test_distribution(name: str, temperature: float, kernels: native.Kernels) -> None:
    check_distribution(FILTERS[name], temperature)


@pytest.mark.battery
@pytest.mark.parametrize("seed", [-(2**63), 1, 2**31 - 1])
@pytest.mark.parametrize("varies", ["position", "seed"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", FILTERS)
def test_distribution_over_positions_and_requests(
    name: str, temperature: float, varies: str, seed: int, kernels: native.Kernels
) -> None:
    check_distribution(FILTERS[name], temperature, varies=varies, seed=seed if varies == "position" else seed & 0xFFFF)


@pytest.mark.parametrize("varies", ["position", "seed"])
def test_neighbours_are_independent(varies: str, kernels: native.Kernels) -> None:
    """Chi-square of pairs of tokens at positions, or of requests, that follow each other."""
    logits = torch.randn(12)
    tokens = sampling.sample_tokens(*of_one_row(logits, 200_000, varies=varies, seed=5))
    single = probabilities(logits, 1.0, **OFFS)
    for step in (1, 2, 64):
        pairs = tokens[: -step or None] * 12 + tokens[step:]
        counts = pairs[:: 2 * step].bincount(minlength=144)  # that have no token in common
        assert chi_square_is_likely(counts, torch.outer(single, single).flatten())


def test_a_wrong_distribution_is_found() -> None:
    counts = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 100_000, replacement=True).bincount(minlength=3)
    assert chi_square_is_likely(counts, torch.tensor([0.5, 0.3, 0.2]))
    assert not chi_square_is_likely(counts, torch.tensor([0.51, 0.3, 0.19]))
    assert not chi_square_is_likely(counts, torch.tensor([0.6, 0.4, 0.0]))


def test_every_token_that_stays_can_be_drawn(run: Op) -> None:
    """Each token wins that is a little ahead of all others, whose logits make up for their noise."""
    vocabulary, seed, position = 300, torch.tensor([3]), torch.tensor([8], dtype=torch.int32)
    noise = token_noise(seed, position, torch.arange(vocabulary)).double() / HALVING * math.log(2)
    logits = (-noise + 1e-4 * torch.eye(vocabulary)).float()
    case = of_one_row(logits[0], vocabulary)._replace(logits=logits)
    case = case._replace(seed=seed.expand(vocabulary).contiguous(), position=position.expand(vocabulary).contiguous())
    assert torch.equal(run(*case), torch.arange(vocabulary))
    without = logits.masked_fill(torch.eye(vocabulary).bool(), -math.inf)
    assert not (run(*case._replace(logits=without)) == torch.arange(vocabulary)).any()


@functools.cache
def equal_noise() -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, and for each two tokens whose noise at position 0 is the same whole number, the lower first."""
    tokens = torch.arange(2048).repeat(300, 1)
    noise = token_noise(torch.arange(300)[:, None], torch.zeros(1, 1, dtype=torch.int32), tokens)
    falling, order = noise.sort(dim=1, stable=True)
    seed, place = (falling[:, 1:] == falling[:, :-1]).nonzero().T
    return seed, order[seed, place], order[seed, place + 1]


def test_of_equal_sums_the_lowest_id_wins(run: Op) -> None:
    seed, first, second = equal_noise()
    count = len(seed)
    assert count > 5
    assert (first < second).all()
    logits = torch.full((count, 2048), -math.inf)
    for tokens in (first, second):
        logits[torch.arange(count), tokens] = 1.5
    case = of_one_row(logits[0], count)._replace(logits=logits, seed=seed, position=torch.zeros(count).int())
    assert torch.equal(run(*case), first)


# ---- the check itself -----------------------------------------------------------------------------------------------


def accepted(weights: list[float], **params: float) -> list[int]:
    params = {
        "temperature": 1.0,
        "top_k": OFF,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_n_sigma": 0.0,
        "seed": 0,
        "position": 0,
        **params,
    }
    return [token for token in range(len(weights)) if acceptable(token, torch.tensor(weights).log(), **params)]


def test_the_check_accepts_one_token_but_at_a_boundary() -> None:
    zero, one = torch.tensor([0]), torch.zeros(1, dtype=torch.int32)
    noise = token_noise(zero, one, torch.arange(4)).double() / HALVING
    order = noise.argsort(descending=True).tolist()
    assert accepted([1.0] * 4) == order[:1]
    assert accepted([0.0 if token == order[0] else 1.0 for token in range(4)]) == order[1:2]
    weights = [0.2, 0.5, 0.0, 0.3]
    winner = int((torch.tensor(weights).log2() + noise).argmax())
    assert accepted(weights) == [winner]
    as_far = torch.exp2(-noise).float().tolist()  # equal sums
    assert accepted(as_far) == [0, 1, 2, 3]
    assert accepted([2 * as_far[0], *as_far[1:]]) == [0]
    assert accepted(weights, top_k=1) == [1]
    assert accepted(weights, top_p=0.6) == [1]
    assert accepted(weights, min_p=0.6 + 1e-5) == [1]
    assert set(accepted([1.0, 0.4, 1.0, 1.0], min_p=0.4)) <= {0, 1, 2, 3}
    assert accepted([0.1, 0.1, 0.8], top_n_sigma=2.1) == [2]  # the distance is 2.12 standard deviations
    assert accepted(weights, temperature=0.0) == [1]
    assert accepted([0.0, 0.0]) == []  # NO_TOKEN alone


def test_the_check_accepts_either_side_of_a_boundary_of_a_filter() -> None:
    """A token whose weight is that of the filter by rounding may stay or go."""
    for seed in range(12):
        both, without = (accepted([1.0, weight], min_p=0.5, seed=seed) for weight in (0.5 + 1e-4, 0.5 - 1e-4))
        assert without == [0]
        assert accepted([1.0, 0.5], min_p=0.5, seed=seed) == sorted({0, *both})


def test_the_check_accepts_the_reference_and_no_other() -> None:
    case = make_case(20, rows=12, temperatures=(1.0,), scale=0.5)
    for row, token in enumerate(expected(case).tolist()):
        params = [column[row].item() for column in case[1:]]
        assert [t for t in range(20) if acceptable(t, case.logits[row], *params)] == [token]


# ---- the op ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", by_set(OP))
def test_greedy_tokens(kernels: native.Kernels, isa: str) -> None:
    skip_without(kernels, isa)
    for dtype in DTYPES:
        for vocabulary in (1, 7, 257, 5000):
            logits = make_case(vocabulary, pattern="few-values", dtype=dtype).logits
            assert torch.equal(sampling.greedy_tokens(logits), logits.float().argmax(-1))
            assert torch.equal(kernels.run("greedy_tokens", logits, isa=isa), logits.float().argmax(-1))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_op(rows: int) -> None:
    case = make_case(300, rows=rows)
    torch.library.opcheck(torch.ops.compiled_llm.sample_tokens.default, tuple(case))
    torch.library.opcheck(torch.ops.compiled_llm.greedy_tokens.default, (case.logits,))
    last_tokens = torch.full((rows + 1,), 7)
    torch.library.opcheck(torch.ops.compiled_llm.keep_greedy_tokens.default, (case.logits, last_tokens))
    sampling.keep_greedy_tokens(case.logits, last_tokens)
    assert torch.equal(last_tokens, torch.cat([sampling.greedy_tokens(case.logits), torch.tensor([7])]))


def test_fullgraph_compile() -> None:
    case = make_case(300)
    compiled = torch.compile(lambda *args: sampling.sample_tokens(*args) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*case), expected(case) + 1)


def test_refuses_wrong_inputs(kernels: native.Kernels) -> None:
    case = make_case(300, rows=4)
    wrong = [
        ({"logits": case.logits[0]}, r"must be \[R, V\]"),
        ({"logits": case.logits[:, :0]}, r"must be \[R, V\]"),
        ({"logits": case.logits.T.contiguous().T}, "last stride 1"),
        ({"logits": case.logits.double()}, "float32, bfloat16 or float16"),
        ({"temperature": case.temperature.double()}, r"temperature must be a contiguous \[4\]"),
        ({"temperature": case.temperature[:3]}, r"temperature must be a contiguous \[4\]"),
        ({"top_k": case.top_k.long()}, r"top_k must be a contiguous \[4\]"),
        ({"top_k": torch.tensor([1, 2, 0, 4], dtype=torch.int32)}, r"top_k\[2\] must be at least 1, got 0"),
        ({"top_p": torch.ones(8)[::2]}, r"top_p must be a contiguous \[4\]"),
        ({"min_p": case.min_p[None]}, r"min_p must be a contiguous \[4\]"),
        ({"top_n_sigma": case.top_n_sigma.half()}, r"top_n_sigma must be a contiguous \[4\]"),
        ({"seed": case.seed.int()}, r"seed must be a contiguous \[4\] of int64"),
        ({"position": case.position[:3]}, r"position must be a contiguous \[4\] of int32"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            sampling.sample_tokens(*case._replace(**change))
    with pytest.raises(ValueError, match="isa 'mmx' is unknown"):
        kernels.run("sample_tokens", *case, isa="mmx")
