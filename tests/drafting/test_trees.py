"""Trees of drafts: continuations merged, the likeliest nodes first, by what was measured or in a given shape."""

import pytest

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.methods import host_source
from compiled_llm.drafting.token_text import as_text
from compiled_llm.drafting.trees import Measured, merged
from compiled_llm.scheduling.draft_trees import DraftTree
from tests.fake_engine import make_request


def texts(*continuations: list[int]) -> list[tuple[str, float]]:
    return [(as_text(tokens), 1.0) for tokens in continuations]


def test_nodes_come_by_their_share() -> None:
    tree, shares = merged(texts([1, 2, 3], [1, 2, 4], [1, 5], [6]), 7, Measured(), None, 0.1)
    # 1 in three of four, then 2 in two of three, ...: 0.75, 0.5, 0.25 (6), 0.25 (3), 0.25 (4), 0.25 (5)
    assert tree.token_ids[:2] == (1, 2)
    assert tree.parents[:2] == (0, 1)
    assert dict(zip(tree.token_ids, tree.parents, strict=True)) == {
        1: 0, 2: 1, 3: 2, 4: 2, 5: 1, 6: 0
    }  # fmt: skip
    assert shares[:2] == [0.75, pytest.approx(2 / 3)]
    assert merged(texts([1, 2, 3], [1, 2, 4]), 2, Measured(), None, 0.1)[0].token_ids == (1, 2)
    assert len(merged([], 5, Measured(), None, 0.1)[0]) == 0


def test_a_shape_has_its_ranks() -> None:
    shape = frozenset({(0,), (1,), (1, 0)})
    tree, _ = merged(texts([1, 2], [1, 3], [4, 5], [6, 7]), 15, Measured(), shape, 0.0)
    assert sorted(zip(tree.token_ids, tree.parents, strict=True))[:2] == [(1, 0), (4, 0)]
    assert set(tree.token_ids) == {1, 4, 5}


def test_what_was_never_right_is_not_drafted() -> None:
    """The second of two equal continuations was right each time, so the first is worth nothing any more."""
    measured, given = Measured(), texts([1], [2])
    for _ in range(200):
        measured.observe(DraftTree([1, 2], [0, 0]), [0.5, 0.5], [2])
    assert measured.factors[0, 0] < 0.1
    assert measured.factors[0, 1] > 1.9
    tree, _ = merged(given, 15, measured, None, 0.1)
    assert tree.token_ids == (2,)


def test_only_nodes_whose_parents_were_right_are_measured() -> None:
    measured = Measured()
    for _ in range(50):
        measured.observe(DraftTree([1, 2, 3], [0, 1, 0]), [0.9, 0.9, 0.1], [3])
    assert (1, 0) not in measured.factors
    assert measured.factors[0, 0] < 0.2


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_both_methods_draft_what_came_before(method: str) -> None:
    """After 7, 8 came 1, 2 once and 3 once; each request by itself, and the ended ones are forgotten."""
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    source = host_source(SpeculativeConfig(method=method, speculative_token_tree="auto", **lookup), 100)
    request = make_request("a", [7, 8, 1, 2, 9, 7, 8, 3, 4, 7, 8], 40)
    (tree,) = source.propose([request], [6])
    firsts = {tree.token_ids[row - 1] for row in tree.children(0)}
    assert firsts == {1, 3}
    request.output_token_ids += [1, 2, 9, 7, 8]
    (again,) = source.propose([request], [2])
    assert len(again) == 2
    assert again.token_ids[0] == 3  # after 9, 7, 8
    source.end(request)
    source.end(make_request("never asked about", [1], 9))
    assert not source._last
    assert not source._texts
