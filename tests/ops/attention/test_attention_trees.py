"""Attention over trees of rows: a row has the bits that it has at the end of its path as a chain, whatever stands beside it."""

import random
from dataclasses import replace

import pytest
import torch

from tests.ops.attention.attention_cases import check
from tests.ops.attention.cpu_kernel import Attend, every_set
from tests.ops.attention.test_attention_cpu import EXACT_OPTIONS
from tests.ops.attention.tree_cases import make_tree_case, masks_of, path_to, paths, random_parents

OP = "attention_cpu"
SHAPES = {
    "gqa": {"num_heads": 8, "head_dim": 64},
    "mha": {"num_heads": 2, "head_dim": 128, "block_size": 32},
    "large-block": {"num_heads": 4, "head_dim": 32, "block_size": 256},
    "odd": {"num_heads": 6, "head_dim": 40, "block_size": 5},
}
OPTIONS = pytest.mark.parametrize("options", EXACT_OPTIONS, ids=lambda one: "-".join(map(str, one.values())))


def trees_of(seed: int) -> tuple[list, list[int]]:
    """Trees and lengths of contexts: across ends of tiles and partitions, beside decodes, prompts and a chain."""
    generator = random.Random(seed)
    trees = [random_parents(count, generator) for count in (16, 7, 16, 3, 12)]
    return [trees[0], 1, trees[1], 20, trees[2], [0, 1, 2, 3], trees[3], trees[4]], [1020, 40, 505, 3, 120, 127, 0, 250]


@OPTIONS
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every_set
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_bits_of_its_path_as_a_chain(attend: Attend, shape: dict, options: dict) -> None:
    trees, contexts = trees_of(1)
    case = make_tree_case(trees, contexts, trailing_rows=2, **shape, **options)
    out = check(case, attend)
    for row, chain in paths(case, trees):
        assert torch.equal(attend(*chain.args())[-1], out[row]), f"row {row}"
