"""Bytes of a KV pool, where some layers keep less than others."""

from pathlib import Path

import pytest
import torch

from compiled_llm.api.config import EngineConfig, EngineLimits, StepDefaults
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.scheduling.window_pool import useful_places
from compiled_llm.worker.pool_sizes import PoolSizes, WindowSize
from tests.families import checkpoint
from tests.models.published_configs import published

SIZES = PoolSizes(1000, (WindowSize(8, 300, 5), WindowSize(20, 50, 12)), 100, 100)


@pytest.mark.parametrize(
    ("blocks", "size"), [(0, 0), (1, 1350), (5, 6750), (6, 7800), (12, 14_100), (13, 15_100), (100, 102_100)]
)
def test_a_window_takes_no_more_than_its_most_places(blocks: int, size: int) -> None:
    assert SIZES.bytes_of(blocks) == size
    assert SIZES.blocks_within(size) == blocks
    assert SIZES.blocks_within(size + 999) == blocks or blocks < 1
    assert SIZES.blocks_within(max(0, size - 1)) == max(0, blocks - 1)


def test_there_are_no_more_blocks_than_can_be_of_use() -> None:
    assert SIZES.blocks_within(10**9) == 100


def sizes(family: str, max_model_len: int = 128) -> tuple[PoolSizes, EngineLimits]:
    config = EngineConfig(bucket_sizes=(4,), max_model_len=max_model_len, max_num_batched_tokens=16, block_size=4)
    model_config = read_config(Path(checkpoint(family)))
    limits = EngineLimits.resolve(config, 128, StepDefaults(16, 16, (1,), (1,)))
    dtypes = [torch.float32] * model_config.num_layers
    return PoolSizes.of(model_config, dtypes, limits, torch.float32), limits


def test_layers_are_counted_by_their_windows() -> None:
    found, limits = sizes("gemma3")
    (window,) = found.windows
    assert found.own_block_bytes > 0
    assert window.most_places == useful_places(window.window, limits)
    all_seen, _ = sizes("gemma3", max_model_len=window.window)  # no request is longer than the window
    assert all_seen.windows == ()
    assert all_seen.own_block_bytes == found.block_bytes


def test_where_all_layers_have_a_window_blocks_take_no_memory_of_their_own() -> None:
    found, limits = sizes("mistral")
    assert found.own_block_bytes == 0
    assert found.useful_blocks == limits.max_num_seqs * limits.blocks_per_request
    (window,) = found.windows
    assert found.blocks_within(window.block_bytes * window.most_places) == found.most_blocks > found.useful_blocks
    assert found.blocks_within(window.block_bytes * window.most_places - 1) == window.most_places - 1


def test_the_memory_of_a_published_model() -> None:
    """Gemma 3 of 1B: 22 of its 26 layers see 512 keys."""
    model_config = parse_config(published("gemma-3-1b-it"))
    config = EngineConfig(bucket_sizes=(32,), max_model_len=8192)
    limits = EngineLimits.resolve(config, 32768, StepDefaults(2048, 512, (1, 8, 32), (1,)))
    found = PoolSizes.of(model_config, [torch.bfloat16] * 26, limits, torch.bfloat16)
    blocks = 32 * limits.blocks_per_request
    assert blocks * found.block_bytes == 6.5 * 2**30
    assert 1.41 < found.bytes_of(blocks) / 2**30 < 1.43
