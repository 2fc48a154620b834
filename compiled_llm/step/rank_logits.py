"""What runs after a step of several ranks, of which each has the logits of its own tokens ``[R, n]``.

The results are those of ``step.py``'s functions of all logits, bit for bit, and the same in all ranks. Nobody gathers
the logits: ranks tell each other what follows from them. A rank's tokens are whole chunks (``VOCABULARY_CHUNK``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.linears.adapted import with_slots_of_head
from compiled_llm.models.linears.vocabulary import OwnLogits, OwnTokens, shared_head
from compiled_llm.models.registry import family_of
from compiled_llm.ops import all_gather, log_sum_exp_of_ranks, sample_tokens_of_ranks
from compiled_llm.step.logits import LogitsInput, due_rows, in_part, process_logits
from compiled_llm.step.logprobs import LogprobRows, chunks_of, columns_of, sorts_chunks
from compiled_llm.step.sampling import SamplingInput
from compiled_llm.step.sampling import sample as plain_sample

Sampler = Callable[[Tensor, SamplingInput], Tensor]  # as ``sample``


def sample_of_ranks(own: Tensor, params: SamplingInput, tokens: OwnTokens, vocab_size: int) -> Tensor:
    """As ``sampling.sample`` of all logits, of which ``own`` ``[R, n]`` are the rank's: ``[R]`` int64."""
    filters = params.top_k, params.top_p, params.min_p, params.top_n_sigma
    rest = params.seed, params.position
    return sample_tokens_of_ranks(own, params.temperature, *filters, *rest, group=tokens.group, vocab_size=vocab_size)


def with_own_logits(weights: Any, sample: Sampler) -> tuple[Any, OwnTokens | None]:
    """For networks that draft with the model's head: it gives the logits of a rank's own tokens, which are told.

    None: it gives those of all tokens, as in one process. So it does where another function than the model's own
    looks at them, and where the network's tokens are others (``token_ids``).
    """
    shared = shared_head(weights) if sample is plain_sample and getattr(weights, "token_ids", None) is None else None
    tokens = None if shared is None else shared.own_tokens
    if shared is None or tokens is None:
        return weights, None
    return weights._replace(head=OwnLogits(shared)), tokens


def drafted(
    logits: Tensor, params: SamplingInput, tokens: OwnTokens | None, vocab_size: int, sample: Sampler
) -> Tensor:
    """The tokens ``[R]`` int64 that are drafted, of the first ``vocab_size``, by logits as ``with_own_logits`` says."""
    if tokens is None:
        return sample(logits[:, :vocab_size], params)
    return sample_of_ranks(logits, params, tokens, vocab_size)


def rank_sampler_function(vocab_size: int) -> Callable:
    """As ``sampler_function``: (own logits, params, own tokens, last tokens) -> None."""

    def rank_sampler(own: Tensor, params: SamplingInput, tokens: OwnTokens, last_tokens: Tensor) -> None:
        last_tokens.narrow(0, 0, own.shape[0]).copy_(sample_of_ranks(own, params, tokens, vocab_size))

    return rank_sampler


def processing_rank_sampler_function(vocab_size: int, num_draft_tokens: int = 0) -> Callable:
    """As ``processing_sampler_function`` without transforms: counts of tokens are those of the rank's, ``[rows, n]``.

    (own logits, params, inputs, token counts, own tokens, last tokens) -> None.
    """

    def processing_rank_sampler(
        own: Tensor,
        params: SamplingInput,
        inputs: LogitsInput,
        token_counts: Tensor,
        tokens: OwnTokens,
        last_tokens: Tensor,
    ) -> None:
        processed = process_logits(own, inputs, params.position, token_counts, (), num_draft_tokens, tokens.first)
        chosen = sample_of_ranks(processed, params, tokens, vocab_size)
        last_tokens.narrow(0, 0, own.shape[0]).copy_(chosen)
        due = due_rows(chosen, inputs, num_draft_tokens)
        places, is_here = in_part(chosen.clamp(min=0), tokens.first, own.shape[1])
        token_counts.index_put_((inputs.row, places), torch.where(is_here, due, 0.0), accumulate=True)

    return processing_rank_sampler


def rank_logprobs_function(count: int, vocab_size: int, num_ranks: int) -> Callable:
    """As ``logprobs_function``: (own logits, params, own tokens, last tokens) -> rows."""

    def rank_logprobs(own: Tensor, params: SamplingInput, tokens: OwnTokens, last_tokens: Tensor) -> LogprobRows:
        token_ids = last_tokens.narrow(0, 0, own.shape[0]).clamp(min=0)
        return logprob_rows_of_ranks(own, token_ids, count, tokens, vocab_size, num_ranks)

    return rank_logprobs


def prompt_rank_logprobs_function(model_config: ModelConfig, count: int, num_ranks: int) -> Callable:
    """As ``prompt_logprobs_function``."""
    head = family_of(model_config).head

    def prompt_rank_logprobs(weights: Any, rows: tuple[Tensor, ...], hidden: Tensor) -> LogprobRows:
        indices, token_ids, *slots = rows
        weights = with_slots_of_head(weights, *slots) if slots else weights
        shared = shared_head(weights)
        assert shared is not None, "a head of several ranks"
        tokens = shared.own_tokens
        assert tokens is not None, "whole chunks"
        weights = weights._replace(head=OwnLogits(shared))
        own = head(weights, torch.index_select(hidden, 0, indices), model_config)
        return logprob_rows_of_ranks(own, token_ids, count, tokens, shared.out_features, num_ranks)

    return prompt_rank_logprobs


def has_rank_logprobs(tokens: OwnTokens | None, vocab_size: int, count: int) -> bool:
    """Whether ranks need not gather logits for the log-probabilities of the ``count`` likeliest tokens."""
    return tokens is not None and sorts_chunks(vocab_size, count)


def logprob_rows_of_ranks(
    own: Tensor, token_ids: Tensor, count: int, tokens: OwnTokens, vocab_size: int, num_ranks: int
) -> LogprobRows:
    """As ``logprob_rows`` of all logits; see ``has_rank_logprobs``.

    The likeliest tokens are looked for as ``largest`` does it: every rank gets all logits of the chunks with the
    largest maxima, and sorts them. So equally likely ones come in the same order.
    """
    peak, total = (x[:, None] for x in log_sum_exp_of_ranks(own, tokens.group, vocab_size))
    in_vocabulary = torch.arange(own.shape[1], device=own.device) + tokens.first < vocab_size
    own = torch.where(in_vocabulary, own, float("-inf"))

    maxima = all_gather(chunks_of(own).amax(dim=-1), tokens.group, num_ranks)
    columns = columns_of(maxima, vocab_size, count)
    places, is_here = in_part(torch.cat([token_ids[:, None], columns], dim=1), tokens.first, own.shape[1])
    known = torch.where(is_here, own.gather(1, places), float("-inf"))
    # The rank that has a token knows its logit.
    known = all_gather(known, tokens.group, num_ranks).unflatten(1, (num_ranks, -1)).amax(dim=1).float()
    chosen, candidates = known[:, :1], known[:, 1:]

    values, found = candidates.topk(count, dim=-1)
    likelier = (own.float() > chosen).sum(dim=-1)[:, None]
    rank = all_gather(likelier, tokens.group, num_ranks).sum(dim=-1) + 1
    return LogprobRows((chosen - peak - total).squeeze(-1), rank, values - peak - total, columns.gather(1, found))
