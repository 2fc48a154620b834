"""The sampler: random numbers from (seed, position) alone, and every filter's exact distribution."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from compiled_llm.ops import greedy_tokens
from compiled_llm.ops.sampling.reference import NO_TOKEN
from compiled_llm.step import sampling as sampler
from compiled_llm.step.sampling import SamplingInput, philox, sample, uniform
from tests.ops.sampling.sampling_cases import chi_square_is_likely

NUM_SAMPLES = 100_000
OFF = 2**31 - 1  # of top_k
INT64, INT32 = torch.int64, torch.int32


# -- Random numbers


def written_out(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's own integers, as section 3.3 of Salmon et al., 2011, describes it."""
    (a, b, c, d), (key0, key1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2511F53, 2**32)
        high1, low1 = divmod(c * 0xCD9E8D57, 2**32)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return a, b, c, d


# The known answers that the authors publish with their library, Random123: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_the_written_out_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert written_out(counter, key) == words


def test_all_words_of_philox_are_those_of_the_written_out_one() -> None:
    seeds = [0, 1, -1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x299F31D0A4093822]
    positions = [0, 1, 2, 255, 65_536, 0x243F6A88, 2**31 - 1]
    pairs = [(seed, position) for seed in seeds for position in positions]
    words = philox(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs], dtype=INT32))
    expected = [written_out((p, 0, 0, 0), (s % 2**32, s // 2**32 % 2**32)) for s, p in pairs]
    assert list(zip(*(word.tolist() for word in words), strict=True)) == expected
    assert expected[0] == KNOWN_ANSWERS[0][2]


def test_uniform_has_53_bits_of_the_first_two_words() -> None:
    positions = torch.arange(500, dtype=INT32)
    found = uniform(torch.full((500,), -3), positions)
    assert found.dtype == torch.float64
    key = (2**32 - 3, 2**32 - 1)
    words = [written_out((position, 0, 0, 0), key) for position in range(500)]
    assert found.tolist() == [((word[0] << 32 | word[1]) >> 11) / 2**53 for word in words]


@pytest.mark.parametrize(("word", "number"), [(0, 0.0), (0xFFFFFFFF, 1 - 2.0**-53)])
def test_uniform_is_never_1(word: int, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "philox", lambda seed, position: (torch.full_like(seed, word),) * 4)
    assert uniform(torch.zeros(1, dtype=INT64), torch.zeros(1, dtype=INT32)).item() == number < 1


def test_uniform_depends_on_seed_and_position_alone() -> None:
    seeds = torch.tensor([5, 5, -9, 5 + 2**32, 0])
    positions = torch.tensor([0, 1, 0, 0, 5], dtype=INT32)
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)
    assert torch.equal(together.flip(0), uniform(seeds.flip(0), positions.flip(0)))
    assert len(set(together.tolist())) == 5


@pytest.mark.parametrize("varies", ["position", "seed"])
def test_uniform_covers_the_interval_evenly_and_in_pairs(varies: str) -> None:
    numbers = torch.arange(NUM_SAMPLES)
    fixed = torch.full_like(numbers, 3)
    found = uniform(*((fixed, numbers.int()) if varies == "position" else (numbers, fixed.int())))
    assert 0 <= found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    bins = (found * 50).long()
    assert chi_square_is_likely(torch.bincount(bins, minlength=50), torch.full((50,), 1 / 50))
    pairs = (found[::2] * 20).long() * 20 + (found[1::2] * 20).long()
    assert chi_square_is_likely(torch.bincount(pairs, minlength=400), torch.full((400,), 1 / 400))


# -- Tokens


@dataclasses.dataclass
class Filters:
    temperature: float = 1.0
    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0

    def rows(self, count: int, seed: int = 0) -> SamplingInput:
        return SamplingInput(
            temperature=torch.full((count,), self.temperature),
            top_p=torch.full((count,), self.top_p),
            top_k=torch.full((count,), self.top_k, dtype=INT32),
            min_p=torch.full((count,), self.min_p),
            seed=torch.full((count,), seed, dtype=INT64),
            position=torch.arange(count, dtype=INT32),
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of each token, ``[V]``, according to transformers."""
        ids, scores = torch.empty(1, 0, dtype=INT64), logits[None].double() / self.temperature
        if self.top_k < logits.shape[-1]:
            scores = TopKLogitsWarper(self.top_k)(ids, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(ids, scores)
        if self.min_p > 0:
            scores = MinPLogitsWarper(self.min_p)(ids, scores)
        return scores[0].softmax(-1)


@pytest.mark.parametrize(
    ("filters", "num_kept"),
    [
        (Filters(), 40),
        (Filters(temperature=1.7), 40),
        (Filters(temperature=0.3), 40),
        (Filters(top_k=1), 1),
        (Filters(top_k=7), 7),
        (Filters(top_p=0.8), None),
        (Filters(top_p=0.05), 1),
        (Filters(min_p=0.1), None),
        (Filters(top_k=12, top_p=0.9), None),
        (Filters(temperature=1.5, top_p=0.9), None),
        (Filters(top_k=9, min_p=0.05), None),
        (Filters(temperature=2.0, top_p=0.95, min_p=0.15), None),
        (Filters(temperature=0.8, top_k=12, top_p=0.9), None),
        (Filters(temperature=1.3, top_k=20, top_p=0.93, min_p=0.04), None),
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(filters: Filters, num_kept: int | None) -> None:
    """Chi-square of 100,000 samples, p > 0.001; what a filter bans is never sampled."""
    logits = torch.randn(40) * 2
    probabilities = filters.probabilities(logits)
    kept = int((probabilities > 0).sum())
    assert kept == num_kept or (num_kept is None and 1 < kept < 40)
    tokens = sample(logits.expand(NUM_SAMPLES, -1), filters.rows(NUM_SAMPLES, seed=11))
    assert tokens.dtype == INT64
    counts = torch.bincount(tokens, minlength=40)
    assert chi_square_is_likely(counts, probabilities) if kept > 1 else int(counts.max()) == NUM_SAMPLES


def test_each_filter_changes_the_distribution() -> None:
    """So the test above can fail: samples of one kind are unlikely for any other."""
    logits = torch.randn(40) * 2
    kinds = [Filters(), Filters(temperature=0.9), Filters(top_k=9), Filters(top_p=0.95), Filters(min_p=0.1)]
    probabilities = [kind.probabilities(logits) for kind in kinds]
    for mine, kind in enumerate(kinds):
        tokens = sample(logits.expand(NUM_SAMPLES, -1), kind.rows(NUM_SAMPLES, seed=5))
        counts = torch.bincount(tokens, minlength=40)
        assert [i for i, other in enumerate(probabilities) if chi_square_is_likely(counts, other)] == [mine]


def test_rows_of_temperature_0_are_greedy_in_any_mix() -> None:
    logits = torch.randn(6, 101)
    params = Filters().rows(6)._replace(temperature=torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.5]))
    sampled = sample(logits, params)
    assert torch.equal(sampled[::2], greedy_tokens(logits)[::2])
    assert torch.equal(greedy_tokens(logits), logits.argmax(-1))
    assert not torch.equal(sampled[1::2], greedy_tokens(logits)[1::2]), "these are sampled"
    assert torch.equal(sample(logits, Filters(temperature=1e-30).rows(6)), greedy_tokens(logits))
    banned = Filters(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5).rows(6)
    assert torch.equal(sample(logits, banned), greedy_tokens(logits)), "no filter bans the likeliest token"


def test_the_lowest_id_of_equal_logits_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -math.inf, 0.0, 0.0]])
    assert greedy_tokens(logits).tolist() == [1, 0, 2]
    assert sample(logits, Filters(temperature=0.0).rows(3)).tolist() == [1, 0, 2]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = 32
    logits, number = torch.randn(rows, 1000), torch.arange(rows)
    mixed = SamplingInput(
        temperature=number % 3 * 0.6,
        top_p=1 - number % 4 * 0.2,
        top_k=torch.tensor([1000, 50, 2, 1, 300], dtype=INT32)[number % 5],
        min_p=(number % 2) * 0.01,
        seed=number % 7 - 3,
        position=(number % 2).int(),
    )
    whole = sample(logits, mixed)
    for row in range(rows):
        one = SamplingInput(*(column[row : row + 1] for column in mixed))
        assert torch.equal(sample(logits[row : row + 1], one), whole[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_give_the_tokens_of_their_float32(dtype: torch.dtype) -> None:
    logits, params = (torch.randn(64, 500) * 3).to(dtype), Filters(temperature=0.9, top_k=60, top_p=0.9).rows(64)
    assert torch.equal(sample(logits, params), sample(logits.float(), params))


def test_extreme_logits() -> None:
    logits = torch.full((1, 10), -math.inf)
    logits[0, 3] = 1e4
    assert sample(logits, Filters().rows(1)).item() == 3
    logits[0, 9] = 1e4
    found = sample(logits.expand(500, -1), Filters().rows(500))
    assert set(found.tolist()) == {3, 9}
    equal = torch.full((500, 10), 5.0)
    assert set(sample(equal, Filters(top_p=1e-9).rows(500)).tolist()) == set(range(10)), "equals stay together"
    for logits in (torch.full((1, 10), -math.inf), torch.eye(10)[:1] * math.nan, torch.eye(10)[:1].log().neg()):
        assert sample(logits, Filters().rows(1)).item() == NO_TOKEN
        assert greedy_tokens(logits).item() == NO_TOKEN
