"""Latent attention over trees of rows: a row has the bits that it has in its path as a chain."""

import random
from dataclasses import replace

import pytest
import torch

from compiled_llm.ops.attention.move_keys import move_keys, move_keys_reference
from tests.drawn import drawn, marked
from tests.ops.attention.attention_cases import CACHES, check
from tests.ops.attention.cpu_kernel import Attend, reordered
from tests.ops.attention.latent_cases import make_case
from tests.ops.attention.test_attention_trees import CONTEXTS, trees_of
from tests.ops.attention.tree_cases import leaves, make_tree_case, path_case, path_to, random_parents
from tests.ops.instruction_sets import by_set

OP = "latent_attention_cpu"
SHAPES = {
    "runs": {"num_heads": 4, "latent_dim": 64, "turned_dim": 32},
    "large-block": {"num_heads": 2, "latent_dim": 128, "turned_dim": 16, "block_size": 64},
    "odd": {"num_heads": 3, "latent_dim": 40, "turned_dim": 12, "block_size": 5},
}
OPTIONS: list[dict] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "window": 100},
    {"dtype": torch.bfloat16, "kv_dtype": torch.int8},
    {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
    {"dtype": torch.float32, "kv_dtype": torch.int8, "window": 600},
]
NAMES = {
    f"{shape}-{'-'.join(map(str, options.values()))}": (shape, {**SHAPES[shape], **options})
    for options in OPTIONS
    for shape in SHAPES
}
VALUES = {name: {shape, str(options.get("kv_dtype", options["dtype"]))} for name, (shape, options) in NAMES.items()}
every_case = pytest.mark.parametrize("name", marked(NAMES, drawn(VALUES, 5)))


@every_case
@pytest.mark.parametrize("attend", by_set(OP), indirect=True)
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_bits_of_its_path_as_a_chain(attend: Attend, name: str) -> None:
    trees = trees_of(1)
    case = make_tree_case(trees, CONTEXTS, make_case, trailing_rows=2, **NAMES[name][1])
    out = check(case, attend)
    for request, tree in enumerate(trees):
        for leaf in [] if isinstance(tree, int) else leaves(tree):
            path = path_to(tree, leaf)
            rows = [case.rows(request).start + row for row in path]
            assert torch.equal(attend(*path_case(case, request, path).args()), out[rows]), f"{request}: {path}"


def test_masks_that_are_no_tree_are_refused(attend: Attend) -> None:
    case = make_tree_case([[0, 1, 0]], [20], make_case)
    wrong = replace(case, ancestors=case.ancestors.clone())
    wrong.ancestors[2] = 6  # without row 0
    with pytest.raises(IndexError, match="ancestors of row 2"):
        attend(*wrong.args())


@pytest.mark.parametrize("kernels_order", [True, False], ids=["kernels", "reference"])
@every_case
def test_moved_latents_are_those_of_a_chain(attend: Attend, name: str, kernels_order: bool) -> None:
    """All of the cache, bit for bit, but for the slots of what is not kept."""
    tree, context = random_parents(64, random.Random(2)), 250
    case = make_tree_case([tree], [context], make_case, **NAMES[name][1])
    path = path_to(tree, max(leaves(tree), key=lambda leaf: len(path_to(tree, leaf)) * (leaf != len(tree))))
    assert path != list(range(len(path)))
    moved, kept = case.values(), path_case(case, 0, path).values()
    attend(*moved.values())
    attend(*kept.values())
    slots = case.slot_mapping.long()
    moves = torch.stack([slots[path], slots[: len(path)]], dim=1)
    caches = [moved[one] for one in CACHES]
    if kernels_order:
        caches[:2] = [reordered(cache, True, True) for cache in caches[:2]]
    (move_keys if kernels_order else move_keys_reference)(*caches, moves, latent=True)
    if kernels_order:
        caches[:2] = [reordered(cache, True, False) for cache in caches[:2]]
    size, dropped = case.k_cache.shape[2], slots[len(path) :]
    for given, wanted in zip(caches, (kept[one] for one in CACHES), strict=True):
        if given is not None:
            for cache in (given, wanted):
                cache.view(torch.uint8).view(*cache.shape[:3], -1)[dropped // size, :, dropped % size] = 0
            assert torch.equal(given[1:].view(torch.uint8), wanted[1:].view(torch.uint8))
