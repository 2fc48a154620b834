"""Trees of drafts: paths and branches, what masks leave; and on a fake model, which tokens count and where keys go."""

import random

import numpy as np
import pytest

from compiled_llm.scheduling.draft_trees import DraftTree, allowed
from tests.fake_engine import FakeEngine, FakeTrees, add_request, both_loops, check_result, make_scheduler


def made(seed: int, count: int = 12) -> DraftTree:
    """A random tree, in which token ids say which row it is: 100 + row."""
    rng = random.Random(seed)
    return DraftTree(range(101, 101 + count), [rng.randrange(row) for row in range(1, count + 1)])


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens from each leaf's root on."""
    leaves = set(range(1, len(tree) + 1)).difference(tree.parents)
    return {tuple(tree.token_ids[row - 1] for row in tree.path_to(leaf)[1:]) for leaf in leaves}


def test_depth_first_is_the_same_tree_with_branches_in_a_row() -> None:
    for seed in range(30):
        tree = made(seed)
        ordered = tree.depth_first()
        assert paths_of(ordered) == paths_of(tree)
        assert all(parent < row for row, parent in enumerate(ordered.parents, 1))
        # A row that does not follow the one before it begins a branch: there are as many as leaves.
        starts = sum(parent != row - 1 for row, parent in enumerate(ordered.parents, 1))
        assert starts + 1 == len(paths_of(tree)) + (ordered.parents[0] != 0)
        for count in range(len(tree) + 1):
            assert paths_of(ordered[:count]) <= {path[:n] for path in paths_of(tree) for n in range(len(path) + 1)}


def test_a_path_goes_to_the_child_that_was_chosen() -> None:
    #       0 -> 1 (a) -> 3 (c), 4 (d) -> 5 (e);  0 -> 2 (b) -> 6 (d)
    a, b, c, d, e, other = range(7, 13)
    tree = DraftTree([a, b, c, d, e, d], [0, 0, 1, 1, 4, 2])
    assert tree.path([a, d, other, other, e, other, other]) == [0, 1, 4, 5]
    assert tree.path([b, c, d, e, e, e, a]) == [0, 2, 6]
    assert tree.path([other, d, d, d, d, d, d]) == [0]
    assert tree.num_right([a, d, e]) == (3, False)
    assert tree.num_right([a, d, e, other]) == (3, False)  # there was no draft for that place
    assert tree.num_right([a, e]) == (1, True)
    assert tree.num_right([b, d]) == (2, False)
    assert not tree.is_chain
    assert DraftTree([a, b], [0, 1]).is_chain


def test_the_chance_of_a_chain_that_is_worth_as_much() -> None:
    chain = DraftTree([1, 2, 3], [0, 1, 2], [0.6, 0.36, 0.216])
    assert chain.chance == pytest.approx(0.6, abs=0.01)
    assert DraftTree([1, 2, 3], [0, 0, 1], [0.9, 0.1, 0.05]).chance == pytest.approx(0.56, abs=0.01)
    assert chain[:1].worths == (0.6,)
    assert chain[:0].chance < 0.01


def test_masks_leave_what_none_of_them_forbids() -> None:
    """Even ids are forbidden below the root; each mask is told from the others by its path."""
    for seed in range(20):
        tree = made(seed)

        def masks_after(drafts: list[int]) -> list[np.ndarray]:
            right = next((n for n, token_id in enumerate(drafts) if n and token_id % 2 == 0), len(drafts))
            return [np.array(drafts[: n + 1]) for n in range(right)]

        left, masks = allowed(tree, masks_after)
        assert [mask.tolist() for mask in masks] == [
            [left.token_ids[row - 1] for row in left.path_to(place)[1:]] for place in range(1, len(left) + 1)
        ]
        assert paths_of(left) <= {path[:n] for path in paths_of(tree) for n in range(len(path) + 1)}
        kept = {
            row for row in range(1, len(tree) + 1) if all(tree.token_ids[one - 1] % 2 for one in tree.path_to(row)[2:])
        }
        assert set(left.token_ids) == {tree.token_ids[row - 1] for row in kept}


@both_loops
@pytest.mark.parametrize("num_blocks", [40, 12], ids=["room for all", "preemptions"])
def test_tokens_are_those_of_plain_decoding(num_blocks: int, overlap: bool) -> None:
    """Also with blocks that others share, and with windows; every key that a step reads stands where it should."""
    windows = [(6, None)]
    scheduler = make_scheduler(
        num_blocks, source=FakeTrees(9, num_blocks), prefix_caching=True, num_swap_blocks=20, windows=windows
    )
    engine = FakeEngine(scheduler, overlap=overlap)
    shared = list(range(1, 10))
    requests = [add_request(scheduler, f"{i}", [*shared, i], 30) for i in range(4)]
    for _ in range(6):
        engine.step()
    requests += [add_request(scheduler, f"again {i}", [*shared, i], 30) for i in range(2)]
    engine.run()
    for request in requests:
        check_result(request)
        assert request.finish_reason == "length"
    assert scheduler.counts.num_accepted_draft_tokens > 20
    assert sum(len(output.moved_keys) for output in engine.outputs) > 5
    assert scheduler.num_preemptions > 0 or num_blocks > 12


def test_keys_that_are_still_to_be_moved_are_not_published() -> None:
    """The step that moves them breaks: nobody may find them afterwards."""
    scheduler = make_scheduler(40, source=FakeTrees(9, 5), prefix_caching=True)
    engine = FakeEngine(scheduler)
    request = add_request(scheduler, "a", 6, 40)
    broken = 0
    while scheduler.has_unfinished_requests():
        engine.step()
        if scheduler.running_set.moved_keys and broken < 3:
            engine.launch()
            engine.fail_steps("the reason")
            other = add_request(scheduler, f"after {broken}", request.prompt_token_ids + request.output_token_ids, 5)
            broken += 1
    assert broken == 3
    check_result(other)
