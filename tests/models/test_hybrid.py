"""Families some of whose layers keep a state of a fixed size, against transformers and against themselves."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import read_config
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import family
from compiled_llm.models.weights import experts
from tests.drawn import marked
from tests.families import HYBRID_CONFIGS, checkpoint, logits_of, transformers_model
from tests.models.steps import BLOCK_SIZE, empty_cache, step_input, step_logits

NUM_TOKENS = 360
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
TABLES = [list(range(first, first + NUM_BLOCKS)) for first in (1, 1 + NUM_BLOCKS)]
SHARED = 300  # tokens of a request that finds its beginning in the cache
KEPT_SLOT = 5


class Served(NamedTuple):
    """A model and an empty cache."""

    config: ModelConfig
    weights: Any
    cache: KVCache

    def logits(self, requests: dict[int, list[int]], before: dict[int, int], **where: Any) -> Tensor:
        """Those of all tokens of a step: those of request r, which has ``before[r]``, are ``requests[r]``.

        ``where``: arguments of ``step_input``.
        """
        chunks = [(tokens, before[r]) for r, tokens in requests.items()]
        where = {"slots": [1 + r for r in requests], "tables": [TABLES[r] for r in requests], **where}
        return step_logits(self.config, self.weights, step_input(chunks, **where), self.cache)

    def served(self, prompts: list[list[int]], lengths: list[list[int]]) -> list[Tensor]:
        """The logits of both prompts, in steps with so many tokens of each; 0: it has none in that step."""
        before, found = {0: 0, 1: 0}, ([], [])
        for counts in lengths:
            requests = {r: prompts[r][before[r] : before[r] + n] for r, n in enumerate(counts) if n}
            logits = self.logits(requests, before).split([n for n in counts if n])
            for r, rows in zip(requests, logits, strict=True):
                found[r].append(rows)
                before[r] += len(rows)
        return [torch.cat(rows) for rows in found]


def new(name: str, kind: Any = Packed) -> Served:
    config, weights = loaded(name, kind)
    return Served(config, weights, empty_cache(config, num_blocks=1 + 2 * NUM_BLOCKS))


@functools.cache
def loaded(name: str, kind: Any) -> tuple[ModelConfig, Any]:
    config = read_config(checkpoint(name))
    return config, loader.load_weights(checkpoint(name), config, torch.float32, torch.device("cpu"), kind)


def steps_of(rest: int, sizes: tuple[int, ...]) -> list[int]:
    """``sizes``, then single tokens for the last 20, with what remains before these."""
    return [*sizes, rest - sum(sizes) - 20, *[1] * 20]


# With experts, which keep no state: battery.
WITHOUT_EXPERTS = [name for name in HYBRID_CONFIGS if not name.endswith("-moe")]


@pytest.mark.parametrize("name", marked(HYBRID_CONFIGS, WITHOUT_EXPERTS))
def test_every_position_of_two_prompts_in_every_way(name: str) -> None:
    torch.manual_seed(1)
    model = transformers_model(name)
    prompts = torch.randint(3, model.config.vocab_size, (2, NUM_TOKENS))
    expected = logits_of(model, prompts)
    tokens = prompts.tolist()

    whole = new(name).served(tokens, [[NUM_TOKENS, 0], [0, NUM_TOKENS]])
    both = [steps_of(NUM_TOKENS, (1, 67, 3, 129)), steps_of(NUM_TOKENS, (230, 2, 1, 40))]
    ways = {
        "whole": whole,
        "both at once": new(name).served(tokens, [[NUM_TOKENS, NUM_TOKENS]]),
        "in chunks, in turn with single tokens": new(name).served(
            tokens, [list(pair) for pair in zip(*both, strict=True)]
        ),
    }
    # Where two experts are nearly even, the last bits of a sum decide, whose order differs from machine to machine.
    uneven = 1 if experts(new(name).weights) else 0
    for way, found in ways.items():
        for r in range(2):
            far = ~torch.isclose(found[r], expected[r], atol=1e-4, rtol=1e-4).all(-1)
            assert far.sum() <= uneven, f"{way}: positions {far.nonzero().flatten().tolist()} differ"
            assert torch.equal(found[r], whole[r]), way


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_a_state_that_was_kept_is_begun_from_by_another_request(name: str) -> None:
    torch.manual_seed(2)
    served = new(name)
    prompt = torch.randint(3, served.config.vocab_size, (NUM_TOKENS,)).tolist()
    whole = served.logits({0: prompt}, {0: 0}, keep=(KEPT_SLOT, SHARED))
    table = TABLES[0][: SHARED // BLOCK_SIZE] + TABLES[1][SHARED // BLOCK_SIZE :]
    behind = served.logits({1: prompt[SHARED:]}, {1: SHARED}, tables=[table], read_slots=[KEPT_SLOT])
    assert torch.equal(behind, whole[SHARED:])


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_a_slot_of_another_request_is_not_read(name: str) -> None:
    """A request without tokens before starts from zeros, and its logits depend on its states."""
    served = new(name, Dense)
    prompt = list(range(5, 45))
    first = served.logits({0: prompt}, {0: 0})
    assert torch.equal(served.logits({0: prompt}, {0: 0}), first)
    after = served.logits({0: [7]}, {0: 40})
    for cache, spec in zip(served.cache, family(served.config.architecture).layers(served.config), strict=True):
        if isinstance(spec, StateSpec):
            for state in cache:
                if state is not None:
                    state[1] = 0.3
    assert not torch.allclose(served.logits({0: [7]}, {0: 40}), after, atol=1e-3)
