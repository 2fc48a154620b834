"""What is stored of responses: its bounds in number, bytes and age."""

import pytest

from compiled_llm.server.response_store import ResponseStore, Stored


def stored(text: str) -> Stored:
    return Stored({"text": text}, [text])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_kept() -> None:
    store = ResponseStore(2, 10**6, 10)
    for name in "abc":
        store.put(name, stored(name))
    assert [store.get(name) for name in "abc"] == [None, stored("b"), stored("c")]
    store.put("b", stored("new"))
    store.put("d", stored("d"))
    assert (store.get("b"), store.get("c")) == (stored("new"), None), "what was put again is new"
    assert (store.delete("b"), store.delete("b"), len(store)) == (True, False, 1)


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 1000, 10)
    for name in "abcd":
        store.put(name, stored("x" * 150))
        assert store.num_bytes <= 1000
    assert [store.get(name) is None for name in "abcd"] == [True, False, False, False]
    store.put("e", stored("x" * 2000))
    assert (store.get("e"), len(store), store.num_bytes) == (None, 0, 0)


def test_what_is_old_is_dropped() -> None:
    clock = Clock()
    store = ResponseStore(100, 10**6, 10, clock)
    store.put("a", stored("a"))
    clock.now = 6
    store.put("b", stored("b"))
    clock.now = 11
    assert [store.get(name) is None for name in "ab"] == [True, False]
    clock.now = 16
    assert not store.delete("b")
    assert store.num_bytes == 0


@pytest.mark.parametrize("bounds", [(0, 100, 10), (10, 0, 10)])
def test_none_is_stored(bounds: tuple[int, int, int]) -> None:
    store = ResponseStore(*bounds)
    store.put("a", stored("a"))
    assert (store.get("a"), len(store), store.num_bytes) == (None, 0, 0)
