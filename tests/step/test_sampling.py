"""The sampler: every filter's exact distribution."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from transformers.generation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from compiled_llm.ops import greedy_tokens
from compiled_llm.ops.sampling.reference import NO_TOKEN
from compiled_llm.step.sampling import SamplingInput, sample
from tests.ops.sampling.sampling_cases import chi_square_is_likely

NUM_SAMPLES = 100_000
OFF = 2**31 - 1  # of top_k
INT64, INT32 = torch.int64, torch.int32


# -- Tokens


@dataclasses.dataclass
class Filters:
    temperature: float = 1.0
    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0

    def rows(self, count: int, seed: int = 0) -> SamplingInput:
        return SamplingInput(
            temperature=torch.full((count,), self.temperature),
            top_p=torch.full((count,), self.top_p),
            top_k=torch.full((count,), self.top_k, dtype=INT32),
            min_p=torch.full((count,), self.min_p),
            top_n_sigma=torch.full((count,), self.top_n_sigma),
            seed=torch.full((count,), seed, dtype=INT64),
            position=torch.arange(count, dtype=INT32),
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of each token, ``[V]``, according to transformers, which lacks top-n-sigma."""
        ids, scores = torch.empty(1, 0, dtype=INT64), logits[None].double() / self.temperature
        if self.top_k < logits.shape[-1]:
            scores = TopKLogitsWarper(self.top_k)(ids, scores)
        if self.top_p < 1:
            scores = TopPLogitsWarper(self.top_p)(ids, scores)
        if self.min_p > 0:
            scores = MinPLogitsWarper(self.min_p)(ids, scores)
        if self.top_n_sigma > 0:
            scores = scores.masked_fill(logits < logits.max() - self.top_n_sigma * logits.std(correction=0), -math.inf)
        return scores[0].softmax(-1)


@pytest.mark.parametrize(
    ("filters", "num_kept"),
    [
        (Filters(), 40),
        (Filters(temperature=1.7), 40),
        (Filters(top_k=1), 1),
        (Filters(top_k=7), 7),
        (Filters(top_p=0.8), None),
        (Filters(top_p=0.05), 1),
        (Filters(min_p=0.1), None),
        (Filters(top_n_sigma=1.5), None),
        (Filters(temperature=1.3, top_k=20, top_p=0.93, min_p=0.04), None),
        *(
            pytest.param(filters, None, marks=pytest.mark.battery)
            for filters in (
                Filters(temperature=2.0, top_n_sigma=1.5),
                Filters(top_k=12, top_p=0.9),
                Filters(temperature=1.5, top_p=0.9),
                Filters(top_k=9, min_p=0.05),
                Filters(temperature=2.0, top_p=0.95, min_p=0.15),
                Filters(temperature=0.8, top_k=12, top_p=0.9),
            )
        ),
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
    kinds.append(Filters(top_n_sigma=1.0))
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
    banned = Filters(temperature=0.0, top_k=3, top_p=0.1, min_p=0.5, top_n_sigma=0.1).rows(6)
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
        top_n_sigma=torch.tensor([0.0, 1.0, 2.5])[number % 3],
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


def test_a_drafter_with_the_requests_input_draws_the_models_token() -> None:
    """Logits near to the model's, with its seed, position and filters; another request's seed is of no use."""
    logits = torch.randn(1000, 500) * 2.5
    drafter = logits + torch.randn(1000, 500) * 0.7
    params = Filters(temperature=0.9, top_k=300, top_p=0.98, min_p=0.001).rows(1000, seed=3)
    own, drafted, other = (
        sample(x, given)
        for x, given in ((logits, params), (drafter, params), (drafter, params._replace(seed=params.seed + 1)))
    )
    shares = [float((own == tokens).double().mean()) for tokens in (drafted, other)]
    assert shares[0] > 0.55
    assert shares[1] < 0.25
