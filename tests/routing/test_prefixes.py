"""Digests of prompts are those of a prefix cache's keys, and what was used last is kept."""

from compiled_llm.routing.prefixes import Recent, prefix_digests
from compiled_llm.scheduling.block_pool import BlockPool
from tests.fake_engine import cache_over, make_request


def test_a_prompt_has_the_digests_of_the_blocks_that_a_prefix_cache_may_find() -> None:
    size = 4
    for length in range(1, 14):
        request = make_request("a", length, 1, cache_salt="s", adapter="b")
        cache = cache_over(BlockPool(8), size)
        cache.find(request)
        found = prefix_digests(request.prompt_token_ids, size, "s", "b")
        assert found == request.block_digests
        assert len(found) == (length - 1) // size


def test_digests_depend_on_all_that_comes_before_and_on_the_facts() -> None:
    tokens = list(range(20))
    digests = prefix_digests(tokens, 4)
    assert prefix_digests([9, *tokens[1:]], 4)[-1] != digests[-1]
    assert prefix_digests([*tokens[:8], 0, *tokens[9:]], 4)[:2] == digests[:2]
    assert not {*digests} & {*prefix_digests(tokens, 4, "salt")}
    assert not {*prefix_digests(tokens, 4, "ab", "")} & {*prefix_digests(tokens, 4, "a", "b")}


def test_the_least_recently_used_goes_and_of_a_prompt_its_end() -> None:
    recent = Recent(4)
    recent.use(["a1", "a2"])
    recent.use(["b1", "b2"])
    assert [recent.num_first(names) for names in (["a1", "a2"], ["b1", "c"], ["c", "b1"], [])] == [2, 1, 0, 0]
    recent.use(["a1", "c"])  # of a, the end is the oldest
    assert ["a2" in recent, "a1" in recent, "b2" in recent, "c" in recent, len(recent)] == [False, True, True, True, 4]
    recent.use(["d"])
    assert ["b2" in recent, "b1" in recent] == [False, True]
    recent.use(list(range(9)))
    assert recent.num_first(range(9)) == 4, "of one that is too long, its start"
    nothing = Recent(0)
    nothing.use([1])
    assert len(nothing) == 0
