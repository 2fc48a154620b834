"""Drafting by a network: pure functions of tensors, compiled as steps are.

A draft model has a KV cache of its own, whose blocks are those of the model's: a token has its key in the same slot of
both. After a step it finds out, on the device, how many of the step's drafts were right (``Scheduler.update`` says
how), and guesses the tokens that follow: one after another, within one graph, so that the host looks at no number in
between.

Letters: R requests that are drafted for, K drafts of each, M blocks of a table row, V vocabulary size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.inputs import BlockTable, KVCache, StepInput
from compiled_llm.models.layers.attention import for_queries, with_window_tables
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.step.rank_logits import Sampler, drafted, with_own_logits
from compiled_llm.step.sampling import SamplingInput, sample
from compiled_llm.step.step import with_own_tables

NO_DRAFT = -1  # where a request has no draft: after the last token that it has a block for, or in padding
SINK_SLOT = 0  # of the block that nobody reads


class DraftInput(NamedTuple):
    """What a step has computed and sampled of each request that is drafted for; of padding, ``num_samples`` is 0."""

    first_row: Tensor  # [R] int32, its first row in the step's logits
    num_samples: Tensor  # [R] int32, its rows there: 1, and 1 for each draft that the step verified
    token_ids: Tensor  # [R, K + 1] int32, the tokens that these rows follow: the last known one, and those drafts
    position: Tensor  # [R] int32, of the token that the first row samples
    end: Tensor  # [R] int32, the first position that it has no block for
    block_table: Tensor  # [R, M] int32; on a GPU: of all requests
    table_rows: Tensor | None  # [R] int32, on a GPU: where those of these requests are
    sampling: SamplingInput  # [R] each; its position is not read
    token_row: Tensor | None = None  # [R] int32: the row of ``StepOutputs.hidden`` of its first logits
    row_numbers: Tensor | None = None  # [R * (K + 1)] int32: 0, 1 and so on, where a network has so many rows at first
    parents: Tensor | None = (
        None  # [R, K + 1] int32, where drafts may be a tree: of each row that before it on its path
    )
    window_tables: tuple[Tensor, ...] = ()  # as ``block_table``, of each window: of the model's own first layers alone


def draft_model_function(
    model_config: ModelConfig, block_size: int, vocab_size: int, exact: bool = False, sample: Sampler = sample
) -> Any:
    """What drafts after a step: (weights, input, KV cache, last tokens, drafts ``[*, K]`` int64) -> None.

    It leaves the guesses for the first R requests in ``drafts``, with ``NO_DRAFT`` where there is none. The first pass
    takes two tokens of each request, of which the first may be a draft whose key it has not computed yet.

    Args:
        vocab_size: of the model that is drafted for. Tokens of both have the same ids; either may have unused ones
            behind them.
        exact: see ``AttentionSpec``.
        sample: chooses each draft; another one may look on.
    """
    forward, head = family_of(model_config).forward, family_of(model_config).head
    layers = layers_of(model_config)
    of_pairs, alone = (for_queries(layers, most, exact=exact) for most in (2, 1))
    known_ids, both = model_config.vocab_size, min(vocab_size, model_config.vocab_size)

    def draft(weights: Any, known: DraftInput, kv_cache: KVCache, last_tokens: Tensor, drafts: Tensor) -> None:
        num_requests, num_drafts = known.first_row.shape[0], drafts.shape[1]
        table = own_table(known)
        accepted = num_accepted(known, last_tokens)
        token = last_tokens[known.first_row + accepted].clamp(min=0).to(torch.int32)
        before = torch.gather(known.token_ids, 1, accepted[:, None].to(torch.int64))[:, 0]
        position = known.position + accepted

        found = []
        for number in range(num_drafts):
            has_block = (known.num_samples > 0) & (position < known.end)
            ids, positions, blocks = token[:, None], position[:, None], has_block[:, None]
            seq_lens = torch.where(has_block, position + 1, 0)
            if number == 0:
                # The token before has a block in any case, and its key is needed later.
                is_drafted = known.num_samples > 0
                ids, positions = torch.stack((before, token), 1), torch.stack((position - 1, position), 1)
                blocks, seq_lens = torch.stack((is_drafted, has_block), 1), torch.where(is_drafted, position + 1, 0)
            slots = torch.where(blocks, slots_of(table, positions, block_size), SINK_SLOT)
            step = step_of(ids.clamp(max=known_ids - 1), torch.where(blocks, positions, 0), slots, seq_lens, table)
            hidden = forward(weights, step, kv_cache, model_config, alone if number else of_pairs)
            rows = hidden if number else hidden.view(num_requests, 2, -1)[:, 1]
            logits = head(weights, rows, model_config)[:, :both]
            position = position + 1
            sampled = sample(logits, known.sampling._replace(position=position)).to(torch.int32)
            found.append(torch.where(has_block, sampled, NO_DRAFT))
            token = sampled.clamp(min=0)
        drafts.narrow(0, 0, num_requests).copy_(torch.stack(found, 1))

    return draft


def draft_prompt_function(model_config: ModelConfig, max_query_len: int, exact: bool = False) -> Any:
    """What computes keys and values of tokens, and nothing else: (weights, step input, KV cache) -> None.

    Of tokens that a request has besides its last ones. ``max_query_len``, ``exact``: see ``AttentionSpec``.
    """
    forward = family_of(model_config).forward
    layers = for_queries(layers_of(model_config), max_query_len, exact=exact)
    known_ids = model_config.vocab_size

    def draft_prompt(weights: Any, step_input: StepInput, kv_cache: KVCache) -> None:
        own = with_own_tables(step_input)
        own = own._replace(input_ids=own.input_ids.clamp(max=known_ids - 1))
        forward(weights, own, kv_cache, model_config, layers)

    return draft_prompt


def num_draft_layers(wanted: SpeculativeConfig | None, model_config: ModelConfig) -> int:
    """How many of its own first layers a model drafts with; 0: it does not.

    Raises:
        ValueError: it cannot, or not with so many.
    """
    if wanted is None or wanted.method != "layer_skip":
        return 0
    name = model_config.architecture
    if isinstance(model_config, TransformersConfig):
        raise ValueError(
            f"speculative_config: method must be another one than 'layer_skip' for {name}, which runs through "
            "transformers' modelling code: that is not cut into layers"
        )
    layers = layers_of(model_config)
    most = len(layers) - 1
    count = max(1, round(len(layers) / 4)) if wanted.num_draft_layers is None else wanted.num_draft_layers
    if not 1 <= count <= most:
        raise ValueError(
            f"speculative_config: num_draft_layers must be at most {most}, one less than the layers of {name}, given "
            f"{count}"
        )
    states = [place for place, spec in enumerate(layers) if isinstance(spec, StateSpec)]
    if states and states[0] < count:
        fewer = f"at most {states[0]}" if states[0] else "left out, and method another one"
        raise ValueError(
            f"speculative_config: num_draft_layers must be {fewer} for {name}, whose layer {states[0]} keeps a state "
            f"that no rejected draft could be taken out of, given {count}"
        )
    return count


def layer_skip_function(
    model_config: ModelConfig,
    num_layers: int,
    block_size: int,
    windows: tuple[int, ...] = (),
    exact: bool = False,
    sample: Sampler = sample,
) -> Any:
    """What drafts after a step with the model's first layers and its head: as ``draft_model_function`` gives it.

    Its KV cache is the model's own, of these layers. There the model has left the keys of all tokens that count but
    the last one, whatever was drafted before. Keys of drafts go where the model will put its own: to slots of positions
    that are not computed yet, in blocks that are the request's alone, and which nothing reads before the model has
    written them. (Elhoushi et al., 2024, arXiv:2404.16710; Zhang et al., 2023, arXiv:2309.08168.)

    Args:
        num_layers: of the model that draft; the weights and the cache have as many.
        windows: as in ``step_function``.
        exact, sample: as of ``draft_model_function``.
    """
    forward, head = family_of(model_config).forward, family_of(model_config).head
    layers = for_queries(with_window_tables(layers_of(model_config), windows)[:num_layers], 1, exact=exact)

    def draft(weights: Any, known: DraftInput, kv_cache: KVCache, last_tokens: Tensor, drafts: Tensor) -> None:
        tables, accepted = _own_tables(known), num_accepted(known, last_tokens)
        token = last_tokens[known.first_row + accepted].clamp(min=0).to(torch.int32)
        position, found = known.position + accepted, []
        of_head, own = with_own_logits(weights, sample)
        for _ in range(drafts.shape[1]):
            has_block = (known.num_samples > 0) & (position < known.end)
            slots = _slots_in(tables, position[:, None], has_block[:, None], block_size)
            seq_lens, at = torch.where(has_block, position + 1, 0), torch.where(has_block, position, 0)
            step = step_of(token[:, None], at[:, None], slots[0], seq_lens, tables[0])
            step = step._replace(windows=_windows(slots[1:], tables[1:]))
            logits = head(of_head, forward(weights, step, kv_cache, model_config, layers), model_config)
            position = position + 1
            sampling = known.sampling._replace(position=position)
            sampled = drafted(logits, sampling, own, model_config.vocab_size, sample).to(torch.int32)
            found.append(torch.where(has_block, sampled, NO_DRAFT))
            token = sampled.clamp(min=0)
        drafts.narrow(0, 0, known.first_row.shape[0]).copy_(torch.stack(found, 1))

    return draft


# Functions of their own: code with a comprehension in it cannot be kept on disk.
def _own_tables(known: DraftInput) -> list[Tensor]:
    """The block tables of these requests, that of the pool first."""
    tables = [known.block_table, *known.window_tables]
    return tables if known.table_rows is None else [torch.index_select(table, 0, known.table_rows) for table in tables]


def _slots_in(tables: list[Tensor], positions: Tensor, has_block: Tensor, block_size: int) -> list[Tensor]:
    """Slots of ``positions`` [R, n] by each table; the sink's where ``has_block`` is False."""
    return [torch.where(has_block, slots_of(table, positions, block_size), SINK_SLOT) for table in tables]


def _windows(slots: list[Tensor], tables: list[Tensor]) -> tuple[BlockTable, ...]:
    return tuple(BlockTable(own.flatten(), table) for own, table in zip(slots, tables, strict=True))


def num_accepted(known: DraftInput, last_tokens: Tensor) -> Tensor:
    """How many of the step's drafts were right, [R] int32."""
    accepted = torch.zeros_like(known.num_samples)
    right = known.num_samples > 0
    for place in range(known.token_ids.shape[1] - 1):
        right = right & (known.num_samples > place + 1)
        sampled = last_tokens[torch.where(right, known.first_row + place, 0)]
        right = right & (sampled == known.token_ids[:, place + 1])
        accepted = accepted + right.to(torch.int32)
    return accepted


def rows_below(counts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows lie of which ``counts`` [R] int32 are of each request, those of one below those of the one before.

    Sums over all pairs, and no cumulative sum or search: these are calls of torch, where all else is one kernel.

    Returns where those of each request end, [R] int32; and for ``numbers`` [N] int32 of rows, the request that each is
    of and its place among that one's, [N] int32. Behind the last row they are of the last request.
    """
    each = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
    ends = torch.where(each[None, :] <= each[:, None], counts[None, :], 0).sum(1, dtype=torch.int32)
    owner = (ends[None, :] <= numbers[:, None]).sum(1, dtype=torch.int32).clamp(max=counts.shape[0] - 1)
    return ends, owner, numbers - (ends - counts)[owner]


def own_table(known: DraftInput) -> Tensor:
    """The block table of its requests, [R, M]."""
    rows = known.table_rows
    return known.block_table if rows is None else torch.index_select(known.block_table, 0, rows)


def step_of(ids: Tensor, positions: Tensor, slots: Tensor, seq_lens: Tensor, table: Tensor) -> StepInput:
    """Of tokens [R, n] that follow each other in each request; ``seq_lens`` is 0 in padding."""
    num_requests, each = ids.shape
    starts = torch.arange(0, each * (num_requests + 1), each, dtype=torch.int32, device=ids.device)
    return StepInput(ids.flatten(), positions.flatten(), slots.flatten(), starts, seq_lens, starts[1:], table)


def slots_of(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots of ``positions`` [R, n] int32 by a table [R, M]: those of other requests where these are behind the end."""
    columns = (positions // block_size).clamp(min=0, max=table.shape[1] - 1)
    blocks = torch.gather(table, 1, columns.to(torch.int64))
    return blocks * block_size + positions % block_size
