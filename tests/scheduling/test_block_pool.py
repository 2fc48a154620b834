"""BlockPool, rule by rule. tests/battery/test_block_pool.py has the random runs against a naive model."""

import hashlib
import struct

import pytest

from compiled_llm.scheduling.block_pool import SINK_BLOCK, BlockPool, block_digest, root_digest


def digest_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cache(pool: BlockPool, *names: str) -> list[int]:
    """Publish a block for each name and free them in this order, so that the first is the least recently used."""
    blocks = take(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, digest_of(name)) == block
    for block in blocks:
        pool.free([block])
    return blocks


def test_all_blocks_but_the_sink_are_handed_out_once() -> None:
    pool = BlockPool(5)
    blocks = take(pool, 3) + take(pool, 2)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert SINK_BLOCK not in blocks
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_no_room_is_an_answer_that_changes_nothing() -> None:
    pool = BlockPool(3)
    cache(pool, "a")
    assert pool.allocate(4) is None
    assert (pool.num_free, pool.num_cached, pool.num_evictions) == (3, 1, 0)
    assert pool.allocate(0) == []
    assert BlockPool(0).allocate(1) is None


def test_a_block_is_free_when_its_last_table_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = take(pool, 1)
    pool.share(block)
    assert pool.num_references(block) == 2
    pool.free([block])
    assert (pool.num_references(block), pool.num_used) == (1, 1)
    pool.free([block])
    assert (pool.num_references(block), pool.num_used) == (0, 0)
    with pytest.raises(AssertionError, match="not in use"):
        pool.free([block])


def test_the_sink_cannot_be_freed() -> None:
    with pytest.raises(AssertionError, match="sink"):
        BlockPool(2).free([SINK_BLOCK])


def test_an_empty_block_cannot_be_shared() -> None:
    with pytest.raises(KeyError):
        BlockPool(2).share(1)


def test_a_published_block_is_found_while_used_and_afterwards() -> None:
    pool = BlockPool(2)
    (block,) = take(pool, 1)
    assert pool.lookup(digest_of("a")) is None
    assert pool.publish(block, digest_of("a")) == block
    assert pool.lookup(digest_of("a")) == block
    pool.free([block])
    assert pool.lookup(digest_of("a")) == block
    assert (pool.num_cached, pool.num_free, pool.num_used) == (1, 2, 0)
    pool.share(block)
    assert (pool.num_cached, pool.num_free, pool.num_used) == (0, 1, 1)


def test_an_unpublished_block_is_empty_when_freed() -> None:
    pool = BlockPool(2)
    pool.free(take(pool, 2))
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_the_least_recently_used_is_evicted_first_and_only_without_empty_blocks() -> None:
    pool = BlockPool(4)
    cache(pool, "a", "b", "c")
    take(pool, 1)
    assert pool.num_evictions == 0, "there was an empty block"
    b = pool.lookup(digest_of("b"))
    assert b is not None
    pool.share(b)  # a use: "b" goes last now
    pool.free([b])
    found = []
    for _ in range(3):
        take(pool, 1)
        found.append([name for name in "abc" if pool.lookup(digest_of(name)) is not None])
    assert found == [["b", "c"], ["b"], []]
    assert pool.num_evictions == 3


def test_children_are_evicted_before_their_parents() -> None:
    pool = BlockPool(3)
    table = take(pool, 3)
    for block, name in zip(table, "abc", strict=True):
        pool.publish(block, digest_of(name))
    pool.free(table)  # one table: "c" chains to "b" chains to "a"
    for left in ("ab", "a", ""):
        take(pool, 1)
        assert [name for name in "abc" if pool.lookup(digest_of(name)) is not None] == list(left)


def test_what_is_used_is_never_evicted() -> None:
    pool = BlockPool(2)
    a, _ = cache(pool, "a", "b")
    pool.share(a)
    assert take(pool, 1) != [a]
    assert pool.allocate(1) is None
    assert pool.lookup(digest_of("a")) == a


def test_of_two_blocks_with_one_digest_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = take(pool, 2)
    assert pool.publish(first, digest_of("a")) == first
    assert pool.publish(second, digest_of("a")) == first
    assert pool.publish(first, digest_of("a")) == first, "again is no fault"
    pool.free([second])
    assert pool.num_cached == 0, "nobody can find the second"
    assert pool.digest(first) == digest_of("a")
    assert pool.digest(second) is None


def test_only_a_used_block_is_published_and_under_one_digest() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="not in use"):
        pool.publish(1, digest_of("a"))
    (block,) = take(pool, 1)
    pool.publish(block, digest_of("a"))
    with pytest.raises(AssertionError, match="something else"):
        pool.publish(block, digest_of("b"))


def test_an_evicted_block_can_be_published_anew() -> None:
    pool = BlockPool(1)
    cache(pool, "a")
    (block,) = take(pool, 1)
    assert pool.publish(block, digest_of("b")) == block
    pool.check_invariants([[block]])


def test_clearing_forgets_what_is_cached_and_leaves_what_is_used() -> None:
    pool = BlockPool(3)
    a, *_ = cache(pool, "a", "b", "c")
    pool.share(a)
    pool.clear_cache()
    assert [pool.lookup(digest_of(name)) for name in "abc"] == [None] * 3
    assert (pool.num_cached, pool.num_used, pool.num_free, pool.num_evictions) == (0, 1, 2, 0)
    pool.check_invariants([[a]])
    pool.free([a])
    assert pool.num_cached == 0


def test_the_peak_counts_blocks_taken_from_the_cache_too() -> None:
    pool = BlockPool(4)
    (a,) = cache(pool, "a")
    pool.free(take(pool, 2))
    assert pool.peak_used == 2
    take(pool, 2)
    pool.share(a)
    assert pool.peak_used == 3


def test_a_digest_is_sha256_over_the_parent_and_the_tokens() -> None:
    root = root_digest("model", "bfloat16")
    expected = hashlib.sha256(struct.pack("<Q5sQ8s", 5, b"model", 8, b"bfloat16")).digest()
    assert root == expected
    assert block_digest(root, [1, 2**40]) == hashlib.sha256(root + struct.pack("<qq", 1, 2**40)).digest()


def test_digests_tell_apart_what_keys_and_values_depend_on() -> None:
    roots = [root_digest(*facts) for facts in ((), ("",), ("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""))]
    digests = [block_digest(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1], [1, 2, 0], [258])]
    assert len(set(roots + digests)) == len(roots) + len(digests)


def planted_leak(pool: BlockPool) -> None:
    take(pool, 1)


def planted_sink(pool: BlockPool) -> None:
    pool._empty.append(SINK_BLOCK)


def planted_twin(pool: BlockPool) -> None:
    pool._empty.append(pool._empty[0])


def planted_loss(pool: BlockPool) -> None:
    pool._empty.pop()


def planted_use_of_a_free_block(pool: BlockPool) -> None:
    pool._empty.append(2)


def planted_return_of_a_cached_block(pool: BlockPool) -> None:
    pool._empty.append(1)


def planted_dead_digest(pool: BlockPool) -> None:
    pool._digest_of[pool._empty[0]] = digest_of("nobody's")


def planted_unfindable(pool: BlockPool) -> None:
    cached = next(iter(pool._cached))
    del pool._block_of[pool._digest_of.pop(cached)]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (planted_leak, "reference counts"),
        (planted_sink, "the sink may be handed out"),
        (planted_twin, "empty twice"),
        (planted_loss, "1 blocks are lost"),
        (planted_use_of_a_free_block, "both used and free"),
        (planted_return_of_a_cached_block, "both empty and cached"),
        (planted_dead_digest, "a digest finds another's"),
        (planted_unfindable, "cannot be found"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_invariants_see(plant, words: str) -> None:
    pool = BlockPool(6)
    assert cache(pool, "a") == [1]
    table = take(pool, 2)
    assert 2 in table
    pool.check_invariants([table])
    plant(pool)
    with pytest.raises(AssertionError, match=words):
        pool.check_invariants([table])


def test_invariants_see_wrong_tables() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 2)
    for tables in ([blocks[:1]], [blocks, blocks[:1]], [], [[*blocks, SINK_BLOCK]], [[blocks[0]] * 2]):
        with pytest.raises(AssertionError):
            pool.check_invariants(tables)
