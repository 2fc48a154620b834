"""The sampler: filters against transformers' processors, the distribution, and random numbers from (seed, position)."""

import torch
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from compiled_llm.sampler import SamplingInput, sample, sample_greedy, uniform


def params(rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 2**31 - 1, seed: int = 0):
    return SamplingInput(
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        seed=torch.full((rows,), seed, dtype=torch.int64),
        position=torch.arange(rows, dtype=torch.int32),
    )


def test_philox_known_answers() -> None:
    """The first words of Philox4x32-10 that the generator's authors publish for an all-zero and an all-one input."""
    zero = uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    assert int(zero.item() * 2**32) == 0x6627E8D5


def test_uniform_depends_on_seed_and_position_alone_and_covers_the_interval() -> None:
    seeds, positions = torch.tensor([5, 5, -9]), torch.tensor([0, 1, 0], dtype=torch.int32)
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(3)])
    assert torch.equal(together, alone)
    assert len(set(together.tolist())) == 3
    many = uniform(torch.full((100_000,), 3), torch.arange(100_000, dtype=torch.int32))
    counts = torch.histc(many.float(), bins=50, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum().item()
    assert chi_square < 85.4  # p = 0.001 with 49 degrees of freedom


def test_temperature_zero_is_greedy_in_any_mix() -> None:
    logits = torch.randn(6, 101)
    mixed = params(6)._replace(temperature=torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.5]))
    sampled = sample(logits, mixed)
    assert torch.equal(sampled[::2], sample_greedy(logits)[::2])
    assert torch.equal(sample(logits, params(6, temperature=1e-30)), sample_greedy(logits))


def allowed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What may be sampled according to transformers, with its probabilities."""
    scores = logits[None] / temperature
    if top_k < logits.shape[-1]:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0].softmax(-1)


def test_distribution_of_every_filter_and_their_mixture() -> None:
    """Chi-square of 100,000 samples against the exact distribution, p > 0.001."""
    logits = torch.randn(40) * 2
    rows = 100_000
    limits = {}
    for name, temperature, top_k, top_p in [
        ("plain", 1.0, 2**31 - 1, 1.0),
        ("hot", 1.7, 2**31 - 1, 1.0),
        ("top-k", 1.0, 7, 1.0),
        ("top-p", 1.0, 2**31 - 1, 0.8),
        ("all", 0.8, 12, 0.9),
    ]:
        probs = allowed(logits, temperature, top_k, top_p)
        tokens = sample(logits.expand(rows, -1), params(rows, temperature, top_p, top_k, seed=11))
        counts = torch.bincount(tokens, minlength=40).double()
        assert counts[probs == 0].sum() == 0, f"{name}: a token outside of the filter was sampled"
        expected = probs.double() * rows
        kept = expected > 5
        chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum().item()
        freedom = int(kept.sum()) - 1
        # Wilson and Hilferty's approximation of the 0.999 quantile.
        limits[name] = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert chi_square < limits[name], name


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = 32
    logits, number = torch.randn(rows, 1000), torch.arange(rows)
    mixed = SamplingInput(
        temperature=number % 3 * 0.6,
        top_p=1 - number % 4 * 0.2,
        top_k=torch.tensor([1000, 50, 2, 1, 300], dtype=torch.int32)[number % 5],
        seed=number % 7 - 3,
        position=(number % 2).int(),
    )
    whole = sample(logits, mixed)
    for row in range(rows):
        one = SamplingInput(*(column[row : row + 1] for column in mixed))
        assert torch.equal(sample(logits[row : row + 1], one), whole[row : row + 1])


def test_extreme_logits() -> None:
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 3] = 1e4
    assert sample(logits, params(1)).item() == 3
    assert sample(torch.full((1, 10), 5.0), params(1, top_p=1e-9)).item() == 0
