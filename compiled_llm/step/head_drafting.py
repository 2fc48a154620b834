"""Drafting by a network that reads the model's hidden states (``HeadFamily``): pure functions, compiled as steps are.

Its cache has, in the model's slots, keys and values of its own layers and each token's feature. Row p is the feature of
token p beside token p + 1. So a step which found a + 1 new tokens lets a + 1 rows be computed: those of the last
known token and of the drafts that were right, by the model's own features, also where drafting computed them before
by its own. The last of them gives the first draft; each further row takes the draft and what the network itself gave
in the row before. Letters as in ``drafting.py``; F elements of a feature.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads import medusa
from compiled_llm.models.draft_heads.family import head_family
from compiled_llm.models.draft_heads.medusa import MedusaConfig
from compiled_llm.models.inputs import HiddenCache, KVCache, LayerCache, StepInput
from compiled_llm.models.last_layer import last_layer_function
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.registry import layers_of
from compiled_llm.ops import write_slots
from compiled_llm.step.drafting import (
    NO_DRAFT,
    SINK_SLOT,
    DraftInput,
    num_accepted,
    own_table,
    rows_below,
    slots_of,
    step_of,
)
from compiled_llm.step.rank_logits import Sampler, drafted, with_own_logits
from compiled_llm.step.sampling import sample
from compiled_llm.step.step import with_own_tables


def head_features_function(model_config: ModelConfig) -> Any:
    """What keeps features after a step: (weights, slots ``[T]`` int32, hidden states ``[*, D]``, KV cache) -> None."""
    made_of = head_family(model_config).features

    def draft_features(weights: Any, slot_mapping: Tensor, hidden: Tensor, kv_cache: KVCache) -> None:
        rows = made_of(weights, hidden.narrow(0, 0, slot_mapping.shape[0]), model_config)
        write_slots(kv_cache[-1].features, slot_mapping, rows)

    return draft_features


def draft_head_function(
    model_config: ModelConfig, block_size: int, vocab_size: int, exact: bool = False, sample: Sampler = sample
) -> Any:
    """What drafts after a step, as ``draft_model_function``: (weights, input, KV cache, last tokens, drafts) -> None.

    The first pass has up to K + 1 rows of a request, one below the other, and padding behind those of the last.

    Where the cache has what goes into the model's last layer (``models/last_layer.py``), a further argument is what the
    step's logits were made of, ``[*, D]``: of all its tokens or of its rows of logits, as ``token_row`` counts them.
    """
    family, layers = head_family(model_config), layers_of(model_config)
    forward, head, feed_back, made_of = family.forward, family.head, family.feed_back, family.features
    alone, features_at = for_queries(layers, 1, exact=exact), features_reader(model_config)
    known_ids, both = model_config.vocab_size, min(vocab_size, model_config.vocab_size)

    def draft(
        weights: Any,
        known: DraftInput,
        kv_cache: KVCache,
        last_tokens: Tensor,
        drafts: Tensor,
        hidden: Tensor | None = None,
    ) -> None:
        table, num_drafts = own_table(known), drafts.shape[1]
        accepted, is_drafted = num_accepted(known, last_tokens), known.num_samples > 0
        position = known.position + accepted  # of the newest token
        step, ends, of_hidden = _accepted_rows(known, accepted, last_tokens, table, block_size)
        first = for_queries(layers, num_drafts + 1, exact=exact)

        last = (ends - 1).clamp(min=0)
        if hidden is None:
            features = features_at(weights, kv_cache, step.slot_mapping)
        else:
            features = made_of(weights, torch.index_select(hidden, 0, of_hidden), model_config)

        found = []
        of_head, own_tokens = with_own_logits(weights, sample)
        for number in range(num_drafts):
            own = step._replace(input_ids=step.input_ids.clamp(max=known_ids - 1), features=features)
            rows = forward(weights, own, kv_cache[:-1], model_config, alone if number else first)
            rows = rows if number else rows[last]
            logits = head(of_head, rows, model_config)
            sampling = known.sampling._replace(position=position + 1)
            token = drafted(logits, sampling, own_tokens, both, sample).to(torch.int32)
            found.append(torch.where(is_drafted, token, NO_DRAFT))
            # The next row is that of the newest token, which the model has not read yet.
            is_drafted = is_drafted & (position < known.end)
            place, seq_lens = torch.where(is_drafted, position, 0)[:, None], torch.where(is_drafted, position + 1, 0)
            slots = torch.where(is_drafted[:, None], slots_of(table, place, block_size), SINK_SLOT)
            step = step_of(token.clamp(min=0)[:, None], place, slots, seq_lens, table)
            features, position = feed_back(weights, rows, model_config), position + 1
        drafts.narrow(0, 0, position.shape[0]).copy_(torch.stack(found, 1))

    return draft


def draft_medusa_function(
    model_config: MedusaConfig, block_size: int, vocab_size: int, exact: bool = False, sample: Sampler = sample
) -> Any:
    """As ``draft_head_function``, of heads without a cache, which all read what the model's last right row gave.

    In the place of the KV cache it takes that, ``[T, D]``: of all tokens of the step, or of its rows of logits, as
    ``token_row`` counts them.
    """
    both = min(vocab_size, model_config.vocab_size)

    def draft(weights: Any, known: DraftInput, hidden: Tensor, last_tokens: Tensor, drafts: Tensor) -> None:
        accepted, is_drafted = num_accepted(known, last_tokens), known.num_samples > 0
        assert known.token_row is not None
        rows = torch.index_select(hidden, 0, known.token_row + accepted)
        rows = medusa.features(weights, rows, model_config)
        of_head, own_tokens = (weights, None) if weights.heads else with_own_logits(weights, sample)
        found = []
        for number, logits in enumerate(medusa.logits_of(of_head, drafts.shape[1], rows, model_config)):
            sampling = known.sampling._replace(position=known.position + accepted + number + 1)
            token = drafted(logits, sampling, own_tokens, both, sample).to(torch.int32)
            found.append(torch.where(is_drafted, token, NO_DRAFT))
        drafts.narrow(0, 0, accepted.shape[0]).copy_(torch.stack(found, 1))

    return draft


def head_prompt_function(
    model_config: ModelConfig, max_query_len: int, exact: bool = False, last_layer: ModelConfig | None = None
) -> Any:
    """As ``draft_prompt_function``; ``input_ids`` are the tokens that follow those of ``positions``.

    ``last_layer``: that of a ``LastLayer``, where the cache has what goes into it. Further arguments are its weights
    and its KV cache then.
    """
    family, features_at = head_family(model_config), features_reader(model_config)
    forward, made_of = family.forward, family.features
    layers = for_queries(layers_of(model_config), max_query_len, exact=exact)
    through_last = None if last_layer is None else last_layer_function(last_layer, max_query_len, exact)
    known_ids = model_config.vocab_size

    def draft_prompt(
        weights: Any,
        step_input: StepInput,
        kv_cache: KVCache,
        last_weights: Any = None,
        last_cache: LayerCache | None = None,
    ) -> None:
        own = with_own_tables(step_input)
        if through_last is None:
            features = features_at(weights, kv_cache, own.slot_mapping)
        else:
            inputs = _kept_at(kv_cache, own.slot_mapping)
            features = made_of(weights, through_last(last_weights, inputs, own, last_cache), model_config)
        own = own._replace(input_ids=own.input_ids.clamp(max=known_ids - 1), features=features)
        forward(weights, own, kv_cache[:-1], model_config, layers)

    return draft_prompt


def features_reader(model_config: ModelConfig) -> Any:
    """What reads features: (weights, KV cache, slots ``[T]`` int32) -> those that were kept there, ``[T, F]``."""
    return functools.partial(_features_at, head_family(model_config).features, model_config)


def _features_at(made_of: Any, model_config: ModelConfig, weights: Any, kv_cache: KVCache, slots: Tensor) -> Tensor:
    rows = _kept_at(kv_cache, slots)
    return made_of(weights, rows, model_config) if isinstance(kv_cache[-1], HiddenCache) else rows


def _kept_at(kv_cache: KVCache, slots: Tensor) -> Tensor:
    (kept,) = kv_cache[-1]
    size = kept.shape[1]
    rows: Tensor = kept[slots // size, slots % size]
    return rows


def _accepted_rows(
    known: DraftInput, accepted: Tensor, last_tokens: Tensor, table: Tensor, block_size: int
) -> tuple[StepInput, Tensor, Tensor]:
    """The rows that a step lets be computed, up to K + 1 of a request, and [R] int32 where those of each end.

    Then ``[R * (K + 1)]`` int32, their rows of what the step's logits were made of.
    """
    counts = torch.where(known.num_samples > 0, accepted + 1, 0)
    number = known.row_numbers
    assert number is not None
    assert known.token_row is not None
    ends, owner, place = rows_below(counts, number)
    is_known = number < ends[-1]
    ids = last_tokens[torch.where(is_known, known.first_row[owner] + place, 0)].clamp(min=0).to(torch.int32)
    positions = torch.where(is_known, known.position[owner] - 1 + place, 0)
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    starts = torch.nn.functional.pad(ends, (1, 0))
    seq_lens = torch.where(counts > 0, known.position + accepted, 0)
    slots = torch.where(is_known, slots, SINK_SLOT)
    of_hidden = torch.where(is_known, known.token_row[owner] + place, 0)
    return StepInput(ids, positions, slots, starts, seq_lens, starts[1:], table), ends, of_hidden
