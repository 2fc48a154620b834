"""Attention over trees of rows: a row has the bits that it has in its path as a chain, whatever stands beside it."""

import random
from dataclasses import replace

import pytest
import torch

from compiled_llm.ops.attention.move_keys import move_keys, move_keys_reference
from tests.drawn import drawn, marked
from tests.ops.attention.attention_cases import CACHES, check, make_case
from tests.ops.attention.cpu_kernel import Attend, every_set, reordered
from tests.ops.attention.test_attention_cpu import EXACT_OPTIONS
from tests.ops.attention.tree_cases import leaves, make_tree_case, path_case, path_to, random_parents

OP = "attention_cpu"
SHAPES = {
    "gqa": {"num_heads": 8, "head_dim": 64},
    "mha": {"num_heads": 2, "head_dim": 128, "block_size": 32},
    "large-block": {"num_heads": 4, "head_dim": 32, "block_size": 256},
    "odd": {"num_heads": 6, "head_dim": 40, "block_size": 5},
}
NAMES = {
    f"{shape}-{'-'.join(map(str, options.values()))}": (shape, {**SHAPES[shape], **options})
    for options in EXACT_OPTIONS
    for shape in SHAPES
}
VALUES = {name: {shape, str(options.get("kv_dtype", options["dtype"]))} for name, (shape, options) in NAMES.items()}
# Contexts that end shortly before a tile or a partition does, beside a decode, a prompt and a chain.
CONTEXTS = [505, 30, 120, 3, 250, 0]


def trees_of(seed: int) -> list:
    generator = random.Random(seed)
    large, middle, small = (random_parents(count, generator) for count in (64, 11, 4))
    return [large, 1, middle, 20, [0, 1, 2, 3], small]


every_case = pytest.mark.parametrize("name", marked(NAMES, drawn(VALUES, 6)))


@every_case
@every_set
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_bits_of_its_path_as_a_chain(attend: Attend, name: str) -> None:
    trees = trees_of(1)
    case = make_tree_case(trees, CONTEXTS, trailing_rows=2, **NAMES[name][1])
    out = check(case, attend)
    for request, tree in enumerate(trees):
        for leaf in [] if isinstance(tree, int) else leaves(tree):
            path = path_to(tree, leaf)
            rows = [case.rows(request).start + row for row in path]
            assert torch.equal(attend(*path_case(case, request, path).args()), out[rows]), f"{request}: {path}"


def test_a_chain_of_masks_is_a_chain(attend: Attend) -> None:
    case = make_tree_case([list(range(63)), [0, 1]], [500, 20], num_heads=8)
    assert torch.equal(attend(*case.args()), attend(*replace(case, ancestors=None).args()))


def test_what_masks_must_not_be(attend: Attend) -> None:
    """No paths of a tree: without itself, without row 0, of a later row, besides its parent's path, a row without."""
    case = make_tree_case([[0, 1, 0]], [20])
    for row, mask in ((1, 1), (2, 6), (1, 7), (3, 13), (2, 0)):
        wrong = case.ancestors.clone()
        wrong[row] = mask
        with pytest.raises(IndexError, match=f"ancestors of row {row if row != 0 else 1}|ancestors of row 3"):
            attend(*replace(case, ancestors=wrong).args())
    with pytest.raises(IndexError, match="at most 64 rows"):
        attend(*replace(make_case([65], [3]), ancestors=torch.ones(65, dtype=torch.int64)).args())


@pytest.mark.parametrize("kernels_order", [True, False], ids=["kernels", "reference"])
@every_case
def test_moved_keys_are_those_of_a_chain(attend: Attend, name: str, kernels_order: bool) -> None:
    """All of the cache, bit for bit, but for the slots of what is not kept."""
    tree, context = random_parents(64, random.Random(2)), 250
    case = make_tree_case([tree], [context], **NAMES[name][1])
    path = path_to(tree, max(leaves(tree), key=lambda leaf: len(path_to(tree, leaf)) * (leaf != len(tree))))
    assert path != list(range(len(path)))
    moved, kept = case.values(), path_case(case, 0, path).values()
    attend(*moved.values())
    attend(*kept.values())
    slots = case.slot_mapping.long()
    moves = torch.stack([slots[path], slots[: len(path)]], dim=1)
    caches = [moved[one] for one in CACHES]
    if kernels_order:
        caches[:2] = [reordered(cache, n == 0, True) for n, cache in enumerate(caches[:2])]
    (move_keys if kernels_order else move_keys_reference)(*caches, moves, latent=False)
    if kernels_order:
        caches[:2] = [reordered(cache, n == 0, False) for n, cache in enumerate(caches[:2])]
    size, dropped = case.k_cache.shape[2], slots[len(path) :]
    for given, wanted in zip(caches, (kept[one] for one in CACHES), strict=True):
        if given is not None:
            for cache in (given, wanted):
                cache.view(torch.uint8).view(*cache.shape[:3], -1)[dropped // size, :, dropped % size] = 0
            assert torch.equal(given[1:].view(torch.uint8), wanted[1:].view(torch.uint8))


def test_ops_are_as_torch_knows_them() -> None:
    case = make_tree_case([[0, 0, 1], 2], [20, 3])
    clean = {name: torch.nan_to_num(getattr(case, name), 1.0, 1.0, 1.0) for name in CACHES[:2]}  # NaN equals nothing
    case = replace(case, **clean)
    torch.library.opcheck(torch.ops.compiled_llm.paged_attention.default, case.args())
    caches = [case.values()[name] for name in CACHES]
    torch.library.opcheck(
        torch.ops.compiled_llm.move_keys.default, (*caches, torch.tensor([[17, 18], [35, 17]]), False)
    )
