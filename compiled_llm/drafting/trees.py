"""Trees of drafts on the host: several continuations of the last tokens, merged, the likeliest drafts first.

A node is expected to be right as often as its parent is, times its share of the continuations there, times what nodes
of its depth and rank were measured to be worth beside their shares. The tree has the nodes that are expected most
(EAGLE-2, Li et al., 2024, arXiv:2406.16858, with counts in the place of a network's probabilities), or those of a shape
that is given, in which a place is a rank among siblings at each depth (Medusa, Cai et al., 2024, arXiv:2401.10774).
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from compiled_llm.api.speculative_config import SHARE_UNIT, SpeculativeConfig
from compiled_llm.drafting.suffix import SuffixDrafter
from compiled_llm.drafting.token_text import as_text
from compiled_llm.scheduling.draft_trees import DraftTree
from compiled_llm.scheduling.request import Request
from compiled_llm.scheduling.worker_drafts import WorkerDrafts

Shape = frozenset[tuple[int, ...]]
Continuation = tuple[str, float]  # tokens, and how much it counts
Node = TypeVar("Node")

_LEAST = 0.1  # that a node of n-grams is expected to be right, where no shape is given
_LEAST_OF_NETWORKS = 0.002  # the same of a network's
_MOST_PLACES = 8  # of n-grams, whose continuations are merged
_MEMORY, _PRIOR = 0.995, 4.0  # what stays of what was measured with each observation; observations that it begins with
_MOST_RANKS = 8


class Measured:
    """How often nodes were right beside their shares, by depth and rank: of nodes whose parents were right.

    Attributes:
        factors: by (depth, rank), what a share of the continuations is to be multiplied by; 1 where there is none.
    """

    def __init__(self) -> None:
        self.factors: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # how often they were right, and sums of shares

    def observe(self, tree: DraftTree, shares: Sequence[float], known: Sequence[int]) -> None:
        """``known`` came after ``tree`` was proposed, whose nodes had these shares."""
        row = 0
        for depth, token_id in enumerate(known):
            found = 0
            for rank, child in enumerate(tree.children(row)):
                is_right, place = tree.token_ids[child - 1] == token_id, (depth, rank)
                right, expected = self._seen.get(place, (0.0, 0.0))
                right, expected = _MEMORY * right + is_right, _MEMORY * expected + shares[child - 1]
                self._seen[place] = right, expected
                self.factors[place] = (right + _PRIOR) / (expected + _PRIOR)
                found = child if is_right else found
            if not found:
                return
            row = found


def merged(
    continuations: Sequence[Continuation], most: int, measured: Measured, shape: Shape | None, least: float
) -> tuple[DraftTree, list[float]]:
    """The tree of the nodes that are expected most, in this order, and their shares; up to ``most`` of them.

    Without those that are expected less than ``least``.
    """
    return best_tree(_children, list(continuations), most, measured, shape, least)


def best_tree(
    children_of: Callable[[Node, int], Iterable[tuple[int, float, Node]]],
    root: Node,
    most: int,
    measured: Measured,
    shape: Shape | None,
    least: float,
) -> tuple[DraftTree, list[float]]:
    """As ``merged``. ``children_of``: (node, its depth) -> tokens after it, the likeliest first: (id, share, node)."""
    tokens, parents, shares, worths = list[int](), list[int](), list[float](), list[float]()
    factors, order_of = measured.factors, itertools.count()
    # (-what is expected, order, row of the parent, ranks, token, share, node)
    waiting: list[tuple[float, int, int, tuple[int, ...], int, float, Node]] = []
    row, worth, node = 0, 1.0, root
    ranks: tuple[int, ...] = ()
    while len(tokens) < most:
        depth = len(ranks)
        for rank, (token, share, following) in enumerate(children_of(node, depth)):
            expected = worth * min(1.0, share * factors.get((depth, rank), 1.0))
            place = (*ranks, rank)
            if expected >= least and (shape is None or place in shape):
                heapq.heappush(waiting, (-expected, next(order_of), row, place, token, share, following))
        if not waiting:
            break
        worth, _, parent, ranks, token, share, node = heapq.heappop(waiting)
        worth = -worth
        tokens.append(token)
        parents.append(parent)
        shares.append(share)
        worths.append(worth)
        row = len(tokens)
    return DraftTree(tokens, parents, worths), shares


def _children(texts: list[Continuation], depth: int) -> list[tuple[int, float, list[Continuation]]]:
    """The tokens that ``texts`` have at ``depth``, the most frequent first, with their shares and these texts."""
    if len(texts) == 1:
        text = texts[0][0]
        return [(ord(text[depth]), 1.0, texts)] if len(text) > depth else []
    following = dict[str, list[Continuation]]()
    for one in texts:
        if len(one[0]) > depth:
            following.setdefault(one[0][depth], []).append(one)
    if len(following) == 1:
        return [(ord(token), 1.0, group) for token, group in following.items()]
    weights = {token: sum([weight for _, weight in group]) for token, group in following.items()}
    total = sum(weights.values())
    likeliest = sorted(weights, key=weights.__getitem__, reverse=True)[:_MOST_RANKS]
    return [(ord(token), weights[token] / total, following[token]) for token in likeliest]


class Proposals:
    """The trees that were proposed last, to be measured once it is known what came.

    Args:
        most: nodes of a tree.
        shape: the places of nodes; None: those that are expected most.
        least: chance to be right that a node must be expected to have.
    """

    def __init__(self, most: int, shape: Shape | None, least: float) -> None:
        self._most, self._shape, self._least, self._measured = most, shape, least, Measured()
        self._last: dict[Request, tuple[int, DraftTree, list[float]]] = {}

    def proposed(
        self,
        request: Request,
        children_of: Callable[[Node, int], Iterable[tuple[int, float, Node]]],
        root: Node,
        most: int,
    ) -> DraftTree:
        """The tree of ``best_tree``."""
        output = request.output_token_ids
        if request in self._last:
            start, tree, shares = self._last.pop(request)
            self._measured.observe(tree, shares, output[start : start + self._most])
        tree, shares = best_tree(children_of, root, most, self._measured, self._shape, self._least)
        self._last[request] = len(output), tree, shares
        return tree

    def forget(self, request: Request) -> None:
        self._last.pop(request, None)


class TreeDrafter(Proposals):
    """A ``DraftSource`` whose proposals are trees, of a method's ``continuations``."""

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[DraftTree]:
        """As ``DraftSource.propose``."""
        return [self._tree(request, count) for request, count in zip(requests, most, strict=True)]

    def continuations(self, request: Request, most: int) -> list[Continuation]:
        """What came after its last tokens before, up to ``most`` tokens each."""
        raise NotImplementedError

    def _tree(self, request: Request, most: int) -> DraftTree:
        return self.proposed(request, _children, self.continuations(request, most), most)


class NgramTrees(TreeDrafter):
    """What followed the last tokens of a request where it had them before, the longest runs counting most."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config.num_tokens, config.tree_shape, _LEAST if config.tree_shape is None else 0.0)
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        self.num_tokens, self.adapts = config.num_tokens, config.adaptive
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._texts: dict[Request, tuple[str, int]] = {}  # prompt and output, and how much of the output

    def end(self, request: Request) -> None:
        self.forget(request)
        self._texts.pop(request, None)

    def continuations(self, request: Request, most: int) -> list[Continuation]:
        text, known = self._texts.get(request) or (as_text(request.prompt_token_ids), 0)
        text += as_text(request.output_token_ids[known:])
        self._texts[request] = text, len(request.output_token_ids)
        places: dict[int, float] = {}
        for length in self._lengths:
            run, at = text[-length:], -1
            while len(run) == length and len(places) < _MOST_PLACES and (at := text.find(run, at + 1)) >= 0:
                if at + length < len(text):
                    places.setdefault(at + length, float(length * length))
        return [(text[place : place + most], weight) for place, weight in places.items()]


class SuffixTrees(SuffixDrafter, TreeDrafter):
    """What followed runs of the last tokens, of the request and of recent outputs, the longest counting most."""

    def __init__(self, config: SpeculativeConfig) -> None:
        chain = SuffixDrafter.of(config)
        self.__dict__.update(chain.__dict__)
        TreeDrafter.__init__(self, config.num_tokens, config.tree_shape, chain._least_probability)

    propose = TreeDrafter.propose  # type: ignore[assignment]

    def end(self, request: Request) -> None:
        self.forget(request)
        super().end(request)

    def continuations(self, request: Request, most: int) -> list[Continuation]:
        text, _ = self.text_of(request)
        text.enter()
        last, found = text.last(), list[Continuation]()
        for places in (text.places, self._outputs.of(request.cache_salt)):
            length, after = (0, []) if places is None else places.longest(last)
            while places is not None and length > 0:
                followers = places.after(after, min(most, int(length * self._factor)))
                found += [(tokens, length * length / len(followers)) for tokens in followers if tokens]
                length //= 2
                after = places.find(last[:length]) if length else []
        return found


class NetworkTrees(WorkerDrafts, Proposals):
    """``WorkerDrafts`` whose proposals are trees, of what a network gives (``step/tree_drafting.py``)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        WorkerDrafts.__init__(self, config.num_tokens, config.adaptive, reads_tokens=config.reads_tokens)
        Proposals.__init__(self, config.num_tokens, config.tree_shape, 0.0 if config.tree_shape else _LEAST_OF_NETWORKS)
        assert config.network_tree is not None
        self._by_heads, self._ranks = config.method == "medusa", config.network_tree.ranks

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """As ``DraftSource.propose``."""
        found = list[Sequence[int]]()
        for request, columns, count in zip(requests, self.newest(requests), most, strict=True):
            if not columns:
                found.append(())
            elif self._by_heads:
                heads: tuple[Sequence[int], int] = columns, self._ranks
                found.append(self.proposed(request, _by_heads, heads, count))
            else:
                found.append(self.proposed(request, _by_nodes, (_families(columns), 0), count))
        return found

    def end(self, request: Request) -> None:
        self.forget(request)
        super().end(request)


def _by_heads(heads: tuple[Sequence[int], int], depth: int) -> list[tuple[int, float, tuple[Sequence[int], int]]]:
    """Any of a head's tokens may follow any of the head before it."""
    (columns, ranks), half = heads, len(heads[0]) // 2
    places = range(depth * ranks, min(half, (depth + 1) * ranks))
    return [(columns[place], columns[half + place] / SHARE_UNIT, heads) for place in places if columns[half + place]]


_Families = dict[int, list[tuple[int, float, int]]]  # of each parent: tokens, shares, numbers


def _families(columns: Sequence[int]) -> _Families:
    count = len(columns) // 3
    found: _Families = {}
    for number in range(count):
        if columns[2 * count + number]:
            family = found.setdefault(columns[count + number], [])
            family.append((columns[number], columns[2 * count + number] / SHARE_UNIT, number + 1))
    return found


def _by_nodes(node: tuple[_Families, int], depth: int) -> list[tuple[int, float, tuple[_Families, int]]]:
    """The tokens after a node that a network went on from."""
    families, number = node
    return [(token, share, (families, child)) for token, share, child in families.get(number, ())]
