"""Drafts of a request that are a tree: several tokens that may follow the same one. Plain Python.

A step samples a token after each draft, with noise that follows from the draft's position alone. So the tokens that
would have come are one path: from the last known token on, each goes to the child that is the token sampled there.
(SpecInfer, Miao et al., 2023, arXiv:2305.09781, with a rule of acceptance that changes no token.)
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    import numpy as np


class DraftTree(Sequence[int]):
    """The tokens of a tree, parents before children and siblings all different. ``tree[:n]`` is the tree of the first.

    Attributes:
        parents: of each: 0 where it follows the last known token, ``n + 1`` where it follows ``token_ids[n]``. So these
            are rows of a step that computes the last known token and the tree after it.
        worths: of each the chance that it is right, as its source expects it; empty: that is not known.
    """

    def __init__(self, token_ids: Sequence[int], parents: Sequence[int], worths: Sequence[float] = ()) -> None:
        self.token_ids, self.parents, self.worths = tuple(token_ids), tuple(parents), tuple(worths)

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "DraftTree": ...
    def __getitem__(self, index: int | slice) -> "int | DraftTree":
        if isinstance(index, int):
            return self.token_ids[index]
        assert index.start is None, "only the first ones are a tree"
        return DraftTree(self.token_ids[index], self.parents[index], self.worths[index])

    def children(self, row: int) -> list[int]:
        """Rows of the drafts that follow ``row``."""
        return [child for child, parent in enumerate(self.parents, 1) if parent == row]

    def path_to(self, row: int) -> list[int]:
        """The rows from the last known token's, 0, to this one."""
        path = [row]
        while path[-1]:
            path.append(self.parents[path[-1] - 1])
        return path[::-1]

    def depth_first(self) -> "DraftTree":
        """The same, with each branch in a row: attention reads what a branch sees once for all of it."""
        if self.is_chain:
            return self
        children: list[list[int]] = [[] for _ in range(1 + len(self))]
        for row in range(len(self), 0, -1):
            children[self.parents[row - 1]].append(row)
        order, rows = [], [0]
        while rows:
            order.append(rows.pop())
            rows += children[order[-1]]
        place = {row: new for new, row in enumerate(order)}
        return DraftTree(
            [self.token_ids[row - 1] for row in order[1:]], [place[self.parents[row - 1]] for row in order[1:]]
        )

    def without(self, rows: set[int]) -> "DraftTree":
        """What is left without these rows and all that follow them, and places that these had: see ``kept``."""
        kept = self.kept(rows)
        place = {row: new for new, row in enumerate([0, *kept])}
        return DraftTree([self.token_ids[row - 1] for row in kept], [place[self.parents[row - 1]] for row in kept])

    def kept(self, rows: set[int]) -> list[int]:
        """Its rows but for these and all that follow them."""
        gone = set(rows)
        for row, parent in enumerate(self.parents, 1):
            if parent in gone:
                gone.add(row)
        return [row for row in range(1, len(self) + 1) if row not in gone]

    @property
    def chance(self) -> float:
        """That one more draft of a chain of as many is right, if the chain is worth as much as this."""
        expected, count, low, high = sum(self.worths), len(self), 0.0, 1.0
        for _ in range(8):
            chance = (low + high) / 2
            if chance * (1 - chance**count) / (1 - chance) < expected:
                low = chance
            else:
                high = chance
        return (low + high) / 2

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self)))

    def path(self, chosen: Sequence[int]) -> list[int]:
        """The rows whose tokens count, from 0 on. ``chosen``: what the step chose at each row."""
        path = [0]
        while (child := self._child(path[-1], chosen[path[-1]])) is not None:
            path.append(child)
        return path

    def num_right(self, known: Sequence[int]) -> tuple[int, bool]:
        """How many of the tokens that came it has, one after the other, and whether it has another one then."""
        row = 0
        for count, token_id in enumerate(known):
            child = self._child(row, token_id)
            if child is None:
                return count, bool(self.children(row))
            row = child
        return len(known), False

    def _child(self, row: int, token_id: int) -> int | None:
        return next((child for child in self.children(row) if self.token_ids[child - 1] == token_id), None)


def tree_depths(parents: Sequence[int]) -> list[int]:
    """How many rows stand before each row of a tree on its path, from the last known token's row on, whose is 0."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def allowed(
    tree: DraftTree, masks_after: "Callable[[list[int]], Sequence[np.ndarray]]"
) -> "tuple[DraftTree, list[np.ndarray]]":
    """The part of ``tree`` that masks allow, and the mask after each of its drafts.

    ``masks_after``: of drafts that follow one another, the masks after the first ones, before the first forbidden one.
    """
    masks: dict[int, np.ndarray] = {}
    for leaf in set(range(1, len(tree) + 1)).difference(tree.parents):
        path = tree.path_to(leaf)[1:]
        masks |= zip(path, masks_after([tree.token_ids[row - 1] for row in path]), strict=False)
    forbidden = {row for row in range(1, len(tree) + 1) if row not in masks}
    return tree.without(forbidden), [masks[row] for row in tree.kept(forbidden)]
