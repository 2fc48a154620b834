"""Drafting of trees by a network: pure functions, compiled as steps are. ``drafting/trees.py`` makes trees of it.

A step's drafts may be a tree, so what it found to be right is a path of its rows. Behind it a network computes the
tokens of that path, and then level by level several tokens after each of the likeliest: with the noise that the model
has at that position, the one that it would sample, the one that it would if that one were not there, and so on. All
nodes of a level are rows of one pass, which see their own path alone. The rows of earlier levels are computed again
with them: they are few, and the attention op takes a request's tree as a whole.

Letters as in ``drafting.py``; D levels, W nodes of a level that are gone on from, N tokens after each.
"""

import math
from typing import Any

import torch
from torch import Tensor

from compiled_llm.api.speculative_config import SHARE_UNIT, NetworkTree
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.draft_heads import medusa
from compiled_llm.models.draft_heads.family import HeadFamily
from compiled_llm.models.draft_heads.medusa import MedusaConfig
from compiled_llm.models.inputs import FeatureCache, HiddenCache, KVCache, StepInput
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.step.drafting import NO_DRAFT, SINK_SLOT, DraftInput, Sampler, own_table, rows_below, slots_of
from compiled_llm.step.head_drafting import features_reader
from compiled_llm.step.sampling import SamplingInput, sample


def accepted_path(known: DraftInput, last_tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """How many of a tree's drafts were right, [R] int32, and the rows of that path, ``[R, most + 1]`` int32.

    ``most``: levels of a tree. Behind the path its last row is repeated.
    """
    assert known.parents is not None
    number = torch.arange(known.parents.shape[1], device=known.parents.device)
    is_draft = (number > 0) & (number < known.num_samples[:, None])
    accepted = torch.zeros_like(known.num_samples)
    row, path = accepted, [accepted]
    for _ in range(most):
        sampled = last_tokens[known.first_row + row].to(torch.int32)
        right = is_draft & (known.parents == row[:, None]) & (known.token_ids == sampled[:, None])
        is_right = right.any(1)
        row = torch.where(is_right, right.to(torch.int32).argmax(1).to(torch.int32), row)
        accepted = accepted + is_right.to(torch.int32)
        path.append(row)
    return accepted, torch.stack(path, 1)


def likeliest(logits: Tensor, sampling: SamplingInput, count: int, sample: Sampler) -> tuple[Tensor, Tensor]:
    """``[R, count]``: the token that is sampled, the one that is without it, and so on; and logs of their shares.

    A share is a token's probability. Of a request that is not greedy it is a half, a quarter and so on: there the noise
    chooses, which the model has as well, and a token that it has lifted is no worse a guess for being rare. Minus
    infinity where there is no more token.
    """
    is_greedy, shares = sampling.temperature <= 0, torch.log_softmax(logits.float(), 1)
    tokens, found = [], []
    for rank in range(count):
        token = sample(logits, sampling)
        place = token.clamp(min=0)[:, None]
        share = torch.gather(shares, 1, place)[:, 0]
        share = torch.where(is_greedy, share, -math.log(2) * (rank + 1))
        found.append(torch.where(token >= 0, share, -math.inf))
        tokens.append(place[:, 0])
        logits = logits.scatter(1, place, -math.inf)
    return torch.stack(tokens, 1), torch.stack(found, 1)


def draft_medusa_tree_function(
    model_config: MedusaConfig,
    block_size: int,
    vocab_size: int,
    exact: bool = False,
    sample: Sampler = sample,
    *,
    tree: NetworkTree,
) -> Any:
    """As ``draft_medusa_function``: (weights, input, hidden ``[T, D]``, last tokens, drafts ``[*, 2 D N]``) -> None.

    Of each head N tokens, and then their shares in ``SHARE_UNIT``.
    """
    both = min(vocab_size, model_config.vocab_size)

    def draft(weights: Any, known: DraftInput, hidden: Tensor, last_tokens: Tensor, drafts: Tensor) -> None:
        accepted, path = accepted_path(known, last_tokens, tree.depth)
        assert known.token_row is not None
        rows = torch.index_select(hidden, 0, known.token_row + path[:, -1])
        rows = medusa.features(weights, rows, model_config)
        tokens, shares = [], []
        for number, logits in enumerate(medusa.logits_of(weights, tree.depth, rows, model_config)):
            own = known.sampling._replace(position=known.position + accepted + number + 1)
            found, of_found = likeliest(logits[:, :both], own, tree.ranks, sample)
            tokens.append(found)
            shares.append(of_found)
        _keep(drafts, known.num_samples > 0, [*tokens, _in_units(torch.cat(shares, 1))])

    return draft


def draft_tree_function(
    model_config: ModelConfig,
    block_size: int,
    vocab_size: int,
    exact: bool = False,
    sample: Sampler = sample,
    *,
    tree: NetworkTree,
) -> Any:
    """As ``draft_model_function`` and ``draft_head_function``, with drafts ``[*, 3 M]`` of M = W + (D - 1) W N nodes.

    Their tokens, their parents, and their shares in ``SHARE_UNIT``. A parent is 0, or 1 + the number of a node.
    """
    family, layers = family_of(model_config), layers_of(model_config)
    forward, head = family.forward, family.head
    feed_back = family.feed_back if isinstance(family, HeadFamily) else None
    features_at = None if feed_back is None else features_reader(model_config)
    known_ids, both = model_config.vocab_size, min(vocab_size, model_config.vocab_size)
    width = tree.width

    def draft(weights: Any, known: DraftInput, kv_cache: KVCache, last_tokens: Tensor, drafts: Tensor) -> None:
        table, own_cache = own_table(known), kv_cache if feed_back is None else kv_cache[:-1]
        step, ends, is_drafted, base, kept_at = _path_rows(known, last_tokens, table, block_size, kv_cache, tree.depth)
        features = None if features_at is None else features_at(weights, kv_cache, kept_at)
        first = for_queries(layers, tree.depth + 2, exact=exact)
        root = (ends - 1).clamp(min=0)
        step = step._replace(input_ids=step.input_ids.clamp(max=known_ids - 1), features=features)
        rows = forward(weights, step, own_cache, model_config, first)[root]
        num_requests = base.shape[0]

        logits = head(weights, rows, model_config)[:, :both]
        of_first = known.sampling._replace(position=base + (1 if feed_back is None else 2))
        token, score = likeliest(logits, of_first, width, sample)
        tokens, shares, parents = [token], [score], [torch.zeros_like(token)]
        ids = step.input_ids[root][:, None]
        masks = torch.ones_like(ids, dtype=torch.int64)
        depths = torch.zeros_like(ids)
        node = torch.arange(1, width + 1, device=token.device).expand(num_requests, width)
        number_of_nodes, masks_before = width, masks.expand(num_requests, width)
        of_rows, of_beam = None, None
        if features is not None and feed_back is not None:
            of_rows = features[root][:, None]
            of_beam = feed_back(weights, rows, model_config)[:, None].expand(-1, width, -1)
        for level in range(1, tree.depth):
            count = 1 + width * level
            own = torch.arange(count - width, count, device=token.device)
            ids, masks = torch.cat((ids, token.to(torch.int32)), 1), torch.cat((masks, masks_before | (1 << own)), 1)
            depths = torch.cat((depths, torch.full_like(token, level, dtype=depths.dtype)), 1)
            of_rows = None if of_rows is None or of_beam is None else torch.cat((of_rows, of_beam), 1)
            fits = is_drafted & (base + count <= known.end)
            step = _step_of_tree(ids.clamp(max=known_ids - 1), depths, masks, fits, base, table, block_size)
            step = step._replace(features=None if of_rows is None else of_rows.flatten(0, 1))
            all_rows = forward(weights, step, own_cache, model_config, for_queries(layers, count, exact=exact))
            rows = all_rows.view(num_requests, count, -1)[:, count - width :].flatten(0, 1)
            logits = head(weights, rows, model_config)[:, :both]
            found, of_found = likeliest(logits, _of_nodes(of_first, width, level), tree.ranks, sample)
            of_found = of_found.view(num_requests, width, tree.ranks)
            of_found = torch.where(fits[:, None, None], of_found, -math.inf)
            tokens.append(found.view(num_requests, -1))
            shares.append(of_found.flatten(1))
            parents.append(node[:, :, None].expand(-1, -1, tree.ranks).flatten(1))
            # The likeliest paths are gone on from (EAGLE-2, Li et al., 2024, arXiv:2406.16858).
            score, best = (score[:, :, None] + of_found).flatten(1).topk(width)
            before = best // tree.ranks
            token, node = torch.gather(tokens[-1], 1, best), 1 + number_of_nodes + best
            masks_before = torch.gather(masks[:, count - width :], 1, before)
            number_of_nodes += width * tree.ranks
            if feed_back is not None:
                fed_back = feed_back(weights, rows, model_config).view(num_requests, width, -1)
                of_beam = torch.gather(fed_back, 1, before[:, :, None].expand(-1, -1, fed_back.shape[2]))
        _keep(drafts, is_drafted, [*tokens, *parents, _in_units(torch.cat(shares, 1))])

    return draft


def _step_of_tree(
    ids: Tensor, depths: Tensor, masks: Tensor, fits: Tensor, base: Tensor, table: Tensor, block_size: int
) -> StepInput:
    """The step of a tree's rows ``[R, n]`` from position ``base`` [R] on; padding where ``fits`` [R] is False."""
    num_requests, count = ids.shape
    offsets = torch.arange(count, dtype=torch.int32, device=ids.device)
    places = torch.where(fits[:, None], base[:, None] + offsets, 0)
    slots = torch.where(fits[:, None], slots_of(table, places, block_size), SINK_SLOT)
    positions = torch.where(fits[:, None], base[:, None] + depths, 0)
    starts = torch.arange(0, count * (num_requests + 1), count, dtype=torch.int32, device=ids.device)
    seq_lens = torch.where(fits, base + count, 0)
    step = StepInput(ids.flatten(), positions.flatten(), slots.flatten(), starts, seq_lens, starts[1:], table)
    return step._replace(ancestors=masks.flatten())


def _path_rows(
    known: DraftInput, last_tokens: Tensor, table: Tensor, block_size: int, kv_cache: KVCache, most: int
) -> tuple[StepInput, Tensor, Tensor, Tensor, Tensor | None]:
    """The rows that a step lets be computed, where those of each request end, who is drafted for, the last position.

    And the slots of their features, of a head, which has a row for each token but the newest; a draft model has all,
    and the last known one again.
    """
    is_head = isinstance(kv_cache[-1], FeatureCache | HiddenCache)
    accepted, path = accepted_path(known, last_tokens, most)
    is_known = known.num_samples > 0
    is_drafted = is_known if is_head else is_known & (known.position + accepted < known.end)
    counts = torch.where(is_known, accepted + 1, 0)
    if not is_head:
        counts = counts + is_drafted.to(torch.int32)
    number = known.row_numbers
    assert number is not None
    ends, owner, place = rows_below(counts, number)
    is_own = number < ends[-1]
    shift = 0 if is_head else 1
    row = path[owner, (place - shift).clamp(min=0, max=most)]
    ids = last_tokens[torch.where(is_own, known.first_row[owner] + row, 0)].clamp(min=0).to(torch.int32)
    if not is_head:
        ids = torch.where(place == 0, known.token_ids[owner, 0], ids)
    positions = torch.where(is_own, known.position[owner] - 1 + place, 0)
    slots = torch.where(is_own, _slots_of_rows(table, owner, positions, block_size), SINK_SLOT)
    seq_lens = torch.where(counts > 0, known.position - 1 + counts, 0)
    starts = torch.nn.functional.pad(ends, (1, 0))
    kept_at = None
    if is_head:  # where the row of the tree was
        places = torch.where(is_own, known.position[owner] - 1 + row, 0)
        kept_at = torch.where(is_own, _slots_of_rows(table, owner, places, block_size), 0)
    step = StepInput(ids, positions, slots, starts, seq_lens, starts[1:], table)
    return step, ends, is_drafted, known.position - 2 + counts, kept_at


def _slots_of_rows(table: Tensor, owner: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return table[owner, positions // block_size] * block_size + positions % block_size


def _of_nodes(sampling: SamplingInput, width: int, level: int) -> SamplingInput:
    """``sampling`` [R] for ``width`` nodes of each request, ``level`` positions behind."""
    later = sampling._replace(position=sampling.position + level)
    return SamplingInput(*[field.repeat_interleave(width) for field in later])


def _in_units(shares: Tensor) -> Tensor:
    return (torch.exp(shares) * SHARE_UNIT).round().to(torch.int64)


def _keep(drafts: Tensor, is_drafted: Tensor, columns: list[Tensor]) -> None:
    """The first R rows of ``drafts``; ``NO_DRAFT`` in all of a request that is not drafted for."""
    found = torch.where(is_drafted[:, None], torch.cat(columns, 1), NO_DRAFT)
    drafts.narrow(0, 0, is_drafted.shape[0]).copy_(found)
