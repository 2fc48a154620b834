"""Rows that ranks share: a block of theirs has the bytes of one process without ranks, and comes back as it was."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.registry import layers_of
from compiled_llm.models.sharding import Shard, rank_config
from compiled_llm.models.weights import tensors
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, StateOutput, WindowOutput
from compiled_llm.step.kv_cache import allocate, of_states, short_windows, split_by_window
from compiled_llm.worker import shared_rows
from compiled_llm.worker.block_copies import SwapSpace
from compiled_llm.worker.shared_rows import Piece, SharedSwapSpace
from tests.models.ranks import CPU, config_of

BLOCKS, SIZE, LONGEST = 4, 4, 256
COUNTS = 1, 1, 2, 2  # rows of blocks and of slots, swapped and of tiers
FAMILIES = ["qwen3", "gemma3", "gemma4-moe", "deepseek-v3", "lfm2", "qwen3-next", "nemotron-h"]
Groups = list[list[Tensor]]


def fill(groups: Groups) -> None:
    for number, cache in enumerate(cache for group in groups for cache in group):
        bits = cache.view(torch.uint8)
        bits.copy_(torch.randint(256, bits.shape, generator=torch.Generator().manual_seed(number)))


class Model:
    """A family's sizes, with quantised keys or not; a network drafts with it."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.config = config_of(name)
        self.windows = short_windows(self.config, LONGEST)
        layers = layers_of(self.config)
        self.dtypes = [torch.float32 if isinstance(one, StateSpec) else dtype for one in layers]

    def groups(self, shard: Shard) -> Groups:
        """Zeroed caches of a rank."""
        config, places = rank_config(self.config, shard), dict.fromkeys(self.windows, BLOCKS)
        cache = allocate(config, self.dtypes, BLOCKS, SIZE, CPU, places, BLOCKS)
        parts = [*split_by_window(config, self.windows, cache), of_states(config, cache)]
        found = [tensors(tuple(part)) for part in parts]
        found[0].append(torch.zeros(BLOCKS, SIZE, 3))
        return found

    def space(self, groups: Groups, shard: Shard, rows: int) -> SharedSwapSpace:
        return SharedSwapSpace(groups, COUNTS, self.config, self.dtypes, self.windows, SIZE, shard, os.dup(rows))

    def output(self, **pairs: tuple[tuple[int, int], ...]) -> SchedulerOutput:
        """These pairs of (block, row) of each group, and of slots."""
        windows = (WindowOutput(**pairs),) * len(self.windows)  # type: ignore[arg-type]
        return SchedulerOutput(windows=windows, states=StateOutput(**pairs), **pairs)  # type: ignore[arg-type]


def same_of_one_and_of_ranks(name: str, size: int, dtype: torch.dtype) -> bool:
    """Blocks of one process come to ranks, and go back from there; heads of keys are cut here by hand."""
    model, rows = Model(name, dtype), os.memfd_create("rows")
    try:
        alone = Shard(0, 1)
        one = model.groups(alone)
        fill(one)
        own = SwapSpace(one, *COUNTS)
        own.copy(model.output(swapped_out=((1, 2), (3, 1))), one)
        shared = model.space(one, alone, rows)
        assert shared.layout == own.layout
        for pool, content in zip(shared.pools, own.pools, strict=True):
            pool.copy_(content)
        of_ranks = [model.groups(Shard(rank, size)) for rank in range(size)]
        spaces = [model.space(groups, Shard(rank, size), rows) for rank, groups in enumerate(of_ranks)]
        assert all(space.layout == own.layout for space in spaces)
        assert spaces[0].nbytes == own.nbytes // size
        for space, groups in zip(spaces, of_ranks, strict=True):
            space.copy(model.output(swapped_in=((2, 2), (1, 1))), groups)
        are_right = [torch.equal(*pair) for pair in _parts(model, one, of_ranks)]
        for pool in shared.pools:
            pool.zero_()
        for space, groups in zip(spaces, of_ranks, strict=True):
            space.copy(model.output(swapped_out=((2, 2), (1, 1))), groups)
            space.copy(model.output()._replace(copies=((1, 3),)), groups)
            assert all(torch.equal(bits[1], bits[3]) for bits in (cache.view(torch.uint8) for cache in groups[0]))
        are_right += map(torch.equal, spaces[0].pools, own.pools)
        return all(are_right)
    finally:
        os.close(rows)


def _parts(model: Model, one: Groups, of_ranks: list[Groups]) -> list[tuple[Tensor, Tensor]]:
    """What ranks have in blocks and slots 2 and 1, and which heads or channels of 1 and 3 these should be."""
    found = []
    for rank, groups in enumerate(of_ranks):
        own_config = rank_config(model.config, Shard(rank, len(of_ranks)))
        specs = [
            [spec for spec in layers_of(config) if isinstance(spec, StateSpec)] for config in (own_config, model.config)
        ]
        runs = {  # of the convolutions, which are the first tensors of layers with a state
            id(group): (own.runs or own.convolution[1:], whole.runs or whole.convolution[1:])
            for group, own, whole in zip(groups[-1][:: _each(specs[0])], *specs, strict=True)
        }
        for group, of_all in zip(groups, one, strict=True):
            for cache, whole in zip(group, of_all, strict=True):
                dim = -1 if id(cache) in runs else 1
                own_runs, all_runs = runs.get(id(cache), (cache.shape[1:2], whole.shape[1:2]))
                parts = [
                    part.narrow(dim, rank // (len(of_ranks) * own // run) * own, own)
                    for part, own, run in zip(whole.split(all_runs, dim), own_runs, all_runs, strict=True)
                ]
                found.append((cache[[2, 1]], torch.cat(parts, dim)[[1, 3]]))
    return [(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in found]


def _each(specs: list[StateSpec]) -> int:
    """Tensors of a layer with a state."""
    return 1 if not specs or specs[0].recurrent is None else 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_are_those_of_one_process(name: str, size: int, dtype: torch.dtype) -> None:
    assert same_of_one_and_of_ranks(name, size, dtype)


def _swapped_parts(pieces: list[Piece], rank: int) -> list[Piece]:
    """A rank's heads go to where the other's are."""
    size = pieces[0].size
    return [pieces[0]._replace(start=pieces[0].start + (size if rank == 0 else -size)), *pieces[1:]]


def _missing_part(pieces: list[Piece], rank: int) -> list[Piece]:
    return pieces if rank == 0 else pieces[1:]


def _exchanged_scales(pieces: list[Piece], rank: int) -> list[Piece]:
    """Those of keys where those of values are: qwen3 has ``k``, ``v``, ``k_scale``, ``v_scale``."""
    _, _, of_keys, of_values, *_ = pieces
    exchanged = of_keys._replace(start=of_values.start), of_values._replace(start=of_keys.start)
    return [*pieces[:2], *exchanged, *pieces[4:]]


@pytest.mark.parametrize("plant", [_swapped_parts, _missing_part, _exchanged_scales])
def test_planted_bugs_are_caught(
    plant: Callable[[list[Piece], int], list[Piece]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared_rows._pieces

    def planted(part: list, whole: list, shard: Shard) -> list[Piece]:
        pieces = own(part, whole, shard)
        return plant(pieces, shard.rank) if pieces and shard.size > 1 else pieces

    assert same_of_one_and_of_ranks("qwen3", 2, torch.int8)
    monkeypatch.setattr(shared_rows, "_pieces", planted)
    assert not same_of_one_and_of_ranks("qwen3", 2, torch.int8)
