"""Log-probabilities against log_softmax and topk in float64, where values are equal, and where some are -inf."""

import math

import pytest
import torch
from torch import Tensor

from compiled_llm.step.logprobs import largest, logprob_rows

VOCABS = (1, 5, 256, 257, 4096, 50_000)
COUNTS = (0, 1, 2, 3, 7, 16, 19, 20)


def check(logits: Tensor, token_ids: Tensor, count: int) -> None:
    """Everything of ``logprob_rows`` for logits without equals among the likeliest."""
    found = logprob_rows(logits, token_ids, count)
    rows, vocab_size = logits.shape
    wanted = logits.double().log_softmax(-1)
    count = min(count, vocab_size)
    assert [column.shape for column in found] == [(rows,), (rows,), (rows, count), (rows, count)]
    assert [column.dtype for column in found] == [torch.float32, torch.int64, torch.float32, torch.int64]
    own = wanted.gather(1, token_ids[:, None])
    torch.testing.assert_close(found.logprob.double(), own[:, 0], rtol=1e-6, atol=1e-5)
    assert torch.equal(found.rank, (wanted > own).sum(-1) + 1)
    values, ids = wanted.topk(count)
    assert torch.equal(found.top_ids, ids)
    torch.testing.assert_close(found.top_logprobs.double(), values, rtol=1e-6, atol=1e-5)


def distinct(rows: int, vocab_size: int, scale: float = 3.0) -> Tensor:
    """Logits like a model's, of which no two are equal: the ranks of random ones, spread out."""
    ranks = torch.stack([torch.randperm(vocab_size) for _ in range(rows)])
    return torch.special.ndtri((ranks.double() + 0.5) / vocab_size).float() * scale


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_against_float64(vocab_size: int) -> None:
    logits = distinct(8, vocab_size)
    token_ids = torch.randint(vocab_size, (8,))
    for count in COUNTS:
        check(logits, token_ids, count)
    token_ids[0], token_ids[1] = logits[0].argmax(), logits[1].argmin()
    check(logits, token_ids, 5)
    ranks = logprob_rows(logits, token_ids, 0).rank
    assert ranks[:2].tolist() == [1, vocab_size]


@pytest.mark.parametrize("vocab_size", [1, 5, 257, 600])
def test_more_than_there_are_is_all_of_them(vocab_size: int) -> None:
    logits = distinct(3, vocab_size)
    check(logits, torch.zeros(3, dtype=torch.int64), 1000)
    found = logprob_rows(logits, torch.zeros(3, dtype=torch.int64), 1000)
    torch.testing.assert_close(found.top_logprobs.exp().sum(-1), torch.ones(3))


@pytest.mark.parametrize("vocab_size", [*VOCABS, 255, 511, 512, 513, 5121])
@pytest.mark.parametrize("count", COUNTS)
def test_the_largest_are_those_of_topk_wherever_they_stand(vocab_size: int, count: int) -> None:
    count = min(count, vocab_size)
    random = distinct(3, vocab_size)
    for x in (random, random.sort().values, random.sort(descending=True).values):
        values, ids = largest(x, count)
        expected = x.topk(count, dim=-1)
        assert torch.equal(values, expected.values)
        assert torch.equal(ids, expected.indices)


def check_with_equals(x: Tensor, count: int) -> None:
    values, ids = largest(x, count)
    assert torch.equal(values, x.topk(count).values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist()), "a token comes twice"
    assert bool((ids < x.shape[1]).all()), "a token outside of the vocabulary"


@pytest.mark.parametrize("vocab_size", [20, 257, 5121, 50_000])
def test_equal_values(vocab_size: int) -> None:
    check_with_equals(torch.zeros(2, vocab_size), 20)
    check_with_equals(distinct(4, vocab_size).round(), 20)
    check_with_equals((torch.arange(vocab_size) % 7).float().expand(2, -1), 20)


def test_the_rank_counts_those_that_are_more_likely() -> None:
    logits = torch.tensor([[2.0, 5.0, 5.0, 2.0, 1.0]] * 5)
    found = logprob_rows(logits, torch.arange(5), 5)
    assert found.rank.tolist() == [3, 1, 1, 3, 5]
    assert found.logprob[1] == found.logprob[2] == found.top_logprobs[0, 0] == found.top_logprobs[0, 1]


def test_logits_of_minus_infinity() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf]] * 2)
    found = logprob_rows(logits, torch.tensor([0, 3]), 3)
    expected = logits.log_softmax(-1)
    assert found.logprob.tolist() == pytest.approx([expected[0, 0].item(), -math.inf])
    assert found.rank.tolist() == [2, 3]
    assert found.top_ids[:, :2].tolist() == [[2, 0]] * 2
    assert found.top_logprobs[0].tolist() == pytest.approx([*expected[0, [2, 0]].tolist(), -math.inf])


@pytest.mark.parametrize("vocab_size", [5121, 50_001])
def test_padding_is_never_among_the_likeliest(vocab_size: int) -> None:
    """In the last chunk, which is not full, -inf is as likely as what it is filled up with."""
    logits = torch.full((2, vocab_size), -math.inf)
    logits[:, -1] = 0.0
    check_with_equals(logits, 20)
    logits[:] = -math.inf
    check_with_equals(logits, 20)


def test_extreme_logits_lose_nothing() -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-3e38, -3e38, -3e38], [0.0, -200.0, 60.0]])
    check(logits[::2], torch.tensor([1, 1]), 3)
    found = logprob_rows(logits[1:2], torch.tensor([2]), 1)
    assert found.logprob.item() == pytest.approx(-math.log(3), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 3000) * 3).to(dtype)
    token_ids = torch.randint(3000, (4,))
    expected = logprob_rows(logits.float(), token_ids, 10)
    for found, column in zip(logprob_rows(logits, token_ids, 10), expected, strict=True):
        assert torch.equal(found, column)
