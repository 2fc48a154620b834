"""The noise of tokens: its bits, its distribution, and how often two models that share it draw the same token."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import sample_tokens
from compiled_llm.ops.sampling import noise as noise_module
from compiled_llm.ops.sampling.noise import BLOCK, HALVING, block_noise, token_noise
from compiled_llm.ops.sampling.reference import depths, kept_tokens, sample_tokens_reference
from tests.ops.sampling.sampling_cases import OFF, PATTERNS, SamplingCase, chi_square_is_likely, make_case
from tests.ops.sampling.test_philox import written_out

NUM_SAMPLES = 25_600
INT32 = torch.int32


def noise_of(tokens: Tensor, seed: int = 0, position: int = 0) -> Tensor:
    return token_noise(torch.tensor([seed]), torch.tensor([position], dtype=INT32), tokens)


# ---- bits -----------------------------------------------------------------------------------------------------------


def exact_exponential(word: int) -> float:
    """``-log2(v / 2^31)`` to the last digits of a float64, also next to 0."""
    v = (word >> 1) | 1
    rest = 1 - Fraction(v, 2**31)
    return -math.log1p(-float(rest)) / math.log(2) if rest < Fraction(1, 2) else -math.log2(v / 2**31)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (-1, 2**31 - 1), (2**63 - 1, 5), (-(2**63), 255)])
def test_noise_is_what_philox_and_logarithms_give(seed: int, position: int) -> None:
    tokens = [0, 1, 63, 64, 65, 1000, 151_935, 2**22, *range(2000, 2128)]
    key = (seed % 2**32, seed // 2**32 % 2**32)
    found = noise_of(torch.tensor(tokens), seed, position)
    assert found.dtype == INT32
    firsts = 0
    for token, noise in zip(tokens, found.tolist(), strict=True):
        first, second = written_out((position, token // BLOCK, 0, 0), key)[:2]
        exponential = exact_exponential(first) / BLOCK
        if token % BLOCK == second % BLOCK:
            firsts += 1
        else:
            exponential += exact_exponential(written_out((position, token, 1, 0), key)[0])
        assert abs(noise + math.log2(exponential) * HALVING) < 5
    assert firsts >= 2 * (2128 - 2000) // BLOCK // 2


def test_noise_has_the_bits_of_the_first_release() -> None:
    """Seeded outputs depend on these numbers: they never change."""
    seeds, positions = torch.tensor([[0], [1], [-5], [2**62]]), torch.tensor([[0], [1], [9], [2**31 - 1]], dtype=INT32)
    assert token_noise(seeds, positions, torch.tensor([0, 1, 50, 63, 64, 151_935])).tolist() == FROZEN


FROZEN = [
    [653342, -2129805, -21275198, 6720764, -12546843, -51160636],
    [-18168776, 14901421, -9901573, 16947084, 5297302, 965330],
    [1937458, -30486633, -32848316, -11302875, -35504920, -10773497],
    [-22370905, 10685845, 53151993, 2563817, -36994055, -17104895],
]


@pytest.mark.parametrize("low", [0, 2**31 - 2**16, 2**32 - 2**18])
def test_exponential_variables_are_exact_to_the_last_bits_of_a_float32(low: int) -> None:
    words = torch.cat([torch.arange(low, low + 2**16), torch.randint(2**32, (2**14,))])
    found = noise_module._exponential(words).double()
    v = ((words >> 1) | 1).double() / 2**31
    exact = torch.where(v < 0.5, -v.log2(), -torch.log1p(v - 1) / math.log(2))
    assert ((found - exact).abs() <= exact * 2.0**-22).all()
    assert found.min() > 0


@pytest.mark.parametrize("end", [0x3F810000, pytest.param(0x40000001, marks=pytest.mark.battery)])
def test_a_larger_exponential_variable_never_has_a_larger_noise(end: int) -> None:
    """All float32 of an octave, and both ends of the others: so what bounds a block bounds each of its tokens."""
    octave = torch.arange(0x3F800000, end, dtype=INT32).view(torch.float32)
    found = noise_module._gumbel(octave)
    assert (found.diff() <= 0).all()
    assert (found[:-1].double() + octave[:-1].double().log2() * HALVING).abs().max() < 2
    powers = torch.exp2(torch.arange(-38.0, 6.0))
    ends = torch.stack([powers, powers.nextafter(torch.tensor(torch.inf))], dim=1).flatten()
    below = torch.stack([powers.nextafter(torch.tensor(0.0)), powers], dim=1).flatten()
    for numbers in (ends, below):
        assert (noise_module._gumbel(numbers).diff() <= 0).all()


def test_the_noise_of_a_block_is_the_largest_of_its_tokens() -> None:
    seed, position = torch.tensor([11]), torch.tensor([4], dtype=INT32)
    tokens = token_noise(seed, position, torch.arange(1000 * BLOCK)).view(-1, BLOCK)
    largest, place = block_noise(seed, position, torch.arange(1000))
    assert torch.equal(tokens.max(dim=1).values, largest)
    assert torch.equal(tokens.gather(1, place[:, None]).squeeze(1), largest)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, -9, 5 + 2**32, 0]), torch.tensor([0, 1, 0, 5], dtype=INT32)
    tokens = torch.randint(151_936, (1000,))
    together = token_noise(seeds[:, None], positions[:, None], tokens)
    for row in range(4):
        alone = noise_of(tokens.flip(0), int(seeds[row]), int(positions[row])).flip(0)
        assert torch.equal(alone, together[row])
    assert len({tuple(row) for row in together.tolist()}) == 4


# ---- distribution ---------------------------------------------------------------------------------------------------


def uniform_of(noise: Tensor) -> Tensor:
    """The share of the distribution below each."""
    return torch.exp(-math.log(2) * torch.exp2(-noise.double() / HALVING))


def is_uniform(numbers: Tensor) -> bool:
    bins = (numbers * 50).long().clamp(max=49)
    return chi_square_is_likely(torch.bincount(bins, minlength=50), torch.full((50,), 1 / 50))


def are_independent(first: Tensor, second: Tensor) -> bool:
    pairs = (first * 20).long().clamp(max=19) * 20 + (second * 20).long().clamp(max=19)
    return chi_square_is_likely(torch.bincount(pairs, minlength=400), torch.full((400,), 1 / 400))


def along(varies: str, fixed: int = 3) -> Tensor:
    """The shares of noise along tokens, positions or seeds."""
    numbers = torch.arange(NUM_SAMPLES)
    others = torch.full_like(numbers, fixed)
    seed, position, token = (numbers if varies == name else others for name in ("seed", "position", "token"))
    return uniform_of(token_noise(seed, position.int(), token))


@pytest.mark.parametrize("varies", ["token", "position", "seed"])
def test_noise_is_gumbel_and_neighbours_are_independent(varies: str) -> None:
    shares = along(varies)
    assert 0 < shares.min() < 1e-4
    assert 1 - 1e-4 < shares.max() < 1
    assert is_uniform(shares)
    for step in (1, 2, BLOCK):
        pairs = shares[: NUM_SAMPLES // (2 * step) * 2 * step].view(-1, 2, step)
        assert are_independent(pairs[:, 0].flatten(), pairs[:, 1].flatten())


def test_a_token_is_independent_of_others_at_other_positions() -> None:
    assert are_independent(along("position", 3)[1:], along("position", 3)[:-1])
    assert are_independent(along("position", 3), along("position", 4))
    assert are_independent(along("seed", 3), along("seed", 3 + BLOCK))
    assert not are_independent(along("seed", 3), along("seed", 3))


def test_what_a_block_shares_does_not_show() -> None:
    """Of 64 independent numbers the largest of any half, the second largest, and the place of the largest."""
    seeds = torch.arange(4000)[:, None]
    blocks = uniform_of(token_noise(seeds, torch.zeros(1, 1, dtype=INT32), torch.arange(BLOCK)))
    assert is_uniform(blocks.max(dim=1).values ** BLOCK)
    halves = blocks.view(-1, 2, BLOCK // 2).max(dim=2).values ** (BLOCK // 2)
    assert is_uniform(halves[:, 0])
    assert are_independent(halves[:, 0], halves[:, 1])
    first, second = blocks.topk(2, dim=1).values.T
    assert is_uniform((second / first) ** (BLOCK - 1))
    assert are_independent((second / first) ** (BLOCK - 1), first**BLOCK)
    assert chi_square_is_likely(blocks.argmax(1).bincount(minlength=BLOCK), torch.full((BLOCK,), 1 / BLOCK))


# ---- the draw -------------------------------------------------------------------------------------------------------


def by_all_noise(case: SamplingCase) -> Tensor:
    """The tokens of rows that are not greedy and have one, from the noise of the whole vocabulary."""
    logits = case.logits.float()
    noise = token_noise(case.seed[:, None], case.position[:, None], torch.arange(logits.shape[1]))
    sums = torch.where(kept_tokens(logits, *case[1:6]), noise - depths(logits, case.temperature), -(2**31))
    return sums.max(dim=1).indices


@pytest.mark.parametrize("pattern", PATTERNS)
def test_noise_that_is_not_computed_would_not_have_won(pattern: str) -> None:
    for vocabulary in (1, 63, 65, 1000, 4000):
        rows = 20 if vocabulary < 4000 else 5
        case = make_case(vocabulary, pattern=pattern, rows=rows, temperatures=(0.3, 0.7, 1.0, 2.0, 100.0))
        case = case.rows(case.logits.max(dim=1).values > -torch.inf)
        wanted = by_all_noise(case)
        assert torch.equal(sample_tokens_reference(*case), wanted)
        assert torch.equal(sample_tokens(*case), wanted)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_shards_of_a_vocabulary_join_exactly(shards: int) -> None:
    """As tensor parallelism would: of each shard the largest sum and its lowest token, and then those of all."""
    case = make_case(5000, rows=30, temperatures=(0.7, 1.0, 2.0), scale=1.0)
    logits = case.logits.float()
    stays, depth = kept_tokens(logits, *case[1:6]), depths(logits, case.temperature)
    best = []
    for tokens in torch.arange(5000).tensor_split(shards):
        noise = token_noise(case.seed[:, None], case.position[:, None], tokens)
        largest, place = torch.where(stays[:, tokens], noise - depth[:, tokens], -(2**31)).max(dim=1)
        best.append((largest, tokens[place]))
    sums, tokens = (torch.stack(column) for column in zip(*best, strict=True))
    assert torch.equal(tokens.gather(0, sums.argmax(dim=0)[None])[0], sample_tokens(*case))


# ---- what a drafter gains -------------------------------------------------------------------------------------------


def agreements(vocabulary: int, temperature: float, positions: int, models: int) -> dict[str, float]:
    """How often a model and a drafter draw the same token, by each way, at synthetic logits.

    The model's logits have a standard deviation of 2.5; the drafter's are those and noise of 0.7 more. "optimum" is
    what rejection sampling reaches, the sum of the lesser probabilities.
    """
    ways = ("gumbel", "gumbel, exactly", "one uniform number", "independent", "optimum")
    found: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(models):
        generator = torch.Generator().manual_seed(number)
        model = torch.randn(vocabulary, generator=generator) * 2.5
        drafter = model + torch.randn(vocabulary, generator=generator) * 0.7

        def tokens(logits: Tensor, seed: int) -> Tensor:
            columns = [torch.full((positions,), value) for value in (temperature, 1.0, 0.0, 0.0)]
            top_k, place = torch.full((positions,), OFF, dtype=INT32), torch.arange(positions, dtype=INT32)
            rows = logits.expand(positions, -1)
            return sample_tokens(
                rows, columns[0], top_k, *columns[1:], seed=torch.full((positions,), seed), position=place
            )

        p, q = ((logits.double() / temperature).softmax(0) for logits in (model, drafter))
        uniform = torch.rand(positions, dtype=torch.float64, generator=generator)
        inverse = [torch.searchsorted(x.cumsum(0), uniform) for x in (p, q)]
        own = tokens(model, number)
        found["gumbel"].append(float((own == tokens(drafter, number)).double().mean()))
        # Of each token the chance that both draw it (Maddison et al., 2014; Daliri et al., 2024, arXiv:2408.07978).
        chances = 1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(dim=1)
        found["gumbel, exactly"].append(float(chances.sum()))
        found["independent"].append(float((own == tokens(drafter, -1 - number)).double().mean()))
        found["one uniform number"].append(float((inverse[0] == inverse[1]).double().mean()))
        found["optimum"].append(float(torch.minimum(p, q).sum()))
    return {name: sum(shares) / models for name, shares in found.items()}


@pytest.mark.parametrize(
    ("temperature", "least"),
    [(1.0, 0.61), *(pytest.param(*c, marks=pytest.mark.battery) for c in ((0.7, 0.55), (0.3, 0.54)))],
)
def test_a_drafter_with_the_models_noise_draws_its_token(temperature: float, least: float) -> None:
    """At a temperature of 1, over 200 models: 67%; rejection sampling 73%, one uniform number for both 23%."""
    shares = agreements(2000, temperature, positions=300, models=10)
    assert least < shares["gumbel"] < shares["optimum"]
    assert abs(shares["gumbel"] - shares["gumbel, exactly"]) < 0.03
    rest = 1 - shares["optimum"]
    assert shares["gumbel, exactly"] >= (1 - rest) / (1 + rest), "which no coupling exceeds for all distributions"
    assert shares["gumbel"] > shares["one uniform number"] + (0.3 if temperature == 1 else 0)
    assert shares["independent"] < shares["gumbel"] - 0.05
