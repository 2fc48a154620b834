"""Candidates for tiles of attention, the search, steps that run, and files that are written, read back and chosen."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from compiled_llm.ops.attention import tiles as attention_tiles
from compiled_llm.ops.attention.tiles import HOPPER, TileConfig, default_config, key, tile_config
from compiled_llm.tuning import attention
from compiled_llm.tuning.search import search

H200 = "NVIDIA H200"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(attention_tiles, "FOLDER", tmp_path / "tiles")
    return tmp_path / "tiles"


def test_candidates_are_new_fit_and_come_closest_first() -> None:
    start = HOPPER[128]
    for kind, choices in attention.KINDS.items():
        found = attention.candidates(start, kind, 128, 2, 227 * 1024)
        assert start not in found
        assert len(set(found)) == len(found) > 0
        distances = [sum(getattr(start, name) != getattr(config, name) for name in choices) for config in found]
        assert distances == sorted(distances)
        for config in found:
            assert replace(config, **{name: getattr(start, name) for name in choices}) == start, "of this kind only"
    few = attention.candidates(start, "decode tiles", 256, 2, 99 * 1024)
    assert 0 < len(few) < len(attention.candidates(start, "decode tiles", 256, 1, 227 * 1024))
    assert all(2 * (config.decode_stages - 1) * config.decode_block_n * 256 * 2 <= 99 * 1024 for config in few)


def test_every_field_is_tuned() -> None:
    tuned = [name for choices in attention.KINDS.values() for name in choices]
    assert sorted(tuned) == sorted(TileConfig.__dataclass_fields__)
    assert {kind.split()[0] for kind in attention.KINDS} == set(attention.STEPS)


def test_the_search_keeps_what_is_clearly_better() -> None:
    start = HOPPER[128]
    configs = [replace(start, split_stages=stages) for stages in (2, 4, 5, 6)]
    costs = dict(zip([start, *configs], (1.0, 0.99, math.inf, 0.8, 0.79), strict=True))
    assert search(start, configs, costs.__getitem__, 10, now=lambda: 0.0) == (configs[2], 0.8, 4)
    assert search(start, configs[:2], costs.__getitem__, 10, now=lambda: 0.0) == (start, 1.0, 2)


def test_the_search_ends_in_time() -> None:
    start, clock = HOPPER[128], iter(range(100))
    configs = [replace(start, split_stages=stages) for stages in range(10, 60)]
    _, _, tried = search(start, configs, lambda config: 1.0, 5, now=lambda: float(next(clock)))
    assert tried == 5


def test_a_file_is_read_back_and_chosen(folder: Path) -> None:
    path = attention_tiles.path_of(H200)
    assert path == folder / "NVIDIA_H200.json"
    tuned = replace(HOPPER[128], split_block_n=16, prefill_stages=4)
    attention_tiles.save(path, H200, {key(128, 2, 1): tuned})
    assert attention_tiles.load(path) == {key(128, 2, 1): tuned}

    assert tile_config(128, 2, 1, (9, 0), H200) == tuned
    assert tile_config(96, 2, 1, (9, 0), H200) == tuned, "96 is padded to 128"
    for head_dim, q_bytes, cache_bytes in ((128, 2, 2), (64, 2, 1), (128, 4, 1)):
        default = default_config(head_dim, q_bytes, cache_bytes, (9, 0))
        assert tile_config(head_dim, q_bytes, cache_bytes, (9, 0), H200) == default
    assert tile_config(128, 2, 1, (9, 0), "NVIDIA H100 80GB HBM3") == default_config(128, 2, 1, (9, 0))


def test_names_of_files() -> None:
    assert attention_tiles.path_of("NVIDIA A100-SXM4-80GB").name == "NVIDIA_A100_SXM4_80GB.json"
    assert attention_tiles.path_of("../../x").parent == attention_tiles.FOLDER


def test_files_in_the_package_are_whole() -> None:
    for path in attention_tiles.FOLDER.glob("*.json"):
        assert attention_tiles.load(path)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("q_bytes", "cache_bytes"), [(2, 2), (2, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_every_shape_has_a_default(head_dim: int, q_bytes: int, cache_bytes: int, capability: tuple[int, int]) -> None:
    config = default_config(head_dim, q_bytes, cache_bytes, capability)
    for name, value in vars(config).items():
        if name.startswith("alone") and value == 0:  # as many requests' tile
            continue
        assert value >= (name != "prefill_programs_per_sm")  # 0: a program for each tile
        if "block" in name:
            assert value >= 16
            assert value & (value - 1) == 0
