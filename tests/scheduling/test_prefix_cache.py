"""PrefixCache: what is found, promised, published and waited for. No scheduler: a test moves requests itself."""

import hashlib

import pytest

from compiled_llm.scheduling.block_pool import BlockPool, block_digest, root_digest
from compiled_llm.scheduling.prefix_cache import PrefixCache
from compiled_llm.scheduling.request import Request
from tests.fake_engine import cache_over, make_request

SIZE = 4


def make_cache(num_blocks: int = 40, **arguments) -> PrefixCache:
    return cache_over(BlockPool(num_blocks), SIZE, **arguments)


def admit(cache: PrefixCache, request: Request) -> int:
    """Give ``request`` blocks for all its tokens, as the scheduler does; returns how many of them were found."""
    shared, awaited = cache.find(request)
    assert awaited is None
    for block in shared:
        cache.pool.share(block)
    blocks = cache.pool.allocate(-(-request.num_tokens // SIZE) - len(shared))
    assert blocks is not None
    request.block_ids = shared + blocks
    request.num_published_blocks = next((i for i, b in enumerate(shared) if cache.pool.digest(b) is None), len(shared))
    request.num_computed_tokens = len(shared) * SIZE
    cache.add_pending(request)
    return len(shared)


def compute(cache: PrefixCache, request: Request, num_tokens: int) -> list[Request]:
    """A step computes the tokens up to ``num_tokens``; returns who is woken."""
    start, request.num_computed_tokens = request.num_computed_tokens, num_tokens
    woken = cache.take_waiting(request, start)
    return woken + cache.publish(request, num_tokens)


def release(cache: PrefixCache, request: Request) -> list[Request]:
    woken = cache.remove_pending(request)
    cache.pool.free(request.block_ids)
    request.block_ids, request.num_published_blocks = [], 0
    return woken


PROMPT = list(range(100, 118))  # four full blocks and two tokens


def prompt_of(name: str, tokens: list[int] = PROMPT, cache_salt: str = "") -> Request:
    return make_request(name, list(tokens), 10, cache_salt=cache_salt)


@pytest.fixture
def cache() -> PrefixCache:
    return make_cache()


def test_full_computed_blocks_are_found_after_they_are_published(cache: PrefixCache) -> None:
    first = prompt_of("first")
    assert admit(cache, first) == 0
    compute(cache, first, 18)
    assert cache.find(prompt_of("second")) == (first.block_ids[:4], None)


def test_they_are_found_when_nobody_uses_them_any_more(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 18)
    table = first.block_ids
    release(cache, first)
    assert cache.find(prompt_of("second")) == (table[:4], None)


def test_as_far_as_the_tokens_are_the_same(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 18)
    for same, num_found in [(0, 0), (3, 0), (4, 1), (11, 2), (16, 4), (17, 4)]:
        other = prompt_of("other", [*PROMPT[:same], *[7] * (30 - same)])
        assert cache.find(other) == (first.block_ids[:num_found], None)


def test_a_block_behind_a_different_one_is_not_found(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 18)
    assert cache.find(prompt_of("other", [7, *PROMPT[1:]])) == ([], None)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 16])
def test_never_all_tokens_are_found(cache: PrefixCache, num_tokens: int) -> None:
    """The last one has to be computed for its logits."""
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 18)
    blocks, _ = cache.find(prompt_of("other", PROMPT[:num_tokens]))
    assert len(blocks) == (num_tokens - 1) // SIZE


def test_output_tokens_are_found_like_those_of_a_prompt(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 18)
    first.output_token_ids += [1, 2, 3]
    first.num_tokens += 3
    compute(cache, first, 20)
    blocks, _ = cache.find(prompt_of("turn two", [*PROMPT, 1, 2, 3, 50, 51]))
    assert blocks == first.block_ids[:5]


def test_a_salt_keeps_requests_apart(cache: PrefixCache) -> None:
    first = prompt_of("first", cache_salt="alice")
    admit(cache, first)
    compute(cache, first, 18)
    assert cache.find(prompt_of("same", cache_salt="alice"))[0] == first.block_ids[:4]
    for salt in ("", "bob"):
        assert cache.find(prompt_of(f"other {salt}", cache_salt=salt)) == ([], None)


def test_the_facts_are_in_every_digest() -> None:
    """One pool, as if the model was exchanged under it."""
    pool = BlockPool(20)
    one, other = (cache_over(pool, SIZE, facts=("model", dtype)) for dtype in ("bf16", "int8"))
    first = prompt_of("first")
    admit(one, first)
    compute(one, first, 18)
    assert first.block_digests[0] == block_digest(root_digest("model", "bf16", ""), PROMPT[:4])
    assert first.block_digests[1] == block_digest(first.block_digests[0], PROMPT[4:8])
    assert len(one.find(prompt_of("second"))[0]) == 4
    assert other.find(prompt_of("third")) == ([], None)


def test_what_is_promised_is_waited_for_up_to_the_last_common_block(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second", [*PROMPT[:12], *[7] * 8])
    admit(cache, first)
    assert cache.find(second) == ([], first.block_digests[2])


def test_a_block_that_a_step_fills_may_be_read_in_that_step(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second")
    admit(cache, first)
    first.num_computed_tokens = 9  # scheduled, not yet published: two blocks, and a piece of the third
    assert cache.find(second) == (first.block_ids[:2], first.block_digests[3])
    first.num_computed_tokens = 18
    assert cache.find(second) == (first.block_ids[:4], None)


def test_who_waits_is_woken_when_a_step_fills_the_block(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second")
    admit(cache, first)
    _, awaited = cache.find(second)
    assert awaited is not None
    cache.hold_back(second, awaited)
    assert (cache.num_held_back, cache.held_back()) == (1, [second])
    cache.check_invariants([first])
    assert compute(cache, first, 15) == []
    assert compute(cache, first, 16) == [second]
    assert cache.num_held_back == 0
    assert admit(cache, second) == 4
    assert second.num_published_blocks == 4


def test_who_waits_is_woken_when_the_promise_is_withdrawn(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second")
    admit(cache, first)
    compute(cache, first, 9)
    _, awaited = cache.find(second)
    assert awaited is not None
    cache.hold_back(second, awaited)
    assert release(cache, first) == [second]
    assert admit(cache, second) == 2, "what was published stays"
    cache.check_invariants([second])


def test_who_waits_can_be_forgotten(cache: PrefixCache) -> None:
    first, second, third = prompt_of("first"), prompt_of("second"), prompt_of("third")
    admit(cache, first)
    for request in (second, third):
        _, awaited = cache.find(request)
        assert awaited is not None
        cache.hold_back(request, awaited)
    cache.forget(second)
    assert compute(cache, first, 18) == [third]
    with pytest.raises(KeyError):
        cache.forget(second)


def test_a_promise_is_made_once(cache: PrefixCache) -> None:
    """The second is admitted without the first's blocks, as after a swap; its own promises begin behind theirs."""
    first, second = prompt_of("first", PROMPT[:8]), prompt_of("second", PROMPT)
    admit(cache, first)
    second.block_ids = cache.pool.allocate(5) or []
    cache.add_pending(second)
    third = prompt_of("third")
    _, awaited = cache.find(third)
    assert awaited == second.block_digests[3]
    release(cache, first)
    assert cache.find(third) == ([], None), "the first block is promised no more"
    cache.check_invariants([second])


def test_a_block_computed_twice_is_exchanged_for_the_earlier_one(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second")
    admit(cache, first)
    second.block_ids = cache.pool.allocate(5) or []
    own, free = list(second.block_ids), cache.pool.num_free
    second.num_sent_blocks = 5
    compute(cache, first, 18)
    compute(cache, second, 9)
    assert second.block_ids == first.block_ids[:2] + own[2:]
    assert second.num_sent_blocks == 0, "the runner has to learn of it"
    assert cache.pool.num_free == free + 2
    cache.pool.check_invariants([first.block_ids, second.block_ids])


def test_a_child_stays_no_longer_than_its_parent() -> None:
    """Both requests have a block of the same beginning, computed twice; the child hangs on the one that is found."""
    cache = make_cache(8)
    first, second = prompt_of("first", PROMPT[:5]), prompt_of("second", PROMPT[:9])
    admit(cache, first)
    second.block_ids = cache.pool.allocate(3) or []
    compute(cache, first, 5)
    compute(cache, second, 9)
    release(cache, first)
    release(cache, second)
    parent, child = second.block_digests[:2]
    cache.pool.allocate(7)
    assert cache.pool.lookup(parent) is not None
    assert cache.pool.lookup(child) is None


def test_only_new_full_blocks_are_published(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    compute(cache, first, 7)
    assert [cache.pool.digest(block) is not None for block in first.block_ids] == [True, False, False, False, False]
    assert first.num_published_blocks == 1
    assert cache.publish(first, 3) == [], "what is published stays so"
    assert first.num_published_blocks == 1


def test_switched_off_it_finds_and_keeps_nothing() -> None:
    cache = make_cache(enabled=False)
    first = prompt_of("first")
    assert admit(cache, first) == 0
    assert compute(cache, first, 18) == []
    assert cache.find(prompt_of("second")) == ([], None)
    assert first.block_digests == []
    release(cache, first)
    assert cache.pool.num_cached == 0


def test_digests_of_a_long_prompt_are_computed_once(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    request = prompt_of("long", list(range(400)))
    cache.find(request)
    monkeypatch.setattr("compiled_llm.scheduling.prefix_cache.block_digest", None)
    assert cache.find(request) == ([], None)
    assert len(request.block_digests) == 99


def test_invariants_see_a_promise_of_one_that_does_not_run(cache: PrefixCache) -> None:
    first = prompt_of("first")
    admit(cache, first)
    cache.check_invariants([first])
    with pytest.raises(AssertionError, match="does not run"):
        cache.check_invariants([])


def test_invariants_see_who_waits_in_vain(cache: PrefixCache) -> None:
    first, second = prompt_of("first"), prompt_of("second")
    admit(cache, first)
    cache.hold_back(second, hashlib.sha256(b"nobody's").digest())
    with pytest.raises(AssertionError, match="not pending"):
        cache.check_invariants([first])
    cache.forget(second)
    cache.hold_back(second, first.block_digests[1])
    cache.check_invariants([first])
    first.num_computed_tokens = 8
    with pytest.raises(AssertionError, match="a block that is there"):
        cache.check_invariants([first])
