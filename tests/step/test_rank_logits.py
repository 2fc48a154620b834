"""What runs after a step of several ranks gives the bits of one process, though no rank has all logits.

Ranks are threads. Logits are bfloat16, so that many of them are equal.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.api.sampling_params import MAX_BIASES
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.vocabulary import OwnTokens, Ranks, VocabularyRows
from compiled_llm.models.sharding import Shard
from compiled_llm.ops import RankGroup
from compiled_llm.ops.sampling.rank_sampling import VOCABULARY_CHUNK
from compiled_llm.step.logits import DraftRows, LogitsInput, TreeRows, in_part, of_part, process_logits
from compiled_llm.step.logprobs import logprob_rows
from compiled_llm.step.mask_words import num_mask_words
from compiled_llm.step.rank_logits import (
    drafted,
    has_rank_logprobs,
    logprob_rows_of_ranks,
    processing_rank_sampler_function,
    rank_sampler_function,
    with_own_logits,
)
from compiled_llm.step.sampling import SamplingInput, sample
from compiled_llm.step.step import processing_sampler_function
from tests.ops.parallel.ranks import run_ranks
from tests.step.test_logits import wanted

VOCABULARIES = [1500, 4096, 9001]  # of 1,500 the fourth rank has none but the last token again
ROWS = 23


def own_part(rank: int, size: int, vocab_size: int) -> Tensor:
    """The rank's tokens, past the vocabulary the last one again."""
    width = -(-vocab_size // size // VOCABULARY_CHUNK) * VOCABULARY_CHUNK
    return (torch.arange(width) + rank * width).clamp(max=vocab_size - 1)


def on_ranks(size: int, vocab_size: int, run: Callable[[Tensor, OwnTokens], Any]) -> list[Any]:
    """``run(the rank's tokens, OwnTokens)`` of each rank."""

    def of_rank(rank: int, group: RankGroup) -> Any:
        own = own_part(rank, size, vocab_size)
        return run(own, OwnTokens(torch.tensor([rank * len(own)]), group))

    return run_ranks(size, of_rank)


def random_logits(vocab_size: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).bfloat16()


def sampling_input(rows: int = ROWS) -> SamplingInput:
    """All kinds of filters, side by side, and greedy rows."""
    every = torch.arange(rows)
    return SamplingInput(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5])[every % 4],
        top_p=torch.tensor([1.0, 1.0, 0.9])[every % 3],
        top_k=torch.tensor([2**31 - 1, 20, 2**31 - 1, 1000, 2**31 - 1], dtype=torch.int32)[every % 5],
        min_p=torch.tensor([0.0] * 6 + [0.05])[every % 7],
        top_n_sigma=torch.tensor([0.0] * 7 + [1.0])[every % 8],
        seed=every * 7919,
        position=(every * 31).int(),
    )


def logits_input(vocab_size: int, rows: int = ROWS) -> LogitsInput:
    """Penalties, biases of tokens on both sides of where ranks begin, and masks: in rows of their own and together."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(rows)
    edges = torch.tensor([0, 511, 512, 513, 767, 768, vocab_size - 1, 5])
    ids = edges[torch.randint(len(edges), (rows, MAX_BIASES), generator=generator)]
    ids[::4] = ids[::4, :1]  # all of one token
    biases = torch.randn(rows, vocab_size, generator=generator).gather(1, ids) * 4
    biases[every % 4 == 1], ids[every % 4 == 1] = 0, 0  # as where there is none
    words = torch.randint(-(2**31), 2**31 - 1, (rows, num_mask_words(vocab_size)), generator=generator).int()
    return wanted(
        rows,
        vocab_size,
        row=every.flip(0) % 7,
        is_due=(every % 3 != 0).float(),
        presence_penalty=torch.where(every % 2 == 0, 0.7, 0.0),
        frequency_penalty=torch.where(every % 3 == 0, -0.2, 0.0),
        repetition_penalty=torch.where(every % 5 < 2, 1.3, 1.0),
        bias_ids=ids,
        biases=biases,
        allowed=torch.where((every % 4 == 2)[:, None], words, -1),
    )


def random_counts(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-4, 4, (8, vocab_size), generator=generator).clamp(min=0) / 2


DRAFTS = {
    "none": None,
    "rows": DraftRows(torch.arange(ROWS) // 4 * 4, torch.tensor([5, 768, 1499, -1] * 6)[:ROWS]),
    "tree": TreeRows(
        torch.tensor([i if i % 4 == 0 else i // 4 * 4 + (i % 4) // 2 for i in range(ROWS)]),
        torch.tensor([-1 if i % 4 == 0 else (5, 768, 1499)[i % 3] for i in range(ROWS)]),
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_samples(vocab_size: int, size: int) -> None:
    logits, params = random_logits(vocab_size), sampling_input()
    logits[3], logits[7, -1] = float("nan"), float("inf")

    def run(own: Tensor, tokens: OwnTokens) -> Tensor:
        last_tokens = torch.full((ROWS + 2,), 99)
        rank_sampler_function(vocab_size)(logits[:, own], params, tokens, last_tokens)
        return last_tokens

    expected = torch.cat([sample(logits, params), torch.tensor([99, 99])])
    assert expected[3] == expected[7] == -1
    for found in on_ranks(size, vocab_size, run):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_samples_of_processed_logits_and_counts(vocab_size: int, size: int, drafts: str) -> None:
    logits, params = random_logits(vocab_size), sampling_input()
    inputs, counts = logits_input(vocab_size)._replace(drafts=DRAFTS[drafts]), random_counts(vocab_size)
    last_tokens, counted = torch.zeros(ROWS, dtype=torch.int64), counts.clone()
    processing_sampler_function((), 3)(logits, params, inputs, counted, last_tokens)
    assert not torch.equal(counted, counts)
    processed = process_logits(logits, inputs, params.position, counts, (), 3)

    def run(own: Tensor, tokens: OwnTokens) -> tuple[Any, ...]:
        chosen, own_counts = torch.zeros_like(last_tokens), counts[:, own].clone()
        changed = process_logits(logits[:, own], inputs, params.position, own_counts, (), 3, tokens.first)
        arguments = logits[:, own], params, inputs, own_counts, tokens, chosen
        processing_rank_sampler_function(vocab_size, 3)(*arguments)
        return int(tokens.first), own, changed, chosen, own_counts

    covered = torch.zeros(vocab_size)
    for first, own, changed, chosen, own_counts in on_ranks(size, vocab_size, run):
        real = max(0, min(len(own), vocab_size - first))  # what is behind the end is anything
        own = own[:real]
        assert torch.equal(changed[:, :real], processed[:, own])
        assert torch.equal(own_counts[:, :real], counted[:, own])
        assert torch.equal(chosen, last_tokens)
        covered[own] = 1
    assert covered.all()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_log_probabilities_ranks_and_the_likeliest_tokens(vocab_size: int, size: int) -> None:
    logits = random_logits(vocab_size)
    chosen = torch.arange(ROWS) * 997 % vocab_size
    chosen[:3] = torch.tensor([0, 768, vocab_size - 1])
    expected = logprob_rows(logits, chosen, 4)

    def run(own: Tensor, tokens: OwnTokens) -> Any:
        assert has_rank_logprobs(tokens, vocab_size, 4)
        return logprob_rows_of_ranks(logits[:, own].contiguous(), chosen, 4, tokens, vocab_size, size)

    for found in on_ranks(size, vocab_size, run):
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_log_probabilities_of_so_many_tokens_that_all_are_sorted_need_all_logits() -> None:
    tokens = OwnTokens(torch.tensor([0]), RankGroup.alone())
    assert has_rank_logprobs(tokens, 4096, 15)
    assert not has_rank_logprobs(tokens, 4096, 16)
    assert not has_rank_logprobs(None, 4096, 5)


def test_a_rank_without_a_biased_token_changes_none() -> None:
    inputs = wanted(2, 4096, bias_ids=torch.full((2, MAX_BIASES), 5), biases=torch.full((2, MAX_BIASES), 9.0))
    here, away = (of_part(inputs, torch.tensor([first]), 2048) for first in (0, 2048))
    assert here.biases.unique().tolist() == [9.0]
    assert here.bias_ids.unique().tolist() == [5]
    assert away.biases.unique().tolist() == [0.0]
    assert away.bias_ids.unique().tolist() == [0]
    places, is_here = in_part(torch.tensor([2047, 2048, 4095, 4096]), torch.tensor([2048]), 2048)
    assert is_here.tolist() == [False, True, True, False]
    assert places.tolist() == [0, 0, 2047, 2047]


class Weights(NamedTuple):
    head: Any
    token_ids: Tensor | None = None


def test_networks_that_draft_with_the_models_head_sample_as_one_process() -> None:
    """Of the tokens that both know. What looks on, or has other tokens, gets all logits."""
    vocab_size, both = 4096, 3500
    logits, params = random_logits(vocab_size), sampling_input()

    def run(rank: int, group: RankGroup) -> Tensor:
        rows = Shard(rank, 2).own_rows(vocab_size)
        first, ranks = torch.tensor([rank * len(rows)]), Ranks(group, 2, exact=False)
        weights = Weights(VocabularyRows(Dense(torch.zeros(len(rows), 1), None), first, ranks, vocab_size))
        of_head, tokens = with_own_logits(weights, sample)
        assert tokens is not None
        assert of_head.head.out_features == 2048
        for other in (weights._replace(token_ids=rows), weights._replace(head=None)):
            assert with_own_logits(other, sample) == (other, None)
        assert with_own_logits(weights, lambda logits, params: sample(logits, params)) == (weights, None)
        return drafted(logits[:, rows].contiguous(), params, tokens, both, sample)

    for found in run_ranks(2, run):
        assert torch.equal(found, sample(logits[:, :both], params))
