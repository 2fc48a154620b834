"""Steps of a model without an engine, for tests: their inputs, an empty cache, and their logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import KVCache, LayerCache, StateCache, StepInput
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import family_of
from compiled_llm.ops import StateRows

BLOCK_SIZE = 4
BLOCKS = 64
SLOTS = 8


def empty_cache(config: ModelConfig, dtype: torch.dtype = torch.float32, num_blocks: int = BLOCKS) -> KVCache:
    caches: list[LayerCache | StateCache] = []
    for spec in family_of(config).layers(config):
        # Poison: what was never written must never be read.
        if isinstance(spec, StateSpec):
            states = spec.state_tensors(SLOTS, dtype)
            poison = {name: torch.full(shape, float("nan")).to(kind) for name, (shape, kind) in states.items()}
            caches.append(StateCache(**poison))
            continue
        held = spec.cache_tensors(num_blocks, BLOCK_SIZE, dtype)
        own = {name: torch.full(shape, float("nan")).to(kind) for name, (shape, kind) in held.items()}
        caches.append(LayerCache(**own) if spec.shares_cache_of is None else caches[spec.shares_cache_of])
    return tuple(caches)


def step_input(
    chunks: list[tuple[list[int], int]],
    tables: list[list[int]],
    padding: int = 0,
    slots: Sequence[int] = (),
    read_slots: Sequence[int] = (),
    keep: tuple[int, int] = (0, 0),
) -> StepInput:
    """A step of ``(token ids, tokens computed before)`` for each request, with ``padding`` tokens at its end.

    Args:
        slots: of each request's states after its tokens; by default 1, 2 and so on.
        read_slots: of its states before them, if others.
        keep: a slot for another state of the first request, and after how many tokens it is that; (0, 0) for none.
    """
    ids, positions, places, starts, lens = [], [], [], [0], []
    for (tokens, computed), table in zip(chunks, tables, strict=True):
        for position, token in enumerate(tokens, computed):
            ids.append(token)
            positions.append(position)
            places.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        lens.append(computed + len(tokens))
    last = [start - 1 for start in starts[1:]]
    ids, positions, places = (values + [0] * padding for values in (ids, positions, places))
    slots = slots or range(1, 1 + len(chunks))
    kept = [keep, *[(0, 0)] * (len(chunks) - 1)]
    writes = [[slot, other] for slot, (other, _) in zip(slots, kept, strict=True)]
    after = [[len(tokens), other] for (tokens, _), (_, other) in zip(chunks, kept, strict=True)]
    states = (torch.tensor(x, dtype=torch.int32) for x in (list(read_slots or slots), writes, after))
    columns = [ids, positions, places, starts, lens, last]
    flat = [torch.tensor(c, dtype=torch.int32) for c in columns]
    return StepInput(*flat, torch.tensor(tables, dtype=torch.int32), states=StateRows(*states))


def step_logits(config: ModelConfig, weights: Any, step: StepInput, cache: KVCache | None = None) -> Tensor:
    """The logits of all tokens of a step, ``[T, V]``. ``cache``: by default an empty one in float32."""
    model, longest = family_of(config), int(step.query_start_loc.diff().max())
    cache = empty_cache(config) if cache is None else cache
    with torch.no_grad():
        hidden = model.forward(weights, step, cache, config, for_queries(model.layers(config), longest))
        return model.head(weights, hidden, config)


def check_every_position(
    config: ModelConfig,
    weights: Any,
    prompt: list[int],
    expected: Tensor,
    chunks: Sequence[int],
    shared: int,
    within: float = 1e-4,
) -> None:
    """The logits of a prompt are ``expected`` ``[T, V]``: computed whole, in chunks, and behind a prefix in the cache.

    Args:
        chunks: where all chunks but the first begin.
        shared: tokens of the prefix, whole blocks.
    """
    length, num_blocks = len(prompt), len(prompt) // BLOCK_SIZE
    first, second = list(range(1, 1 + num_blocks)), list(range(1 + num_blocks, 1 + 2 * num_blocks))
    cache = empty_cache(config, num_blocks=1 + 2 * num_blocks)

    def logits(begin: int, end: int, table: list[int], **states: Any) -> Tensor:
        return step_logits(config, weights, step_input([(prompt[begin:end], begin)], [table], **states), cache)

    bounds = zip((0, *chunks), (*chunks, length), strict=True)
    behind = first[: shared // BLOCK_SIZE] + second[shared // BLOCK_SIZE :]
    served = {
        "whole": logits(0, length, first, keep=(3, shared)),
        "in chunks": torch.cat([logits(*each, second, slots=[2]) for each in bounds]),
        "behind a prefix": logits(shared, length, behind, read_slots=[3]),
    }
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert clear.sum() > length // 2
    for way, found in served.items():
        wanted, is_clear = expected[-len(found) :], clear[-len(found) :]
        torch.testing.assert_close(found, wanted, atol=within, rtol=1e-4, msg=lambda text, way=way: f"{way}: {text}")
        assert torch.equal(found.argmax(-1)[is_clear], wanted.argmax(-1)[is_clear])
