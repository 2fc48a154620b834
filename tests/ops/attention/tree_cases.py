"""Trees of rows for the attention kernels: random ones, and the chain that each path of them is."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.ops.attention.attention_cases import Case, alone, make_case


def random_parents(count: int, generator: random.Random, reach: int = 4) -> list[int]:
    """The parent of each row after row 0, of which each stands before its children."""
    return [generator.randrange(max(0, row - reach), row) for row in range(1, count)]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    """The rows from row 0 to ``row``."""
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def masks_of(parents: Sequence[int]) -> list[int]:
    """What ``ancestors`` has for a request whose rows have these parents."""
    masks = [sum(1 << seen for seen in path_to(parents, row)) for row in range(len(parents) + 1)]
    return [mask - (1 << 64) if mask >= 1 << 63 else mask for mask in masks]


def make_tree_case(
    trees: Sequence[Sequence[int] | int], context_lens: Sequence[int], make: Callable[..., Any] = make_case, **options
) -> Any:
    """As ``make``. ``trees``: of each request the parents of its rows; or a number of rows that are no tree."""
    counts = [tree if isinstance(tree, int) else len(tree) + 1 for tree in trees]
    case = make(counts, context_lens, **options)
    masks = [[0] * tree if isinstance(tree, int) else masks_of(tree) for tree in trees]
    padding = len(case.queries) - sum(counts)
    return replace(case, ancestors=torch.tensor([*itertools.chain(*masks), *[0] * padding], dtype=torch.int64))


def path_case(case: Case, request: int, path: Sequence[int]) -> Case:
    """One request by itself, whose rows are those of a path alone, as a chain: where a step without trees has them."""
    one = alone(case, request)
    slots = one.slot_mapping[: len(path)]
    context = int(one.seq_lens[0]) - len(one.queries)
    new = (name for name in one.OF_TOKENS if name != "slot_mapping")
    rows = {name: getattr(one, name)[list(path)].contiguous() for name in new}
    return replace(
        one, **rows, slot_mapping=slots, query_start_loc=torch.tensor([0, len(path)], dtype=torch.int32),
        seq_lens=torch.tensor([context + len(path)], dtype=torch.int32), ancestors=None, max_query_len=len(path),
    )  # fmt: skip


def leaves(parents: Sequence[int]) -> list[int]:
    """The rows that are nobody's parent."""
    return [row for row in range(len(parents) + 1) if row not in parents]
